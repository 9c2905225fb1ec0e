package event_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"kvstrata/event"
	"kvstrata/event/eventpb"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"
	"pgregory.net/rapid"
)

// sample returns batches that use every field of the model.
func sample() []event.Batch {
	return []event.Batch{
		{
			First: 7, Last: 7, Way: event.Live, Time: 1_789_095_808_837_884_664, Received: 1_789_095_808_900_000_000,
			Payload: 0xfeedface, Rank: 0,
			Events: []event.Event{
				{
					Kind: event.Stored, Tier: event.GPU, Group: 2, HasParent: true, Parent: event.BytesHash(strings.Repeat("p", 32)),
					Seed: 1337, BlockSize: 16, Eagle: true, Spec: event.SpecFull, Window: 4096, LoRA: "adapter", LoRAID: -3,
					Session: "s-1", Locality: event.Local, Ownership: "tier-2", Tokens: []uint32{1, 300, 70000},
					ExtraKeys: [][]byte{[]byte("\x91\xa1a"), nil},
					Blocks: []event.Block{
						{Hash: event.IntHash(math.MaxUint64), Prefix: 99, Effect: +1, Copies: -1, Age: -1},
						{Hash: event.BytesHash("abc"), Prefix: 100, Copies: -1, Age: -1},
					},
				},
				{
					Kind: event.Evicted, Tier: event.CPU, Group: event.NoGroup, LoRAID: event.NoLoRAID,
					Blocks: []event.Block{{Hash: event.IntHash(5), Prefix: 98, Effect: -1, Copies: 0, Age: 0}},
				},
				{
					Kind: event.Loaded, Tier: event.GPU, Group: event.NoGroup, LoRAID: 0,
					Load:   event.Load{From: event.CPU, Peer: "10.0.0.2", Request: "r", Bytes: 1 << 40, Duration: time.Second},
					Blocks: []event.Block{{Hash: event.IntHash(6), Copies: -1, Age: -1}},
				},
				{Kind: event.Stored, Tier: event.GPU, Group: event.NoGroup, LoRAID: event.NoLoRAID, Unrooted: true},
			},
		},
		{
			First: 8, Last: 12, Way: event.Lost, Reason: "no replay endpoint", Rank: -1,
			Events: []event.Event{{Kind: event.Cleared, Cause: event.ByResync, Group: event.NoGroup, LoRAID: event.NoLoRAID}},
		},
		{First: 13, Last: 13, Way: event.Held, Time: 5, Rank: 3},
	}
}

// normal makes nil and empty slices alike.
func normal(batches []event.Batch) []event.Batch {
	batches = slices.Clone(batches)
	for i := range batches {
		b := &batches[i]
		b.Events = slices.Clone(b.Events)
		for j := range b.Events {
			ev := &b.Events[j]
			ev.Blocks = append([]event.Block{}, ev.Blocks...)
			ev.Tokens = append([]uint32{}, ev.Tokens...)
			keys := make([][]byte, len(ev.ExtraKeys))
			for k := range ev.ExtraKeys {
				keys[k] = append([]byte{}, ev.ExtraKeys[k]...)
			}
			ev.ExtraKeys = keys
		}
		b.Events = append([]event.Event{}, b.Events...)
	}
	return batches
}

func encode(batches []event.Batch) []byte {
	var enc event.Encoder
	for i := range batches {
		enc.Append(&batches[i])
	}
	return enc.Encode(nil)
}

func TestEveryFieldTravels(t *testing.T) {
	want := sample()
	var dec event.Decoder
	got, err := dec.Decode(encode(want))
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(normal(want), normal(got)); diff != "" {
		t.Error(diff)
	}
}

// The hand-written codec and protobuf's own must read each other: the .proto is normative.
func TestPayloadIsTheProtoMessage(t *testing.T) {
	payload := encode(sample())
	var pb eventpb.Batches
	if err := proto.Unmarshal(payload, &pb); err != nil {
		t.Fatal(err)
	}
	if len(pb.ProtoReflect().GetUnknown()) > 0 {
		t.Errorf("fields that event.proto does not know: %x", pb.ProtoReflect().GetUnknown())
	}
	if diff := cmp.Diff([]uint32{4, 1, 0}, pb.Runs); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff([]uint64{99, 100, 98, 0}, pb.Prefix); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff([]int32{1, 0, -1, 0}, pb.Effect); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff([]uint32{1, 300, 70000}, pb.Tokens); diff != "" {
		t.Error(diff)
	}
	again, err := proto.Marshal(&pb)
	if err != nil {
		t.Fatal(err)
	}
	var dec event.Decoder
	got, err := dec.Decode(again)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(normal(sample()), normal(got)); diff != "" {
		t.Error(diff)
	}
}

func TestEncoderIsReusable(t *testing.T) {
	var enc event.Encoder
	batches := sample()
	enc.Append(&batches[0])
	first := enc.Encode(nil)
	enc.Append(&batches[0])
	if got := enc.Encode(nil); !bytes.Equal(got, first) {
		t.Error("a reused encoder gives other bytes")
	}
}

