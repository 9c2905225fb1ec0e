package lmcache_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"kvstrata/connector"
	"kvstrata/connector/lmcache"
	"kvstrata/connector/store"
	"kvstrata/event"
)

// shelf is a store without a network. It answers up to a number of keys.
type shelf struct {
	mu      sync.Mutex
	has     map[string]bool
	answers int // −1 = all
}

func (s *shelf) Key(g *store.Group) string {
	return fmt.Sprintf("%v/%d", g.Blocks[len(g.Blocks)-1].Hash, g.Rank)
}

var errSilent = errors.New("no answer")

func (s *shelf) Exist(_ context.Context, keys []string) ([]bool, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	var there []bool
	for _, k := range keys {
		if len(there) == s.answers {
			return there, errSilent
		}
		there = append(there, s.has[k])
	}
	return there, nil
}

func (s *shelf) set(answers int, keys ...string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.answers, s.has = answers, map[string]bool{}
	for _, k := range keys {
		s.has[k] = true
	}
}

// log is a publisher that notes what it was given; it may be full.
type log struct {
	mu   sync.Mutex
	full bool
	said []string
}

func (l *log) Publish(b *event.Batch) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.full {
		return errors.New("full")
	}
	for _, ev := range b.Events {
		l.said = append(l.said, fmt.Sprintf("%v %v", ev.Kind, ev.Blocks[len(ev.Blocks)-1].Hash))
	}
	return nil
}

func (l *log) take() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	said := l.said
	l.said = nil
	return said
}

func sweepConfig() lmcache.SweepConfig {
	cfg := lmcache.DefaultSweepConfig()
	cfg.Block = blockTokens
	return cfg
}

