package lmcache

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// pool is connections to one server, each used by one call at a time.
type pool struct {
	address string
	timeout time.Duration
	greet   func(*conn) error // on a new connection; nil = nothing to say
	slots   chan struct{}     // one a connection in use
	idle    chan *conn
}

func newPool(address string, cfg *Config) *pool {
	return &pool{
		address: address, timeout: cfg.timeout(),
		slots: make(chan struct{}, cfg.Connections), idle: make(chan *conn, cfg.Connections),
	}
}

// close closes what is idle, which is all of it when no call is under way.
func (p *pool) close() error {
	var errs []error
	for {
		select {
		case c := <-p.idle:
			errs = append(errs, c.net.Close())
		default:
			return errors.Join(errs...)
		}
	}
}

// use calls f with a connection of its own, under the time limit. The connection is used again only after success. Of a
// connection that had been idle the server may have taken leave meanwhile: then f is called again, with a new one, unless it
// has got somewhere.
func (p *pool) use(ctx context.Context, f func(*conn) (progress bool, err error)) error {
	if err := p.reserve(ctx); err != nil {
		return fmt.Errorf("wait for a connection to %s: %w", p.address, err)
	}
	defer func() { <-p.slots }()
	for {
		c, used, err := p.connect(ctx)
		if err != nil {
			return err
		}
		progress, err := p.call(ctx, c, f)
		switch {
		case err == nil:
			return nil
		case ctx.Err() != nil:
			return fmt.Errorf("talk to %s: %w", p.address, ctx.Err())
		case !used || progress || !gone(err):
			return fmt.Errorf("talk to %s: %w", p.address, err)
		}
	}
}

// reserve waits for a slot, not longer than for an answer.
func (p *pool) reserve(ctx context.Context) error {
	if ctx.Err() != nil { // it would cost an idle connection
		return ctx.Err()
	}
	select {
	case p.slots <- struct{}{}:
		return nil
	default:
	}
	limit := time.NewTimer(p.timeout)
	defer limit.Stop()
	select {
	case p.slots <- struct{}{}:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	case <-limit.C:
		return fmt.Errorf("all %d are in use: %w", cap(p.slots), os.ErrDeadlineExceeded)
	}
}

// call calls f, which ends when ctx does.
func (p *pool) call(ctx context.Context, c *conn, f func(*conn) (bool, error)) (bool, error) {
	if err := c.net.SetDeadline(time.Now().Add(p.timeout)); err != nil {
		_ = c.net.Close() // is broken
		return false, err
	}
	stop := context.AfterFunc(ctx, func() { _ = c.net.SetDeadline(time.Unix(1, 0)) }) // fails only on a closed connection
	progress, err := f(c)
	if stop() && err == nil {
		p.idle <- c // has room: a slot is held
		return progress, nil
	}
	_ = c.net.Close() // of its bytes some may be on their way still
	return progress, err
}

// connect returns an idle connection, or a new one.
func (p *pool) connect(ctx context.Context) (c *conn, used bool, err error) {
	select {
	case c = <-p.idle:
		return c, true, nil
	default:
	}
	dialer := net.Dialer{Timeout: p.timeout}
	n, err := dialer.DialContext(ctx, "tcp", p.address)
	if err != nil {
		if ctx.Err() != nil {
			err = ctx.Err()
		}
		return nil, false, fmt.Errorf("connect to %s: %w", p.address, err)
	}
	c = newConn(n)
	if p.greet == nil {
		return c, false, nil
	}
	err = n.SetDeadline(time.Now().Add(p.timeout))
	stop := context.AfterFunc(ctx, func() { _ = n.SetDeadline(time.Unix(1, 0)) }) // fails only on a closed connection
	if err == nil {
		err = p.greet(c)
	}
	if !stop() {
		err = ctx.Err()
	}
	if err != nil {
		_ = n.Close() // never got to use
		return nil, false, fmt.Errorf("greet %s: %w", p.address, err)
	}
	return c, false, nil
}

// gone reports whether the other side has closed the connection.
func gone(err error) bool {
	return errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE)
}

// windowBytes bounds the values of a window: more do not gain, and would be under one time limit.
const windowBytes = 16 << 20

