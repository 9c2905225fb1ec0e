package carry

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sync"

	"kvstrata/connector"
	"kvstrata/connector/encoder"
	"kvstrata/event"
)

// Scheduler is the scheduler's half: it looks up which items of a request others have, and orders loads.
type Scheduler struct {
	setup         encoder.Setup
	cfg           Config
	transport     Transport
	carrier       Carrier
	compatibility [sha256.Size]byte
	place         encoder.Place // of this engine's items, when shares
	shares        bool

	requests map[string]*request
	ended    int                 // of the requests, those that wait for what is under way
	held     map[string]struct{} // items that peers can get from this engine, by hash
	journal  *journal
	building *metadata
	lookups  chan *lookup
}

// request is what the half knows of one request.
type request struct {
	of      *encoder.Request
	lookup  *lookup
	answers []encoder.Presence // the last ones, by item
	ordered []bool             // items that have room in the engine's cache
	busy    []string           // hashes that its end waits for
	ended   bool
}

// lookup asks for a request's items. The scheduler's goroutine makes it; another one answers.
type lookup struct {
	wants []Want // of the valid items
	at    []int  // of each item among wants; -1 = it is not valid
	done  chan struct{}
}

// maxLookups bounds the lookups that wait. A request that finds no room has nothing, as far as it is told.
const maxLookups = 1024

var _ encoder.Scheduler = (*Scheduler)(nil)

// NewScheduler returns the half of a transport.
func NewScheduler(s encoder.Setup, t Transport) (*Scheduler, error) {
	cfg, err := configure(&s, &t)
	if err != nil {
		return nil, err
	}
	h := &Scheduler{
		setup: s, cfg: cfg, transport: t, compatibility: s.Model.Compatibility(), requests: make(map[string]*request),
		held: make(map[string]struct{}), journal: newJournal(&s, t.Away), building: new(metadata), lookups: make(chan *lookup, maxLookups),
	}
	h.carrier, err = t.Open(Opening{Setup: s, Compatibility: h.compatibility})
	if err != nil {
		return nil, err
	}
	return h, nil
}

// SetHandshake learns where peers get this engine's items.
func (s *Scheduler) SetHandshake(ranks [][]byte) error {
	if len(ranks) != s.setup.Ranks {
		return fmt.Errorf("handshake of %d ranks: want %d", len(ranks), s.setup.Ranks)
	}
	for i, text := range ranks {
		var h handshake
		if err := json.Unmarshal(text, &h); err != nil {
			return fmt.Errorf("handshake of rank %d: %w", i, err)
		}
		if string(h.Compatibility) != string(s.compatibility[:]) {
			return fmt.Errorf("handshake of rank %d: its encoder cache is not like this half's", i)
		}
		if h.Address == "" {
			continue
		}
		place, err := encoder.PlaceAt(h.Address, s.setup.Config.EngineID)
		if err != nil {
			return fmt.Errorf("handshake of rank %d: %w", i, err)
		}
		s.place, s.shares = place, true
	}
	return nil
}

// Run answers lookups until ctx ends.
func (s *Scheduler) Run(ctx context.Context) error {
	return serve(ctx, s.carrier, func(ctx context.Context) {
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
		group.Wait()
	})
}

func (s *Scheduler) answer(ctx context.Context, l *lookup) {
	defer close(l.done)
	ctx, cancel := context.WithTimeout(ctx, seconds(s.cfg.LookupTimeout))
	defer cancel()
	if err := s.carrier.Find(ctx, l.wants); err != nil {
		s.setup.Log.Warn("a lookup of encoder outputs is not answered wholly; what was not found is computed", "carrier", s.carrier.Name(), "err", err)
	}
}

// follow returns what is known of a request.
func (s *Scheduler) follow(r *encoder.Request) *request {
	st := s.requests[r.ID]
	if st == nil || st.of != r {
		if st != nil && st.ended {
			s.ended--
		}
		st = &request{of: r, answers: make([]encoder.Presence, len(r.Items)), ordered: make([]bool, len(r.Items))}
		s.requests[r.ID] = st
	}
	return st
}

// HasItem asks for all items of the request the first time, and says so; then it answers with what was found.
func (s *Scheduler) HasItem(r *encoder.Request, index int) encoder.Presence {
	if !s.setup.Config.Role.Consumes() || index < 0 || index >= len(r.Items) {
		return encoder.Absent
	}
	st := s.follow(r)
	if st.ordered[index] {
		return encoder.Absent
	}
	st.answers[index] = s.lookUp(st, index)
	return st.answers[index]
}

func (s *Scheduler) lookUp(st *request, index int) encoder.Presence {
	if st.lookup == nil {
		l := newLookup(st.of)
		select {
		case s.lookups <- l:
			st.lookup = l
		default:
			return encoder.Absent
		}
	}
	at := st.lookup.at[index]
	if at < 0 {
		return encoder.Absent
	}
	select {
	case <-st.lookup.done:
	default:
		return encoder.Later
	}
	if st.lookup.wants[at].Found {
		return encoder.Present
	}
	return encoder.Absent
}

