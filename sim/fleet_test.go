package sim_test

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"kvstrata/event"
	"kvstrata/sim"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

// fleet is a fleet under test and what its engines published.
type fleet struct {
	*sim.Fleet
	engines []*sim.Engine // prefill first
	told    []*recorder
}

// newFleet returns a fleet of so many engines of 16-token blocks, whose clocks start at 1 s.
func newFleet(t testing.TB, speed float64, prefill, decode int, edit func(*sim.EngineConfig)) *fleet {
	t.Helper()
	f := &fleet{}
	for i := range prefill + decode {
		cfg := sim.DefaultEngineConfig()
		cfg.Name, cfg.HashSeed = fmt.Sprintf("engine-%d", i), uint64(i)
		if edit != nil {
			edit(&cfg)
		}
		r := &recorder{}
		e, err := sim.NewEngine(cfg, r)
		if err != nil {
			t.Fatal(err)
		}
		f.engines, f.told = append(f.engines, e), append(f.told, r)
	}
	cfg := sim.DefaultFleetConfig()
	cfg.Speed, cfg.Start = speed, event.Time(time.Second)
	var err error
	if f.Fleet, err = sim.NewFleet(cfg, f.engines[:prefill], f.engines[prefill:]); err != nil {
		t.Fatal(err)
	}
	return f
}

// check compares what the engines told with what they hold, and that their clocks never went back.
func (f *fleet) check(t testing.TB) {
	t.Helper()
	for i, e := range f.engines {
		if diff := cmp.Diff(f.told[i].copies(t), resident(e)); diff != "" {
			t.Errorf("resident set of %s (-by events +by pool):\n%s", e.Name(), diff)
		}
		for j, b := range f.told[i].batches {
			if b.Time < event.Time(time.Second) || j > 0 && b.Time < f.told[i].batches[j-1].Time {
				t.Fatalf("batch %d of %s is stamped %v", j, e.Name(), b.Time)
			}
		}
		if e.Busy() {
			t.Errorf("%s is still busy", e.Name())
		}
	}
}

// trace yields requests as a TraceReader would.
func trace(t testing.TB, requests []sim.TraceRequest) iter.Seq2[sim.Arrival, error] {
	t.Helper()
	var text strings.Builder
	w := sim.NewTraceWriter(&text)
	for _, r := range requests {
		if err := w.Write(&r); err != nil {
			t.Fatal(err)
		}
	}
	return sim.NewTraceReader(strings.NewReader(text.String())).Arrivals()
}

// naiveCounts counts hits over endless caches, one an engine, in the plainest terms.
func naiveCounts(requests []sim.TraceRequest, engines, decode int) (r sim.Report) {
	loaded := make([]map[event.PrefixHash]bool, decode)
	for i := range decode {
		loaded[i] = make(map[event.PrefixHash]bool)
	}
	blocks, ids := make([]map[event.PrefixHash]bool, engines), make([]map[uint64]bool, engines)
	for i := range engines {
		blocks[i], ids[i] = make(map[event.PrefixHash]bool), make(map[uint64]bool)
	}
	for k, request := range requests {
		r.Requests++
		seenIDs, seenBlocks := ids[k%engines], blocks[k%engines]
		r.HashIDs += uint64(len(request.HashIDs))
		for _, id := range request.HashIDs {
			if !seenIDs[id] {
				break
			}
			r.HashIDHits++
		}
		for _, id := range request.HashIDs {
			seenIDs[id] = true
		}
		prefixes := event.Prefixes(nil, request.Prompt(), 16, 1, false)
		r.Blocks += uint64(len(prefixes))
		for _, p := range prefixes[:(request.InputLength-1)/16] {
			if !seenBlocks[p] {
				break
			}
			r.BlockHits++
		}
		for _, p := range prefixes {
			seenBlocks[p] = true
		}
		if decode == 0 {
			continue
		}
		here, there := loaded[k%decode], 0
		for there < (request.InputLength-1)/16 && here[prefixes[there]] {
			there++
		}
		r.BlocksLoaded += uint64((request.InputLength-1)/16 - there)
		for _, p := range prefixes {
			here[p] = true
		}
	}
	return r
}