func sweeper(t testing.TB, cfg lmcache.SweepConfig, p lmcache.Prober, pub lmcache.Publisher) *lmcache.Sweeper {
	t.Helper()
	s, err := lmcache.NewSweeper(cfg, p, pub, quiet())
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func rankOf(last uint64, rank int) *store.Group {
	g := group(last)
	g.Rank = rank
	return g
}

const stored, evicted = "STORED 00000000000000", "EVICTED 00000000000000"

func TestSweep(t *testing.T) {
	st, pub := &shelf{}, &log{}
	cfg := sweepConfig()
	cfg.Ranks, cfg.Silence = 2, 2
	s := sweeper(t, cfg, st, pub)
	sweep := func(what string, want ...string) {
		t.Helper()
		err := s.Sweep(t.Context())
		if err != nil && !errors.Is(err, errSilent) {
			t.Fatal(err)
		}
		if got := pub.take(); !slices.Equal(got, want) {
			t.Errorf("%s: %v, want %v", what, got, want)
		}
	}
	tell := func(last uint64, ranks ...int) {
		t.Helper()
		for _, r := range ranks {
			if err := s.Told(rankOf(last, r)); err != nil {
				t.Fatal(err)
			}
		}
	}
	key := func(last uint64, rank int) string { return st.Key(rankOf(last, rank)) }

	st.set(-1, key(0x10, 0), key(0x10, 1), key(0x20, 0), key(0x20, 1))
	tell(0x10, 0)
	sweep("one rank of two has told")
	tell(0x10, 1)
	tell(0x20, 1, 0)
	sweep("all have told", stored+"10", stored+"20")
	tell(0x10, 0, 1)
	sweep("nothing new")
	st.set(-1, key(0x10, 0), key(0x20, 0), key(0x20, 1))
	sweep("one rank's part is gone", evicted+"10")
	st.set(-1, key(0x10, 0), key(0x10, 1), key(0x20, 0), key(0x20, 1))
	sweep("whose part was gone tells anew before it counts")
	tell(0x10, 1)
	sweep("it is", stored+"10")
	st.set(0)
	sweep("silence says nothing")
	sweep("for long it does", evicted+"10", evicted+"20")
	sweep("and no more than once")
	st.set(3, key(0x10, 0), key(0x10, 1), key(0x20, 0), key(0x20, 1))
	sweep("half an answer", stored+"10")
	st.set(-1, key(0x10, 0), key(0x10, 1), key(0x20, 0), key(0x20, 1))
	sweep("the rest", stored+"20")
	pub.full = true
	st.set(-1, key(0x20, 0), key(0x20, 1))
	tell(0x30, 0, 1)
	sweep("nobody takes it")
	pub.full = false
	sweep("it is told again", evicted+"10")
	if st := s.Stats(); st.Watched != 1 || st.Resident != 1 || st.Dropped != 1 || st.Silent != 4 {
		t.Errorf("stats %+v", st)
	}
}

// TestSweepEvent holds what a STORED tells.
func TestSweepEvent(t *testing.T) {
	var got *event.Batch
	st := &shelf{}
	g := group(0x10)
	g.HasParent, g.Parent, g.LoRA = true, connector.Name{Hash: event.BytesHash("parent of sixteen")}, "my-lora"
	st.set(-1, st.Key(g))
	s := sweeper(t, sweepConfig(), st, publish(func(b *event.Batch) error { got = b; return nil }))
	if err := s.Told(g); err != nil {
		t.Fatal(err)
	}
	if err := s.Sweep(t.Context()); err != nil {
		t.Fatal(err)
	}
	want := event.Event{
		Kind: event.Stored, Tier: event.Storage, Group: event.NoGroup, LoRAID: event.NoLoRAID, HasParent: true, Parent: g.Parent.Hash,
		LoRA: "my-lora", BlockSize: blockTokens,
	}
	for _, n := range g.Blocks {
		want.Blocks = append(want.Blocks, event.Block{Hash: n.Hash, Prefix: n.Prefix, Copies: -1, Age: -1})
	}
	if diff := cmp.Diff([]event.Event{want}, got.Events); diff != "" || got.Rank != -1 || got.Time == 0 {
		t.Errorf("batch %+v: -want +got\n%s", got, diff)
	}
}

type publish func(b *event.Batch) error

func (f publish) Publish(b *event.Batch) error { return f(b) }

// TestSweepBound forgets what was told first, and says that it is gone.
func TestSweepBound(t *testing.T) {
	st, pub := &shelf{}, &log{}
	cfg := sweepConfig()
	cfg.MaxKeys = 2
	s := sweeper(t, cfg, st, pub)
	st.set(-1, st.Key(group(0x10)), st.Key(group(0x20)), st.Key(group(0x30)), st.Key(group(0x40)))
	for _, last := range []uint64{0x10, 0x20} {
		if err := s.Told(group(last)); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.Sweep(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, last := range []uint64{0x30, 0x40} {
		if err := s.Told(group(last)); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.Sweep(t.Context()); err != nil {
		t.Fatal(err)
	}
	want := []string{stored + "10", stored + "20", stored + "30", stored + "40", evicted + "10", evicted + "20"}
	if got := pub.take(); !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
	if st := s.Stats(); st.Watched != 2 || st.Resident != 2 || st.Forgotten != 2 {
		t.Errorf("stats %+v", st)
	}
	for _, g := range []*store.Group{{}, rankOf(1, 1), rankOf(1, -1)} {
		if err := s.Told(g); err == nil {
			t.Errorf("%+v is taken", g)
		}
	}
}

// TestSweepRun asks at once for what is told, and at every interval for all.
func TestSweepRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st, pub := &shelf{}, &log{}
		s := sweeper(t, sweepConfig(), st, pub)
		st.set(-1, st.Key(group(0x10)))
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- s.Run(ctx) }()
		if err := s.Told(group(0x10)); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		if got := pub.take(); !slices.Equal(got, []string{stored + "10"}) {
			t.Errorf("told: %v", got)
		}
		st.set(-1)
		<-time.After(9 * time.Second)
		synctest.Wait()
		if got := pub.take(); got != nil {
			t.Errorf("before the sweep: %v", got)
		}
		<-time.After(2 * time.Second)
		synctest.Wait()
		if got := pub.take(); !slices.Equal(got, []string{evicted + "10"}) {
			t.Errorf("after the sweep: %v", got)
		}
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("run: %v", err)
		}
	})
}

