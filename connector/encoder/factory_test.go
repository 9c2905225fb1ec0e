package encoder_test

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"strings"
	"testing"

	"kvstrata/connector/encoder"
	"kvstrata/event"
	"kvstrata/leaktest"
)

func TestMain(m *testing.M) { os.Exit(leaktest.Run(m)) }

// scheduler and worker are halves of which the worker has nothing to say.
type scheduler struct {
	encoder.Scheduler
	ran *int
}

type worker struct {
	encoder.Worker
	ran *int
}

var errShake = errors.New("no handshake")

func (s scheduler) Run(ctx context.Context) error { return run(ctx, s.ran) }
func (w worker) Run(ctx context.Context) error    { return run(ctx, w.ran) }

func run(ctx context.Context, ran *int) error {
	<-ctx.Done()
	*ran++
	return nil
}

func (w worker) RegisterCaches(encoder.Caches) error { return nil }
func (w worker) Handshake() ([]byte, error)          { return nil, errShake }

func setup() encoder.Setup {
	s := encoder.Setup{
		Config: encoder.DefaultConfig(), Ranks: 1, Model: encoder.Model{Name: "m", DType: "float16", HiddenSize: 1}, Log: slog.New(slog.DiscardHandler),
	}
	s.Config.Connector, s.Config.Role = "a", encoder.Both
	return s
}

func TestFactory(t *testing.T) {
	var f encoder.Factory
	var got encoder.Setup
	var schedulers, workers int
	a := encoder.Transport{
		NewScheduler: func(s encoder.Setup) (encoder.Scheduler, error) { got = s; return scheduler{ran: &schedulers}, nil },
		NewWorker:    func(encoder.Setup) (encoder.Worker, error) { return worker{ran: &workers}, nil },
	}
	broken := encoder.Transport{
		NewScheduler: func(encoder.Setup) (encoder.Scheduler, error) { return nil, errShake },
		NewWorker:    func(encoder.Setup) (encoder.Worker, error) { return nil, errShake },
	}
	if err := errors.Join(f.Register("a", a), f.Register("b", broken)); err != nil {
		t.Fatal(err)
	}
	for name, t2 := range map[string]encoder.Transport{"": a, "a": a, "c": {NewScheduler: a.NewScheduler}, "d": {NewWorker: a.NewWorker}} {
		if f.Register(name, t2) == nil {
			t.Errorf("%q is registered", name)
		}
	}
	if names := strings.Join(f.Names(), " "); names != "a b" {
		t.Error(names)
	}
	if _, err := f.Scheduler(setup()); err != nil || got.Tier != event.GPU || got.Now == nil {
		t.Errorf("%v, %+v", err, got)
	}
	// What was made is run to its end when the rest cannot be.
	if _, err := encoder.NewEngine(&f, setup(), make([]encoder.Caches, 2)); !errors.Is(err, errShake) || schedulers != 1 || workers != 1 {
		t.Errorf("%v, %d schedulers and %d workers have ended", err, schedulers, workers)
	}
	s := setup()
	s.Config.Connector = "b"
	_, err := f.Scheduler(s)
	_, err2 := f.Worker(s)
	if !errors.Is(err, errShake) || !errors.Is(err2, errShake) {
		t.Error(err, err2)
	}
	s.Config.Connector = "c"
	if _, err := f.Worker(s); err == nil || !strings.Contains(err.Error(), "a, b") {
		t.Errorf("%v; want one that names what there is", err)
	}
	s = setup()
	s.Rank, s.Log, s.Model, s.Config.Role = 1, nil, encoder.Model{}, 0
	_, err = f.Scheduler(s)
	for _, word := range []string{"rank 1 of 1", "logger", "hidden_size", "ec_role"} {
		if err == nil || !strings.Contains(err.Error(), word) {
			t.Errorf("%v; want one that names %s", err, word)
		}
	}
}
