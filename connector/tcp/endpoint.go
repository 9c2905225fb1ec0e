// Package tcp moves KV blocks directly between engines: a consumer reads them from the producer's memory over TCP connections,
// or, when both run on one host, copies them out of memory that both have mapped.
//
// [Endpoint] is the data plane, of KV blocks and of other bytes alike; [Worker] is a connector's half over it.
//
// What a producer exports may be reused as soon as its lease has ended. So bytes that were read count only once the server,
// after the last of them has left its memory, has found the lease to hold still and said so.
package tcp

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"kvstrata/connector"
)

const (
	handshakeTimeout = 5 * time.Second
	idleTimeout      = 5 * time.Minute  // of a peer's connection without a frame
	poolTimeout      = time.Minute      // of a connection of ours that nobody uses
	maxReadWait      = 10 * time.Second // that a read may wait for a request, since it holds up its connection
	maxOpenWait      = 30 * time.Minute // that an open on a control connection may wait
	maxWaiting       = 4096             // reads and opens that wait at a time
)

// Identity is who an endpoint is.
type Identity struct {
	Engine string           // its engine's id: one that is restarted has another
	Rank   int              // tensor-parallel rank, of Ranks; endpoints of caches only talk to their own rank's
	Ranks  int              // 1 or more
	Kind   [32]byte         // what is exchanged, where there is no cache: both ends must have the same
	Cache  *connector.Cache // the memory that is shared with peers on the same host; nil = none
	Log    *slog.Logger
	Now    func() time.Time // the clock of leases; nil = time.Now

	// Dial replaces the dialing of peers, and is for tests; nil = TCP.
	Dial func(ctx context.Context, address string) (net.Conn, error)
}

// Endpoint serves exports to peers and fetches theirs. Its methods are safe for concurrent use. Fetches and the like fail
// once Run has returned.
type Endpoint struct {
	cfg    Config
	id     Identity
	secret []byte
	tls    *tls.Config
	token  []byte // the secret of the local socket, told to peers that proved themselves
	bootID string

	listener net.Listener
	local    *net.UnixListener
	name     string // of the local socket

	closing chan struct{} // closed by Run at the end
	kick    chan struct{} // the next lease may end earlier
	work    sync.WaitGroup
	slots   chan struct{} // of peers' connections

	mu         sync.Mutex
	closed     bool
	exports    map[string]*export
	leases     *connector.Leases
	generation uint64
	waiting    int
	arrivals   map[string]chan struct{} // closed when the request is exported
	done       []string
	expired    []string
	conns      map[net.Conn]struct{} // of peers

	peersMu sync.Mutex
	peers   map[Peer]*peer
	fetches sync.Pool

	readWait time.Duration // at most, of reads

	counts counts
}

