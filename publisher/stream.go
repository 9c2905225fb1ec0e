package publisher

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"golang.org/x/sync/errgroup"

	"kvstrata/bus"
	"kvstrata/event"
)

// StreamConfig bounds one source's road onto the bus.
type StreamConfig struct {
	// FlushBytes and FlushEvery close a message, whichever comes first.
	FlushBytes int
	FlushEvery time.Duration
	// MaxPending bounds the bytes of messages not yet acknowledged. A publish that finds them full waits up to MaxWait,
	// and then drops its batch.
	MaxPending int
	MaxWait    time.Duration
	// CheckpointEvery is the longest time between checkpoints.
	CheckpointEvery time.Duration
}

// DefaultStreamConfig returns the bounds of an engine's stream.
func DefaultStreamConfig() StreamConfig {
	return StreamConfig{
		FlushBytes: 64 << 10, FlushEvery: 5 * time.Millisecond, MaxPending: 64 << 20, MaxWait: 30 * time.Second,
		CheckpointEvery: time.Minute,
	}
}

// Stream is one source's road onto the bus: judged batches go in, messages of consecutive batches come out, in order,
// each sent again, with all after it, until JetStream has stored it. It also writes the source's checkpoints.
//
// Publish, Status, Settle and Checkpoint are for the goroutine that judges the source; Run is for another.
type Stream struct {
	cfg    StreamConfig
	bus    *bus.Bus
	source event.Source
	fence  event.Fence
	log    *slog.Logger

	opened  chan struct{} // a message was begun: its time runs
	sent    chan struct{} // a message awaits its acknowledgement
	request chan checkpointJob

	mu       sync.Mutex
	room     *sync.Cond // signalled when messages were acknowledged, and when Run ends
	enc      event.Encoder
	epoch    event.Epoch
	digest   event.Digest // after the last batch appended
	digestAt int64        // Unix second of the last digest sent
	pending  []*message   // sent, not yet acknowledged, in order
	bytes    int          // of pending
	newest   *message     // the last one sent, acknowledged or not
	identity event.Position
	dropped  event.Batch // the range being dropped, when inDrop
	inDrop   bool
	closed   bool
	position event.Position // of the newest acknowledged message

	written    *event.Checkpoint // the last one in the object store
	due        bool              // somebody asked for a checkpoint
	checkpoint time.Time         // when the last one was taken
	opsSince   uint64            // block operations since
	failures   uint64
	complained time.Time
	drops      event.Ledger // Dropped and Holes of this epoch, since the stream was opened
}

// message is one message on its way.
type message struct {
	msg      *nats.Msg
	future   jetstream.PubAckFuture
	stored   chan struct{} // closed when acknowledged; position is valid then
	position event.Position
}

// NewStream returns the road of a source that is published under a fence. Nothing is sent before Run runs.
func NewStream(cfg StreamConfig, b *bus.Bus, source event.Source, fence event.Fence, log *slog.Logger) *Stream {
	s := &Stream{
		cfg: cfg, bus: b, source: source, fence: fence, log: log.With("source", source.String()),
		opened: make(chan struct{}, 1), sent: make(chan struct{}, 1), request: make(chan checkpointJob, 1),
		checkpoint: time.Now(),
	}
	s.room = sync.NewCond(&s.mu)
	return s
}

// Publish appends a judged batch, whose sequence follows the last one's unless the epoch is new; digest is the resident
// set's after it. The batch may be reused. It waits while too much is unacknowledged, up to the configured time or the
// end of ctx, and then drops the batch: the stream will tell the range, and a checkpoint follows it.
func (s *Stream) Publish(ctx context.Context, epoch event.Epoch, b *event.Batch, digest event.Digest) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if epoch != s.epoch {
		s.flush()
		s.epoch, s.inDrop, s.drops = epoch, false, event.Ledger{}
	}
	if !s.awaitRoom(ctx) {
		s.drop(b)
		return
	}
	if s.inDrop {
		s.tellDrop()
	}
	s.digest = digest // of the message that the batch may close
	s.append(b)
	s.opsSince += uint64(b.Blocks())
}

func (s *Stream) append(b *event.Batch) {
	s.enc.Append(b)
	switch {
	case s.enc.Size() >= s.cfg.FlushBytes:
		s.flush()
	case s.enc.Batches() == 1:
		notify(s.opened)
	}
}

// awaitRoom waits until less than the bound is pending; false when the wait was in vain.
func (s *Stream) awaitRoom(ctx context.Context) bool {
	if s.bytes < s.cfg.MaxPending {
		return true
	}
	wait := s.cfg.MaxWait
	if s.inDrop {
		wait = 0 // it waited once; until there is room, batches are dropped at once
	}
	ctx, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	stop := context.AfterFunc(ctx, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.room.Broadcast()
	})
	defer stop()
	for s.bytes >= s.cfg.MaxPending && ctx.Err() == nil && !s.closed {
		s.room.Wait()
	}
	return s.bytes < s.cfg.MaxPending
}

