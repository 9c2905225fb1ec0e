package prefix_test

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"testing"
	"testing/synctest"
	"time"

	"kvstrata/event"
	"kvstrata/indexer/prefix"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

// mirrored is where a mirror keeps a block.
type mirrored struct {
	Hash  event.BlockHash
	Group uint32
	Tier  event.Tier
}

// mirror is what a subscriber makes of changes, as docs/index-service.md says.
type mirror struct {
	blocks map[event.Source]map[mirrored]event.PrefixHash
	exact  map[event.Source]bool
	states map[event.Source]event.State
	last   map[event.Source]prefix.Change
}

func newMirror() *mirror {
	return &mirror{
		blocks: make(map[event.Source]map[mirrored]event.PrefixHash), exact: make(map[event.Source]bool),
		states: make(map[event.Source]event.State), last: make(map[event.Source]prefix.Change),
	}
}

func (m *mirror) apply(t tb, c *prefix.Change) {
	t.Helper()
	s := *c.Source
	k := mirrored{c.Block.Hash, c.Block.Group, c.Block.Tier}
	switch c.Kind {
	case prefix.Begin:
		m.blocks[s], m.exact[s] = make(map[mirrored]event.PrefixHash), false
	case prefix.Held, prefix.Rose:
		m.blocks[s][k] = c.Block.Prefix
	case prefix.Listed:
		m.exact[s] = true
	case prefix.Fell:
		if _, ok := m.blocks[s][k]; !ok && m.exact[s] {
			t.Fatalf("%v of %v fell, and was not there", k, s)
		}
		delete(m.blocks[s], k)
	case prefix.Emptied:
		clear(m.blocks[s])
	}
	if c.HasState() {
		m.states[s] = c.State
	}
	if last, ok := m.last[s]; ok && m.exact[s] && (c.Epoch < last.Epoch || c.Epoch == last.Epoch && c.Seq < last.Seq) {
		t.Fatalf("%v of epoch %d, seq %d comes behind %v of epoch %d, seq %d", c.Kind, c.Epoch, c.Seq, last.Kind, last.Epoch, last.Seq)
	}
	if m.last[s] = *c; c.Kind == prefix.Begin {
		delete(m.last, s) // a checkpoint may be an old one
	}
}

// watcher is a subscription, its mirror, and which of the index's blocks should be there.
type watcher struct {
	request *prefix.WatchRequest
	wants   func(*event.Entry) bool
	piece   int
	sub     *prefix.Subscription
	mirror  *mirror
}

// subscribe begins, if the index knows who is asked for.
func (w *watcher) subscribe(t tb, x *prefix.Index) {
	t.Helper()
	if w.sub != nil {
		return
	}
	sub, err := x.Subscribe(w.request)
	if errors.Is(err, prefix.ErrUnknownModel) || errors.Is(err, prefix.ErrUnknownSource) {
		return
	}
	if err != nil {
		t.Fatalf("subscribe: %v", err)
	}
	sub.ListBy(w.piece)
	w.sub, w.mirror = sub, newMirror()
}

// take applies what one call of Next returns, and reports whether there was anything within a moment, which is enough to look at
// silent sources. The time is the bubble's.
func (w *watcher) take(t tb) bool {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 1500*time.Millisecond)
	defer cancel()
	changes, err := w.sub.Next(ctx)
	if errors.Is(err, context.DeadlineExceeded) {
		return false
	}
	if err != nil {
		t.Fatalf("next: %v", err)
	}
	for i := range changes {
		w.mirror.apply(t, &changes[i])
	}
	return true
}

// compare wants the mirror to be the index.
func (w *watcher) compare(t tb, x *prefix.Index) {
	t.Helper()
	for _, info := range x.Sources() {
		s := info.Source
		if w.request.Source != "" && s.Tokens() != w.request.Source || w.request.Source == "" && (s.Model != w.request.Model ||
			w.request.Cluster != "" && s.Cluster != w.request.Cluster) {
			if _, told := w.mirror.blocks[s]; told {
				t.Fatalf("%v was told, which is not asked for", s)
			}
			continue
		}
		want := make(map[mirrored]event.PrefixHash)
		if len(info.Groups) > 0 || len(info.Resident) > 0 { // not of a dead life
			for e := range x.Resident(s) {
				if w.wants(e) {
					want[mirrored{e.Hash, e.Group.Index(), e.Tier}] = e.Prefix
				}
			}
		}
		if !w.mirror.exact[s] {
			t.Fatalf("%v is never said to be listed", s)
		}
		if got := w.mirror.blocks[s]; !reflect.DeepEqual(want, got) {
			t.Fatalf("the mirror of %v for %+v is not the index:\n%s", s, w.request, cmp.Diff(want, got))
		}
		if got := w.mirror.states[s]; got != info.State {
			t.Fatalf("the mirror has %v %v, which is %v", s, got, info.State)
		}
	}
}

