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

	"github.com/nats-io/nats.go/jetstream"

	"kvstrata/event"
)

// CheckpointName names a checkpoint object: source/epoch/fence/sequence.
type CheckpointName struct {
	Source event.Source
	Epoch  event.Epoch
	Fence  event.Fence
	Seq    event.Seq
	// Write orders checkpoints that stand at the same sequence, for instance before the first batch of a life.
	Write uint64
}

func (n CheckpointName) String() string {
	return fmt.Sprintf("%s/%d/%d/%d/%d", n.Source.Tokens(), n.Epoch, n.Fence, n.Seq, n.Write)
}

// compare orders names: the higher fence judged later, whatever epoch it saw.
func (n CheckpointName) compare(other CheckpointName) int {
	for _, pair := range [][2]uint64{
		{uint64(n.Fence), uint64(other.Fence)}, {uint64(n.Epoch), uint64(other.Epoch)},
		{uint64(n.Seq), uint64(other.Seq)}, {n.Write, other.Write},
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
	name := CheckpointName{
		Source: cp.Source, Epoch: cp.Epoch, Fence: cp.Fence, Seq: cp.Seq, Write: uint64(cp.Written),
	}
	r, w := io.Pipe()
	go func() { w.CloseWithError(event.WriteCheckpoint(w, cp, entries)) }()
	_, err := b.checkpoints.Put(ctx, jetstream.ObjectMeta{Name: name.String()}, r)
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
		slices.SortFunc(list, func(x, y CheckpointName) int { return y.compare(x) })
	}
	return names, nil
}

// GetCheckpoint opens a checkpoint object; the caller closes it.
func (b *Bus) GetCheckpoint(ctx context.Context, name CheckpointName) (io.ReadCloser, error) {
	object, err := b.checkpoints.Get(ctx, name.String())
	if err != nil {
		return nil, fmt.Errorf("open checkpoint %v: %w", name, err)
	}
	return object, nil
}
