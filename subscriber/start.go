package subscriber

import (
	"context"
	"maps"
	"time"

	"kvstrata/bus"
	"kvstrata/event"
)

// start sets every source's watermarks, and returns the stream sequence to read from, in which stream.
func (c *Consumer) start(ctx context.Context) (from uint64, stream event.Position, err error) {
	clear(c.sources)
	c.late = 0
	r, remembers := c.sink.(Rememberer)
	var at event.Position
	var marks map[event.Source]event.Mark
	if remembers { // it may wait for long: the stream is looked at afterwards
		if at, marks, err = r.Resume(ctx); err != nil {
			return 0, stream, err
		}
	}
	if stream, err = c.bus.Position(ctx); err != nil {
		return 0, stream, err
	}
	first, err := c.bus.First(ctx)
	if err != nil {
		return 0, stream, err
	}
	c.cut, c.first = first > 1, first
	if remembers {
		return c.resume(at, marks, stream, first), stream, nil
	}
	from, err = c.restoreAll(ctx, stream, first)
	return from, stream, err
}

// resume goes on where a sink stood. Where the stream no longer holds what follows, every source is resynced.
func (c *Consumer) resume(at event.Position, marks map[event.Source]event.Mark, stream event.Position, first uint64) uint64 {
	from := at.Sequence + 1
	if !at.SameStream(stream) {
		from = 1
	}
	for source, m := range marks {
		if !c.cfg.wants(source) {
			continue
		}
		t := c.track(source)
		t.fence, t.epoch, t.started = m.Fence, m.Epoch, m.Started
		if t.started {
			t.next = m.Seq + 1
		}
		t.moved = !at.SameStream(stream)
		if from < first {
			c.startResync(t, "the stream no longer holds what follows")
		}
	}
	return max(from, first)
}

// restoreAll loads the newest checkpoint of every source, several at a time, and returns the stream sequence to read from. The
// sink answers for each as soon as it has it. Sources that are late are held until the feed gets their checkpoints.
func (c *Consumer) restoreAll(ctx context.Context, stream event.Position, first uint64) (uint64, error) {
	names, err := c.bus.Checkpoints(ctx)
	if err != nil {
		return 0, err
	}
	maps.DeleteFunc(names, func(s event.Source, _ []bus.CheckpointName) bool { return !c.cfg.wants(s) })
	for source, list := range names {
		c.restores.begin(source, list)
	}
	from := uint64(0)
	for len(names) > 0 {
		progress := time.NewTimer(c.cfg.LateAfter)
		select {
		case r := <-c.restores.done:
			progress.Stop()
			delete(names, r.source)
			at := uint64(1) // of a source without a checkpoint that can be loaded
			if r.cp != nil {
				t := c.track(r.source)
				at = t.begin(r.cp, stream)
				if at < first {
					c.startResync(t, "the stream no longer holds what follows")
				}
			}
			if from == 0 || at < from {
				from = at
			}
		case <-progress.C:
			for source := range names {
				t := c.track(source)
				t.resync, t.late = true, true
			}
			c.late = len(names)
			c.log.Warn("checkpoints are late; going on without their sources", "sources", c.late)
			clear(names)
		case <-ctx.Done():
			progress.Stop()
			return 0, ctx.Err()
		}
	}
	return max(from, 1), nil
}

// begin sets the watermarks to a checkpoint of the start, and returns the sequence behind it in the stream that is read.
func (t *track) begin(cp *event.Checkpoint, stream event.Position) uint64 {
	t.stand(cp)
	if t.moved = !cp.Position.SameStream(stream); t.moved {
		return 1
	}
	return cp.Position.Sequence + 1
}

// restored goes on with a source that was made from a checkpoint. One of a resync was written when its publisher was ahead of
// everything read until then; one of the start must not stand before what was read.
func (c *Consumer) restored(ctx context.Context, r restored) {
	t := c.track(r.source)
	t.resync = false
	if t.late {
		t.late = false
		c.late--
		at := uint64(0)
		if r.cp != nil {
			at = t.begin(r.cp, c.at)
		}
		if at < max(c.from, c.first) {
			c.startResync(t, "its checkpoint of the start could not be had in time")
			return
		}
	} else {
		t.stand(r.cp)
		c.stats.resyncs.Inc()
	}
	c.log.Info("source is in step again", "source", t.source.String(), "seq", r.cp.Seq)
	c.release(ctx, t)
}
