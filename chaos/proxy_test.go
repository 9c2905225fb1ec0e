package main

import (
	"context"
	"encoding/binary"
	"log/slog"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/pebbe/zmq4"

	"kvstrata/event"
	"kvstrata/publisher"
)

// line is a publisher behind a proxy, and what a subscriber in front of it hears.
type line struct {
	t         *testing.T
	proxy     *proxy
	publisher *publisher.ZMQ
	live      *zmq4.Socket
	zctx      *zmq4.Context
	next      int
}

func newLine(t *testing.T) *line {
	t.Helper()
	l := &line{t: t}
	cfg := publisher.DefaultZMQConfig()
	cfg.Endpoint, cfg.Replay, cfg.Topic = "tcp://127.0.0.1:0", "tcp://127.0.0.1:0", "kv"
	var err error
	if l.publisher, err = publisher.NewZMQ(cfg, slog.New(slog.DiscardHandler)); err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	var group sync.WaitGroup
	group.Go(func() {
		if err := l.publisher.Run(ctx); err != nil {
			t.Error(err)
		}
	})
	<-l.publisher.Ready()
	if l.proxy, err = newProxy(l.publisher.Endpoint()[len("tcp://"):], l.publisher.ReplayEndpoint()[len("tcp://"):]); err != nil {
		t.Fatal(err)
	}
	group.Go(func() { l.proxy.run(ctx) })
	if l.zctx, err = zmq4.NewContext(); err != nil {
		t.Fatal(err)
	}
	l.live = l.socket(zmq4.SUB, l.proxy.live)
	if err := l.live.SetSubscribe(""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = l.live.Close()
		if err := l.zctx.Term(); err != nil {
			t.Error(err)
		}
		stop()
		group.Wait()
	})
	// Whatever is published before the subscription has arrived is not heard.
	for heard := false; !heard; {
		l.publish(1)
		heard = len(l.hear(l.live, 1, 20*time.Millisecond)) == 1
	}
	l.hear(l.live, 1000, 100*time.Millisecond)
	return l
}

func (l *line) socket(kind zmq4.Type, to *lane) *zmq4.Socket {
	l.t.Helper()
	s, err := l.zctx.NewSocket(kind)
	if err == nil {
		err = s.SetLinger(0)
	}
	if err == nil {
		err = s.SetReconnectIvl(10 * time.Millisecond)
	}
	if err == nil {
		err = s.Connect("tcp://" + to.address())
	}
	if err != nil {
		l.t.Fatal(err)
	}
	return s
}

// publish publishes so many batches, and returns their sequences.
func (l *line) publish(n int) (seqs []int) {
	l.t.Helper()
	for range n {
		b := &event.Batch{Time: event.Time(1_700_000_000_000_000_000 + 20_000_000*l.next), Events: []event.Event{{
			Kind: event.Cleared, Cause: event.ByEngine, Group: event.NoGroup, LoRAID: event.NoLoRAID,
		}}}
		if err := l.publisher.Publish(b); err != nil {
			l.t.Fatal(err)
		}
		seqs = append(seqs, l.next)
		l.next++
	}
	return seqs
}

// hear returns the sequences of what comes, up to a number of messages, or until nothing came for a time. What ends a replay
// is −1.
func (l *line) hear(s *zmq4.Socket, most int, silence time.Duration) (seqs []int) {
	l.t.Helper()
	poller := zmq4.NewPoller()
	poller.Add(s, zmq4.POLLIN)
	for len(seqs) < most {
		ready, err := poller.Poll(silence)
		if err != nil {
			l.t.Fatal(err)
		}
		if len(ready) == 0 {
			break
		}
		frames, err := s.RecvMessageBytes(zmq4.DONTWAIT)
		if zmq4.AsErrno(err) == zmq4.Errno(syscall.EAGAIN) {
			continue
		}
		if err != nil {
			l.t.Fatal(err)
		}
		seqs = append(seqs, int(int64(binary.BigEndian.Uint64(frames[len(frames)-2]))))
	}
	return seqs
}