// New reads secrets and certificates and makes an endpoint; it opens nothing.
func New(cfg Config, id Identity) (*Endpoint, error) {
	var errs []error
	errs = append(errs, cfg.Validate())
	if id.Engine == "" || len(id.Engine) > maxEngine {
		errs = append(errs, fmt.Errorf("engine_id %q: want 1 to %d bytes", id.Engine, maxEngine))
	}
	if id.Log == nil {
		errs = append(errs, errors.New("no logger"))
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	secret, err := cfg.secret()
	if err != nil {
		return nil, err
	}
	tls, err := cfg.tls()
	if err != nil {
		return nil, err
	}
	e := &Endpoint{
		readWait: maxReadWait,
		cfg:      cfg, id: id, secret: secret, tls: tls, closing: make(chan struct{}), kick: make(chan struct{}, 1),
		slots: make(chan struct{}, cfg.MaxConnections), exports: make(map[string]*export), leases: connector.NewLeases(cfg.Lease()),
		arrivals: make(map[string]chan struct{}), conns: make(map[net.Conn]struct{}), peers: make(map[Peer]*peer),
	}
	if id.Now == nil {
		e.id.Now = time.Now
	}
	e.fetches.New = func() any { return new(fetch) }
	if id.Cache != nil {
		e.id.Kind = id.Cache.Compatibility()
	}
	e.token = make([]byte, 32)
	_, _ = rand.Read(e.token) // never fails
	if text, err := os.ReadFile("/proc/sys/kernel/random/boot_id"); err == nil {
		e.bootID = strings.TrimSpace(string(text))
	}
	return e, nil
}

// Listen binds the sockets: cfg.Listen, or any port of the loopback where that is empty.
func (e *Endpoint) Listen() error {
	address := e.cfg.Listen
	if address == "" {
		address = "127.0.0.1:0"
	}
	l, err := net.Listen("tcp", address)
	if err != nil {
		return fmt.Errorf("listen for peers on %s: %w", address, err)
	}
	e.listener = l
	if e.shares() {
		var name [16]byte
		_, _ = rand.Read(name[:]) // never fails
		e.name = "kvstrata-" + hex.EncodeToString(name[:])
		local, err := net.ListenUnix("unix", &net.UnixAddr{Name: "@" + e.name, Net: "unix"})
		if err != nil {
			e.id.Log.Warn("no shared memory: listen on local socket", "err", err)
			e.name = ""
			return nil
		}
		e.local = local
	}
	return nil
}

// shares reports whether there is memory that peers on this host can map.
func (e *Endpoint) shares() bool {
	return e.cfg.SharedMemory && e.id.Cache != nil && e.id.Cache.Caches().Memory.File() != nil && e.bootID != ""
}

// Address is where peers reach the endpoint after Listen; empty before.
func (e *Endpoint) Address() string {
	if e.listener == nil {
		return ""
	}
	return e.listener.Addr().String()
}

// Run serves peers until ctx has ended, and returns nil once nothing of the endpoint runs any more. It is called once.
func (e *Endpoint) Run(ctx context.Context) error {
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { e.expire(ctx); return nil })
	if e.listener != nil {
		g.Go(func() error { return e.accept(ctx, e.listener, e.serve) })
	}
	if e.local != nil {
		g.Go(func() error { return e.accept(ctx, e.local, e.serveLocal) })
	}
	<-ctx.Done()
	var errs []error
	if e.listener != nil {
		errs = append(errs, e.listener.Close())
	}
	if e.local != nil {
		errs = append(errs, e.local.Close())
	}
	e.mu.Lock()
	e.closed = true
	close(e.closing)
	for c := range e.conns {
		_ = c.Close() // its goroutine tells
	}
	e.mu.Unlock()
	e.closePeers()
	e.work.Wait()
	return errors.Join(append(errs, g.Wait())...)
}

// begin counts a goroutine, or a call, that Run waits for; false once Run is about to return.
func (e *Endpoint) begin() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		return false
	}
	e.work.Add(1)
	return true
}

// accept serves a listener's connections, each by a goroutine. Above max_connections a peer is left to wait in the kernel's
// queue only as long as it takes to close it.
func (e *Endpoint) accept(ctx context.Context, l net.Listener, serve func(net.Conn)) error {
	for {
		conn, err := l.Accept()
		switch {
		case ctx.Err() != nil:
			if err == nil {
				_ = conn.Close()
			}
			return nil
		case errors.Is(err, net.ErrClosed):
			return fmt.Errorf("accept peers: %w", err)
		case err != nil: // out of files, or the peer has gone
			e.id.Log.Warn("accept peer", "err", err)
			select {
			case <-time.After(50 * time.Millisecond):
			case <-ctx.Done():
			}
			continue
		}
		e.start(conn, serve)
	}
}

// start serves one connection by a goroutine that Run waits for.
func (e *Endpoint) start(conn net.Conn, serve func(net.Conn)) {
	select {
	case e.slots <- struct{}{}:
	default:
		e.counts.refused.Add(1)
		_ = conn.Close()
		return
	}
	e.mu.Lock()
	if e.closed {
		e.mu.Unlock()
		<-e.slots
		_ = conn.Close()
		return
	}
	e.conns[conn] = struct{}{}
	e.work.Add(1)
	e.mu.Unlock()
	go func() {
		defer e.work.Done()
		serve(conn)
		_ = conn.Close() // a second time, when the peer was cut off
		e.mu.Lock()
		delete(e.conns, conn)
		e.mu.Unlock()
		<-e.slots
	}()
}

// expire ends leases whose time is over.
func (e *Endpoint) expire(ctx context.Context) {
	timer := time.NewTimer(poolTimeout)
	defer timer.Stop()
	for {
		e.mu.Lock()
		e.expireLocked(e.id.Now())
		next, ok := e.leases.Next()
		e.mu.Unlock()
		e.trimPeers()
		wait := poolTimeout
		if ok {
			wait = min(wait, max(next.Sub(e.id.Now()), time.Millisecond))
		}
		timer.Reset(wait)
		select {
		case <-timer.C:
		case <-e.kick:
		case <-ctx.Done():
			return
		}
	}
}
