package tcp

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"
)

// maxCalls bounds what waits for an answer on one control connection: a bit less than what the server lets wait.
const maxCalls = maxOpens - 24

// control is the connection over which a peer is told things and asked for requests, many at a time.
type control struct {
	link  *link
	stall time.Duration

	mu      sync.Mutex
	err     error // why it is broken
	tag     uint64
	out     []byte
	pending map[uint64]chan status // each has room for its answer
}

func newControl(l *link, stall time.Duration) *control {
	return &control{link: l, stall: stall, pending: make(map[uint64]chan status)}
}

func (c *control) broken() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.err != nil
}

// run hands answers to whoever waits, until the connection ends.
func (c *control) run() {
	err := c.read()
	c.link.cut()
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err == nil {
		c.err = err
	}
	for tag, ch := range c.pending {
		close(ch)
		delete(c.pending, tag)
	}
}

func (c *control) read() error {
	var head [header]byte
	var body []byte
	for {
		if _, err := io.ReadFull(c.link.conn, head[:]); err != nil {
			return err
		}
		f := parseFrame(head[:])
		if f.kind != kindAck {
			return fmt.Errorf("%w: %v on a control connection", ErrProtocol, f.kind)
		}
		var err error
		if body, err = readBody(c.link.conn, f, 12, body); err != nil {
			return err
		}
		c.mu.Lock()
		if ch, ok := c.pending[f.tag]; ok { // nobody waits any more for one that was withdrawn
			delete(c.pending, f.tag)
			ch <- f.status
		}
		c.mu.Unlock()
	}
}

// call writes a frame and waits for its answer.
func (c *control) call(ctx context.Context, wait time.Duration, write func([]byte, uint64) []byte) (status, error) {
	ch := make(chan status, 1)
	c.mu.Lock()
	if c.err != nil {
		defer c.mu.Unlock()
		return 0, c.err
	}
	if len(c.pending) >= maxCalls {
		c.mu.Unlock()
		return statusBusy, nil
	}
	c.tag++
	tag := c.tag
	c.pending[tag] = ch
	err := c.writeLocked(write(c.out[:0], tag))
	c.mu.Unlock()
	if err != nil {
		return 0, err
	}
	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case st, ok := <-ch:
		if !ok {
			c.mu.Lock()
			defer c.mu.Unlock()
			return 0, c.err
		}
		return st, nil
	case <-ctx.Done():
		err = ctx.Err()
	case <-timer.C:
		err = ErrStalled
		c.link.cut() // it would not answer the next one either
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if _, ok := c.pending[tag]; ok && c.err == nil {
		delete(c.pending, tag)
		err = errors.Join(err, c.writeLocked(frame{kind: kindWithdraw, tag: tag}.append(c.out[:0])))
	}
	return 0, err
}

// writeLocked writes a frame; an error breaks the connection.
func (c *control) writeLocked(b []byte) error {
	c.out = b
	err := c.link.conn.SetWriteDeadline(time.Now().Add(c.stall))
	if err == nil {
		_, err = c.link.conn.Write(b)
	}
	if err != nil {
		c.err = stalled(err)
		c.link.cut()
	}
	return c.err
}