func TestEncoderRefusesAGap(t *testing.T) {
	defer func() {
		if recover() == nil {
			t.Error("batches that do not follow each other were joined")
		}
	}()
	var enc event.Encoder
	enc.Append(&event.Batch{First: 1, Last: 1})
	enc.Append(&event.Batch{First: 3, Last: 3})
}

func TestTruncatedPayloadsAreErrors(t *testing.T) {
	payload := encode(sample())
	var dec event.Decoder
	for n := range payload {
		_, err := dec.Decode(payload[:n])
		var wire *event.WireError
		if err != nil && !errors.As(err, &wire) {
			t.Fatalf("cut at %d: %T %v", n, err, err)
		}
	}
	// A message with two blocks of hashes fewer than rows.
	pb := &eventpb.Batches{Runs: []uint32{1}, Kind: []uint32{1}, Blocks: []uint32{4_000_000_000}, Hashes: make([]byte, 16)}
	bad, err := proto.Marshal(pb)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := dec.Decode(bad); err == nil {
		t.Error("four billion blocks in sixteen bytes of hashes")
	}
}

func FuzzDecode(f *testing.F) {
	f.Add(encode(sample()))
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, payload []byte) {
		var dec event.Decoder
		batches, err := dec.Decode(payload)
		if err != nil {
			return
		}
		again, err := new(event.Decoder).Decode(encode(batches))
		if err != nil {
			t.Fatalf("what was decoded can't be encoded and decoded: %v", err)
		}
		if diff := cmp.Diff(normal(batches), normal(again)); diff != "" {
			t.Fatal(diff)
		}
	})
}

func FuzzReadCheckpoint(f *testing.F) {
	var object bytes.Buffer
	cp, entries := checkpoint()
	if err := event.WriteCheckpoint(&object, cp, slices.Values(entries)); err != nil {
		f.Fatal(err)
	}
	f.Add(object.Bytes())
	f.Fuzz(func(t *testing.T, object []byte) {
		rows := uint64(0)
		cp, err := event.ReadCheckpoint(bytes.NewReader(object), func(*event.Entry) { rows++ })
		if err == nil && cp.Entries != rows {
			t.Fatalf("%d entries promised, %d given", cp.Entries, rows)
		}
	})
}

func checkpoint() (*event.Checkpoint, []*event.Entry) {
	entries := []*event.Entry{
		{Hash: event.IntHash(1), Tier: event.GPU, Copies: 2, Stored: 77, Prefix: 5, Seed: 1337, BlockSize: 16},
		{Hash: event.BytesHash("long"), Group: 1, Tier: event.CPU, Copies: 1, Prefix: 6, HasParent: true, Parent: event.IntHash(1), Eagle: true},
		{Hash: event.IntHash(3), Local: 9, HasParent: true, Parent: event.BytesHash("x")},
	}
	return &event.Checkpoint{
		Source: event.Source{Cluster: "c", Model: "m/x", Instance: "i", Rank: 1, Origin: event.Engine}, Epoch: 12, Fence: 13,
		Seq: 14, State: event.StatePartial, Reason: "joined late", Written: 15, Digest: 16,
		Ledger:   event.Ledger{Started: true, First: 10, Last: 14, Live: 3, Lost: 2, Holes: []event.Hole{{First: 11, Last: 12, Reason: "r"}}},
		Position: event.Position{Stream: "KV", Created: 17, Sequence: 18},
		Recents:  []event.Recent{{Seq: 14, Time: 5, Payload: 6}},
		Groups:   []event.GroupInfo{{Group: 1, BlockSize: 16, Spec: event.SpecMLA}}, Entries: uint64(len(entries)), Fullest: 7,
		PastLives: []event.PastLife{{Epoch: 3, Ledger: event.Ledger{Started: true, First: 2, Last: 4, Live: 2, Lost: 1}, TailUnknown: true}},
	}, entries
}

func TestCheckpointTravels(t *testing.T) {
	want, entries := checkpoint()
	var object bytes.Buffer
	if err := event.WriteCheckpoint(&object, want, slices.Values(entries)); err != nil {
		t.Fatal(err)
	}
	var got []*event.Entry
	cp, err := event.ReadCheckpoint(bytes.NewReader(object.Bytes()), func(e *event.Entry) {
		own := *e
		got = append(got, &own)
	})
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, cp); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff(entries, got); diff != "" {
		t.Error(diff)
	}
	for n := range object.Len() {
		if _, err := event.ReadCheckpoint(bytes.NewReader(object.Bytes()[:n]), func(*event.Entry) {}); err == nil {
			t.Fatalf("cut at %d of %d bytes, and no error", n, object.Len())
		}
	}
}

