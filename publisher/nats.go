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

// NATSConfig says how the source of a connector or a store is published.
type NATSConfig struct {
	Stream StreamConfig
	Judge  resident.Config
	// Fence is that of the lease under which the source is published, where several could do it; it numbers the life too, so
	// that consumers drop what an earlier holder sends. 0 = the Unix time in milliseconds.
	Fence event.Fence
	// Stores are the instances of the shared stores that the source reads from.
	Stores []string
	// State tells how far what was published can be trusted, and why not in full. Run asks it from a goroutine of its own; what
	// it answers must hold for everything published before. nil = live from the start on.
	State func() (event.State, string)
}

// DefaultNATSConfig returns the configuration of a source that has one publisher, and reads from no store.
func DefaultNATSConfig() NATSConfig {
	return NATSConfig{Stream: DefaultStreamConfig(), Judge: resident.DefaultConfig()}
}

// NATS publishes the events of a connector or a store: it judges them, as the subscriber does for engines, and puts
// them on the bus. Each is a new life of its source, which begins with nothing: what an earlier one held is void for consumers
// as soon as they hear of this one.
type NATS struct {
	cfg    NATSConfig
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
func NewNATS(cfg NATSConfig, b *bus.Bus, source event.Source, log *slog.Logger) (*NATS, error) {
	if source.Origin == event.Engine {
		return nil, fmt.Errorf("publish %v: an engine's events are judged by its subscriber", source)
	}
	if cfg.Fence == 0 {
		cfg.Fence = event.Fence(time.Now().UnixMilli())
	}
	if cfg.State == nil {
		cfg.State = func() (event.State, string) { return event.StateLive, "" }
	}
	cfg.Stream.MaxWait = 0 // it never waits: observing must not slow a transfer
	return &NATS{
		cfg: cfg, stream: NewStream(cfg.Stream, b, source, cfg.Fence, log), epoch: event.Epoch(cfg.Fence), set: resident.New(cfg.Judge),
	}, nil
}

// Blocks returns how many blocks are resident, by what was published.
func (n *NATS) Blocks() uint64 {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.set.Blocks()
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

// A status is sent each second, and when the state has changed, which is looked at more often.
const (
	statusEvery = time.Second
	lookEvery   = 100 * time.Millisecond
)

// Run sends until ctx ends, says each second how the source does, and writes its checkpoints.
func (n *NATS) Run(ctx context.Context) error {
	group, ctx := errgroup.WithContext(ctx)
	streamCtx, stop := context.WithCancel(context.WithoutCancel(ctx))
	group.Go(func() error { return n.stream.Run(streamCtx) })
	group.Go(func() error {
		defer stop()
		state, reason := n.cfg.State()
		if err := n.report(state, reason, true); err != nil {
			return err
		}
		tick := time.NewTicker(lookEvery)
		defer tick.Stop()
		for said := time.Now(); ; {
			select {
			case <-ctx.Done():
				return n.report(event.StateGone, "its publisher has stopped", true)
			case now := <-tick.C:
				was := state
				if state, reason = n.cfg.State(); state == was && now.Sub(said) < statusEvery {
					continue
				}
				said = now
				if err := n.report(state, reason, false); err != nil {
					return err
				}
			}
		}
	})
	return group.Wait()
}

// report publishes the status, and a checkpoint when one is due or now is set. The state was read before: what is published
// since is behind it in the stream.
func (n *NATS) report(state event.State, reason string, now bool) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	seq := n.next - min(n.next, 1)
	st := event.Status{
		Epoch: n.epoch, Seq: seq, State: state, Reason: reason, Time: event.UnixTime(time.Now()), Digest: n.set.Digest(),
		Ledger: n.ledger.Clone(), Copies: event.CopiesCounted, Groups: n.set.Groups(), Counters: n.set.Oddities(), Stores: n.cfg.Stores,
	}
	if err := n.stream.Status(&st); err != nil {
		return err
	}
	if now || n.stream.CheckpointDue(time.Now(), n.set.Entries()) {
		cp := &event.Checkpoint{Epoch: n.epoch, Seq: seq, State: state, Reason: reason, Ledger: n.ledger.Clone()}
		n.stream.Checkpoint(cp, n.set.Snapshot())
	}
	return nil
}
