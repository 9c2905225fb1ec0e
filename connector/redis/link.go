package redis

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"time"
)

const (
	queueOps     = 1024 // operations that wait for a connection, and that are under way on one
	firstBackoff = 50 * time.Millisecond
	lastBackoff  = 2 * time.Second
)

// errBroken says that a connection ended under an operation, which may or may not have been done: doing it again is right.
var errBroken = errors.New("connection lost")

var errClosed = errors.New("the backend is closed")

// link is one data connection to a node, made anew when it is lost. Its goroutine, run, writes; each life of the connection
// has another that reads. A caller hands it operations through the queue; when that is full, the caller waits.
type link struct {
	b       *Backend
	address string
	queue   chan *op
	load    atomic.Int64 // bytes of the operations that were handed over and are not done
}

// run connects when there is something to do. While a server cannot be reached it turns operations away, so that the engine
// computes what it cannot have; how soon it tries again goes by how long the attempt took.
func (l *link) run(ctx context.Context) {
	lost := false
	for {
		var first *op
		select {
		case <-ctx.Done():
			l.refuse(errClosed, false)
			return
		case first = <-l.queue:
		}
		dialCtx, cancel := context.WithTimeout(ctx, l.b.server.timeout)
		start := time.Now()
		conn, err := l.b.server.dial(dialCtx, l.address)
		took := time.Since(start)
		cancel()
		if err == nil {
			if lost {
				l.b.log.Info("the store is reached again", "store", l.b.Name(), "node", l.address)
			}
			lost = false
			l.serve(ctx, conn, first)
			continue
		}
		if !lost && ctx.Err() == nil {
			l.b.log.Warn("cannot reach the store; its blocks are computed meanwhile", "store", l.b.Name(), "node", l.address, "err", err)
		}
		lost = true
		l.finish(first, err, true) // in a cluster, another node may serve the key by now
		l.refuse(err, true)
		l.rest(ctx, min(max(10*took, time.Millisecond), lastBackoff), err)
	}
}

// rest waits until the server may be tried again. What comes meanwhile waits too if that is soon, and is turned away
// otherwise.
func (l *link) rest(ctx context.Context, d time.Duration, err error) {
	if d <= firstBackoff {
		pause(ctx, d)
		return
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
			return
		case o := <-l.queue:
			l.finish(o, err, true)
		}
	}
}

// refuse turns away what waits in the queue.
func (l *link) refuse(err error, again bool) {
	for {
		select {
		case o := <-l.queue:
			l.finish(o, err, again)
		default:
			return
		}
	}
}

// finish ends an operation, once. again says that it may be tried on another connection.
func (l *link) finish(o *op, err error, again bool) {
	l.load.Add(-int64(o.cost))
	o.finish(err, again)
}

// session is one life of a connection.
type session struct {
	l      *link
	conn   net.Conn
	sent   chan *op // whose replies are to come, in order
	flight atomic.Int64
	room   chan struct{} // told when bytes came back
	broken chan struct{} // closed by kill
	once   sync.Once
	err    error // why it was killed; read after broken is closed
	early  *op   // that got a reply before it was written
}

// kill ends the session. It may be called by anyone, again and again.
func (s *session) kill(err error) {
	s.once.Do(func() {
		s.err = err
		close(s.broken)
		conn := s.conn
		if secure, ok := conn.(*tls.Conn); ok {
			conn = secure.NetConn() // no farewell that could wait for the peer
		}
		_ = conn.Close() // what was under way is lost in any case
	})
}

// serve writes operations to a connection until it breaks or ctx ends, and ends all that were under way.
func (l *link) serve(ctx context.Context, conn net.Conn, first *op) {
	s := &session{l: l, conn: conn, sent: make(chan *op, queueOps), room: make(chan struct{}, 1), broken: make(chan struct{})}
	var reading sync.WaitGroup
	reading.Go(s.read)
	stop := context.AfterFunc(ctx, func() { s.kill(errClosed) })
	s.write(first)
	stop()
	reading.Wait()
	if s.early != nil {
		s.lose(s.early)
	}
	for {
		select {
		case o := <-s.sent:
			s.lose(o)
		default:
			return
		}
	}
}

// lose ends an operation with its session.
func (s *session) lose(o *op) {
	s.l.finish(o, fmt.Errorf("%w: %w", errBroken, s.err), !errors.Is(s.err, errClosed))
}

// write hands operations to the writer until the session is broken.
func (s *session) write(o *op) {
	w := newWriter(s.conn)
	for {
		if o == nil {
			select {
			case o = <-s.l.queue: // more to be written along with what is there
			default:
				if err := w.flush(); err != nil {
					s.kill(err)
				}
				select {
				case o = <-s.l.queue:
				case <-s.broken:
					return
				}
			}
		}
		if !s.admit(w, o) {
			s.lose(o)
			return
		}
		if !o.start(s) { // nobody waits for it any more
			s.flight.Add(-int64(o.cost))
			s.l.finish(o, nil, false)
			o = nil
			continue
		}
		w.prepare(o)
		isSet := o.kind == opSet
		s.sent <- o // has room: admit has seen to it, and nobody else sends
		var err error
		if isSet {
			err = w.payload(o, s.l.b.tail)
		} else if len(w.out) >= writeAhead {
			err = w.flush()
		}
		if err != nil {
			s.kill(err)
			return
		}
		o = nil
	}
}

// admit waits until an operation may be under way too: alone, or within the bound on bytes. It reports false when the
// session is broken.
func (s *session) admit(w *writer, o *op) bool {
	limit := int64(s.l.b.cfg.PipelineBytes)
	for {
		select {
		case <-s.broken:
			return false
		default:
		}
		flight := s.flight.Load()
		if len(s.sent) < cap(s.sent) && (flight == 0 || flight+int64(o.cost) <= limit) {
			s.flight.Add(int64(o.cost))
			return true
		}
		if err := w.flush(); err != nil { // what is waited for may not have been asked yet
			s.kill(err)
			return false
		}
		select {
		case <-s.room:
		case <-s.broken:
			return false
		}
	}
}

// read reads replies until the connection ends, and kills the session then. The last operation stays to be ended by serve.
func (s *session) read() {
	r := newReader(s.conn)
	b := s.l.b
	for {
		line, err := r.line()
		if err != nil {
			if err == io.EOF {
				err = errors.New("the server closed the connection")
			}
			s.kill(err)
			return
		}
		var o *op
		select {
		case o = <-s.sent:
		default:
			s.kill(fmt.Errorf("%w: a reply to nothing", errProtocol))
			return
		}
		if o.busy() { // the writer has its pieces: serve ends the operation once both have ended
			s.kill(fmt.Errorf("reply to half a command: %w", lineError(line)))
			s.early = o
			return
		}
		fail, err := r.reply(o, line, &b.compatibility, b.cfg.Checksum)
		if err != nil {
			s.kill(err)
			s.lose(o)
			return
		}
		moved := isMoved(fail)
		s.flight.Add(-int64(o.cost))
		s.l.finish(o, fail, moved)
		select {
		case s.room <- struct{}{}:
		default:
		}
	}
}
