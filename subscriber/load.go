package subscriber

import (
	"context"
	"errors"
	"fmt"
	"time"

	"kvstrata/bus"
	"kvstrata/event"
	"kvstrata/event/resident"
	"kvstrata/subscriber/recovery"
)

// past is what a checkpoint and the stream's tail say of a source.
type past struct {
	epoch   event.Epoch
	fence   event.Fence
	ledger  event.Ledger
	recents []event.Recent
	state   event.State // live or partial
	reason  string
	from    uint64 // stream sequence behind what is known
}

// errHole says that the stream no longer holds everything behind the checkpoint.
var errHole = errors.New("the stream has a hole behind the checkpoint")

// load makes the set what it was when the source was last judged. First it publishes a status under the new fence and
// reads the stream up to it: whatever an earlier holder got in before is known then, and whatever comes later is
// dropped by every consumer.
func (e *engine) load(ctx context.Context) (*recovery.Prior, error) {
	judge := e.sub.cfg.Judge
	judge.Hasher, judge.AsSet = event.NewHasher(e.sub.cfg.HashKey), e.cfg.AsSet
	e.set = resident.New(judge, nil)
	e.ledger = event.Ledger{}

	p, err := e.loadCheckpoint(ctx)
	if err != nil {
		return nil, err
	}
	mark := &event.Status{
		Epoch: p.epoch, Seq: p.ledger.Last,
		Time: event.UnixTime(time.Now()), Digest: e.set.Digest(), Ledger: p.ledger.Clone(), Dialect: e.decoder.Dialect().Told(), Endpoint: e.cfg.Endpoint,
	}
	mark.State, mark.Reason = e.trust(event.StateRecovering, "taken over by a subscriber")
	if err := e.stream.Status(mark); err != nil {
		return nil, err
	}
	end, err := e.stream.Settle(ctx)
	if err != nil {
		return nil, err
	}
	err = e.readTail(ctx, &p, end.Sequence)
	if errors.Is(err, errHole) || errors.Is(err, bus.ErrStreamChanged) || isInvariant(err) {
		e.log.Warn("the source's past can't be read; it begins anew", "err", err)
		e.set.Reset()
		p = past{}
		e.epoch = max(e.epoch, mark.Epoch)
	} else if err != nil {
		return nil, err
	}
	e.ledger = p.ledger
	if p.epoch == 0 {
		e.epoch = max(e.epoch+1, event.Epoch(time.Now().UnixMilli()))
		return nil, nil
	}
	e.epoch = p.epoch
	if !p.ledger.Started {
		return nil, nil
	}
	return &recovery.Prior{
		Started: true, Last: p.ledger.Last, Recents: p.recents, State: p.state, Reason: p.reason,
	}, nil
}

func isInvariant(err error) bool {
	var broken *resident.InvariantError
	return errors.As(err, &broken)
}

// loadCheckpoint loads the newest checkpoint that can be read; none is no error.
func (e *engine) loadCheckpoint(ctx context.Context) (past, error) {
	names, err := e.sub.bus.Checkpoints(ctx)
	if err != nil {
		return past{}, err
	}
	now, err := e.sub.bus.Position(ctx)
	if err != nil {
		return past{}, err
	}
	for _, name := range names[e.cfg.Source] {
		cp, err := e.sub.bus.LoadCheckpoint(ctx, name, e.set.Load)
		if err != nil {
			e.log.Warn("checkpoint can't be loaded; trying the one before", "checkpoint", name, "err", err)
			continue
		}
		p := past{
			epoch: cp.Epoch, fence: cp.Fence, ledger: cp.Ledger, recents: cp.Recents, state: cp.State, reason: cp.Reason, from: 1,
		}
		if cp.Position.SameStream(now) {
			p.from = cp.Position.Sequence + 1
		}
		return p, nil
	}
	e.set.Reset()
	return past{from: 1}, nil
}

// readTail applies what the stream holds of the source behind the checkpoint, up to a stream sequence.
func (e *engine) readTail(ctx context.Context, p *past, end uint64) error {
	reader, err := e.sub.bus.Read(ctx, p.from, e.cfg.Source)
	if err != nil {
		return err
	}
	defer reader.Close()
	var dec event.Decoder
	for {
		d, err := reader.Next(ctx)
		if err != nil {
			return err
		}
		if d.Sequence >= end {
			return nil
		}
		switch {
		case d.Kind == bus.Events && p.isCutOff(&d.Head):
			e.epoch, err = max(e.epoch, d.Head.Epoch), errHole
		case d.Kind == bus.Events:
			err = e.follow(p, d, &dec)
		case d.Kind == bus.Status:
			err = p.hear(d)
		}
		if err != nil {
			return fmt.Errorf("message %d: %w", d.Sequence, err)
		}
		if err := d.Ack(); err != nil {
			return fmt.Errorf("acknowledge message %d: %w", d.Sequence, err)
		}
	}
}

// isCutOff reports whether a message of the tail begins an epoch in its middle, where no checkpoint of this stream says that it
// began there: what came before may have been in a stream that NATS lost.
func (p *past) isCutOff(h *bus.Head) bool {
	return p.from == 1 && h.Fence >= p.fence && h.Epoch > p.epoch && h.First > 0
}

// follow applies one message of the tail.
func (e *engine) follow(p *past, d *bus.Delivery, dec *event.Decoder) error {
	if d.Head.Fence < p.fence || d.Head.Epoch < p.epoch {
		return nil
	}
	p.fence = d.Head.Fence
	if d.Head.Epoch > p.epoch {
		e.set.Reset()
		*p = past{epoch: d.Head.Epoch, fence: d.Head.Fence, from: p.from}
	}
	batches, err := dec.Decode(d.Data)
	if err != nil {
		return err
	}
	for i := range batches {
		b := &batches[i]
		if b.Way == event.Dropped { // counted when it was received; what it changed is not in the stream
			return errHole
		}
		if p.ledger.Started && b.Last <= p.ledger.Last {
			continue
		}
		if p.ledger.Started && b.First != p.ledger.Last+1 {
			return errHole
		}
		if err := e.set.Apply(b); err != nil {
			return err
		}
		p.count(b)
	}
	return nil
}

// count enters a batch of the tail.
func (p *past) count(b *event.Batch) {
	if !p.ledger.Started {
		p.state, p.reason = recovery.Beginning(b.First)
	}
	p.ledger.Count(b)
	if b.Way == event.Lost {
		p.state, p.reason = event.StatePartial, fmt.Sprintf("lost %d to %d: %s", b.First, b.Last, b.Reason)
		return
	}
	for i := range b.Events {
		if b.Events[i].Kind == event.Cleared {
			p.state, p.reason = event.StateLive, ""
		}
	}
	if len(p.recents) >= event.MaxRecents {
		p.recents = append(p.recents[:0], p.recents[len(p.recents)-event.MaxRecents+1:]...)
	}
	p.recents = append(p.recents, event.Recent{Seq: b.First, Time: b.Time, Payload: b.Payload})
}

// hear takes a status of the tail: it counts what the batches can't tell.
func (p *past) hear(d *bus.Delivery) error {
	st, err := event.UnmarshalStatus(d.Data, d.Source)
	if err != nil {
		return err
	}
	if st.Fence < p.fence || st.Epoch < p.epoch {
		return nil
	}
	p.fence = st.Fence
	if st.Epoch == p.epoch {
		p.ledger.Duplicates, p.ledger.Malformed = st.Ledger.Duplicates, st.Ledger.Malformed
		p.ledger.Dropped = st.Ledger.Dropped
	}
	return nil
}
