package store

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"kvstrata/connector"
	"kvstrata/event"
)

// Scheduler is the scheduler's half: it looks up which groups of a prompt the store has, and orders loads and saves.
type Scheduler struct {
	setup     connector.Setup
	cfg       Config
	transport Transport
	backend   Backend // set by SetHandshake
	name      string
	journal   *connector.Journal
	chunks    func(tokens []uint32) ([]event.BlockHash, error) // nil = groups are named by their last blocks

	requests map[string]*request
	building *metadata
	lookups  chan *lookup

	complained atomic.Int64 // Unix nanoseconds
}

// request is what the half knows of one request.
type request struct {
	chunks []event.BlockHash // names of the prompt's groups, where the store has its own
	lookup *lookup
	loaded bool // a load was ordered: what did not come is not asked for again
	saved  int  // groups that were ordered to be saved
	saving int  // saves under way
	ended  bool // it waits for its saves only
}

// lookup asks the store for a run of a prompt's groups. The scheduler's goroutine makes it; another one answers.
type lookup struct {
	from   int // group
	groups []Group
	done   chan struct{}
	found  int // how many groups, from the first on; valid once done
}

// maxLookups bounds the lookups that wait. A prompt that finds no room counts as not there.
const maxLookups = 1024

var _ connector.Scheduler = (*Scheduler)(nil)

// NewScheduler returns the half of a transport.
func NewScheduler(s connector.Setup, t Transport) (*Scheduler, error) {
	cfg, err := t.check(&s)
	if err != nil {
		return nil, err
	}
	half := &Scheduler{
		setup: s, cfg: cfg, transport: t, journal: connector.NewJournal(&s), requests: make(map[string]*request),
		building: new(metadata), lookups: make(chan *lookup, maxLookups),
	}
	if t.Chunks != nil {
		if half.chunks, err = t.Chunks(s); err != nil {
			return nil, err
		}
	}
	return half, nil
}

// SetHandshake opens the store for what the workers registered, which must be the same on every rank.
func (s *Scheduler) SetHandshake(ranks [][]byte) error {
	if len(ranks) != s.setup.Ranks {
		return fmt.Errorf("handshake of %d ranks: want %d", len(ranks), s.setup.Ranks)
	}
	var first handshake
	for i, text := range ranks {
		var h handshake
		if err := json.Unmarshal(text, &h); err != nil || len(h.Compatibility) != sha256.Size {
			return errors.Join(fmt.Errorf("handshake of rank %d: want the compatibility of its cache", i), err)
		}
		if i == 0 {
			first = h
		} else if string(h.Compatibility) != string(first.Compatibility) {
			return fmt.Errorf("handshake of rank %d: its cache is not like that of rank 0", i)
		}
	}
	backend, err := s.transport.Open(Opening{
		Setup: s.setup, Compatibility: [sha256.Size]byte(first.Compatibility), BlockBytes: first.BlockBytes, Describe: first.Describe,
	})
	if err != nil {
		return err
	}
	s.backend, s.name = backend, s.cfg.Name
	if s.name == "" {
		s.name = backend.Name()
	}
	return nil
}

// Run answers lookups until ctx ends, and closes the store.
func (s *Scheduler) Run(ctx context.Context) error {
	var group sync.WaitGroup
	for range s.cfg.Parallel {
		group.Go(func() {
			for {
				select {
				case <-ctx.Done():
					return
				case l := <-s.lookups:
					s.answer(ctx, l)
				}
			}
		})
	}
	<-ctx.Done()
	group.Wait()
	if s.backend == nil {
		return nil
	}
	return s.backend.Close()
}

// answer asks the store: a group is there when every rank's part is.
func (s *Scheduler) answer(ctx context.Context, l *lookup) {
	defer close(l.done)
	ctx, cancel := context.WithTimeout(ctx, time.Duration(s.cfg.LookupTimeout*float64(time.Second)))
	defer cancel()
	found := len(l.groups)
	keys := make([]string, found)
	for rank := range s.setup.Ranks {
		for i := range found {
			l.groups[i].Rank = rank
			keys[i] = s.backend.Key(&l.groups[i])
		}
		n, err := s.backend.Prefix(ctx, keys[:found])
		if err != nil {
			s.complain(err)
			return
		}
		found = n
	}
	l.found = found
}

