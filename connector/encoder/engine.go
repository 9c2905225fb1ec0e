package encoder

import (
	"context"
	"fmt"

	"golang.org/x/sync/errgroup"

	"kvstrata/connector"
	"kvstrata/connector/device"
)

// Engine is a connector as an engine drives it: the scheduler's half and the workers of all ranks in one process, their
// outputs aggregated. One goroutine calls it.
type Engine struct {
	Scheduler Scheduler
	workers   []Worker
	sum       *connector.Aggregator
	outputs   []*connector.Output
}

// NewEngine makes both halves of a transport and registers each rank's caches.
func NewEngine(f *Factory, s Setup, ranks []Caches) (*Engine, error) {
	s.Ranks = len(ranks)
	e := &Engine{outputs: make([]*connector.Output, len(ranks)), sum: connector.NewAggregator(len(ranks), 0)}
	half, err := f.Scheduler(s)
	if err != nil {
		return nil, err
	}
	e.Scheduler = half
	handshakes := make([][]byte, 0, len(ranks))
	for rank, caches := range ranks {
		s.Rank = rank
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

// Step runs one step's hooks around encode, which runs the encoder and hands each output that it made to save, in every
// rank. Spans says where the items of this step's loads go. It returns what all ranks did, which the scheduler's half has been
// told of.
func (e *Engine) Step(ctx context.Context, s *Step, spans map[string]device.Span, finished []string, encode func(save func(Item, device.Span) error) error) (connector.Output, error) {
	meta := e.Scheduler.BuildMetadata(s)
	for _, w := range e.workers {
		w.Bind(meta)
		if err := w.StartLoad(ctx, spans); err != nil {
			return connector.Output{}, fmt.Errorf("start loads of items: %w", err)
		}
	}
	if encode != nil {
		if err := encode(e.save); err != nil {
			return connector.Output{}, err
		}
	}
	for i, w := range e.workers {
		e.outputs[i] = w.Collect(finished)
		w.Clear()
	}
	out := e.sum.Aggregate(e.outputs)
	e.Scheduler.UpdateOutput(&out)
	return out, nil
}

func (e *Engine) save(i Item, span device.Span) error {
	for rank, w := range e.workers {
		if err := w.Save(i, span); err != nil {
			return fmt.Errorf("rank %d: %w", rank, err)
		}
	}
	return nil
}

// Workers returns the ranks' halves.
func (e *Engine) Workers() []Worker { return e.workers }
