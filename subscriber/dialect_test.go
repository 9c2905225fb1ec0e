package subscriber_test

import (
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"kvstrata/event"
	"kvstrata/subscriber"
)

// What SGLang's own classes, radix cache and publisher of five releases wrote.
func TestSGLangGolden(t *testing.T) {
	decoders := make(map[string]*subscriber.Decoder)
	for _, g := range readGolden(t, "sglang") {
		if decoders[g.Version] == nil {
			decoders[g.Version] = subscriber.NewDecoder(subscriber.DecoderConfig{})
		}
		t.Run(g.Version+"/"+g.Name, func(t *testing.T) {
			var got event.Batch
			if err := decoders[g.Version].Decode(unhex(g.Hex), &got); err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(g.want(t), got, cmpopts.EquateEmpty()); diff != "" {
				t.Errorf("-want +got\n%s", diff)
			}
		})
	}
	for version, d := range decoders {
		if d.Dialect() != subscriber.DialectSGLang {
			t.Errorf("%s is taken for %v", version, d.Dialect())
		}
		for _, c := range d.Oddities() {
			t.Errorf("SGLang %s's own bytes have an oddity: %+v", version, c)
		}
	}
}

// vLLM is recognised by what each of its releases wrote.
func TestVLLMIsRecognised(t *testing.T) {
	decoders := make(map[string]*subscriber.Decoder)
	for _, g := range readGolden(t, "vllm") {
		if decoders[g.Version] == nil {
			decoders[g.Version] = subscriber.NewDecoder(subscriber.DecoderConfig{})
			if got := decoders[g.Version].Dialect(); got != subscriber.AnyDialect || got.Told() != "unknown" {
				t.Errorf("%v (%s) before anything came", got, got.Told())
			}
		}
		var b event.Batch
		_ = decoders[g.Version].Decode(unhex(g.Hex), &b) // one entry has a token too wide
	}
	for version, d := range decoders {
		if d.Dialect() != subscriber.DialectVLLM {
			t.Errorf("%s is taken for %v", version, d.Dialect())
		}
	}
}

// stored is a map event as TensorRT-LLM's and vLLM's streams have it, with a hash.
func storedMap(hash any, fields map[string]any) map[string]any {
	m := map[string]any{
		"type": "BlockStored", "block_hashes": []any{hash}, "parent_block_hash": nil, "token_ids": []any{1, 2}, "block_size": 2,
		"lora_id": nil, "medium": "GPU", "lora_name": nil,
	}
	for k, v := range fields {
		m[k] = v
	}
	return m
}

func TestDialectsThatLookAlike(t *testing.T) {
	high := uint64(1) << 63
	for _, tt := range []struct {
		name   string
		events []any
		want   subscriber.Dialect
		hashes []string
	}{
		{"vLLM's unsigned hashes", []any{storedMap(high, nil)}, subscriber.DialectVLLM, []string{"uint64"}},
		{"TensorRT-LLM's signed ones", []any{storedMap(-5, map[string]any{"locality": "LOCAL"})}, subscriber.DialectTensorRT, []string{"int64"}},
		{"small hashes only", []any{storedMap(5, nil)}, subscriber.DialectVLLM, []string{"uint64"}},
		{"byte hashes", []any{storedMap(make([]byte, 32), nil)}, subscriber.DialectVLLM, []string{"bytes32"}},
		{"SGLang leaves nil out", []any{map[string]any{
			"type": "BlockStored", "block_hashes": []any{-5}, "parent_block_hash": nil, "token_ids": []any{1, 2}, "block_size": 2, "lora_id": nil,
		}}, subscriber.DialectSGLang, []string{"int64"}},
		{"only removals", []any{map[string]any{"type": "BlockRemoved", "block_hashes": []any{5}, "medium": "GPU"}}, subscriber.AnyDialect, []string{"uint64"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			d := subscriber.NewDecoder(subscriber.DecoderConfig{})
			var b event.Batch
			if err := d.Decode(pack([]any{1.5, tt.events, 0}), &b); err != nil {
				t.Fatal(err)
			}
			if d.Dialect() != tt.want || !slices.Equal(d.Contract().Hashes, tt.hashes) {
				t.Errorf("%v with hashes %q, want %v with %q", d.Dialect(), d.Contract().Hashes, tt.want, tt.hashes)
			}
			forced := subscriber.NewDecoder(subscriber.DecoderConfig{Dialect: subscriber.DialectSGLang})
			if err := forced.Decode(pack([]any{1.5, tt.events, 0}), &b); err != nil || forced.Dialect() != subscriber.DialectSGLang {
				t.Errorf("forced: %v, %v", forced.Dialect(), err)
			}
		})
	}
}