// drawWatchers draws subscribers to everything that can be subscribed to.
func drawWatchers(t *rapid.T, authors []*author) []*watcher {
	all := func(*event.Entry) bool { return true }
	of := func(c chain, size uint32) func(*event.Entry) bool {
		return func(e *event.Entry) bool {
			cut := c
			cut.size, cut.eagle = int(e.BlockSize), e.Eagle
			if e.BlockSize == 0 || e.Prefix == 0 || size != 0 && size != e.BlockSize {
				return false
			}
			for _, p := range cut.hashes() {
				if p == e.Prefix {
					return true
				}
			}
			return false
		}
	}
	c := chain{tokens: rapid.SampledFrom(prompts).Draw(t, "watched prompt"), salt: rapid.SampledFrom([]string{"", "salt"}).Draw(t, "watched salt")}
	byHash := c
	byHash.size = 16
	hashes := byHash.hashes()
	watchers := []*watcher{
		{request: &prefix.WatchRequest{Request: prefix.Request{Model: "m"}}, wants: all},
		{request: &prefix.WatchRequest{Request: prefix.Request{Model: "m", Cluster: "c"}}, wants: all},
		{request: &prefix.WatchRequest{Source: authors[0].source.Tokens()}, wants: all},
		{request: &prefix.WatchRequest{Request: prefix.Request{Model: "m", Tokens: c.tokens, Salt: c.salt}}, wants: of(c, 0)},
		{request: &prefix.WatchRequest{Request: prefix.Request{Model: "m", Hashes: hashes, BlockSize: 16}}, wants: of(c, 16)},
	}
	for _, w := range watchers {
		w.piece = rapid.SampledFrom([]int{1, 3, 4096}).Draw(t, "piece")
	}
	return watchers
}

// TestMirror has subscribers mirror an index while random sources tell random things, restart, are restored and cleared; whenever
// nothing is under way, each mirror is the index.
func TestMirror(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		rapid.Check(struct{ testing.TB }{t}, func(t *rapid.T) { // without the deadline, which a bubble's clock does not know
			w := &world{clock: &clock{began}}
			w.boot()
			w.authors = drawAuthors(t)
			watchers := drawWatchers(t, w.authors)
			for range rapid.IntRange(1, 40).Draw(t, "steps") {
				before := w.index
				w.step(t)
				for _, one := range watchers {
					if w.index != before && one.sub != nil { // it was restarted
						one.sub.Close()
						one.sub = nil
					}
					if rapid.IntRange(0, 3).Draw(t, "begins") > 0 {
						one.subscribe(t, w.index)
					}
					if one.sub == nil {
						continue
					}
					for range rapid.IntRange(0, 3).Draw(t, "takes") {
						one.take(t)
					}
					if rapid.IntRange(0, 2).Draw(t, "quiescent") == 0 {
						for one.take(t) {
						}
						one.compare(t, w.index)
					}
				}
			}
			for _, one := range watchers {
				if one.sub != nil {
					one.sub.Close()
				}
			}
			if n := w.index.Subscribers(); n != 0 {
				t.Fatalf("%d subscribers are left", n)
			}
		})
	})
}

// A mirror that takes changes while they are made, and while its listing goes on, is the index in the end.
func TestAMirrorBesideTheWriter(t *testing.T) {
	x, _ := newIndex()
	p := prompt(1, 50)
	pub := newPublisher(engine("e"), false)
	pub.tell(t, x, p.stored(event.GPU, 0, 50))
	x.Tell(pub.status(event.StateLive, ""))
	end := event.Seq(400)
	var watchers []*watcher
	done := make(chan struct{})
	for _, r := range []prefix.Request{{Model: "m"}, {Model: "m", Tokens: p.tokens[:320]}} {
		r := &prefix.WatchRequest{Request: r}
		w := &watcher{request: r, piece: 7, wants: func(e *event.Entry) bool {
			if len(r.Tokens) == 0 {
				return true
			}
			for _, h := range p.hashes()[:20] {
				if h == e.Prefix {
					return true
				}
			}
			return false
		}}
		watchers = append(watchers, w)
		w.subscribe(t, x)
		go func() {
			defer func() { done <- struct{}{} }()
			for w.mirror.states[pub.source] != event.StatePartial || !w.mirror.exact[pub.source] {
				changes, err := w.sub.Next(t.Context())
				if err != nil {
					t.Error(err)
					return
				}
				for i := range changes {
					if c := &changes[i]; c.Kind == prefix.Fell {
						delete(w.mirror.blocks[pub.source], mirrored{c.Block.Hash, c.Block.Group, c.Block.Tier})
					} else {
						w.mirror.apply(t, c)
					}
				}
			}
		}()
	}
	for seq := event.Seq(1); seq < end; seq++ {
		if from := int(seq * 7 % 40); seq%2 == 1 {
			pub.tell(t, x, p.evicted(event.GPU, from, from+10))
		} else {
			pub.tell(t, x, p.stored(event.GPU, from, from+10), p.offloaded(event.CPU, from, from+3))
		}
	}
	pub.tell(t, x, cleared(event.ByEngine), p.stored(event.GPU, 0, 10))
	x.Tell(pub.status(event.StatePartial, "the end")) // behind the last change: a batch may come in parts
	for range watchers {
		<-done
	}
	for _, w := range watchers {
		w.sub.Close()
		w.compare(t, x)
	}
}

