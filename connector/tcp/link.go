package tcp

import (
	"context"
	"crypto/sha256"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"time"
)

// Peer is an endpoint elsewhere.
type Peer struct {
	Address string // host:port
	Engine  string // the engine that is meant; empty = whichever answers
}

// link is a connection to a peer, after the handshake. One fetch, or one control, uses it at a time.
type link struct {
	conn   net.Conn // TLS or bare
	bare   net.Conn
	vector *vector
	host   about
	used   time.Time

	tag    uint64
	out    []byte
	in     [header + 8]byte
	body   []byte
	sum    sum
	flight []int // chunks that were asked for, in order
	bytes  int   // of them
	parts  []int
}

// about is what a server tells of its host once the client has proved itself.
type about struct {
	bootID string
	name   string // of the local socket; empty = none
	token  []byte // its secret
}

// cut closes a connection at once, whoever is reading or writing.
func (l *link) cut() { _ = l.bare.Close() }

// dial connects to a peer and shakes hands.
func (e *Endpoint) dial(ctx context.Context, p Peer, why purpose) (*link, error) {
	ctx, cancel := context.WithTimeout(ctx, handshakeTimeout)
	defer cancel()
	var bare net.Conn
	var err error
	if e.id.Dial != nil {
		bare, err = e.id.Dial(ctx, p.Address)
	} else {
		bare, err = new(net.Dialer).DialContext(ctx, "tcp", p.Address)
	}
	if err != nil {
		return nil, fmt.Errorf("connect to peer %s: %w", p.Address, err)
	}
	stop := context.AfterFunc(ctx, func() { _ = bare.Close() })
	conn := bare
	if e.tls != nil {
		cfg := e.tls.Clone()
		if cfg.ServerName, _, err = net.SplitHostPort(p.Address); err != nil {
			cfg.ServerName = p.Address
		}
		conn = tls.Client(bare, cfg)
	}
	host, err := e.greet(conn, p.Engine, why, e.secret)
	if !stop() && err == nil {
		err = ctx.Err()
	}
	if err != nil {
		_ = bare.Close()
		return nil, fmt.Errorf("shake hands with peer %s: %w", p.Address, err)
	}
	return &link{conn: conn, bare: bare, vector: newVector(conn), host: host}, nil
}

// greet is the client's side of the handshake.
func (e *Endpoint) greet(conn net.Conn, engine string, why purpose, secret []byte) (host about, err error) {
	if len(engine) > maxEngine {
		return host, fmt.Errorf("engine id of %d bytes: want %d at most", len(engine), maxEngine)
	}
	if err := conn.SetDeadline(time.Now().Add(handshakeTimeout)); err != nil {
		return host, err
	}
	hello := e.greeting()
	hello.purpose, hello.expected = why, engine
	if _, err := conn.Write(hello.append(nil)); err != nil {
		return host, fmt.Errorf("write hello: %w", err)
	}
	welcome, err := readGreeting(conn)
	if err != nil {
		return host, fmt.Errorf("read welcome: %w", err)
	}
	var theirs [sha256.Size]byte
	if _, err := io.ReadFull(conn, theirs[:]); err != nil {
		return host, fmt.Errorf("read welcome: %w", err)
	}
	// A peer that does not know the secret learns nothing more; without one here there is no proof to be made or wanted.
	if !proved(proof(secret, "server", &hello, welcome), theirs) {
		return host, ErrSecret
	}
	if engine != "" && welcome.engine != engine {
		return host, fmt.Errorf("%w: %q instead of %q", ErrEngine, welcome.engine, engine)
	}
	if _, err := agree(&hello, welcome, e.id.Cache != nil); err != nil {
		return host, err
	}
	mine := proof(secret, "client", &hello, welcome)
	if _, err := conn.Write(append(frame{length: len(mine), kind: kindProof}.append(nil), mine[:]...)); err != nil {
		return host, fmt.Errorf("write proof: %w", err)
	}
	host, err = readReady(conn)
	return host, errors.Join(err, conn.SetDeadline(time.Time{}))
}

// readReady reads the handshake's outcome.
func readReady(r io.Reader) (host about, err error) {
	var head [header]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return host, fmt.Errorf("read ready: %w", err)
	}
	f := parseFrame(head[:])
	if f.kind != kindReady {
		return host, fmt.Errorf("%w: %v instead of ready", ErrProtocol, f.kind)
	}
	body, err := readBody(r, f, maxHello, nil)
	if err != nil {
		return host, fmt.Errorf("read ready: %w", err)
	}
	if f.status != statusOK {
		return host, fmt.Errorf("%w (it says %.*q)", f.status.err(), maxText, body)
	}
	for _, s := range []*string{&host.bootID, &host.name} {
		if len(body) < 1 || len(body) < 1+int(body[0]) {
			return host, fmt.Errorf("%w: ready is cut off", ErrProtocol)
		}
		*s, body = string(body[1:1+body[0]]), body[1+body[0]:]
	}
	host.token = body
	return host, nil
}

// reply reads a header into which the tag must fit.
func (l *link) reply(tag uint64) (frame, error) {
	if _, err := io.ReadFull(l.conn, l.in[:header]); err != nil {
		return frame{}, err
	}
	f := parseFrame(l.in[:])
	if f.tag != tag {
		return f, fmt.Errorf("%w: %v with tag %d instead of %d", ErrProtocol, f.kind, f.tag, tag)
	}
	return f, nil
}

// ask writes what is in out, and reads the ack. The link is used by nothing else meanwhile.
func (l *link) ask(wait time.Duration) (status, uint64, error) {
	if err := l.conn.SetDeadline(time.Now().Add(wait)); err != nil {
		return 0, 0, err
	}
	if _, err := l.conn.Write(l.out); err != nil {
		return 0, 0, err
	}
	f, err := l.reply(l.tag)
	if err != nil {
		return 0, 0, err
	}
	if f.kind != kindAck {
		return 0, 0, fmt.Errorf("%w: %v instead of an ack", ErrProtocol, f.kind)
	}
	if l.body, err = readBody(l.conn, f, 12+4*maxParts, l.body); err != nil {
		return 0, 0, err
	}
	generation, parts, err := parseAck(l.body, l.parts[:0])
	l.parts = parts
	return f.status, generation, err
}

// stalled tells a deadline that ran out from other errors of a connection.
func stalled(err error) error {
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return ErrStalled
	}
	return err
}
