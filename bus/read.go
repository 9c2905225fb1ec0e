package bus

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"kvstrata/event"
)

// ErrStreamChanged says that the stream was lost and made anew: positions in the old one mean nothing.
var ErrStreamChanged = errors.New("the stream was made anew")

// Delivery is one message of a stream.
type Delivery struct {
	Kind     Kind
	Source   event.Source
	Head     Head // of Events
	Data     []byte
	Sequence uint64     // in the stream
	Stored   event.Time // when the stream took it, by the server's clock

	msg jetstream.Msg
}

// Records reads the records of a message of kind transfer, lookup or gpu.
func (d *Delivery) Records() (r event.Records, err error) {
	switch d.Kind {
	case Transfer:
		r.Transfers, err = event.UnmarshalTransfers(d.Data, d.Source)
	case Lookup:
		r.Lookups, r.Requests, err = event.UnmarshalLookups(d.Data, d.Source)
	case GPU:
		r.Samples, err = event.UnmarshalSamples(d.Data, d.Source)
	default:
		err = fmt.Errorf("a message of kind %s: want %s, %s or %s", d.Kind, Transfer, Lookup, GPU)
	}
	return r, err
}

// Ack acknowledges this delivery and all before it.
func (d *Delivery) Ack() error { return d.msg.Ack() }

// Reader reads a stream in order, from a sequence on. It makes its consumer anew when NATS lost it, and goes on
// behind the last message delivered. One goroutine uses it.
type Reader struct {
	bus      *Bus
	subjects []string
	identity event.Position
	next     uint64
	messages jetstream.MessagesContext
}

// maxAckPending is how many messages may be delivered and not yet acknowledged: what a slow reader holds in memory.
const maxAckPending = 1024

// Read returns a reader of the event stream's messages from a sequence on, of some sources or, with none given, of all. The
// caller closes it.
func (b *Bus) Read(ctx context.Context, from uint64, sources ...event.Source) (*Reader, error) {
	identity, err := b.Position(ctx)
	if err != nil {
		return nil, err
	}
	r := &Reader{bus: b, identity: identity, next: max(from, 1)}
	for _, s := range sources {
		r.subjects = append(r.subjects, Subject(Events, s), Subject(Status, s))
	}
	return r, nil
}

// ReadRecords returns a reader of all records behind a position; behind one in another stream they are all of this
// one's. The caller closes it.
func (b *Bus) ReadRecords(ctx context.Context, behind event.Position) (*Reader, error) {
	identity, err := b.position(ctx, RecordStream)
	if err != nil {
		return nil, err
	}
	r := &Reader{bus: b, identity: identity, next: 1}
	if behind.SameStream(identity) {
		r.next = behind.Sequence + 1
	}
	return r, nil
}

// ReadTold returns a reader of what a model's connectors tell, from a stream sequence on, and of one source's statuses. The
// caller closes it.
func (b *Bus) ReadTold(ctx context.Context, from uint64, source event.Source) (*Reader, error) {
	r, err := b.Read(ctx, from)
	if err != nil {
		return nil, err
	}
	r.subjects = []string{allConnectors(source.Cluster, source.Model), Subject(Status, source)}
	return r, nil
}

// Identity returns the stream that is read, and where it ended when the reading began.
func (r *Reader) Identity() event.Position { return r.identity }

// Next returns the next message; it waits for one until ctx ends. Messages that are not ours are skipped and logged.
func (r *Reader) Next(ctx context.Context) (*Delivery, error) {
	for {
		if r.messages == nil {
			if err := r.open(ctx); err != nil {
				return nil, err
			}
		}
		msg, err := r.messages.Next(jetstream.NextContext(ctx))
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		if err != nil {
			r.bus.log.Warn("reading a stream was interrupted; going on", "stream", r.identity.Stream, "from_sequence", r.next, "err", err)
			r.Close()
			continue
		}
		d, err := r.delivery(msg)
		if err != nil {
			r.bus.log.Warn("a message of a stream can't be read; skipped", "stream", r.identity.Stream, "subject", msg.Subject(), "err", err)
			continue
		}
		return d, nil
	}
}

func (r *Reader) delivery(msg jetstream.Msg) (*Delivery, error) {
	meta, err := msg.Metadata()
	if err != nil {
		return nil, err
	}
	r.next = max(r.next, meta.Sequence.Stream+1) // a redelivery does not go back
	kind, source, err := ParseSubject(msg.Subject())
	if err != nil {
		return nil, err
	}
	d := &Delivery{Kind: kind, Source: source, Data: msg.Data(), Sequence: meta.Sequence.Stream, Stored: event.UnixTime(meta.Timestamp), msg: msg}
	if kind == Events {
		if d.Head, err = ParseHead(msg.Headers()); err != nil {
			return nil, err
		}
	}
	return d, nil
}

// open makes the consumer. It tries until ctx ends: NATS may be restarting.
func (r *Reader) open(ctx context.Context) error {
	for {
		err := r.tryOpen(ctx)
		if err == nil || errors.Is(err, ErrStreamChanged) {
			return err
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		r.bus.log.Warn("a stream can't be read; trying again", "stream", r.identity.Stream, "err", err)
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(500 * time.Millisecond):
		}
	}
}

func (r *Reader) tryOpen(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	now, err := r.bus.position(ctx, r.identity.Stream)
	if err != nil {
		return err
	}
	if !now.SameStream(r.identity) {
		return ErrStreamChanged
	}
	consumer, err := r.bus.js.CreateConsumer(ctx, r.identity.Stream, jetstream.ConsumerConfig{
		DeliverPolicy: jetstream.DeliverByStartSequencePolicy, OptStartSeq: r.next, AckPolicy: jetstream.AckAllPolicy,
		AckWait: time.Minute, MaxAckPending: maxAckPending, InactiveThreshold: 30 * time.Second, MemoryStorage: true,
		Replicas: 1, FilterSubjects: r.subjects,
	})
	if err != nil {
		return fmt.Errorf("make consumer from %d: %w", r.next, err)
	}
	r.messages, err = consumer.Messages(jetstream.PullMaxMessages(maxAckPending/2), jetstream.PullHeartbeat(time.Second),
		jetstream.PullExpiry(10*time.Second))
	if err != nil {
		return fmt.Errorf("read from %d: %w", r.next, err)
	}
	return nil
}

// Close ends the reading.
func (r *Reader) Close() {
	if r.messages != nil {
		r.messages.Stop()
		r.messages = nil
	}
}
