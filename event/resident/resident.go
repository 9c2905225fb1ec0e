// Package resident keeps the set of blocks that one life of one source holds: how many copies of each in which tier,
// and the prefix each one names. It is the judge: fed with what an engine told ([Set.Judge]), it fills in every block's
// effect on copies, its prefix hash, and the copies and age of what was evicted. Fed with judged batches ([Set.Apply]),
// it follows, without judging anew.
//
// The package is pure: no I/O, no clock, no goroutine. Equal inputs give equal sets and equal digests.
package resident

import (
	"iter"
	"slices"
	"sync/atomic"

	"kvstrata/event"
)

// Config says how a set counts and what it remembers.
type Config struct {
	// Hasher computes prefix hashes; only Judge uses it.
	Hasher event.Hasher
	// AsSet counts a block at most once a tier: for sources in "full report" mode, whose re-reports and second copies
	// look alike.
	AsSet bool
	// MaxNames bounds the names (engine hash → prefix hash) that outlive their blocks; the oldest go first. As many as
	// there were blocks at the fullest moment of the life may stay in any case, so that nothing is forgotten when a resync
	// clears the set. A judge needs names for children of blocks that are gone; a follower needs none, and 0 keeps none.
	MaxNames int
	// MaxOrphans bounds the blocks kept aside because their parent is unknown. Beyond it they stay without a name.
	MaxOrphans int
}

// DefaultConfig returns the configuration of a judge.
func DefaultConfig() Config { return Config{MaxNames: 1 << 12, MaxOrphans: 1 << 20} }

// TierCount is how much of a set lies in one tier.
type TierCount struct {
	Tier   event.Tier
	Blocks uint64 // entries with at least one copy
	Copies uint64
}

// Set is the resident set of one life of one source. One goroutine owns it.
type Set struct {
	cfg      Config
	index    table
	slab     slab
	digest   event.Digest
	tiers    []TierCount // by tier number
	mixers   []mixer     // by tier number
	groups   []event.GroupInfo
	names    names // records without copies, oldest first
	records  int   // in use: with copies, or names
	fullest  int   // most records that had copies at once
	waiting  map[key][]int32
	orphans  int
	oddities [numOddities]event.Counter
	ahead    lookahead

	named []int32       // records that got a name in the batch being judged: who waited for them gets one too
	told  []int32       // records whose names the batch's own runs do not tell: naming events will
	room  []event.Block // of the naming events
}

// mixer is the mixer of a tier, for the group that it was used for last.
type mixer struct {
	event.Mixer
	group event.Group
}

// key names a record that others wait for.
type key struct {
	hash  event.BlockHash
	group uint32
}

// New returns an empty set.
func New(cfg Config) *Set {
	s := &Set{cfg: cfg}
	s.Reset()
	return s
}

// Reset empties the set and forgets every name: a new life begins.
func (s *Set) Reset() {
	s.index = newTable()
	s.slab = slab{snapshots: new(atomic.Int32)} // older snapshots share nothing with it
	s.digest = 0
	s.tiers, s.mixers, s.groups = nil, nil, nil
	s.names = names{}
	s.records, s.fullest = 0, 0
	s.waiting = make(map[key][]int32)
	s.orphans = 0
	for i := range s.oddities {
		s.oddities[i] = event.Counter{Name: oddityNames[i]}
	}
}

// Digest returns the set's digest.
func (s *Set) Digest() event.Digest { return s.digest }

// Tiers returns how much lies in each tier, in the order in which tiers appeared.
func (s *Set) Tiers() []TierCount { return slices.Clone(s.tiers) }

// Blocks returns the number of (block, group, tier) entries with at least one copy.
func (s *Set) Blocks() uint64 {
	var n uint64
	for i := range s.tiers {
		n += s.tiers[i].Blocks
	}
	return n
}

// Entries returns how many entries a snapshot has: resident blocks and bare names.
func (s *Set) Entries() uint64 { return uint64(s.records + s.slab.spread) }

// DeviceCopies returns the number of copies on the device.
func (s *Set) DeviceCopies() uint64 {
	var n uint64
	for i := range s.tiers {
		if s.tiers[i].Tier.Warmth() == 0 {
			n += s.tiers[i].Copies
		}
	}
	return n
}

