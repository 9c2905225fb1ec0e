package subscriber_test

import (
	"encoding/json"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"kvstrata/event"
	"kvstrata/subscriber"
)

// captured is an entry of the golden files of dialects that are not vLLM's; see interop/golden_mooncake.py and golden_dynamo.py.
type captured struct {
	Name, Version, Source string
	Hex, Text             string
	TS                    int64  `json:"ts_ms"`
	Rank                  *int32 `json:"dp_rank"`
	Events                []capturedEvent
	Event                 *capturedEvent
}

type capturedEvent struct {
	Kind, Key, Medium, Tier string
	Rank                    int32 `json:"dp_rank"`
	Hashes                  []uint64
	Locals                  []uint64 `json:"tokens_hashes"`
	Parent                  *uint64
	Backend                 string `json:"backend_id"`
	Session                 string `json:"session_id"`
	BlockSize               uint32 `json:"block_size"`
	LoRA                    string `json:"lora_name"`
	Salt                    string `json:"additional_salt"`
}

func readCaptured(tb testing.TB, file string) (entries []captured) {
	tb.Helper()
	text, err := os.ReadFile("testdata/" + file)
	if err != nil {
		tb.Fatal(err)
	}
	if err := json.Unmarshal(text, &entries); err != nil {
		tb.Fatal(err)
	}
	return entries
}

// The hashes that the keys of the golden file spell.
var objectHashes = map[string]uint64{
	"my-model@tp_rank:0@pcp0@dcp0@pp_rank:0@group:0@d450abdaf2c9ebdd0e0cbfbc4e24a5c0": 0x0e0cbfbc4e24a5c0,
	"cf97adeedb59e05bfd73a2b4c2a8885708c4f4f70c84c64b27120e72ab733b72_0_k":            0xcf97adeedb59e05b,
	"my-model@1@0@-6d4fa0e5fdb93342@half":                                             -0x6d4fa0e5fdb93342 & (1<<64 - 1),
}

// What a real Mooncake master sent, with all its switches; and what builds before it did, after their source.
func TestMooncakeGolden(t *testing.T) {
	kinds := map[string]event.Kind{"stored": event.Stored, "removed": event.Evicted, "cleared": event.Cleared}
	d, named := subscriber.NewDecoder(subscriber.DecoderConfig{}), 0
	for _, g := range readCaptured(t, "mooncake/golden.json") {
		t.Run(g.Name, func(t *testing.T) {
			want := event.Batch{Time: event.Time(g.TS * 1e6), Rank: -1}
			if g.Rank != nil {
				want.Rank = *g.Rank
			}
			for _, e := range g.Events {
				ev := event.Event{
					Kind: kinds[e.Kind], Tier: event.Tier(e.Medium), Group: event.NoGroup, LoRAID: event.NoLoRAID, Ownership: e.Backend,
					Session: e.Session, BlockSize: e.BlockSize, LoRA: e.LoRA, Salt: e.Salt,
				}
				for _, h := range e.Hashes {
					ev.Blocks = append(ev.Blocks, block(h))
				}
				if h, ok := objectHashes[e.Key]; ok {
					ev.Blocks = append(ev.Blocks, block(h))
					named++
				}
				switch {
				case ev.Kind == event.Cleared:
					ev = event.Event{Kind: event.Cleared, Cause: event.ByEngine, Group: event.NoGroup, LoRAID: event.NoLoRAID}
				case ev.Blocks == nil:
					continue
				}
				want.Events = append(want.Events, ev)
			}
			var got event.Batch
			if err := d.Decode(unhex(g.Hex), &got); err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(want, got, cmpopts.EquateEmpty()); diff != "" {
				t.Errorf("-want +got\n%s", diff)
			}
		})
	}
	for _, o := range d.Oddities() {
		if o.Name != "objects whose key names no block" {
			t.Errorf("a master's own bytes have an oddity: %+v", o)
		}
	}
	if d.Dialect() != subscriber.DialectMooncake || named < 9 {
		t.Errorf("dialect %v, %d keys read", d.Dialect(), named)
	}
}

// What Dynamo's own event plane, tree and recorder wrote.
func TestDynamoGolden(t *testing.T) {
	kinds := map[string]event.Kind{"stored": event.Stored, "removed": event.Evicted, "cleared": event.Cleared}
	tiers := map[string]event.Tier{"": event.GPU, "device": event.GPU, "host_pinned": event.CPU, "disk": event.Disk, "external": event.External}
	d := subscriber.NewDecoder(subscriber.DecoderConfig{BlockSize: 4})
	for _, g := range slices.Concat(readCaptured(t, "dynamo/golden.json"), readCaptured(t, "dynamo/recorder.json")) {
		t.Run(g.Version+"/"+g.Name, func(t *testing.T) {
			e := g.Event
			ev := event.Event{Kind: kinds[e.Kind], Tier: tiers[e.Tier], Group: event.NoGroup, LoRAID: event.NoLoRAID}
			switch ev.Kind {
			case event.Cleared:
				ev.Tier, ev.Cause = "", event.ByEngine
			case event.Stored:
				ev.BlockSize, ev.Locals = 4, e.Locals
			}
			for _, h := range e.Hashes {
				ev.Blocks = append(ev.Blocks, block(h))
			}
			if e.Parent != nil {
				ev.HasParent, ev.Parent = true, event.IntHash(*e.Parent)
			}
			var got event.Batch
			if err := d.Decode([]byte(g.Text), &got); err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(event.Batch{Rank: e.Rank, Events: []event.Event{ev}}, got, cmpopts.EquateEmpty()); diff != "" {
				t.Errorf("-want +got\n%s", diff)
			}
		})
	}
	if odd := d.Oddities(); d.Dialect() != subscriber.DialectDynamo || len(odd) > 0 {
		t.Errorf("dialect %v, oddities %+v", d.Dialect(), odd)
	}
}

