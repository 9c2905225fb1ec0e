package subscriber

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"runtime"
	"slices"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"

	"kvstrata/bus"
	"kvstrata/event"
)

// Sink keeps something of every source: an index, a history, a dashboard. The consumer calls it from one goroutine, in
// the order of each source's stream, but for Restore.
type Sink interface {
	// Restore replaces all that is known of a source by a checkpoint object. Several goroutines call it at once, each for
	// another source, and beside them the feeding one goes on with the others: no batch of a source comes while it is restored.
	// What takes long, reading and decoding, must not hold up those.
	Restore(ctx context.Context, object io.Reader) (*event.Checkpoint, error)
	// Apply adds consecutive batches of one life; a higher epoch than the last one begins from nothing. It returns the
	// digest of the resident set afterwards. The message is reused when it returns. It may wait: the stream is then read
	// no further. After an error the consumer resyncs the source.
	Apply(ctx context.Context, m *event.Message) (event.Digest, error)
	// Tell hands on what a source's publisher says of it.
	Tell(st *event.Status)
	// Compared tells whether a digest sent with the stream was the sink's own.
	Compared(source event.Source, agreed bool)
}

// Rememberer is a sink that outlives the process: a consumer goes on where it stood, instead of from checkpoints.
type Rememberer interface {
	Sink
	// Resume returns the stream sequence up to which everything was kept, by the identity of the stream that it was in,
	// and where each source stood. A sequence of 0 begins with the stream.
	Resume(ctx context.Context) (event.Position, map[event.Source]event.Mark, error)
	// Reached says that everything up to a position in the stream was handed over.
	Reached(at event.Position)
	// Dropped tells of a range that the source's publisher had no room for, the message's one batch; what follows comes with a
	// checkpoint.
	Dropped(m *event.Message)
}

// ConsumerConfig bounds a consumer.
type ConsumerConfig struct {
	// HoldFor is how long batches behind a hole in their source's sequence wait for what is missing, before the source
	// is resynced from a checkpoint; MaxHeld bounds them in bytes.
	HoldFor time.Duration
	MaxHeld int
	// ResyncRetry is how often a checkpoint is asked for until one comes.
	ResyncRetry time.Duration
	// Restores is how many checkpoints are loaded at a time: each takes the memory of one source twice.
	Restores int
	// LateAfter is how long the start waits when no further checkpoint gets loaded. The stream is then read without the sources
	// that are late; their batches are held until they come.
	LateAfter time.Duration
	// Models are those that are consumed; none = all.
	Models []string
}

// wants reports whether a source is consumed.
func (c ConsumerConfig) wants(source event.Source) bool {
	return len(c.Models) == 0 || slices.Contains(c.Models, source.Model)
}

// DefaultConsumerConfig returns the bounds of an index.
func DefaultConsumerConfig() ConsumerConfig {
	return ConsumerConfig{
		HoldFor: 10 * time.Second, MaxHeld: 64 << 20, ResyncRetry: 2 * time.Second, Restores: max(4, runtime.GOMAXPROCS(0)),
		LateAfter: 2 * time.Second,
	}
}

// Consumer hands a sink every source's batches, each once and in order: first the newest checkpoint of each source, then
// the stream behind them. Positions are watermarks per source; duplicates, and whatever a lower fence sent, are dropped.
type Consumer struct {
	cfg  ConsumerConfig
	bus  *bus.Bus
	sink Sink
	log  *slog.Logger

	sources  map[event.Source]*track
	restores *restorer
	cut      bool           // the stream no longer holds its first messages
	first    uint64         // the first that it held
	from     uint64         // where reading began
	read     uint64         // how far
	late     int            // sources whose checkpoint of the start is still being loaded
	at       event.Position // how far the stream was handed over
	decoder  event.Decoder
	caught   atomic.Bool
	stats    consumerStats
}

type consumerStats struct {
	messages, skipped, fenced, holes, resyncs, agreed, differed, broken prometheus.Counter
}

// track is where one source stands.
type track struct {
	source  event.Source
	fence   event.Fence
	epoch   event.Epoch
	started bool // next means something
	next    event.Seq

	moved     bool            // it stood in another stream: what lies between there and this one's first message is nowhere
	held      []*bus.Delivery // behind a hole, or waiting for a checkpoint
	heldBytes int
	heldSince time.Time
	resync    bool // nothing is applied before a checkpoint comes
	late      bool // the checkpoint is that of the start
}

