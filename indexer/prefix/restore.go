package prefix

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"unsafe"

	"kvstrata/event"
	"kvstrata/event/flat"
)

// Restore replaces all that is known of a source by a checkpoint object. It may run beside Apply and other Restores, of other
// sources. The blocks are entered piece by piece, and shown together when all are there.
func (x *Index) Restore(_ context.Context, object io.Reader) (*event.Checkpoint, error) {
	in := intake{index: x}
	cp, err := event.ScanCheckpoint(object, in.begin, in.add)
	if in.source == nil {
		return nil, err
	}
	in.flush()
	if err = in.finish(cp, err); err != nil {
		return nil, err
	}
	return cp, nil
}

// intake is a checkpoint that is being read.
type intake struct {
	index   *Index
	source  *source
	room    source // what becomes the source's
	rows    []event.Entry
	groups  []*group // by number
	seen    seeds
	refused string // what there is too much of
	done    func() // tells the service how it ended
}

func (in *intake) begin(cp *event.Checkpoint) {
	in.index.begin()
	defer in.index.end()
	in.source = in.index.source(cp.Source)
	in.room.model, in.room.name, in.room.told = in.source.model, in.source.name, cp.Groups
	in.done = in.index.reload(in.source, &in.seen)
}

func (in *intake) add(e *event.Entry) {
	in.seen.noteEntry(e)
	if e.Copies == 0 {
		return
	}
	if e.Prefix != 0 && !in.index.cfg.Shard.Holds(e.Prefix) { // another index's, of which only the digest is this one's, too
		in.room.digest += event.Digest(e.Copies) * event.Mix64(e.Hash, e.Group, e.Tier)
		return
	}
	if in.rows = append(in.rows, *e); len(in.rows) == sweepPiece {
		in.flush()
	}
}

// group returns the incoming shelves of a cache group, in the lane of the source's own.
func (in *intake) group(told event.Group) *group {
	if g := in.find(told); g != nil {
		return g
	}
	own := in.index.group(in.source, told)
	if own == nil {
		return nil
	}
	g := &group{group: told, index: own.index, lane: own.lane, incoming: true}
	in.groups = append(in.groups, g)
	return g
}

// flush enters the rows that have been read.
func (in *intake) flush() {
	var room [4 * sweepPiece]unsafe.Pointer
	lines := room[:0]
	for i := range in.rows {
		e := &in.rows[i]
		if g := in.find(e.Group); g != nil && len(g.shelves) > 0 {
			if hash, ok := e.Hash.Int(); ok {
				lines = g.shelves[0].blocks.AppendLines(lines, hash)
			}
			if f := g.shelves[0].forest; f != nil {
				lines = f.table.appendLines(lines, e.Prefix)
			}
		}
	}
	flat.Prefetch(lines)
	in.index.begin()
	defer in.index.end()
	for i := range in.rows {
		in.enter(&in.rows[i])
	}
	in.rows = in.rows[:0]
}

func (in *intake) find(told event.Group) *group {
	for _, g := range in.groups {
		if g.index == told.Index() {
			return g
		}
	}
	return nil
}

func (in *intake) enter(e *event.Entry) {
	r := run{index: in.index, source: in.source, group: in.group(e.Group), cut: variant{e.BlockSize, e.Eagle}}
	tier, ok := in.index.tierOf(&in.room, e.Tier)
	if reason := r.overBound(); reason != "" || !ok {
		in.refused = cmp.Or(reason, "more tiers than a source may have")
		return
	}
	r.told, r.groups = in.room.told, in.groups
	r.describe()
	if !e.HasParent {
		r.depth = 1
	} else if h, id := r.group.named(e.Parent); h != nil {
		r.depth = deeper(h.forest.depth(id))
	}
	prefix := e.Prefix
	if prefix == 0 {
		if prefix = r.borrowed(e.Hash); prefix != 0 {
			r.depth = 0 // a row without a name tells no depth
		}
	}
	r.add(tier, e.Hash, prefix)
	r.lend(e.Hash)
	if e.Copies > 1 {
		for _, h := range r.group.shelves {
			if h.tier == tier && h.get(e.Hash) != 0 {
				h.again(e.Hash, e.Copies-1)
			}
		}
	}
	in.room.digest += event.Digest(e.Copies) * event.Mix64(e.Hash, e.Group, e.Tier)
}

// errUnsound says that a checkpoint contradicts itself.
var errUnsound = errors.New("the checkpoint's entries do not add up to its digest")

// finish shows what was read, or drops it.
func (in *intake) finish(cp *event.Checkpoint, err error) error {
	x, s := in.index, in.source
	x.begin()
	defer x.end()
	defer in.done()
	if err == nil && in.refused != "" {
		err = fmt.Errorf("restore %v at sequence %d: %s: %w", s.name, cp.Seq, in.refused, errUnsound)
	} else if err == nil && in.room.digest != cp.Digest {
		err = fmt.Errorf("restore %v at sequence %d: %w", s.name, cp.Seq, errUnsound)
	}
	if err != nil {
		for _, g := range in.groups {
			x.drop(g)
		}
		if errors.Is(err, errUnsound) {
			x.reset(s)
			s.doubt = err.Error()
			s.refresh()
		}
		return err
	}
	x.reset(s)
	for _, g := range in.groups {
		own := x.group(s, g.group)
		own.group, own.shelves = g.group, g.shelves
		for _, h := range g.shelves {
			h.shown.Store(true)
		}
	}
	s.told = append(s.told, cp.Groups...)
	s.tiers, s.digest = in.room.tiers, in.room.digest
	s.epoch, s.fence, s.started, s.seq, s.doubt = cp.Epoch, cp.Fence, cp.Ledger.Started, cp.Seq, ""
	s.assume(cp)
	s.reshaped = true
	s.refresh()
	return nil
}

// assume takes a checkpoint for its publisher's word, unless that spoke of this life, or of a later one, itself. What
// the checkpoint counts is in doubt until then.
func (s *source) assume(cp *event.Checkpoint) {
	told := &s.status
	if told.Fence > cp.Fence || told.Epoch > cp.Epoch || s.spoken && told.Fence == cp.Fence && told.Epoch == cp.Epoch {
		return
	}
	state, reason := event.StateRecovering, "read from a checkpoint; its subscriber has not spoken yet"
	if cp.State == event.StateStale || cp.State == event.StateGone {
		state, reason = cp.State, cp.Reason
	}
	s.spoken = false
	s.status = event.Status{
		Source: cp.Source, Epoch: cp.Epoch, Fence: cp.Fence, Seq: cp.Seq, State: state, Reason: reason,
		Ledger: cp.Ledger, Digest: cp.Digest, PastLives: cp.PastLives,
	}
}
