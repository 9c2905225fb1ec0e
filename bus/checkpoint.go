package bus

import (
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"kvstrata/event"
)

// CheckpointName names a checkpoint object: source/epoch/fence/sequence/written.
type CheckpointName struct {
	Source event.Source
	Epoch  event.Epoch
	Fence  event.Fence
	Seq    event.Seq
	// Write orders checkpoints that stand at the same sequence, for instance before the first batch of a life.
	Write uint64
}

// NameOf returns the name that a checkpoint is stored under.
func NameOf(cp *event.Checkpoint) CheckpointName {
	return CheckpointName{
		Source: cp.Source, Epoch: cp.Epoch, Fence: cp.Fence, Seq: cp.Seq, Write: uint64(cp.Written),
	}
}

func (n CheckpointName) String() string {
	return fmt.Sprintf("%s/%d/%d/%d/%d", n.Source.Tokens(), n.Epoch, n.Fence, n.Seq, n.Write)
}

// Compare orders names, older first: the higher fence judged later, whatever epoch it saw.
func (n CheckpointName) Compare(other CheckpointName) int {
	for _, pair := range [][2]uint64{
		{uint64(n.Fence), uint64(other.Fence)},
		{uint64(n.Epoch), uint64(other.Epoch)},
		{uint64(n.Seq), uint64(other.Seq)},
		{n.Write, other.Write},
	} {
		if pair[0] != pair[1] {
			if pair[0] < pair[1] {
				return -1
			}
			return 1
		}
	}
	return 0
}

func parseCheckpointName(name string) (CheckpointName, error) {
	parts := strings.Split(name, "/")
	if len(parts) != 5 {
		return CheckpointName{}, fmt.Errorf("checkpoint object %q: want source/epoch/fence/sequence/write", name)
	}
	source, err := event.ParseSource(parts[0])
	if err != nil {
		return CheckpointName{}, fmt.Errorf("checkpoint object %q: %w", name, err)
	}
	var numbers [4]uint64
	for i := range numbers {
		if numbers[i], err = strconv.ParseUint(parts[i+1], 10, 64); err != nil {
			return CheckpointName{}, fmt.Errorf("checkpoint object %q: %q is no number", name, parts[i+1])
		}
	}
	return CheckpointName{
		Source: source, Epoch: event.Epoch(numbers[0]), Fence: event.Fence(numbers[1]), Seq: event.Seq(numbers[2]),
		Write: numbers[3],
	}, nil
}

// keepCheckpoints is how many checkpoints of a source stay.
const keepCheckpoints = 2

// PutCheckpoint stores a checkpoint, then deletes the source's older ones but for the newest two.
func (b *Bus) PutCheckpoint(ctx context.Context, cp *event.Checkpoint, entries iter.Seq[*event.Entry]) error {
	name := NameOf(cp)
	r, w := io.Pipe()
	go func() { w.CloseWithError(event.WriteCheckpoint(w, cp, entries)) }()
	_, err := b.checkpoints.Put(ctx, jetstream.ObjectMeta{Name: name.String()}, &pacedReader{ctx: ctx, r: r, pace: &b.pace})
	r.CloseWithError(err) // ends the writer where Put gave up early
	if err != nil {
		return fmt.Errorf("store checkpoint %v: %w", name, err)
	}
	names, err := b.Checkpoints(ctx)
	if err != nil {
		return err
	}
	for i, old := range names[cp.Source] {
		if i < keepCheckpoints {
			continue
		}
		if err := b.checkpoints.Delete(ctx, old.String()); err != nil && !errors.Is(err, jetstream.ErrObjectNotFound) {
			return fmt.Errorf("delete checkpoint %v: %w", old, err)
		}
	}
	return nil
}

// checkpointRate is how fast checkpoints are written, all sources of a bus together, in bytes a second: no faster than
// they must, so that they do not take the processors and the disk from the events.
const checkpointRate = 16 << 20

// pace spreads what is written over time.
type pace struct {
	mu    sync.Mutex
	free  time.Time    // when what was let through so far has had its time
	hurry atomic.Int32 // who wants no waiting
}