// NewConsumer returns a consumer that feeds a sink. Nothing is read before Run runs. name is in the metrics.
func NewConsumer(cfg ConsumerConfig, b *bus.Bus, sink Sink, name string, log *slog.Logger, reg prometheus.Registerer) *Consumer {
	counter := func(metric, help string) prometheus.Counter {
		c := prometheus.NewCounter(prometheus.CounterOpts{
			Name: "kvstrata_subscriber_consumer_" + metric + "_total", Help: help, ConstLabels: prometheus.Labels{"consumer": name},
		})
		if reg != nil {
			reg.MustRegister(c)
		}
		return c
	}
	cfg.Restores = max(1, cfg.Restores)
	return &Consumer{
		cfg: cfg, bus: b, sink: sink, log: log.With("consumer", name), sources: make(map[event.Source]*track),
		stats: consumerStats{
			messages: counter("messages", "Messages of the event stream that were read."),
			skipped:  counter("skipped_messages", "Messages at or below their source's watermark."),
			fenced:   counter("fenced_messages", "Messages of a holder that lost its source."),
			holes:    counter("holes", "Holes in a source's sequence."),
			resyncs:  counter("resyncs", "Sources made anew from a checkpoint while running."),
			agreed:   counter("digests_agreed", "Digests of the stream that were the consumer's own."),
			differed: counter("digests_differed", "Digests of the stream that were not the consumer's own."),
			broken:   counter("broken_messages", "Messages that could not be decoded."),
		},
	}
}

// CaughtUp reports whether everything that the stream held at the start has been applied, and every checkpoint of then loaded.
func (c *Consumer) CaughtUp() bool { return c.caught.Load() }

// Run feeds the sink until ctx ends. It begins from checkpoints, and again so when the stream was lost.
func (c *Consumer) Run(ctx context.Context) error {
	defer c.caught.Store(false)
	for {
		err := c.session(ctx)
		switch {
		case ctx.Err() != nil:
			return nil
		case errors.Is(err, bus.ErrStreamChanged):
			c.log.Warn("beginning from checkpoints", "err", err)
		default:
			c.log.Warn("consuming was interrupted; beginning from checkpoints", "err", err)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(500 * time.Millisecond):
		}
	}
}

func (c *Consumer) session(ctx context.Context) error {
	c.caught.Store(false)
	c.restores = newRestorer(c)
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return c.restores.run(ctx) })
	group.Go(func() error {
		reader, end, err := c.open(ctx)
		if err != nil {
			return err
		}
		deliveries := make(chan *bus.Delivery, 64)
		group.Go(func() error {
			defer close(deliveries)
			defer reader.Close()
			return deliver(ctx, reader, deliveries)
		})
		return c.feed(ctx, deliveries, end)
	})
	return group.Wait()
}

// open sets every source's watermarks, and returns a reader of the stream behind them and where the stream ends now.
func (c *Consumer) open(ctx context.Context) (*bus.Reader, uint64, error) {
	from, stream, err := c.start(ctx)
	if err != nil {
		return nil, 0, err
	}
	end, err := c.bus.Position(ctx)
	if err != nil {
		return nil, 0, err
	}
	reader, err := c.bus.Read(ctx, from)
	if err != nil {
		return nil, 0, err
	}
	c.at = reader.Identity()
	c.at.Sequence = from - 1 // what was handed over, not what there is
	c.from, c.read = from, from-1
	if !c.at.SameStream(stream) {
		reader.Close()
		return nil, 0, bus.ErrStreamChanged
	}
	return reader, end.Sequence, nil
}

