package tcp

import (
	"bufio"
	"context"
	"crypto/sha256"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"

	"kvstrata/connector/vectored"
)

const (
	// portion is how many bytes are hashed and written at a time: they are still in the cache when the kernel copies them.
	portion = 256 << 10
	// maxOpens bounds what one control connection waits for at a time.
	maxOpens = 1024
)

// session is one connection of a peer, after the handshake.
type session struct {
	e        *Endpoint
	conn     net.Conn
	in       *bufio.Reader
	hello    *greeting
	consumer string

	head   [header]byte
	body   []byte
	req    request
	own    [][]byte // pieces of an export that has no cache
	sum    sum
	batch  [][]byte
	hashed [][]byte    // of the batch, what goes into the sum
	out    net.Buffers // what is left of batch
	first  []byte      // a header on its way

	opens sync.WaitGroup

	mu      sync.Mutex
	reply   []byte
	waiting map[uint64]context.CancelFunc // opens of a control connection, by tag
}

// serve is the life of a peer's connection. What goes wrong ends it: the peer sees that, and the log at debug level.
func (e *Endpoint) serve(conn net.Conn) {
	if e.tls != nil {
		conn = tls.Server(conn, e.tls)
	}
	hello, err := e.welcome(conn, e.secret)
	if err == nil {
		s := &session{
			e: e, conn: conn, in: bufio.NewReaderSize(conn, 16<<10), hello: hello,
			consumer: fmt.Sprintf("%s/%d", hello.engine, hello.rank), waiting: make(map[uint64]context.CancelFunc),
		}
		err = s.run()
	}
	_ = conn.Close() // of TLS, to send its end
	if err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, net.ErrClosed) {
		e.id.Log.Debug("connection of a peer ended", "peer", conn.RemoteAddr(), "err", err)
	}
}

// greeting is what this end says of itself.
func (e *Endpoint) greeting() greeting {
	g := greeting{rank: e.id.Rank, ranks: e.id.Ranks, hash: e.id.Kind, engine: e.id.Engine}
	if e.id.Cache != nil {
		g.blockBytes = uint64(e.id.Cache.BlockBytes())
	}
	return g
}

// welcome is the server's side of the handshake. Nothing is looked up or allocated for a peer that has not proved itself but
// this.
func (e *Endpoint) welcome(conn net.Conn, secret []byte) (*greeting, error) {
	if err := conn.SetDeadline(time.Now().Add(handshakeTimeout)); err != nil {
		return nil, err
	}
	own := e.greeting()
	hello, err := readGreeting(conn)
	if err != nil {
		if errors.Is(err, ErrRefused) { // another version: it learns ours
			_, _ = conn.Write(own.append(nil))
		}
		return nil, fmt.Errorf("read hello: %w", err)
	}
	text := own.append(nil)
	p := proof(secret, "server", hello, &own)
	if _, err := conn.Write(append(text, p[:]...)); err != nil {
		return nil, fmt.Errorf("write welcome: %w", err)
	}
	var b [header + sha256.Size]byte
	if _, err := io.ReadFull(conn, b[:]); err != nil {
		return nil, fmt.Errorf("read proof: %w", err)
	}
	if f := parseFrame(b[:]); f.kind != kindProof || f.length != sha256.Size {
		return nil, fmt.Errorf("%w: %v of %d bytes instead of a proof", ErrProtocol, f.kind, f.length)
	}
	st, refusal := statusOK, error(nil)
	switch {
	case !proved(proof(secret, "client", hello, &own), [sha256.Size]byte(b[header:])):
		st, refusal = statusSecret, ErrSecret
	case hello.expected != "" && hello.expected != e.id.Engine:
		st, refusal = statusEngine, fmt.Errorf("%w: %q is here", ErrEngine, e.id.Engine)
	default:
		st, refusal = agree(&own, hello, e.id.Cache != nil)
	}
	var body []byte
	if refusal != nil {
		e.counts.refused.Add(1)
		body = []byte(refusal.Error())
		body = body[:min(len(body), maxText)]
	} else {
		for _, s := range []string{e.bootID, e.name} {
			body = append(append(body, byte(len(s))), s...)
		}
		body = append(body, e.token...)
	}
	ready := frame{length: len(body), kind: kindReady, status: st}.append(nil)
	if _, err := conn.Write(append(ready, body...)); err != nil {
		return nil, fmt.Errorf("write ready: %w", err)
	}
	return hello, errors.Join(refusal, conn.SetDeadline(time.Time{}))
}

