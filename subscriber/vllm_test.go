package subscriber_test

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"runtime"
	"slices"
	"strings"
	"testing"

	"kvstrata/event"
	"kvstrata/publisher"
	"kvstrata/subscriber"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/tinylib/msgp/msgp"
)

// golden is an entry of testdata/vllm/golden.json, which interop/golden.py writes with vLLM's own classes.
type golden struct {
	Name    string
	Version string
	Form    string
	Hex     string
	Batch   struct {
		TS     float64
		Rank   *int32 `json:"dp_rank"`
		Events []goldenEvent
	}
}

type goldenEvent struct {
	Type      string
	Hashes    []goldenHash `json:"block_hashes"`
	Parent    *goldenHash  `json:"parent_block_hash"`
	Tokens    goldenTokens `json:"token_ids"`
	BlockSize uint32       `json:"block_size"`
	LoRAID    *int64       `json:"lora_id"`
	Medium    *string
	LoRA      string             `json:"lora_name"`
	ExtraKeys []*json.RawMessage `json:"extra_keys"`
	Group     *event.Group       `json:"group_idx"`
	Spec      event.SpecKind     `json:"kv_cache_spec_kind"`
	Window    uint32             `json:"kv_cache_spec_sliding_window"`
	Locality  event.Locality
	Ownership string
	Session   string `json:"session_id"`
	Salt      string `json:"cache_salt"`
}

// goldenTokens are token ids, or SGLang's pairs of them.
type goldenTokens struct {
	ids   []uint64
	pairs bool
}

func (t *goldenTokens) UnmarshalJSON(text []byte) error {
	var pairs [][2]uint64
	if err := json.Unmarshal(text, &pairs); err != nil || len(pairs) == 0 {
		return json.Unmarshal(text, &t.ids)
	}
	t.pairs, t.ids = true, []uint64{pairs[0][0]}
	for _, p := range pairs {
		t.ids = append(t.ids, p[1])
	}
	return nil
}

type goldenHash struct{ event.BlockHash }

func (h *goldenHash) UnmarshalJSON(text []byte) error {
	var b struct{ Hex event.BlockHash }
	if err := json.Unmarshal(text, &b); err == nil {
		h.BlockHash = b.Hex
		return nil
	}
	var n int64
	if err := json.Unmarshal(text, &n); err == nil {
		h.BlockHash = event.IntHash(uint64(n))
		return nil
	}
	var u uint64
	err := json.Unmarshal(text, &u)
	h.BlockHash = event.IntHash(u)
	return err
}

func readGolden(tb testing.TB, dialect string) (entries []golden) {
	tb.Helper()
	if !strings.HasSuffix(dialect, ".json") {
		dialect += "/golden.json"
	}
	text, err := os.ReadFile("testdata/" + dialect)
	if err != nil {
		tb.Fatal(err)
	}
	if err := json.Unmarshal(text, &entries); err != nil {
		tb.Fatal(err)
	}
	return entries
}

// want returns the batch that an entry's payload must give.
func (g *golden) want(t *testing.T) event.Batch {
	b := event.Batch{Time: event.Seconds(g.Batch.TS), Rank: -1}
	if g.Batch.Rank != nil {
		b.Rank = *g.Batch.Rank
	}
	kinds := map[string]event.Kind{
		"BlockStored": event.Stored, "BlockRemoved": event.Evicted, "AllBlocksCleared": event.Cleared,
	}
	for _, ge := range g.Batch.Events {
		ev := event.Event{
			Kind: kinds[ge.Type], Group: event.NoGroup, BlockSize: ge.BlockSize, LoRAID: event.NoLoRAID, LoRA: ge.LoRA,
			Spec: ge.Spec, Window: ge.Window, Locality: ge.Locality, Ownership: ge.Ownership, Session: ge.Session,
		}
		switch {
		case ev.Kind == event.Cleared:
			ev.Cause = event.ByEngine
		case ge.Medium == nil:
			ev.Tier = event.GPU
		default:
			ev.Tier = event.Tier(*ge.Medium)
		}
		for _, h := range ge.Hashes {
			ev.Blocks = append(ev.Blocks, event.Block{Hash: h.BlockHash, Copies: -1, Age: -1})
		}
		if ge.Parent != nil {
			ev.HasParent, ev.Parent = true, ge.Parent.BlockHash
		}
		ev.Salt, ev.Eagle = ge.Salt, ge.Tokens.pairs
		for _, token := range ge.Tokens.ids {
			ev.Tokens = append(ev.Tokens, uint32(token))
		}
		if ge.LoRAID != nil {
			ev.LoRAID = *ge.LoRAID
		}
		if ge.Group != nil {
			ev.Group = *ge.Group
		}
		for _, key := range ge.ExtraKeys {
			if key == nil || string(*key) == "null" {
				ev.ExtraKeys = append(ev.ExtraKeys, nil)
			} else {
				ev.ExtraKeys = append(ev.ExtraKeys, msgpackOf(t, *key))
			}
		}
		b.Events = append(b.Events, ev)
	}
	return b
}

