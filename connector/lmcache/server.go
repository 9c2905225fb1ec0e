package lmcache

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"time"
)

// ServerConfig says how much a server takes.
type ServerConfig struct {
	Bytes       int           // of values kept and on their way in
	MaxValue    int           // bytes
	Connections int           // at a time
	Timeout     time.Duration // for a request or a reply that has begun; idle connections may stay
	Protocol    Protocol
}

// DefaultServerConfig returns 4 GiB, values of up to 256 MiB, 256 connections and version 1.
func DefaultServerConfig() ServerConfig {
	return ServerConfig{Bytes: 4 << 30, MaxValue: 256 << 20, Connections: 256, Timeout: time.Minute, Protocol: V1}
}

// Validate returns every problem at once.
func (c *ServerConfig) Validate() error {
	var errs []error
	bad := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	if c.Bytes < 1 {
		bad("bytes %d: want 1 or more", c.Bytes)
	}
	if c.MaxValue < 1 || c.MaxValue > c.Bytes {
		bad("max value %d: want 1 to %d bytes, which is all there is", c.MaxValue, c.Bytes)
	}
	if c.Connections < 1 {
		bad("connections %d: want 1 or more", c.Connections)
	}
	if c.Timeout <= 0 {
		bad("timeout %v: want more than 0", c.Timeout)
	}
	if c.Protocol > V1 {
		bad("protocol %v: want v0 or v1", c.Protocol)
	}
	return errors.Join(errs...)
}

// ServerStats is what a server has, and has done.
type ServerStats struct {
	Keys, Bytes  int    // bytes: kept, on their way, and of values that left and whose memory waits for the next
	Evicted      uint64 // values that left for others
	Refused      uint64 // values that were too long, or found no room
	Connections  int
	TurnedAway   uint64 // connections beyond the bound
	Puts, Gets   uint64
	Hits         uint64 // gets that found something
	ClosedAmidst uint64 // connections that ended within a request or reply, or with what is none
}

// Server is a cache server that LMCache's clients, and ours, use as they use LMCache's own. Values are in memory; the least
// recently got leave for new ones. What is too long is read and thrown away: an EXIST then tells that it is not there. A
// LIST, which LMCache's server does not answer, is answered FAIL.
//
// One goroutine runs it; Stats may be called at any time.
type Server struct {
	cfg    ServerConfig
	log    *slog.Logger
	values *values

	puts, gets, hits, refused, turnedAway, amidst atomic.Uint64

	mu    sync.Mutex
	conns map[net.Conn]struct{} // nil when the server has ended
}

// NewServer returns a server that has nothing.
func NewServer(cfg ServerConfig, log *slog.Logger) (*Server, error) {
	if err := cfg.Validate(); err != nil {
		return nil, fmt.Errorf("lmcache server: %w", err)
	}
	return &Server{cfg: cfg, log: log, values: newValues(cfg.Bytes)}, nil
}

// Stats returns what the server has, and has done.
func (s *Server) Stats() ServerStats {
	st := ServerStats{
		Refused: s.refused.Load(), TurnedAway: s.turnedAway.Load(), Puts: s.puts.Load(), Gets: s.gets.Load(), Hits: s.hits.Load(),
		ClosedAmidst: s.amidst.Load(),
	}
	st.Keys, st.Bytes, st.Evicted = s.values.stats()
	s.mu.Lock()
	defer s.mu.Unlock()
	st.Connections = len(s.conns)
	return st
}

// Run serves until ctx ends, closes the listener and every connection, and returns nil then. It is called once.
func (s *Server) Run(ctx context.Context, ln net.Listener) error {
	s.mu.Lock()
	s.conns = make(map[net.Conn]struct{})
	s.mu.Unlock()
	s.log.Info("LMCache server listens", "address", ln.Addr().String(), "bytes", s.cfg.Bytes, "protocol", s.cfg.Protocol.String())
	stop := context.AfterFunc(ctx, func() { _ = ln.Close() }) // ends Accept
	var serving sync.WaitGroup
	err := s.accept(ln, &serving)
	stop()
	_ = ln.Close() // may be closed already
	s.mu.Lock()
	for c := range s.conns {
		_ = c.Close() // ends its goroutine
	}
	s.conns = nil
	s.mu.Unlock()
	serving.Wait()
	if ctx.Err() != nil {
		return nil
	}
	return fmt.Errorf("accept LMCache clients on %s: %w", ln.Addr(), err)
}

