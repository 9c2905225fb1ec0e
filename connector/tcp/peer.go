package tcp

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"
)

// maxIdle bounds the connections to one peer that are kept for the next fetch.
const maxIdle = 64

// retryAfter is how long a peer that could not be reached is left alone by heartbeats and the like.
const retryAfter = time.Second

// peer is what an endpoint knows of another.
type peer struct {
	Peer
	e *Endpoint

	// setup is held, as its one element, by whoever connects the control or maps the memory.
	setup  chan struct{}
	token  []byte     // of the process whose memory was tried; under setup
	former []*mapping // of processes before it; under setup
	memory *mapping   // under setup; stays until nobody uses the peer
	failed error      // why the control could not be connected the last time; under setup
	at     time.Time  // when that was; under setup

	// Under the endpoint's peersMu.
	refs    int
	used    time.Time
	idle    []*link
	busy    map[*link]struct{}
	control *control
}

// errClosed is of calls after Run's end.
var errClosed = errors.New("the endpoint is closed")

// peer returns what is known of a peer, for use until done is called.
func (e *Endpoint) peer(p Peer) (*peer, error) {
	if !e.begin() {
		return nil, errClosed
	}
	e.peersMu.Lock()
	defer e.peersMu.Unlock()
	known, ok := e.peers[p]
	if !ok {
		known = &peer{Peer: p, e: e, setup: make(chan struct{}, 1), busy: make(map[*link]struct{})}
		e.peers[p] = known
	}
	known.refs++
	return known, nil
}

// done ends a use.
func (p *peer) done() {
	p.e.peersMu.Lock()
	p.refs--
	p.used = time.Now()
	p.e.peersMu.Unlock()
	p.e.work.Done()
}

// get returns a connection for data: an idle one, or a new one.
func (p *peer) get(ctx context.Context) (*link, error) {
	p.e.peersMu.Lock()
	if n := len(p.idle); n > 0 {
		l := p.idle[n-1]
		p.idle = p.idle[:n-1]
		p.busy[l] = struct{}{}
		p.e.peersMu.Unlock()
		return l, nil
	}
	p.e.peersMu.Unlock()
	l, err := p.e.dial(ctx, p.Peer, purposeData)
	if err != nil {
		return nil, err
	}
	return l, p.keep(l)
}

// keep enters a new connection among those that the endpoint's end cuts.
func (p *peer) keep(l *link) error {
	p.e.peersMu.Lock()
	defer p.e.peersMu.Unlock()
	select {
	case <-p.e.closing:
		l.cut()
		return errClosed
	default:
	}
	p.busy[l] = struct{}{}
	return nil
}

// put gives a connection back; one that is not sound is closed.
func (p *peer) put(l *link, sound bool) {
	p.e.peersMu.Lock()
	defer p.e.peersMu.Unlock()
	delete(p.busy, l)
	select {
	case <-p.e.closing:
		sound = false
	default:
	}
	if !sound || len(p.idle) >= maxIdle {
		l.cut()
		return
	}
	l.used = time.Now()
	p.idle = append(p.idle, l)
}

// trimPeers closes connections that nobody has used for a while, and forgets such peers.
func (e *Endpoint) trimPeers() {
	e.peersMu.Lock()
	defer e.peersMu.Unlock()
	for key, p := range e.peers {
		p.idle = slices.DeleteFunc(p.idle, func(l *link) bool {
			old := time.Since(l.used) > poolTimeout
			if old {
				l.cut()
			}
			return old
		})
		if p.refs > 0 || time.Since(p.used) < idleTimeout {
			continue
		}
		p.forget()
		delete(e.peers, key)
	}
}

// forget closes what belongs to a peer that nobody uses. The endpoint's peersMu is held.
func (p *peer) forget() {
	for _, l := range p.idle {
		l.cut()
	}
	p.idle = nil
	if p.control != nil {
		p.control.link.cut()
	}
	for _, m := range append(p.former, p.memory) {
		if m != nil {
			m.close()
		}
	}
	p.former, p.memory = nil, nil
}

