package bus_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"kvstrata/bus"
	"kvstrata/event"
	"kvstrata/event/resident"
	"kvstrata/leaktest"
	"kvstrata/logtest"
	"kvstrata/porttest"
)

var source = event.Source{Cluster: "c", Model: "org/model.v1", Instance: "pod-1:8000", Rank: 2, Origin: event.Engine}

func quiet() *slog.Logger { return slog.New(slog.DiscardHandler) }

// start runs a server on a port that stays the same over restarts, and connects to it.
func start(t *testing.T, cfg bus.Config) (*bus.Server, *bus.Bus, bus.ServerConfig) {
	t.Helper()
	srvCfg := bus.DefaultServerConfig()
	srvCfg.Dir, srvCfg.Port = t.TempDir(), porttest.Port(t)
	srv, err := bus.StartServer(srvCfg, quiet())
	if err != nil {
		t.Fatal(err)
	}
	cfg.URL = srv.URL()
	b, err := bus.Dial(t.Context(), cfg, "test", quiet())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		b.Close()
		srv.Shutdown()
	})
	return srv, b, srvCfg
}

// publish stores one event message.
func publish(t *testing.T, b *bus.Bus, first, last event.Seq) uint64 {
	t.Helper()
	var enc event.Encoder
	for seq := first; seq <= last; seq++ {
		enc.Append(&event.Batch{First: seq, Last: seq, Way: event.Live})
	}
	head := bus.Head{Epoch: 1, Fence: 1, First: first, Last: last}
	future, err := b.PublishAsync(&nats.Msg{Subject: bus.Subject(bus.Events, source), Header: head.Header(), Data: enc.Encode(nil)})
	if err != nil {
		t.Fatal(err)
	}
	select {
	case ack := <-future.Ok():
		return ack.Sequence
	case err := <-future.Err():
		t.Fatal(err)
	case <-t.Context().Done():
	}
	return 0
}

func TestSubjects(t *testing.T) {
	got := bus.Subject(bus.Events, source)
	if want := "kv.v1.ev.c.org%2Fmodel%2Ev1.pod-1%3A8000.2.engine"; got != want {
		t.Errorf("%s, want %s", got, want)
	}
	kind, back, err := bus.ParseSubject(got)
	if err != nil || kind != bus.Events || back != source {
		t.Errorf("%v %+v %v", kind, back, err)
	}
	for _, bad := range []string{"", "kv.v1", "kv.v2.ev.c.m.i.0.engine", "kv.v1.ev.c.m.i.0", "kv.v1.ev.c.m.i.0.engine.x"} {
		if _, _, err := bus.ParseSubject(bad); err == nil {
			t.Errorf("%q was taken", bad)
		}
	}
}

func TestHeads(t *testing.T) {
	want := bus.Head{Epoch: 1 << 60, Fence: 7, First: 3, Last: 9, Blocks: 12, Digest: 1<<64 - 1, HasDigest: true}
	got, err := bus.ParseHead(want.Header())
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	for name, value := range map[string]string{"Kv-Epoch": "x", "Kv-Last": "2", "Kv-Fence": "", "Kv-Digest": "-1"} {
		h := want.Header()
		h.Set(name, value)
		if _, err := bus.ParseHead(h); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("%s %q: %v", name, value, err)
		}
	}
}

func TestConfigNamesEveryProblem(t *testing.T) {
	err := bus.Config{}.Validate()
	for _, flag := range []string{"--nats-replicas", "--nats-max-age", "--nats-max-bytes", "--lease-ttl"} {
		if err == nil || !strings.Contains(err.Error(), flag) {
			t.Errorf("%v does not name %s", err, flag)
		}
	}
}

