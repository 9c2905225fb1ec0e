package prefix

import (
	"runtime"

	"kvstrata/event"
)

// Reader answers lookups of one goroutine, from memory of its own. It takes no lock: it reads what is there, and again if that changed
// meanwhile; only where that happens very often it waits for the writer.
type Reader struct {
	index    *Index
	prefixes []event.PrefixHash
	scores   []Score
	lanes    []laneScore // of those that hold the first block
	place    []uint32    // by lane: place in lanes + 1, if that lane is there
}

// Score is how much of a prompt one source holds.
type Score struct {
	Source       *event.Source
	BlockSize    uint32 // tokens a block
	Blocks       uint32 // the prefix that it holds, each block in some tier
	DeviceBlocks uint32 // the prefix that lies on the device without a break
}

// laneScore is a Score that is being found.
type laneScore struct {
	lane           uint32
	source         *source
	blocks, device int
}

// NewReader returns a reader of the index. Any number of them read side by side.
func (x *Index) NewReader() *Reader { return &Reader{index: x} }

// tries is how often a Reader reads again before it waits for the lock.
const tries = 64

// spins is how often a Reader looks whether a change is published before it lets others run.
const spins = 256

// calm returns the version, and whether nothing is being published.
func (r *Reader) calm() (version uint64, calm bool) {
	for range spins {
		if version = r.index.version.Load(); version%2 == 0 {
			return version, true
		}
	}
	runtime.Gosched()
	return version, false
}

// Scores returns how much of a prompt each source holds itself, in no order; one that holds nothing of it is not there. The slice is
// valid until the next call.
func (r *Reader) Scores(req *Request) ([]Score, error) {
	if err := req.Validate(); err != nil {
		return nil, err
	}
	x := r.index
	m, err := x.serving(req.Model)
	if err != nil {
		return nil, err
	}
	for range tries {
		version, calm := r.calm()
		if !calm {
			continue
		}
		if m.crooked.Load() > 0 {
			break
		}
		whole := r.read(m, req)
		if x.version.Load() == version && whole {
			return r.scores, nil
		}
	}
	x.mu.RLock()
	if m.crooked.Load() == 0 {
		defer x.mu.RUnlock()
		r.read(m, req)
		return r.scores, nil
	}
	x.mu.RUnlock()
	return r.ask(req)
}

// ask has Lookup answer.
func (r *Reader) ask(req *Request) ([]Score, error) {
	a, err := r.index.Lookup(req)
	if err != nil {
		return nil, err
	}
	r.scores = r.scores[:0]
	for i := range a.Matches {
		if m := &a.Matches[i]; m.Blocks > 0 {
			r.scores = append(r.scores, Score{
				Source: &m.Source, BlockSize: m.BlockSize, Blocks: uint32(m.Blocks), DeviceBlocks: uint32(m.DeviceBlocks),
			})
		}
	}
	return r.scores, nil
}

// read finds the scores, and reports whether what it read made sense.
func (r *Reader) read(m *model, req *Request) bool {
	r.scores = r.scores[:0]
	silent := r.index.cfg.Clock().Add(-r.index.cfg.StaleAfter).UnixNano()
	for _, f := range *m.forests.Load() {
		prefixes := req.Hashes
		switch {
		case len(prefixes) == 0:
			if !r.begins(f, req) {
				continue
			}
			r.prefixes = event.Prefixes(r.prefixes[:0], req.Tokens, int(f.cut.blockSize), r.index.hasher.Seed(req.LoRA, req.Salt), f.cut.eagle)
			prefixes = r.prefixes
		case req.BlockSize != 0 && req.BlockSize != f.cut.blockSize:
			continue
		}
		if !r.walk(req, f, prefixes) {
			return false
		}
		for i := range r.lanes {
			l := &r.lanes[i]
			s := l.source
			if !s.answers.Load() || s.heard.Load() < silent || req.Cluster != "" && s.name.Cluster != req.Cluster {
				continue
			}
			r.scores = append(r.scores, Score{
				Source: &s.name, BlockSize: f.cut.blockSize, Blocks: uint32(l.blocks), DeviceBlocks: uint32(l.device),
			})
		}
	}
	return true
}

// begins reports whether a forest has the first block of a prompt given as tokens: the others need not be hashed where it has not.
func (r *Reader) begins(f *forest, req *Request) bool {
	first := req.Tokens[:min(len(req.Tokens), int(f.cut.blockSize)+1)]
	r.prefixes = event.Prefixes(r.prefixes[:0], first, int(f.cut.blockSize), r.index.hasher.Seed(req.LoRA, req.Salt), f.cut.eagle)
	return len(r.prefixes) > 0 && f.table.find(r.prefixes[0], f) != 0
}

// walk finds how much of a prompt each lane of a forest holds, and reports whether what it read made sense.
func (r *Reader) walk(req *Request, f *forest, prefixes []event.PrefixHash) bool {
	r.lanes = r.lanes[:0]
	shelves := *r.index.shelves.Load()
	w := walker{forest: f, owners: r.index.owners, hint: f.start(req, prefixes)}
	for i := 0; i < len(prefixes); {
		to, set := w.next(prefixes, i)
		if set == nil {
			return true
		}
		reached := false
		for _, id := range set.shelves {
			if int(id) >= len(shelves) {
				return false
			}
			h := shelves[id]
			if !h.shown.Load() {
				continue
			}
			l := r.lane(h, i == 0)
			if l == nil || l.blocks != i && l.blocks != to {
				continue
			}
			l.blocks, reached = to, true
			if h.device && l.device == i {
				l.device = to
			}
		}
		if !reached {
			return true
		}
		i = to
	}
	return true
}

// lane returns the score of a shelf's lane, nil when there is none; made at the first block.
func (r *Reader) lane(h *shelf, first bool) *laneScore {
	if int(h.lane) >= len(r.place) {
		r.place = append(r.place, make([]uint32, int(h.lane)+1-len(r.place))...)
		r.place = r.place[:cap(r.place)]
	}
	if n := r.place[h.lane]; n > 0 && int(n) <= len(r.lanes) && r.lanes[n-1].lane == h.lane {
		return &r.lanes[n-1]
	}
	if !first {
		return nil
	}
	r.lanes = append(r.lanes, laneScore{lane: h.lane, source: h.source})
	r.place[h.lane] = uint32(len(r.lanes))
	return &r.lanes[len(r.lanes)-1]
}
