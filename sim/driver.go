package sim

import (
	"context"
	"errors"
	"fmt"
	"iter"

	"kvstrata/event"

	"golang.org/x/sync/errgroup"
)

// drive runs the engines that are here in time, each in a goroutine of its own, with as many requests at once as come.
func (f *Fleet) drive(ctx context.Context, arrivals iter.Seq2[Arrival, error]) error {
	group, ctx := errgroup.WithContext(ctx)
	hostCtx, stopHosts := context.WithCancel(ctx)
	for _, members := range [][]*member{f.prefill, f.decode} {
		for _, m := range members {
			if m.host != nil {
				group.Go(func() error {
					return errors.Join(m.host.Run(hostCtx, f.clock), m.host.drain(ctx, f.clock.Now))
				})
			}
		}
	}
	group.Go(func() error {
		defer stopHosts()
		return f.arrive(ctx, arrivals)
	})
	return group.Wait()
}

// arrive submits every request when it is due, and returns when the last is done.
func (f *Fleet) arrive(ctx context.Context, arrivals iter.Seq2[Arrival, error]) error {
	var requests errgroup.Group // its functions return nil
	defer requests.Wait()
	for a, err := range arrivals {
		if err != nil {
			return fmt.Errorf("read arrivals: %w", err)
		}
		if !f.clock.SleepUntil(ctx, f.clock.Start+event.Time(a.At)) {
			return nil
		}
		to, first, next := f.route(&a)
		requests.Go(func() error {
			f.serve(ctx, to, first, next)
			return nil
		})
	}
	return nil
}

// serve has a request prefilled and, where somebody comes next, decoded. What an engine refuses it counts itself.
func (f *Fleet) serve(ctx context.Context, to *member, first Request, next handover) {
	answer, err := to.server.Do(ctx, first)
	if err != nil || next.to == nil {
		return
	}
	next.request.Params = answer.Params
	_, _ = next.to.server.Do(ctx, next.request)
}
