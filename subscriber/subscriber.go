// Package subscriber stands on both sides of the bus. [Subscriber] hears engines' ZeroMQ streams and turns each into
// ordered, judged and hashed batches; [Consumer] reads those batches off NATS and hands them to whoever keeps something
// of them: an index, a history, a dashboard.
package subscriber

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/pebbe/zmq4"
	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"

	"kvstrata/bus"
	"kvstrata/curve"
	"kvstrata/event"
	"kvstrata/event/resident"
	"kvstrata/subscriber/recovery"
)

// Config says what a subscriber does with every engine's events.
type Config struct {
	HashKey         string // keyed prefix hashes; empty = the public scheme
	KeepTokens      bool   // prompt text travels on
	AllowInvertible bool   // public prefix hashes also for blocks under 16 tokens
	Judge           resident.Config
	Recovery        recovery.Config
	MaxAdded        int // engines that Add may bring beside those given to New, at a time
}

// DefaultConfig returns a configuration that lets no prompt text through.
func DefaultConfig() Config {
	return Config{Judge: resident.DefaultConfig(), Recovery: recovery.DefaultConfig(), MaxAdded: 1024}
}

// Stream is what the subscriber needs of one source's road onto the bus: package publisher's Stream.
type Stream interface {
	// Publish appends a judged batch; it may wait while the bus is slow, up to a bound.
	Publish(ctx context.Context, epoch event.Epoch, b *event.Batch, digest event.Digest)
	// Status publishes a status message behind the batches.
	Status(st *event.Status) error
	// Settle waits until everything so far is stored, and tells where.
	Settle(ctx context.Context) (event.Position, error)
	// CheckpointDue and Checkpoint are for the source's checkpoints.
	CheckpointDue(now time.Time, entries uint64) bool
	Checkpoint(cp *event.Checkpoint, snap *resident.Snapshot)
	// Run sends until ctx ends.
	Run(ctx context.Context) error
}

// OpenStream makes the road of one source, published under a fence.
type OpenStream func(source event.Source, fence event.Fence) Stream

// Subscriber hears engines.
type Subscriber struct {
	cfg    Config
	bus    *bus.Bus
	open   OpenStream
	log    *slog.Logger
	holder string

	mu      sync.Mutex
	engines []*engine     // those given to New first
	fixed   int           // of these those given to New
	spawn   func(*engine) // runs an engine; nil while Run does not
}

// New returns a subscriber of engines. Nothing is dialled before Run runs.
func New(cfg Config, engines []EngineConfig, b *bus.Bus, open OpenStream, log *slog.Logger, reg prometheus.Registerer) (*Subscriber, error) {
	if err := UniqueSources(engines); err != nil {
		return nil, err
	}
	host, err := os.Hostname()
	if err != nil {
		host = "unknown"
	}
	s := &Subscriber{
		cfg: cfg, bus: b, open: open, log: log, holder: fmt.Sprintf("%s/%d", host, os.Getpid()),
	}
	for i := range engines {
		e, err := s.checked(&engines[i])
		if err != nil {
			return nil, err
		}
		s.engines = append(s.engines, e)
	}
	s.fixed = len(s.engines)
	if reg != nil {
		if err := reg.Register(newEngineCollector(s)); err != nil {
			return nil, fmt.Errorf("register subscriber metrics: %w", err)
		}
	}
	return s, nil
}

// checked returns the engine of a configuration that can be used.
func (s *Subscriber) checked(cfg *EngineConfig) (*engine, error) {
	if cfg.Curve != "" {
		// Every session reads them anew: they may be replaced.
		if _, err := curve.ReadSubscriber(cfg.Curve); err != nil {
			return nil, fmt.Errorf("engine %v: %w", cfg.Source, err)
		}
	}
	if err := checkHashing(cfg); err != nil {
		return nil, fmt.Errorf("engine %v: %w", cfg.Source, err)
	}
	return newEngine(s, *cfg), nil
}

// Run hears all engines until ctx ends. None waits for another: each has its own goroutine, sockets, lease and stream.
func (s *Subscriber) Run(ctx context.Context) error {
	zctx, err := zmq4.NewContext()
	if err != nil {
		return fmt.Errorf("make ZeroMQ context: %w", err)
	}
	if err := zctx.SetMaxSockets(4*(s.fixed+s.cfg.MaxAdded) + 16); err != nil {
		return fmt.Errorf("set ZeroMQ's socket limit: %w", err)
	}
	group, ctx := errgroup.WithContext(ctx)
	spawn := func(e *engine) {
		group.Go(func() error {
			defer s.forget(e)
			stay, stop := context.WithCancel(ctx)
			defer stop()
			defer context.AfterFunc(e.removal, stop)()
			return e.run(ctx, stay, zctx)
		})
	}
	s.mu.Lock()
	s.spawn = spawn
	for _, e := range s.engines {
		spawn(e)
	}
	s.mu.Unlock()
	group.Go(func() error { // so that the group lasts as long as engines may be added to it
		<-ctx.Done()
		s.mu.Lock()
		s.spawn = nil
		s.mu.Unlock()
		return nil
	})
	return errors.Join(group.Wait(), zctx.Term())
}

// Ready reports whether the session of every engine that was given to New has begun: its lease is held, and its past is
// loaded. Those that were added while it runs are not waited for.
func (s *Subscriber) Ready() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	ready := 0
	for _, e := range s.engines {
		if !e.added && e.wasReady.Load() {
			ready++
		}
	}
	return ready == s.fixed
}

// all returns the engines of this moment.
func (s *Subscriber) all() []*engine {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.engines)
}