func TestFleetCountsHits(t *testing.T) {
	for _, test := range []struct{ prefill, decode int }{{1, 0}, {2, 0}, {3, 0}, {1, 1}, {2, 3}} {
		t.Run(fmt.Sprintf("%d prefill %d decode", test.prefill, test.decode), func(t *testing.T) {
			f := newFleet(t, 0, test.prefill, test.decode, nil)
			if err := f.Run(t.Context(), trace(t, small())); err != nil {
				t.Fatal(err)
			}
			f.check(t)
			got, want := f.Report(), naiveCounts(small(), test.prefill, test.decode)
			want.Finished = want.Requests
			counted := cmpopts.IgnoreFields(sim.Report{}, "Elapsed", "BlocksStored", "Batches", "Engines")
			if diff := cmp.Diff(want, got, counted); diff != "" {
				t.Errorf("report (-want +got):\n%s", diff)
			}
			if want.HashIDHits == 0 || want.BlockHits == 0 {
				t.Error("the trace has no hits to count")
			}
		})
	}
}

// With decode engines, prefill engines generate one token, and decode engines load what they do not have.
func TestFleetHandsOver(t *testing.T) {
	f := newFleet(t, 0, 2, 1, nil)
	if err := f.Run(t.Context(), trace(t, small())); err != nil {
		t.Fatal(err)
	}
	tokens, output := 0, 0
	for _, r := range small() {
		tokens += r.InputLength
		output += r.OutputLength
	}
	report := f.Report()
	var got []string
	for _, e := range report.Engines {
		got = append(got, fmt.Sprintf("%s %s: %d requests, %d generated", e.Name, e.Role, e.Stats.Finished, e.Stats.GeneratedTokens))
	}
	want := []string{
		"engine-0 prefill: 75 requests, 75 generated",
		"engine-1 prefill: 75 requests, 75 generated",
		fmt.Sprintf("engine-2 decode: 150 requests, %d generated", output),
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("engines (-want +got):\n%s", diff)
	}
	d := report.Engines[2].Stats
	if found := 16 * d.BlockHits; d.LoadedTokens+found != uint64(tokens) {
		t.Errorf("%d tokens loaded and %d found, want %d together", d.LoadedTokens, found, tokens)
	}
	// The last token of each prompt, and all generated ones but the last.
	if d.ComputedTokens != uint64(output) {
		t.Errorf("the decode engine computed %d tokens, want %d", d.ComputedTokens, output)
	}
}

func TestFleetReplayIsDeterministic(t *testing.T) {
	run := func() ([]*recorder, sim.Report) {
		f := newFleet(t, 0, 2, 2, func(c *sim.EngineConfig) { c.PoolBlocks = 400 })
		if err := f.Run(t.Context(), trace(t, small())); err != nil {
			t.Fatal(err)
		}
		f.check(t)
		return f.told, f.Report()
	}
	told, report := run()
	toldAgain, reportAgain := run()
	if report.BlocksEvicted == 0 {
		t.Error("a small pool evicts nothing")
	}
	if diff := cmp.Diff(report, reportAgain, cmpopts.IgnoreFields(sim.Report{}, "Elapsed")); diff != "" {
		t.Errorf("report (-first +second):\n%s", diff)
	}
	for i := range told {
		if !slices.Equal(told[i].story(), toldAgain[i].story()) {
			t.Errorf("engine %d tells another story the second time", i)
		}
	}
}

func TestFleetInTime(t *testing.T) {
	for _, speed := range []float64{1, 20} {
		t.Run(fmt.Sprintf("speed %v", speed), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := newFleet(t, speed, 2, 2, func(c *sim.EngineConfig) { c.TokensPerStep = 512 })
				if err := f.Run(t.Context(), trace(t, small())); err != nil {
					t.Fatal(err)
				}
				f.check(t)
				got, want := f.Report(), naiveCounts(small(), 2, 0)
				if got.Finished != 150 || got.Refused != 0 || got.HashIDHits != want.HashIDHits {
					t.Errorf("report %+v, want 150 finished and %d of %d hash ids", got, want.HashIDHits, want.HashIDs)
				}
				// The last request comes at 107.8 s and takes a few steps of 20 ms and more.
				last := small()[149].Timestamp
				virtual := time.Duration(float64(got.Elapsed) * speed)
				if lag := virtual - time.Duration(last)*time.Millisecond; lag < 0 || lag > 3*time.Second {
					t.Errorf("the run ends %v of virtual time after its last arrival", lag)
				}
			})
		})
	}
}

// Requests that come together run together: a fleet of one engine, two requests of ten tokens each.
func TestFleetBatchesContinuously(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(t, 1, 1, 0, nil)
		come := func(yield func(sim.Arrival, error) bool) {
			for i, at := range []time.Duration{0, 30 * time.Millisecond} {
				id := fmt.Sprint(i)
				if !yield(sim.Arrival{At: at, Request: sim.Request{ID: id, Prompt: prompt(uint32(100*i), 10), Output: 10}}, nil) {
					return
				}
			}
		}
		if err := f.Run(t.Context(), come); err != nil {
			t.Fatal(err)
		}
		f.check(t)
		// The first runs from 0 to 200 ms, the second joins it at 40 ms; tokens add 20 µs each.
		if got := f.Report().Elapsed; got < 240*time.Millisecond || got > 241*time.Millisecond {
			t.Errorf("the run took %v, want 240 ms and a bit", got)
		}
	})
}

