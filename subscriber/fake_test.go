package subscriber_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/pebbe/zmq4"

	"kvstrata/bus"
	"kvstrata/event"
	"kvstrata/indexer/prefix"
	"kvstrata/leaktest"
	"kvstrata/porttest"
	"kvstrata/publisher"
	"kvstrata/subscriber"
)

// TestMain fails when a test leaves a goroutine behind.
func TestMain(m *testing.M) { os.Exit(leaktest.Run(m)) }

const patience = 30 * time.Second

// eventually waits for a condition.
func eventually(t testing.TB, what string, cond func() bool) {
	t.Helper()
	for deadline := time.Now().Add(patience); !cond(); <-time.After(2 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not in %v: %s", patience, what)
		}
	}
}

// fakeEngine is an engine that misbehaves on demand: a PUB socket whose batches may be kept off the wire, and a ROUTER
// that answers replays from what was published. One goroutine owns both.
type fakeEngine struct {
	t        testing.TB
	endpoint string
	replay   string
	do       chan func(pub *zmq4.Socket)
	stop     func()

	mu        sync.Mutex
	next      uint64
	payloads  map[uint64][]byte
	oldest    uint64 // first sequence that replays know
	withTopic bool   // in replays
	mute      bool   // replays are not answered
}

func startEngine(t testing.TB) *fakeEngine {
	e := &fakeEngine{t: t, withTopic: true}
	e.endpoint, e.replay = freeAddress(t), freeAddress(t)
	e.boot()
	t.Cleanup(func() { e.stop() })
	return e
}

func freeAddress(t testing.TB) string { return "tcp://" + porttest.Address(t) }

// boot begins a life: sequence 0, nothing to replay.
func (e *fakeEngine) boot() {
	e.mu.Lock()
	e.next, e.payloads, e.oldest = 0, make(map[uint64][]byte), 0
	e.mu.Unlock()
	e.do = make(chan func(*zmq4.Socket))
	ctx, cancel := context.WithCancel(context.Background())
	bound, ended := make(chan error, 1), make(chan struct{})
	go func() {
		defer close(ended)
		e.serve(ctx, bound)
	}()
	if err := <-bound; err != nil {
		e.t.Fatal(err)
	}
	e.stop = sync.OnceFunc(func() {
		cancel()
		<-ended
	})
}

// restart ends this life and begins another on the same addresses.
func (e *fakeEngine) restart() {
	e.stop()
	e.boot()
}

func (e *fakeEngine) serve(ctx context.Context, bound chan<- error) {
	zctx, err := zmq4.NewContext()
	if err != nil {
		bound <- err
		return
	}
	pub, err1 := zctx.NewSocket(zmq4.PUB)
	router, err2 := zctx.NewSocket(zmq4.ROUTER)
	if err := errors.Join(err1, err2); err != nil {
		bound <- err
		return
	}
	defer func() {
		if err := errors.Join(pub.Close(), router.Close(), zctx.Term()); err != nil {
			e.t.Error(err)
		}
	}()
	err = errors.Join(pub.SetLinger(0), router.SetLinger(0), router.SetSndhwm(0))
	bind := bindBoth(pub, e.endpoint, router, e.replay)
	for range 100 { // the port of the last life may still be closing
		if bind == nil {
			break
		}
		<-time.After(10 * time.Millisecond)
		bind = bindBoth(pub, e.endpoint, router, e.replay)
	}
	bound <- errors.Join(err, bind)
	poller := zmq4.NewPoller()
	poller.Add(router, zmq4.POLLIN)
	for ctx.Err() == nil {
		select {
		case f := <-e.do:
			f(pub)
			continue
		default:
		}
		ready, err := poller.Poll(2 * time.Millisecond)
		if err != nil {
			e.t.Error(err)
			return
		}
		if len(ready) > 0 {
			e.answer(router)
		}
	}
}

func bindBoth(pub *zmq4.Socket, live string, router *zmq4.Socket, replay string) error {
	if err := pub.Bind(live); err != nil {
		return err
	}
	if err := router.Bind(replay); err != nil {
		return errors.Join(err, pub.Unbind(live))
	}
	return nil
}

