package sim_test

import (
	"errors"
	"fmt"
	"testing"

	"kvstrata/event"
	"kvstrata/sim"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

// Whatever is asked of an engine, its events tell its resident set, its requests end, and every run continues a prefix
// that is in the pool.
func TestEngineTellsWhatItHolds(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		cfg := sim.EngineConfig{
			Name: "e", PoolBlocks: rapid.IntRange(5, 20).Draw(t, "pool"), BlockSize: rapid.IntRange(1, 3).Draw(t, "size"),
			MaxRunning: rapid.IntRange(1, 4).Draw(t, "running"), MaxWaiting: 8,
			TokensPerStep: rapid.SampledFrom([]int{0, 1, 3, 7}).Draw(t, "budget"), HashBytes: rapid.Bool().Draw(t, "bytes"),
		}
		rec := &recorder{}
		e, err := sim.NewEngine(cfg, rec)
		if err != nil {
			t.Fatal(err)
		}
		serial, now := 0, event.Time(0)
		step := func(t *rapid.T) {
			now++
			if _, err := e.Step(now); err != nil {
				t.Fatal(err)
			}
		}
		t.Repeat(map[string]func(*rapid.T){
			"submit": func(t *rapid.T) {
				serial++
				err := e.Submit(sim.Request{
					ID: fmt.Sprint(serial), Prompt: rapid.SliceOfN(rapid.Uint32Range(0, 1), 0, 12).Draw(t, "prompt"),
					Output: rapid.IntRange(0, 8).Draw(t, "output"), External: rapid.Bool().Draw(t, "external"),
					Salt: rapid.SampledFrom([]string{"", "", "x"}).Draw(t, "salt"),
				})
				if err != nil && !errors.Is(err, sim.ErrEmptyPrompt) && !errors.Is(err, sim.ErrTooLong) && !errors.Is(err, sim.ErrQueueFull) {
					t.Fatal(err)
				}
			},
			"step": step,
			"finish": func(t *rapid.T) {
				for steps := 0; e.Busy(); steps++ {
					if step(t); steps > 2000 {
						t.Fatal("the engine does not come to an end")
					}
				}
			},
			"reset": func(t *rapid.T) {
				if _, err := e.Reset(now); err != nil {
					t.Fatal(err)
				}
			},
			"": func(t *rapid.T) { checkEngine(t, e, rec) },
		})
	})
}

func checkEngine(t *rapid.T, e *sim.Engine, rec *recorder) {
	got := make(map[sim.BlockKey]int)
	total := 0
	for key, n := range e.Resident() {
		got[key] = n
		total += n
	}
	if total != e.ResidentBlocks() || total >= e.Config().PoolBlocks {
		t.Fatalf("%d blocks are resident, %d by the engine's count, in a pool of %d", total, e.ResidentBlocks(), e.Config().PoolBlocks)
	}
	want := make(map[sim.BlockKey]int)
	for _, b := range rec.batches {
		if len(b.Events) == 0 {
			t.Fatal("an empty batch was published")
		}
		for i := range b.Events {
			apply(t.Fatalf, want, &b.Events[i])
		}
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Fatalf("resident set (-by events +by pool):\n%s", diff)
	}
	s := e.Stats()
	if s.Finished > s.Submitted || !e.Busy() && s.Finished != s.Submitted || s.BlockHits > s.BlockLookups {
		t.Fatalf("stats do not add up: %+v", s)
	}
}
