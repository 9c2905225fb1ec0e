package prefix

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"kvstrata/event"
)

// Bounds of subscriptions.
const (
	maxSubscribers = 64
	maxQueue       = 1 << 16 // changes that wait for one subscriber
	maxTaken       = 4096    // changes that Next returns at once
	listedAtOnce   = 4096    // places that a listing reads at once, while the index stands still
	watchState     = time.Second
)

// ErrFellBehind ends the stream of a subscriber who took changes more slowly than they came.
var ErrFellBehind = errors.New("fell behind: more than 65,536 changes wait; subscribe again")

// ErrFull says that there is no room for another subscriber.
var ErrFull = errors.New("64 subscribers are there, which is the limit; try again later")

// ErrUnknownSource says that nothing was ever told of a source.
var ErrUnknownSource = errors.New("not known")

// ChangeKind says what a change does to a mirror.
type ChangeKind uint8

// The kinds of changes. They stand as numbers in prefixpb.
const (
	Begin      ChangeKind = 1 + iota // forget the source's blocks: what it holds follows
	Held                             // it holds the block
	Listed                           // what it holds was told: the mirror is exact from here on
	Rose                             // the block came, or got its name
	Fell                             // the block's last copy went
	Emptied                          // every block went
	StateIsNew                       // how far the source can be trusted changed
)

var changeNames = []string{
	Begin: "begin", Held: "held", Listed: "listed", Rose: "rose", Fell: "fell", Emptied: "cleared", StateIsNew: "state",
}

func (k ChangeKind) String() string {
	if int(k) < len(changeNames) && k > 0 {
		return changeNames[k]
	}
	return fmt.Sprintf("ChangeKind(%d)", k)
}

// MarshalText writes the kind's name.
func (k ChangeKind) MarshalText() ([]byte, error) { return []byte(k.String()), nil }

// UnmarshalText reads a kind's name.
func (k *ChangeKind) UnmarshalText(text []byte) error {
	for i, name := range changeNames {
		if i > 0 && name == string(text) {
			*k = ChangeKind(i)
			return nil
		}
	}
	return fmt.Errorf("change kind %q: unknown", text)
}

// Change is one change of one source. Block goes with Held, Rose and Fell, State and Reason with Begin and StateIsNew.
type Change struct {
	Kind   ChangeKind
	Source *event.Source // the index's own: not to be written
	Epoch  event.Epoch
	Seq    event.Seq // of the batch that brought it; of Begin, Held, Listed and StateIsNew the last one applied
	Block  ChangedBlock
	State  event.State
	Reason string
}

// ChangedBlock is a block in a tier of a group. Its key in a mirror is (source, hash, group, tier).
type ChangedBlock struct {
	Hash      event.BlockHash
	Prefix    event.PrefixHash // 0 = without a name
	Tier      event.Tier
	Group     uint32
	BlockSize uint32
}

// Subscription is one subscriber's changes. Next is one goroutine's.
type Subscription struct {
	index  *Index
	wants  *watch
	wake   chan struct{} // room for one: something is there
	piece  int           // places that a listing reads at once
	states map[*source]toldState

	mu     sync.Mutex
	queue  []queued
	behind bool

	// The reader's.
	taken    []queued // and not returned yet
	listings []listing
	turns    map[*source]uint32 // how often the listing of a source began
	listed   bool               // the last thing returned came from a listing
	out      []Change
}

// queued is a change as it waits.
type queued struct {
	Change
	source *source
	turn   uint32 // of Listed: of which listing
}

// listing is the part of a source that is still to be told.
type listing struct {
	source *source
	next   uint64 // place
}

// toldState is what a subscriber knows of a source's state.
type toldState struct {
	state         event.State
	reason, doubt string
}

// watchers are those who subscribe. The index's lock guards the list: written under the write lock, read under either.
type watchers struct{ list []*Subscription }

