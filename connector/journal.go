package connector

import (
	"iter"
	"slices"

	"kvstrata/event"
)

// Journal is what a scheduler's half notes down of transfers until they are told: LOADED and STORED events, and records.
// It knows no clock: whoever publishes stamps. One goroutine uses it.
type Journal struct {
	transport string
	ranks     int
	tier      event.Tier // of the engine's blocks
	block     uint32     // tokens a block

	loads   map[string]*passage
	saves   map[save]*passage
	expired map[string]int // ranks whose lease has ended, by request
	events  []event.Event
	records []event.Transfer
}

// save names one saved run of a request's blocks.
type save struct {
	request string
	first   int
}

// passage is one load or save under way.
type passage struct {
	run     Run
	ranks   int // that have reported
	sum     Transfer
	peer    string
	failure string           // the first one told
	bad     map[int]struct{} // of the run's blocks, counted from its first
}

// Run is a run of one request's blocks that is moved.
type Run struct {
	Request string
	First   int    // of the request's blocks
	Blocks  int    // how many, one that is not full included
	Names   []Name // of the full ones among them, in order
	Local   []int  // of a load: the engine's blocks, in order
	Parent  *Name  // of a save: the block before them; nil = none
	LoRA    string
	Away    event.Tier // the tier at the other end
	Store   string     // of a save: the store's name
}

// NewJournal returns an empty journal of one engine.
func NewJournal(s *Setup) *Journal {
	return &Journal{
		transport: s.Config.Connector, ranks: s.Ranks, tier: s.Tier, block: uint32(s.Model.BlockTokens),
		loads: make(map[string]*passage), saves: make(map[save]*passage),
		expired: make(map[string]int),
	}
}

// Loading notes that a request's load is under way: it ends with the request in FinishedReceiving.
func (j *Journal) Loading(r Run) { j.loads[r.Request] = &passage{run: r} }

// Saving notes that a run of blocks is being saved: it ends when every rank has reported it.
func (j *Journal) Saving(r Run) { j.saves[save{r.Request, r.First}] = &passage{run: r} }

// IsLoading reports whether a request's load is under way.
func (j *Journal) IsLoading(request string) bool { return j.loads[request] != nil }

// Pending returns how many loads and saves are under way.
func (j *Journal) Pending() int { return len(j.loads) + len(j.saves) }

// Update notes what the workers did in a step. It returns the requests of the saves that have ended, one entry each.
func (j *Journal) Update(o *Output) (saved []string) {
	if report, ok := o.Metadata.(*Report); ok {
		for i := range report.Done {
			saved = j.done(&report.Done[i], saved)
		}
		for _, request := range report.Expired {
			j.expired[request]++
		}
	}
	for _, request := range o.FinishedSending { // each rank had a lease of its own
		if n := j.expired[request]; n > 0 {
			delete(j.expired, request)
			j.record(event.Transfer{Kind: event.LeaseExpired, Request: request, From: j.tier, Ranks: uint32(n)})
		}
	}
	for _, block := range o.InvalidBlocks {
		for _, p := range j.loads {
			if i := slices.Index(p.run.Local, block); i >= 0 {
				p.spoil([]int{i})
			}
		}
	}
	for _, request := range o.FinishedReceiving {
		if p := j.loads[request]; p != nil {
			delete(j.loads, request)
			j.loaded(p)
		}
	}
	return saved
}

// done adds one rank's report.
func (j *Journal) done(d *Done, saved []string) []string {
	p := j.loads[d.Request]
	if d.Op == Save {
		p = j.saves[save{d.Request, d.First}]
	}
	if p == nil {
		return saved
	}
	p.ranks++
	p.sum.Bytes += d.Bytes
	p.sum.Descriptors += d.Descriptors
	p.sum.Duration, p.sum.Post = max(p.sum.Duration, d.Duration), max(p.sum.Post, d.Post)
	p.peer = d.Peer
	if d.Err != nil && p.failure == "" {
		p.failure = d.Err.Error()
	}
	p.spoil(d.Bad)
	if d.Op == Save && p.ranks >= j.ranks {
		delete(j.saves, save{d.Request, d.First})
		j.saved(p)
		return append(saved, d.Request)
	}
	return saved
}

