package sim

import (
	"context"
	"fmt"
	"iter"
	"time"

	"kvstrata/event"

	"golang.org/x/sync/errgroup"
)

// drive runs the engines in time, each in a goroutine of its own, with as many requests at once as come.
func (f *Fleet) drive(ctx context.Context, arrivals iter.Seq2[Arrival, error]) error {
	group, ctx := errgroup.WithContext(ctx)
	for _, members := range [][]*member{f.prefill, f.decode} {
		for _, m := range members {
			group.Go(func() error { return f.steps(ctx, m) })
		}
	}
	group.Go(func() error { return f.arrive(ctx, arrivals) })
	return group.Wait()
}

// arrive submits every request when it is due.
func (f *Fleet) arrive(ctx context.Context, arrivals iter.Seq2[Arrival, error]) error {
	defer f.settled()
	for a, err := range arrivals {
		if err != nil {
			return fmt.Errorf("read arrivals: %w", err)
		}
		if !f.sleepUntil(ctx, f.start+event.Time(a.At)) {
			return nil
		}
		to, first, next := f.route(&a)
		f.submit(to, first, next)
	}
	return nil
}

// submit gives a request to an engine and wakes it. The caller is itself something in flight, so that the run cannot
// end in between.
func (f *Fleet) submit(m *member, r Request, next handover) {
	f.mu.Lock()
	f.pending++
	f.mu.Unlock()
	m.mu.Lock()
	err := m.engine.Submit(r)
	if err == nil && next.to != nil {
		m.next[r.ID] = next
	}
	m.mu.Unlock()
	if err != nil {
		f.settled() // refused, and counted by the engine
		return
	}
	select {
	case m.wake <- struct{}{}:
	default:
	}
}

// settled takes one off what is in flight; the last ends the run.
func (f *Fleet) settled() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.pending--; f.pending == 0 {
		close(f.done)
	}
}

// steps runs one engine until the run is over. What a step finished counts, and is handed on, when its time has passed.
func (f *Fleet) steps(ctx context.Context, m *member) error {
	for {
		now := f.now()
		m.mu.Lock()
		progress, err := m.engine.Step(now)
		m.mu.Unlock()
		if err != nil {
			return fmt.Errorf("step engine %s: %w", m.engine.Name(), err)
		}
		if !progress.Stepped() {
			select {
			case <-m.wake:
				continue
			case <-f.done:
			case <-ctx.Done():
			}
			return nil
		}
		took := f.cfg.StepTime + time.Duration(progress.Tokens)*f.cfg.TokenTime
		if !f.sleepUntil(ctx, now+event.Time(took)) {
			return nil
		}
		for _, r := range progress.Finished {
			f.handOn(m, r.ID)
		}
	}
}

// handOn sends a request that a member has finished to whoever comes next, if anybody does.
func (f *Fleet) handOn(m *member, id string) {
	m.mu.Lock()
	next := m.next[id]
	delete(m.next, id)
	m.mu.Unlock()
	if next.to != nil {
		f.submit(next.to, next.request, handover{})
	}
	f.settled()
}

// now returns what the engines' clocks show.
func (f *Fleet) now() event.Time {
	return f.start + event.Time(float64(time.Since(f.began))*f.cfg.Speed)
}

// sleepUntil waits until the engines' clocks show t; it returns false when ctx ended first.
func (f *Fleet) sleepUntil(ctx context.Context, t event.Time) bool {
	wait := time.Duration(float64(t-f.now()) / f.cfg.Speed)
	if wait <= 0 {
		return ctx.Err() == nil
	}
	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}