// msgpackOf encodes JSON of integers, strings, arrays and {"hex": …} for bytes as minimal msgpack.
func msgpackOf(t *testing.T, text []byte) []byte {
	var v any
	if err := json.Unmarshal(text, &v); err != nil {
		t.Fatal(err)
	}
	var add func(dst []byte, v any) []byte
	add = func(dst []byte, v any) []byte {
		switch v := v.(type) {
		case float64:
			return msgp.AppendInt64(dst, int64(v))
		case string:
			return msgp.AppendString(dst, v)
		case []any:
			dst = msgp.AppendArrayHeader(dst, uint32(len(v)))
			for _, item := range v {
				dst = add(dst, item)
			}
			return dst
		case map[string]any:
			return msgp.AppendBytes(dst, unhex(v["hex"].(string)))
		default:
			t.Fatalf("golden.json: extra key %v", v)
			return nil
		}
	}
	return add(nil, v)
}

func unhex(text string) []byte {
	b, err := hex.DecodeString(text)
	if err != nil {
		panic(err)
	}
	return b
}

func TestVLLMGolden(t *testing.T) {
	d := subscriber.NewDecoder(subscriber.DecoderConfig{})
	for _, g := range slices.Concat(readGolden(t, "vllm"), readGolden(t, "vllm/offload.json")) {
		t.Run(g.Version+"/"+g.Name, func(t *testing.T) {
			var got event.Batch
			err := d.Decode(unhex(g.Hex), &got)
			if g.Name == "stored-token-widths" { // its last token is 2³²
				var decode *subscriber.DecodeError
				if !errors.As(err, &decode) || decode.Path != "events[0].token_ids[8]" {
					t.Fatalf("got %v, want an error at events[0].token_ids[8]", err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(g.want(t), got, cmpopts.EquateEmpty()); diff != "" {
				t.Errorf("-want +got\n%s", diff)
			}
		})
	}
	for _, c := range d.Oddities() {
		if !strings.HasPrefix(c.Name, "tokens that") && !strings.HasPrefix(c.Name, "extra keys that") {
			t.Errorf("vLLM's own bytes have an oddity: %+v", c)
		}
	}
}

// The byte strings of the reference, §1.7, which were encoded by hand.
func TestVLLMReference(t *testing.T) {
	block := event.Event{
		Kind: event.Stored, Tier: event.GPU, Group: event.NoGroup, BlockSize: 16, LoRAID: event.NoLoRAID,
		Blocks: []event.Block{{Hash: event.IntHash(7876691182959014722), Copies: -1, Age: -1}},
	}
	for i := range uint32(16) {
		block.Tokens = append(block.Tokens, 101*(i+1))
	}
	full := block
	full.Group, full.Spec, full.ExtraKeys = 0, event.SpecFull, [][]byte{nil}
	removed := event.Event{
		Kind: event.Evicted, Tier: event.GPU, Group: event.NoGroup, LoRAID: event.NoLoRAID, Blocks: block.Blocks,
	}
	removed0 := removed
	removed0.Group = 0
	cleared := event.Event{
		Kind: event.Cleared, Group: event.NoGroup, LoRAID: event.NoLoRAID, Cause: event.ByEngine,
	}
	tests := []struct {
		name, hex string
		want      event.Event
	}{
		{"map stored", "93cb3ff8000000000000918ba474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657391cf6d4fa0e5fdb93342b1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f696473dc001065cccacd012fcd0194cd01f9cd025ecd02c3cd0328cd038dcd03f2cd0457cd04bccd0521cd0586cd05ebcd0650aa626c6f636b5f73697a6510a76c6f72615f6964c0a66d656469756da3475055a96c6f72615f6e616d65c0aa65787472615f6b65797391c0a967726f75705f69647800b26b765f63616368655f737065635f6b696e64ae66756c6c5f617474656e74696f6e00", full},
		{"array stored", "93cb3ff80000000000009197ab426c6f636b53746f72656491cf6d4fa0e5fdb93342c0dc001065cccacd012fcd0194cd01f9cd025ecd02c3cd0328cd038dcd03f2cd0457cd04bccd0521cd0586cd05ebcd065010c0a347505500", block},
		{"map removed", "93cb3ff80000000000009184a474797065ac426c6f636b52656d6f766564ac626c6f636b5f68617368657391cf6d4fa0e5fdb93342a66d656469756da3475055a967726f75705f6964780000", removed0},
		{"array removed", "93cb3ff80000000000009193ac426c6f636b52656d6f76656491cf6d4fa0e5fdb93342a347505500", removed},
		{"map cleared", "93cb3ff80000000000009181a474797065b0416c6c426c6f636b73436c656172656400", cleared},
		{"array cleared", "93cb3ff80000000000009191b0416c6c426c6f636b73436c656172656400", cleared},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var got event.Batch
			if err := subscriber.NewDecoder(subscriber.DecoderConfig{}).Decode(unhex(tt.hex), &got); err != nil {
				t.Fatal(err)
			}
			want := event.Batch{Time: 1500000000, Events: []event.Event{tt.want}}
			if diff := cmp.Diff(want, got, cmpopts.EquateEmpty()); diff != "" {
				t.Errorf("-want +got\n%s", diff)
			}
		})
	}
}

// raw is msgpack that pack puts in as it is.
type raw []byte

// keyed is a map with its keys in order.
type keyed []any

// pack encodes a value as minimal msgpack; []any is an array.
func pack(v any) []byte { return packTo(nil, v) }

func packTo(dst []byte, v any) []byte {
	switch v := v.(type) {
	case raw:
		return append(dst, v...)
	case int:
		return msgp.AppendInt(dst, v)
	case keyed:
		dst = msgp.AppendMapHeader(dst, uint32(len(v)/2))
		for _, item := range v {
			dst = packTo(dst, item)
		}
		return dst
	case []any:
		dst = msgp.AppendArrayHeader(dst, uint32(len(v)))
		for _, item := range v {
			dst = packTo(dst, item)
		}
		return dst
	default:
		dst, err := msgp.AppendIntf(dst, v)
		if err != nil {
			panic(err)
		}
		return dst
	}
}

func list(items ...any) []any { return items }

// stored is a BlockStored of one block of two tokens, with more fields after it.
func stored(more ...any) keyed {
	return append(keyed{
		"type", "BlockStored",
		"block_hashes", list(7),
		"parent_block_hash", nil,
		"token_ids", list(1, 2),
		"block_size", 2,
	}, more...)
}

// batchOf is a batch of events as vLLM packs it.
func batchOf(events ...any) []byte { return pack([]any{1.5, events, 0}) }

// wantStored is what stored gives.
func wantStored(set func(*event.Event)) event.Event {
	ev := event.Event{
		Kind: event.Stored, Tier: event.GPU, Group: event.NoGroup, BlockSize: 2, LoRAID: event.NoLoRAID,
		Blocks: []event.Block{{Hash: event.IntHash(7), Copies: -1, Age: -1}}, Tokens: []uint32{1, 2},
	}
	if set != nil {
		set(&ev)
	}
	return ev
}

func TestVLLMTolerates(t *testing.T) {
	nothing := func(*event.Event) {}
	tests := []struct {
		name     string
		payload  []byte
		set      func(*event.Event) // nil: no event is left
		oddities []event.Counter
	}{
		{name: "map with its type last", payload: batchOf(append(stored()[2:], "type", "BlockStored")), set: nothing},
		{
			name: "batch of 2 elements", payload: pack([]any{1.5, []any{stored()}}), set: nothing,
		},
		{
			name: "batch of 5 elements", payload: pack([]any{1.5, []any{stored()}, 0, "x", []any{1}}), set: nothing,
			oddities: []event.Counter{{Name: "batch elements beyond the third", Count: 1, Example: "at byte 89 of 93"}},
		},
		{
			name: "unknown field", payload: batchOf(stored("origin", keyed{"a", []any{1, nil, true, 2.5}})), set: nothing,
			oddities: []event.Counter{{Name: "unknown field BlockStored.origin", Count: 1, Example: "events[0] at byte 95 of 112"}},
		},
		{
			name: "repeated field", payload: batchOf(stored("block_size", 3)), set: nothing,
			oddities: []event.Counter{{Name: "repeated field BlockStored.block_size", Count: 1, Example: "events[0] at byte 99 of 101"}},
		},
		{
			name: "unknown events", payload: batchOf(
				keyed{"type", "BlockInactive", "block_hashes", "?"}, []any{"BlockInactive", 1, 2}, []any{"é"},
			),
			oddities: []event.Counter{
				{Name: "unknown event BlockInactive", Count: 2, Example: "events[0] at byte 12 of 68"},
				{Name: "unknown event ??", Count: 1, Example: "events[2] at byte 67 of 68"},
			},
		},
		{
			name: "long array", payload: batchOf([]any{
				"BlockStored", []any{7}, nil, []any{1, 2}, 2, nil, "GPU", nil, nil, nil, nil, nil, "x", keyed{"y", 1},
			}),
			set:      nothing,
			oddities: []event.Counter{{Name: "elements beyond the last known BlockStored", Count: 1, Example: "events[0] at byte 41 of 48"}},
		},
		{name: "short array", payload: batchOf([]any{"BlockStored", []any{7}, nil, []any{1, 2}, 2}), set: nothing},
		{
			name: "unknown kind and locality", payload: batchOf(stored("kv_cache_spec_kind", "lookahead", "locality", "NEAR")),
			set: func(ev *event.Event) { ev.Spec, ev.Locality = event.SpecOther, event.LocalityOther },
			oddities: []event.Counter{
				{Name: "unknown attention kind lookahead", Count: 1, Example: "events[0].kv_cache_spec_kind at byte 117 of 132"},
				{Name: "unknown locality NEAR", Count: 1, Example: "events[0].locality at byte 131 of 132"},
			},
		},
		{
			name:    "salt and session",
			payload: batchOf(stored("cache_salt", "pepper", "session_id", "s-\xff")),
			set:     func(ev *event.Event) { ev.Salt, ev.Session = "pepper", "s-\uFFFD" },
		},
		{
			name: "hashes of every kind",
			payload: batchOf(keyed{
				"type", "BlockStored",
				"block_hashes", list(-1, []byte("12345678"), "abc", []byte("de"), raw{0xd0, 5}),
				"parent_block_hash", []byte("p"),
				"token_ids", list(),
				"block_size", 0,
			}),
			set: func(ev *event.Event) {
				ev.BlockSize, ev.Tokens, ev.HasParent, ev.Parent, ev.Blocks = 0, nil, true, event.BytesHash("p"), nil
				for _, h := range []event.BlockHash{
					event.IntHash(math.MaxUint64), event.IntHash(0x3132333435363738), event.BytesHash("abc"),
					event.BytesHash("de"), event.IntHash(5),
				} {
					ev.Blocks = append(ev.Blocks, event.Block{Hash: h, Copies: -1, Age: -1})
				}
			},
		},
		{
			name:    "integers wider than needed",
			payload: batchOf(stored("lora_id", raw{0xd1, 0xff, 0x00}, "group_idx", raw{0xd3, 0, 0, 0, 0, 0, 0, 0, 3})),
			set:     func(ev *event.Event) { ev.LoRAID, ev.Group = -256, 3 },
		},
		{
			name: "tokens of every width",
			payload: batchOf(keyed{
				"type", "BlockStored",
				"block_hashes", list(7),
				"parent_block_hash", nil,
				"token_ids", raw(unhex(
					"dc0010" + "00" + "7f" + "cc80" + "ccff" + "cd0100" + "cdffff" + "ce00010000" + "ceffffffff" +
						"cc05" + "cd0005" + "ce00000005" + "cf0000000000000005" + "d005" + "d10105" + "d200010005" +
						"d30000000000000005",
				)),
				"block_size", 16,
			}),
			set: func(ev *event.Event) {
				ev.BlockSize = 16
				ev.Tokens = []uint32{
					0, 127, 128, 255, 256, 65535, 65536, math.MaxUint32, 5, 5, 5, 5, 5, 0x105, 0x10005, 5,
				}
			},
		},
		{
			name: "runs that do not fit", payload: batchOf(stored("extra_keys", []any{nil, []any{1}, nil}), stored("block_size", 1)),
			set: func(ev *event.Event) { ev.ExtraKeys = [][]byte{nil, {0x91, 1}, nil} },
			oddities: []event.Counter{
				{Name: "extra keys that do not match their blocks", Count: 1, Example: "events[0] at byte 104 of 194"},
				{Name: "repeated field BlockStored.block_size", Count: 1, Example: "events[1] at byte 192 of 194"},
			},
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			d := subscriber.NewDecoder(subscriber.DecoderConfig{})
			var got event.Batch
			if err := d.Decode(tt.payload, &got); err != nil {
				t.Fatal(err)
			}
			if tt.set == nil && len(got.Events) != 0 || tt.set != nil && len(got.Events) == 0 {
				t.Fatalf("got %d events", len(got.Events))
			}
			if tt.set != nil {
				if diff := cmp.Diff(wantStored(tt.set), got.Events[0], cmpopts.EquateEmpty()); diff != "" {
					t.Errorf("-want +got\n%s", diff)
				}
			}
			if diff := cmp.Diff(tt.oddities, d.Oddities()); diff != "" {
				t.Errorf("oddities: -want +got\n%s", diff)
			}
		})
	}
}

