package connector

import "kvstrata/event"

// Asked is a scheduler's half that notes what its engine asks of it: how much of each prompt the engine had itself and was
// to load when it began, and how each request ended. One goroutine uses it, as any half.
type Asked struct {
	Scheduler
	blockTokens int
	begun       map[string]*begun // by request, from NewRequest to RequestFinished
	records     event.Records
}

// begun is what is known of a request since it was added.
type begun struct {
	told             bool
	cached, external uint64 // tokens
}

// NewAsked returns the half, noted. A block has so many tokens.
func NewAsked(half Scheduler, blockTokens int) *Asked {
	return &Asked{Scheduler: half, blockTokens: blockTokens, begun: make(map[string]*begun)}
}

// NewRequest notes that a request was added.
func (a *Asked) NewRequest(r *Request) {
	a.begun[r.ID] = new(begun)
	a.Scheduler.NewRequest(r)
}

// UpdateAfterAlloc notes, the first time, what the request begins with: later it has what it computed itself.
func (a *Asked) UpdateAfterAlloc(r *Request, blocks []int, computed, external int) {
	if b := a.begun[r.ID]; b != nil && !b.told {
		b.told, b.cached, b.external = true, uint64(min(computed, r.Prompt)), uint64(external)
		l := event.Lookup{
			Asker: event.AskerConnector, Request: r.ID, Session: r.Session, Tenant: r.Tenant, OneIn: 1, BlockSize: uint32(a.blockTokens),
			Tokens: uint64(r.Prompt), Longest: b.cached + b.external,
		}
		if n := min(len(r.Names), r.Prompt/max(a.blockTokens, 1)); n > 0 {
			l.Prefix = r.Names[n-1].Prefix
		}
		for _, s := range []event.Share{{Tier: event.GPU, Tokens: b.cached}, {Tier: event.External, Tokens: b.external}} {
			if s.Tokens > 0 {
				l.Shares, l.Holders = append(l.Shares, s), 1
			}
		}
		if a.records.Len() < maxRecords {
			a.records.Lookups = append(a.records.Lookups, l)
		}
	}
	a.Scheduler.UpdateAfterAlloc(r, blocks, computed, external)
}

// RequestFinished notes how a request ended.
func (a *Asked) RequestFinished(r *Request, blocks []int, end End) (delay bool, params *Params) {
	if b := a.begun[r.ID]; b != nil {
		delete(a.begun, r.ID)
		if a.records.Len() < maxRecords {
			a.records.Requests = append(a.records.Requests, event.Request{
				Request: r.ID, Session: r.Session, Tenant: r.Tenant, Prompt: uint64(r.Prompt), Output: uint64(max(r.Tokens-r.Prompt, 0)),
				Cached: b.cached, External: b.external, End: end,
			})
		}
	}
	return a.Scheduler.RequestFinished(r, blocks, end)
}

// TakeAll returns all records since the last call, those of the transfers among them, in the connector's name and its engine's, with a time.
func (a *Asked) TakeAll(source event.Source, now event.Time) event.Records {
	all := a.records
	a.records = event.Records{}
	all.Transfers = a.Scheduler.TakeRecords()
	engine := source
	engine.Origin = event.Engine // prompts go to engines
	for i := range all.Transfers {
		all.Transfers[i].Source, all.Transfers[i].Time = source, now
	}
	for i := range all.Lookups {
		all.Lookups[i].Source, all.Lookups[i].Time = engine, now
	}
	for i := range all.Requests {
		all.Requests[i].Source, all.Requests[i].Time = engine, now
	}
	return all
}
