package publisher_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"testing"
	"time"

	"kvstrata/event"
	"kvstrata/leaktest"
	"kvstrata/publisher"
	"kvstrata/subscriber"

	"github.com/pebbe/zmq4"
)

// TestMain fails when a test leaves a goroutine behind.
func TestMain(m *testing.M) { os.Exit(leaktest.Run(m)) }

const patience = 20 * time.Second // for what comes at once, unless the machine is very busy

func testConfig() publisher.ZMQConfig {
	cfg := publisher.DefaultZMQConfig()
	cfg.Endpoint, cfg.Replay = "tcp://127.0.0.1:0", "tcp://127.0.0.1:*"
	return cfg
}

func newZMQ(t testing.TB, cfg publisher.ZMQConfig) *publisher.ZMQ {
	t.Helper()
	z, err := publisher.NewZMQ(cfg, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	return z
}

// run runs a publisher until the test or stop ends it, and checks that it ends well and soon.
func run(t testing.TB, z *publisher.ZMQ) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- z.Run(ctx) }()
	select {
	case <-z.Ready():
	case err := <-done:
		cancel()
		t.Fatalf("Run: %v", err)
	}
	stopped := false
	stop = func() {
		if stopped {
			return
		}
		stopped = true
		cancel()
		start := time.Now()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
		if took := time.Since(start); took > time.Second {
			t.Errorf("Run took %v to end", took)
		}
	}
	t.Cleanup(stop)
	return stop
}

// batch makes a batch of one block named n, of about size bytes on the wire.
func batch(n uint64, size int) *event.Batch {
	return &event.Batch{Time: 1500000000, Events: []event.Event{{
		Kind: event.Stored, Tier: event.GPU, Group: event.NoGroup, LoRAID: event.NoLoRAID, BlockSize: 16,
		Blocks: []event.Block{{Hash: event.IntHash(n)}}, Tokens: make([]uint32, max(0, size-120)),
	}}}
}

func publish(t testing.TB, z *publisher.ZMQ, n, size int) {
	t.Helper()
	for range n {
		if err := z.PublishWait(t.Context(), batch(z.Seq(), size)); err != nil {
			t.Fatal(err)
		}
	}
}

// client is a socket of a test, in a context of its own.
type client struct {
	*zmq4.Socket
	t testing.TB
}

func connect(t testing.TB, kind zmq4.Type, endpoint string, set func(*zmq4.Socket) error) *client {
	t.Helper()
	zctx, err := zmq4.NewContext()
	if err != nil {
		t.Fatal(err)
	}
	s, err := zctx.NewSocket(kind)
	if err != nil {
		t.Fatal(err)
	}
	c := &client{Socket: s, t: t}
	t.Cleanup(func() {
		if err := errors.Join(s.Close(), zctx.Term()); err != nil {
			t.Error(err)
		}
	})
	if err := errors.Join(s.SetLinger(0), s.SetRcvhwm(0), s.SetRcvtimeo(patience), s.SetReconnectIvl(time.Millisecond)); err != nil {
		t.Fatal(err)
	}
	if set != nil {
		err = set(s)
	}
	if err = errors.Join(err, s.Connect(endpoint)); err != nil {
		t.Fatal(err)
	}
	return c
}

func subscribe(t testing.TB, z *publisher.ZMQ, topic string) *client {
	t.Helper()
	return connect(t, zmq4.SUB, z.Endpoint(), func(s *zmq4.Socket) error { return s.SetSubscribe(topic) })
}

// message reads one message of so many frames.
func (c *client) message(frames int) [][]byte {
	c.t.Helper()
	msg, err := c.RecvMessageBytes(0)
	if err != nil {
		c.t.Fatalf("receive: %v", err)
	}
	if len(msg) != frames {
		c.t.Fatalf("message of %d frames, want %d: %q", len(msg), frames, msg)
	}
	return msg
}

