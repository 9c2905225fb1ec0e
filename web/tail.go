package web

import (
	"encoding/json"
	"fmt"
	"path"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"kvstrata/event"
)

const (
	maxLines     = 20        // of one frame
	maxLineBytes = 256 << 10 // of one frame; its first line may be longer
)

// Tail shows clients the events that they ask for. What does not fit into a frame is counted, not kept: a client's
// buffer holds one frame at most.
//
// Observe is called from one goroutine. It never waits for a client, and returns at once while nobody has a tail.
type Tail struct {
	mu   sync.Mutex // of those who change subs
	subs atomic.Pointer[[]*subscription]

	lines []json.RawMessage // of the message observed, made when first wanted
}

// NewTail returns a tail that nobody watches.
func NewTail() *Tail { return new(Tail) }

// subscription is one client's tail under one filter.
type subscription struct {
	filter filter

	mu      sync.Mutex
	lines   []json.RawMessage
	size    int // bytes of lines
	matched uint64
}

// maxTails bounds the subscriptions: each is tried on every event, by whoever hands the stream over.
const maxTails = 32

// subscribe adds a subscription, and reports whether there was room.
func (t *Tail) subscribe(s *subscription) (ok bool) {
	if s == nil {
		return true
	}
	t.change(func(subs []*subscription) []*subscription {
		if ok = len(subs) < maxTails; !ok {
			return subs
		}
		return append(subs, s)
	})
	return ok
}

func (t *Tail) unsubscribe(s *subscription) {
	if s == nil {
		return
	}
	t.change(func(subs []*subscription) []*subscription {
		return slices.DeleteFunc(subs, func(other *subscription) bool { return other == s })
	})
}

// change replaces the list of subscriptions; a list that Observe may have taken is left as it is.
func (t *Tail) change(edit func([]*subscription) []*subscription) {
	t.mu.Lock()
	defer t.mu.Unlock()
	var subs []*subscription
	if old := t.subs.Load(); old != nil {
		subs = slices.Clone(*old)
	}
	if subs = edit(subs); len(subs) == 0 {
		t.subs.Store(nil)
		return
	}
	t.subs.Store(&subs)
}

// Observe hands a message's events to those who asked for them. The message is not kept.
func (t *Tail) Observe(m *event.Message) {
	subs := t.subs.Load()
	if subs == nil {
		return
	}
	t.lines = t.lines[:0]
	for _, s := range *subs {
		if s.filter.source(&m.Source) {
			t.offer(m, s)
		}
	}
	clear(t.lines)
}

// offer gives one subscription the events of a message that it wants.
func (t *Tail) offer(m *event.Message, s *subscription) {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := 0 // lines of the message before the present one
	for i := range m.Batches {
		b := &m.Batches[i]
		if len(b.Events) == 0 {
			if s.filter.event(nil) {
				s.add(func() json.RawMessage { return t.line(m, n, i, 0) })
			}
			n++
		}
		for j := range b.Events {
			if s.filter.event(&b.Events[j]) {
				s.add(func() json.RawMessage { return t.line(m, n, i, j) })
			}
			n++
		}
	}
}

// add counts an event, and keeps its line if the frame has room. The lock is held.
func (s *subscription) add(line func() json.RawMessage) {
	s.matched++
	if len(s.lines) == maxLines || s.size >= maxLineBytes {
		return
	}
	l := line()
	if l == nil || s.size > 0 && s.size+len(l) > maxLineBytes {
		return
	}
	s.lines = append(s.lines, l)
	s.size += len(l)
}

// take returns what came since the last call, and how many events passed the filter.
func (s *subscription) take() ([]json.RawMessage, uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	lines, matched := s.lines, s.matched
	if lines == nil {
		lines = []json.RawMessage{}
	}
	s.lines, s.size, s.matched = nil, 0, 0
	return lines, matched
}

// line returns line n of a message, which is event j of batch i; it is made once for all who want it.
func (t *Tail) line(m *event.Message, n, i, j int) json.RawMessage {
	for len(t.lines) <= n {
		t.lines = append(t.lines, nil)
	}
	if t.lines[n] == nil {
		one := m.Batches[i]
		if len(one.Events) > 0 {
			one.Events = one.Events[j : j+1]
		}
		alone := event.Message{Source: m.Source, Epoch: m.Epoch, Fence: m.Fence, Batches: []event.Batch{one}}
		body, err := json.Marshal(alone.Lines()[0])
		if err != nil {
			return nil // a line has nothing that could fail but a number that is none
		}
		t.lines[n] = body
	}
	return t.lines[n]
}

// filterSpec is a filter as a client writes it.
type filterSpec struct {
	Source string   `json:"source"`
	Kinds  []string `json:"kinds"`
	Hash   string   `json:"hash"`
}

// filter says which events a client wants, as the flags of `kvstrata tail` do.
type filter struct {
	glob  string // of instance or model; empty: every source
	kinds uint   // a bit for each kind; 0: every event, and batches without any

	byHash bool
	hash   event.BlockHash
	prefix event.PrefixHash // 0: the hash can't be one
}

func newFilter(spec filterSpec) (filter, error) {
	f := filter{glob: spec.Source}
	if _, err := path.Match(spec.Source, ""); err != nil {
		return filter{}, fmt.Errorf("source %q: want a pattern as prefill-*", spec.Source)
	}
	for _, text := range spec.Kinds {
		var k event.Kind
		if err := k.UnmarshalText([]byte(strings.ToUpper(text))); err != nil || k == 0 {
			return filter{}, fmt.Errorf("kind %q: want STORED, EVICTED, LOADED or CLEARED", text)
		}
		f.kinds |= 1 << k
	}
	if spec.Hash != "" {
		var err error
		if f.hash, err = event.ParseBlockHash(spec.Hash); err != nil {
			return filter{}, err
		}
		f.byHash = true
		if n, ok := f.hash.Int(); ok {
			f.prefix = event.PrefixHash(n) // both are the same 8 bytes
		}
	}
	return f, nil
}

func (f *filter) source(s *event.Source) bool {
	if f.glob == "" {
		return true
	}
	instance, _ := path.Match(f.glob, s.Instance)
	if instance {
		return true
	}
	model, _ := path.Match(f.glob, s.Model)
	return model
}

// event reports whether an event is wanted; nil stands for a batch without events.
func (f *filter) event(ev *event.Event) bool {
	switch {
	case ev == nil:
		return f.kinds == 0 && !f.byHash
	case f.kinds != 0 && f.kinds&(1<<ev.Kind) == 0:
		return false
	case !f.byHash:
		return true
	}
	for i := range ev.Blocks {
		b := &ev.Blocks[i]
		if b.Hash == f.hash || f.prefix != 0 && b.Prefix == f.prefix && !ev.Unrooted {
			return true
		}
	}
	return false
}
