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
	group := ev.Group.Index()
	for i := range ev.Blocks {
		bl := &ev.Blocks[i]
		at := s.find(&bl.Hash, group)
		found := at >= 0
		// A name without a block is worth keeping only to who will judge.
		if !found && bl.Effect <= 0 && s.cfg.MaxNames == 0 {
			continue
		}
		at, r := s.record(&bl.Hash, group)
		s.follow(ev, i, at, r)
		if bl.Effect > 0 {
			if !ok {
				return &InvariantError{b.First, bl.Hash, "more tiers than a source may have"}
			}
			s.rise(at, r, bl.Hash, tier, s.mixer(tier, ev.Group), b.Time)
		} else if !found {
			s.retire(at, r)
		}
	}
	return nil
}

// follow enters what a judged run tells of the name of its block i.
func (s *Set) follow(ev *event.Event, i int, at int32, r *record) {
	prefix := ev.Blocks[i].Prefix
	switch {
	case prefix == 0 || r.prefix() != 0:
	case !ev.Unrooted:
		s.describe(at, r, ev, i, ev.Seed)
		r.name = uint64(prefix)
	case r.flags&recLocal == 0 && s.cfg.MaxOrphans > 0:
		s.describe(at, r, ev, i, ev.Seed)
		s.wait(at, r, uint64(prefix))
	}
}

func (s *Set) applyEvicted(b *event.Batch, ev *event.Event) error {
	tier, known := s.tierNumber(ev.Tier)
	group := ev.Group.Index()
	for i := range ev.Blocks {
		bl := &ev.Blocks[i]
		if bl.Effect >= 0 {
			continue
		}
		at := s.find(&bl.Hash, group)
		if at < 0 || !known || s.slab.copies(at, s.slab.at(at), tier) == 0 {
			return &InvariantError{b.First, bl.Hash, "no copy to take"}
		}
		s.fall(at, s.slab.edit(at), bl.Hash, tier, s.mixer(tier, ev.Group))
	}
	return nil
}
