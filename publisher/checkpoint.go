package publisher

import (
	"context"
	"fmt"
	"time"

	"kvstrata/bus"
	"kvstrata/event"
	"kvstrata/event/resident"
)

// minCheckpointOps is how many block operations at least lie between checkpoints that the clock did not ask for.
const minCheckpointOps = 100_000

type checkpointJob struct {
	cp   *event.Checkpoint
	snap *resident.Snapshot
	at   *message // holds the checkpoint's last batch; nil when nothing was sent in this life of the stream

	requested bool // by a consumer that waits for a new one

	done chan struct{} // instead of all that: closed when everything before it is written
}

// CheckpointDue reports whether it is time for a checkpoint, given how many entries it would have: so many operations at
// least lie between two, so that checkpoints cost no more than the events do.
func (s *Stream) CheckpointDue(now time.Time, entries uint64) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.due || now.Sub(s.checkpoint) >= s.cfg.CheckpointEvery || s.opsSince >= max(minCheckpointOps, entries)
}

// Checkpoint has a checkpoint written: of a snapshot taken after the last batch published. Fence and position are
// filled in here. While the one before it is still being written, it waits in line; a third replaces the second.
func (s *Stream) Checkpoint(cp *event.Checkpoint, snap *resident.Snapshot) {
	s.mu.Lock()
	s.flush()
	job := checkpointJob{cp: cp, snap: snap, at: s.newest, requested: s.due}
	s.due, s.checkpoint, s.opsSince = false, time.Now(), 0
	s.addDrops(&cp.Ledger)
	s.mu.Unlock()
	cp.Source, cp.Fence, cp.Digest, cp.Groups, cp.Fullest = s.source, s.fence, snap.Digest, snap.Groups, snap.Fullest
	cp.Written = event.UnixTime(time.Now())
	for {
		select {
		case s.request <- job:
			return
		default:
		}
		select {
		case older := <-s.request: // of no use any more
			older.snap.Release()
		default:
		}
	}
}

func (s *Stream) writeCheckpoints(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case job := <-s.request:
			if job.done != nil {
				close(job.done)
				continue
			}
			s.writeCheckpoint(ctx, job)
		}
	}
}

// drainCheckpoints waits until the checkpoints under way and in line are written.
func (s *Stream) drainCheckpoints(ctx context.Context) error {
	done := make(chan struct{})
	select {
	case s.request <- checkpointJob{done: done}:
	case <-ctx.Done():
		return fmt.Errorf("write last checkpoint of %v: %w", s.source, ctx.Err())
	}
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("write last checkpoint of %v: %w", s.source, ctx.Err())
	}
}

// writeCheckpoint writes a checkpoint once its last batch is stored. A failure is told and costs only the checkpoint.
func (s *Stream) writeCheckpoint(ctx context.Context, job checkpointJob) {
	defer job.snap.Release()
	if job.at != nil {
		select {
		case <-job.at.stored:
			job.cp.Position = job.at.position
		case <-ctx.Done():
			return
		}
	}
	s.mu.Lock()
	before := s.written
	s.mu.Unlock()
	if before != nil && !job.requested && sameStand(before, job.cp) {
		// Nothing but the position is new.
		if err := s.bus.MoveCheckpoint(ctx, bus.NameOf(before), job.cp.Position); err == nil {
			return
		}
	}
	job.cp.Entries = job.snap.Len
	err := s.bus.PutCheckpoint(ctx, job.cp, job.snap.Entries())
	s.mu.Lock()
	defer s.mu.Unlock()
	if err == nil {
		s.written = job.cp
		return
	}
	s.opsSince = minCheckpointOps / 2 // another try, but not at once
	if ctx.Err() == nil {
		s.log.Warn("checkpoint not written; restarts read further back", "err", err)
	}
}

// sameStand reports whether two checkpoints of one stream tell the same.
func sameStand(a, b *event.Checkpoint) bool {
	return a.Epoch == b.Epoch && a.Seq == b.Seq && a.Ledger.Started == b.Ledger.Started &&
		a.State == b.State && a.Digest == b.Digest
}