// Groups returns what each cache group was last seen to be.
func (s *Set) Groups() []event.GroupInfo { return slices.Clone(s.groups) }

// Oddities returns how often the source broke the contract, by kind; those never seen are left out.
func (s *Set) Oddities() []event.Counter {
	var seen []event.Counter
	for _, c := range s.oddities {
		if c.Count > 0 {
			seen = append(seen, c)
		}
	}
	return seen
}

// Clear takes every copy out of every tier; names stay.
func (s *Set) Clear() {
	s.zero()
	s.digest = 0
	for i := range s.tiers {
		s.tiers[i].Blocks, s.tiers[i].Copies = 0, 0
	}
}

// zero takes every copy out of every record.
func (s *Set) zero() {
	for i := range s.slab.all() {
		if !s.slab.at(i).resident() {
			continue
		}
		r := s.slab.edit(i)
		s.slab.setMore(i, r, nil)
		r.first.copies = 0
		s.retire(i, r)
	}
}

// Resident yields every entry with at least one copy, in no order. The pointer is valid until the next one.
func (s *Set) Resident() iter.Seq[*event.Entry] {
	snap := Snapshot{slab: s.slab, tiers: s.tierNames()}
	return func(yield func(*event.Entry) bool) {
		for e := range snap.Entries() {
			if e.Copies > 0 && !yield(e) {
				return
			}
		}
	}
}

// Copied returns how many copies of a block lie in a tier.
func (s *Set) Copied(h event.BlockHash, g event.Group, tier event.Tier) uint32 {
	i := s.find(&h, g.Index())
	t, known := s.tierNumber(tier)
	if i < 0 || !known {
		return 0
	}
	return s.slab.copies(i, s.slab.at(i), t)
}

func (s *Set) tierNames() []event.Tier {
	names := make([]event.Tier, len(s.tiers))
	for i := range s.tiers {
		names[i] = s.tiers[i].Tier
	}
	return names
}

func (s *Set) tierNumber(tier event.Tier) (uint16, bool) {
	for i := range s.tiers {
		if s.tiers[i].Tier == tier {
			return uint16(i), true
		}
	}
	return 0, false
}

// maxTiers bounds how many tiers a source may name; engines name a handful.
const maxTiers = 64

// addTier returns a tier's number, giving it one at its first appearance.
func (s *Set) addTier(tier event.Tier) (uint16, bool) {
	if t, ok := s.tierNumber(tier); ok {
		return t, true
	}
	if len(s.tiers) == maxTiers {
		return 0, false
	}
	s.tiers = append(s.tiers, TierCount{Tier: tier})
	s.mixers = append(s.mixers, mixer{Mixer: event.NewMixer(event.NoGroup, tier), group: event.NoGroup})
	return uint16(len(s.tiers) - 1), true
}

// mixer returns what mixes the digest's weights of a group's blocks in a tier.
func (s *Set) mixer(tier uint16, g event.Group) *event.Mixer {
	m := &s.mixers[tier]
	if m.group != g {
		*m = mixer{Mixer: event.NewMixer(g, s.tiers[tier].Tier), group: g}
	}
	return &m.Mixer
}

func (s *Set) noteGroup(ev *event.Event) { NoteGroup(&s.groups, ev) }

// NoteGroup enters what a STORED tells of its cache group, and reports whether that is news.
func NoteGroup(groups *[]event.GroupInfo, ev *event.Event) (news bool) {
	if !ev.Locality.Here() {
		return false
	}
	info := event.GroupInfo{
		Group: ev.Group, BlockSize: ev.BlockSize, Spec: ev.Spec, Window: ev.Window, Eagle: ev.Eagle,
	}
	for i := range *groups {
		g := &(*groups)[i]
		if *g == info {
			return false
		}
		if g.Group.Index() != ev.Group.Index() {
			continue
		}
		device := ev.Tier.Warmth() == 0
		if info.BlockSize == 0 || g.BlockSize != 0 && (!device || info.BlockSize < g.BlockSize) {
			return false
		}
		*g = info
		return true
	}
	if len(*groups) == maxGroups {
		return false
	}
	*groups = append(*groups, info)
	return true
}

// maxGroups bounds how many cache groups are described; hybrid models have a handful.
const maxGroups = 64

