package sim_test

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"kvstrata/connector"
	"kvstrata/connector/store"
	"kvstrata/connector/transports"
	"kvstrata/event"
	"kvstrata/sim"
)

// shelf is a store in this process that can fail.
type shelf struct {
	mu     sync.Mutex
	values map[string][]byte
	gone   func(key string) bool // a Get of it fails
	bend   func(value []byte)    // of each Get
}

type shelfBackend struct {
	*shelf
	space string
}

var errGone = errors.New("gone")

func (s shelfBackend) Name() string { return "shelf" }

func (s shelfBackend) Key(g *store.Group) string {
	return fmt.Sprint(s.space, ":", g.Rank, ":", g.Blocks[len(g.Blocks)-1].Hash)
}

func (s shelfBackend) Prefix(_ context.Context, keys []string) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for i, k := range keys {
		if _, ok := s.values[k]; !ok {
			return i, nil
		}
	}
	return len(keys), nil
}

func (s shelfBackend) Put(_ context.Context, items []store.Item) []error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, item := range items {
		var value []byte
		for _, p := range item.Pieces {
			value = append(value, p...)
		}
		s.values[item.Key] = value
	}
	return nil
}

func (s shelfBackend) Get(_ context.Context, items []store.Item) []error {
	s.mu.Lock()
	defer s.mu.Unlock()
	errs := make([]error, len(items))
	for i, item := range items {
		value, ok := s.values[item.Key]
		if !ok || s.gone != nil && s.gone(item.Key) {
			errs[i] = errGone
			continue
		}
		value = append([]byte(nil), value...)
		if s.bend != nil {
			s.bend(value)
		}
		for _, p := range item.Pieces {
			value = value[copy(p, value):]
		}
	}
	return errs
}

func (s shelfBackend) Close() error { return nil }

// connected is a fleet whose engines have connectors.
type connected struct {
	*fleet
	loaded  recorder // what decode engines' connectors told
	mu      sync.Mutex
	records []event.Transfer

	lookups  []event.Lookup
	requests []event.Request
}

// connect gives a fleet's engines connectors, and runs them until the test ends.
func connect(t *testing.T, f *fleet, factory *connector.Factory, name string, prefill int, edit func(*sim.KVConfig)) *connected {
	t.Helper()
	c := &connected{fleet: f}
	ctx, cancel := context.WithCancel(context.Background())
	var runs sync.WaitGroup
	t.Cleanup(func() {
		cancel()
		runs.Wait()
		for _, e := range f.engines {
			if err := e.Close(); err != nil {
				t.Error(err)
			}
		}
	})
	for i, e := range f.engines {
		cfg := sim.DefaultKVConfig()
		cfg.Factory, cfg.Log, cfg.Events = factory, slog.New(slog.NewTextHandler(io.Discard, nil)), &recorder{}
		cfg.Layers, cfg.KVHeads, cfg.HeadSize = 2, 1, 8
		cfg.Transfer = connector.DefaultConfig()
		cfg.Transfer.Connector, cfg.Transfer.Role, cfg.Transfer.OnLoadFailure = name, connector.Producer, connector.Recompute
		if i >= prefill {
			cfg.Transfer.Role, cfg.Events = connector.Consumer, &c.loaded
		}
		if name == "tcp" {
			cfg.Transfer.Extra["listen"] = []byte(`"127.0.0.1:0"`)
		}
		cfg.Stats = func(*connector.Stats) {}
		cfg.Records = func(r event.Records) {
			c.mu.Lock()
			defer c.mu.Unlock()
			c.records = append(c.records, r.Transfers...)
			c.lookups, c.requests = append(c.lookups, r.Lookups...), append(c.requests, r.Requests...)
		}
		if edit != nil {
			edit(&cfg)
		}
		if err := e.Connect(cfg); err != nil {
			t.Fatal(err)
		}
		runs.Go(func() {
			if err := e.Run(ctx); err != nil {
				t.Error(err)
			}
		})
	}
	return c
}

// shelved returns a factory whose transport is a shelf.
func shelved(t *testing.T, s *shelf) *connector.Factory {
	t.Helper()
	s.values = make(map[string][]byte)
	var f connector.Factory
	err := f.Register("shelf", store.Transport{Open: func(o store.Opening) (store.Backend, error) {
		return shelfBackend{s, hex.EncodeToString(o.Compatibility[:4])}, nil
	}}.Connector())
	if err != nil {
		t.Fatal(err)
	}
	return &f
}

