package history_test

import (
	"context"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"testing"
	"time"

	"kvstrata/event"
	"kvstrata/event/resident"
	"kvstrata/indexer/history"
	"kvstrata/indexer/history/embedded"
	"kvstrata/indexer/history/embedded/embeddedtest"
	"kvstrata/migrations"
)

func TestMain(m *testing.M) { embeddedtest.Main(m) }

const patience = 60 * time.Second

func quiet() *slog.Logger {
	return slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn}))
}

func silent() *slog.Logger { return slog.New(slog.DiscardHandler) }

var (
	oneSeed  = flag.Uint64("history.seed", 0, "the only seed of TestExactness; 0 = many")
	oneLives = flag.Int("history.lives", 1, "how many bus streams that has")
	update   = flag.Bool("update", false, "write the golden files anew")
)

// eventually waits for a condition.
func eventually(t testing.TB, what string, cond func() bool) {
	t.Helper()
	for deadline := time.Now().Add(patience); !cond(); <-time.After(2 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not in %v: %s", patience, what)
		}
	}
}

// engine is a running ClickHouse engine.
type engine struct {
	*embedded.Engine
	cluster string // whose tables it has
}

func startEngine(t testing.TB) *engine { return &engine{Engine: embeddedtest.Start(t, quiet())} }

// startClusterEngine starts an engine that has a cluster's tables, as the only node.
func startClusterEngine(t testing.TB) *engine {
	t.Helper()
	e := &engine{embeddedtest.StartNode(t, quiet()), embeddedtest.Cluster}
	db := embeddedtest.OneNode(e.Socket(), "default")
	if _, err := db.ExecContext(t.Context(), "CREATE DATABASE kvstrata"); err != nil {
		t.Fatal(err)
	}
	db.Close()
	db = embeddedtest.OneNode(e.Socket(), "kvstrata")
	defer db.Close()
	if _, err := migrations.Up(t.Context(), db, migrations.Config{Cluster: e.cluster}); err != nil {
		t.Fatal(err)
	}
	return e
}

// table returns the name of the table that has a table's rows.
func (e *engine) table(name string) string {
	if e.cluster != "" {
		name += "_local"
	}
	return name
}

func (e *engine) config() history.Config {
	cfg := history.DefaultConfig()
	cfg.Address, cfg.Cluster = "unix://"+e.Socket(), e.cluster
	cfg.FlushEvery, cfg.RollUpEvery = 20*time.Millisecond, 20*time.Millisecond
	return cfg
}

// startWriter runs a writer until the test or stop ends it.
func startWriter(t testing.TB, cfg history.Config) (w *history.Writer, stop func()) {
	t.Helper()
	w, err := history.NewWriter(cfg, quiet(), nil)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- w.Run(ctx) }()
	ended := false
	stop = func() {
		if ended {
			return
		}
		ended = true
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
	t.Cleanup(stop)
	return w, stop
}

func newReader(t testing.TB, cfg history.Config) *history.Reader {
	t.Helper()
	r, err := history.NewReader(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = r.Close() })
	return r
}

// stream is a bus stream of one source as its publisher would write it: judged batches in messages.
type stream struct {
	source   event.Source
	set      *resident.Set
	epoch    event.Epoch
	seq      event.Seq
	messages []*event.Message
	position event.Position
	now      time.Time
}

func newStream(instance string) *stream {
	return &stream{
		source: event.Source{Cluster: event.DefaultCluster, Model: "m/model", Instance: instance, Origin: event.Engine},
		set:    resident.New(resident.DefaultConfig()), epoch: 7,
		position: event.Position{Stream: "KV_EVENTS", Created: 1_000},
		now:      time.Now().Add(-10 * time.Minute).Truncate(time.Millisecond),
	}
}

// publish adds a message of one batch.
func (s *stream) publish(events ...event.Event) *event.Message {
	b := event.Batch{
		First: s.seq, Last: s.seq, Way: event.Live, Time: event.UnixTime(s.now), Received: event.UnixTime(s.now), Rank: -1, Events: events,
	}
	s.seq++
	s.set.Judge(&b)
	s.position.Sequence++
	m := &event.Message{
		Source: s.source, Epoch: s.epoch, Fence: 1, Batches: []event.Batch{b}, Digest: s.set.Digest(), HasDigest: true,
		Position: s.position, Stored: event.UnixTime(s.now),
	}
	s.now = s.now.Add(time.Second)
	s.messages = append(s.messages, m)
	return m
}

func run(kind event.Kind, hashes ...uint64) event.Event {
	ev := event.Event{Kind: kind, Tier: event.GPU, Group: 0, LoRAID: event.NoLoRAID}
	for _, h := range hashes {
		ev.Blocks = append(ev.Blocks, event.Block{Hash: event.IntHash(h), Copies: -1, Age: -1})
	}
	if kind == event.Stored {
		ev.BlockSize, ev.Spec, ev.Tokens = 16, event.SpecFull, make([]uint32, 16*len(hashes))
		for i := range ev.Tokens {
			ev.Tokens[i] = uint32(hashes[i/16])
		}
	}
	return ev
}

func under(ev event.Event, parent uint64) event.Event {
	ev.HasParent, ev.Parent = true, event.IntHash(parent)
	return ev
}

// feed hands messages over as a consumer does.
func feed(t testing.TB, w *history.Writer, messages ...*event.Message) {
	t.Helper()
	for _, m := range messages {
		digest, err := w.Apply(t.Context(), m)
		if err != nil {
			t.Fatal(err)
		}
		if digest != m.Digest {
			t.Fatalf("digest after %d is %x, want %x", m.Batches[0].First, digest, m.Digest)
		}
		w.Reached(m.Position)
	}
}

func committed(t testing.TB, w *history.Writer, m *event.Message) {
	t.Helper()
	eventually(t, fmt.Sprintf("sequence %d is committed (%s)", m.Batches[0].Last, w.Trouble()), func() bool {
		_, seq, ok := w.Seq(m.Source)
		return ok && seq >= m.Batches[0].Last && w.Committed().Sequence >= m.Position.Sequence
	})
}
