package sim_test

import (
	"fmt"
	"os"
	"testing"

	"kvstrata/sim"
	"kvstrata/tracetest"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

// The numbers of Mooncake's conversation trace over pools that never evict. They are facts of the trace: a run that
// gives others is wrong.
func TestConversationTrace(t *testing.T) {
	if testing.Short() {
		t.Skip("SKIPPED with -short: the real trace takes most of a minute under the race detector")
	}
	tests := []struct {
		prefill int
		want    sim.Report
	}{
		{1, sim.Report{HashIDHits: 105_710, BlockHits: 3_381_090}},
		{2, sim.Report{HashIDHits: 78_076, BlockHits: 2_497_631}},
	}
	for _, test := range tests {
		t.Run(fmt.Sprintf("prefill %d", test.prefill), func(t *testing.T) {
			file := tracetest.Open(t, "mooncake_conversation_trace.jsonl")
			got, told := replayTrace(t, file, test.prefill)
			want := test.want
			want.Requests, want.Finished, want.HashIDs, want.Blocks = 12_031, 12_031, 288_500, 9_044_013
			counted := cmpopts.IgnoreFields(sim.Report{}, "Elapsed", "BlocksStored", "Batches", "Engines")
			if diff := cmp.Diff(want, got, counted); diff != "" {
				t.Errorf("report (-want +got):\n%s", diff)
			}
			if told.blocks != int(got.BlocksStored) || told.batches != int(got.Batches) {
				t.Errorf("%d blocks in %d batches were published, the report says %d in %d",
					told.blocks, told.batches, got.BlocksStored, got.Batches)
			}
			t.Logf("%d blocks stored in %v", got.BlocksStored, got.Elapsed)
		})
	}
}

func replayTrace(t testing.TB, file *os.File, prefill int) (sim.Report, *counter) {
	t.Helper()
	told := &counter{}
	var engines []*sim.Engine
	for i := range prefill {
		cfg := sim.DefaultEngineConfig()
		cfg.Name, cfg.PoolBlocks = fmt.Sprintf("prefill-%d", i), 20_000_000
		e, err := sim.NewEngine(cfg, told)
		if err != nil {
			t.Fatal(err)
		}
		engines = append(engines, e)
	}
	cfg := sim.DefaultFleetConfig()
	cfg.Speed = 0
	fleet, err := sim.NewFleet(cfg, engines, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := fleet.Run(t.Context(), sim.NewTraceReader(file).Arrivals()); err != nil {
		t.Fatal(err)
	}
	return fleet.Report(), told
}