func TestVLLMTimes(t *testing.T) {
	tests := []struct {
		name string
		ts   any
		want event.Time
	}{
		{"double", 1789095808.5, 1789095808500000000},
		{"float", float32(2.5), 2500000000},
		{"integer", 1789095808, 1789095808000000000},
		{"milliseconds", 1789095808837, 1789095808837000000},
		{"before 1970", -1, 0},
		{"not a number", math.NaN(), 0},
		{"infinite", math.Inf(1), 0},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			payload := pack([]any{tt.ts, []any{}, nil})
			d := subscriber.NewDecoder(subscriber.DecoderConfig{})
			got := event.Batch{Rank: 5}
			if err := d.Decode(payload, &got); err != nil || got.Time != tt.want || got.Rank != -1 {
				t.Errorf("Decode: time %d, rank %d, error %v", got.Time, got.Rank, err)
			}
			if peeked, err := subscriber.PeekTime(payload); err != nil || peeked != tt.want {
				t.Errorf("PeekTime: %d, %v", peeked, err)
			}
			if odd := len(d.Oddities()); (odd > 0) != (tt.want == 0) {
				t.Errorf("%d oddities", odd)
			}
		})
	}
}

// The reasons tell shapes and the paths places; neither tells a value.
func TestVLLMErrors(t *testing.T) {
	deep := append(bytes.Repeat([]byte{0x91}, 40), 0xc0)
	good := batchOf(stored())
	tests := []struct {
		name    string
		payload []byte
		want    string
	}{
		{"empty", nil, "byte 0: truncated"},
		{"not a batch", pack("hello"), "byte 0: want an array, have a string"},
		{"short batch", pack([]any{1.5}), "byte 0: a batch of fewer than 2 elements"},
		{"unused byte", raw{0x92, 0xc1, 0xc0}, "byte 1 (ts): a byte that msgpack never uses"},
		{"no time", pack([]any{nil, []any{}}), "byte 1 (ts): want a number, have nil"},
		{"no events", pack([]any{1.5, nil, 0}), "byte 10 (events): want an array, have nil"},
		{"huge batch", raw{0xdd, 0xff, 0xff, 0xff, 0xff, 0}, "byte 0: an array longer than the payload"},
		{"huge events", append(pack([]any{1.5})[:10], 0xdd, 0xff, 0xff, 0xff, 0xff), ""},
		{"event that is none", batchOf(3), "byte 11 (events[0]): want an array or a map, have an integer"},
		{"event without a tag", batchOf([]any{}), "byte 11 (events[0]): an event without a tag"},
		{"event without a type", batchOf(keyed{"a", 1}), "byte 12 (events[0]): an event without a type"},
		{"numeric tag", batchOf([]any{3}), "byte 12 (events[0].type): want a string, have an integer"},
		{"numeric key", batchOf(keyed{3, 1}), "byte 12 (events[0]): want a string, have an integer"},
		{"few elements", batchOf([]any{"BlockStored", []any{7}, nil}), "byte 11 (events[0]): an event of too few elements"},
		{"missing field", batchOf(stored()[:8]), "byte 11 (events[0].block_size): missing"},
		{"missing tokens", batchOf(stored()[:6], stored()), "byte 11 (events[0].token_ids): missing"},
		{"token pairs", batchOf([]any{"BlockStored", []any{7}, nil, []any{1, []any{2, 3}}, 16}), "byte 29 (events[0].token_ids[1]): want an integer, have an array"},
		{"negative token", batchOf([]any{"BlockStored", []any{7}, nil, []any{-1}, 16}), "byte 28 (events[0].token_ids[0]): a negative integer"},
		{"large token", batchOf([]any{"BlockStored", []any{7}, nil, []any{1 << 32}, 16}), "byte 28 (events[0].token_ids[0]): an integer out of range"},
		{"huge tokens", batchOf([]any{"BlockStored", []any{7}, nil, raw{0xdd, 0xff, 0xff, 0xff, 0xff}, 16}), "byte 27 (events[0].token_ids): an array longer than the payload"},
		{"empty hash", batchOf([]any{"BlockRemoved", []any{1, []byte{}}}), "byte 27 (events[0].block_hashes[1]): a hash of 0 bytes"},
		{"nil hash", batchOf([]any{"BlockRemoved", []any{nil}}), "byte 26 (events[0].block_hashes[0]): want an integer or bytes, have nil"},
		{"nil hashes", batchOf([]any{"BlockRemoved", nil}), "byte 25 (events[0].block_hashes): want an array, have nil"},
		{"huge hash", batchOf([]any{"BlockRemoved", []any{raw{0xc6, 0xff, 0xff, 0xff, 0xff}}}), "byte 26 (events[0].block_hashes[0]): truncated"},
		{"empty parent", batchOf([]any{"BlockStored", []any{7}, "", []any{}, 16}), "byte 26 (events[0].parent_block_hash): a hash of 0 bytes"},
		{"negative block size", batchOf([]any{"BlockStored", []any{7}, nil, []any{}, -16}), "byte 28 (events[0].block_size): a negative integer"},
		{"large block size", batchOf([]any{"BlockStored", []any{7}, nil, []any{}, 1<<20 + 1}), "byte 28 (events[0].block_size): an integer out of range"},
		{"numeric medium", batchOf([]any{"BlockRemoved", []any{7}, 1}), "byte 27 (events[0].medium): want a string, have an integer"},
		{"negative group", batchOf([]any{"BlockRemoved", []any{7}, nil, -1}), "byte 28 (events[0].group_idx): a negative integer"},
		{"second event", batchOf(stored(), stored("lora_id", "x")), "byte 173 (events[1].lora_id): want an integer, have a string"},
		{"deep extra key", batchOf(stored("extra_keys", []any{raw(deep)})), "byte 132 (events[0].extra_keys[0]): nested too deep"},
		{"deep unknown field", batchOf(stored("new", raw(deep))), "byte 124 (events[0]): nested too deep"},
		{"rank", pack([]any{1.5, []any{}, "x"}), "byte 11 (data_parallel_rank): want an integer, have a string"},
		{"trailing bytes", append(bytes.Clone(good), 0xc0), "byte 89: bytes after the batch"},
	}
	d := subscriber.NewDecoder(subscriber.DecoderConfig{})
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got := event.Batch{Rank: 77}
			err := d.Decode(tt.payload, &got)
			var decode *subscriber.DecodeError
			if !errors.As(err, &decode) {
				t.Fatalf("got %v", err)
			}
			if tt.want != "" && err.Error() != tt.want {
				t.Errorf("got  %v\nwant %s", err, tt.want)
			}
			if got.Rank != 77 || got.Events != nil {
				t.Errorf("an error left %+v", got)
			}
		})
	}
	t.Run("truncated anywhere", func(t *testing.T) {
		var got event.Batch
		for n := range good {
			if err := d.Decode(good[:n], &got); err == nil {
				t.Errorf("%d of %d bytes decode", n, len(good))
			}
		}
		if err := d.Decode(good, &got); err != nil || len(got.Events) != 1 {
			t.Errorf("whole payload: %d events, %v", len(got.Events), err)
		}
	})
	for _, payload := range [][]byte{nil, {0x90}, {0x93}, {0x92, 0xcb, 1}, {0x92, 0xa1, 'x', 0x90}} {
		if at, err := subscriber.PeekTime(payload); err == nil {
			t.Errorf("PeekTime(%x) = %d", payload, at)
		}
	}
}

