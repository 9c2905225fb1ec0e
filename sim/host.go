package sim

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"kvstrata/event"
)

// Server serves requests with an engine, here or in another process.
type Server interface {
	Name() string
	// Do serves one request and returns it as the engine answered it: with the parameters for whoever comes next. It may be
	// called many times at once. A request that the engine refuses is an error.
	Do(ctx context.Context, r Request) (Request, error)
}

// Host runs one engine in time, step after step, with as many requests at once as come.
type Host struct {
	engine *Engine
	steps  FleetConfig
	wake   chan struct{} // holds one token when there may be new work

	mu      sync.Mutex // guards the engine and what follows
	waiting map[string]chan<- Request
	ended   error // set once Run has returned
}

var _ Server = (*Host)(nil)

// errHostEnded is the answer to a request whose host has stopped.
var errHostEnded = errors.New("the engine has stopped")

// NewHost returns a host of an engine, which belongs to it from then on. Of the configuration it takes how long steps last.
func NewHost(cfg FleetConfig, e *Engine) *Host {
	return &Host{engine: e, steps: cfg, wake: make(chan struct{}, 1), waiting: make(map[string]chan<- Request)}
}

// Name returns the engine's name.
func (h *Host) Name() string { return h.engine.Name() }

// Do submits a request and waits until its last step's time has passed.
func (h *Host) Do(ctx context.Context, r Request) (Request, error) {
	done := make(chan Request, 1)
	h.mu.Lock()
	err := h.ended
	if _, waits := h.waiting[r.ID]; err == nil && waits {
		err = ErrDuplicateID // its last step is computed, and the time of that not over
	}
	if err == nil {
		err = h.engine.Submit(r)
	}
	if err == nil {
		h.waiting[r.ID] = done
	}
	h.mu.Unlock()
	if err != nil {
		return r, err
	}
	select {
	case h.wake <- struct{}{}:
	default:
	}
	select {
	case answer, ok := <-done:
		if !ok {
			return r, errHostEnded
		}
		return answer, nil
	case <-ctx.Done():
		return r, ctx.Err()
	}
}

// pollTransfers is how often an engine steps that has nothing to compute, while its connector waits for something.
const pollTransfers = time.Millisecond

// Run steps the engine until ctx ends.
func (h *Host) Run(ctx context.Context, clock Clock) (err error) {
	defer func() {
		h.mu.Lock()
		defer h.mu.Unlock()
		h.ended = errHostEnded
		for id, done := range h.waiting {
			close(done)
			delete(h.waiting, id)
		}
	}()
	for {
		now := clock.Now()
		progress, pending, err := h.step(now)
		if err != nil {
			return fmt.Errorf("step engine %s: %w", h.engine.Name(), err)
		}
		if !progress.Stepped() {
			if !h.idle(ctx, pending) {
				return nil
			}
			continue
		}
		took := h.steps.StepTime + time.Duration(progress.Tokens)*h.steps.TokenTime
		if progress.Scheduled == 0 { // loads have ended: what follows them is another step's
			took = 0
		}
		if !clock.SleepUntil(ctx, now+event.Time(took)) {
			return nil
		}
		h.answer(progress.Finished)
	}
}

// drainTime is how long an engine goes on after the last request for what its connector has under way.
const drainTime = 10 * time.Second

// drain steps the engine while its connector has something under way.
func (h *Host) drain(ctx context.Context, now func() event.Time) error {
	for deadline := time.Now().Add(drainTime); time.Now().Before(deadline) && ctx.Err() == nil; {
		if _, _, err := h.step(now()); err != nil {
			return fmt.Errorf("step engine %s: %w", h.engine.Name(), err)
		}
		h.mu.Lock()
		pending := h.engine.Pending()
		h.mu.Unlock()
		if !pending || !h.idle(ctx, true) {
			return nil
		}
	}
	return nil
}

// step runs one step, and reports whether more must follow even if it did nothing: a connector's answer, or a transfer, is
// waited for.
func (h *Host) step(now event.Time) (progress Progress, pending bool, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	progress, err = h.engine.Step(now)
	return progress, h.engine.Pending() || h.engine.Busy(), err
}

// idle waits for work; it returns false when ctx ended first.
func (h *Host) idle(ctx context.Context, pending bool) bool {
	var poll <-chan time.Time
	if pending {
		timer := time.NewTimer(pollTransfers)
		defer timer.Stop()
		poll = timer.C
	}
	select {
	case <-h.wake:
	case <-poll:
	case <-ctx.Done():
		return false
	}
	return true
}

func (h *Host) answer(finished []Request) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, r := range finished {
		h.waiting[r.ID] <- r // has room for one
		delete(h.waiting, r.ID)
	}
}

// View calls read while the engine stands still.
func (h *Host) View(read func(*Engine)) {
	h.mu.Lock()
	defer h.mu.Unlock()
	read(h.engine)
}