// Subscribe begins a subscription: what is resident comes first, without a gap to the changes behind it. The caller closes it.
func (x *Index) Subscribe(r *WatchRequest) (*Subscription, error) {
	if err := r.Validate(); err != nil {
		return nil, err
	}
	s := &Subscription{
		index: x, wake: make(chan struct{}, 1), piece: listedAtOnce, states: make(map[*source]toldState), turns: make(map[*source]uint32),
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	var err error
	if s.wants, err = x.watch(r); err != nil {
		return nil, err
	}
	w := x.service.watchers
	if w == nil {
		w = new(watchers)
		x.service.watchers = w
	}
	if len(w.list) == maxSubscribers {
		return nil, ErrFull
	}
	w.list = append(w.list, s)
	for _, one := range x.byID {
		if s.wants.source(one) {
			s.begin(x, one)
		}
	}
	return s, nil
}

// Close ends the subscription.
func (s *Subscription) Close() {
	x := s.index
	x.mu.Lock()
	defer x.mu.Unlock()
	w := x.service.watchers
	if w == nil {
		return
	}
	for i, other := range w.list {
		if other == s {
			w.list = append(w.list[:i:i], w.list[i+1:]...)
			break
		}
	}
	if len(w.list) == 0 {
		x.service.watchers = nil
	}
}

// Subscribers returns how many there are.
func (x *Index) Subscribers() int {
	x.mu.RLock()
	defer x.mu.RUnlock()
	if x.service.watchers == nil {
		return 0
	}
	return len(x.service.watchers.list)
}

// moved tells one step of a source's set to those whom it concerns.
func (w *watchers) moved(s *source, m *move) {
	if s.isDead() {
		return // nobody has been told of these blocks
	}
	q := queued{source: s, Change: Change{Source: &s.name, Epoch: s.epoch, Seq: s.story.seq}}
	switch m.kind {
	case emptied:
		q.Kind = Emptied
	case fell:
		q.Kind = Fell
	default:
		q.Kind = Rose
	}
	if m.kind != emptied {
		q.Block = ChangedBlock{Hash: m.Hash, Prefix: m.Prefix, Tier: m.Tier, Group: m.Group.Index(), BlockSize: m.BlockSize}
	}
	for _, sub := range w.list {
		if sub.wants.source(s) && (m.kind == emptied || sub.wants.block(m.Prefix, variant{m.BlockSize, m.Eagle})) {
			sub.push(&q)
		}
	}
}

// begin has a source told anew.
func (w *watchers) begin(x *Index, s *source) {
	for _, sub := range w.list {
		if sub.wants.source(s) {
			sub.begin(x, s)
		}
	}
}

// state tells a source's state where it is another.
func (w *watchers) state(x *Index, s *source) {
	for _, sub := range w.list {
		if sub.wants.source(s) {
			sub.noteState(x, s, StateIsNew)
		}
	}
}

func (s *Subscription) begin(x *Index, of *source) { s.noteState(x, of, Begin) }

// noteState puts a source's state into the queue, as a change of state if it is one, or as the beginning of its story. The caller
// holds the index's lock, if only to read.
func (s *Subscription) noteState(x *Index, of *source, kind ChangeKind) {
	state, reason := x.state(of, x.cfg.Clock())
	now := toldState{state, of.status.Reason, of.doubt}
	q := queued{source: of, Change: Change{Kind: kind, Source: &of.name, State: state, Reason: reason}}
	q.Epoch, q.Seq, _ = of.life()
	s.mu.Lock()
	defer s.mu.Unlock()
	if kind == StateIsNew && s.states[of] == now {
		return
	}
	s.states[of] = now
	s.add(&q)
}

func (s *Subscription) push(q *queued) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.add(q)
}

// add never waits: who takes too little falls behind, and is told so. The caller holds s.mu.
func (s *Subscription) add(q *queued) {
	if s.behind {
		return
	}
	if len(s.queue) == maxQueue {
		s.behind, s.queue = true, nil
	} else {
		s.queue = append(s.queue, *q)
	}
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// Next waits for changes and returns them in order, valid until the next call. It returns ErrFellBehind when too many waited, and
// ctx's error when ctx ends.
func (s *Subscription) Next(ctx context.Context) ([]Change, error) {
	timer := time.NewTimer(watchState)
	defer timer.Stop()
	for {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		// Changes and listings take turns: neither holds up the other, however many changes come.
		if s.listed || len(s.listings) == 0 {
			s.listed = false
			changes, err := s.take()
			if err != nil || len(changes) > 0 {
				return changes, err
			}
		}
		if len(s.listings) > 0 {
			s.listed = true
			if changes := s.list(); len(changes) > 0 {
				return changes, nil
			}
			continue
		}
		select {
		case <-s.wake:
		case <-timer.C:
			s.lookAtStates()
			timer.Reset(watchState)
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// take returns what waits.
func (s *Subscription) take() ([]Change, error) {
	s.mu.Lock()
	if s.behind {
		s.mu.Unlock()
		return nil, ErrFellBehind
	}
	if len(s.taken) == 0 {
		s.taken, s.queue = s.queue, nil
	}
	s.mu.Unlock()
	n := min(len(s.taken), maxTaken)
	s.out = s.out[:0]
	for i := range s.taken[:n] {
		q := &s.taken[i]
		switch {
		case q.Kind == Begin:
			s.turns[q.source]++
			s.startListing(q.source)
		case q.Kind == Listed && q.turn != s.turns[q.source]:
			continue // the source was begun anew meanwhile
		}
		s.out = append(s.out, q.Change)
	}
	if s.taken = s.taken[n:]; len(s.taken) == 0 {
		s.taken = nil
	}
	return s.out, nil
}

func (s *Subscription) startListing(of *source) {
	for i := range s.listings {
		if s.listings[i].source == of {
			s.listings[i].next = 0
			return
		}
	}
	s.listings = append(s.listings, listing{source: of})
}

// list returns the next piece of the first listing. Changes that wait meanwhile may be older than what it says: whoever applies
// them all, in order, has for each block what came last.
func (s *Subscription) list() []Change {
	l := &s.listings[0]
	s.out = s.out[:0]
	s.index.mu.RLock()
	defer s.index.mu.RUnlock() // the writer waits: for some thousand entries at most
	part := s.index.list(l.source, l.next, s.piece, func(e *event.Entry) {
		if s.wants.block(e.Prefix, variant{e.BlockSize, e.Eagle}) {
			s.out = append(s.out, Change{Kind: Held, Source: &l.source.name, Block: ChangedBlock{
				Hash: e.Hash, Prefix: e.Prefix, Tier: e.Tier, Group: e.Group.Index(), BlockSize: e.BlockSize,
			}})
		}
	})
	for i := range s.out {
		s.out[i].Epoch, s.out[i].Seq = part.epoch, part.seq
	}
	if l.next = part.next; l.next == 0 {
		// Behind everything that happened while it was listed.
		s.push(&queued{source: l.source, turn: s.turns[l.source], Change: Change{
			Kind: Listed, Source: &l.source.name, Epoch: part.epoch, Seq: part.seq,
		}})
		s.listings = s.listings[1:]
	}
	return s.out
}

// lookAtStates notes what time alone has changed: a source that fell silent.
func (s *Subscription) lookAtStates() {
	x := s.index
	x.mu.RLock()
	defer x.mu.RUnlock()
	for _, of := range x.byID {
		if s.wants.source(of) {
			s.noteState(x, of, StateIsNew)
		}
	}
}