// spoil notes which of a run's blocks were not moved.
func (p *passage) spoil(blocks []int) {
	for _, i := range blocks {
		if p.bad == nil {
			p.bad = make(map[int]struct{})
		}
		p.bad[i] = struct{}{}
	}
}

// loaded tells of a load that has ended.
func (j *Journal) loaded(p *passage) {
	r := &p.run
	j.outcome(p, event.TransferLoaded, r.Away, j.tier)
	good := uint64(r.Blocks - len(p.bad))
	for from, to := range p.goodRuns() {
		ev := j.event(event.Loaded, r, r.Names[from:to], j.tier)
		ev.Load = event.Load{From: r.Away, Peer: p.peer, Request: r.Request, Bytes: p.sum.Bytes, Duration: p.sum.Duration}
		if len(p.bad) > 0 { // its share, where not all came
			ev.Load.Bytes = p.sum.Bytes * uint64(to-from) / good
		}
		j.events = append(j.events, ev)
	}
}

// saved tells of a save that has ended.
func (j *Journal) saved(p *passage) {
	r := &p.run
	j.outcome(p, event.TransferSaved, j.tier, r.Away)
	for from, to := range p.goodRuns() {
		ev := j.event(event.Stored, r, r.Names[from:to], r.Away)
		// The store tells what it holds; what a connector stores there has no effect on its own resident set.
		ev.Locality, ev.Ownership = event.Remote, r.Store
		switch {
		case from > 0:
			ev.HasParent, ev.Parent = true, r.Names[from-1].Hash
		case r.Parent != nil:
			ev.HasParent, ev.Parent = true, r.Parent.Hash
		}
		j.events = append(j.events, ev)
	}
}

// goodRuns yields the runs of full blocks that were moved.
func (p *passage) goodRuns() iter.Seq2[int, int] {
	return func(yield func(from, to int) bool) {
		for from := 0; from < len(p.run.Names); {
			to := from
			for to < len(p.run.Names) && !p.isBad(to) {
				to++
			}
			if to > from && !yield(from, to) {
				return
			}
			from = to + 1
		}
	}
}

func (p *passage) isBad(i int) bool {
	_, bad := p.bad[i]
	return bad
}

// outcome records what was moved, and what was not.
func (j *Journal) outcome(p *passage, kind event.TransferKind, from, to event.Tier) {
	t := event.Transfer{
		Kind: kind, Request: p.run.Request, Peer: p.peer, From: from, To: to, Ranks: uint32(p.ranks), Bytes: p.sum.Bytes,
		Pieces: p.sum.Descriptors, Duration: p.sum.Duration, Post: p.sum.Post, Blocks: uint32(p.run.Blocks - len(p.bad)),
	}
	if t.Bytes > 0 && t.Blocks > 0 { // otherwise nothing was moved, or a store had it
		j.record(t)
	}
	if len(p.bad) > 0 || p.failure != "" {
		t.Kind, t.Blocks, t.Bytes, t.Pieces, t.Reason = event.TransferFailed, uint32(len(p.bad)), 0, 0, p.failure
		j.record(t)
	}
}

func (j *Journal) event(kind event.Kind, r *Run, names []Name, tier event.Tier) event.Event {
	blocks := make([]event.Block, len(names))
	for i, n := range names {
		blocks[i] = event.Block{Hash: n.Hash, Prefix: n.Prefix, Copies: -1, Age: -1}
	}
	return event.Event{
		Kind: kind, Blocks: blocks, Tier: tier, Group: event.NoGroup, BlockSize: j.block, LoRA: r.LoRA, LoRAID: event.NoLoRAID,
	}
}

// maxRecords bounds the records that nobody has taken.
const maxRecords = 1 << 16

func (j *Journal) record(t event.Transfer) {
	if len(j.records) < maxRecords {
		t.Transport = j.transport
		j.records = append(j.records, t)
	}
}

// TakeEvents returns the events since the last call.
func (j *Journal) TakeEvents() []event.Event {
	events := j.events
	j.events = nil
	return events
}

// TakeRecords returns the records since the last call.
func (j *Journal) TakeRecords() []event.Transfer {
	records := j.records
	j.records = nil
	return records
}