// complaintEvery is how often the log says that a store does not answer, however many prompts it is asked for.
const complaintEvery = 10 * time.Second

func (s *Scheduler) complain(err error) {
	now, last := time.Now().UnixNano(), s.complained.Load()
	if now-last > int64(complaintEvery) && s.complained.CompareAndSwap(last, now) {
		s.setup.Log.Warn("the store does not answer; what it has is computed instead", "store", s.name, "err", err)
	}
}

// NewRequest begins to follow a request.
func (s *Scheduler) NewRequest(r *connector.Request) {
	st := new(request)
	// Names by tokens say nothing of adapters and salts: such a prompt is not shared.
	if s.chunks != nil && len(r.TokenIDs) > 0 && r.LoRA == "" && r.Salt == "" {
		var err error
		if st.chunks, err = s.chunks(r.TokenIDs[:min(len(r.TokenIDs), r.Prompt)]); err != nil {
			s.setup.Log.Warn("a prompt's groups have no names in the store", "store", s.name, "err", err)
		}
	}
	s.requests[r.ID] = st
}

// named returns how many of a request's groups have names, of so many tokens.
func (s *Scheduler) named(r *connector.Request, st *request, tokens int) int {
	n := min(tokens/(s.cfg.GroupBlocks*s.setup.Model.BlockTokens), len(r.Names)/s.cfg.GroupBlocks)
	if s.chunks != nil {
		n = min(n, len(st.chunks))
	}
	return n
}

// MatchedTokens asks the store, and says so the first time; then it answers with the groups that are there.
func (s *Scheduler) MatchedTokens(r *connector.Request, computed int) connector.Match {
	st := s.requests[r.ID]
	if st == nil || st.loaded || s.backend == nil || !s.setup.Config.Role.Consumes() {
		return connector.Match{}
	}
	size := s.cfg.GroupBlocks * s.setup.Model.BlockTokens
	from, end := computed/size, s.named(r, st, r.Prompt)
	if from >= end {
		return connector.Match{}
	}
	if st.lookup == nil || from < st.lookup.from {
		l := &lookup{from: from, groups: s.groups(r, st, from, end), done: make(chan struct{})}
		select {
		case s.lookups <- l:
			st.lookup = l
			return connector.Match{Later: true}
		default:
			return connector.Match{}
		}
	}
	select {
	case <-st.lookup.done:
	default:
		return connector.Match{Later: true}
	}
	n := (st.lookup.from+st.lookup.found)*size - computed
	if n <= 0 {
		return connector.Match{}
	}
	return connector.Match{Tokens: n, Async: true}
}

// groups returns a request's groups.
func (s *Scheduler) groups(r *connector.Request, st *request, from, end int) []Group {
	groups := make([]Group, end-from)
	for i := range groups {
		first := (from + i) * s.cfg.GroupBlocks
		g := &groups[i]
		if s.chunks != nil {
			g.Chunk = st.chunks[from+i]
		}
		g.Blocks, g.LoRA = r.Names[first:first+s.cfg.GroupBlocks:first+s.cfg.GroupBlocks], r.LoRA
		if first > 0 {
			g.HasParent, g.Parent = true, r.Names[first-1]
		}
	}
	return groups
}