func TestStatusTravels(t *testing.T) {
	cp, _ := checkpoint()
	want := event.Status{
		Source: cp.Source, Epoch: 1, Fence: 2, Seq: 3, State: event.StateLive, Reason: "r", Time: 4, Digest: 5, Ledger: cp.Ledger,
		Dialect: "vllm-map", Endpoint: "tcp://127.0.0.1:5557", Copies: event.CopiesUnknown, PoolSize: 6, Stores: []string{"redis"},
		Counters: []event.Counter{{Name: "unknown_key", Count: 2, Example: "origin"}}, Groups: cp.Groups, Withdrawn: true,
		Contract: event.Contract{
			Forms: []string{"map"}, Fields: []string{"BlockStored.block_hashes"}, Hashes: []string{"uint64"}, Media: []string{"GPU"},
			Check: event.HashContract{
				Verdict: event.HashesDiffer, Scheme: "sha256", Seed: "0", Keys: "tagged", Verified: 5, Differ: 1, Skipped: 2, Reason: "first difference in batch 3",
			},
		},
		HashScheme: "sha256", HashSeed: "0", PastLives: cp.PastLives,
	}
	payload, err := event.MarshalStatus(&want)
	if err != nil {
		t.Fatal(err)
	}
	got, err := event.UnmarshalStatus(payload, cp.Source)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

func TestLinesForPeopleHoldNoPromptText(t *testing.T) {
	m := event.Message{Source: event.Source{Cluster: "c", Model: "m", Instance: "i", Origin: event.Engine}, Epoch: 9, Batches: sample()}
	m.Batches[0].Events[0].Salt = "canary-salt"
	var out bytes.Buffer
	if err := m.WriteLines(&out); err != nil {
		t.Fatal(err)
	}
	if strings.Contains(out.String(), "70000") || strings.Contains(out.String(), "canary") {
		t.Errorf("tokens or salt in %s", out.String())
	}
	lines := strings.Split(strings.TrimSpace(out.String()), "\n")
	if len(lines) != 6 {
		t.Fatalf("%d lines, want one an event and one for the batch without any", len(lines))
	}
	var evicted map[string]any
	if err := json.Unmarshal([]byte(lines[1]), &evicted); err != nil {
		t.Fatal(err)
	}
	want := []any{map[string]any{
		"hash": "0000000000000005", "prefix": "0000000000000062", "effect": -1., "copies_left": 0., "age_s": 0.,
	}}
	if diff := cmp.Diff(want, evicted["blocks"]); diff != "" {
		t.Error(diff)
	}
}

func TestLedgerAddsUp(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var l event.Ledger
		next := event.Seq(rapid.IntRange(0, 5).Draw(t, "first"))
		for range rapid.IntRange(1, 200).Draw(t, "batches") {
			way := rapid.SampledFrom([]event.Way{event.Live, event.Recovered, event.Held, event.Asked, event.Lost}).Draw(t, "way")
			b := event.Batch{First: next, Last: next, Way: way}
			if way == event.Lost {
				b.Last += event.Seq(rapid.IntRange(0, 9).Draw(t, "span"))
			}
			next = b.Last + 1
			l.Count(&b)
			if !l.Balanced() {
				t.Fatalf("ledger does not add up: %+v", l)
			}
		}
		l.Lost++
		if l.Balanced() {
			t.Fatal("a ledger that is wrong passed")
		}
	})
}

// shapes are the messages of the benchmarks: runs, and blocks a run.
var shapes = []struct{ runs, blocks int }{{1, 64}, {32, 1}, {1, 1}}

func shaped(runs, blocks int) []event.Batch {
	b := event.Batch{Events: make([]event.Event, runs)}
	for i := range b.Events {
		b.Events[i] = event.Event{Kind: event.Stored, Tier: event.GPU, LoRAID: event.NoLoRAID, Blocks: make([]event.Block, blocks)}
	}
	return []event.Batch{b}
}

func BenchmarkEncode(b *testing.B) {
	for _, shape := range shapes {
		b.Run(fmt.Sprintf("%dx%d", shape.runs, shape.blocks), func(b *testing.B) {
			batches := shaped(shape.runs, shape.blocks)
			var enc event.Encoder
			var buf []byte
			b.ReportAllocs()
			for b.Loop() {
				enc.Append(&batches[0])
				buf = enc.Encode(buf[:0])
			}
			blocks := float64(shape.runs * shape.blocks)
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/blocks, "ns/block")
			b.ReportMetric(float64(len(buf))/blocks, "B/block")
		})
	}
}

func BenchmarkDecode(b *testing.B) {
	for _, shape := range shapes {
		b.Run(fmt.Sprintf("%dx%d", shape.runs, shape.blocks), func(b *testing.B) {
			payload := encode(shaped(shape.runs, shape.blocks))
			var dec event.Decoder
			b.ReportAllocs()
			for b.Loop() {
				if _, err := dec.Decode(payload); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(shape.runs*shape.blocks), "ns/block")
		})
	}
}