// run answers frames until the connection ends.
func (s *session) run() error {
	ctx, cancel := context.WithCancel(context.Background())
	defer s.opens.Wait()
	defer cancel()
	for {
		if err := s.conn.SetReadDeadline(time.Now().Add(idleTimeout)); err != nil {
			return err
		}
		if _, err := io.ReadFull(s.in, s.head[:]); err != nil {
			return err
		}
		f := parseFrame(s.head[:])
		var err error
		if s.body, err = readBody(s.in, f, maxBody, s.body); err != nil {
			return err
		}
		if err := s.answer(ctx, f); err != nil {
			return err
		}
	}
}

// answer does one frame.
func (s *session) answer(ctx context.Context, f frame) error {
	switch f.kind {
	case kindRead:
		if s.hello.purpose != purposeData {
			return fmt.Errorf("%w: read on a control connection", ErrProtocol)
		}
		if err := s.req.parse(s.body); err != nil {
			return err
		}
		return s.read(ctx, f)
	case kindOpen:
		if err := s.req.parse(s.body); err != nil {
			return err
		}
		wait := time.Duration(s.req.wait) * time.Millisecond
		if s.hello.purpose == purposeControl {
			return s.openLater(ctx, f, wait)
		}
		return s.open(ctx, f.tag, s.req.name, s.req.parts, f.flags&flagOrdinal != 0, min(wait, s.e.readWait))
	case kindWithdraw:
		s.mu.Lock()
		defer s.mu.Unlock()
		if cancel, ok := s.waiting[f.tag]; ok {
			cancel()
		}
		return nil
	case kindConfirm:
		if len(s.body) < 9 {
			return fmt.Errorf("%w: confirm of %d bytes", ErrProtocol, len(s.body))
		}
		generation := le.Uint64(s.body)
		return s.ack(f.tag, s.e.confirm(string(s.body[8:]), generation), generation, nil)
	case kindDone:
		return s.ack(f.tag, s.e.finish(string(s.body), s.consumer), 0, nil)
	case kindBeat:
		names, err := parseBeat(s.body)
		if err != nil {
			return err
		}
		s.e.beat(names)
		return s.ack(f.tag, statusOK, 0, nil)
	default:
		return fmt.Errorf("%w: %v from a client", ErrProtocol, f.kind)
	}
}

// ack answers a frame. Opens that wait answer beside the session's goroutine.
func (s *session) ack(tag uint64, st status, generation uint64, parts []int) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.reply = appendAck(s.reply[:0], tag, st, generation, parts)
	if err := s.conn.SetWriteDeadline(time.Now().Add(s.e.cfg.stall())); err != nil {
		return err
	}
	_, err := s.conn.Write(s.reply)
	return err
}

// open waits for a request and checks the parts. With positions, the answer tells the blocks.
func (s *session) open(ctx context.Context, tag uint64, name []byte, parts []int, ordinal bool, wait time.Duration) error {
	x, st := s.e.lookup(ctx, name, wait)
	if st != statusOK {
		return s.ack(tag, st, 0, nil)
	}
	if _, st = x.resolve(parts, ordinal); st != statusOK || !ordinal {
		parts = nil
	}
	return s.ack(tag, st, x.generation, parts)
}