// live reads one live batch, checks that its block is named as it must be, and returns the sequence.
func (c *client) live(topic string) uint64 {
	c.t.Helper()
	msg := c.message(3)
	if string(msg[0]) != topic {
		c.t.Fatalf("topic %q, want %q", msg[0], topic)
	}
	return c.check(msg[1], msg[2])
}

func (c *client) check(seqFrame, payload []byte) uint64 {
	c.t.Helper()
	seq := binary.BigEndian.Uint64(seqFrame)
	var b event.Batch
	if err := subscriber.NewDecoder(subscriber.DecoderConfig{}).Decode(payload, &b); err != nil {
		c.t.Fatalf("decode batch seq=%d: %v", seq, err)
	}
	if got, _ := b.Events[0].Blocks[0].Hash.Int(); got != seq {
		c.t.Fatalf("batch seq=%d holds block %d", seq, got)
	}
	return seq
}

// join publishes until the subscriber hears it, reads what came, and returns the last sequence.
func (c *client) join(z *publisher.ZMQ) uint64 {
	c.t.Helper()
	if err := c.SetRcvtimeo(5 * time.Millisecond); err != nil {
		c.t.Fatal(err)
	}
	for deadline := time.Now().Add(patience); ; {
		publish(c.t, z, 1, 200)
		msg, err := c.RecvMessageBytes(0)
		if err == nil {
			if err := c.SetRcvtimeo(patience); err != nil {
				c.t.Fatal(err)
			}
			seq := binary.BigEndian.Uint64(msg[1])
			for last := z.Seq() - 1; seq < last; {
				seq = c.live(string(msg[0]))
			}
			return seq
		}
		if time.Now().After(deadline) {
			c.t.Fatalf("join: %v", err)
		}
	}
}

func (c *client) ask(first uint64) {
	c.t.Helper()
	if _, err := c.SendMessage("", binary.BigEndian.AppendUint64(nil, first)); err != nil {
		c.t.Fatalf("ask for a replay: %v", err)
	}
}

// answer reads a replay to its end and checks that it is first … last without a hole.
func (c *client) answer(topic string, first, last uint64) {
	c.t.Helper()
	for want := first; ; want++ {
		msg := c.message(4)
		if len(msg[0]) != 0 {
			c.t.Fatalf("first frame %q, want an empty one", msg[0])
		}
		if seq := binary.BigEndian.Uint64(msg[2]); seq == ^uint64(0) {
			if len(msg[1]) != 0 || len(msg[3]) != 0 {
				c.t.Fatalf("end mark %q", msg)
			}
			if want != last+1 {
				c.t.Fatalf("the replay ends before seq=%d, want %d", want, last+1)
			}
			return
		}
		if string(msg[1]) != topic {
			c.t.Fatalf("topic %q, want %q", msg[1], topic)
		}
		if seq := c.check(msg[2], msg[3]); seq != want {
			c.t.Fatalf("replayed seq=%d, want %d", seq, want)
		}
	}
}

// eventually waits for a condition.
func eventually(t testing.TB, what string, cond func() bool) {
	t.Helper()
	for deadline := time.Now().Add(patience); !cond(); <-time.After(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not in %v: %s", patience, what)
		}
	}
}

func TestZMQLive(t *testing.T) {
	cfg := testConfig()
	cfg.Topic = "kv-events"
	z := newZMQ(t, cfg)
	if z.Endpoint() != "" || z.ReplayEndpoint() != "" {
		t.Errorf("endpoints before Ready: %q, %q", z.Endpoint(), z.ReplayEndpoint())
	}
	run(t, z)
	sub, other := subscribe(t, z, "kv-"), subscribe(t, z, "other")
	last := sub.join(z)
	publish(t, z, 2000, 300)
	for range 2000 {
		seq := sub.live("kv-events")
		if seq != last+1 {
			t.Fatalf("seq=%d after %d", seq, last)
		}
		last = seq
	}
	if z.Seq() != last+1 || z.Dropped() != 0 {
		t.Errorf("next seq=%d, %d dropped", z.Seq(), z.Dropped())
	}
	if err := other.SetRcvtimeo(0); err != nil {
		t.Fatal(err)
	}
	if msg, err := other.RecvMessageBytes(0); err == nil {
		t.Errorf("another topic's subscriber got %q", msg)
	}
}