func (s *Stream) drop(b *event.Batch) {
	if s.inDrop {
		s.dropped.Last = b.Last
		return
	}
	s.inDrop = true
	s.dropped = event.Batch{
		First: b.First, Last: b.Last, Way: event.Dropped, Rank: -1,
		Reason: fmt.Sprintf("NATS left %d bytes unacknowledged", s.bytes),
	}
	s.log.Warn("NATS takes no more; batches are dropped", "from_seq", b.First, "pending_bytes", s.bytes)
}

// tellDrop appends the range that was dropped; the checkpoint that consumers resync from follows. The caller holds mu.
func (s *Stream) tellDrop() {
	s.enc.Append(&s.dropped)
	s.drops.Count(&s.dropped)
	s.inDrop, s.due = false, true
}

// addDrops enters in a ledger what this stream dropped of its epoch. The caller holds mu.
func (s *Stream) addDrops(l *event.Ledger) {
	l.Dropped += s.drops.Dropped
	l.Holes = append(l.Holes, s.drops.Holes...)
	l.Holes = l.Holes[max(0, len(l.Holes)-event.MaxHoles):]
	if s.inDrop {
		l.Dropped += uint64(s.dropped.Last-s.dropped.First) + 1
	}
}

// flush sends the open message. The caller holds mu.
func (s *Stream) flush() {
	if s.enc.Batches() == 0 {
		return
	}
	first, last := s.enc.Range()
	head := bus.Head{Epoch: s.epoch, Fence: s.fence, First: first, Last: last, Blocks: s.enc.Blocks()}
	if second := time.Now().Unix(); second != s.digestAt {
		s.digestAt, head.HasDigest, head.Digest = second, true, s.digest
	}
	msg := &nats.Msg{Subject: bus.Subject(bus.Events, s.source), Header: head.Header(), Data: s.enc.Encode(nil)}
	msg.Header[jetstream.MsgIDHeader] = []string{fmt.Sprintf("%s.%d.%d.%d", s.source.Tokens(), s.fence, s.epoch, first)}
	if int64(len(msg.Data)) > s.bus.MaxPayload()-4096 {
		// The judge has it, the bus can't: consumers learn of it as of a drop.
		s.log.Error("a batch is larger than NATS takes; raise max_payload of the server",
			"bytes", len(msg.Data), "max_payload", s.bus.MaxPayload(), "first_seq", first, "last_seq", last)
		s.dropped = event.Batch{First: first, Last: last, Way: event.Dropped, Rank: -1, Reason: "larger than NATS takes"}
		s.tellDrop()
		s.flush()
		return
	}
	s.send(msg)
}

// send publishes a message and puts it in line for its acknowledgement. The caller holds mu.
func (s *Stream) send(msg *nats.Msg) *message {
	m := &message{msg: msg, stored: make(chan struct{})}
	s.transmit(m)
	s.pending = append(s.pending, m)
	s.bytes += len(msg.Data)
	s.newest = m
	notify(s.sent)
	return m
}

// transmit hands a message to NATS; one that can't be handed over has no future, and is tried again in its turn.
func (s *Stream) transmit(m *message) {
	future, err := s.bus.PublishAsync(m.msg)
	if err != nil {
		future = nil
	}
	m.future = future
}

// Status publishes a status message behind all batches published so far. While there is no room for batches, there is
// none for it: a later one will tell more.
func (s *Stream) Status(st *event.Status) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.flush()
	if s.bytes >= s.cfg.MaxPending {
		return nil
	}
	st.Source, st.Fence = s.source, s.fence
	s.addDrops(&st.Ledger)
	payload, err := event.MarshalStatus(st)
	if err != nil {
		return fmt.Errorf("encode status of %v: %w", s.source, err)
	}
	header := nats.Header{"Kv-Fence": {strconv.FormatUint(uint64(s.fence), 10)}}
	s.send(&nats.Msg{Subject: bus.Subject(bus.Status, s.source), Header: header, Data: payload})
	return nil
}

// Settle sends what is open and waits until all of it is stored; it returns where the last message lies.
func (s *Stream) Settle(ctx context.Context) (event.Position, error) {
	s.mu.Lock()
	s.flush()
	last := s.newest
	s.mu.Unlock()
	if last == nil {
		return event.Position{}, nil
	}
	select {
	case <-last.stored:
		return last.position, nil
	case <-ctx.Done():
		return event.Position{}, fmt.Errorf("await NATS for %v: %w", s.source, ctx.Err())
	}
}

