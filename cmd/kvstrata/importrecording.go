package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"path/filepath"
	"time"

	"golang.org/x/sync/errgroup"

	"kvstrata/event"
	"kvstrata/event/resident"
	"kvstrata/indexer/history"
	"kvstrata/indexer/history/archive"
	"kvstrata/subscriber"
)

// recording is what a first look at a recording found.
type recording struct {
	form    subscriber.RecordingForm
	lines   int
	sources []event.Source // in order of appearance
	workers map[event.Source]string
	replays bool          // answers of replays are among the lines
	since   time.Duration // of the last line, since Dynamo's recorder began
	base    time.Time     // what lines without a time of their own count from
	guessed bool          // base, by the age of the file
	timed   bool          // a line told its time
}

// maxRecorded bounds the engines of one recording.
const maxRecorded = 1024

// eachHeard hands over the lines of a recording.
func (c *importCmd) eachHeard(f *importFile, bad *badLines, yield func(*subscriber.Heard) error) (err error) {
	in, err := f.open()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, in.Close()) }()
	lines := archive.NewLines(in)
	form := subscriber.NoRecording
	for {
		line, err := lines.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		var h subscriber.Heard
		if err == nil {
			if h, err = subscriber.ReadHeard(line); err == nil && form != subscriber.NoRecording && h.Form != form {
				err = fmt.Errorf("a line of %v in a recording of %v", h.Form, form)
			}
			if err != nil {
				err = &archive.BadRow{Line: lines.Number(), Err: err}
			}
		}
		if errors.As(err, new(*archive.BadRow)) {
			if err := bad.take(err); err != nil {
				return err
			}
			continue
		}
		if err != nil {
			return fmt.Errorf("line %d: %w", lines.Number()+1, err)
		}
		form = h.Form
		if err := yield(&h); err != nil {
			return err
		}
	}
}

// look reads a recording to see what it holds, and that all of it can be read.
func (c *importCmd) look(ctx context.Context, f *importFile, bad *badLines) (*recording, error) {
	r := &recording{workers: make(map[event.Source]string)}
	err := c.eachHeard(f, bad, func(h *subscriber.Heard) error {
		r.form = h.Form
		r.lines++
		r.since = max(r.since, h.Since)
		r.replays = r.replays || h.Kind == subscriber.HeardReplay || h.Kind == subscriber.HeardReplayEnd
		r.timed = r.timed || plausible(h.At)
		s := c.sourceOf(f, h)
		worker, known := r.workers[s]
		switch {
		case !known && len(r.sources) == maxRecorded:
			return fmt.Errorf("more than %d engines", maxRecorded)
		case !known:
			r.workers[s] = h.Worker
			r.sources = append(r.sources, s)
		case worker != h.Worker:
			return usagef("--instance %s: the recording has workers %s and %s; leave it out, and each is worker-ID", c.Instance, worker, h.Worker)
		}
		return ctx.Err()
	})
	if err != nil {
		return nil, err
	}
	if r.lines == 0 {
		return nil, errors.New("no line of it can be read")
	}
	if r.form == subscriber.DynamoForm && c.Block == 0 {
		return nil, usagef("--block: Dynamo's events do not tell how many tokens a block has; name it")
	}
	if r.base = c.began; r.base.IsZero() {
		r.base, r.guessed = f.modified.Add(-r.since), r.form == subscriber.DynamoForm || !r.timed
	}
	return r, nil
}

// importRecording lets the decoder, the recovery and the judge of a subscriber read what an engine sent, and history's writer keep
// what they make of it, at the recording's times.
func (c *importCmd) importRecording(a *app, cfg history.Config, loader *history.Loader, f *importFile) (of span, err error) {
	bad := &badLines{skip: c.SkipBad}
	r, err := c.look(a.ctx, f, bad)
	if err != nil {
		return of, err
	}
	known, err := loader.Known(a.ctx, r.sources)
	if err != nil {
		return of, err
	}
	if len(known) > 0 {
		return of, usagef("%s has a history of %v already: give the recording's engine another name with --instance, or import into a history of its own",
			c.place(), known[0])
	}
	if err := loader.Begin(a.ctx, f.sum); err != nil {
		return of, err
	}
	k, err := c.keep(a, cfg, f, r)
	if err == nil {
		err = loader.Finish(a.ctx, f.sum)
	}
	if err != nil {
		return of, err
	}
	fmt.Fprintf(a.stdout, "%s: %v, %d lines\n", f.path, r.form, r.lines)
	if r.guessed {
		fmt.Fprintf(a.stdout, "  it tells no time of day: its last line is taken to be as old as the file; --began names when it began\n")
	}
	for _, st := range k.told {
		l := &st.Ledger
		fmt.Fprintf(a.stdout, "  %v  %d batches, %d block operations; %d sequences lost, %d lines malformed, %d told twice; %v %s\n",
			st.Source, l.Receptions()-l.Duplicates-l.Malformed, k.blocks[st.Source], l.Lost, l.Malformed, l.Duplicates, st.State, st.Reason)
	}
	bad.print(a.stdout)
	return k.span, nil
}