func TestZMQReplay(t *testing.T) {
	z := newZMQ(t, testConfig())
	run(t, z)
	publish(t, z, 10_500, 200)
	eventually(t, "all sent", func() bool { return len(replayed(t, z, 10_499)) == 1 })
	dealer := connect(t, zmq4.DEALER, z.ReplayEndpoint(), nil)
	for range 5 {
		dealer.ask(0) // only the last 10,000 are kept
		dealer.answer("", 500, 10_499)
	}
	dealer.ask(10_400)
	dealer.answer("", 10_400, 10_499)
	dealer.ask(10_500)
	dealer.answer("", 10_500, 10_499)
	dealer.ask(^uint64(0))
	dealer.answer("", 1, 0)

	// Two requests at once are answered one after the other.
	dealer.ask(9000)
	dealer.ask(9500)
	dealer.answer("", 9000, 10_499)
	dealer.answer("", 9500, 10_499)
	if st := z.ReplayStats(); st.Abandoned != 0 || st.Malformed != 0 {
		t.Errorf("%+v", st)
	}
}

// replayed asks a fresh client's replay and returns the sequences it brings.
func replayed(t testing.TB, z *publisher.ZMQ, first uint64) (seqs []uint64) {
	t.Helper()
	dealer := connect(t, zmq4.DEALER, z.ReplayEndpoint(), nil)
	dealer.ask(first)
	for {
		seq := binary.BigEndian.Uint64(dealer.message(4)[2])
		if seq == ^uint64(0) {
			return seqs
		}
		seqs = append(seqs, seq)
	}
}

func TestZMQReplayOfNothing(t *testing.T) {
	z := newZMQ(t, testConfig())
	run(t, z)
	if got := replayed(t, z, 0); len(got) != 0 {
		t.Errorf("replayed %d", got)
	}
}

func TestZMQManyReplays(t *testing.T) {
	z := newZMQ(t, testConfig())
	run(t, z)
	publish(t, z, 500, 200)
	eventually(t, "all sent", func() bool { return len(replayed(t, z, 499)) == 1 })
	var dealers []*client
	for range 40 {
		dealers = append(dealers, connect(t, zmq4.DEALER, z.ReplayEndpoint(), nil))
	}
	for _, d := range dealers {
		d.ask(0)
	}
	for _, d := range dealers {
		d.answer("", 0, 499)
	}
}

// narrow makes a client that holds next to nothing of what is sent to it.
func narrow(s *zmq4.Socket) error { return errors.Join(s.SetRcvhwm(1), s.SetRcvbuf(4096)) }

// A client that takes nothing stops neither the live socket nor other clients, and gets everything in the end.
func TestZMQSlowReplay(t *testing.T) {
	z := newZMQ(t, testConfig())
	run(t, z)
	const kept = 6000
	publish(t, z, kept, 4000)
	eventually(t, "all sent", func() bool { return len(replayed(t, z, kept-1)) == 1 })
	slow := connect(t, zmq4.DEALER, z.ReplayEndpoint(), narrow)
	slow.ask(0)
	eventually(t, "the replay began", func() bool { return z.ReplayStats().Batches >= 1000 })

	sub := subscribe(t, z, "")
	last := sub.join(z)
	for range 1000 {
		publish(t, z, 1, 200)
		if seq := sub.live(""); seq != last+1 {
			t.Fatalf("seq=%d after %d", seq, last)
		}
		last++
	}
	quick := connect(t, zmq4.DEALER, z.ReplayEndpoint(), nil)
	quick.ask(5000)
	quick.answer("", 5000, last)

	if st := z.ReplayStats(); st.Batches >= 2*kept {
		t.Errorf("the slow client was not slow: %+v", st)
	}
	slow.answer("", 0, kept-1)
	if st := z.ReplayStats(); st.Abandoned != 0 {
		t.Errorf("%+v", st)
	}
}

