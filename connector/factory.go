package connector

import (
	"errors"
	"fmt"
	"log/slog"
	"time"

	"kvstrata/event"
)

// Setup is what both halves are made with.
type Setup struct {
	Config   Config
	Instance string           // the engine's name in events
	Rank     int              // of a worker: tensor-parallel rank
	Ranks    int              // tensor-parallel ranks; 1 or more
	Model    Model            // its BlockTokens is what both halves count in
	Tier     event.Tier       // of the engine's blocks in events; empty = GPU
	Now      func() time.Time // nil = time.Now
	Log      *slog.Logger
}

// Validate returns every problem at once.
func (s *Setup) Validate() error {
	errs := []error{s.Config.Validate()}
	if s.Ranks < 1 || s.Rank < 0 || s.Rank >= s.Ranks {
		errs = append(errs, fmt.Errorf("rank %d of %d: want 0 or more, and less than their number", s.Rank, s.Ranks))
	}
	if s.Model.BlockTokens < 1 {
		errs = append(errs, fmt.Errorf("block size %d: want 1 token or more", s.Model.BlockTokens))
	}
	if s.Log == nil {
		errs = append(errs, errors.New("no logger"))
	}
	return errors.Join(errs...)
}

// Transport makes both halves of a connector. A constructor validates and allocates; it starts nothing.
type Transport struct {
	NewScheduler func(Setup) (Scheduler, error)
	NewWorker    func(Setup) (Worker, error)
}

// Factory knows transports by the names that kv_connector has (vLLM's KVConnectorFactory). The zero value knows none. It
// is filled before it is used.
type Factory struct{ transports Registry[Transport] }

// Register adds a transport. A name is registered once.
func (f *Factory) Register(name string, t Transport) error {
	if t.NewScheduler == nil || t.NewWorker == nil {
		return fmt.Errorf("register transport %q: want both halves", name)
	}
	return f.transports.Add(name, t)
}

// Names returns the names, sorted.
func (f *Factory) Names() []string { return f.transports.Names() }

// Scheduler makes the scheduler's half of the transport that the configuration names.
func (f *Factory) Scheduler(s Setup) (Scheduler, error) {
	t, err := f.find(&s)
	if err != nil {
		return nil, err
	}
	half, err := t.NewScheduler(s)
	if err != nil {
		return nil, fmt.Errorf("make scheduler of connector %s: %w", s.Config.Connector, err)
	}
	return half, nil
}

// Worker makes one rank's half.
func (f *Factory) Worker(s Setup) (Worker, error) {
	t, err := f.find(&s)
	if err != nil {
		return nil, err
	}
	half, err := t.NewWorker(s)
	if err != nil {
		return nil, fmt.Errorf("make worker of connector %s: %w", s.Config.Connector, err)
	}
	return half, nil
}

// find returns the transport that a setup names, and fills in the setup's defaults.
func (f *Factory) find(s *Setup) (Transport, error) {
	t, err := f.transports.Find("kv_connector", s.Config.Connector)
	if err != nil {
		return t, err
	}
	if s.Tier == "" {
		s.Tier = event.GPU
	}
	if s.Now == nil {
		s.Now = time.Now
	}
	return t, s.Validate()
}
