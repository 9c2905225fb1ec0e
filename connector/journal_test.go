package connector_test

import (
	"errors"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"kvstrata/connector"
	"kvstrata/event"
)

func names(first, n int) (out []connector.Name) {
	for i := range n {
		out = append(out, connector.Name{Hash: event.IntHash(uint64(first + i)), Prefix: event.PrefixHash(1000 + first + i)})
	}
	return out
}

func blocks(first, n int) (out []event.Block) {
	for _, name := range names(first, n) {
		out = append(out, event.Block{Hash: name.Hash, Prefix: name.Prefix, Copies: -1, Age: -1})
	}
	return out
}

func newJournal(ranks int) *connector.Journal {
	return connector.NewJournal(&connector.Setup{
		Config: connector.Config{Connector: "test"}, Ranks: ranks, Tier: event.GPU, Model: connector.Model{BlockTokens: 16},
	})
}

// done is one rank's report.
func done(op connector.Op, first, blocks int, bytes uint64, took time.Duration, err error, bad ...int) *connector.Report {
	return &connector.Report{Done: []connector.Done{{
		Op: op, Request: "r", First: first, Blocks: blocks, Bad: bad, Peer: "peer", Err: err,
		Transfer: connector.Transfer{Bytes: bytes, Duration: took, Post: took / 10, Descriptors: 2},
	}}}
}

func TestALoadOfTwoRanksIsOneLoaded(t *testing.T) {
	j := newJournal(2)
	j.Loading(connector.Run{
		Request: "r", First: 3, Blocks: 4, Names: names(3, 3), Local: []int{7, 8, 9, 10}, LoRA: "l", Away: event.CPU,
	})
	j.Update(&connector.Output{Metadata: done(connector.Load, 3, 4, 400, time.Second, nil)})
	if ev := j.TakeEvents(); ev != nil || !j.IsLoading("r") {
		t.Fatalf("one rank has reported, and %v is told", ev)
	}
	report := done(connector.Load, 3, 4, 100, 2*time.Second, nil)
	j.Update(&connector.Output{Metadata: report, FinishedReceiving: []string{"r"}})
	want := []event.Event{{
		Kind: event.Loaded, Blocks: blocks(3, 3), Tier: event.GPU, Group: event.NoGroup, BlockSize: 16, LoRA: "l", LoRAID: event.NoLoRAID,
		Load: event.Load{From: event.CPU, Peer: "peer", Request: "r", Bytes: 500, Duration: 2 * time.Second},
	}}
	if diff := cmp.Diff(want, j.TakeEvents()); diff != "" {
		t.Errorf("events (-want +got):\n%s", diff)
	}
	records := []event.Transfer{{
		Kind: event.TransferLoaded, Transport: "test", Request: "r", Peer: "peer", From: event.CPU, To: event.GPU, Blocks: 4, Ranks: 2,
		Bytes: 500, Pieces: 4, Duration: 2 * time.Second, Post: time.Second / 5,
	}}
	if diff := cmp.Diff(records, j.TakeRecords()); diff != "" {
		t.Errorf("records (-want +got):\n%s", diff)
	}
	if j.Pending() != 0 || j.TakeEvents() != nil || j.TakeRecords() != nil {
		t.Error("something is left")
	}
}