func (e *fakeEngine) answer(router *zmq4.Socket) {
	frames, err := router.RecvMessageBytes(0)
	if err != nil || len(frames) != 3 || len(frames[2]) != 8 {
		e.t.Errorf("replay request %q, %v", frames, err)
		return
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.mute {
		return
	}
	send := func(topic string, seq uint64, payload []byte) {
		number := binary.BigEndian.AppendUint64(nil, seq)
		if e.withTopic {
			_, err = router.SendMessage(frames[0], "", topic, number, payload)
		} else {
			_, err = router.SendMessage(frames[0], "", number, payload)
		}
		if err != nil {
			e.t.Error(err)
		}
	}
	for seq := max(binary.BigEndian.Uint64(frames[2]), e.oldest); seq < e.next; seq++ {
		if payload, ok := e.payloads[seq]; ok {
			send("topic", seq, payload)
		}
	}
	send("", 1<<64-1, nil)
}

// forget makes replays begin at a sequence.
func (e *fakeEngine) forget(before uint64) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.oldest = before
}

// publish publishes batches and sends them.
func (e *fakeEngine) publish(batches ...*event.Batch) { e.put(true, batches) }

// drop publishes batches that don't reach the wire, but replays know them.
func (e *fakeEngine) drop(batches ...*event.Batch) { e.put(false, batches) }

func (e *fakeEngine) put(sent bool, batches []*event.Batch) {
	for _, b := range batches {
		e.raw(sent, publisher.AppendVLLM(nil, b, publisher.MapForm))
	}
}

func (e *fakeEngine) raw(sent bool, payload []byte) {
	e.mu.Lock()
	seq := e.next
	e.next++
	e.payloads[seq] = payload
	e.mu.Unlock()
	if !sent {
		return
	}
	done := make(chan error)
	e.do <- func(pub *zmq4.Socket) {
		_, err := pub.SendMessage("topic", binary.BigEndian.AppendUint64(nil, seq), payload)
		done <- err
	}
	if err := <-done; err != nil {
		e.t.Fatal(err)
	}
}

func (e *fakeEngine) config(instance string) subscriber.EngineConfig {
	return subscriber.EngineConfig{
		Source:   event.Source{Cluster: "c", Model: "m", Instance: instance, Origin: event.Engine},
		Endpoint: e.endpoint, Replay: e.replay, Dialect: subscriber.AnyDialect,
	}
}

// tokens returns the tokens of block n of a prompt: 16 of them.
func tokens(n int) []uint32 {
	t := make([]uint32, 16)
	for i := range t {
		t[i] = uint32(1000*n + i)
	}
	return t
}

var clock = time.Now().UnixNano()

// storing makes a batch that stores blocks first … last of the one prompt that these tests know: block n has hash n.
func storing(first, last int) *event.Batch {
	clock += 1e6
	ev := event.Event{
		Kind: event.Stored, Tier: event.GPU, Group: event.NoGroup, BlockSize: 16, LoRAID: event.NoLoRAID,
		HasParent: first > 1, Parent: event.IntHash(uint64(first - 1)),
	}
	for n := first; n <= last; n++ {
		ev.Blocks = append(ev.Blocks, event.Block{Hash: event.IntHash(uint64(n)), Copies: -1, Age: -1})
		ev.Tokens = append(ev.Tokens, tokens(n)...)
	}
	return &event.Batch{Time: event.Time(clock), Rank: 0, Events: []event.Event{ev}}
}

func evicting(n int) *event.Batch {
	clock += 1e6
	return &event.Batch{Time: event.Time(clock), Rank: 0, Events: []event.Event{{
		Kind: event.Evicted, Tier: event.GPU, Group: event.NoGroup, LoRAID: event.NoLoRAID,
		Blocks: []event.Block{{Hash: event.IntHash(uint64(n)), Copies: -1, Age: -1}},
	}}}
}

func clearing() *event.Batch {
	clock += 1e6
	return &event.Batch{Time: event.Time(clock), Rank: 0, Events: []event.Event{{
		Kind: event.Cleared, Group: event.NoGroup, LoRAID: event.NoLoRAID,
	}}}
}

func quiet() *slog.Logger { return slog.New(slog.DiscardHandler) }

// road is everything from engines' sockets to an index.
type road struct {
	t      testing.TB
	srvCfg bus.ServerConfig
	srv    *bus.Server
	bus    *bus.Bus
	index  *prefix.Index
	cfg    subscriber.Config
}

func newRoad(t testing.TB) *road {
	r := &road{t: t, srvCfg: bus.DefaultServerConfig(), cfg: subscriber.DefaultConfig()}
	_, port, err := net.SplitHostPort(strings.TrimPrefix(freeAddress(t), "tcp://"))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := fmt.Sscan(port, &r.srvCfg.Port); err != nil {
		t.Fatal(err)
	}
	r.srvCfg.Dir = t.TempDir()
	r.cfg.Recovery.ReplayTimeout = time.Second
	r.startNATS()
	cfg := bus.DefaultConfig()
	cfg.URL, cfg.LeaseTTL = r.srv.URL(), time.Second
	if r.bus, err = bus.Dial(t.Context(), cfg, "test", quiet()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		r.bus.Close()
		r.srv.Shutdown()
	})
	r.index = prefix.New(prefix.DefaultConfig())
	r.consume(r.index)
	return r
}