func (s *Server) accept(ln net.Listener, serving *sync.WaitGroup) error {
	for {
		c, err := ln.Accept()
		if err != nil {
			return err
		}
		s.mu.Lock()
		full := len(s.conns) >= s.cfg.Connections
		if !full {
			s.conns[c] = struct{}{}
		}
		s.mu.Unlock()
		if full {
			s.turnedAway.Add(1)
			_ = c.Close() // nothing was said yet
			continue
		}
		serving.Go(func() {
			if err := s.serve(c); err != nil {
				s.amidst.Add(1)
				s.log.Debug("LMCache client left", "client", c.RemoteAddr().String(), "err", err)
			}
			_ = c.Close() // may be closed already
			s.mu.Lock()
			delete(s.conns, c)
			s.mu.Unlock()
		})
	}
}

// session is one connection.
type session struct {
	s    *Server
	conn net.Conn
	in   *bufio.Reader
	late []byte      // replies that wait for more, to travel together
	out  net.Buffers // of a value
}

// lateBytes bounds replies that wait.
const lateBytes = 4096

// serve reads requests and answers them, until the client leaves between two.
func (s *Server) serve(c net.Conn) error {
	// The buffer is for requests that come together; values are read past it.
	k := &session{s: s, conn: c, in: bufio.NewReaderSize(c, 4096)}
	size := s.cfg.Protocol.RequestBytes()
	for {
		if k.in.Buffered() < size || len(k.late) > lateBytes {
			if err := k.flush(); err != nil {
				return err
			}
		}
		if k.in.Buffered() == 0 {
			if err := c.SetReadDeadline(time.Time{}); err != nil {
				return err
			}
			if _, err := k.in.Peek(1); err != nil {
				if errors.Is(err, io.EOF) {
					return nil
				}
				return err
			}
		}
		if err := c.SetReadDeadline(time.Now().Add(s.cfg.Timeout)); err != nil {
			return err
		}
		frame, err := k.in.Peek(size)
		if err != nil {
			return unexpected(err)
		}
		request, err := s.cfg.Protocol.ParseRequest(frame)
		if err != nil {
			return err
		}
		if _, err := k.in.Discard(size); err != nil {
			return err
		}
		if err := k.answer(&request); err != nil {
			return fmt.Errorf("%v %s: %w", request.Command, request.Key, err)
		}
	}
}

func (k *session) answer(r *Request) error {
	switch r.Command {
	case Put:
		k.s.puts.Add(1)
		return k.put(r)
	case Get:
		k.s.gets.Add(1)
		return k.get(r)
	case Exist:
		k.reply(k.s.values.has(r.Key))
	case Health:
		k.reply(true)
	case List:
		k.reply(false)
	}
	return nil
}

// put reads a value. One that breaks off is not stored, and what the key had is gone.
func (k *session) put(r *Request) error {
	var data []byte
	fits := r.Length <= k.s.cfg.MaxValue
	if fits && r.Length > 0 {
		data = k.s.values.take(r.Length)
		fits = data != nil
	}
	if !fits {
		k.s.refused.Add(1)
		k.s.values.forget(r.Key) // the old value is not the one that the client means
		_, err := io.CopyN(io.Discard, k.in, int64(r.Length))
		return unexpected(err)
	}
	if _, err := io.ReadFull(k.in, data); err != nil {
		k.s.values.drop(data)
		k.s.values.forget(r.Key)
		return unexpected(err)
	}
	k.s.values.keep(r.Key, r.Content, data)
	return nil
}

func (k *session) get(r *Request) error {
	v := k.s.values.open(r.Key)
	if v == nil {
		k.reply(false)
		return nil
	}
	defer k.s.values.close(v)
	k.s.hits.Add(1)
	k.late = k.s.cfg.Protocol.AppendReply(k.late, &Reply{Code: Success, Length: len(v.data), Content: v.content})
	return k.flush(v.data)
}

// reply adds a reply without a value.
func (k *session) reply(ok bool) {
	code := Fail
	if ok {
		code = Success
	}
	k.late = k.s.cfg.Protocol.AppendReply(k.late, &Reply{Code: code, Content: noContent})
}

// flush writes the replies that wait, and a value behind them.
func (k *session) flush(value ...[]byte) error {
	if len(k.late) == 0 {
		return nil
	}
	if err := k.conn.SetWriteDeadline(time.Now().Add(k.s.cfg.Timeout)); err != nil {
		return err
	}
	k.out = append(append(k.out[:0], k.late), value...)
	out := k.out // WriteTo consumes it
	_, err := out.WriteTo(k.conn)
	clear(k.out)
	k.late = k.late[:0]
	return err
}