// UpdateAfterAlloc orders the load of whole groups; blocks of them that are there already are left alone.
func (s *Scheduler) UpdateAfterAlloc(r *connector.Request, blocks []int, computed, external int) {
	st := s.requests[r.ID]
	if st == nil || external == 0 {
		return
	}
	st.loaded = true
	n, tokens := s.cfg.GroupBlocks, s.setup.Model.BlockTokens
	from, end := computed/tokens/n, (computed+external)/tokens/n
	o := order{request: r.ID, first: from * n, groups: s.groups(r, st, from, end), blocks: append([]int(nil), blocks[from*n:end*n]...)}
	there := computed/tokens - o.first
	for i := range there {
		o.blocks[i] = connector.Discard
	}
	s.building.loads = append(s.building.loads, o)
	s.journal.Loading(connector.Run{
		Request: r.ID, First: o.first + there, Blocks: len(o.blocks) - there, Names: r.Names[o.first+there : end*n],
		Local: o.blocks[there:], LoRA: r.LoRA, Away: event.Storage,
	})
}

// BuildMetadata orders that groups are saved which this step fills.
func (s *Scheduler) BuildMetadata(step *connector.Step) connector.Metadata {
	if s.setup.Config.Role.Produces() && s.backend != nil {
		size := s.cfg.GroupBlocks * s.setup.Model.BlockTokens
		for i := range step.Scheduled {
			sc := &step.Scheduled[i]
			if st := s.requests[sc.Request.ID]; st != nil && sc.Computed/size > st.saved {
				s.save(sc, st, s.named(sc.Request, st, sc.Computed))
			}
		}
	}
	if s.building.Empty() {
		return connector.Nothing{}
	}
	m := s.building
	s.building = new(metadata)
	return m
}

// save orders the groups of a request up to one.
func (s *Scheduler) save(sc *connector.Scheduled, st *request, end int) {
	if end <= st.saved {
		return
	}
	r, n := sc.Request, s.cfg.GroupBlocks
	o := order{
		request: r.ID, first: st.saved * n, groups: s.groups(r, st, st.saved, end), blocks: append([]int(nil), sc.Blocks[st.saved*n:end*n]...),
	}
	s.building.saves = append(s.building.saves, o)
	run := connector.Run{
		Request: r.ID, First: o.first, Blocks: len(o.blocks), Names: r.Names[o.first : end*n], LoRA: r.LoRA, Away: event.Storage, Store: s.name,
	}
	if g := &o.groups[0]; g.HasParent {
		run.Parent = &g.Parent
	}
	s.journal.Saving(run)
	st.saving++
	st.saved = end
}

// UpdateOutput notes which saves have ended.
func (s *Scheduler) UpdateOutput(o *connector.Output) {
	for _, id := range s.journal.Update(o) {
		if st := s.requests[id]; st != nil {
			st.saving--
		}
	}
	for _, ids := range [][]string{o.FinishedSending, o.FinishedReceiving} {
		for _, id := range ids {
			if st := s.requests[id]; st != nil && st.ended {
				delete(s.requests, id)
			}
		}
	}
}

// RequestFinished keeps the blocks while they are being saved or loaded.
func (s *Scheduler) RequestFinished(r *connector.Request, _ []int, _ connector.End) (delay bool, params *connector.Params) {
	st := s.requests[r.ID]
	switch {
	case st == nil:
		return false, nil
	case s.journal.IsLoading(r.ID):
		s.building.cancels = append(s.building.cancels, r.ID)
	case st.saving > 0:
		s.building.finished = append(s.building.finished, r.ID)
	default:
		delete(s.requests, r.ID)
		return false, nil
	}
	st.ended = true
	return true, nil
}

// Pending reports whether the workers are to be told something, or have something under way.
func (s *Scheduler) Pending() bool { return !s.building.Empty() || s.journal.Pending() > 0 }

// TakeEvents returns the STORED and LOADED events since the last call.
func (s *Scheduler) TakeEvents() []event.Event { return s.journal.TakeEvents() }

// TakeRecords returns the records since the last call.
func (s *Scheduler) TakeRecords() []event.Transfer { return s.journal.TakeRecords() }

// FinishedCount returns 0: every rank reports.
func (s *Scheduler) FinishedCount() int { return 0 }

// Reset returns true: what the store holds stays right when the engine's cache is reset.
func (s *Scheduler) Reset() bool { return true }
