// Package null is the connector that moves nothing: every hook is there, none does anything. What an engine costs with it,
// and without a connector, is the overhead of the hooks themselves.
package null

import (
	"context"
	"fmt"

	"kvstrata/connector"
	"kvstrata/event"
)

// Transport makes both halves. It takes no extra configuration.
var Transport = connector.Transport{
	NewScheduler: func(s connector.Setup) (connector.Scheduler, error) {
		return Scheduler{}, s.Config.Extra.Into(&struct{}{})
	},
	NewWorker: func(s connector.Setup) (connector.Worker, error) {
		return new(Worker), s.Config.Extra.Into(&struct{}{})
	},
}

// Scheduler is the scheduler's half.
type Scheduler struct{}

var _ connector.Scheduler = Scheduler{}

// Run waits for ctx.
func (Scheduler) Run(ctx context.Context) error {
	<-ctx.Done()
	return nil
}

// SetHandshake ignores the ranks.
func (Scheduler) SetHandshake([][]byte) error { return nil }

// NewRequest does nothing.
func (Scheduler) NewRequest(*connector.Request) {}

// MatchedTokens finds nothing.
func (Scheduler) MatchedTokens(*connector.Request, int) connector.Match { return connector.Match{} }

// UpdateAfterAlloc does nothing.
func (Scheduler) UpdateAfterAlloc(*connector.Request, []int, int, int) {}

// BuildMetadata has nothing to say.
func (Scheduler) BuildMetadata(*connector.Step) connector.Metadata { return connector.Nothing{} }

// UpdateOutput does nothing.
func (Scheduler) UpdateOutput(*connector.Output) {}

// RequestFinished keeps no blocks.
func (Scheduler) RequestFinished(*connector.Request, []int, connector.End) (bool, *connector.Params) {
	return false, nil
}

// Pending returns false.
func (Scheduler) Pending() bool { return false }

// TakeEvents returns none.
func (Scheduler) TakeEvents() []event.Event { return nil }

// TakeRecords returns none.
func (Scheduler) TakeRecords() []event.Transfer { return nil }

// FinishedCount returns 0: every rank would report.
func (Scheduler) FinishedCount() int { return 0 }

// Reset returns true.
func (Scheduler) Reset() bool { return true }

// Worker is one rank's half.
type Worker struct{ registered bool }

var _ connector.Worker = (*Worker)(nil)

// RegisterCaches checks the caches, and forgets them.
func (w *Worker) RegisterCaches(c connector.Caches) error {
	if _, err := connector.NewCache(c); err != nil {
		return err
	}
	w.registered = true
	return nil
}

// Handshake has nothing to say.
func (w *Worker) Handshake() ([]byte, error) {
	if !w.registered {
		return nil, fmt.Errorf("handshake: no caches are registered")
	}
	return nil, nil
}

// Run waits for ctx.
func (w *Worker) Run(ctx context.Context) error {
	<-ctx.Done()
	return nil
}

// Bind does nothing.
func (w *Worker) Bind(connector.Metadata) {}

// Clear does nothing.
func (w *Worker) Clear() {}

// HandlePreemptions does nothing.
func (w *Worker) HandlePreemptions(context.Context, []string) error { return nil }

// StartLoad does nothing.
func (w *Worker) StartLoad(context.Context) error { return nil }

// WaitForLayer returns at once.
func (w *Worker) WaitForLayer(context.Context, string) error { return nil }

// SaveLayer discards the layer.
func (w *Worker) SaveLayer(context.Context, string) error { return nil }

// WaitForSave returns at once.
func (w *Worker) WaitForSave(context.Context) error { return nil }

// Collect returns nil: nothing ever happened.
func (w *Worker) Collect([]string) *connector.Output { return nil }
