package main

import (
	"strings"
	"testing"
	"time"

	"kvstrata/event"
	"kvstrata/subscriber"
)

// Each of the commonest faults is a sentence that names what to change.
func TestFindings(t *testing.T) {
	well := func() *heard {
		h := &heard{
			cfg: subscriber.EngineConfig{Endpoint: "tcp://h:1", Replay: "tcp://h:2", Source: event.Source{Model: "m", Instance: "i"}},
			report: &subscriber.Report{
				Connected: true, Replays: true, Live: 3, Topics: []string{"kv@pod@m"}, Behind: time.Millisecond, HasBehind: true,
			},
		}
		h.report.Status.Ledger = event.Ledger{Started: true, Last: 2, Live: 3}
		return h
	}
	if said := well().findings(time.Second); len(said) > 0 {
		t.Errorf("nothing is wrong, and it says %q", said)
	}
	for name, tt := range map[string]struct {
		spoil func(*heard)
		want  []string
	}{
		"nobody there":     {func(h *heard) { h.report.Connected = false }, []string{"tcp://*:5557", "tcp://0.0.0.0:5557 connects"}},
		"no events":        {func(h *heard) { h.report.Status.Ledger = event.Ledger{}; h.report.Live = 0 }, []string{"enable_kv_cache_events", "event_buffer_max_size"}},
		"topic filter":     {func(h *heard) { h.cfg.Topic = "kv-events" }, []string{"topic=kv-events hears nothing", "kv@pod@m"}},
		"replay not there": {func(h *heard) { h.report.Replays = false }, []string{"tcp://h:2", "replay_endpoint"}},
		"port of another": {func(h *heard) {
			h.report.Status.Counters = []event.Counter{{Name: "rank_differs", Count: 1, Example: "batch 0 tells rank 1, configured is 0"}}
		}, []string{"rank 1", "ranks=N"}},
		"not an engine": {func(h *heard) {
			h.report.Status.Ledger = event.Ledger{}
			h.report.Live = 0
			h.report.Status.Counters = []event.Counter{{Name: "stray_messages", Count: 1, Example: "odd"}}
		}, []string{"event port"}},
		"undecodable":  {func(h *heard) { h.report.Status.Ledger.Malformed = 2 }, []string{"2 of 5", "dialect="}},
		"a slow clock": {func(h *heard) { h.report.Behind = 3 * time.Second }, []string{"3s behind", "NTP"}},
		"a fast clock": {func(h *heard) { h.report.Behind = -2 * time.Second }, []string{"2s ahead", "NTP"}},
		"reports twice": {func(h *heard) {
			h.report.Status.Counters = []event.Counter{{Name: "more_copies_than_pool", Count: 1, Example: "needs report=full"}}
		}, []string{"report=full"}},
		"hashes that differ": {func(h *heard) {
			h.report.Status.Contract.Check = event.HashContract{Verdict: event.HashesDiffer, Scheme: "sha256", Differ: 1, Reason: "salt"}
		}, []string{"not what its tokens give"}},
		"an event buffer off": {func(h *heard) { h.report.Connected, h.cfg.Endpoint = false, "file:///x" }, []string{"does not answer"}},
	} {
		t.Run(name, func(t *testing.T) {
			h := well()
			tt.spoil(h)
			said := strings.Join(h.findings(time.Second), "\n")
			for _, want := range tt.want {
				if !strings.Contains(said, want) {
					t.Errorf("%q does not say %q", said, want)
				}
			}
		})
	}
	pulled := &heard{cfg: subscriber.EngineConfig{Endpoint: "http://h:1/kv_cache_events"}}
	if said, remarks := pulled.findings(time.Second), pulled.remarks(); len(said) > 0 || len(remarks) != 1 || !strings.Contains(remarks[0], "not heard") {
		t.Errorf("an event buffer: %q, %q", said, remarks)
	}
}

// A source that is heard well and counts for nothing is said to, with the reason.
func TestStaleIsExplained(t *testing.T) {
	h := &heard{cfg: subscriber.EngineConfig{Endpoint: "tcp://h:1", Dialect: subscriber.DialectMooncake}, report: &subscriber.Report{Connected: true}}
	h.report.Status = event.Status{State: event.StateStale, Reason: "a Mooncake master tells no evictions", Ledger: event.Ledger{Started: true, Live: 1}}
	want := "stale, so that lookups leave it out: a Mooncake master tells no evictions"
	if said := h.remarks(); len(said) != 1 || said[0] != want {
		t.Errorf("%q", said)
	}
}

func TestContractIsPrinted(t *testing.T) {
	var b strings.Builder
	printContract(&b, &event.Status{
		Dialect: "sglang", Groups: []event.GroupInfo{{Group: event.NoGroup, BlockSize: 64, Eagle: true}},
		Contract: event.Contract{
			Forms: []string{"map"}, Hashes: []string{"int64"}, Media: []string{"GPU"},
			Fields: []string{"BlockStored.block_hashes", "BlockStored.medium", "BlockRemoved.block_hashes", "AllBlocksCleared"},
			Check:  event.HashContract{Verdict: event.HashesVerified, Scheme: "sglang", Seed: "default", Verified: 12},
		},
		Ledger:   event.Ledger{Started: true, Last: 9, Live: 8, Lost: 2, Holes: []event.Hole{{First: 3, Last: 4, Reason: "no replay endpoint"}}},
		Counters: []event.Counter{{Name: "parent_unknown", Count: 3, Example: "block 0a in batch 7"}},
	})
	const want = `         dialect   sglang, map; hashes int64; media GPU
         group     0: 64 tokens a block, EAGLE
         fields    BlockStored: block_hashes medium; BlockRemoved: block_hashes; AllBlocksCleared
         hashes    verified: sglang, seed default: 12 blocks as computed, 0 not, 0 not compared 
         ledger    0 to 9: 8 live, 0 recovered, 0 held, 0 asked, 2 lost; 0 duplicates, 0 malformed
         lost      3 to 4: no replay endpoint
         odd       parent_unknown, 3 times; the first: block 0a in batch 7
`
	if got := b.String(); got != want {
		t.Errorf("got\n%swant\n%s", got, want)
	}
}