// Hurry lets checkpoints through as fast as they go, until done is called: somebody is stopping.
func (b *Bus) Hurry() (done func()) {
	b.pace.hurry.Add(1)
	return sync.OnceFunc(func() { b.pace.hurry.Add(-1) })
}

// pacedReader reads no faster than the pace allows.
type pacedReader struct {
	ctx  context.Context
	r    io.Reader
	pace *pace
}

func (p *pacedReader) Read(b []byte) (int, error) {
	n, err := p.r.Read(b)
	p.pace.mu.Lock()
	now := time.Now()
	p.pace.free = p.pace.free.Add(time.Duration(n) * time.Second / checkpointRate)
	if p.pace.free.Before(now) || p.pace.hurry.Load() > 0 {
		p.pace.free = now
	}
	wait := p.pace.free.Sub(now)
	p.pace.mu.Unlock()
	if wait < time.Millisecond || err != nil {
		return n, err
	}
	select {
	case <-time.After(wait):
		return n, nil
	case <-p.ctx.Done():
		return n, p.ctx.Err()
	}
}

// Checkpoints lists the checkpoints of every source, newest first.
func (b *Bus) Checkpoints(ctx context.Context) (map[event.Source][]CheckpointName, error) {
	names := make(map[event.Source][]CheckpointName)
	infos, err := b.checkpoints.List(ctx)
	if errors.Is(err, jetstream.ErrNoObjectsFound) {
		return names, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list checkpoints: %w", err)
	}
	for _, info := range infos {
		name, err := parseCheckpointName(info.Name)
		if err != nil {
			b.log.Warn("an object that is no checkpoint lies in the bucket; delete it", "bucket", CheckpointBucket, "err", err)
			continue
		}
		names[name.Source] = append(names[name.Source], name)
	}
	for _, list := range names {
		slices.SortFunc(list, func(x, y CheckpointName) int { return y.Compare(x) })
	}
	return names, nil
}

// Keys of a checkpoint object's metadata: a later position at which it still holds.
const (
	metaStream   = "stream"
	metaCreated  = "created"
	metaSequence = "sequence"
)

// MoveCheckpoint says that a checkpoint still holds at a later position: nothing came in between.
func (b *Bus) MoveCheckpoint(ctx context.Context, name CheckpointName, to event.Position) error {
	meta := jetstream.ObjectMeta{Name: name.String(), Metadata: map[string]string{
		metaStream: to.Stream, metaCreated: strconv.FormatInt(int64(to.Created), 10),
		metaSequence: strconv.FormatUint(to.Sequence, 10),
	}}
	if err := b.checkpoints.UpdateMeta(ctx, name.String(), meta); err != nil {
		return fmt.Errorf("move checkpoint %v: %w", name, err)
	}
	return nil
}

// LoadCheckpoint reads a checkpoint object: load gets its bytes and returns what they say. Its position is the latest at
// which it holds.
func (b *Bus) LoadCheckpoint(ctx context.Context, name CheckpointName, load func(io.Reader) (*event.Checkpoint, error)) (*event.Checkpoint, error) {
	object, err := b.openObject(ctx, CheckpointBucket, name.String())
	if err != nil {
		return nil, fmt.Errorf("open checkpoint %v: %w", name, err)
	}
	defer object.Close()
	cp, err := load(object)
	if err != nil {
		return nil, fmt.Errorf("load checkpoint %v: %w", name, err)
	}
	if moved, ok := movedTo(object.info.Metadata); ok {
		cp.Position = moved
	}
	return cp, nil
}

func movedTo(meta map[string]string) (event.Position, bool) {
	created, err := strconv.ParseInt(meta[metaCreated], 10, 64)
	if err != nil {
		return event.Position{}, false
	}
	sequence, err := strconv.ParseUint(meta[metaSequence], 10, 64)
	if err != nil {
		return event.Position{}, false
	}
	return event.Position{Stream: meta[metaStream], Created: event.Time(created), Sequence: sequence}, true
}