// inTime is a speed at which saves, which end in real time, have ended when a decode engine looks for what they saved; at full
// speed it may find nothing to load.
const inTime = 1e3

// sameSeed makes engines call a prefix the same, as those that share a store must.
func sameSeed(cfg *sim.EngineConfig) { cfg.HashSeed, cfg.PoolBlocks = 0, 4096 }

// Blocks that prefill engines computed reach decode engines byte for byte, at full speed and in time, and every pool is
// whole again.
func TestConnectedFleets(t *testing.T) {
	for _, test := range []struct {
		name, transport string
		speed           float64
		ranks           int
	}{
		{"tcp at full speed", "tcp", 0, 1},
		{"tcp in time", "tcp", 1e5, 1},
		{"tcp with two ranks", "tcp", 0, 2},
		{"a store at full speed", "shelf", 0, 1},
		{"a store in time", "shelf", inTime, 1},
		{"a store with two ranks", "shelf", inTime, 2},
		{"null", "null", 0, 1},
	} {
		t.Run(test.name, func(t *testing.T) {
			factory := transports.Default()
			if test.transport == "shelf" {
				factory = shelved(t, new(shelf))
			}
			c := connect(t, newFleet(t, test.speed, 2, 1, sameSeed), factory, test.transport, 2, func(cfg *sim.KVConfig) { cfg.Ranks = test.ranks })
			if err := c.Run(t.Context(), trace(t, small())); err != nil {
				t.Fatal(err)
			}
			report := c.Report()
			d := report.Engines[2].Stats
			if report.Finished != 150 || d.BlocksWrong > 0 || d.BlocksFailed > 0 || d.Failed > 0 {
				t.Errorf("%d requests finished, %d wrong blocks, %d failed", report.Finished, d.BlocksWrong, d.BlocksFailed)
			}
			finished, prompts, external := uint64(0), uint64(0), uint64(0)
			for _, e := range report.Engines {
				finished += e.Stats.Finished
			}
			for _, l := range c.lookups {
				prompts += l.Tokens
			}
			for _, q := range c.requests {
				prompts -= q.Prompt
				if q.Cached+q.External > q.Prompt || q.Request == "" || q.Output == 0 {
					t.Errorf("%+v", q)
				}
				external += q.External
			}
			if n := uint64(len(c.requests)); n != finished || uint64(len(c.lookups)) != n || prompts != 0 || external < d.LoadedTokens {
				t.Errorf("%d requests and %d lookups are told of %d, %d tokens from outside of %d", n, len(c.lookups), finished, external, d.LoadedTokens)
			}
			if test.transport == "null" {
				if d.BlocksVerified > 0 || len(c.loaded.batches) > 0 {
					t.Error("null moved something")
				}
				return
			}
			told := uint64(0)
			for _, b := range c.loaded.batches {
				for _, ev := range b.Events {
					if ev.Kind != event.Loaded {
						t.Errorf("a consumer tells %v", ev.Kind)
					}
					told += uint64(len(ev.Blocks))
				}
			}
			mustLoad := test.transport != "shelf" || test.speed > 0 // see inTime
			if mustLoad && d.BlocksLoaded == 0 || told != d.BlocksLoaded {
				t.Errorf("%d full blocks were loaded, and %d are told", d.BlocksLoaded, told)
			}
			for _, e := range c.engines {
				for range 10_000 { // what the last consumer said arrives soon
					if !e.Pending() {
						break
					}
					if _, err := e.Step(1); err != nil {
						t.Fatal(err)
					}
				}
				if e.Pending() {
					t.Errorf("%s keeps blocks", e.Name())
				}
			}
		})
	}
}