// openLater lets an open of a control connection wait beside the others.
func (s *session) openLater(ctx context.Context, f frame, wait time.Duration) error {
	s.mu.Lock()
	if _, ok := s.waiting[f.tag]; ok || len(s.req.parts) > 0 {
		s.mu.Unlock()
		return fmt.Errorf("%w: open %d on a control connection, of %d parts", ErrProtocol, f.tag, len(s.req.parts))
	}
	if len(s.waiting) >= maxOpens {
		s.mu.Unlock()
		return s.ack(f.tag, statusBusy, 0, nil)
	}
	ctx, cancel := context.WithCancel(ctx)
	s.waiting[f.tag] = cancel
	s.mu.Unlock()
	name := []byte(string(s.req.name)) // the body is used again
	s.opens.Go(func() {
		defer cancel()
		x, st := s.e.lookup(ctx, name, min(wait, maxOpenWait))
		s.mu.Lock()
		delete(s.waiting, f.tag)
		s.mu.Unlock()
		generation := uint64(0)
		if x != nil {
			generation = x.generation
		}
		if err := s.ack(f.tag, st, generation, nil); err != nil {
			_ = s.conn.Close() // the session's goroutine tells
		}
	})
	return nil
}

// read sends the parts that a read asks for, and then whether they count.
func (s *session) read(ctx context.Context, f frame) error {
	wait := min(time.Duration(s.req.wait)*time.Millisecond, s.e.readWait)
	x, st := s.e.lookup(ctx, s.req.name, wait)
	if st != statusOK {
		return s.trailer(f, st)
	}
	if _, st = x.resolve(s.req.parts, f.flags&flagOrdinal != 0); st != statusOK {
		return s.trailer(f, st)
	}
	var o opened
	var err error
	if o, s.own, err = x.gather(ctx, s.req.parts, s.own); err != nil {
		s.e.id.Log.Warn("read memory for a peer", "err", err)
		return s.trailer(f, statusInternal)
	}
	defer o.release()
	s.sum.reset()
	if err := s.send(f, &o); err != nil {
		return err
	}
	// The kernel has taken the last byte. Only now does it count whether they were still the request's.
	if !s.e.holds(x) {
		return s.trailer(f, statusEnded)
	}
	s.e.counts.served.Add(1)
	return s.trailer(f, statusOK)
}

// send writes a header and pieces from where they lie, portion by portion. Each is hashed once the kernel has copied it, and so
// brought it into the cache, while the peer reads it.
func (s *session) send(f frame, o *opened) error {
	s.first = frame{length: o.bytes, kind: kindData, tag: f.tag}.append(s.first[:0])
	s.batch = append(s.batch[:0], s.first)
	checksum, bytes := f.flags&flagChecksum != 0, 0
	s.hashed = s.hashed[:0]
	for _, p := range o.pieces {
		for len(p) > 0 {
			n := min(len(p), portion-bytes)
			s.batch = append(s.batch, p[:n])
			if checksum {
				s.hashed = append(s.hashed, p[:n])
			}
			p = p[n:]
			if bytes += n; bytes == portion || len(s.batch) == vectored.Max {
				if err := s.flush(); err != nil {
					return err
				}
				bytes = 0
			}
		}
	}
	return s.flush()
}

// flush writes the batch. A peer that takes nothing for stall_timeout is given up.
func (s *session) flush() error {
	if len(s.batch) == 0 {
		return nil
	}
	if err := s.conn.SetWriteDeadline(time.Now().Add(s.e.cfg.stall())); err != nil {
		return err
	}
	s.out = s.batch
	_, err := s.out.WriteTo(s.conn)
	clear(s.batch)
	s.batch = s.batch[:0]
	for i, p := range s.hashed {
		s.sum.write(p)
		s.hashed[i] = nil
	}
	s.hashed = s.hashed[:0]
	return err
}

func (s *session) trailer(f frame, st status) error {
	t := frame{length: 8, kind: kindTrailer, flags: f.flags & flagChecksum, status: st, tag: f.tag}
	s.first = t.append(s.first[:0])
	sum := uint64(0)
	if st == statusOK && f.flags&flagChecksum != 0 {
		sum = s.sum.sum64()
	}
	s.first = le.AppendUint64(s.first, sum)
	s.batch = append(s.batch[:0], s.first)
	return s.flush()
}