func TestVLLMOdditiesAreBounded(t *testing.T) {
	d := subscriber.NewDecoder(subscriber.DecoderConfig{})
	var b event.Batch
	for i := range 200 {
		if err := d.Decode(batchOf([]any{fmt.Sprintf("%d%s", i, strings.Repeat("x", 1000))}), &b); err != nil {
			t.Fatal(err)
		}
	}
	counters := d.Oddities()
	if len(counters) != 65 {
		t.Fatalf("%d names", len(counters))
	}
	if last := counters[64]; last.Name != "other" || last.Count != 200-64 {
		t.Errorf("last: %+v", last)
	}
	if n := len(counters[3].Name); n > 64 {
		t.Errorf("a name of %d bytes", n)
	}
}

// A payload costs no more memory than a small multiple of its length, whatever it announces.
func TestVLLMMemory(t *testing.T) {
	many := func(n int, event []byte) []byte {
		return append(append(pack([]any{1.5, nil})[:10], 0xdd, byte(n>>24), byte(n>>16), byte(n>>8), byte(n)),
			bytes.Repeat(event, n)...)
	}
	hashes := append([]byte{0xdd, 0, 1, 0, 0}, make([]byte, 1<<16)...)
	tests := map[string][]byte{
		"hashes":         batchOf([]any{"BlockRemoved", raw(hashes)}),
		"tokens":         batchOf([]any{"BlockStored", []any{}, nil, raw(hashes), 16}),
		"keys":           batchOf(stored("extra_keys", raw(append([]byte{0xdd, 0, 1, 0, 0}, bytes.Repeat([]byte{0xc0}, 1<<16)...)))),
		"small events":   many(5000, pack([]any{"BlockRemoved", []any{}})),
		"unknown events": many(30000, pack([]any{"x"})),
		"unknown fields": batchOf(stored(func() (kv []any) {
			for i := range 5000 {
				kv = append(kv, fmt.Sprint(i), nil)
			}
			return kv
		}()...)),
		"many runs":      many(500, pack([]any{"BlockStored", []any{1, 2, 3, 4, 5, 6, 7, 8}, nil, []any{1, 2, 3, 4, 5, 6, 7, 8}, 1})),
		"words":          many(500, pack([]any{"BlockRemoved", []any{"abc"}, strings.Repeat("m", 300)})),
		"events of 4 GB": append(pack([]any{1.5, nil})[:10], 0xdd, 0xff, 0xff, 0xff, 0xff, 0x93),
	}
	for name, payload := range tests {
		t.Run(name, func(t *testing.T) {
			var b event.Batch
			if got, limit := allocated(func() { subscriber.NewDecoder(subscriber.DecoderConfig{}).Decode(payload, &b) }), bound(payload); got > limit {
				t.Errorf("%d bytes allocated for a payload of %d", got, len(payload))
			}
		})
	}
}

