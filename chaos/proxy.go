package main

import (
	"bufio"
	"context"
	"errors"
	"io"
	"net"
	"slices"
	"sync"
	"time"

	"kvstrata/subscriber"
)

// proxy stands between one engine's two sockets and its subscribers. It carries bytes from connection to connection, so that
// each side sees the other come and go as it does, but takes what the engine says apart into messages, some of which it drops,
// holds, doubles and swaps.
type proxy struct {
	live, replay *lane

	mu       sync.Mutex
	withheld stamps // batches that no socket may bring any more
	dropped  stamps // kept back, on the live socket or in a replay
	passed   stamps // handed on, by either
}

// stamp names one batch of one life: an engine's clock goes on from life to life.
type stamp struct {
	seq  uint64
	time int64 // µs by the engine's clock
}

// stamps is a set of batches.
type stamps map[uint64][]int64

// sameTime is how far two readings of one batch's time may be apart, in µs: a float of seconds on the wire, and the columns of
// history, round it. An engine needs far longer for a batch.
const sameTime = 500

func (s stamps) add(b stamp) {
	if !s.has(b) {
		s[b.seq] = append(s[b.seq], b.time)
	}
}

func (s stamps) has(b stamp) bool {
	for _, t := range s[b.seq] {
		if d := t - b.time; -sameTime < d && d < sameTime {
			return true
		}
	}
	return false
}

// lane is the way to one of an engine's sockets.
type lane struct {
	proxy    *proxy
	listener net.Listener
	to       string // host:port of the engine
	isReplay bool

	mu     sync.Mutex
	conns  map[net.Conn]struct{}
	plan   plan
	shut   time.Time   // no connection before then
	spoilt []time.Time // when the lane was not as it should be, once a second at most
}

// plan is what happens to the next messages of a lane.
type plan struct {
	drop, lose, duplicate, swap int       // how many of the next batches
	hold                        time.Time // nothing passes before then
	silent                      time.Time // everything is swallowed before then
	cutAfter                    int       // the connections end after so many further batches; 0 = not planned
}

// newProxy listens on two free ports in front of an engine that is, or will be, at the addresses given.
func newProxy(events, replay string) (*proxy, error) {
	p := &proxy{withheld: make(stamps), dropped: make(stamps), passed: make(stamps)}
	for _, l := range []struct {
		lane   **lane
		to     string
		replay bool
	}{{&p.live, events, false}, {&p.replay, replay, true}} {
		listener, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return nil, err
		}
		*l.lane = &lane{proxy: p, listener: listener, to: l.to, isReplay: l.replay, conns: make(map[net.Conn]struct{})}
	}
	return p, nil
}

// run carries until ctx ends.
func (p *proxy) run(ctx context.Context) {
	var group sync.WaitGroup
	for _, l := range []*lane{p.live, p.replay} {
		group.Go(func() { l.run(ctx) })
	}
	group.Wait()
}

func (l *lane) address() string { return l.listener.Addr().String() }

func (l *lane) run(ctx context.Context) {
	defer context.AfterFunc(ctx, func() {
		_ = l.listener.Close()
		l.cut(0)
	})()
	var group sync.WaitGroup
	defer group.Wait()
	for {
		client, err := l.listener.Accept()
		if err != nil {
			return
		}
		group.Go(func() { l.serve(ctx, client) })
	}
}

// serve carries one connection until either side ends it, or the lane is cut.
func (l *lane) serve(ctx context.Context, client net.Conn) {
	defer client.Close()
	dialer := net.Dialer{Timeout: time.Second}
	engine, err := dialer.DialContext(ctx, "tcp", l.to)
	if err != nil {
		return // as if it had not listened
	}
	defer engine.Close()
	if !l.enter(ctx, client, engine) {
		return
	}
	defer l.leave(client, engine)
	var group sync.WaitGroup
	group.Go(func() {
		_, _ = io.Copy(engine, client)
		_ = engine.Close()
		_ = client.Close()
	})
	_ = l.carry(ctx, bufio.NewReaderSize(engine, 1<<16), client) // either side is gone, or the lane was cut
	_ = engine.Close()
	_ = client.Close()
	group.Wait()
}

