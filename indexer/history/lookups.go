package history

import "kvstrata/event"

// lookupRows are rows of lookups.
type lookupRows struct {
	recordHeads
	asker, request, session, tenant                          []string
	oneIn, blockSize, holders                                []uint32
	tokens, prefix, onGPU, onCPU, onDisk, elsewhere, longest []uint64
}

func (r *lookupRows) columns() []column {
	return append(
		r.recordHeads.columns(),
		column{"asker", text, r.asker},
		column{"request", text, r.request},
		column{"session", text, r.session},
		column{"tenant", text, r.tenant},
		column{"one_in", u32, r.oneIn},
		column{"block_size", u32, r.blockSize},
		column{"tokens", u64, r.tokens},
		column{"prefix", u64, r.prefix},
		column{"gpu_tokens", u64, r.onGPU},
		column{"cpu_tokens", u64, r.onCPU},
		column{"disk_tokens", u64, r.onDisk},
		column{"external_tokens", u64, r.elsewhere},
		column{"holders", u32, r.holders},
		column{"longest", u64, r.longest},
	)
}

func (r *lookupRows) add(at place, n int, l *event.Lookup) {
	r.recordHeads.add(at, n, &l.Source, l.Time)
	r.asker = append(r.asker, l.Asker.String())
	r.request = append(r.request, l.Request)
	r.session = append(r.session, l.Session)
	r.tenant = append(r.tenant, l.Tenant)
	r.oneIn = append(r.oneIn, l.OneIn)
	r.blockSize = append(r.blockSize, l.BlockSize)
	r.tokens = append(r.tokens, l.Tokens)
	r.prefix = append(r.prefix, uint64(l.Prefix))
	var gpu, cpu, disk, external uint64
	for _, s := range l.Shares {
		switch s.Tier {
		case event.GPU:
			gpu += s.Tokens
		case event.CPU:
			cpu += s.Tokens
		case event.Disk:
			disk += s.Tokens
		default:
			external += s.Tokens
		}
	}
	r.onGPU, r.onCPU, r.onDisk, r.elsewhere = append(r.onGPU, gpu), append(r.onCPU, cpu), append(r.onDisk, disk), append(r.elsewhere, external)
	r.holders = append(r.holders, l.Holders)
	r.longest = append(r.longest, l.Longest)
}

// requestRows are rows of requests.
type requestRows struct {
	recordHeads
	request, session, tenant, end    []string
	prompt, output, cached, external []uint64
}

func (r *requestRows) columns() []column {
	return append(
		r.recordHeads.columns(),
		column{"request", text, r.request},
		column{"session", text, r.session},
		column{"tenant", text, r.tenant},
		column{"prompt", u64, r.prompt},
		column{"output", u64, r.output},
		column{"cached", u64, r.cached},
		column{"external", u64, r.external},
		column{"ended", text, r.end},
	)
}

func (r *requestRows) add(at place, n int, q *event.Request) {
	r.recordHeads.add(at, n, &q.Source, q.Time)
	r.request = append(r.request, q.Request)
	r.session = append(r.session, q.Session)
	r.tenant = append(r.tenant, q.Tenant)
	r.prompt = append(r.prompt, q.Prompt)
	r.output = append(r.output, q.Output)
	r.cached = append(r.cached, q.Cached)
	r.external = append(r.external, q.External)
	r.end = append(r.end, q.End.String())
}