// What LMCache's own code puts into vLLM's stream: its engine's chunks are somebody else's, its server's are counted.
func TestLMCacheGolden(t *testing.T) {
	d := subscriber.NewDecoder(subscriber.DecoderConfig{})
	for _, g := range readGolden(t, "lmcache") {
		t.Run(g.Name, func(t *testing.T) {
			want := g.want(t)
			for i := range want.Events {
				if ev := &want.Events[i]; ev.Kind == event.Stored && ev.Tier == "cpu" {
					ev.Locality = event.Remote
					ev.Tokens = ev.Tokens[:min(len(ev.Tokens), len(ev.Blocks)*int(ev.BlockSize))]
				}
			}
			var got event.Batch
			if err := d.Decode(unhex(g.Hex), &got); err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(want, got, cmpopts.EquateEmpty()); diff != "" {
				t.Errorf("-want +got\n%s", diff)
			}
		})
	}
	for _, o := range d.Oddities() {
		if !strings.HasPrefix(o.Name, "stores of LMCache") {
			t.Errorf("oddity %+v", o)
		}
	}
}

// trtEvent is the meaning of an event of testdata/trtllm/reference.json, which was made by hand after TensorRT-LLM's sources.
type trtEvent struct {
	Kind   string
	Rank   *int32 `json:"dp_rank"`
	Window int32  `json:"window_size"`
	Layers *int32 `json:"layer_group"`
	Hashes []goldenJSONHash
	Parent *goldenJSONHash
	Tokens [][]uint32
	Levels []int
	Salts  []*string
	Old    *int `json:"level_old"`
	New    *int `json:"level_new"`
}

// goldenJSONHash is a hash as JSON has it: an integer, or bytes in hexadecimal.
type goldenJSONHash struct{ event.BlockHash }

func (h *goldenJSONHash) UnmarshalJSON(text []byte) (err error) {
	var s string
	if json.Unmarshal(text, &s) == nil {
		h.BlockHash, err = event.ParseBlockHash(s)
		return err
	}
	var n uint64
	err = json.Unmarshal(text, &n)
	h.BlockHash = event.IntHash(n)
	return err
}

// want returns the events that one of TensorRT-LLM's must give, tokens and salts apart.
func (e *trtEvent) want() (events []event.Event) {
	tiers := []event.Tier{event.GPU, event.CPU}
	group := event.Group(e.Window)
	if e.Layers != nil {
		group = event.Group(*e.Layers)
	}
	add := func(kind event.Kind, tier event.Tier, hashes ...goldenJSONHash) *event.Event {
		ev := event.Event{Kind: kind, Tier: tier, Group: group, LoRAID: event.NoLoRAID}
		for _, h := range hashes {
			ev.Blocks = append(ev.Blocks, event.Block{Hash: h.BlockHash, Copies: -1, Age: -1})
		}
		events = append(events, ev)
		return &events[len(events)-1]
	}
	switch e.Kind {
	case "stored":
		ev := add(event.Stored, tiers[e.Levels[0]], e.Hashes...)
		ev.Window = uint32(e.Window)
		for _, block := range e.Tokens {
			ev.Tokens, ev.BlockSize = append(ev.Tokens, block...), uint32(len(block))
		}
		if e.Parent != nil {
			ev.HasParent, ev.Parent = true, e.Parent.BlockHash
		}
		if e.Salts[0] != nil {
			ev.Salt = *e.Salts[0]
		}
	case "removed":
		add(event.Evicted, event.AnyTier, e.Hashes...)
	case "updated":
		if e.Old == nil || *e.Old == *e.New {
			return nil
		}
		add(event.Evicted, tiers[*e.Old], e.Hashes...)
		add(event.Stored, tiers[*e.New], e.Hashes...)
		if *e.New < *e.Old {
			add(event.Loaded, tiers[*e.New], e.Hashes...).Load.From = tiers[*e.Old]
		}
	}
	return events
}