// keeper hands the batches of a recording to history's writer.
type keeper struct {
	w      *history.Writer
	at     time.Time // of the line that is read
	span   span
	place  event.Position
	err    error // the first
	told   []*event.Status
	blocks map[event.Source]uint64
}

// keep imports a recording.
func (c *importCmd) keep(a *app, cfg history.Config, f *importFile, r *recording) (*keeper, error) {
	k := &keeper{
		at: r.base, blocks: make(map[event.Source]uint64),
		place: event.Position{Stream: history.ImportStream, Created: event.UnixTime(time.Now())},
	}
	cfg.FlushEvery = 200 * time.Millisecond
	cfg.Clock = func() time.Time { return k.at } // asked by this goroutine alone: of the rows that Tell makes
	var err error
	if k.w, err = history.NewWriter(cfg, a.log, nil); err != nil {
		return nil, err
	}
	group, ctx := errgroup.WithContext(a.ctx)
	writing, stop := context.WithCancel(ctx)
	defer stop()
	group.Go(func() error { return k.w.Run(writing) })
	group.Go(func() error {
		defer stop()
		if _, _, err := k.w.Resume(ctx); err != nil {
			return err
		}
		if err := k.read(ctx, c, f, r); err != nil {
			return err
		}
		return k.settle(ctx)
	})
	return k, group.Wait()
}

func (k *keeper) read(ctx context.Context, c *importCmd, f *importFile, r *recording) error {
	players := make(map[event.Source]*subscriber.Replayer)
	err := c.eachHeard(f, &badLines{skip: c.SkipBad}, func(h *subscriber.Heard) error {
		k.pass(h, r)
		s := c.sourceOf(f, h)
		p := players[s]
		if p == nil {
			var err error
			if p, err = c.player(k, f, r, s); err != nil {
				return err
			}
			players[s] = p
		}
		return errors.Join(p.Take(ctx, h, k.at), k.err, ctx.Err())
	})
	if err != nil {
		return err
	}
	for _, s := range r.sources {
		st, err := players[s].End(ctx, k.at)
		if err = errors.Join(err, k.err); err != nil {
			return err
		}
		k.told = append(k.told, st)
	}
	return nil
}

// pass lets time pass to a line's. It does not go back.
func (k *keeper) pass(h *subscriber.Heard, r *recording) {
	at := h.At
	if h.Form == subscriber.DynamoForm {
		at = r.base.Add(h.Since)
	}
	if plausible(at) && at.After(k.at) || k.span.first.IsZero() && plausible(at) {
		k.at = at
	}
	k.span.add(k.at)
}

// player is what reads the lines of one engine.
func (c *importCmd) player(k *keeper, f *importFile, r *recording, s event.Source) (*subscriber.Replayer, error) {
	cfg := edgeFlags{HashKey: c.HashKey, AllowInvertible: c.AllowInvertible}.subscriber()
	engine := subscriber.EngineConfig{
		Source: s, Endpoint: "recording of " + filepath.Base(f.path), Dialect: c.dialect, BlockSize: c.Block, PoolSize: c.Pool, Worker: r.workers[s],
	}
	switch {
	case r.form == subscriber.DynamoForm: // each store is told, and only the last copy's end
		engine.Dialect, engine.AsSet = subscriber.DialectDynamo, true
	case c.dialect == subscriber.DialectDynamo || c.dialect == subscriber.DialectMooncake:
		engine.AsSet = true
	}
	return subscriber.NewReplayer(cfg, engine, r.replays, &road{k: k, source: s}, slog.New(slog.DiscardHandler))
}

// settle waits until all is in the tables for good.
func (k *keeper) settle(ctx context.Context) error {
	k.w.Reached(k.place)
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for k.w.Committed() != k.place {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

// road is where a recorded source's batches go: to history, a message each, without a bus.
type road struct {
	subscriber.Stream
	k      *keeper
	source event.Source
}

// Publish hands on a batch.
func (r *road) Publish(ctx context.Context, epoch event.Epoch, b *event.Batch, digest event.Digest) {
	k := r.k
	if k.err != nil {
		return
	}
	k.place.Sequence++
	k.blocks[r.source] += uint64(b.Blocks())
	got, err := k.w.Apply(ctx, &event.Message{
		Source: r.source, Epoch: epoch, Fence: 1, Batches: []event.Batch{*b}, Digest: digest, HasDigest: true, Position: k.place,
		Stored: event.UnixTime(k.at),
	})
	if err == nil && got != digest {
		err = fmt.Errorf("keep batch %d of %v: the digest is %x, and %x was judged", b.First, r.source, got, digest)
	}
	k.err = err
	k.w.Reached(k.place)
}

// Status hands on what is told of the source.
func (r *road) Status(st *event.Status) error {
	st.Fence = 1
	r.k.w.Tell(st)
	return nil
}

// CheckpointDue and Checkpoint: a recording needs none.
func (*road) CheckpointDue(time.Time, uint64) bool { return false }

// Checkpoint keeps nothing.
func (*road) Checkpoint(*event.Checkpoint, *resident.Snapshot) {}
