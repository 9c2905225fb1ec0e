package main

import (
	"context"
	"fmt"
	"hash/fnv"
	"sync"
	"sync/atomic"
	"time"

	"kvstrata/sim"
)

// traffic sends conversations to the engines while it is on.
type traffic struct {
	engines []*engine
	config  sim.TrafficConfig
	slots   map[*engine]chan struct{}
	group   sync.WaitGroup

	served, failed atomic.Uint64

	mu sync.Mutex
	on chan struct{} // closed while it is on
}

// atOnce is how many requests one engine has at a time; more are left out, as when it stands still.
const atOnce = 24

func newTraffic(seed uint64, engines []*engine) *traffic {
	t := &traffic{engines: engines, config: sim.DefaultTrafficConfig(), slots: make(map[*engine]chan struct{}), on: make(chan struct{})}
	t.config.Seed, t.config.Rate, t.config.MaxPrompt, t.config.Chats = seed, 12, 4096, 48
	for _, e := range engines {
		t.slots[e] = make(chan struct{}, atOnce)
	}
	return t
}

// start lets it flow, until the function returned is called.
func (t *traffic) start() (stop func()) {
	t.mu.Lock()
	defer t.mu.Unlock()
	close(t.on)
	return func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		t.on = make(chan struct{})
	}
}

func (t *traffic) flowing() <-chan struct{} {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.on
}

// run sends until ctx ends.
func (t *traffic) run(ctx context.Context) error {
	generator, err := sim.NewTraffic(t.config)
	if err != nil {
		return err
	}
	defer t.group.Wait()
	before := time.Duration(0)
	for a, err := range generator.Arrivals() {
		if err != nil {
			return err
		}
		sleep(ctx, (a.At-before)/speed)
		before = a.At
		select {
		case <-t.flowing():
		case <-ctx.Done():
			return nil
		}
		session := fnv.New32a()
		_, _ = session.Write([]byte(a.Request.Session))
		t.send(ctx, t.engines[session.Sum32()%uint32(len(t.engines))], &a.Request)
	}
	return nil
}

func (t *traffic) send(ctx context.Context, e *engine, r *sim.Request) {
	select {
	case t.slots[e] <- struct{}{}:
	default:
		t.failed.Add(1)
		return
	}
	t.group.Go(func() {
		defer func() { <-t.slots[e] }()
		if e.serve(ctx, r) == nil {
			t.served.Add(1)
		} else {
			t.failed.Add(1)
		}
	})
}

// last has each engine serve something, so that what was said last is heard: everything after it is known to be missing.
func (t *traffic) last(ctx context.Context, round int) error {
	for _, e := range t.engines {
		for n := range 3 {
			r := sim.Request{ID: fmt.Sprintf("last-%d-%d", round, n), Output: 40}
			for i := range 200 {
				r.Prompt = append(r.Prompt, uint32(1000*round+100*n+i))
			}
			if err := insist(ctx, func() error { return e.serve(ctx, &r) }); err != nil {
				return fmt.Errorf("a last request of %s: %w", e.name, err)
			}
		}
	}
	return nil
}

// insist tries until something works, or ctx ends.
func insist(ctx context.Context, try func() error) error {
	for {
		err := try()
		if err == nil || ctx.Err() != nil {
			return err
		}
		sleep(ctx, 100*time.Millisecond)
	}
}