// bound is how much a fresh decoder may allocate for a payload: about two blocks or a quarter event a byte.
func bound(payload []byte) uint64 { return 128*uint64(len(payload)) + 1<<16 }

// allocated returns how many bytes f allocates.
func allocated(f func()) uint64 {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	f()
	runtime.ReadMemStats(&after)
	return after.TotalAlloc - before.TotalAlloc
}

func TestVLLMAllocations(t *testing.T) {
	odd := batchOf(stored("origin", 1, "medium", "NVME", "lora_name", "a", "session_id", "s", "cache_salt", "c"))
	digest := bytes.Repeat([]byte{9}, 32)
	tests := []struct {
		name    string
		payload []byte
		want    float64
	}{
		{"map", publisher.AppendVLLM(nil, benchBatch(8, 8), publisher.MapForm), 0},
		{"array", publisher.AppendVLLM(nil, benchBatch(8, 8), publisher.ArrayForm), 0},
		{"oddities and words seen before", odd, 0},
		{"byte hashes", batchOf([]any{"BlockRemoved", []any{digest, digest, digest}}), 1},
	}
	for _, tt := range tests {
		d := subscriber.NewDecoder(subscriber.DecoderConfig{})
		var b event.Batch
		decode := func() {
			if err := d.Decode(tt.payload, &b); err != nil {
				t.Fatal(err)
			}
		}
		decode()
		decode()
		if got := testing.AllocsPerRun(100, decode); got > tt.want {
			t.Errorf("%s: %v allocations a payload, want %v", tt.name, got, tt.want)
		}
	}
	if got := testing.AllocsPerRun(100, func() { subscriber.PeekTime(odd) }); got > 0 {
		t.Errorf("PeekTime: %v allocations", got)
	}
}

