package prefix

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
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
	if err == nil {
		in.enterLate()
	}
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
	late    []event.Entry // rows that came before their parents, or have none here
	groups  []*group      // by number
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
		if len(in.late) >= maxLate {
			in.enterLate()
		}
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
	var room [3 * sweepPiece]unsafe.Pointer
	lines := room[:0]
	for i := range in.rows {
		e := &in.rows[i]
		if g := in.find(e.Group); g != nil && len(g.shelves) > 0 {
			if hash, ok := e.Hash.Int(); ok {
				lines = g.shelves[0].blocks.AppendLines(lines, hash)
			}
			if f := g.shelves[0].forest; f != nil {
				lines = f.table.appendLine(lines, e.Prefix)
			}
		}
	}
	flat.Prefetch(lines)
	in.index.begin()
	defer in.index.end()
	for i := range in.rows {
		r := in.run(&in.rows[i])
		if r == nil {
			continue
		}
		if r.before == unknownBefore && in.rows[i].Prefix != 0 && !r.here().dense {
			in.late = append(in.late, in.rows[i])
			e := &in.late[len(in.late)-1]
			e.Hash, e.Parent = e.Hash.Clone(), e.Parent.Clone()
			continue
		}
		in.enter(r, &in.rows[i])
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

// run returns where a row stands, nil where there is too much of something.
func (in *intake) run(e *event.Entry) *run {
	r := &run{index: in.index, source: in.source, group: in.group(e.Group), cut: variant{e.BlockSize, e.Eagle}, before: unknownBefore}
	if reason := r.overBound(); reason != "" {
		in.refused = reason
		return nil
	}
	r.told, r.groups = in.room.told, in.groups
	r.describe()
	if !e.HasParent {
		r.begins()
	} else if h, id := r.group.named(e.Parent); h != nil {
		r.goesOn(h.forest, id)
	}
	return r
}

// enter enters a row.
func (in *intake) enter(r *run, e *event.Entry) {
	tier, ok := in.index.tierOf(&in.room, e.Tier)
	if !ok {
		in.refused = "more tiers than a source may have"
		return
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
	in.room.digest += event.Digest(e.Copies) * in.index.mixer(e.Group, e.Tier).Mix64(e.Hash)
}

// lateKey is what a row is called by the rows that continue it.
type lateKey struct {
	hash  event.BlockHash
	group uint32
}

// Bounds of rows that wait, and of those for which all places are searched at once.
const (
	maxLate  = 1 << 16
	maxHeads = 1 << 12
)

// enterLate enters the rows that wait, parents first. Those whose parents are not here may be anywhere.
func (in *intake) enterLate() {
	at := make(map[lateKey]int, len(in.late))
	for i := range in.late {
		at[lateKey{in.late[i].Hash, in.late[i].Group.Index()}] = i
	}
	var order, heads, path []int
	seen := make([]bool, len(in.late))
	for i := range in.late {
		for j, more := i, true; more && !seen[j]; {
			seen[j] = true
			path = append(path, j)
			e := &in.late[j]
			if j, more = at[lateKey{e.Parent, e.Group.Index()}]; !e.HasParent || !more {
				heads, path, more = append(heads, path[len(path)-1]), path[:len(path)-1], false
			}
		}
		slices.Reverse(path)
		order, path = append(order, path...), path[:0]
	}
	for part := range slices.Chunk(heads, maxHeads) {
		in.enterHeads(part)
	}
	for part := range slices.Chunk(order, sweepPiece) {
		in.index.begin()
		for _, i := range part {
			if r := in.run(&in.late[i]); r != nil {
				in.enter(r, &in.late[i])
			}
		}
		in.index.end()
	}
	in.late = in.late[:0]
}

// enterHeads enters rows whose parents are not here. All places are searched once for all of them.
func (in *intake) enterHeads(heads []int) {
	in.index.begin()
	defer in.index.end()
	runs := make([]*run, 0, len(heads))
	wanted := make(map[*forest]map[event.PrefixHash]bool)
	for _, i := range heads {
		r := in.run(&in.late[i])
		runs = append(runs, r)
		if r == nil {
			continue
		}
		if wanted[r.here()] == nil {
			wanted[r.here()] = make(map[event.PrefixHash]bool)
		}
		wanted[r.here()][in.late[i].Prefix] = true
	}
	for f, prefixes := range wanted {
		f.anchorAll(prefixes)
	}
	for n, i := range heads {
		if r := runs[n]; r != nil {
			r.before = nothingBefore // what is there is in the table now
			in.enter(r, &in.late[i])
		}
	}
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
			x.refresh(s)
		}
		return err
	}
	x.disturb()
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
	x.refresh(s)
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
