package publisher

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"kvstrata/bus"
	"kvstrata/event"
	"kvstrata/event/resident"
)

// NATS publishes the events of a connector or a store: it judges them, as the subscriber does for engines, and puts
// them on the bus. Its epoch, and its fence, is the Unix time in milliseconds at which it was made.
type NATS struct {
	stream *Stream
	epoch  event.Epoch

	mu     sync.Mutex
	set    *resident.Set
	next   event.Seq
	ledger event.Ledger
	events []event.Event // copies: the judge fills them in, and the caller's may be shared
	blocks []event.Block
}

// NewNATS returns a publisher for a source. Nothing is sent before Run runs.
func NewNATS(cfg StreamConfig, judge resident.Config, b *bus.Bus, source event.Source, log *slog.Logger) (*NATS, error) {
	if source.Origin == event.Engine {
		return nil, fmt.Errorf("publish %v: an engine's events are judged by its subscriber", source)
	}
	now := time.Now().UnixMilli()
	cfg.MaxWait = 0 // it never waits: observing must not slow a transfer
	return &NATS{
		stream: NewStream(cfg, b, source, event.Fence(now), log), epoch: event.Epoch(now), set: resident.New(judge, nil),
	}, nil
}

// Publish judges a batch, numbers it and hands it to the stream, without the prompt text that its names are made of.
func (n *NATS) Publish(b *event.Batch) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	own := n.copy(b)
	own.First, own.Last, own.Way = n.next, n.next, event.Live
	own.Received = own.Time
	n.next++
	n.set.Judge(&own)
	for i := range own.Events {
		ev := &own.Events[i]
		ev.Tokens, ev.ExtraKeys, ev.Salt, ev.Terms = nil, nil, "", nil
	}
	n.ledger.Count(&own)
	n.stream.Publish(context.Background(), n.epoch, &own, n.set.Digest())
	n.events = own.Events[:0]
	return nil
}

// copy returns a batch whose events and blocks are this publisher's.
func (n *NATS) copy(b *event.Batch) event.Batch {
	own := *b
	n.events, n.blocks = append(n.events[:0], b.Events...), n.blocks[:0]
	for i := range b.Events {
		n.blocks = append(n.blocks, b.Events[i].Blocks...)
	}
	rest := n.blocks
	for i := range n.events {
		k := len(n.events[i].Blocks)
		n.events[i].Blocks, rest = rest[:k:k], rest[k:]
	}
	own.Events = n.events
	return own
}

// Run sends until ctx ends, says each second how the source does, and writes its checkpoints.
func (n *NATS) Run(ctx context.Context) error {
	group, ctx := errgroup.WithContext(ctx)
	streamCtx, stop := context.WithCancel(context.WithoutCancel(ctx))
	group.Go(func() error { return n.stream.Run(streamCtx) })
	group.Go(func() error {
		defer stop()
		if err := n.report(event.StateLive, true); err != nil {
			return err
		}
		tick := time.NewTicker(time.Second)
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				return n.report(event.StateGone, true)
			case <-tick.C:
				if err := n.report(event.StateLive, false); err != nil {
					return err
				}
			}
		}
	})
	return group.Wait()
}

// report publishes the status, and a checkpoint when one is due or now is set.
func (n *NATS) report(state event.State, now bool) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	seq := n.next - min(n.next, 1)
	st := event.Status{
		Epoch: n.epoch, Seq: seq, State: state, Time: event.UnixTime(time.Now()), Digest: n.set.Digest(),
		Ledger: n.ledger.Clone(), Copies: event.CopiesCounted, Groups: n.set.Groups(), Counters: n.set.Oddities(),
	}
	if err := n.stream.Status(&st); err != nil {
		return err
	}
	if now || n.stream.CheckpointDue(time.Now(), n.set.Entries()) {
		cp := &event.Checkpoint{Epoch: n.epoch, Seq: seq, State: state, Ledger: n.ledger.Clone()}
		n.stream.Checkpoint(cp, n.set.Snapshot())
	}
	return nil
}