func TestFleetStops(t *testing.T) {
	for _, speed := range []float64{0, 1} {
		t.Run(fmt.Sprintf("speed %v", speed), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithCancel(t.Context())
				traffic, err := sim.NewTraffic(sim.DefaultTrafficConfig())
				if err != nil {
					t.Fatal(err)
				}
				n := 0
				come := func(yield func(sim.Arrival, error) bool) {
					for a := range traffic.Arrivals() {
						if n++; n == 100 {
							cancel()
						}
						if !yield(a, nil) {
							return
						}
					}
				}
				f := newFleet(t, speed, 2, 2, nil)
				if err := f.Run(ctx, come); err != nil {
					t.Errorf("a clean stop gives %v", err)
				}
				if n != 100 || f.Report().Requests != 99 {
					t.Errorf("%d arrivals read and %d taken, want 100 and 99", n, f.Report().Requests)
				}
			})
		})
	}
}

func TestFleetFails(t *testing.T) {
	bad := func(yield func(sim.Arrival, error) bool) {
		yield(sim.Arrival{}, &sim.TraceError{Line: 7, Reason: "bad"})
	}
	for _, speed := range []float64{0, 1000} {
		t.Run(fmt.Sprintf("speed %v", speed), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var traceErr *sim.TraceError
				if err := newFleet(t, speed, 1, 1, nil).Run(t.Context(), bad); !errors.As(err, &traceErr) || traceErr.Line != 7 {
					t.Errorf("a bad trace gives %v", err)
				}
				f := newFleet(t, speed, 1, 1, nil)
				f.told[1].failAt = 3
				if err := f.Run(t.Context(), trace(t, small())); !errors.Is(err, errPublish) {
					t.Errorf("a publisher that fails gives %v", err)
				}
			})
		})
	}
}

// What an engine refuses is counted, and neither hangs the run nor reaches a decode engine.
func TestFleetPassesOverWhatIsRefused(t *testing.T) {
	for _, speed := range []float64{0, 100} {
		t.Run(fmt.Sprintf("speed %v", speed), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := newFleet(t, speed, 1, 1, func(c *sim.EngineConfig) { c.PoolBlocks = 120 })
				if err := f.Run(t.Context(), trace(t, small())); err != nil {
					t.Fatal(err)
				}
				f.check(t)
				r := f.Report()
				prefill, decode := r.Engines[0].Stats, r.Engines[1].Stats
				if r.Requests != 150 || prefill.Refused == 0 || r.Finished+r.Refused != 150 {
					t.Errorf("%d requests, %d finished, %d refused", r.Requests, r.Finished, r.Refused)
				}
				if prefill.Finished != decode.Submitted+decode.Refused {
					t.Errorf("%d requests prefilled, %d offered for decoding", prefill.Finished, decode.Submitted+decode.Refused)
				}
			})
		})
	}
}

func TestNewFleetRefuses(t *testing.T) {
	e, _ := newEngine(t, 8, func(c *sim.EngineConfig) { c.TokensPerStep = 64 })
	_, err := sim.NewFleet(sim.FleetConfig{Speed: 0, TokenTime: -1}, nil, []*sim.Engine{e})
	if err == nil {
		t.Fatal("no error")
	}
	want := []string{
		"step-time 0s: want more than 0 and up to 1h",
		"token-time -1ns: want 0 to 1s",
		"prefill 0: want at least 1 engine",
		"tokens-per-step 64 of engine: want 0 at speed max",
	}
	if diff := cmp.Diff(want, strings.Split(err.Error(), "\n")); diff != "" {
		t.Errorf("problems (-want +got):\n%s", diff)
	}
	cfg := sim.DefaultFleetConfig()
	cfg.Speed = -2
	if err := cfg.Validate(); err == nil || err.Error() != "speed -2: want 0 (max) or a factor up to 1000000" {
		t.Errorf("speed -2: %v", err)
	}
}

func BenchmarkFleetReplay(b *testing.B) {
	requests := small()
	var stored uint64
	for b.Loop() {
		f := newFleet(b, 0, 1, 0, nil)
		if err := f.Run(b.Context(), trace(b, requests)); err != nil {
			b.Fatal(err)
		}
		stored += f.Report().BlocksStored
	}
	b.ReportMetric(float64(stored)/b.Elapsed().Seconds(), "blocks/s")
}
