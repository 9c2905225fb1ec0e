package resident

import (
	"fmt"

	"kvstrata/event"
)

// InvariantError says that a judged batch cannot be applied to this set: the two have come apart.
type InvariantError struct {
	Seq    event.Seq
	Hash   event.BlockHash
	Reason string
}

func (e *InvariantError) Error() string {
	return fmt.Sprintf("apply batch %d, block %v: %s", e.Seq, e.Hash, e.Reason)
}

// Apply follows a batch that its publisher judged: effects are added, names entered. It returns an *InvariantError,
// and leaves the set as far as it came, where the batch does not fit; the caller then resyncs from a checkpoint.
func (s *Set) Apply(b *event.Batch) error {
	for i := range b.Events {
		ev := &b.Events[i]
		var err error
		switch ev.Kind {
		case event.Stored:
			err = s.applyStored(b, ev)
		case event.Evicted:
			err = s.applyEvicted(b, ev)
		case event.Cleared:
			s.Clear()
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (s *Set) applyStored(b *event.Batch, ev *event.Event) error {
	s.noteGroup(ev)
	tier, ok := s.addTier(ev.Tier)
	for i := range ev.Blocks {
		bl := &ev.Blocks[i]
		at, found := s.index.get(key{bl.Hash, ev.Group.Index()})
		if !found {
			// A name without a block is worth keeping only to who will judge.
			if bl.Effect <= 0 && s.cfg.MaxNames == 0 {
				continue
			}
			at = s.record(bl.Hash, ev.Group)
		}
		s.follow(ev, i, at)
		if bl.Effect > 0 {
			if !ok {
				return &InvariantError{b.First, bl.Hash, "more tiers than a source may have"}
			}
			s.rise(at, tier, b.Time)
		} else if !found {
			s.retire(at)
		}
	}
	return nil
}

// follow enters what a judged run tells of the name of its block i.
func (s *Set) follow(ev *event.Event, i int, at int32) {
	prefix := ev.Blocks[i].Prefix
	r := s.slab.at(at)
	switch {
	case prefix == 0 || r.prefix != 0:
	case !ev.Unrooted:
		s.describe(at, ev, i, ev.Seed)
		s.name(at, prefix)
	case r.local == 0 && s.cfg.MaxOrphans > 0:
		s.describe(at, ev, i, ev.Seed)
		if s.wait(at) {
			s.slab.edit(at).local = uint64(prefix)
		}
	}
}

func (s *Set) applyEvicted(b *event.Batch, ev *event.Event) error {
	tier, known := s.tierNumber(ev.Tier)
	for i := range ev.Blocks {
		bl := &ev.Blocks[i]
		if bl.Effect >= 0 {
			continue
		}
		at, ok := s.index.get(key{bl.Hash, ev.Group.Index()})
		if !ok || !known || s.slab.copies(at, tier) == 0 {
			return &InvariantError{b.First, bl.Hash, "no copy to take"}
		}
		s.fall(at, tier)
	}
	return nil
}