// windows calls f for runs of so few chunks that a connection takes them at a time, on as many connections as there are.
func (p *pool) windows(chunks []chunk, pipeline int, f func(first, end int)) {
	n := len(chunks)
	most := min(pipeline, (n+cap(p.slots)-1)/cap(p.slots)) // so that every connection has some
	type run struct{ first, end int }
	var runs []run
	for first := 0; first < n; {
		end, bytes := first+1, chunks[first].bytes
		for end < n && end-first < most && bytes+chunks[end].bytes <= windowBytes {
			bytes += chunks[end].bytes
			end++
		}
		runs = append(runs, run{first, end})
		first = end
	}
	var next atomic.Int64
	work := func() {
		for i := next.Add(1) - 1; i < int64(len(runs)); i = next.Add(1) - 1 {
			f(runs[i].first, runs[i].end)
		}
	}
	var others sync.WaitGroup
	for range min(cap(p.slots), len(runs)) - 1 {
		others.Go(work)
	}
	work()
	others.Wait()
}

// exist asks for keys, a window at a time, on one connection.
func (p *pool) exist(ctx context.Context, keys []string, ask func(dst []byte, key string) ([]byte, error), answer func(*conn) (bool, error)) ([]bool, error) {
	there := make([]bool, 0, len(keys))
	if len(keys) == 0 {
		return there, nil
	}
	err := p.use(ctx, func(c *conn) (bool, error) {
		for len(there) < len(keys) {
			window := keys[len(there):min(len(there)+maxPipeline, len(keys))]
			c.frames = c.frames[:0]
			var err error
			for _, key := range window {
				if c.frames, err = ask(c.frames, key); err != nil {
					return true, err
				}
			}
			if _, err := c.net.Write(c.frames); err != nil {
				return len(there) > 0, err
			}
			for range window {
				ok, err := answer(c)
				if err != nil {
					return len(there) > 0, err
				}
				there = append(there, ok)
			}
		}
		return true, nil
	})
	if err != nil {
		return there, fmt.Errorf("ask for %d keys: %w", len(keys), err)
	}
	return there, nil
}

// putWindow stores a window's chunks: write puts what says so into the connection's output, and confirm reads what says
// that one is stored.
func (p *pool) putWindow(ctx context.Context, chunks []chunk, errs []error, write func(*conn) error, confirm func(*conn, *chunk) (refused, broken error)) {
	done := 0 // chunks that are confirmed, or refused
	err := p.use(ctx, func(c *conn) (bool, error) {
		c.frames, c.out = c.frames[:0], c.out[:0]
		if err := write(c); err != nil {
			return true, err
		}
		// The replies of a window fit into the socket's buffers: they wait there.
		if err := c.flush(); err != nil {
			return false, err
		}
		for ; done < len(chunks); done++ {
			refused, broken := confirm(c, &chunks[done])
			if broken != nil {
				return done > 0, broken
			}
			errs[done] = refused
		}
		return true, nil
	})
	for ; done < len(chunks); done++ {
		errs[done] = fmt.Errorf("put %s, %d bytes: %w", chunks[done].key, chunks[done].bytes, err)
	}
}

// getWindow asks for a window's chunks and reads them. A server may break off in the midst of a value, and of that one again
// and again: LMCache's does when its PUT had broken off. The chunks behind it are then asked for anew.
func (p *pool) getWindow(ctx context.Context, chunks []chunk, errs []error, ask func(dst []byte, key string) ([]byte, error), receive func(*conn, *chunk) (begun bool, refused, broken error)) {
	for done := 0; done < len(chunks); {
		begun := false // the value at done was being read
		before := done
		err := p.use(ctx, func(c *conn) (bool, error) {
			c.frames = c.frames[:0]
			var err error
			for i := done; i < len(chunks); i++ {
				if c.frames, err = ask(c.frames, chunks[i].key); err != nil {
					return true, err
				}
			}
			if _, err := c.net.Write(c.frames); err != nil {
				return false, err
			}
			for ; done < len(chunks); done++ {
				var refused error
				begun, refused, err = receive(c, &chunks[done])
				if err != nil {
					return begun || done > before, err
				}
				errs[done], begun = refused, false
			}
			return true, nil
		})
		if err == nil {
			return
		}
		err = fmt.Errorf("get %s, %d bytes: %w", chunks[done].key, chunks[done].bytes, err)
		if errs[done] = err; !gone(err) || !begun && done == before {
			for ; done < len(chunks); done++ {
				errs[done] = err
			}
		}
		if begun {
			done++
		}
	}
}