// Run sends, resends and writes checkpoints until ctx ends; then it closes the open message and gives what is pending,
// the last checkpoint included, four seconds to be stored.
func (s *Stream) Run(ctx context.Context) error {
	// What is on its way at the end may still arrive.
	late, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	control, err := s.bus.HandleControl(s.source, s.handleControl)
	if err != nil {
		return err
	}
	defer func() { _ = control.Unsubscribe() }() // the connection may be gone already
	var group errgroup.Group
	group.Go(func() error { return s.flushInTime(ctx) })
	group.Go(func() error { return s.awaitAcks(late) })
	group.Go(func() error { return s.writeCheckpoints(late) })
	group.Go(func() error {
		<-ctx.Done()
		defer s.bus.Hurry()()
		grace, done := context.WithTimeout(late, 4*time.Second)
		defer done()
		_, err := s.Settle(grace)
		if err == nil {
			err = s.drainCheckpoints(grace)
		}
		cancel()
		s.mu.Lock()
		s.closed = true
		s.room.Broadcast()
		s.mu.Unlock()
		return err
	})
	return group.Wait()
}

func (s *Stream) handleControl(request string) string {
	if request != bus.CheckpointRequest {
		return "unknown request; known: " + bus.CheckpointRequest
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.due = true
	return "ok"
}

// flushInTime closes each message when its time has come.
func (s *Stream) flushInTime(ctx context.Context) error {
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-s.opened:
			timer.Reset(s.cfg.FlushEvery)
		case <-timer.C:
			s.mu.Lock()
			s.flush()
			s.mu.Unlock()
		}
	}
}

// awaitAcks takes messages off the line as they are acknowledged, in order. After a failure it sends that message and
// all after it again.
func (s *Stream) awaitAcks(ctx context.Context) error {
	for {
		s.mu.Lock()
		var head *message
		if len(s.pending) > 0 {
			head = s.pending[0]
		}
		s.mu.Unlock()
		if head == nil {
			select {
			case <-ctx.Done():
				return nil
			case <-s.sent:
			}
			continue
		}
		ack, err := await(ctx, head.future)
		switch {
		case ctx.Err() != nil:
			return nil
		case err != nil:
			if err := s.resend(ctx, err); err != nil {
				return nil
			}
		default:
			if err := s.acknowledge(ctx, head, ack); err != nil {
				return err
			}
		}
	}
}

var errNotSent = errors.New("not handed to NATS")

func await(ctx context.Context, future jetstream.PubAckFuture) (*jetstream.PubAck, error) {
	if future == nil {
		return nil, errNotSent
	}
	select {
	case ack := <-future.Ok():
		return ack, nil
	case err := <-future.Err():
		return nil, err
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// complainEvery is how often at most the log says that NATS stores nothing.
const complainEvery = 5 * time.Second

// resend waits a little and sends everything pending again, in order. It fails only at the end of ctx.
func (s *Stream) resend(ctx context.Context, cause error) error {
	s.mu.Lock()
	s.failures++
	n, now := len(s.pending), time.Now()
	silent := now.Sub(s.complained) < complainEvery
	if !silent {
		s.complained = now
	}
	s.mu.Unlock()
	if !silent {
		s.log.Warn("NATS did not store a message; sending again", "messages", n, "err", cause)
	}
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(250 * time.Millisecond):
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, m := range s.pending {
		s.transmit(m)
	}
	return nil
}

// acknowledge takes the head of the line off it. A stream sequence that went back means another stream: whoever starts
// from a checkpoint needs one that stands in it.
func (s *Stream) acknowledge(ctx context.Context, m *message, ack *jetstream.PubAck) error {
	s.mu.Lock()
	renew := s.identity.Stream == "" || ack.Sequence <= s.position.Sequence && !ack.Duplicate
	s.mu.Unlock()
	if renew {
		identity, err := s.bus.Position(ctx)
		if err != nil && ctx.Err() == nil {
			s.log.Warn("the stream's identity can't be read", "err", err)
		}
		s.mu.Lock()
		if s.identity.Stream != "" && !s.identity.SameStream(identity) {
			s.log.Warn("the event stream was made anew; a checkpoint follows")
			s.due = true
		}
		s.identity = identity
		s.mu.Unlock()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	m.position = event.Position{Stream: s.identity.Stream, Created: s.identity.Created, Sequence: ack.Sequence}
	s.position = m.position
	close(m.stored)
	s.pending[0] = nil
	s.pending = s.pending[1:]
	s.bytes -= len(m.msg.Data)
	m.msg = nil
	if s.inDrop && s.bytes < s.cfg.MaxPending { // told at once: perhaps no batch follows
		s.tellDrop()
		s.flush()
	}
	s.room.Broadcast()
	return nil
}

// Stats are counts of a stream's road.
type Stats struct {
	PendingBytes int
	Failures     uint64
	Dropped      uint64 // sequences
	Position     event.Position
}

// Stats returns the counts so far.
func (s *Stream) Stats() Stats {
	s.mu.Lock()
	defer s.mu.Unlock()
	var l event.Ledger
	s.addDrops(&l)
	return Stats{PendingBytes: s.bytes, Failures: s.failures, Dropped: l.Dropped, Position: s.position}
}

// notify sets a flag that somebody waits for.
func notify(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}
