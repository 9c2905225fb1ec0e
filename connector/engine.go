package connector

import (
	"context"
	"fmt"

	"golang.org/x/sync/errgroup"
)

// Engine is a connector as an engine drives it: the scheduler's half and the workers of all ranks in one process, their
// outputs aggregated. What upstream spreads over scheduler, executor and model runner is here in the order that the hooks'
// contracts want. One goroutine calls it.
type Engine struct {
	Scheduler Scheduler
	workers   []Worker
	sum       *Aggregator
	outputs   []*Output
	out       Output // of the last step
}

// NewEngine makes both halves of a transport and registers each rank's caches.
func NewEngine(f *Factory, s Setup, ranks []Caches) (*Engine, error) {
	s.Ranks = len(ranks)
	e := &Engine{outputs: make([]*Output, len(ranks))}
	half, err := f.Scheduler(s)
	if err != nil {
		return nil, err
	}
	e.Scheduler = half
	handshakes := make([][]byte, 0, len(ranks))
	for rank, caches := range ranks {
		s.Rank, caches.Rank = rank, rank
		w, err := f.Worker(s)
		if err != nil {
			return nil, e.abandon(err)
		}
		if err := w.RegisterCaches(caches); err != nil {
			return nil, e.abandon(fmt.Errorf("rank %d: %w", rank, err))
		}
		e.workers = append(e.workers, w)
		h, err := w.Handshake()
		if err != nil {
			return nil, e.abandon(fmt.Errorf("rank %d: %w", rank, err))
		}
		handshakes = append(handshakes, h)
	}
	if err := half.SetHandshake(handshakes); err != nil {
		return nil, e.abandon(err)
	}
	e.sum = NewAggregator(len(ranks), half.FinishedCount())
	return e, nil
}

// abandon releases what the workers took, and returns why.
func (e *Engine) abandon(err error) error {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	_ = e.Run(ctx) // there was no life that could fail
	return err
}

// Run runs both halves until ctx ends.
func (e *Engine) Run(ctx context.Context) error {
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return e.Scheduler.Run(ctx) })
	for _, w := range e.workers {
		group.Go(func() error { return w.Run(ctx) })
	}
	return group.Wait()
}

// Step runs one step's hooks around compute, which computes the layers of what was scheduled. It returns what all ranks
// did, which the scheduler's half has been told of.
func (e *Engine) Step(ctx context.Context, s *Step, finished []string, compute func() error) (Output, error) {
	meta := e.Scheduler.BuildMetadata(s)
	for _, w := range e.workers {
		if len(s.Preempted) > 0 {
			if err := w.HandlePreemptions(ctx, s.Preempted); err != nil {
				return Output{}, err
			}
		}
		w.Bind(meta)
		if err := w.StartLoad(ctx); err != nil {
			return Output{}, fmt.Errorf("start loads: %w", err)
		}
	}
	if err := compute(); err != nil {
		return Output{}, err
	}
	for i, w := range e.workers {
		if err := w.WaitForSave(ctx); err != nil {
			return Output{}, fmt.Errorf("wait for saves: %w", err)
		}
		e.outputs[i] = w.Collect(finished)
		w.Clear()
	}
	e.out = e.sum.Aggregate(e.outputs)
	e.Scheduler.UpdateOutput(&e.out)
	return e.out, nil
}

// Workers returns the ranks' halves.
func (e *Engine) Workers() []Worker { return e.workers }
