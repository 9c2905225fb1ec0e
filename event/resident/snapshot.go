package resident

import (
	"io"
	"iter"
	"math"
	"slices"
	"sync"

	"kvstrata/event"
)

// Snapshot is a set as it was at one moment. Taking it costs next to nothing and holds nothing up; any goroutine may
// read it while the set goes on.
type Snapshot struct {
	slab  slab
	tiers []event.Tier

	Digest  event.Digest
	Groups  []event.GroupInfo
	Fullest uint64 // most blocks that were resident at once
	Len     uint64 // how many entries Entries yields

	release func()
}

// Snapshot returns the set as it is now.
func (s *Set) Snapshot() *Snapshot {
	live := s.slab.snapshots
	return &Snapshot{
		slab: s.slab.freeze(), tiers: s.tierNames(), Digest: s.digest, Groups: slices.Clone(s.groups), Fullest: uint64(s.fullest),
		Len: s.Entries(), release: sync.OnceFunc(func() { live.Add(-1) }),
	}
}

// Release says that the snapshot will not be read any more: the set need not copy what it writes. Once is enough; a
// snapshot that is never released only costs memory.
func (snap *Snapshot) Release() { snap.release() }

// Entries yields one entry for each tier that a block lies in, and one for each bare name. The pointer is valid until
// the next one.
func (snap *Snapshot) Entries() iter.Seq[*event.Entry] {
	return func(yield func(*event.Entry) bool) {
		var e event.Entry
		for i := range snap.slab.used {
			r := snap.slab.at(i)
			if r.flags&recUsed == 0 {
				continue
			}
			e = event.Entry{
				Hash: snap.slab.hash(i), Group: event.Group(r.group), Prefix: r.prefix(), Local: r.local(),
				HasParent: r.flags&recParent != 0, Seed: r.seed, BlockSize: r.blockSize, Eagle: r.flags&recEagle != 0,
			}
			if e.HasParent {
				e.Parent = snap.slab.parent(i)
			}
			if !snap.yield(&e, r.first, yield) {
				return
			}
			for _, h := range snap.slab.more(i) {
				if !snap.yield(&e, h, yield) {
					return
				}
			}
		}
	}
}

// yield completes an entry by the copies in one tier, and yields it.
func (snap *Snapshot) yield(e *event.Entry, h holding, yield func(*event.Entry) bool) bool {
	e.Copies, e.Tier, e.Stored = h.copies, "", 0
	if h.copies > 0 {
		e.Tier, e.Stored = snap.tiers[h.tier], h.stored
	}
	return yield(e)
}

// Load makes the set what a checkpoint object says, and returns its header. On an error the set is of no use until the
// next Load or Reset.
func (s *Set) Load(r io.Reader) (*event.Checkpoint, error) {
	s.Reset()
	s.fullest = math.MaxInt // no name is too many before all are there
	cp, err := event.ReadCheckpoint(r, s.add)
	if err != nil {
		return nil, err
	}
	s.fullest = int(cp.Fullest)
	s.groups = slices.Clone(cp.Groups)
	if s.digest != cp.Digest {
		return nil, &InvariantError{Seq: cp.Seq, Reason: "the checkpoint's entries do not add up to its digest"}
	}
	return cp, nil
}

// add enters one entry of a checkpoint.
func (s *Set) add(e *event.Entry) {
	if e.Copies == 0 && s.cfg.MaxNames == 0 {
		return
	}
	group := e.Group.Index()
	known := s.find(&e.Hash, group) >= 0
	at, r := s.record(&e.Hash, group)
	if !known { // the first row of a block describes it: what rises under one description falls under it
		r.seed, r.blockSize = e.Seed, e.BlockSize
		if e.HasParent {
			s.slab.setParent(at, r, &e.Parent)
		}
		if e.Eagle {
			r.flags |= recEagle
		}
	}
	switch {
	case r.prefix() != 0:
	case e.Prefix != 0:
		if r.flags&recLocal != 0 {
			s.unwait(at, r)
		}
		r.name = uint64(e.Prefix)
	case e.Local != 0 && r.flags&recLocal == 0:
		s.wait(at, r, e.Local)
	}
	if e.Copies == 0 {
		s.retire(at, r)
		return
	}
	if tier, ok := s.addTier(e.Tier); ok {
		m := s.mixer(tier, e.Group)
		s.rise(at, r, e.Hash, tier, m, e.Stored)
		if e.Copies > 1 {
			s.repeat(at, r, e.Hash, tier, m, e.Copies-1)
		}
	}
}