const patience = 10 * time.Second

func (l *line) want(s *zmq4.Socket, seqs ...int) {
	l.t.Helper()
	if diff := cmp.Diff(seqs, l.hear(s, len(seqs), patience)); diff != "" {
		l.t.Error(diff)
	}
}

func TestProxyPassesEverything(t *testing.T) {
	l := newLine(t)
	l.want(l.live, l.publish(100)...)
	if at := l.proxy.live.disturbed(); at != nil {
		t.Errorf("faults that nobody asked for, at %v", at)
	}
}

func TestProxyDropsDoublesAndSwaps(t *testing.T) {
	l := newLine(t)
	l.proxy.live.change(func(p *plan) { p.drop = 2 })
	seqs := l.publish(4)
	l.want(l.live, seqs[2], seqs[3])

	l.proxy.live.change(func(p *plan) { p.duplicate = 1 })
	seqs = l.publish(2)
	l.want(l.live, seqs[0], seqs[0], seqs[1])

	l.proxy.live.change(func(p *plan) { p.swap = 1 })
	seqs = l.publish(3)
	l.want(l.live, seqs[1], seqs[0], seqs[2])

	if at := l.proxy.live.disturbed(); len(at) != 1 {
		t.Errorf("faults at %v, want one", at)
	}
}

func TestProxyHoldsAndCuts(t *testing.T) {
	l := newLine(t)
	l.proxy.live.change(func(p *plan) { p.hold = time.Now().Add(time.Hour) })
	seqs := l.publish(2)
	if got := l.hear(l.live, 1, 50*time.Millisecond); got != nil {
		t.Errorf("%v came while everything was held", got)
	}
	l.proxy.live.heal()
	l.want(l.live, seqs...)

	l.proxy.live.cut(0)
	for deadline := time.Now().Add(patience); l.hear(l.live, 1, 20*time.Millisecond) == nil; l.publish(1) {
		if time.Now().After(deadline) {
			t.Fatal("the connection is not made again")
		}
	}
}

// What was lost does not come in a replay either; what was only dropped does.
func TestProxyLoses(t *testing.T) {
	l := newLine(t)
	l.proxy.live.change(func(p *plan) { p.lose = 1 })
	lost := l.publish(1)
	l.proxy.live.change(func(p *plan) { p.drop = 1 })
	dropped := l.publish(2)
	l.want(l.live, dropped[1])

	dealer := l.socket(zmq4.DEALER, l.proxy.replay)
	defer dealer.Close()
	ask := func() {
		if _, err := dealer.SendMessage("", binary.BigEndian.AppendUint64(nil, uint64(lost[0]))); err != nil {
			t.Fatal(err)
		}
	}
	ask()
	l.want(dealer, dropped[0], dropped[1], -1)
	has := func(s stamps, seq int) bool { return len(s[uint64(seq)]) == 1 }
	l.proxy.mu.Lock()
	if p := l.proxy; !has(p.dropped, lost[0]) || has(p.passed, lost[0]) || !has(p.dropped, dropped[0]) || !has(p.passed, dropped[0]) {
		t.Errorf("dropped %v, passed %v", p.dropped, p.passed)
	}
	l.proxy.mu.Unlock()

	l.proxy.replay.change(func(p *plan) { p.silent = time.Now().Add(time.Hour) })
	ask()
	if got := l.hear(dealer, 1, 50*time.Millisecond); got != nil {
		t.Errorf("%v came from a silent replay", got)
	}
	l.proxy.replay.heal()
	l.proxy.replay.change(func(p *plan) { p.cutAfter = 2 })
	l.publish(10)
	ask()
	if got := l.hear(dealer, 20, 200*time.Millisecond); slices.Contains(got, -1) {
		t.Errorf("a replay that was cut came to its end: %v", got)
	}
	if len(l.proxy.replay.disturbed()) == 0 {
		t.Error("nothing of this was noted")
	}
}