// FuzzVLLM checks that no payload panics or takes much memory, and that what decodes is what its re-encoding decodes
// to, in both forms.
func FuzzVLLM(f *testing.F) {
	for _, g := range readGolden(f, "vllm") {
		f.Add(unhex(g.Hex))
	}
	f.Add(batchOf(stored("origin", 1, "extra_keys", []any{[]any{"m", []any{"x", 3}}}, "cache_salt", "c", "session_id", "s")))
	f.Fuzz(func(t *testing.T, payload []byte) {
		var b event.Batch
		d := subscriber.NewDecoder(subscriber.DecoderConfig{})
		var err error
		if got := allocated(func() { err = d.Decode(payload, &b) }); got > bound(payload) {
			t.Fatalf("%d bytes allocated for a payload of %d", got, len(payload))
		}
		d.Oddities()
		peeked, peekErr := subscriber.PeekTime(payload)
		if err != nil {
			var decode *subscriber.DecodeError
			if !errors.As(err, &decode) || decode.Offset < 0 || decode.Offset > len(payload) {
				t.Fatalf("error %#v", err)
			}
			return
		}
		if peekErr != nil || peeked != b.Time {
			t.Fatalf("PeekTime: %d, %v; Decode: %d", peeked, peekErr, b.Time)
		}
		for _, form := range []publisher.Form{publisher.MapForm, publisher.ArrayForm} {
			want := expressible(b, form)
			var got event.Batch
			if err := subscriber.NewDecoder(subscriber.DecoderConfig{}).Decode(publisher.AppendVLLM(nil, &want, form), &got); err != nil {
				t.Fatalf("%v form: %v", form, err)
			}
			// A double holds today's nanoseconds to 240, and a small time's not always to one.
			if off := got.Time - want.Time; off < -240 || off > 240 {
				t.Fatalf("%v form: time off by %d", form, off)
			}
			got.Time = want.Time
			if diff := cmp.Diff(want, got, cmpopts.EquateEmpty()); diff != "" {
				t.Fatalf("%v form: -want +got\n%s", form, diff)
			}
		}
	})
}