// What LOADED tells bears the names that the engine's own events get from their tokens.
func TestLoadedBearsTheBlocksNames(t *testing.T) {
	f := newFleet(t, 0, 1, 1, sameSeed)
	c := connect(t, f, transports.Default(), "tcp", 1, nil)
	requests := small()[:1]
	if err := c.Run(t.Context(), trace(t, requests)); err != nil {
		t.Fatal(err)
	}
	stored := c.told[1].batches[0].Events[0]
	names := event.Prefixes(nil, stored.Tokens, 16, event.NewHasher("").Seed("", ""), false)
	var want, got []event.Block
	for i, b := range stored.Blocks {
		want = append(want, event.Block{Hash: b.Hash, Prefix: names[i], Copies: -1, Age: -1})
	}
	for _, ev := range c.loaded.batches[0].Events {
		got = append(got, ev.Blocks...)
		if ev.Load.Peer != "engine-0" || ev.Load.Bytes == 0 || ev.Load.Request == "" {
			t.Errorf("%+v", ev.Load)
		}
	}
	if diff := cmp.Diff(want, got); diff != "" || len(want) < 10 {
		t.Errorf("%d blocks (-stored +loaded):\n%s", len(want), diff)
	}
}

// What does not come is computed under one policy, and ends the request under the other.
func TestLoadsThatFail(t *testing.T) {
	for _, policy := range []connector.FailurePolicy{connector.Recompute, connector.Fail} {
		t.Run(policy.String(), func(t *testing.T) {
			n := 0
			s := &shelf{gone: func(string) bool { n++; return n%3 == 0 }}
			factory := shelved(t, s)
			c := connect(t, newFleet(t, inTime, 1, 1, sameSeed), factory, "shelf", 1, func(cfg *sim.KVConfig) { cfg.Transfer.OnLoadFailure = policy })
			if err := c.Run(t.Context(), trace(t, small())); err != nil {
				t.Fatal(err)
			}
			d := c.Report().Engines[1].Stats
			if d.Finished != 150 || d.BlocksFailed == 0 || d.BlocksWrong > 0 || (d.Failed > 0) != (policy == connector.Fail) {
				t.Errorf("%d finished, %d blocks failed, %d wrong, %d requests failed", d.Finished, d.BlocksFailed, d.BlocksWrong, d.Failed)
			}
			failed := 0
			for _, r := range c.records {
				if r.Kind == event.TransferFailed {
					failed += int(r.Blocks)
				}
			}
			if uint64(failed) != d.BlocksFailed {
				t.Errorf("%d blocks are recorded as failed, %d did", failed, d.BlocksFailed)
			}
		})
	}
}

// The check is real: a byte that is another is seen.
func TestAWrongByteIsSeen(t *testing.T) {
	s := &shelf{bend: func(value []byte) { value[len(value)-3] ^= 1 }}
	factory := shelved(t, s)
	c := connect(t, newFleet(t, inTime, 1, 1, sameSeed), factory, "shelf", 1, nil)
	if err := c.Run(t.Context(), trace(t, small()[:20])); err != nil {
		t.Fatal(err)
	}
	if d := c.Report().Engines[1].Stats; d.BlocksWrong == 0 || d.BlocksWrong == d.BlocksVerified {
		t.Errorf("%d of %d blocks are wrong", d.BlocksWrong, d.BlocksVerified)
	}
}

// Pools too small for all that runs: requests are preempted while their blocks are saved, and nothing is saved wrong.
func TestPreemptionsUnderAConnector(t *testing.T) {
	factory := shelved(t, new(shelf))
	f := newFleet(t, 1e5, 1, 1, func(cfg *sim.EngineConfig) { cfg.HashSeed, cfg.PoolBlocks, cfg.TokensPerStep = 0, 300, 256 })
	c := connect(t, f, factory, "shelf", 1, nil)
	if err := c.Run(t.Context(), trace(t, small())); err != nil {
		t.Fatal(err)
	}
	report := c.Report()
	d := report.Engines[1].Stats
	if report.Preempted == 0 || d.BlocksWrong > 0 || d.BlocksVerified == 0 {
		t.Errorf("%d preemptions, %d of %d blocks wrong", report.Preempted, d.BlocksWrong, d.BlocksVerified)
	}
}

// late is a worker of rank 1 that tells of what has ended many steps later.
type late struct {
	connector.Worker
	held []*connector.Output
}

func (w *late) Collect(finished []string) *connector.Output {
	w.held = append(w.held, w.Worker.Collect(finished))
	if len(w.held) < 50 {
		return nil
	}
	out := w.held[0]
	w.held = w.held[1:]
	return out
}

