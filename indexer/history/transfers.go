package history

import "kvstrata/event"

// transferRows are rows of transfers.
type transferRows struct {
	recordHeads
	bytes, pieces, duration, post                            []uint64
	blocks, ranks                                            []uint32
	kind, transport, peer, fromTier, toTier, request, reason []string
}

func (r *transferRows) columns() []column {
	return append(
		r.recordHeads.columns(),
		column{"kind", text, r.kind},
		column{"transport", text, r.transport},
		column{"peer", text, r.peer},
		column{"from_tier", text, r.fromTier},
		column{"to_tier", text, r.toTier},
		column{"request", text, r.request},
		column{"blocks", u32, r.blocks},
		column{"ranks", u32, r.ranks},
		column{"bytes", u64, r.bytes},
		column{"pieces", u64, r.pieces},
		column{"duration_us", u64, r.duration},
		column{"post_us", u64, r.post},
		column{"reason", text, r.reason},
	)
}

func (r *transferRows) add(at place, n int, t *event.Transfer) {
	r.recordHeads.add(at, n, &t.Source, t.Time)
	r.kind = append(r.kind, t.Kind.String())
	r.transport = append(r.transport, t.Transport)
	r.peer = append(r.peer, t.Peer)
	r.fromTier = append(r.fromTier, string(t.From))
	r.toTier = append(r.toTier, string(t.To))
	r.request = append(r.request, t.Request)
	r.blocks = append(r.blocks, t.Blocks)
	r.ranks = append(r.ranks, t.Ranks)
	r.bytes = append(r.bytes, t.Bytes)
	r.pieces = append(r.pieces, t.Pieces)
	r.duration = append(r.duration, uint64(max(t.Duration, 0).Microseconds()))
	r.post = append(r.post, uint64(max(t.Post, 0).Microseconds()))
	r.reason = append(r.reason, t.Reason)
}