func newLookup(r *encoder.Request) *lookup {
	l := &lookup{done: make(chan struct{})}
	for _, item := range r.Items {
		if item.Validate() != nil {
			l.at = append(l.at, -1)
			continue
		}
		l.at = append(l.at, len(l.wants))
		w := Want{Item: item}
		if place, ok := r.Params[item.Hash]; ok {
			w.From = []encoder.Place{place}
		}
		l.wants = append(l.wants, w)
	}
	return l
}

// UpdateStateAfterAlloc orders a load of what was found. Two requests that load one item load it once.
func (s *Scheduler) UpdateStateAfterAlloc(r *encoder.Request, index int) {
	if index < 0 || index >= len(r.Items) {
		return
	}
	st, item := s.follow(r), r.Items[index]
	st.ordered[index] = true
	switch {
	case st.answers[index] == encoder.Present:
		st.answers[index] = encoder.Absent // what does not come is computed
		if s.journal.begin(s.journal.loads, item, r.ID) {
			s.building.loads = append(s.building.loads, st.lookup.wants[st.lookup.at[index]])
		} else { // a load that was about to be cancelled is wanted again
			s.building.cancels = slices.DeleteFunc(s.building.cancels, func(hash string) bool { return hash == item.Hash })
		}
	case s.setup.Config.Role.Produces():
		s.journal.begin(s.journal.saves, item, r.ID)
	}
}

// BuildMetadata orders what has come together, and tells what is freed.
func (s *Scheduler) BuildMetadata(step *encoder.Step) connector.Metadata {
	for _, hash := range step.Freed {
		delete(s.held, hash)
	}
	s.building.freed = append(s.building.freed, step.Freed...)
	if s.building.Empty() {
		return connector.Nothing{}
	}
	m := s.building
	s.building = new(metadata)
	return m
}

// UpdateOutput notes which loads and saves have ended.
func (s *Scheduler) UpdateOutput(o *connector.Output) {
	if report, ok := o.Metadata.(*connector.Report); ok {
		for i := range report.Done {
			d := &report.Done[i]
			if d.Op != connector.Save {
				s.journal.loading(d)
				continue
			}
			s.journal.saved(d)
			if s.shares && d.Err == nil {
				s.held[d.Request] = struct{}{}
			}
		}
	}
	for _, hash := range o.FinishedReceiving {
		s.journal.loaded(hash, slices.Contains(o.FailedReceiving, hash))
	}
	for _, id := range o.FinishedSending {
		st := s.requests[id]
		if st == nil || !st.ended {
			continue
		}
		for _, hash := range st.busy { // of those that the engine never saved
			s.journal.leave(s.journal.saves, hash, id)
		}
		delete(s.requests, id)
		s.ended--
	}
}

// RequestFinished hands over what peers can get here, and keeps the items that are being loaded or saved.
func (s *Scheduler) RequestFinished(r *encoder.Request) (delay bool, params encoder.Params) {
	params = s.params(r)
	st := s.requests[r.ID]
	if st == nil || st.of != r {
		return false, params
	}
	for i, item := range r.Items {
		if !st.ordered[i] || slices.Contains(st.busy, item.Hash) {
			continue
		}
		if s.journal.isOf(s.journal.loads, item.Hash, r.ID) {
			if s.journal.leave(s.journal.loads, item.Hash, r.ID) {
				s.building.cancels = append(s.building.cancels, item.Hash)
			}
			st.busy = append(st.busy, item.Hash)
		} else if s.journal.isOf(s.journal.saves, item.Hash, r.ID) {
			st.busy = append(st.busy, item.Hash)
		}
	}
	if len(st.busy) == 0 {
		delete(s.requests, r.ID)
		return false, params
	}
	st.ended = true
	s.ended++
	s.building.ends = append(s.building.ends, end{r.ID, st.busy})
	return true, params
}

// params returns where the request's items are; nil where peers do not come to this engine.
func (s *Scheduler) params(r *encoder.Request) encoder.Params {
	if !s.shares {
		return nil
	}
	var params encoder.Params
	for _, item := range r.Items {
		_, held := s.held[item.Hash]
		if !held && s.journal.saves[item.Hash] == nil {
			continue
		}
		if params == nil {
			params = make(encoder.Params)
		}
		params[item.Hash] = s.place
	}
	return params
}

// Pending reports whether the workers are to be told something, or have something under way.
func (s *Scheduler) Pending() bool {
	return !s.building.Empty() || len(s.journal.loads) > 0 || s.ended > 0
}

// TakeRecords returns the records since the last call.
func (s *Scheduler) TakeRecords() []event.Transfer { return s.journal.take() }

// errNoRoom is of transfers beyond what may wait.
var errNoRoom = errors.New("too many transfers wait")
