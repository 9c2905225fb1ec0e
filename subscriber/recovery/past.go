package recovery

import (
	"errors"

	"kvstrata/event"
	"kvstrata/event/resident"
)

// ErrHole says that the stream no longer holds everything behind the checkpoint.
var ErrHole = errors.New("the stream has a hole behind the checkpoint")

// Past is what a checkpoint, and the stream behind it, say of a source: what a subscriber that starts goes on from. The set
// that belongs to it is followed beside it.
type Past struct {
	Epoch   event.Epoch
	Fence   event.Fence
	Ledger  event.Ledger
	Recents []event.Recent
	State   event.State // live or partial, once the ledger has started
	Reason  string
	Lives   []event.PastLife // that ended before

	first event.Seq
}

// NewPast returns the past that a checkpoint tells, nil for none, of a source whose lives begin at sequence first.
func NewPast(first event.Seq, cp *event.Checkpoint) Past {
	if cp == nil {
		return Past{first: first}
	}
	return Past{
		Epoch: cp.Epoch, Fence: cp.Fence, Ledger: cp.Ledger.Clone(), Recents: cp.Recents, State: cp.State, Reason: cp.Reason, Lives: cp.PastLives,
		first: first,
	}
}

// Prior returns what the machine must know of it; nil when no batch of the life is known.
func (p *Past) Prior() *Prior {
	if !p.Ledger.Started {
		return nil
	}
	return &Prior{Started: true, Last: p.Ledger.Last, Recents: p.Recents, State: p.State, Reason: p.Reason}
}

// Admit reports whether a message counts: it was not sent by who was no longer the holder, nor in a life before. A holder rules
// from its first message on, whatever life that is of.
func (p *Past) Admit(fence event.Fence, epoch event.Epoch) bool {
	if fence < p.Fence {
		return false
	}
	p.Fence = fence
	return epoch >= p.Epoch
}

// Follow applies one message of the stream to the past and its set. Batches that are known are passed over.
func (p *Past) Follow(set *resident.Set, fence event.Fence, epoch event.Epoch, batches []event.Batch) error {
	if !p.Admit(fence, epoch) {
		return nil
	}
	if epoch > p.Epoch {
		set.Reset()
		*p = Past{Epoch: epoch, Fence: fence, Lives: p.Ended(), first: p.first}
	}
	for i := range batches {
		b := &batches[i]
		if b.Way == event.Dropped { // counted when it was received; what it changed is not in the stream
			return ErrHole
		}
		if p.Ledger.Started && b.Last <= p.Ledger.Last {
			continue
		}
		if p.Ledger.Started && b.First != p.Ledger.Last+1 {
			return ErrHole
		}
		if err := set.Apply(b); err != nil {
			return err
		}
		p.count(b)
	}
	return nil
}

// Ended returns the lives that have ended once another begins.
func (p *Past) Ended() []event.PastLife {
	return event.Bury(p.Lives, event.PastLife{Epoch: p.Epoch, Ledger: p.Ledger.Clone(), TailUnknown: true})
}

// count enters a batch.
func (p *Past) count(b *event.Batch) {
	s := standingOf(p.State, p.Reason)
	if !p.Ledger.Started {
		p.Recents = nil
		s = beginning(b.First, p.first)
	}
	p.Ledger.Count(b)
	if b.Way == event.Lost {
		s.missing = hole(b.First, b.Last, b.Reason)
	} else {
		for i := range b.Events {
			if b.Events[i].Kind == event.Cleared {
				s.missing = "" // whose life it is that was cleared is as unproved as before
			}
		}
		p.Recents = remember(p.Recents, event.Recent{Seq: b.First, Time: b.Time, Payload: b.Payload}, s.unproved, 0)
	}
	p.State, p.Reason = s.tell()
}

// Hear takes a status: it says what the batches can't.
func (p *Past) Hear(st *event.Status) {
	if !p.Admit(st.Fence, st.Epoch) {
		return
	}
	if st.Epoch > p.Epoch || st.Ledger.Started != p.Ledger.Started || st.Seq != p.Ledger.Last {
		return // of a life, or a place in it, that is not reached
	}
	if len(st.PastLives) > 0 {
		p.Lives = st.PastLives // of those whose batches stand before the checkpoint too
	}
	p.Ledger.Duplicates, p.Ledger.Malformed = st.Ledger.Duplicates, st.Ledger.Malformed
	p.Ledger.Dropped = st.Ledger.Dropped
	if p.Ledger.Started && (st.State == event.StateLive || st.State == event.StatePartial) {
		p.State, p.Reason = st.State, st.Reason
	}
}