// TestSweepModel tells, loses, silences and fills at random; what was published is a set at every moment, and in the end
// exactly what was told and is there.
func TestSweepModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		st, pub := &shelf{answers: -1, has: map[string]bool{}}, &log{}
		cfg := sweepConfig()
		cfg.Ranks, cfg.MaxKeys, cfg.Silence = 2, 20, 2
		s, err := lmcache.NewSweeper(cfg, st, pub, quiet())
		if err != nil {
			t.Fatal(err)
		}
		said := map[string]bool{}
		listen := func() {
			for _, line := range pub.take() {
				kind, hash, _ := strings.Cut(line, " ")
				if said[hash] == (kind == "STORED") {
					t.Fatalf("%s twice", line)
				}
				said[hash] = kind == "STORED"
			}
		}
		hash := rapid.Uint64Range(0x10, 0x1f)
		t.Repeat(map[string]func(*rapid.T){
			"store": func(t *rapid.T) {
				h := hash.Draw(t, "hash")
				for rank := range 2 {
					st.has[st.Key(rankOf(h, rank))] = true
					if err := s.Told(rankOf(h, rank)); err != nil {
						t.Fatal(err)
					}
				}
			},
			"lose": func(t *rapid.T) {
				delete(st.has, st.Key(rankOf(hash.Draw(t, "hash"), rapid.IntRange(0, 1).Draw(t, "rank"))))
			},
			"silence": func(t *rapid.T) { st.answers = rapid.IntRange(-1, 3).Draw(t, "answers") },
			"full":    func(t *rapid.T) { pub.full = rapid.Bool().Draw(t, "full") },
			"sweep":   func(t *rapid.T) { _ = s.Sweep(context.Background()); listen() },
		})
		st.answers, pub.full = -1, false
		for range 2 {
			if err := s.Sweep(context.Background()); err != nil {
				t.Fatal(err)
			}
			listen()
		}
		resident := 0
		for h, there := range said {
			if !there {
				continue
			}
			resident++
			for rank := range 2 {
				if !st.has[fmt.Sprintf("%s/%d", h, rank)] {
					t.Fatalf("%s counts as there, and rank %d is not", h, rank)
				}
			}
		}
		if got := s.Stats(); got.Resident != resident || got.Watched < resident {
			t.Fatalf("stats %+v, want %d resident", got, resident)
		}
	})
}

// TestSweepServer sweeps a real server that evicts.
func TestSweepServer(t *testing.T) {
	cfg := serverConfig()
	one := 4 * blockTokens * tokenBytes
	cfg.Bytes, cfg.MaxValue = 10*one, one
	srv := serve(t, cfg, "")
	b := backend(t, "lm://"+srv.address)
	pub := &log{}
	s := sweeper(t, sweepConfig(), b, pub)
	for i := range uint64(30) {
		it := item(b, 100+10*i)
		none(t, "put", b.Put(t.Context(), []store.Item{it}))
		if err := s.Told(it.Group); err != nil {
			t.Fatal(err)
		}
		if err := s.Sweep(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	counts := map[string]int{}
	for _, line := range pub.take() {
		kind, _, _ := strings.Cut(line, " ")
		counts[kind]++
	}
	if counts["STORED"] != 30 || counts["EVICTED"] != 20 {
		t.Errorf("events: %v", counts)
	}
}

func TestSweepConfig(t *testing.T) {
	_, err := lmcache.NewSweeper(lmcache.SweepConfig{Ranks: -1, MaxKeys: -2}, &shelf{}, &log{}, quiet())
	for _, word := range []string{"interval", "max keys", "silence", "ranks", "block size"} {
		if err == nil || !strings.Contains(err.Error(), word) {
			t.Errorf("error does not name %s: %v", word, err)
		}
	}
}

// TestSweepNever tells many groups and never sweeps: what is kept stays bounded.
func TestSweepNever(t *testing.T) {
	cfg := sweepConfig()
	cfg.MaxKeys = 10
	st, pub := &shelf{answers: -1, has: map[string]bool{}}, &log{}
	s := sweeper(t, cfg, st, pub)
	for i := range uint64(2000) {
		g := group(0x10 + i)
		st.has[st.Key(g)] = true
		if err := s.Told(g); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.Sweep(t.Context()); err != nil {
		t.Fatal(err)
	}
	if said, stats := len(pub.take()), s.Stats(); said != 10 || stats.Resident != 10 || stats.Forgotten != 1990 {
		t.Errorf("%d events, stats %+v", said, stats)
	}
}
