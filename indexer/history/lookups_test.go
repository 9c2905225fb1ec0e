package history_test

import (
	"slices"
	"strings"
	"testing"
	"time"

	"kvstrata/event"
)

// What was asked, and what became of it, of a fleet whose records are few enough to be counted by hand.
func TestQuestionsOfRecords(t *testing.T) {
	e := startEngine(t)
	w, _ := startWriter(t, e.config())
	resume(t, w)
	began := time.Now().UTC().Truncate(24 * time.Hour).Add(-14 * time.Hour)
	a := event.Source{Cluster: "c", Model: "m/model", Instance: "a", Origin: event.Engine}
	b := event.Source{Cluster: "c", Model: "m/model", Instance: "b", Origin: event.Engine}
	nobody := event.Source{Cluster: "c", Model: "m/model", Origin: event.Engine}
	on := func(gpu, cpu uint64) []event.Share {
		return []event.Share{{Tier: event.GPU, Tokens: gpu}, {Tier: event.CPU, Tokens: cpu}}
	}
	asked := func(source event.Source, asker event.Asker, request string, tokens, longest uint64, shares []event.Share) event.Lookup {
		return event.Lookup{Source: source, Asker: asker, Request: request, OneIn: 1, BlockSize: 16, Tokens: tokens, Longest: longest, Shares: shares}
	}
	outside := asked(a, event.AskerConnector, "r2", 100, 80, []event.Share{{Tier: event.GPU, Tokens: 48}, {Tier: event.External, Tokens: 32}})
	unasked := asked(nobody, event.AskerIndex, "r4", 100, 0, nil) // whose block size nobody knows
	unasked.BlockSize = 0
	often := asked(b, event.AskerIndex, "", 50, 16, on(16, 0))
	often.OneIn = 10
	request := func(source event.Source, id, session, tenant string, cached, external uint64, end event.RequestEnd) event.Request {
		return event.Request{
			Source: source, Request: id, Session: session, Tenant: tenant, Prompt: 100, Output: 7, Cached: cached, External: external, End: end,
		}
	}
	for i, records := range []event.Records{
		{Lookups: []event.Lookup{
			asked(a, event.AskerIndex, "r1", 100, 96, on(64, 32)), // and so it was
			asked(a, event.AskerIndex, "r2", 100, 48, on(48, 0)),  // a store had more
			asked(a, event.AskerIndex, "r3", 100, 96, on(96, 0)),  // which b computed
			unasked,
			asked(a, event.AskerIndex, "r5", 100, 64, on(64, 0)), // evicted since
			asked(a, event.AskerIndex, "r6", 100, 64, on(64, 0)), // which nobody computed
		}},
		{Lookups: []event.Lookup{
			asked(a, event.AskerConnector, "r1", 100, 96, on(96, 0)),
			outside,
			asked(b, event.AskerConnector, "r3", 100, 0, nil),
			asked(b, event.AskerConnector, "r4", 100, 0, nil),
			asked(a, event.AskerConnector, "r5", 100, 16, on(16, 0)),
			asked(a, event.AskerConnector, "r7", 100, 16, on(16, 0)), // which nobody asked about
		}},
		{Requests: []event.Request{
			request(a, "r1", "s1", "t1", 96, 0, event.EndStopped),
			request(a, "r2", "s1", "t1", 48, 32, event.EndLength),
			request(b, "r3", "s2", "t2", 0, 0, event.EndAborted),
			request(b, "r4", "", "", 0, 64, event.EndLoadError),
		}},
		{Lookups: []event.Lookup{often}},
		{Requests: []event.Request{
			request(a, "r8", "s1", "t1", 0, 16, event.EndStopped),
			request(a, "r9", "s3", "t3", 100, 0, event.EndStopped),
		}},
		{Samples: []event.Sample{
			{Source: a, Device: "GPU-0", MemoryUsed: 60, MemoryTotal: 80, Busy: 100, MemoryBusy: 50, Power: 400_000, Temperature: 60, PCIeReceived: 10, PCIeSent: 30},
			{Source: a, Device: "GPU-0", MemoryUsed: 70, MemoryTotal: 80, Busy: 50, MemoryBusy: 0, Power: 200_000, Temperature: 70, PCIeReceived: 30, PCIeSent: 30},
		}},
	} {
		at := event.Position{Stream: "KV_RECORDS", Created: 1, Sequence: uint64(i + 1)}
		if err := w.Records(t.Context(), at, event.UnixTime(began.Add(time.Duration(i)*20*time.Second)), records); err != nil {
			t.Fatal(err)
		}
		eventually(t, "records are committed", func() bool { return i < 5 || w.CommittedRecords() == at })
	}
	r := newReader(t, e.config())
	capacity, err := r.Ask(t.Context(), "capacity", map[string]string{"since": began.Format(time.RFC3339), "until": began.Add(2 * time.Minute).Format(time.RFC3339)})
	if err != nil {
		t.Fatal(err)
	}
	for _, note := range []string{
		"as the caches are, lookups told by connector found 208 of 600 tokens cached (34.7 %); the query hits has them by time and tier",
		"as the caches are, lookups told by index found 528 of 1100 tokens cached (48.0 %), from one lookup in 10; the query hits has them by time and tier",
	} {
		if !slices.Contains(capacity.Notes, note) {
			t.Errorf("%q are without %q", capacity.Notes, note)
		}
	}
	for _, test := range [][]string{
		{"hits"},
		{"hits", "until=80"},
		{"hits", "asker=connector"},
		{"predicted"},
		{"predicted", "engine=a"},
		{"sessions"},
		{"tenants"},
		{"tenants", "engine=b"},
		{"compare-tenants", "since=70"},
		{"devices"},
	} {
		name := strings.Join(test, "_")
		t.Run(name, func(t *testing.T) {
			values := map[string]string{"since": began.Format(time.RFC3339), "until": began.Add(2 * time.Minute).Format(time.RFC3339)}
			for _, m := range test[1:] {
				key, value, _ := strings.Cut(m, "=")
				switch key {
				case "until": // before the sampled one
					value = began.Add(40 * time.Second).Format(time.RFC3339)
				case "since": // between the first requests and the others
					value = began.Add(70 * time.Second).Format(time.RFC3339)
				}
				values[key] = value
			}
			answer, err := r.Ask(t.Context(), test[0], values)
			if err != nil {
				t.Fatal(err)
			}
			golden(t, "records_"+strings.ReplaceAll(name, "=", "_")+".txt", lines(t, answer, began))
		})
	}
}
