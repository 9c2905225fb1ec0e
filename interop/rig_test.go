package interop_test

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"reflect"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/prometheus/client_golang/prometheus"

	"kvstrata/bus"
	"kvstrata/event"
	"kvstrata/indexer/prefix"
	"kvstrata/publisher"
	"kvstrata/subscriber"
)

// model is served by every engine of the tests; its name needs encoding in subjects.
const model = "meta/Llama-3.1-8B"

// rig is what stands behind an engine: a NATS server, subscribers that come and go, and a consumer.
type rig struct {
	t    *testing.T
	nats *bus.Server
	bus  *bus.Bus
	sink *recorder
	reg  *prometheus.Registry
	log  *slog.Logger
}

func newRig(t *testing.T) *rig {
	t.Helper()
	r := &rig{t: t, reg: prometheus.NewRegistry(), log: logTo(t, "kvstrata")}
	cfg := bus.DefaultServerConfig()
	cfg.Dir = t.TempDir()
	var err error
	if r.nats, err = bus.StartServer(cfg, r.log); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.nats.Shutdown)
	busCfg := bus.DefaultConfig()
	busCfg.URL, busCfg.LeaseTTL = r.nats.URL(), leaseTTL
	if r.bus, err = bus.Dial(t.Context(), busCfg, t.Name(), r.log, bus.InProcess(r.nats)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.bus.Close)
	r.sink = newRecorder()
	r.background(subscriber.NewConsumer(subscriber.DefaultConsumerConfig(), r.bus, r.sink, "interop", r.log, r.reg).Run)
	return r
}

// leaseTTL is how long a killed subscriber keeps its sources.
const leaseTTL = time.Second

// background runs something until the test or stop ends it, and checks that it ends well.
func (r *rig) background(run func(context.Context) error) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- run(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			r.t.Errorf("Run: %v", err)
		}
	})
	r.t.Cleanup(stop)
	return stop
}

// subscribe starts a subscriber of one engine, as the command does, and returns what stops it.
func (r *rig) subscribe(cfg subscriber.Config, flag string) (stop func()) {
	r.t.Helper()
	engines, err := subscriber.ParseEngine(flag)
	if err != nil {
		r.t.Fatal(err)
	}
	open := func(source event.Source, fence event.Fence) subscriber.Stream {
		return publisher.NewStream(publisher.DefaultStreamConfig(), r.bus, source, fence, r.log)
	}
	sub, err := subscriber.New(cfg, engines, r.bus, open, r.log, nil)
	if err != nil {
		r.t.Fatal(err)
	}
	return r.background(sub.Run)
}

// quiet is a configuration without probes, so that how a batch came does not hang on the clock.
func quiet() subscriber.Config {
	cfg := subscriber.DefaultConfig()
	cfg.Recovery.Probes = nil
	return cfg
}

// listen starts a subscriber of a fresh engine and waits until both have met: what is published next comes live.
func (r *rig) listen(cfg subscriber.Config, e *vllm) (stop func()) {
	r.t.Helper()
	stop = r.subscribe(cfg, e.engineFlag(e.endpoint, e.replay))
	e.await()
	r.awaitReason("connected, but no event yet")
	return stop
}

// awaitReason waits until the source's publisher gives a reason for its state.
func (r *rig) awaitReason(reason string) {
	r.t.Helper()
	eventually(r.t, "the source is "+reason, func() error {
		if st := r.sink.status(); st.Reason != reason {
			return fmt.Errorf("state %v: %s", st.State, st.Reason)
		}
		return nil
	})
}

func (e *vllm) source() event.Source {
	return event.Source{
		Cluster: event.DefaultCluster, Model: model, Instance: e.name, Rank: uint32(e.rank), Origin: event.Engine,
	}
}

// settle waits until the sink has all of the engine's present life, and its publisher says so in the state wanted.
func (r *rig) settle(e *vllm, want event.State) *event.Status {
	r.t.Helper()
	var st *event.Status
	eventually(r.t, fmt.Sprintf("the source is %v at %d", want, e.last()), func() error {
		st = r.sink.status()
		epoch, seq, started := r.sink.index.Seq(e.source())
		if !started || seq != e.last() || st.Seq != e.last() || st.Epoch != epoch || st.State != want {
			return fmt.Errorf("index at %d'%d; told %v (%s) at %d'%d, %+v", epoch, seq, st.State, st.Reason, st.Epoch, st.Seq, st.Ledger)
		}
		return nil
	})
	return st
}

