package prefix

import (
	"cmp"
	"time"

	"kvstrata/event"
)

// service is what the index keeps for its public service beside what lookups need. The zero value is ready; the index's lock guards
// it.
type service struct {
	gone     evictions
	seeds    map[string]*seeds // by model
	watchers *watchers         // nil while nobody subscribes
}

// story is what the service keeps of a source.
type story struct {
	seq     event.Seq  // of the batch that is being applied
	at      event.Time // when its subscriber received it
	since   time.Time  // since when everything that happened to the source was seen here
	loading bool       // a checkpoint is being read: its blocks are no changes
	turn    int64      // of the listing by pages: grows with each life and each checkpoint read
	seeds   *seeds     // of its model; nil until one is seen
	epoch   event.Epoch
	dead    bool // with epoch: the life that subscribers were told of last
}

// moveKind is what happened in a move.
type moveKind uint8

// The kinds of moves.
const (
	rose    moveKind = 1 + iota // a block rose from no copy in a tier to one
	fell                        // its last copy in a tier went
	named                       // a block in a tier got its name
	emptied                     // every block went at once; none of them is told
)

// move is one step of a source's blocks, with and without a name.
type move struct {
	kind      moveKind
	Hash      event.BlockHash
	Prefix    event.PrefixHash // 0 = unknown
	BlockSize uint32
	Eagle     bool
	Group     event.Group
	Tier      event.Tier
}

// The core calls these with the write lock held: reading before a batch is applied, went for each step of a block, emptied when all go,
// reload around the reading of a checkpoint, and told whenever a source's life or state may have changed.

// reading notes what is about to be applied.
func (x *Index) reading(s *source, b *event.Batch) {
	s.story.seq, s.story.at = b.Last, cmp.Or(b.Received, b.Time)
	for i := range b.Events {
		if ev := &b.Events[i]; ev.Kind == event.Stored && ev.Seed != 0 {
			x.seedsOf(s).note(ev.Seed, ev.LoRA)
		}
	}
}

// emptied notes that every block of a source went.
func (x *Index) emptied(s *source) {
	if s.story.loading {
		return
	}
	s.story.since = x.cfg.Clock()
	if x.service.watchers != nil {
		x.service.watchers.moved(s, &move{kind: emptied})
	}
}

// went notes a step of a block on a shelf.
func (x *Index) went(kind moveKind, h *shelf, hash event.BlockHash, id uint32) {
	s, f := h.source, h.forest
	if s.story.loading {
		return
	}
	if kind == fell && f != nil {
		x.service.gone.add(eviction{prefix: f.prefix(id), time: s.story.at, source: s.id, group: h.group.Index(), tier: h.tier})
	}
	if x.service.watchers == nil {
		return
	}
	m := move{kind: kind, Hash: hash, Group: h.group, Tier: x.tiers[h.tier]}
	if f != nil {
		m.Prefix, m.BlockSize, m.Eagle = f.prefix(id), f.cut.blockSize, f.cut.eagle
	}
	x.service.watchers.moved(s, &m)
}

// reload is called before a checkpoint is read, and what it returns afterwards, however that ended.
func (x *Index) reload(s *source, seen *seeds) (done func()) {
	s.story.loading = true
	return func() {
		s.story.loading = false
		x.beginStory(s)
		s.story.epoch, s.story.seq, _ = s.life()
		s.story.dead = s.isDead()
		for _, one := range seen.list {
			x.seedsOf(s).note(one.sealed, one.lora)
		}
		if x.service.watchers != nil {
			x.service.watchers.begin(x, s)
		}
	}
}

// told looks for a new life and a new state of a source.
func (x *Index) told(s *source) {
	epoch, _, _ := s.life()
	isNew := epoch != s.story.epoch || s.isDead() != s.story.dead || s.story.since.IsZero()
	if isNew {
		x.beginStory(s)
		s.story.epoch, s.story.dead = epoch, s.isDead()
	}
	switch w := x.service.watchers; {
	case w == nil:
	case isNew:
		w.begin(x, s)
	default:
		w.state(x, s)
	}
}

// beginStory notes that a source is told anew. Turns of other processes are others, so that a listing that began there is not
// continued here.
func (x *Index) beginStory(s *source) {
	s.story.since = x.cfg.Clock()
	s.story.turn = max(s.story.turn+1, s.story.since.UnixNano())
}

// seedsOf returns the seeds seen of a source's model.
func (x *Index) seedsOf(s *source) *seeds {
	if s.story.seeds != nil {
		return s.story.seeds
	}
	all := x.service.seeds[s.name.Model]
	if all == nil {
		if x.service.seeds == nil {
			x.service.seeds = make(map[string]*seeds)
		}
		all = new(seeds)
		x.service.seeds[s.name.Model] = all
	}
	s.story.seeds = all
	return all
}