// Who takes nothing falls behind and is told so; the writer never waits for it.
func TestASubscriberFallsBehind(t *testing.T) {
	x, _ := newIndex()
	pub := newPublisher(engine("e"), false)
	p := prompt(1, 1024)
	pub.tell(t, x, p.stored(event.GPU, 0, 1))
	sub, err := x.Subscribe(&prefix.WatchRequest{Source: pub.source.Tokens()})
	if err != nil {
		t.Fatal(err)
	}
	defer sub.Close()
	for range 40 {
		pub.tell(t, x, p.stored(event.GPU, 1, 1024))
		pub.tell(t, x, p.evicted(event.GPU, 1, 1024))
	}
	if _, err := sub.Next(t.Context()); !errors.Is(err, prefix.ErrFellBehind) {
		t.Errorf("%v", err)
	}
	again, err := x.Subscribe(&prefix.WatchRequest{Source: pub.source.Tokens()})
	if err != nil {
		t.Fatal(err)
	}
	defer again.Close()
	if changes, err := again.Next(t.Context()); err != nil || changes[0].Kind != prefix.Begin {
		t.Errorf("%v %v", changes, err)
	}
}

func TestSubscribersAreBounded(t *testing.T) {
	x, _ := newIndex()
	newPublisher(engine("e"), false).tell(t, x)
	r := &prefix.WatchRequest{Request: prefix.Request{Model: "m"}}
	var subs []*prefix.Subscription
	for range 64 {
		s, err := x.Subscribe(r)
		if err != nil {
			t.Fatal(err)
		}
		subs = append(subs, s)
	}
	if _, err := x.Subscribe(r); !errors.Is(err, prefix.ErrFull) {
		t.Errorf("the 65th: %v", err)
	}
	subs[3].Close()
	s, err := x.Subscribe(r)
	if err != nil {
		t.Fatalf("one went, and there is no room: %v", err)
	}
	subs[3] = s
	for _, s := range subs {
		s.Close()
		s.Close() // twice is once
	}
	if n := x.Subscribers(); n != 0 {
		t.Errorf("%d are left", n)
	}
}

// A source that falls silent is told as stale, though nothing came of it.
func TestSubscribersHearOfSilence(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		x := prefix.New(prefix.DefaultConfig())
		pub := newPublisher(engine("e"), false)
		pub.tell(t, x)
		x.Tell(pub.status(event.StateLive, ""))
		sub, err := x.Subscribe(&prefix.WatchRequest{Source: pub.source.Tokens()})
		if err != nil {
			t.Fatal(err)
		}
		defer sub.Close()
		var kinds []string
		for len(kinds) < 3 {
			changes, err := sub.Next(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			for _, c := range changes {
				kinds = append(kinds, fmt.Sprint(c.Kind, " ", c.State, " ", c.Reason))
			}
		}
		want := []string{"begin live ", "listed  ", "state stale no word from its subscriber for 1m1s"}
		if diff := cmp.Diff(want, kinds); diff != "" {
			t.Error(diff)
		}
	})
}

// The end of a listing counts for nothing when its source was begun anew before that end was heard of.
func TestAListingThatWasOvertakenIsNotExact(t *testing.T) {
	x, _ := newIndex()
	pub := newPublisher(engine("e"), false)
	pub.tell(t, x, prompt(1, 2).stored(event.GPU, 0, 1))
	sub, err := x.Subscribe(&prefix.WatchRequest{Source: pub.source.Tokens()})
	if err != nil {
		t.Fatal(err)
	}
	defer sub.Close()
	var kinds []string
	for len(kinds) < 5 {
		changes, err := sub.Next(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		for _, c := range changes {
			kinds = append(kinds, c.Kind.String())
		}
		if len(kinds) == 1 {
			restore(t, x, pub.checkpoint(t))
		}
	}
	if diff := cmp.Diff([]string{"begin", "held", "begin", "held", "listed"}, kinds); diff != "" {
		t.Error(diff)
	}
}