func (r *road) startNATS() {
	srv, err := bus.StartServer(r.srvCfg, quiet())
	if err != nil {
		r.t.Fatal(err)
	}
	r.srv = srv
}

// consume feeds a sink until the test ends.
func (r *road) consume(sink subscriber.Sink) (stop func()) {
	return r.run(subscriber.NewConsumer(subscriber.DefaultConsumerConfig(), r.bus, sink, "test", quiet(), nil).Run)
}

// subscribe hears engines until the test ends, or stop is called.
func (r *road) subscribe(engines ...subscriber.EngineConfig) (stop func()) {
	return r.run(r.make(engines...).Run)
}

// subscriber is a subscriber that hears engines until the test ends.
func (r *road) subscriber(engines ...subscriber.EngineConfig) *subscriber.Subscriber {
	sub := r.make(engines...)
	r.run(sub.Run)
	return sub
}

func (r *road) make(engines ...subscriber.EngineConfig) *subscriber.Subscriber {
	open := func(source event.Source, fence event.Fence) subscriber.Stream {
		return publisher.NewStream(publisher.DefaultStreamConfig(), r.bus, source, fence, quiet())
	}
	sub, err := subscriber.New(r.cfg, engines, r.bus, open, quiet(), nil)
	if err != nil {
		r.t.Fatal(err)
	}
	return sub
}

// forget takes from NATS every checkpoint, and the stream up to the message of a source that holds a sequence.
func (r *road) forget(instance string, seq event.Seq) {
	r.t.Helper()
	conn, err := nats.Connect(r.srv.URL())
	if err != nil {
		r.t.Fatal(err)
	}
	defer conn.Close()
	js, err := jetstream.New(conn)
	if err != nil {
		r.t.Fatal(err)
	}
	reader, err := r.bus.Read(r.t.Context(), 1)
	if err != nil {
		r.t.Fatal(err)
	}
	defer reader.Close()
	for {
		d, err := reader.Next(r.t.Context())
		if err != nil {
			r.t.Fatal(err)
		}
		if err := d.Ack(); err != nil {
			r.t.Fatal(err)
		}
		if d.Kind != bus.Events || d.Source.Instance != instance || d.Head.First != seq {
			continue
		}
		stream, err := js.Stream(r.t.Context(), bus.EventStream)
		if err == nil {
			err = stream.Purge(r.t.Context(), jetstream.WithPurgeSequence(d.Sequence))
		}
		if err != nil {
			r.t.Fatal(err)
		}
		break
	}
	checkpoints, err := js.Stream(r.t.Context(), "OBJ_"+bus.CheckpointBucket)
	if err == nil {
		err = checkpoints.Purge(r.t.Context())
	}
	if err != nil {
		r.t.Fatal(err)
	}
}

func (r *road) run(f func(context.Context) error) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- f(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			r.t.Error(err)
		}
	})
	r.t.Cleanup(stop)
	return stop
}

// info returns what the index says of a source; the zero value while it says nothing.
func (r *road) info(instance string) prefix.SourceInfo {
	for _, s := range r.index.Sources() {
		if s.Source.Instance == instance {
			return s
		}
	}
	return prefix.SourceInfo{}
}

// await waits until the index has applied a sequence and tells a state.
func (r *road) await(instance string, seq event.Seq, state event.State) prefix.SourceInfo {
	r.t.Helper()
	eventually(r.t, fmt.Sprintf("%s %v at sequence %d", instance, state, seq), func() bool {
		s := r.info(instance)
		return s.Started && s.LastSeq == seq && s.State == state && s.Ledger.Last == seq
	})
	s := r.info(instance)
	if !s.Balanced || s.Digest.Differed > 0 {
		r.t.Fatalf("ledger %+v, digests %+v", s.Ledger, s.Digest)
	}
	return s
}

// matched returns how many blocks of the prompt the index finds in a source.
func (r *road) matched(instance string) int {
	var prompt []uint32
	for n := 1; n <= 64; n++ {
		prompt = append(prompt, tokens(n)...)
	}
	answer, err := r.index.Lookup(&prefix.Request{Model: "m", Tokens: prompt})
	if err != nil {
		r.t.Fatal(err)
	}
	for _, m := range answer.Matches {
		if m.Source.Instance == instance {
			return m.Blocks
		}
	}
	return -1
}