// deliver hands on what a reader gets until ctx ends.
func deliver(ctx context.Context, reader *bus.Reader, deliveries chan<- *bus.Delivery) error {
	for {
		d, err := reader.Next(ctx)
		if err != nil {
			return err
		}
		select {
		case deliveries <- d:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// feed applies what comes, and looks after sources that wait.
func (c *Consumer) feed(ctx context.Context, deliveries <-chan *bus.Delivery, end uint64) error {
	tick := time.NewTicker(250 * time.Millisecond)
	defer tick.Stop()
	for {
		if c.read >= end && c.late == 0 {
			c.caught.Store(true)
		}
		select {
		case d, ok := <-deliveries:
			if !ok {
				return ctx.Err()
			}
			c.stats.messages.Inc()
			c.take(ctx, d)
			if ctx.Err() != nil {
				return ctx.Err() // what was handed over may not have been taken
			}
			c.read = d.Sequence
			c.reached(d)
			if err := d.Ack(); err != nil {
				return fmt.Errorf("acknowledge message %d: %w", d.Sequence, err)
			}
		case r := <-c.restores.done:
			c.restored(ctx, r)
		case now := <-tick.C:
			c.lookAfter(now)
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// reached tells a sink that remembers how far the stream was handed over: up to the first message that is held back.
func (c *Consumer) reached(d *bus.Delivery) {
	r, ok := c.sink.(Rememberer)
	if !ok {
		return
	}
	c.at.Sequence = max(c.at.Sequence, d.Sequence)
	at := c.at
	for _, t := range c.sources {
		for _, held := range t.held {
			at.Sequence = min(at.Sequence, held.Sequence-1)
		}
	}
	r.Reached(at)
}

func (c *Consumer) track(source event.Source) *track {
	t := c.sources[source]
	if t == nil {
		t = &track{source: source}
		c.sources[source] = t
	}
	return t
}

// stand sets the watermarks to a checkpoint's.
func (t *track) stand(cp *event.Checkpoint) {
	t.fence, t.epoch = max(t.fence, cp.Fence), cp.Epoch
	t.started, t.next = cp.Ledger.Started, 0
	if t.started {
		t.next = cp.Seq + 1
	}
}

// take handles one message.
func (c *Consumer) take(ctx context.Context, d *bus.Delivery) {
	if !c.cfg.wants(d.Source) {
		return
	}
	t := c.track(d.Source)
	switch d.Kind {
	case bus.Status:
		c.tell(t, d)
	case bus.Events:
		c.events(ctx, t, d)
	}
}

func (c *Consumer) tell(t *track, d *bus.Delivery) {
	st, err := event.UnmarshalStatus(d.Data, d.Source)
	if err != nil {
		c.stats.broken.Inc()
		c.log.Warn("status can't be decoded; skipped", "source", d.Source, "err", err)
		return
	}
	if st.Fence < t.fence {
		c.stats.fenced.Inc()
		return
	}
	t.fence = st.Fence
	c.sink.Tell(&st)
}

func (c *Consumer) events(ctx context.Context, t *track, d *bus.Delivery) {
	h := &d.Head
	switch {
	case h.Fence < t.fence || h.Epoch < t.epoch:
		c.stats.fenced.Inc()
		return
	case h.Epoch == t.epoch && t.started && h.Last < t.next:
		c.stats.skipped.Inc()
		return
	}
	t.fence = h.Fence
	if c.cut && t.epoch == 0 {
		c.startResync(t, "the stream may no longer hold the beginning of its life")
	}
	newLife := h.Epoch > t.epoch
	if t.moved && !newLife && t.started && h.First > t.next {
		c.startResync(t, fmt.Sprintf("sequence %d was lost with the stream", t.next))
	}
	t.moved = false
	switch {
	case newLife && !t.resync:
		t.epoch, t.started, t.held, t.heldBytes = h.Epoch, false, nil, 0
	case t.resync || t.started && h.First > t.next:
		c.hold(t, d)
		return
	}
	c.apply(ctx, t, d)
	c.release(ctx, t)
}

// apply hands the sink the batches of a message that it does not have yet.
func (c *Consumer) apply(ctx context.Context, t *track, d *bus.Delivery) {
	batches, err := c.decoder.Decode(d.Data)
	if err == nil && len(batches) == 0 {
		return
	}
	if err == nil && (batches[0].First != d.Head.First || batches[len(batches)-1].Last != d.Head.Last) {
		err = errors.New("the headers tell another range than the payload")
	}
	if err != nil {
		c.stats.broken.Inc()
		c.startResync(t, fmt.Sprintf("message %d can't be decoded: %v", d.Sequence, err))
		return
	}
	for t.started && len(batches) > 0 && batches[0].Last < t.next {
		batches = batches[1:]
	}
	m := &event.Message{
		Source: t.source, Epoch: d.Head.Epoch, Fence: d.Head.Fence, Batches: batches,
		Digest: d.Head.Digest, HasDigest: d.Head.HasDigest, Stored: d.Stored,
		Position: event.Position{Stream: c.at.Stream, Created: c.at.Created, Sequence: d.Sequence},
	}
	if i := slices.IndexFunc(batches, func(b event.Batch) bool { return b.Way == event.Dropped }); i >= 0 {
		c.applyDropped(ctx, t, d, m, i)
		return
	}
	digest, err := c.sink.Apply(ctx, m)
	if ctx.Err() != nil {
		return
	}
	if err != nil {
		c.startResync(t, err.Error())
		return
	}
	t.started, t.next = true, d.Head.Last+1
	if !d.Head.HasDigest {
		return
	}
	agreed := digest == d.Head.Digest
	c.sink.Compared(t.source, agreed)
	if agreed {
		c.stats.agreed.Inc()
		return
	}
	c.stats.differed.Inc()
	c.startResync(t, fmt.Sprintf("digest after sequence %d is %x here and %x in the stream", d.Head.Last, digest, d.Head.Digest))
}

// applyDropped applies what stands before a range that its publisher had no room for; a checkpoint follows that.
func (c *Consumer) applyDropped(ctx context.Context, t *track, d *bus.Delivery, m *event.Message, i int) {
	dropped := m.Batches[i : i+1]
	if i > 0 {
		m.Batches, m.HasDigest = m.Batches[:i], false
		if _, err := c.sink.Apply(ctx, m); ctx.Err() != nil {
			return
		} else if err == nil {
			t.started, t.next = true, m.Batches[i-1].Last+1
		}
	}
	m.Batches = dropped
	if r, ok := c.sink.(Rememberer); ok {
		r.Dropped(m)
	}
	c.startResync(t, dropped[0].Reason)
	c.hold(t, d)
}

// hold keeps a message that can't be applied yet.
func (c *Consumer) hold(t *track, d *bus.Delivery) {
	if len(t.held) == 0 {
		t.heldSince = time.Now()
		if !t.resync {
			c.stats.holes.Inc()
		}
	}
	t.held = append(t.held, d)
	t.heldBytes += len(d.Data)
	if t.heldBytes > c.cfg.MaxHeld {
		// A checkpoint further on will be asked for: the newest ones suffice.
		c.startResync(t, "held back more than the bound")
		for t.heldBytes > c.cfg.MaxHeld/2 {
			t.heldBytes -= len(t.held[0].Data)
			t.held = t.held[1:]
		}
	}
}

// release applies held messages that are no longer behind a hole.
func (c *Consumer) release(ctx context.Context, t *track) {
	for len(t.held) > 0 && !t.resync {
		d := t.held[0]
		if d.Head.Epoch == t.epoch && t.started && d.Head.First > t.next {
			return
		}
		t.held, t.heldBytes = t.held[1:], t.heldBytes-len(d.Data)
		if d.Head.Epoch < t.epoch || d.Head.Epoch == t.epoch && t.started && d.Head.Last < t.next {
			continue
		}
		if d.Head.Epoch > t.epoch {
			t.epoch, t.started = d.Head.Epoch, false
		}
		c.apply(ctx, t, d)
	}
}

// startResync stops applying a source's batches until a checkpoint comes.
func (c *Consumer) startResync(t *track, reason string) {
	if t.resync {
		return
	}
	c.log.Warn("source is resynced from a checkpoint", "source", t.source.String(), "reason", reason)
	t.resync = true
	c.restores.resync(t.source)
}

// lookAfter resyncs sources whose hole did not close in time.
func (c *Consumer) lookAfter(now time.Time) {
	for _, t := range c.sources {
		if !t.resync && len(t.held) > 0 && now.Sub(t.heldSince) > c.cfg.HoldFor {
			c.startResync(t, fmt.Sprintf("sequence %d did not come within %v", t.next, c.cfg.HoldFor))
		}
	}
}
