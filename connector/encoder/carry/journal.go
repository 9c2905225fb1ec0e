package carry

import (
	"slices"

	"kvstrata/connector"
	"kvstrata/connector/encoder"
	"kvstrata/event"
)

// journal is what the scheduler's half notes of loads and saves until they are told. One goroutine uses it.
type journal struct {
	transport    string
	tier, away   event.Tier
	loads, saves map[string]*passage // under way or expected, by hash
	records      []event.Transfer
}

// passage is one item's load or save.
type passage struct {
	item     encoder.Item
	first    string   // the request that it was begun for
	requests []string // that want it still
	sum      connector.Transfer
	ranks    int
	peer     string
	failure  string // the first one told
}

func newJournal(s *encoder.Setup, away event.Tier) *journal {
	j := &journal{
		transport: "encoder/" + s.Config.Connector, tier: s.Tier, away: away, loads: make(map[string]*passage), saves: make(map[string]*passage),
	}
	if j.away == "" {
		j.away = j.tier
	}
	return j
}

// begin adds a request to an item's passage, and reports whether it is a new one.
func (j *journal) begin(in map[string]*passage, item encoder.Item, request string) bool {
	p := in[item.Hash]
	if p != nil {
		if !slices.Contains(p.requests, request) {
			p.requests = append(p.requests, request)
		}
		return false
	}
	in[item.Hash] = &passage{item: item, first: request, requests: []string{request}}
	return true
}

// isOf reports whether a request has part in an item's passage.
func (j *journal) isOf(in map[string]*passage, hash, request string) bool {
	p := in[hash]
	return p != nil && slices.Contains(p.requests, request)
}

// leave takes a request out of a passage, and reports whether nobody is left. A save that nobody is left for was never begun,
// and is forgotten; a load is until it has ended.
func (j *journal) leave(in map[string]*passage, hash, request string) bool {
	p := in[hash]
	if p == nil {
		return false
	}
	p.requests = slices.DeleteFunc(p.requests, func(id string) bool { return id == request })
	if len(p.requests) > 0 {
		return false
	}
	if p == j.saves[hash] {
		delete(j.saves, hash)
	}
	return true
}

// loading adds one rank's report.
func (j *journal) loading(d *connector.Done) {
	if p := j.loads[d.Request]; p != nil {
		p.add(d)
	}
}

func (p *passage) add(d *connector.Done) {
	p.ranks++
	p.sum.Bytes += d.Bytes
	p.sum.Descriptors += d.Descriptors
	p.sum.Duration, p.sum.Post = max(p.sum.Duration, d.Duration), max(p.sum.Post, d.Post)
	if d.Peer != "" {
		p.peer = d.Peer
	}
	if d.Err != nil && p.failure == "" {
		p.failure = d.Err.Error()
	}
}

// loaded tells of a load that has ended in every rank.
func (j *journal) loaded(hash string, failed bool) {
	p := j.loads[hash]
	if p == nil {
		return
	}
	delete(j.loads, hash)
	kind := event.TransferLoaded
	if failed {
		kind = event.TransferFailed
	}
	j.record(p, kind, j.away, j.tier)
}

// saved tells of a save, which one rank does.
func (j *journal) saved(d *connector.Done) {
	p := j.saves[d.Request]
	if p == nil {
		p = &passage{}
	}
	delete(j.saves, d.Request)
	p.add(d)
	switch {
	case d.Err != nil:
		j.record(p, event.TransferFailed, j.tier, j.away)
	case d.Bytes > 0: // otherwise it was there, or is read from where it lies
		j.record(p, event.TransferSaved, j.tier, j.away)
	}
}

// maxRecords bounds the records that nobody has taken; what is beyond is dropped.
const maxRecords = 1 << 16

func (j *journal) record(p *passage, kind event.TransferKind, from, to event.Tier) {
	t := event.Transfer{
		Kind: kind, Transport: j.transport, Request: p.first, Peer: p.peer, From: from, To: to, Ranks: uint32(p.ranks), Bytes: p.sum.Bytes,
		Pieces: p.sum.Descriptors, Duration: p.sum.Duration, Post: p.sum.Post,
	}
	if kind == event.TransferFailed {
		t.Bytes, t.Pieces, t.Reason = 0, 0, p.failure
	}
	if len(j.records) < maxRecords {
		j.records = append(j.records, t)
	}
}

func (j *journal) take() []event.Transfer {
	records := j.records
	j.records = nil
	return records
}
