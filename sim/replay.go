package sim

import (
	"context"
	"fmt"
	"iter"
	"time"

	"kvstrata/event"
)

// replay runs one request after another, each to its end before the next is looked up.
//
// Each engine has a virtual clock: a request begins when it arrives, or when the one before it ended, and its steps take
// their time. A request has an engine to itself here, which a real one would share among MaxRunning: so each step is
// charged that share of StepTime, lest the clock run hours behind the trace.
func (f *Fleet) replay(ctx context.Context, arrivals iter.Seq2[Arrival, error]) error {
	for a, err := range arrivals {
		if err != nil {
			return fmt.Errorf("read arrivals: %w", err)
		}
		if ctx.Err() != nil {
			return nil
		}
		to, first, next := f.route(&a)
		answer, end, ok, err := f.finish(ctx, to, first, f.clock.Start+event.Time(a.At))
		if ok && next.to != nil {
			next.request.Params = answer.Params
			_, _, _, err = f.finish(ctx, next.to, next.request, end)
		}
		if err != nil {
			return err
		}
	}
	for _, members := range [][]*member{f.prefill, f.decode} {
		for _, m := range members {
			if err := m.host.drain(ctx, func() event.Time { return max(m.now, f.clock.Start) }); err != nil {
				return err
			}
		}
	}
	return nil
}

// finish runs a request to its end and returns it as it was answered and when that was, or false when the engine refuses
// it or ctx ends first.
func (f *Fleet) finish(ctx context.Context, m *member, r Request, at event.Time) (answer Request, end event.Time, ok bool, err error) {
	m.host.mu.Lock()
	defer m.host.mu.Unlock()
	engine := m.host.engine
	if engine.Submit(r) != nil {
		return r, 0, false, nil
	}
	m.now = max(m.now, at)
	share := f.cfg.StepTime / time.Duration(engine.cfg.MaxRunning)
	for engine.Busy() {
		progress, err := engine.Step(m.now)
		if err != nil {
			return r, 0, false, fmt.Errorf("step engine %s: %w", engine.Name(), err)
		}
		for i := range progress.Finished {
			answer = progress.Finished[i]
		}
		if !progress.Stepped() && !m.host.idle(ctx, true) { // a connector is waited for, in real time
			return r, 0, false, nil
		}
		m.now += event.Time(share + time.Duration(progress.Tokens)*f.cfg.TokenTime)
	}
	if engine.Pending() { // what the connector's workers are to know of the request's end
		if _, err := engine.Step(m.now); err != nil {
			return r, 0, false, fmt.Errorf("step engine %s: %w", engine.Name(), err)
		}
	}
	return answer, m.now, true, nil
}
