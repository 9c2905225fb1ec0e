package main

import (
	"context"
	"errors"
	"runtime"
	"slices"
	"time"

	"kvstrata/event"
	"kvstrata/indexer/prefix"
)

// newIndex returns an index of sources that have said that they are live, and do not become stale during a run.
func newIndex(sources int) *prefix.Index {
	cfg := prefix.DefaultConfig()
	cfg.StaleAfter = 24 * time.Hour
	x := prefix.New(cfg)
	for i := range sources {
		x.Tell(&event.Status{
			Source: engine(i), Epoch: 1, Fence: 1, State: event.StateLive, Copies: event.CopiesCounted,
		})
	}
	return x
}

// closedLoop applies all writes, one after another by one goroutine, and returns block operations a second.
func closedLoop(x *prefix.Index, c *corpus) (float64, error) {
	began := time.Now()
	for i := range c.writes {
		if _, err := x.Apply(context.Background(), &c.writes[i].message); err != nil {
			return 0, err
		}
	}
	return float64(c.storedBlocks+c.removedBlocks) / time.Since(began).Seconds(), nil
}

// timedRun is one run of work 1 in a window.
type timedRun struct {
	KeptUp, GeneratorValid     bool
	BlockOps, LogicalOps       float64 // a second, until the last query or write was done
	LookupP50, LookupP99       float64 // µs of service
	ScheduledP50, ScheduledP99 float64 // µs from deadline to answer
	AppliedP99                 float64 // µs from deadline to applied
	DrainMillis                float64 // from the window's end until the last was done
}

// deadlineDriven issues queries and writes at fixed times, one goroutine each: whoever is late starts at once. Queries stand
// before writes of the same deadline, as they were prepared.
func deadlineDriven(x *prefix.Index, c *corpus, window time.Duration) (*timedRun, error) {
	scale := float64(window.Nanoseconds()) / float64(c.span)
	service, answered := make([]uint32, len(c.queries)), make([]uint32, len(c.queries))
	applied := make([]uint32, len(c.writes))
	runtime.GC()
	began := time.Now()
	var readEnd, writeEnd time.Duration
	var readErr, writeErr error
	done := make(chan struct{})
	go func() {
		defer close(done)
		r := x.NewReader()
		req := &prefix.Request{Model: model, BlockSize: blockSize}
		for i := range c.queries {
			q := &c.queries[i]
			deadline := time.Duration(float64(q.millis) * scale)
			start := waitUntil(began, deadline)
			req.Hashes = q.hashes
			if _, err := r.Scores(req); err != nil && !errors.Is(err, prefix.ErrUnknownModel) {
				readErr = err
				return
			}
			readEnd = time.Since(began)
			service[i], answered[i] = clamp(readEnd-start), clamp(readEnd-deadline)
		}
	}()
	for i := range c.writes {
		w := &c.writes[i]
		deadline := time.Duration(float64(w.millis) * scale)
		waitUntil(began, deadline)
		if _, writeErr = x.Apply(context.Background(), &w.message); writeErr != nil {
			break
		}
		writeEnd = time.Since(began)
		applied[i] = clamp(writeEnd - deadline)
	}
	<-done
	if err := errors.Join(readErr, writeErr); err != nil {
		return nil, err
	}
	total := max(readEnd, writeEnd)
	return &timedRun{
		// The issuers do the work themselves: that they were late means that they did not keep up, never that input was late.
		GeneratorValid: true, KeptUp: total <= window*110/100,
		BlockOps: float64(c.blockOps()) / total.Seconds(), LogicalOps: float64(c.logicalOps()) / total.Seconds(),
		LookupP50: micros(service, 0.5), LookupP99: micros(service, 0.99),
		ScheduledP50: micros(answered, 0.5), ScheduledP99: micros(answered, 0.99),
		AppliedP99: micros(applied, 0.99), DrainMillis: max(0, float64(total-window)/1e6),
	}, nil
}

// waitUntil waits for a moment after began, and returns when it was over. It sleeps where there is time, and spins at the end.
func waitUntil(began time.Time, at time.Duration) time.Duration {
	for {
		now := time.Since(began)
		if now >= at {
			return now
		}
		if at-now > 2*time.Millisecond {
			time.Sleep(at - now - time.Millisecond)
		}
	}
}

// clamp returns nanoseconds in 32 bits.
func clamp(d time.Duration) uint32 { return uint32(min(max(d, 0), 1<<32-1)) }

// micros returns a quantile of nanoseconds in µs; it sorts.
func micros(ns []uint32, q float64) float64 {
	if len(ns) == 0 {
		return 0
	}
	slices.Sort(ns)
	return float64(ns[int(q*float64(len(ns)-1))]) / 1000
}