// closePeers cuts every connection, which ends whatever uses them; memory is unmapped by who uses it last.
func (e *Endpoint) closePeers() {
	e.peersMu.Lock()
	for _, p := range e.peers {
		for l := range p.busy {
			l.cut()
		}
		if p.control != nil {
			p.control.link.cut()
		}
	}
	e.peersMu.Unlock()
	e.work.Wait()
	e.peersMu.Lock()
	defer e.peersMu.Unlock()
	for _, p := range e.peers {
		p.forget()
	}
	clear(e.peers)
}

// Await returns once a peer exports a request, or an error when it does not within the wait.
func (e *Endpoint) Await(ctx context.Context, to Peer, name string, wait time.Duration) error {
	q := request{wait: uint32(min(wait, maxOpenWait).Milliseconds())}
	return e.call(ctx, to, "await", name, wait+e.cfg.stall(), func(b []byte, tag uint64) []byte {
		return q.append(b, kindOpen, 0, tag, name)
	})
}

// Done tells a peer that a request's blocks are not needed any more.
func (e *Endpoint) Done(ctx context.Context, to Peer, name string) error {
	return e.call(ctx, to, "end", name, e.cfg.stall(), func(b []byte, tag uint64) []byte {
		return append(frame{length: len(name), kind: kindDone, tag: tag}.append(b), name...)
	})
}

// Beat tells a peer that the blocks of requests are needed still. Those that it does not hold are passed over.
func (e *Endpoint) Beat(ctx context.Context, to Peer, names []string) error {
	for some := range slices.Chunk(names, maxBeats) {
		if err := e.call(ctx, to, "keep", some[0], e.cfg.stall(), func(b []byte, tag uint64) []byte {
			return appendBeat(b, tag, some)
		}); err != nil {
			return err
		}
	}
	return nil
}

// call asks on a peer's control connection.
func (e *Endpoint) call(ctx context.Context, to Peer, verb, name string, wait time.Duration, write func([]byte, uint64) []byte) error {
	if len(name) < 1 || len(name) > maxName {
		return fmt.Errorf("%s %q at peer %s: a name of %d bytes; want 1 to %d", verb, name, to.Address, len(name), maxName)
	}
	p, err := e.peer(to)
	if err == nil {
		defer p.done()
		err = p.call(ctx, wait, write)
	}
	if err != nil {
		return fmt.Errorf("%s %q at peer %s: %w", verb, name, to.Address, err)
	}
	return nil
}

// call tries a second time when the connection, made earlier, turns out to be broken.
func (p *peer) call(ctx context.Context, wait time.Duration, write func([]byte, uint64) []byte) error {
	for again := false; ; again = true {
		c, fresh, err := p.connected(ctx)
		if err != nil {
			return err
		}
		st, err := c.call(ctx, wait, write)
		if err == nil {
			return st.err()
		}
		if fresh || again || ctx.Err() != nil || errors.Is(err, ErrStalled) {
			return err
		}
	}
}

// connected returns the control connection, and whether it is new.
func (p *peer) connected(ctx context.Context) (*control, bool, error) {
	select {
	case p.setup <- struct{}{}:
		defer func() { <-p.setup }()
	case <-ctx.Done():
		return nil, false, ctx.Err()
	}
	p.e.peersMu.Lock()
	c := p.control
	p.e.peersMu.Unlock()
	if c != nil && !c.broken() {
		return c, false, nil
	}
	// What has piled up for a peer that does not answer fails with the first one, rather than each after its own timeout.
	if p.failed != nil && time.Since(p.at) < retryAfter {
		return nil, false, p.failed
	}
	l, err := p.e.dial(ctx, p.Peer, purposeControl)
	if p.failed, p.at = nil, time.Now(); ctx.Err() == nil {
		p.failed = err
	}
	if err != nil {
		return nil, false, err
	}
	c = newControl(l, p.e.cfg.stall())
	p.e.peersMu.Lock()
	defer p.e.peersMu.Unlock()
	if !p.e.begin() {
		l.cut()
		return nil, false, errClosed
	}
	p.control = c
	go func() {
		defer p.e.work.Done()
		c.run()
	}()
	return c, true, nil
}