// verify holds what arrived of the engine's present life against what vLLM published: every batch, its judgement, the
// resident set, the digests, the ledger and the raw stream.
func (r *rig) verify(e *vllm, st *event.Status, keepTokens bool) *truth {
	r.t.Helper()
	u := newTruth()
	batches := r.sink.batches(st.Epoch)
	next := event.Seq(0)
	for i := range batches {
		b := &batches[i]
		if b.First != next || b.Last > e.last() {
			r.t.Fatalf("batch %d to %d after %d of %d", b.First, b.Last, next, e.last())
		}
		next = b.Last + 1
		if b.Way == event.Lost {
			u.clear()
			want := []event.Event{{Kind: event.Cleared, Cause: event.ByResync, Group: event.NoGroup, LoRAID: event.NoLoRAID}}
			if diff := cmp.Diff(want, b.Events, cmpopts.EquateEmpty()); diff != "" {
				r.t.Errorf("lost batch %d: -want +got\n%s", b.First, diff)
			}
			continue
		}
		if e.story[b.First].hole {
			r.t.Fatalf("batch %d came, which vLLM never sent", b.First)
		}
		r.verifyBatch(e, u, b, keepTokens)
	}
	if next != e.last()+1 {
		r.t.Fatalf("the sink stands at %d, vLLM at %d", next, e.last()+1)
	}
	r.verifySet(e, u, st)
	r.verifyLedger(e, batches, st)
	r.verifyStream(e, st.Epoch)
	return u
}

func (r *rig) verifyBatch(e *vllm, u *truth, b *event.Batch, keepTokens bool) {
	r.t.Helper()
	published := e.story[b.First]
	if published.time == 0 {
		published.time = b.Time // vLLM's own clock
	}
	events, names := u.judge(published)
	want := event.Batch{
		First: published.seq, Last: published.seq, Way: b.Way, Time: published.time, Received: b.Received,
		Payload: b.Payload, Rank: e.rank, Events: events,
	}
	if published.payload != 0 {
		want.Payload = published.payload
	}
	for i := range events {
		if !keepTokens {
			events[i].Tokens, events[i].ExtraKeys = nil, nil
		}
	}
	got := *b
	got.Events = b.Events[:min(len(events), len(b.Events))]
	if !reflect.DeepEqual(want, got) { // which is quick, but tells nil from empty
		if diff := cmp.Diff(want, got, cmpopts.EquateEmpty()); diff != "" {
			r.t.Errorf("batch %d: -want +got\n%s", b.First, diff)
		}
	}
	if b.Received.Std().Before(published.time.Std().Add(-time.Minute)) {
		r.t.Errorf("batch %d: received %v", b.First, b.Received.Std())
	}
	gotNames := make(map[block]event.PrefixHash)
	for _, ev := range b.Events[len(got.Events):] {
		for _, bl := range ev.Blocks {
			gotNames[block{bl.Hash, ev.Group.Index()}] = bl.Prefix
			if ev.Kind != event.Stored || bl.Effect != 0 || ev.Unrooted {
				r.t.Errorf("batch %d: a naming is %+v", b.First, ev)
			}
		}
	}
	if diff := cmp.Diff(names, gotNames, cmp.AllowUnexported(block{})); diff != "" {
		r.t.Errorf("batch %d tells names: -want +got\n%s", b.First, diff)
	}
}

// verifySet compares the index with the truth, entry by entry.
func (r *rig) verifySet(e *vllm, u *truth, st *event.Status) {
	r.t.Helper()
	if diff := cmp.Diff(u.resident(), residentIn(r.sink.index, e), asIndexed...); diff != "" {
		r.t.Errorf("the index: -want +got\n%s", diff)
	}
	if st.Digest != u.digest() {
		r.t.Errorf("digest %x is told, want %x", st.Digest, u.digest())
	}
	agreed, differed := r.sink.digests()
	if agreed == 0 || differed > 0 {
		r.t.Errorf("%d digests agreed, %d differed", agreed, differed)
	}
	for _, name := range []string{"holes", "resyncs", "fenced_messages", "broken_messages"} {
		if n := r.counter("kvstrata_subscriber_consumer_" + name + "_total"); n > 0 {
			r.t.Errorf("the consumer counts %v %s", n, name)
		}
	}
}

// asIndexed compares what an index knows: not since when a block is resident, which ages in EVICTED events tell of.
var asIndexed = cmp.Options{cmp.AllowUnexported(place{}), cmpopts.IgnoreFields(holding{}, "Since")}

func residentIn(index *prefix.Index, e *vllm) map[place]holding {
	all := make(map[place]holding)
	for entry := range index.Resident(e.source()) {
		all[place{entry.Hash.Clone(), entry.Group.Index(), entry.Tier}] = holding{
			Copies: int(entry.Copies), Prefix: entry.Prefix,
		}
	}
	return all
}

// verifyLedger adds up what the sink got, and holds the ledger told against it.
func (r *rig) verifyLedger(e *vllm, batches []event.Batch, st *event.Status) {
	r.t.Helper()
	want := event.Ledger{Duplicates: st.Ledger.Duplicates}
	for i := range batches {
		want.Count(&batches[i])
	}
	if diff := cmp.Diff(want, st.Ledger, cmpopts.EquateEmpty()); diff != "" {
		r.t.Errorf("ledger: -from batches +told\n%s", diff)
	}
	if !st.Ledger.Balanced() || st.Ledger.First != 0 || st.Ledger.Last != e.last() {
		r.t.Errorf("ledger does not account for 0 to %d: %+v", e.last(), st.Ledger)
	}
}

