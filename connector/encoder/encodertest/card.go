package encodertest

import (
	"context"
	"os"

	"kvstrata/connector/device"
)

// card is a device whose memory the CPU cannot address: a copy takes a goroutine of its own, as long as that takes.
type card struct{ device.Host }

// Name is not the CPU's.
func (card) Name() string { return "card:0" }

// NewStream returns a stream whose copies end some time after they were posted.
func (c card) NewStream() (device.Stream, error) {
	inner, err := c.Host.NewStream()
	return cardStream{inner}, err
}

type cardMemory struct{ device.Memory }

func (cardMemory) Host() []byte   { return nil }
func (cardMemory) File() *os.File { return nil }

type cardStream struct{ inner device.Stream }

func (s cardStream) Gather(dst []byte, src device.Memory, spans []device.Span) (device.Event, error) {
	return later(func() error { _, err := s.inner.Gather(dst, src.(cardMemory).Memory, spans); return err }), nil
}

func (s cardStream) Scatter(dst device.Memory, spans []device.Span, src []byte) (device.Event, error) {
	return later(func() error { _, err := s.inner.Scatter(dst.(cardMemory).Memory, spans, src); return err }), nil
}

func (s cardStream) Close() error { return s.inner.Close() }

// copied is the end of a copy.
type copied struct {
	done chan struct{}
	err  error // once done
}

func later(do func() error) *copied {
	c := &copied{done: make(chan struct{})}
	go func() {
		defer close(c.done)
		c.err = do()
	}()
	return c
}

func (c *copied) Done() bool {
	select {
	case <-c.done:
		return true
	default:
		return false
	}
}

func (c *copied) Wait(ctx context.Context) error {
	select {
	case <-c.done:
		return c.err
	case <-ctx.Done():
		return ctx.Err()
	}
}
