package publisher_test

import (
	"cmp"
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	gocmp "github.com/google/go-cmp/cmp"

	"kvstrata/event"
	"kvstrata/publisher"
)

func TestRecordsReachTheirStream(t *testing.T) {
	_, b := startBus(t)
	source := event.Source{Cluster: "c", Model: "m", Instance: "decode-0", Origin: event.Connector}
	r := publisher.NewRecords(b, quiet())
	var want []event.Transfer
	for i := range 700 { // more than one message takes
		want = append(want, event.Transfer{
			Source: source, Kind: event.TransferLoaded, Time: event.Time(i), Transport: "tcp", Request: "r", Peer: "prefill-0",
			From: event.GPU, To: event.GPU, Blocks: 7, Ranks: 2, Bytes: 1 << 20, Pieces: 64, Duration: time.Millisecond, Post: time.Microsecond,
		})
	}
	expired := event.Transfer{Source: source, Kind: event.LeaseExpired, Transport: "tcp", Request: "s", Reason: "-ERR \xff\xfe" + strings.Repeat("x", 600)}
	r.Record(event.Records{Transfers: slices.Clone(want)})
	r.Record(event.Records{Transfers: []event.Transfer{expired}})
	engine, other := event.Source{Cluster: "c", Model: "m", Instance: "decode-0", Origin: event.Engine}, event.Source{Cluster: "c", Model: "m", Origin: event.Engine}
	lookups := []event.Lookup{
		{
			Source: engine, Asker: event.AskerConnector, Time: 7, Request: "r", Session: "s", Tenant: "t", OneIn: 1, BlockSize: 16, Tokens: 100, Prefix: 1 << 63,
			Shares: []event.Share{{Tier: event.GPU, Tokens: 64}, {Tier: event.External, Tokens: 16}}, Holders: 1, Longest: 80,
		},
		{Source: other, Asker: event.AskerIndex, Time: 8, OneIn: 100, BlockSize: 16, Tokens: 5},
	}
	requests := []event.Request{{
		Source: engine, Time: 9, Request: "r", Session: "s", Tenant: "t", Prompt: 100, Output: 12, Cached: 64, External: 16, End: event.EndLength,
	}}
	samples := []event.Sample{{
		Source: engine, Time: 10, Device: "GPU-1", MemoryUsed: 1, MemoryTotal: 2, Busy: 3, MemoryBusy: 4, Power: 5, Temperature: 6, PCIeReceived: 7, PCIeSent: 8,
	}}
	r.Record(event.Records{Lookups: lookups, Requests: requests, Samples: samples})
	expired.Reason = "-ERR \uFFFD" + strings.Repeat("x", 505) // what a server says is cut, and made UTF-8
	want = append(want, expired)
	// What is queued is sent though Run is told to end at once.
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := r.Run(ctx); err != nil {
		t.Fatal(err)
	}
	if r.Dropped() > 0 {
		t.Errorf("%d were dropped", r.Dropped())
	}
	reader, err := b.ReadRecords(t.Context(), event.Position{})
	if err != nil {
		t.Fatal(err)
	}
	defer reader.Close()
	var got event.Records
	for range reader.Identity().Sequence {
		d, err := reader.Next(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		records, err := d.Records()
		if err != nil {
			t.Fatal(err)
		}
		got.Transfers, got.Lookups = append(got.Transfers, records.Transfers...), append(got.Lookups, records.Lookups...)
		got.Requests, got.Samples = append(got.Requests, records.Requests...), append(got.Samples, records.Samples...)
	}
	slices.SortFunc(got.Lookups, func(p, q event.Lookup) int { return cmp.Compare(p.Time, q.Time) }) // each source has messages of its own
	if diff := gocmp.Diff(event.Records{Transfers: want, Lookups: lookups, Requests: requests, Samples: samples}, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// Nobody waits: what finds no room is counted.
func TestRecordsThatFindNoRoom(t *testing.T) {
	_, b := startBus(t)
	r := publisher.NewRecords(b, quiet())
	for range 2000 {
		r.Record(event.Records{Transfers: make([]event.Transfer, 2), Lookups: make([]event.Lookup, 1)})
	}
	if n := r.Dropped(); n == 0 || n%3 != 0 || n >= 6000 {
		t.Errorf("%d of 6000 were dropped", n)
	}
}
