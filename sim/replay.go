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
		end, ok, err := f.finish(to, first, f.start+event.Time(a.At))
		if ok && next.to != nil {
			_, _, err = f.finish(next.to, next.request, end)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// finish runs a request to its end and returns when that was, or false when the engine refuses it.
func (f *Fleet) finish(m *member, r Request, at event.Time) (end event.Time, ok bool, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.engine.Submit(r) != nil {
		return 0, false, nil
	}
	m.now = max(m.now, at)
	share := f.cfg.StepTime / time.Duration(m.engine.cfg.MaxRunning)
	for m.engine.Busy() {
		progress, err := m.engine.Step(m.now)
		if err != nil {
			return 0, false, fmt.Errorf("step engine %s: %w", m.engine.Name(), err)
		}
		m.now += event.Time(share + time.Duration(progress.Tokens)*f.cfg.TokenTime)
	}
	return m.now, true, nil
}
