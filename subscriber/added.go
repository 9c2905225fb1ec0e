package subscriber

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"kvstrata/event"
)

// What Add and Remove refuse.
var (
	ErrFollowed    = errors.New("is followed already")
	ErrNotFollowed = errors.New("is not followed")
	ErrTooMany     = errors.New("too many engines were added; remove some, or give them with --engine")
	ErrConfigured  = errors.New("was given with --engine or --engines; it can only be left out there")
)

// Add follows one more engine, at once while Run runs, and otherwise from its begin on. It lasts until Remove, or until the
// process ends: nobody writes it down.
func (s *Subscriber) Add(cfg EngineConfig) error {
	e, err := s.checked(&cfg)
	if err != nil {
		return err
	}
	e.added = true
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.find(cfg.Source) != nil {
		return fmt.Errorf("engine %v %w", cfg.Source, ErrFollowed)
	}
	if len(s.engines)-s.fixed >= s.cfg.MaxAdded {
		return fmt.Errorf("engine %v: %w", cfg.Source, ErrTooMany)
	}
	s.engines = append(s.engines, e)
	if s.spawn != nil {
		s.spawn(e)
	}
	return nil
}

// Remove ends following an engine that Add brought: the life that was heard is over, its blocks are forgotten, and the
// source is told as withdrawn. It returns when that is done, after which Add takes the same source again; or when ctx
// ends, and then it is done a little later.
func (s *Subscriber) Remove(ctx context.Context, source event.Source) error {
	s.mu.Lock()
	e := s.find(source)
	switch {
	case e == nil:
		s.mu.Unlock()
		return fmt.Errorf("engine %v %w", source, ErrNotFollowed)
	case !e.added:
		s.mu.Unlock()
		return fmt.Errorf("engine %v %w", source, ErrConfigured)
	}
	e.remove()
	if s.spawn == nil { // it does not run, and nothing is to be ended
		s.engines = slices.DeleteFunc(s.engines, func(o *engine) bool { return o == e })
		s.mu.Unlock()
		return nil
	}
	s.mu.Unlock()
	select {
	case <-e.ended:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Followed reports whether a source is followed, and the last status that was told of it; nil before the first.
func (s *Subscriber) Followed(source event.Source) (*event.Status, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.find(source)
	if e == nil {
		return nil, false
	}
	return e.told.Load(), true
}

// find returns a source's engine; nil when there is none. The caller holds the lock.
func (s *Subscriber) find(source event.Source) *engine {
	for _, e := range s.engines {
		if e.cfg.Source == source {
			return e
		}
	}
	return nil
}

// forget takes an engine off the list whose goroutine ends, if it was removed.
func (s *Subscriber) forget(e *engine) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if e.added && e.removal.Err() != nil {
		s.engines = slices.DeleteFunc(s.engines, func(o *engine) bool { return o == e })
	}
	close(e.ended)
}

// withdrawn is why a source is gone that was removed.
const withdrawn = "withdrawn: nobody follows it any more"

// withdraw ends the life that was heard: whoever is added under this name next may be another engine. Consumers forget its
// blocks when they hear of the new life, which begins with nothing.
func (e *engine) withdraw() error {
	now := time.Now()
	e.endLife(now)
	st := e.status(now)
	st.State, st.Reason, st.Withdrawn = event.StateGone, withdrawn, true
	err := e.stream.Status(st)
	e.stream.Checkpoint(&event.Checkpoint{
		Epoch: e.epoch, Seq: e.ledger.Last, Written: event.UnixTime(now), Ledger: e.ledger.Clone(), PastLives: e.lives,
		State: event.StateGone, Reason: withdrawn,
	}, e.set.Snapshot())
	return err
}