func TestContractTellsWhatWasSeen(t *testing.T) {
	d := subscriber.NewDecoder(subscriber.DecoderConfig{})
	var b event.Batch
	for _, payload := range [][]byte{
		pack([]any{1.5, []any{storedMap(5, map[string]any{"origin": "NEW"})}, 0}),
		pack([]any{1.5, []any{[]any{"BlockRemoved", []any{5}, "CPU"}, []any{"AllBlocksCleared"}}, 0}),
	} {
		if err := d.Decode(payload, &b); err != nil {
			t.Fatal(err)
		}
	}
	want := event.Contract{
		Forms: []string{"array", "map"},
		Fields: []string{
			"BlockStored.block_hashes", "BlockStored.parent_block_hash", "BlockStored.token_ids", "BlockStored.block_size",
			"BlockStored.lora_id", "BlockStored.medium", "BlockStored.lora_name", "BlockRemoved.block_hashes", "BlockRemoved.medium",
			"AllBlocksCleared",
		},
		Hashes: []string{"uint64"}, Media: []string{"GPU", "CPU"},
	}
	if diff := cmp.Diff(want, d.Contract()); diff != "" {
		t.Errorf("-want +got\n%s", diff)
	}
	if odd := d.Oddities(); len(odd) != 1 || odd[0].Name != "unknown field BlockStored.origin" {
		t.Errorf("oddities %+v", odd)
	}
}

// block is a block as a decoder gives it.
func block(hash uint64) event.Block {
	return event.Block{Hash: event.IntHash(hash), Copies: -1, Age: -1}
}

func plain(ev event.Event) event.Event {
	if ev.Group == 0 {
		ev.Group = event.NoGroup
	}
	ev.LoRAID = event.NoLoRAID
	return ev
}