func TestReaderGoesOnOverARestartOfNATS(t *testing.T) {
	srv, b, srvCfg := start(t, bus.DefaultConfig())
	for seq := range event.Seq(3) {
		publish(t, b, seq, seq)
	}
	r, err := b.Read(t.Context(), 2)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	next := func(want event.Seq) {
		t.Helper()
		d, err := r.Next(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if d.Head.First != want || d.Source != source || d.Sequence != uint64(want)+1 {
			t.Fatalf("got sequence %d at %d, want %d", d.Head.First, d.Sequence, want)
		}
	}
	next(1)
	next(2)
	srv.Shutdown()
	again, err := bus.StartServer(srvCfg, quiet())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(again.Shutdown)
	eventually(t, b.Connected)
	publish(t, b, 3, 3)
	next(3)
}

func TestReaderNoticesAnotherStream(t *testing.T) {
	srv, b, srvCfg := start(t, bus.DefaultConfig())
	publish(t, b, 0, 0)
	r, err := b.Read(t.Context(), 1)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if _, err := r.Next(t.Context()); err != nil {
		t.Fatal(err)
	}
	srv.Shutdown()
	srvCfg.Dir = t.TempDir()
	again, err := bus.StartServer(srvCfg, quiet())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(again.Shutdown)
	cfg := bus.DefaultConfig()
	cfg.URL = again.URL()
	other, err := bus.Dial(t.Context(), cfg, "other", quiet()) // makes the streams anew
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	if _, err := r.Next(t.Context()); !errors.Is(err, bus.ErrStreamChanged) {
		t.Errorf("%v, want ErrStreamChanged", err)
	}
}

func TestReadOfOneSource(t *testing.T) {
	_, b, _ := start(t, bus.DefaultConfig())
	publish(t, b, 0, 0)
	other := source
	other.Instance = "another"
	payload, err := event.MarshalStatus(&event.Status{State: event.StateLive})
	if err != nil {
		t.Fatal(err)
	}
	future, err := b.PublishAsync(&nats.Msg{Subject: bus.Subject(bus.Status, other), Data: payload})
	if err != nil {
		t.Fatal(err)
	}
	<-future.Ok()
	r, err := b.Read(t.Context(), 1, other)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	d, err := r.Next(t.Context())
	if err != nil || d.Kind != bus.Status || d.Source != other {
		t.Errorf("%+v, %v", d, err)
	}
}

func TestReadOfWhatConnectorsTell(t *testing.T) {
	_, b, _ := start(t, bus.DefaultConfig())
	shelf := event.Source{Cluster: "c", Model: "org/m.1", Instance: "redis://host:1/0", Origin: event.Store}
	var want []string
	for _, s := range []struct {
		kind   bus.Kind
		source event.Source
		read   bool
	}{
		{bus.Events, event.Source{Cluster: "c", Model: "org/m.1", Instance: "a.b*", Rank: 3, Origin: event.Connector}, true},
		{bus.Events, event.Source{Cluster: "c", Model: "org/m.1", Instance: "a.b*", Origin: event.Engine}, false},
		{bus.Events, event.Source{Cluster: "c", Model: "org/m", Instance: "a", Origin: event.Connector}, false},
		{bus.Events, event.Source{Cluster: "d", Model: "org/m.1", Instance: "a", Origin: event.Connector}, false},
		{bus.Status, event.Source{Cluster: "c", Model: "org/m.1", Instance: "a", Origin: event.Connector}, false},
		{bus.Events, shelf, false},
		{bus.Events, event.Source{Cluster: "c", Model: "org/m.1", Origin: event.Connector}, true},
		{bus.Status, shelf, true},
	} {
		msg := &nats.Msg{Subject: bus.Subject(s.kind, s.source), Header: bus.Head{Epoch: 1}.Header()}
		future, err := b.PublishAsync(msg)
		if err != nil {
			t.Fatal(err)
		}
		<-future.Ok()
		if s.read {
			want = append(want, msg.Subject)
		}
	}
	r, err := b.ReadTold(t.Context(), 1, shelf)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	for _, subject := range want {
		d, err := r.Next(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if got := bus.Subject(d.Kind, d.Source); got != subject {
			t.Errorf("%s, want %s", got, subject)
		}
	}
}

func TestReadRecords(t *testing.T) {
	_, b, _ := start(t, bus.DefaultConfig())
	for _, kind := range []bus.Kind{bus.Transfer, bus.Events, bus.Lookup, bus.Transfer, bus.GPU, bus.Transfer} {
		future, err := b.PublishAsync(&nats.Msg{Subject: bus.Subject(kind, source), Header: bus.Head{Epoch: 1}.Header(), Data: []byte("x")})
		if err != nil {
			t.Fatal(err)
		}
		<-future.Ok()
	}
	read := func(behind event.Position, want ...uint64) event.Position {
		t.Helper()
		r, err := b.ReadRecords(t.Context(), behind)
		if err != nil {
			t.Fatal(err)
		}
		defer r.Close()
		for _, sequence := range want {
			d, err := r.Next(t.Context())
			if err != nil || d.Source != source || d.Sequence != sequence || string(d.Data) != "x" {
				t.Fatalf("%+v, %v, want a record at %d", d, err, sequence)
			}
			if _, err := d.Records(); err == nil {
				t.Errorf("x is a message of kind %s", d.Kind)
			}
		}
		return r.Identity()
	}
	at := read(event.Position{}, 1, 2, 3, 4, 5)
	at.Sequence = 1
	read(at, 2, 3, 4, 5)
	at.Sequence, at.Created = 4, at.Created-1
	read(at, 1, 2, 3, 4, 5) // a place in another stream
}

func TestTheTwoNewestCheckpointsStay(t *testing.T) {
	_, b, _ := start(t, bus.DefaultConfig())
	snap := resident.New(resident.DefaultConfig()).Snapshot()
	for i := range 4 {
		cp := &event.Checkpoint{Source: source, Epoch: 5, Fence: 6, Seq: event.Seq(i), Written: event.Time(100 + i)}
		if err := b.PutCheckpoint(t.Context(), cp, snap.Entries()); err != nil {
			t.Fatal(err)
		}
	}
	names, err := b.Checkpoints(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	var seqs []event.Seq
	for _, n := range names[source] {
		seqs = append(seqs, n.Seq)
	}
	if diff := cmp.Diff([]event.Seq{3, 2}, seqs); diff != "" {
		t.Error(diff)
	}
	read := func(r io.Reader) (*event.Checkpoint, error) { return event.ReadCheckpoint(r, func(*event.Entry) {}) }
	cp, err := b.LoadCheckpoint(t.Context(), names[source][0], read)
	if err != nil || cp.Seq != 3 {
		t.Errorf("%+v, %v", cp, err)
	}
	to := event.Position{Stream: bus.EventStream, Created: 77, Sequence: 99}
	if err := b.MoveCheckpoint(t.Context(), names[source][0], to); err != nil {
		t.Fatal(err)
	}
	if cp, err = b.LoadCheckpoint(t.Context(), names[source][0], read); err != nil || cp.Seq != 3 || cp.Position != to {
		t.Errorf("%+v, %v", cp, err)
	}
}

// Whenever its context ends, a load leaves no goroutine behind: TestMain looks.
func TestALoadMayBeCancelledAtAnyMoment(t *testing.T) {
	_, b, _ := start(t, bus.DefaultConfig())
	set := resident.New(resident.DefaultConfig())
	blocks := make([]event.Block, 50_000) // more than one chunk
	for i := range blocks {
		blocks[i] = event.Block{Hash: event.IntHash(uint64(i)), Effect: 1, Copies: -1, Age: -1}
	}
	batch := &event.Batch{Events: []event.Event{{Kind: event.Stored, Tier: event.GPU, Group: event.NoGroup, Blocks: blocks}}}
	if err := set.Apply(batch); err != nil {
		t.Fatal(err)
	}
	cp := &event.Checkpoint{Source: source, Epoch: 5, Fence: 6, Seq: 1, Written: 100, Entries: uint64(len(blocks))}
	done := b.Hurry()
	err := b.PutCheckpoint(t.Context(), cp, set.Snapshot().Entries())
	done()
	if err != nil {
		t.Fatal(err)
	}
	names, err := b.Checkpoints(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	read := func(r io.Reader) (*event.Checkpoint, error) { return event.ReadCheckpoint(r, func(*event.Entry) {}) }
	if _, err := b.LoadCheckpoint(t.Context(), names[source][0], read); err != nil {
		t.Fatal(err)
	}
	whole := time.Since(began)
	cancelled := 0
	for i := range 100 {
		ctx, cancel := context.WithTimeout(t.Context(), whole*time.Duration(i)/100)
		if _, err := b.LoadCheckpoint(ctx, names[source][0], read); err != nil {
			cancelled++
		}
		cancel()
	}
	if cancelled == 0 {
		t.Error("no load was cut short")
	}
}

func TestControlRequests(t *testing.T) {
	_, b, _ := start(t, bus.DefaultConfig())
	if err := b.RequestCheckpoint(t.Context(), source); err == nil {
		t.Error("nobody listens, and no error")
	}
	asked := make(chan string, 1)
	sub, err := b.HandleControl(source, func(request string) string {
		asked <- request
		return "ok"
	})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = sub.Unsubscribe() }()
	if err := b.RequestCheckpoint(t.Context(), source); err != nil {
		t.Fatal(err)
	}
	if got := <-asked; got != bus.CheckpointRequest {
		t.Error(got)
	}
}

func TestOneHoldsALease(t *testing.T) {
	cfg := bus.DefaultConfig()
	cfg.LeaseTTL = time.Second
	_, b, _ := start(t, cfg)
	first, err := b.Acquire(t.Context(), source, "first")
	if err != nil {
		t.Fatal(err)
	}
	keepCtx, stopKeeping := context.WithCancel(t.Context())
	kept := make(chan error, 1)
	go func() { kept <- first.Keep(keepCtx) }()

	short, cancel := context.WithTimeout(t.Context(), 2*cfg.LeaseTTL)
	if _, err := b.Acquire(short, source, "second"); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a held lease was given away: %v", err)
	}
	cancel()
	stopKeeping() // the holder vanishes without a word
	if err := <-kept; err != nil {
		t.Error(err)
	}
	second, err := b.Acquire(t.Context(), source, "second")
	if err != nil {
		t.Fatal(err)
	}
	if second.Fence <= first.Fence {
		t.Errorf("fence %d after %d", second.Fence, first.Fence)
	}
	if err := first.Keep(t.Context()); !errors.Is(err, bus.ErrLeaseLost) {
		t.Errorf("%v, want ErrLeaseLost", err)
	}
	if err := second.Release(t.Context()); err != nil {
		t.Fatal(err)
	}
	begin := time.Now()
	third, err := b.Acquire(t.Context(), source, "third")
	if err != nil {
		t.Fatal(err)
	}
	if third.Fence <= second.Fence {
		t.Errorf("fence %d after %d", third.Fence, second.Fence)
	}
	if took := time.Since(begin); took > cfg.LeaseTTL {
		t.Logf("a released lease took %v: released leases are free at once", took)
	}
}

// A holder that was stopped in the middle of a renewal does not know its newest revision; it releases the lease all the same.
func TestALeaseIsReleasedAfterARenewalWithoutAnAnswer(t *testing.T) {
	srv, b, _ := start(t, bus.DefaultConfig())
	lease, err := b.Acquire(t.Context(), source, "holder")
	if err != nil {
		t.Fatal(err)
	}
	conn, err := nats.Connect(srv.URL())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	js, err := jetstream.New(conn)
	if err != nil {
		t.Fatal(err)
	}
	kv, err := js.KeyValue(t.Context(), bus.LeaseBucket)
	if err != nil {
		t.Fatal(err)
	}
	keys, err := kv.Keys(t.Context())
	if err != nil || len(keys) != 1 {
		t.Fatalf("keys %v, %v", keys, err)
	}
	entry, err := kv.Get(t.Context(), keys[0])
	if err != nil {
		t.Fatal(err)
	}
	if _, err := kv.Update(t.Context(), keys[0], entry.Value(), entry.Revision()); err != nil {
		t.Fatal(err)
	}
	if err := lease.Release(t.Context()); err != nil {
		t.Error(err)
	}
	if _, err := kv.Get(t.Context(), keys[0]); !errors.Is(err, jetstream.ErrKeyNotFound) {
		t.Errorf("the lease is there still: %v", err)
	}
}

func TestALeaseOutlivesNATS(t *testing.T) {
	cfg := bus.DefaultConfig()
	cfg.LeaseTTL = time.Second
	srv, b, srvCfg := start(t, cfg)
	lease, err := b.Acquire(t.Context(), source, "holder")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	kept := make(chan error, 1)
	go func() { kept <- lease.Keep(ctx) }()
	srv.Shutdown()
	srvCfg.Dir = t.TempDir() // the bucket is lost with everything else
	again, err := bus.StartServer(srvCfg, quiet())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(again.Shutdown)
	cfg.URL = again.URL()
	other, err := bus.Dial(t.Context(), cfg, "other", quiet())
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	short, done := context.WithTimeout(t.Context(), 3*cfg.LeaseTTL)
	defer done()
	for short.Err() == nil { // the holder takes it again; until then anybody might
		if taken, err := other.Acquire(short, source, "other"); err == nil {
			if taken.Fence <= lease.Fence {
				t.Fatalf("fence %d after %d", taken.Fence, lease.Fence)
			}
			break
		}
	}
	select {
	case err := <-kept:
		if !errors.Is(err, bus.ErrLeaseLost) {
			t.Error(err)
		}
	default:
		cancel()
		if err := <-kept; err != nil {
			t.Error(err)
		}
	}
	cancel()
}

// When NATS loses its store, whoever held a source goes on with it: who waits leaves it the time to come back.
func TestAHolderGetsItsSourceBackWhenTheBucketIsLost(t *testing.T) {
	cfg := bus.DefaultConfig()
	cfg.LeaseTTL = time.Second
	srv, b, srvCfg := start(t, cfg)
	lease, err := b.Acquire(t.Context(), source, "first")
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	kept := make(chan error, 1)
	go func() { kept <- lease.Keep(ctx) }()
	cfg.URL = srv.URL()
	var said logtest.Buffer
	other, err := bus.Dial(t.Context(), cfg, "other", said.Logger())
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	got := make(chan *bus.Lease, 1)
	go func() {
		second, _ := other.Acquire(t.Context(), source, "second")
		got <- second
	}()
	eventually(t, func() bool { return strings.Contains(said.String(), "held by another subscriber") })
	srv.Shutdown()
	srvCfg.Dir = t.TempDir()
	again, err := bus.StartServer(srvCfg, quiet())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(again.Shutdown)
	eventually(t, func() bool { return b.Connected() && other.Connected() })
	select {
	case l := <-got:
		t.Fatalf("the second one has the source: fence %d after %d", l.Fence, lease.Fence)
	case err := <-kept:
		t.Fatalf("the first one lost it: %v", err)
	case <-time.After(4 * cfg.LeaseTTL):
	}
	stop()
	if err := <-kept; err != nil {
		t.Fatal(err)
	}
	if l := <-got; l == nil || l.Fence <= lease.Fence { // now it is free
		t.Errorf("the second one got %+v after fence %d", l, lease.Fence)
	}
}

func TestOneServerAFolder(t *testing.T) {
	cfg := bus.DefaultServerConfig()
	cfg.Dir, cfg.Port = t.TempDir(), porttest.Port(t)
	first, err := bus.StartServer(cfg, quiet())
	if err != nil {
		t.Fatal(err)
	}
	cfg.Port = porttest.Port(t)
	if second, err := bus.StartServer(cfg, quiet()); err == nil {
		second.Shutdown()
		t.Error("two servers have one folder")
	} else if !strings.Contains(err.Error(), cfg.Dir) {
		t.Errorf("%v does not name the folder", err)
	}
	first.Shutdown()
	again, err := bus.StartServer(cfg, quiet())
	if err != nil {
		t.Fatal(err)
	}
	again.Shutdown()
}

func TestServerThatCantStartSaysWhy(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	cfg := bus.DefaultServerConfig()
	cfg.Dir = t.TempDir()
	cfg.Port = l.Addr().(*net.TCPAddr).Port
	_, err = bus.StartServer(cfg, quiet())
	if err == nil || !strings.Contains(err.Error(), strconv.Itoa(cfg.Port)) {
		t.Errorf("%v does not name the port", err)
	}
}

func TestDialWaitsNoLongerThanItsContext(t *testing.T) {
	cfg := bus.DefaultConfig()
	cfg.URL = fmt.Sprintf("nats://127.0.0.1:%d", porttest.Port(t))
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	if _, err := bus.Dial(ctx, cfg, "test", quiet()); err == nil || !strings.Contains(err.Error(), "--nats") {
		t.Errorf("%v does not say what to do", err)
	}
}

// eventually waits until a condition holds.
func eventually(t *testing.T, holds func() bool) {
	t.Helper()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	deadline := time.After(20 * time.Second)
	for !holds() {
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatal("waited in vain")
		}
	}
}

// TestMain fails when a test leaves a goroutine behind.
func TestMain(m *testing.M) { os.Exit(leaktest.Run(m)) }
