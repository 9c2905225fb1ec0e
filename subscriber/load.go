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

// past is what is known of a source, and the stream sequence behind it.
type past struct {
	recovery.Past
	from uint64
}

// load makes the set what it was when the source was last judged. First it publishes a status under the new fence and
// reads the stream up to it: whatever an earlier holder got in before is known then, and whatever comes later is
// dropped by every consumer.
func (e *engine) load(ctx context.Context) (*recovery.Prior, error) {
	judge := e.sub.cfg.Judge
	judge.Hasher, judge.AsSet = event.NewHasher(e.sub.cfg.HashKey), e.cfg.AsSet
	e.set = resident.New(judge)
	e.ledger = event.Ledger{}

	p, err := e.loadCheckpoint(ctx)
	if err != nil {
		return nil, err
	}
	mark := &event.Status{
		Epoch: p.Epoch, Seq: p.Ledger.Last,
		Time: event.UnixTime(time.Now()), Digest: e.set.Digest(), Ledger: p.Ledger.Clone(), Dialect: e.decoder.Dialect().Told(), Endpoint: e.cfg.Endpoint,
		PastLives: p.Lives,
	}
	mark.State, mark.Reason = e.trust(event.StateRecovering, "taken over by a subscriber")
	if err := e.stream.Status(mark); err != nil {
		return nil, err
	}
	end, err := e.stream.Settle(ctx)
	if err != nil {
		return nil, err
	}
	highest := max(e.epoch, p.Epoch)
	err = e.readTail(ctx, &p, end.Sequence)
	if errors.Is(err, recovery.ErrHole) || errors.Is(err, bus.ErrStreamChanged) || isInvariant(err) {
		e.log.Warn("the source's past can't be read; it begins anew", "err", err)
		e.set.Reset()
		lives := p.Ended()
		p = e.newPast(nil, 0)
		p.Lives = lives
	} else if err != nil {
		return nil, err
	}
	told := e.epoch // of an epoch that is cut off
	e.ledger, e.lives = p.Ledger, p.Lives
	if e.epoch = p.Epoch; p.Epoch == 0 {
		e.epoch = max(highest+1, told+1, event.Epoch(time.Now().UnixMilli()))
	}
	return p.Prior(), nil
}

func (e *engine) newPast(cp *event.Checkpoint, from uint64) past {
	return past{Past: recovery.NewPast(e.recovery().First, cp), from: from}
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
		if cp.Reason == noEvictions { // that it can't be trusted is said over what is known of it
			cp.State, cp.Reason = event.StateLive, ""
		}
		p := e.newPast(cp, 1)
		if cp.Position.SameStream(now) {
			p.from = cp.Position.Sequence + 1
		}
		return p, nil
	}
	e.set.Reset()
	return e.newPast(nil, 1), nil
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
		case d.Kind == bus.Events && p.isCutOff(&d.Head, e.recovery().First):
			e.epoch, err = max(e.epoch, d.Head.Epoch), recovery.ErrHole
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
func (p *past) isCutOff(h *bus.Head, first event.Seq) bool {
	return p.from == 1 && h.Fence >= p.Fence && h.Epoch > p.Epoch && h.First > first
}

// follow applies one message of the tail.
func (e *engine) follow(p *past, d *bus.Delivery, dec *event.Decoder) error {
	if !p.Admit(d.Head.Fence, d.Head.Epoch) {
		return nil
	}
	batches, err := dec.Decode(d.Data)
	if err != nil {
		return err
	}
	return p.Follow(e.set, d.Head.Fence, d.Head.Epoch, batches)
}

// hear takes a status of the tail.
func (p *past) hear(d *bus.Delivery) error {
	st, err := event.UnmarshalStatus(d.Data, d.Source)
	if err != nil {
		return err
	}
	p.Hear(&st)
	return nil
}