func TestTensorRTBuffer(t *testing.T) {
	minus5 := ^uint64(4)
	for _, tt := range []struct {
		name, text string
		rank       int32
		want       []event.Event
		pool       uint64
	}{
		{"created", `{"event_id":0,"data":{"type":"created","num_blocks_per_cache_level":[101,40]},"window_size":8192}`, -1, nil, 101},
		{
			"stored", `{"event_id":1,"data":{"type":"stored","parent_hash":7,"blocks":[` +
				`{"type":"stored_block","block_hash":8,"tokens":[{"type":"unique_token","token_id":1,"token_extra_id":0},{"type":"unique_token","token_id":2,"token_extra_id":0}],"cache_level":0,"priority":35},` +
				`{"type":"stored_block","block_hash":-5,"tokens":[{"type":"unique_token","token_id":3,"token_extra_id":0},{"type":"unique_token","token_id":4,"token_extra_id":0}],"cache_level":0,"priority":35},` +
				`{"type":"stored_block","block_hash":10,"tokens":[{"type":"unique_token","token_id":5,"token_extra_id":0}],"cache_level":1,"priority":35}]},` +
				`"window_size":8192,"attention_dp_rank":3}`, 3,
			[]event.Event{
				{
					Kind: event.Stored, Tier: event.GPU, Group: 8192, Window: 8192, HasParent: true, Parent: event.IntHash(7), BlockSize: 2,
					Blocks: []event.Block{block(8), block(minus5)}, Tokens: []uint32{1, 2, 3, 4}, ExtraKeys: [][]byte{nil, nil},
				},
				{ // a block that is not full has no name
					Kind: event.Stored, Tier: event.CPU, Group: 8192, Window: 8192, HasParent: true, Parent: event.IntHash(minus5),
					Blocks: []event.Block{block(10)},
				},
			},
			0,
		},
		{
			"removed", `{"event_id":2,"data":{"type":"removed","block_hashes":[8,10]}}`, -1,
			[]event.Event{
				{Kind: event.Evicted, Tier: event.AnyTier, Blocks: []event.Block{block(8), block(10)}},
			},
			0,
		},
		{
			"a block that becomes colder", `{"event_id":3,"data":{"type":"updated","block_hash":8,"cache_level":{"type":"event_diff","new_value":1,"old_value":0},"priority":null}}`, -1,
			[]event.Event{
				{Kind: event.Evicted, Tier: event.GPU, Blocks: []event.Block{block(8)}},
				{Kind: event.Stored, Tier: event.CPU, Blocks: []event.Block{block(8)}},
			},
			0,
		},
		{
			"a block that becomes warmer", `{"event_id":4,"data":{"type":"updated","block_hash":8,"cache_level":{"type":"event_diff","new_value":0,"old_value":1},"priority":null}}`, -1,
			[]event.Event{
				{Kind: event.Evicted, Tier: event.CPU, Blocks: []event.Block{block(8)}},
				{Kind: event.Stored, Tier: event.GPU, Blocks: []event.Block{block(8)}},
				{Kind: event.Loaded, Tier: event.GPU, Blocks: []event.Block{block(8)}, Load: event.Load{From: event.CPU}},
			},
			0,
		},
		{"a priority that changes", `{"event_id":5,"data":{"type":"updated","block_hash":8,"cache_level":null,"priority":{"type":"event_diff","new_value":1,"old_value":0}}}`, -1, nil, 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			d := subscriber.NewDecoder(subscriber.DecoderConfig{})
			var got event.Batch
			if err := d.Decode([]byte(tt.text), &got); err != nil {
				t.Fatal(err)
			}
			want := event.Batch{Rank: tt.rank}
			for _, ev := range tt.want {
				want.Events = append(want.Events, plain(ev))
			}
			if diff := cmp.Diff(want, got, cmpopts.EquateEmpty()); diff != "" {
				t.Errorf("-want +got\n%s", diff)
			}
			if odd := d.Oddities(); d.Pool() != tt.pool || d.Dialect() != subscriber.DialectTensorRT || len(odd) > 0 {
				t.Errorf("pool %d, want %d; dialect %v; oddities %+v", d.Pool(), tt.pool, d.Dialect(), odd)
			}
		})
	}
}

func TestDynamoEvents(t *testing.T) {
	const stored = `{"event_id":42,"data":{"stored":{"parent_hash":null,"blocks":[{"block_hash":100,"tokens_hash":1},{"block_hash":101,"tokens_hash":2}]}},"dp_rank":1}`
	want := event.Batch{Rank: 1, Events: []event.Event{plain(event.Event{
		Kind: event.Stored, Tier: event.GPU, BlockSize: 16, Blocks: []event.Block{block(100), block(101)}, Locals: []uint64{1, 2},
	})}}
	for name, text := range map[string]string{
		"the inner event": stored,
		"router event":    `{"worker_id":7,"storage_tier":"device","event":` + stored + `}`,
		"recorder's line": `{"timestamp":12,"event":{"worker_id":7,"event":` + stored + `}}`,
	} {
		t.Run(name, func(t *testing.T) {
			d := subscriber.NewDecoder(subscriber.DecoderConfig{BlockSize: 16})
			var got event.Batch
			if err := d.Decode([]byte(text), &got); err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(want, got, cmpopts.EquateEmpty()); diff != "" {
				t.Errorf("-want +got\n%s", diff)
			}
			if odd := d.Oddities(); d.Dialect() != subscriber.DialectDynamo || len(odd) > 0 {
				t.Errorf("dialect %v, oddities %+v", d.Dialect(), odd)
			}
		})
	}
	for text, kind := range map[string]event.Kind{
		`{"event_id":43,"data":{"removed":{"block_hashes":[100,18446744073709551615]}},"dp_rank":0}`: event.Evicted,
		`{"event_id":44,"data":"cleared","dp_rank":0}`:                                               event.Cleared,
	} {
		d := subscriber.NewDecoder(subscriber.DecoderConfig{BlockSize: 16})
		var got event.Batch
		if err := d.Decode([]byte(text), &got); err != nil || len(got.Events) != 1 || got.Events[0].Kind != kind {
			t.Errorf("%s: %+v, %v", text, got.Events, err)
		}
	}
}

