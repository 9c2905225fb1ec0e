// Package publisher puts events on the wire: on NATS, on a vLLM-compatible ZeroMQ socket, or nowhere.
//
// [EventPublisher] is for who makes events (connectors, stores, simulated engines): batches without sequence or
// judgement. [Stream] is the road of one source onto the bus, for who has judged already.
package publisher

import (
	"context"
	"errors"

	"golang.org/x/sync/errgroup"

	"kvstrata/event"
)

// EventPublisher takes the batches of one source. Publish assigns the sequence, never waits on a network, and may be
// called by one goroutine at a time; the batch may be reused once it returns. A batch that finds no room is dropped,
// counted, and leaves a gap in the sequence that every consumer sees. Run does the sending and returns nil after ctx
// ended and what was queued has been given a bounded time to leave.
type EventPublisher interface {
	Publish(b *event.Batch) error
	Run(ctx context.Context) error
}

var (
	_ EventPublisher = (*NATS)(nil)
	_ EventPublisher = (*ZMQ)(nil)
	_ EventPublisher = Null{}
	_ EventPublisher = Fanout(nil)
)

// Null publishes nothing.
type Null struct{}

// Publish drops the batch.
func (Null) Publish(*event.Batch) error { return nil }

// Run waits for ctx to end.
func (Null) Run(ctx context.Context) error {
	<-ctx.Done()
	return nil
}

// Fanout publishes to each of its publishers, in order. Each assigns a sequence of its own, and none may keep or change
// what the next one reads: the batch's events are shared.
type Fanout []EventPublisher

// Publish hands the batch to all, also past one that fails.
func (f Fanout) Publish(b *event.Batch) error {
	var errs []error
	for _, p := range f {
		own := *b
		errs = append(errs, p.Publish(&own))
	}
	return errors.Join(errs...)
}

// Run runs all; the first that fails ends the others.
func (f Fanout) Run(ctx context.Context) error {
	group, ctx := errgroup.WithContext(ctx)
	for _, p := range f {
		group.Go(func() error { return p.Run(ctx) })
	}
	return group.Wait()
}