func (l *lane) enter(ctx context.Context, conns ...net.Conn) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if ctx.Err() != nil {
		return false
	}
	if time.Now().Before(l.shut) {
		l.interfere()
		return false
	}
	for _, c := range conns {
		l.conns[c] = struct{}{}
	}
	return true
}

func (l *lane) leave(conns ...net.Conn) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, c := range conns {
		delete(l.conns, c)
	}
}

// cut ends every connection, and refuses others for a while.
func (l *lane) cut(refuse time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.cutLocked(refuse)
}

func (l *lane) cutLocked(refuse time.Duration) {
	l.shut = time.Now().Add(refuse)
	l.interfere()
	for c := range l.conns {
		_ = c.Close()
	}
}

// change plans what happens next.
func (l *lane) change(set func(*plan)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	set(&l.plan)
}

// heal forgets what was planned.
func (l *lane) heal() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.plan, l.shut = plan{}, time.Time{}
}

// interfere notes that the lane is not as it should be.
func (l *lane) interfere() {
	now := time.Now()
	if n := len(l.spoilt); n == 0 || now.Sub(l.spoilt[n-1]) > time.Second {
		l.spoilt = append(l.spoilt, now)
	}
}

// disturbed returns when the lane was not as it should be.
func (l *lane) disturbed() []time.Time {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.spoilt)
}

var errCut = errors.New("the connection is cut")

func (l *lane) carry(ctx context.Context, engine *bufio.Reader, client io.Writer) error {
	if _, err := io.CopyN(client, engine, greetingSize); err != nil {
		return err
	}
	var swapped []byte // goes behind the next batch
	for {
		m, err := readMessage(engine)
		if err != nil {
			return err
		}
		if m.command {
			if _, err := client.Write(m.raw); err != nil {
				return err
			}
			continue
		}
		if err := l.wait(ctx); err != nil {
			return err
		}
		what, err := l.judge(&m)
		out := m.raw
		switch {
		case what == swap && swapped == nil:
			swapped = m.raw
			continue
		case what == drop:
			out = nil
		case what == duplicate:
			out = append(m.raw[:len(m.raw):len(m.raw)], m.raw...)
		}
		if swapped != nil && out != nil {
			out = append(out[:len(out):len(out)], swapped...)
			swapped = nil
		}
		if _, err := client.Write(out); err != nil {
			return err
		}
		if err != nil {
			l.cut(0)
			return err
		}
	}
}

// wait waits while the lane holds everything.
func (l *lane) wait(ctx context.Context) error {
	for {
		l.mu.Lock()
		rest := time.Until(l.plan.hold)
		l.mu.Unlock()
		if rest <= 0 {
			return nil
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(min(rest, 50*time.Millisecond)):
		}
	}
}

// fate is what becomes of a message.
type fate uint8

const (
	pass fate = iota
	drop
	duplicate
	swap
)

// judge decides on a message, and notes it. An error says that the connections end behind it.
func (l *lane) judge(m *message) (what fate, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	seq, payload, isBatch := m.batch()
	if time.Now().Before(l.plan.silent) {
		what = drop
	}
	if !isBatch {
		if what == drop {
			l.interfere()
		}
		return what, nil
	}
	at, _ := subscriber.PeekTime(payload) // engines of ours tell one
	b := stamp{seq: seq, time: int64(at) / 1000}
	l.proxy.mu.Lock()
	defer l.proxy.mu.Unlock()
	take := func(n *int) bool {
		if *n <= 0 {
			return false
		}
		*n--
		return true
	}
	switch {
	case what == drop:
	case l.proxy.withheld.has(b):
		what = drop
	case take(&l.plan.lose):
		what = drop
		l.proxy.withheld.add(b)
	case take(&l.plan.drop):
		what = drop
	case take(&l.plan.duplicate):
		what = duplicate
	case take(&l.plan.swap):
		what = swap
	}
	if what == drop {
		l.interfere()
		l.proxy.dropped.add(b)
	} else {
		l.proxy.passed.add(b)
	}
	if l.plan.cutAfter > 0 {
		if l.plan.cutAfter--; l.plan.cutAfter == 0 {
			return what, errCut
		}
	}
	return what, nil
}

func (s stamps) clone() stamps {
	c := make(stamps, len(s))
	for seq, times := range s {
		c[seq] = slices.Clone(times)
	}
	return c
}