func TestZMQReplayAbandoned(t *testing.T) {
	cfg := testConfig()
	cfg.ReplayStall = 50 * time.Millisecond
	z := newZMQ(t, cfg)
	run(t, z)
	publish(t, z, 6000, 4000)
	eventually(t, "all sent", func() bool { return len(replayed(t, z, 5999)) == 1 })
	stalled := connect(t, zmq4.DEALER, z.ReplayEndpoint(), narrow)
	stalled.ask(0)
	eventually(t, "the stalled client was given up", func() bool { return z.ReplayStats().Abandoned == 1 })
	quick := connect(t, zmq4.DEALER, z.ReplayEndpoint(), nil)
	quick.ask(5500) // so few that libzmq takes them at once, and nothing can stall
	quick.answer("", 5500, 5999)
}

func TestZMQReplayClientLeaves(t *testing.T) {
	z := newZMQ(t, testConfig())
	run(t, z)
	publish(t, z, 6000, 4000)
	eventually(t, "all sent", func() bool { return len(replayed(t, z, 5999)) == 1 })
	before := z.ReplayStats()
	gone := connect(t, zmq4.DEALER, z.ReplayEndpoint(), narrow)
	gone.ask(0)
	eventually(t, "the replay began", func() bool { return z.ReplayStats().Batches >= before.Batches+1000 })
	if err := gone.Close(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the client that left was given up", func() bool { return z.ReplayStats().Abandoned == 1 })
	quick := connect(t, zmq4.DEALER, z.ReplayEndpoint(), nil)
	quick.ask(0)
	quick.answer("", 0, 5999)
}

func TestZMQMalformedRequests(t *testing.T) {
	z := newZMQ(t, testConfig())
	run(t, z)
	publish(t, z, 3, 200)
	eventually(t, "all sent", func() bool { return len(replayed(t, z, 2)) == 1 })
	seq := string(make([]byte, 8))
	requests := [][]any{
		{""},
		{seq},
		{"", "", seq},
		{"", seq, ""},
		{"x", seq},
		{"", seq[:7]},
		{"", seq + "x"},
		{"", ""},
		{"", seq, "x", "x", "x", "x", "x", "x"},
	}
	dealer := connect(t, zmq4.DEALER, z.ReplayEndpoint(), nil)
	for _, r := range requests {
		if _, err := dealer.SendMessage(r...); err != nil {
			t.Fatal(err)
		}
	}
	dealer.ask(1)
	dealer.answer("", 1, 2)
	if got, want := z.ReplayStats().Malformed, uint64(len(requests)); got != want {
		t.Errorf("%d malformed requests, want %d", got, want)
	}
	huge := connect(t, zmq4.DEALER, z.ReplayEndpoint(), nil)
	if _, err := huge.SendMessage("", make([]byte, 1<<20)); err != nil {
		t.Fatal(err)
	}
	dealer.ask(0)
	dealer.answer("", 0, 2)
}

func TestZMQQueueFull(t *testing.T) {
	cfg := testConfig()
	cfg.Queue = 8
	z := newZMQ(t, cfg)
	for seq := range uint64(13) { // nothing is sent before Run
		if err := z.Publish(batch(seq, 200)); err != nil {
			t.Fatal(err)
		}
	}
	if z.Dropped() != 5 || z.Seq() != 13 {
		t.Fatalf("%d dropped, next seq=%d; want 5 and 13", z.Dropped(), z.Seq())
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := z.PublishWait(ctx, batch(0, 200)); !errors.Is(err, context.Canceled) {
		t.Errorf("PublishWait: %v", err)
	}
	if z.Seq() != 13 {
		t.Errorf("a batch that did not wait took a sequence: next is %d", z.Seq())
	}
	run(t, z)
	publish(t, z, 1, 200)
	var got []uint64
	eventually(t, "all sent", func() bool { got = replayed(t, z, 0); return len(got) == 9 })
	if want := "[0 1 2 3 4 5 6 7 13]"; fmt.Sprint(got) != want {
		t.Errorf("replayed %v, want %s", got, want)
	}
}

func TestZMQLoadedIsNotSent(t *testing.T) {
	z := newZMQ(t, testConfig())
	run(t, z)
	loaded := event.Event{Kind: event.Loaded, Tier: event.GPU, Blocks: []event.Block{{Hash: event.IntHash(9)}}}
	if err := z.Publish(&event.Batch{Events: []event.Event{loaded}}); err != nil {
		t.Fatal(err)
	}
	mixed := batch(0, 200)
	mixed.Events = append(mixed.Events, loaded)
	if err := z.Publish(mixed); err != nil {
		t.Fatal(err)
	}
	if z.Seq() != 1 {
		t.Errorf("next seq=%d, want 1", z.Seq())
	}
	eventually(t, "sent", func() bool { return len(replayed(t, z, 0)) == 1 })
}

func TestZMQRestart(t *testing.T) {
	cfg := testConfig()
	first := newZMQ(t, cfg)
	stop := run(t, first)
	sub := subscribe(t, first, "")
	if last := sub.join(first); last > 1<<20 {
		t.Fatal(last)
	}
	cfg.Endpoint, cfg.Replay = first.Endpoint(), first.ReplayEndpoint()
	stop()
	second := newZMQ(t, cfg)
	run(t, second)
	if second.Endpoint() != cfg.Endpoint || second.ReplayEndpoint() != cfg.Replay {
		t.Errorf("bound to %s and %s, want %s and %s", second.Endpoint(), second.ReplayEndpoint(), cfg.Endpoint, cfg.Replay)
	}
	last := sub.join(second)
	publish(t, second, 1, 200)
	if seq := sub.live(""); seq != last+1 {
		t.Errorf("seq=%d after %d", seq, last)
	}
}

// What was published before the stop reaches a subscriber that reads.
func TestZMQStopDrains(t *testing.T) {
	z := newZMQ(t, testConfig())
	stop := run(t, z)
	sub := subscribe(t, z, "")
	last := sub.join(z)
	publish(t, z, 500, 300)
	stop()
	for range 500 {
		if seq := sub.live(""); seq != last+1 {
			t.Fatalf("seq=%d after %d", seq, last)
		}
		last++
	}
	if err := z.Publish(batch(0, 200)); !errors.Is(err, publisher.ErrStopped) {
		t.Errorf("Publish: %v", err)
	}
	if err := z.PublishWait(t.Context(), batch(0, 200)); !errors.Is(err, publisher.ErrStopped) {
		t.Errorf("PublishWait: %v", err)
	}
	if err := z.Run(t.Context()); err == nil {
		t.Error("a second Run ran")
	}
}

// A subscriber and a replay client that take nothing do not hold up the end, nor do those who wait for room.
func TestZMQStopIsPrompt(t *testing.T) {
	cfg := testConfig()
	cfg.Queue = 1
	z := newZMQ(t, cfg)
	stop := run(t, z)
	sub := connect(t, zmq4.SUB, z.Endpoint(), func(s *zmq4.Socket) error {
		return errors.Join(s.SetSubscribe(""), narrow(s))
	})
	sub.join(z)
	publish(t, z, 5000, 4000)
	dealer := connect(t, zmq4.DEALER, z.ReplayEndpoint(), narrow)
	dealer.ask(0)
	eventually(t, "the replay began", func() bool { return z.ReplayStats().Batches > 0 })
	waiting := make(chan error)
	for range 3 {
		go func() {
			for {
				if err := z.PublishWait(context.Background(), batch(0, 200)); err != nil {
					waiting <- err
					return
				}
			}
		}()
	}
	stop()
	for range 3 {
		if err := <-waiting; !errors.Is(err, publisher.ErrStopped) {
			t.Errorf("PublishWait: %v", err)
		}
	}
}

func TestZMQBindFails(t *testing.T) {
	z := newZMQ(t, testConfig())
	run(t, z)
	for name, set := range map[string]func(*publisher.ZMQConfig){
		"endpoint": func(c *publisher.ZMQConfig) { c.Endpoint = z.Endpoint() },
		"replay":   func(c *publisher.ZMQConfig) { c.Replay = z.ReplayEndpoint() },
	} {
		cfg := testConfig()
		set(&cfg)
		other := newZMQ(t, cfg)
		err := other.Run(t.Context())
		if !errors.Is(err, zmq4.EADDRINUSE) || !strings.Contains(err.Error(), "tcp://127.0.0.1:") {
			t.Errorf("%s in use: %v", name, err)
		}
		if err := other.Publish(batch(0, 200)); !errors.Is(err, publisher.ErrStopped) {
			t.Errorf("Publish after a Run that failed: %v", err)
		}
	}
}

func TestZMQConfig(t *testing.T) {
	if err := publisher.DefaultZMQConfig().Validate(); err != nil {
		t.Errorf("the default: %v", err)
	}
	for _, endpoint := range []string{"tcp://*:5557", "tcp://[::1]:5557", "tcp://eth0:*", "ipc:///run/kv", "ipc://*"} {
		cfg := publisher.DefaultZMQConfig()
		cfg.Endpoint, cfg.Replay = endpoint, ""
		if err := cfg.Validate(); err != nil {
			t.Errorf("%s: %v", endpoint, err)
		}
	}
	bad := publisher.ZMQConfig{Endpoint: "udp://x:1", Replay: "tcp://127.0.0.1"}
	_, err := publisher.NewZMQ(bad, slog.New(slog.DiscardHandler))
	if err == nil {
		t.Fatal("no error")
	}
	want := `endpoint "udp://x:1": want tcp://address:port or ipc://path
replay endpoint "tcp://127.0.0.1": want tcp://address:port or ipc://path
buffer steps 0: want 1 or more
replay stall 0s: want a time above 0
hwm 0: want 1 or more
queue 0: want 1 or more
form Form(0): want map or array`
	if err.Error() != want {
		t.Errorf("got\n%v\nwant\n%s", err, want)
	}
	same := publisher.DefaultZMQConfig()
	same.Replay = same.Endpoint
	if err := same.Validate(); err == nil {
		t.Error("one endpoint for both is accepted")
	}
	for _, text := range []string{"tcp://:5557", "tcp://a:65536", "tcp://a:", "inproc://x", "", "ipc://"} {
		cfg := publisher.DefaultZMQConfig()
		cfg.Endpoint = text
		if err := cfg.Validate(); err == nil {
			t.Errorf("%q is accepted", text)
		}
	}
}

// BenchmarkZMQPublish publishes batches of 300 bytes as fast as they go, to nobody and to one subscriber that takes
// them all.
func BenchmarkZMQPublish(b *testing.B) {
	for _, subscribers := range []int{0, 1} {
		b.Run(fmt.Sprintf("subscribers=%d", subscribers), func(b *testing.B) {
			cfg := testConfig()
			cfg.HWM = 1 << 20
			z := newZMQ(b, cfg)
			stop := run(b, z)
			defer stop()
			done := make(chan struct{})
			close(done)
			if subscribers > 0 {
				sub := subscribe(b, z, "")
				sub.join(z)
				done = make(chan struct{})
				go func() {
					defer close(done)
					for last := uint64(0); last != ^uint64(0); {
						msg, err := sub.RecvMessageBytes(0)
						if err != nil {
							return
						}
						if last = binary.BigEndian.Uint64(msg[1]); len(msg[2]) < 100 {
							return // the last one
						}
					}
				}()
			}
			one := batch(1, 300)
			b.ReportAllocs()
			for b.Loop() {
				if err := z.PublishWait(b.Context(), one); err != nil {
					b.Fatal(err)
				}
			}
			if err := z.PublishWait(b.Context(), &event.Batch{}); err != nil {
				b.Fatal(err)
			}
			<-done
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "batches/s")
		})
	}
}
