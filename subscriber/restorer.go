package subscriber

import (
	"context"
	"io"
	"log/slog"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"kvstrata/bus"
	"kvstrata/event"
)

// restorer makes sources from checkpoints beside the feed: a large checkpoint, or an object store that is slow, holds up no
// source but the one that waits for it. The feed says who wants a checkpoint, and takes what became of it from done.
type restorer struct {
	cfg  ConsumerConfig
	bus  *bus.Bus
	sink Sink
	log  *slog.Logger

	done chan restored // taken by the feed; a worker waits until it is
	jobs chan job      // to the workers

	mu     sync.Mutex
	wanted map[event.Source]*want
	wake   chan struct{} // holds a token when there is something new to do
}

// restored is a source that was made from a checkpoint.
type restored struct {
	source event.Source
	cp     *event.Checkpoint // nil: none of those that were there at the start can be loaded
}

// want is what is known of a source that waits for a checkpoint.
type want struct {
	first   []bus.CheckpointName // at the start any of these will do, the newest first
	before  *bus.CheckpointName  // in a resync: the newest one when it was first looked for; nil before that
	askedAt time.Time
	triedAt time.Time // when one that came could not be loaded
	busy    bool      // with a worker
}

// job is one source's checkpoints, the first that can be loaded wins.
type job struct {
	source  event.Source
	names   []bus.CheckpointName
	isStart bool
}

// maxAsks is how many publishers are asked for a checkpoint at a time.
const maxAsks = 16

func newRestorer(c *Consumer) *restorer {
	return &restorer{
		cfg: c.cfg, bus: c.bus, sink: c.sink, log: c.log, done: make(chan restored), jobs: make(chan job),
		wanted: make(map[event.Source]*want), wake: make(chan struct{}, 1),
	}
}

// begin has a source made from the first of its checkpoints that can be loaded.
func (r *restorer) begin(source event.Source, names []bus.CheckpointName) {
	r.enter(source, &want{first: names})
}

// resync has a source made from a checkpoint that is written from now on.
func (r *restorer) resync(source event.Source) { r.enter(source, new(want)) }

func (r *restorer) enter(source event.Source, w *want) {
	r.mu.Lock()
	r.wanted[source] = w
	r.mu.Unlock()
	r.wakeUp()
}

func (r *restorer) wakeUp() {
	select {
	case r.wake <- struct{}{}:
	default: // it will look anyhow
	}
}

// run looks after those who want checkpoints until ctx ends. All that it started has ended when it returns.
func (r *restorer) run(ctx context.Context) error {
	group, ctx := errgroup.WithContext(ctx)
	for range r.cfg.Restores {
		group.Go(func() error { return r.work(ctx) })
	}
	group.Go(func() error { return r.dispatch(ctx) })
	return group.Wait()
}

func (r *restorer) dispatch(ctx context.Context) error {
	asks := new(errgroup.Group)
	asks.SetLimit(maxAsks)
	defer func() { _ = asks.Wait() }() // none fails
	tick := time.NewTicker(250 * time.Millisecond)
	defer tick.Stop()
	for {
		r.round(ctx, asks)
		select {
		case <-r.wake:
		case <-tick.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// round gives every source that has a checkpoint to load to the workers, and asks for those that are missing. It waits while
// all workers are busy.
func (r *restorer) round(ctx context.Context, asks *errgroup.Group) {
	jobs, waiting := r.idle()
	if len(waiting) > 0 {
		names, err := r.bus.Checkpoints(ctx)
		if err != nil {
			if ctx.Err() == nil {
				r.log.Warn("checkpoints can't be listed; trying again", "err", err)
			}
			names = nil
		} else {
			jobs = append(jobs, r.arrived(waiting, names)...)
		}
	}
	for _, j := range jobs {
		select {
		case r.jobs <- j:
		case <-ctx.Done():
			return
		}
	}
	for _, source := range r.due(waiting) {
		asks.Go(func() error {
			attempt, cancel := context.WithTimeout(ctx, 200*time.Millisecond)
			defer cancel()
			if err := r.bus.RequestCheckpoint(attempt, source); err != nil && ctx.Err() == nil {
				r.log.Warn("nobody answers the request for a checkpoint", "source", source.String(), "err", err)
			}
			return nil
		})
	}
}

// idle returns the jobs of sources at the start, and the sources that wait for a new checkpoint.
func (r *restorer) idle() (jobs []job, waiting []event.Source) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for source, w := range r.wanted {
		switch {
		case w.busy:
		case w.first != nil:
			w.busy = true
			jobs = append(jobs, job{source: source, names: w.first, isStart: true})
		default:
			waiting = append(waiting, source)
		}
	}
	return jobs, waiting
}

// arrived returns the jobs of those whose checkpoint was written after they began to wait.
func (r *restorer) arrived(waiting []event.Source, names map[event.Source][]bus.CheckpointName) (jobs []job) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, source := range waiting {
		w := r.wanted[source]
		var newest bus.CheckpointName
		if list := names[source]; len(list) > 0 {
			newest = list[0]
		}
		if w.before == nil { // an answer could not be told from what was there
			w.before = &newest
		}
		if newest.Compare(*w.before) > 0 && time.Since(w.triedAt) >= r.cfg.ResyncRetry {
			w.busy = true
			jobs = append(jobs, job{source: source, names: []bus.CheckpointName{newest}})
		}
	}
	return jobs
}

// due returns those whose publishers are to be asked now.
func (r *restorer) due(waiting []event.Source) (due []event.Source) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, source := range waiting {
		w := r.wanted[source]
		if w == nil || w.busy || w.before == nil || time.Since(w.askedAt) < r.cfg.ResyncRetry {
			continue
		}
		w.askedAt = time.Now()
		due = append(due, source)
	}
	return due
}

// work loads checkpoints.
func (r *restorer) work(ctx context.Context) error {
	for {
		var j job
		select {
		case j = <-r.jobs:
		case <-ctx.Done():
			return ctx.Err()
		}
		cp := r.load(ctx, j)
		if cp == nil && !j.isStart {
			r.mu.Lock()
			w := r.wanted[j.source]
			w.busy, w.triedAt = false, time.Now()
			r.mu.Unlock()
			continue
		}
		r.mu.Lock()
		delete(r.wanted, j.source)
		r.mu.Unlock()
		select {
		case r.done <- restored{source: j.source, cp: cp}:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// load hands the sink the first checkpoint that can be read.
func (r *restorer) load(ctx context.Context, j job) *event.Checkpoint {
	for _, name := range j.names {
		cp, err := r.bus.LoadCheckpoint(ctx, name, func(object io.Reader) (*event.Checkpoint, error) {
			return r.sink.Restore(ctx, object)
		})
		if err == nil {
			return cp
		}
		if ctx.Err() != nil {
			return nil
		}
		r.log.Warn("checkpoint can't be loaded; trying another", "checkpoint", name, "err", err)
	}
	return nil
}