// expressible returns a copy of a batch without what the form has no field for.
func expressible(b event.Batch, form publisher.Form) event.Batch {
	events := make([]event.Event, len(b.Events))
	for i, ev := range b.Events {
		ev.Salt = ""
		if form == publisher.ArrayForm {
			ev.Locality, ev.Ownership, ev.Session = event.LocalityUnknown, "", ""
		}
		events[i] = ev
	}
	b.Events = events
	return b
}

// benchBatch makes a batch of n runs of so many blocks of 16 tokens, with ids in no order and of a real vocabulary's
// widths.
func benchBatch(runs, blocks int) *event.Batch {
	b := &event.Batch{Time: event.Time(1789095808837884700), Rank: 0}
	x := uint64(1)
	next := func() uint64 { // splitmix64
		x += 0x9e3779b97f4a7c15
		z := x
		z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
		z = (z ^ z>>27) * 0x94d049bb133111eb
		return z ^ z>>31
	}
	for range runs {
		ev := event.Event{
			Kind: event.Stored, Tier: event.GPU, Group: 0, Spec: event.SpecFull, LoRAID: event.NoLoRAID, BlockSize: 16,
			HasParent: true, Parent: event.IntHash(next()), ExtraKeys: make([][]byte, blocks),
		}
		for range blocks {
			ev.Blocks = append(ev.Blocks, event.Block{Hash: event.IntHash(next())})
		}
		for range 16 * blocks {
			ev.Tokens = append(ev.Tokens, uint32(next()%151936))
		}
		b.Events = append(b.Events, ev)
	}
	return b
}

func BenchmarkVLLM(b *testing.B) {
	for _, form := range []publisher.Form{publisher.MapForm, publisher.ArrayForm} {
		for _, shape := range []struct{ runs, blocks int }{{1, 64}, {32, 1}, {1, 1}} {
			b.Run(fmt.Sprintf("%v/%dx%dx16", form, shape.runs, shape.blocks), func(b *testing.B) {
				payload := publisher.AppendVLLM(nil, benchBatch(shape.runs, shape.blocks), form)
				d := subscriber.NewDecoder(subscriber.DecoderConfig{})
				var batch event.Batch
				b.ReportAllocs()
				b.SetBytes(int64(len(payload)))
				for b.Loop() {
					if err := d.Decode(payload, &batch); err != nil {
						b.Fatal(err)
					}
				}
				blocks := b.N * shape.runs * shape.blocks
				b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(blocks), "ns/block")
			})
		}
	}
}