func TestMooncakeEvents(t *testing.T) {
	stored := map[string]any{
		"event_id": 1, "timestamp": 1789095808837, "event_type": "stored", "type": "BlockStored", "model_name": nil, "block_size": nil,
		"additional_salt": nil, "lora_name": nil, "tenant_id": "default", "backend_id": "node-1", "group_id": 0, "medium": "cpu", "dp_rank": nil,
		"object_key": "k", "seq_hashes": []any{uint64(1) << 63}, "block_hashes": []any{-1 << 63}, "base_block_idx": 0,
		"parent_hash": nil, "token_ids": nil, "parent_block_hash": nil,
	}
	removed := map[string]any{
		"event_id": 2, "timestamp": 1789095808838, "event_type": "removed", "medium": "disk", "seq_hashes": []any{7}, "base_block_idx": nil,
	}
	unnamed := map[string]any{"event_id": 3, "timestamp": 1789095808838, "event_type": "stored", "medium": "cpu", "seq_hashes": []any{}}
	d := subscriber.NewDecoder(subscriber.DecoderConfig{})
	payload := pack([]any{1789095808839, []any{stored, removed, unnamed}, 0})
	var got event.Batch
	if err := d.Decode(payload, &got); err != nil {
		t.Fatal(err)
	}
	want := event.Batch{Time: 1789095808839000000, Events: []event.Event{
		plain(event.Event{Kind: event.Stored, Tier: "cpu", Ownership: "node-1", Blocks: []event.Block{block(1 << 63)}}),
		plain(event.Event{Kind: event.Evicted, Tier: "disk", Blocks: []event.Block{block(7)}}),
	}}
	if diff := cmp.Diff(want, got, cmpopts.EquateEmpty()); diff != "" {
		t.Errorf("-want +got\n%s", diff)
	}
	if at, err := subscriber.PeekTime(payload); err != nil || at != want.Time {
		t.Errorf("PeekTime: %d, %v", at, err)
	}
	odd := d.Oddities()
	if d.Dialect() != subscriber.DialectMooncake || len(odd) != 1 || odd[0].Name != "objects whose key names no block" {
		t.Errorf("dialect %v, oddities %+v", d.Dialect(), odd)
	}
}

// LMCache's engine tells what it stored, and never what it evicted: its chunks are not counted as resident.
func TestLMCacheStoresAreSomebodyElses(t *testing.T) {
	d := subscriber.NewDecoder(subscriber.DecoderConfig{})
	var got event.Batch
	payload := pack([]any{1.5, []any{storedMap(5, nil), storedMap(6, map[string]any{"medium": "cpu"}), storedMap(7, map[string]any{"medium": "CPU"})}, 0})
	if err := d.Decode(payload, &got); err != nil {
		t.Fatal(err)
	}
	var where []event.Locality
	for _, ev := range got.Events {
		where = append(where, ev.Locality)
	}
	if diff := cmp.Diff([]event.Locality{event.LocalityUnknown, event.Remote, event.LocalityUnknown}, where); diff != "" {
		t.Errorf("-want +got\n%s", diff)
	}
	forced := subscriber.NewDecoder(subscriber.DecoderConfig{Dialect: subscriber.DialectLMCache})
	if err := forced.Decode(payload, &got); err != nil || got.Events[0].Locality != event.Remote {
		t.Errorf("forced: %v, %v", got.Events[0].Locality, err)
	}
}