// find returns the record of a block, −1 when there is none.
func (s *Set) find(h *event.BlockHash, group uint32) int32 {
	i, _ := s.index.find(&s.slab, h, group)
	return i
}

// rise adds a copy of record i, whose block is h, to a tier; m is of the block's group and the tier.
func (s *Set) rise(i int32, r *record, h event.BlockHash, tier uint16, m *event.Mixer, now event.Time) {
	if r.flags&recQueued != 0 {
		s.names.remove(r)
	}
	s.digest += m.Mix64(h)
	t := &s.tiers[tier]
	t.Copies++
	if !r.resident() {
		r.first = holding{stored: now, copies: 1, tier: tier}
	} else if s.slab.add(i, r, tier, now) > 1 {
		return
	}
	t.Blocks++
	s.fullest = max(s.fullest, s.records-s.names.length)
}

// repeat adds n further copies to a tier that has one.
func (s *Set) repeat(i int32, r *record, h event.BlockHash, tier uint16, m *event.Mixer, n uint32) {
	s.digest += event.Digest(n) * m.Mix64(h)
	s.tiers[tier].Copies += uint64(n)
	if r.first.tier == tier {
		r.first.copies += n
		return
	}
	more := slices.Clone(s.slab.more(i))
	for j := range more {
		if more[j].tier == tier {
			more[j].copies += n
		}
	}
	s.slab.setMore(i, r, more)
}

// fall takes a copy out of a tier that has one, and returns what is left and when it was stored.
func (s *Set) fall(i int32, r *record, h event.BlockHash, tier uint16, m *event.Mixer) (left uint32, stored event.Time) {
	s.digest -= m.Mix64(h)
	t := &s.tiers[tier]
	t.Copies--
	left, stored = s.slab.take(i, r, tier)
	if left == 0 {
		t.Blocks--
		if !r.resident() {
			s.retire(i, r)
		}
	}
	return left, stored
}

// record returns the record of a block, made if need be, to be written.
func (s *Set) record(h *event.BlockHash, group uint32) (int32, *record) {
	i, hash := s.index.find(&s.slab, h, group)
	if i >= 0 {
		return i, s.slab.edit(i)
	}
	i, r := s.slab.alloc()
	r.hash, r.group, r.flags = s.index.word(h), group, recUsed
	if _, isInt := h.Int(); !isInt {
		r.flags |= recLongHash
		s.slab.editExtra(i).hash = h.Clone()
	}
	if s.index.insert(hash, i); s.index.due() {
		s.index.tidy(&s.slab)
	}
	s.records++
	return i, r
}

// retire keeps the name of a block that lost its last copy, and forgets the oldest name beyond the bound.
func (s *Set) retire(i int32, r *record) {
	if r.flags&recQueued == 0 {
		s.names.push(&s.slab, i, r)
	}
	for most := s.mostNames(); s.names.length > most; {
		s.forget(s.names.oldest())
	}
}

// mostNames returns how many names are kept.
func (s *Set) mostNames() int {
	if s.cfg.MaxNames <= 0 {
		return 0
	}
	return max(s.cfg.MaxNames, s.fullest)
}

// forget frees a record that is only a name.
func (s *Set) forget(i int32) {
	r := s.slab.edit(i)
	s.names.remove(r)
	if r.flags&recLocal != 0 {
		s.unwait(i, r)
	}
	s.index.remove(r, i)
	s.slab.free(i, r)
	s.records--
}

// wait keeps record i with its local hash aside until its parent has a name, and reports whether there was room.
func (s *Set) wait(i int32, r *record, local uint64) bool {
	if s.orphans >= s.cfg.MaxOrphans {
		return false
	}
	k := key{s.slab.parent(i), r.group}
	s.waiting[k] = append(s.waiting[k], i)
	s.orphans++
	r.name, r.flags = local, r.flags|recLocal
	return true
}

// unwait forgets the local hash with which record i waits.
func (s *Set) unwait(i int32, r *record) {
	r.name, r.flags = 0, r.flags&^recLocal
	k := key{s.slab.parent(i), r.group}
	list := s.waiting[k]
	at := slices.Index(list, i)
	if at < 0 {
		return
	}
	s.orphans--
	if len(list) == 1 {
		delete(s.waiting, k)
		return
	}
	list[at] = list[len(list)-1]
	s.waiting[k] = list[:len(list)-1]
}