func TestTensorRTReference(t *testing.T) {
	text, err := os.ReadFile("testdata/trtllm/reference.json")
	if err != nil {
		t.Fatal(err)
	}
	var entries []struct {
		Name, Form, Text string
		Events           []trtEvent
	}
	if err := json.Unmarshal(text, &entries); err != nil {
		t.Fatal(err)
	}
	d, checked := subscriber.NewDecoder(subscriber.DecoderConfig{}), 0
	for _, e := range entries {
		if e.Form != "json" {
			continue
		}
		t.Run(e.Name, func(t *testing.T) {
			var list []json.RawMessage
			if json.Unmarshal([]byte(e.Text), &list) != nil {
				list = []json.RawMessage{json.RawMessage(e.Text)}
			}
			if len(list) != len(e.Events) {
				t.Fatalf("%d events in the text, %d meant", len(list), len(e.Events))
			}
			for i, raw := range list {
				want := event.Batch{Rank: -1, Events: e.Events[i].want()}
				if e.Events[i].Rank != nil {
					want.Rank = *e.Events[i].Rank
				}
				var got event.Batch
				if err := d.Decode(raw, &got); err != nil {
					t.Fatalf("%s: %v", raw, err)
				}
				for j := range got.Events { // keys and adapters have tests of their own
					got.Events[j].ExtraKeys, got.Events[j].LoRAID = nil, event.NoLoRAID
				}
				if diff := cmp.Diff(want, got, cmpopts.EquateEmpty()); diff != "" {
					t.Errorf("%s\n-want +got\n%s", raw, diff)
				}
				checked++
			}
		})
	}
	if odd := d.Oddities(); len(odd) > 0 || d.Dialect() != subscriber.DialectTensorRT || checked < 15 {
		t.Errorf("dialect %v, %d events, oddities %+v", d.Dialect(), checked, odd)
	}
}

// TensorRT-LLM's stream is vLLM's, with signed hashes; where an image stands a token can be text, and then its run has no names.
func TestTensorRTStreaming(t *testing.T) {
	text, err := os.ReadFile("testdata/trtllm/reference.json")
	if err != nil {
		t.Fatal(err)
	}
	var entries []struct{ Name, Form, Hex string }
	if err := json.Unmarshal(text, &entries); err != nil {
		t.Fatal(err)
	}
	d := subscriber.NewDecoder(subscriber.DecoderConfig{})
	for _, e := range entries {
		if e.Form != "map" {
			continue
		}
		var b event.Batch
		if err := d.Decode(unhex(e.Hex), &b); err != nil {
			t.Errorf("%s: %v", e.Name, err)
			continue
		}
		ev := &b.Events[0]
		switch e.Name {
		case "streaming-stored-text-token":
			if len(ev.Blocks) != 2 || ev.Tokens != nil {
				t.Errorf("%s: %d blocks, tokens %v", e.Name, len(ev.Blocks), ev.Tokens)
			}
		case "streaming-stored-mm":
			if len(ev.ExtraKeys) != 2 || len(ev.ExtraKeys[0]) < 10 {
				t.Errorf("%s: extra keys %v", e.Name, ev.ExtraKeys)
			}
		}
	}
	if odd := d.Oddities(); d.Dialect() != subscriber.DialectTensorRT || len(odd) != 1 || odd[0].Name != "tokens that are text" {
		t.Errorf("dialect %v, oddities %+v", d.Dialect(), odd)
	}
}

// SGLang's publisher sends the topic in replays since 0.5.22 and left it out before: a gap is closed by either.
func TestSGLangReplays(t *testing.T) {
	text, err := os.ReadFile("testdata/sglang/frames.json")
	if err != nil {
		t.Fatal(err)
	}
	var entries []struct {
		Version, Kind string
		Frames        []string
	}
	if err := json.Unmarshal(text, &entries); err != nil {
		t.Fatal(err)
	}
	live, shape := make(map[string][][]byte), make(map[string]int)
	for _, e := range entries {
		switch n := len(e.Frames); e.Kind {
		case "live":
			if n != 3 || unhex(e.Frames[1])[7] != byte(len(live[e.Version])) {
				t.Errorf("%s: live frames %q", e.Version, e.Frames)
			}
			live[e.Version] = append(live[e.Version], unhex(e.Frames[2]))
		case "replay":
			shape[e.Version] = n
		case "end":
			if e.Frames[n-1] != "" || e.Frames[n-2] != "ffffffffffffffff" || n != shape[e.Version] {
				t.Errorf("%s: the end is %q", e.Version, e.Frames)
			}
		}
	}
	if len(live) != 5 {
		t.Errorf("%d releases", len(live))
	}
	for version, payloads := range live {
		t.Run(version, func(t *testing.T) {
			if version == "0.5.3" { // whose frames were made without events
				payloads = live["0.5.17"]
			}
			r, e := newRoad(t), startEngine(t)
			e.mu.Lock()
			e.withTopic = shape[version] == 4
			e.mu.Unlock()
			r.subscribe(e.config("a"))
			e.raw(true, payloads[0])
			r.await("a", 0, event.StateLive)
			e.raw(false, payloads[1])
			e.raw(true, payloads[2])
			if l := r.await("a", 2, event.StateLive).Ledger; l.Recovered+l.Held+l.Live+l.Asked != 3 || l.Lost > 0 {
				t.Errorf("ledger %+v", l)
			}
		})
	}
}