// What is JSON, but no dialect's, or not as its dialect is, is refused, and says where without saying what.
func TestJSONThatIsRefused(t *testing.T) {
	for text, path := range map[string]string{
		`{"hello":1}`: "",
		`{"event_id":1,"data":{"type":"stored","blocks":[{"block_hash":"secret"}]}}`:           "data.blocks",
		`{"event_id":1,"data":{"type":7}}`:                                                     "data.type",
		`{"event_id":1,"data":{"stored":{"blocks":7}}}`:                                        "stored.blocks",
		`{"event_id":1,"data":{"type":"updated","cache_level":{"old_value":9,"new_value":0}}}`: "data.cache_level",
		`{"event_id":1,"data":`:                                                                "",
	} {
		d := subscriber.NewDecoder(subscriber.DecoderConfig{})
		b := event.Batch{Rank: 9}
		err := d.Decode([]byte(text), &b)
		decode, ok := err.(*subscriber.DecodeError)
		if !ok || decode.Path != path || b.Rank != 9 {
			t.Errorf("%s: %v (%T), batch %+v, want an error at %q", text, err, err, b, path)
		}
		if err != nil && (slices.Contains([]string{"secret"}, fmt.Sprint(err)) || d.Dialect() != subscriber.AnyDialect) {
			t.Errorf("%s: %v, dialect %v", text, err, d.Dialect())
		}
	}
}

// FuzzDecoder checks that no payload of any dialect panics, and that contracts stay bounded.
func FuzzDecoder(f *testing.F) {
	for _, dialect := range []string{"vllm", "sglang", "lmcache", "vllm/offload.json"} {
		for _, g := range readGolden(f, dialect) {
			f.Add(unhex(g.Hex))
		}
	}
	for _, file := range []string{"mooncake/golden.json", "dynamo/golden.json", "dynamo/recorder.json", "trtllm/reference.json"} {
		text, err := os.ReadFile("testdata/" + file)
		if err != nil {
			f.Fatal(err)
		}
		var entries []struct{ Hex, Text string }
		if err := json.Unmarshal(text, &entries); err != nil {
			f.Fatal(err)
		}
		for _, e := range entries {
			f.Add(append(unhex(e.Hex), e.Text...)) // one of them
		}
	}
	for _, text := range []string{
		`{"event_id":1,"data":{"type":"stored","parent_hash":7,"blocks":[{"block_hash":8,"tokens":[{"token_id":1}],"cache_level":0,"mm_keys":[{}]}]},"window_size":8}`,
		`{"event_id":4,"data":{"type":"updated","block_hash":8,"cache_level":{"new_value":0,"old_value":1}}}`,
		`{"timestamp":12,"event":{"worker_id":7,"event":{"event_id":42,"data":{"stored":{"blocks":[{"block_hash":100,"tokens_hash":1}]}},"dp_rank":1}}}`,
		`{"event_id":44,"data":"cleared","dp_rank":0}`,
	} {
		f.Add([]byte(text))
	}
	f.Add(pack([]any{1789095808839, []any{map[string]any{"event_type": "stored", "seq_hashes": []any{7}, "medium": "cpu"}}, 0}))
	d := subscriber.NewDecoder(subscriber.DecoderConfig{BlockSize: 16})
	f.Fuzz(func(t *testing.T, payload []byte) {
		var b event.Batch
		if err := d.Decode(payload, &b); err != nil {
			if _, ok := err.(*subscriber.DecodeError); !ok {
				t.Fatalf("%T: %v", err, err)
			}
			return
		}
		c := d.Contract()
		if n := len(c.Forms) + len(c.Fields) + len(c.Hashes) + len(c.Media); n > 300 {
			t.Fatalf("the contract has %d entries", n)
		}
	})
}