// verifyStream reads the whole stream raw: each sequence of a life stands in it once, in order.
func (r *rig) verifyStream(e *vllm, epoch event.Epoch) {
	r.t.Helper()
	end, err := r.bus.Position(r.t.Context())
	if err != nil {
		r.t.Fatal(err)
	}
	reader, err := r.bus.Read(r.t.Context(), 1)
	if err != nil {
		r.t.Fatal(err)
	}
	defer reader.Close()
	var dec event.Decoder
	next, twice := event.Seq(0), 0
	var fence event.Fence
	for at := uint64(0); at < end.Sequence; {
		d, err := reader.Next(r.t.Context())
		if err == nil {
			err = d.Ack()
		}
		if err != nil {
			r.t.Fatal(err)
		}
		at = d.Sequence
		if d.Kind != bus.Events || d.Head.Epoch != epoch {
			continue
		}
		if d.Head.Fence < fence {
			r.t.Errorf("message %d has fence %d, after %d", at, d.Head.Fence, fence)
		}
		fence = d.Head.Fence
		batches, err := dec.Decode(d.Data)
		if err != nil {
			r.t.Fatal(err)
		}
		for _, b := range batches {
			switch {
			case b.First == next:
				next = b.Last + 1
			case b.Last < next:
				twice++
			default:
				r.t.Errorf("the stream has %d to %d after %d", b.First, b.Last, next)
			}
		}
	}
	if next < e.last()+1 || twice > 0 {
		r.t.Errorf("the stream ends before %d, want %d; %d batches stand in it twice", next, e.last()+1, twice)
	}
}

func (r *rig) counter(name string) float64 {
	families, err := r.reg.Gather()
	if err != nil {
		r.t.Fatal(err)
	}
	for _, f := range families {
		if f.GetName() == name {
			return f.GetMetric()[0].GetCounter().GetValue()
		}
	}
	r.t.Fatalf("no metric %s", name)
	return 0
}

// recorder is a sink that keeps everything that it is handed, and hands it on to an index.
type recorder struct {
	index *prefix.Index

	mu       sync.Mutex
	messages []event.Message
	statuses []event.Status
	agreed   int
	differed int
}

var _ subscriber.Sink = (*recorder)(nil)

func newRecorder() *recorder { return &recorder{index: prefix.New(prefix.DefaultConfig())} }

func (s *recorder) Restore(ctx context.Context, object io.Reader) (*event.Checkpoint, error) {
	return s.index.Restore(ctx, object)
}

func (s *recorder) Apply(ctx context.Context, m *event.Message) (event.Digest, error) {
	s.mu.Lock()
	s.messages = append(s.messages, cloned(m))
	s.mu.Unlock()
	return s.index.Apply(ctx, m)
}

func (s *recorder) Tell(st *event.Status) {
	s.index.Tell(st)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.statuses = append(s.statuses, *st)
}

func (s *recorder) Compared(source event.Source, agreed bool) {
	s.index.Compared(source, agreed)
	s.mu.Lock()
	defer s.mu.Unlock()
	if agreed {
		s.agreed++
	} else {
		s.differed++
	}
}

// status returns what the source's publisher said last.
func (s *recorder) status() *event.Status {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.statuses) == 0 {
		return &event.Status{Reason: "nothing told yet"}
	}
	st := s.statuses[len(s.statuses)-1]
	return &st
}

func (s *recorder) digests() (agreed, differed int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.agreed, s.differed
}

// batches returns what was applied of one life.
func (s *recorder) batches(epoch event.Epoch) (all []event.Batch) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := range s.messages {
		if s.messages[i].Epoch == epoch {
			all = append(all, s.messages[i].Batches...)
		}
	}
	return all
}

// epochs returns the lives seen, in order.
func (s *recorder) epochs() (all []event.Epoch) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := range s.messages {
		all = append(all, s.messages[i].Epoch)
	}
	return slices.Compact(all)
}

// cloned copies a message deeply: the consumer reuses it.
func cloned(m *event.Message) event.Message {
	c := *m
	c.Batches = own(m.Batches)
	for i := range c.Batches {
		b := &c.Batches[i]
		b.Events = own(b.Events)
		for j := range b.Events {
			ev := &b.Events[j]
			ev.Parent = ev.Parent.Clone()
			ev.Blocks = own(ev.Blocks)
			for k := range ev.Blocks {
				ev.Blocks[k].Hash = ev.Blocks[k].Hash.Clone()
			}
			ev.Tokens = own(ev.Tokens)
			ev.ExtraKeys = own(ev.ExtraKeys)
			for k, key := range ev.ExtraKeys {
				ev.ExtraKeys[k] = own(key)
			}
		}
	}
	return c
}

// own copies a slice; an empty one is nil.
func own[T any](s []T) []T {
	if len(s) == 0 {
		return nil
	}
	return slices.Clone(s)
}