// Ranks end one by one: what the first one said did not come must not be used when the last one has arrived.
func TestBlocksThatFailedOnTheFirstRank(t *testing.T) {
	s := &shelf{gone: func(key string) bool { return strings.Contains(key, ":0:") }}
	inner := shelved(t, s)
	var f connector.Factory
	err := f.Register("late", connector.Transport{
		NewScheduler: func(set connector.Setup) (connector.Scheduler, error) {
			set.Config.Connector = "shelf"
			return inner.Scheduler(set)
		},
		NewWorker: func(set connector.Setup) (connector.Worker, error) {
			set.Config.Connector = "shelf"
			w, err := inner.Worker(set)
			if set.Rank == 1 {
				w = &late{Worker: w}
			}
			return w, err
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	c := connect(t, newFleet(t, inTime, 1, 1, sameSeed), &f, "late", 1, func(cfg *sim.KVConfig) { cfg.Ranks = 2 })
	if err := c.Run(t.Context(), trace(t, small()[:20])); err != nil {
		t.Fatal(err)
	}
	if d := c.Report().Engines[1].Stats; d.BlocksWrong > 0 || d.BlocksFailed == 0 || d.BlocksVerified > 0 {
		t.Errorf("%d blocks wrong, %d failed, %d taken for good", d.BlocksWrong, d.BlocksFailed, d.BlocksVerified)
	}
}

// An id is not free before its blocks are: or those of the first request with it would be forgotten.
func TestAnIDIsInUseWhileItsBlocksAreRead(t *testing.T) {
	c := connect(t, newFleet(t, 0, 1, 0, sameSeed), transports.Default(), "tcp", 1, nil)
	e := c.engines[0]
	r := sim.Request{ID: "same", Prompt: make([]uint32, 160), Output: 1, Params: &connector.Params{DoRemoteDecode: true}}
	if err := e.Submit(r); err != nil {
		t.Fatal(err)
	}
	for e.Busy() {
		if _, err := e.Step(1); err != nil {
			t.Fatal(err)
		}
	}
	if err := e.Submit(r); !errors.Is(err, sim.ErrDuplicateID) {
		t.Errorf("%v, want %v", err, sim.ErrDuplicateID)
	}
	if ok, err := e.Reset(1); ok || err != nil {
		t.Errorf("the cache was reset under a consumer: %v, %v", ok, err)
	}
}

// Between the step that finishes a request and the end of that step's time a client may come with the same id.
func TestAHostRefusesAnIDThatWaitsForItsAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(t, 1, 1, 0, nil)
		h := sim.NewHost(sim.DefaultFleetConfig(), f.engines[0])
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- h.Run(ctx, sim.Clock{Began: time.Now(), Start: event.Time(time.Second), Speed: 1}) }()
		r := sim.Request{ID: "x", Prompt: []uint32{1, 2, 3}, Output: 1}
		answered := make(chan error, 1)
		go func() {
			_, err := h.Do(ctx, r)
			answered <- err
		}()
		synctest.Wait() // its only step is computed, and takes 20 ms
		if _, err := h.Do(ctx, r); !errors.Is(err, sim.ErrDuplicateID) {
			t.Errorf("the second: %v", err)
		}
		if err := <-answered; err != nil {
			t.Errorf("the first: %v", err)
		}
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}

func TestConnectRefuses(t *testing.T) {
	f := newFleet(t, 0, 1, 0, nil)
	if err := f.engines[0].Connect(sim.KVConfig{Layers: 1000, HeadSize: 7}); err == nil {
		t.Error("nonsense was taken")
	}
	cfg := sim.DefaultKVConfig()
	cfg.Factory, cfg.Log, cfg.Events = transports.Default(), slog.New(slog.NewTextHandler(io.Discard, nil)), &recorder{}
	cfg.Records, cfg.Stats = func(event.Records) {}, func(*connector.Stats) {}
	cfg.Transfer = connector.DefaultConfig()
	cfg.Transfer.Connector, cfg.Transfer.Role = "carrier pigeon", connector.Both
	if err := f.engines[0].Connect(cfg); err == nil {
		t.Error("a transport that is not there was taken")
	}
}