// A block that failed on any rank, in any pass, is not told as loaded.
func TestLoadedLeavesOutWhatFailed(t *testing.T) {
	j := newJournal(2)
	j.Loading(connector.Run{Request: "r", Blocks: 5, Names: names(0, 5), Local: []int{20, 21, 22, 23, 24}, Away: event.GPU})
	j.Update(&connector.Output{Metadata: done(connector.Load, 0, 5, 300, time.Second, errors.New("reset by peer")), InvalidBlocks: []int{21}})
	j.Update(&connector.Output{
		Metadata: done(connector.Load, 0, 5, 300, time.Second, nil), InvalidBlocks: []int{21, 24, 99}, FinishedReceiving: []string{"r"},
		FailedReceiving: []string{"r"},
	})
	var got [][]event.Block
	var bytes []uint64
	for _, ev := range j.TakeEvents() {
		got, bytes = append(got, ev.Blocks), append(bytes, ev.Load.Bytes)
	}
	if diff := cmp.Diff([][]event.Block{blocks(0, 1), blocks(2, 2)}, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]uint64{200, 400}, bytes); diff != "" {
		t.Errorf("shares of the bytes (-want +got):\n%s", diff)
	}
	var kinds []string
	for _, r := range j.TakeRecords() {
		kinds = append(kinds, r.Kind.String()+" "+r.Reason)
		if want := map[event.TransferKind]uint32{event.TransferLoaded: 3, event.TransferFailed: 2}[r.Kind]; r.Blocks != want {
			t.Errorf("%v: %d blocks, want %d", r.Kind, r.Blocks, want)
		}
	}
	if diff := cmp.Diff([]string{"loaded ", "failed reset by peer"}, kinds); diff != "" {
		t.Error(diff)
	}
}

func TestASaveIsStoredOnceEveryRankHasDoneItsPart(t *testing.T) {
	j := newJournal(2)
	parent := names(3, 1)[0]
	j.Saving(connector.Run{Request: "r", First: 4, Blocks: 4, Names: names(4, 4), Parent: &parent, Away: event.Storage, Store: "shop"})
	if saved := j.Update(&connector.Output{Metadata: done(connector.Save, 4, 4, 10, 1, nil)}); saved != nil || len(j.TakeEvents()) > 0 {
		t.Fatalf("%v is saved after one rank", saved)
	}
	saved := j.Update(&connector.Output{Metadata: done(connector.Save, 4, 4, 10, 1, errors.New("full"), 2, 3)})
	if diff := cmp.Diff([]string{"r"}, saved); diff != "" {
		t.Error(diff)
	}
	want := []event.Event{{
		Kind: event.Stored, Blocks: blocks(4, 2), Tier: event.Storage, Group: event.NoGroup, BlockSize: 16, LoRAID: event.NoLoRAID,
		HasParent: true, Parent: parent.Hash, Locality: event.Remote, Ownership: "shop",
	}}
	if diff := cmp.Diff(want, j.TakeEvents()); diff != "" {
		t.Errorf("events (-want +got):\n%s", diff)
	}
	if n := len(j.TakeRecords()); n != 2 {
		t.Errorf("%d records, want what was saved and what failed", n)
	}
}

func TestExpiryIsARecordAndNoEvent(t *testing.T) {
	j := newJournal(2)
	j.Update(&connector.Output{Metadata: &connector.Report{Expired: []string{"r"}}})
	j.Update(&connector.Output{Metadata: &connector.Report{Expired: []string{"r"}}, FinishedSending: []string{"r", "s"}})
	if ev := j.TakeEvents(); ev != nil {
		t.Errorf("events %v", ev)
	}
	want := []event.Transfer{{Kind: event.LeaseExpired, Transport: "test", Request: "r", From: event.GPU, Ranks: 2}}
	if diff := cmp.Diff(want, j.TakeRecords()); diff != "" {
		t.Error(diff)
	}
}

// When one rank got everything and the other nothing, nothing is there: that is told, and no load of no blocks.
func TestALoadThatOneRankDidIsNone(t *testing.T) {
	j := newJournal(2)
	j.Loading(connector.Run{Request: "r", Blocks: 1, Names: names(0, 1), Local: []int{20}, Away: event.GPU})
	j.Update(&connector.Output{Metadata: done(connector.Load, 0, 1, 300, time.Second, nil)})
	j.Update(&connector.Output{
		Metadata: done(connector.Load, 0, 1, 0, time.Second, errors.New("gone")), InvalidBlocks: []int{20}, FinishedReceiving: []string{"r"},
	})
	records := j.TakeRecords()
	if len(records) != 1 || records[0].Kind != event.TransferFailed || j.TakeEvents() != nil {
		t.Errorf("%+v", records)
	}
}
