package subscriber

import (
	"encoding/json"
	"math"

	"github.com/tinylib/msgp/msgp"

	"kvstrata/event"
)

// TensorRT-LLM speaks twice: its ZeroMQ stream is vLLM's maps with signed hashes, and its event buffer, which is pulled, gives
// one JSON object an event: {event_id, data: {type, …}, window_size, …}. Each is a batch of its own here, numbered by event_id.
//
// A block lies in one cache level at a time, and only "updated" says that it moved: EVICTED from the old level and STORED in
// the new one, and LOADED when it became warmer. "removed" names no level.

// trtLevels are the tiers of the cache levels.
var trtLevels = []event.Tier{event.GPU, event.CPU, event.Disk}

type trtBlock struct {
	Hash   jsonHash `json:"block_hash"`
	Tokens []struct {
		ID    trtToken `json:"token_id"`
		Extra uint64   `json:"token_extra_id"`
	} `json:"tokens"`
	Level int               `json:"cache_level"`
	Keys  []json.RawMessage `json:"mm_keys"`
	Salt  string            `json:"cache_salt"`
	LoRA  *int64            `json:"lora_id"`
}

// trtToken is a token id, or, where an image stands, text.
type trtToken struct {
	id   uint32
	text bool
}

// UnmarshalJSON reads a token.
func (t *trtToken) UnmarshalJSON(raw []byte) error {
	if t.text = len(raw) > 0 && raw[0] == '"'; t.text {
		return nil
	}
	return json.Unmarshal(raw, &t.id)
}

// goesOn reports whether a block belongs to the run of the one before it.
func (b *trtBlock) goesOn(last *trtBlock) bool {
	return last != nil && b.Level == last.Level && len(b.Tokens) == len(last.Tokens) && b.Salt == last.Salt &&
		(b.LoRA == nil) == (last.LoRA == nil) && (b.LoRA == nil || *b.LoRA == *last.LoRA)
}

// tensorRT reads one event of the event buffer.
func (d *Decoder) tensorRT(raw []byte) (rank int32, err error) {
	rank = -1
	top, err := d.object(raw, "", "event_id", "data", "window_size", "attention_dp_rank", "layer_group_id", "hash_algo")
	if err != nil {
		return rank, err
	}
	group, window := event.NoGroup, uint32(0)
	if err := top.fields("", value{"attention_dp_rank", &rank}, value{"layer_group_id", &group}, value{"window_size", &window}); err != nil {
		return rank, err
	}
	if group == event.NoGroup && window > 0 && window <= math.MaxInt32 {
		group = event.Group(window) // blocks of several windows are kept apart
	}
	data, err := d.object(top["data"], "data", "type", "parent_hash", "blocks", "block_hashes", "block_hash", "cache_level", "priority",
		"num_blocks_per_cache_level")
	if err != nil {
		return rank, err
	}
	var kind string
	if err := data.field("data", "type", &kind); err != nil {
		return rank, err
	}
	switch kind {
	case "created":
		err = d.trtCreated(data)
	case "stored":
		err = d.trtStored(data, group)
	case "removed":
		err = d.trtRemoved(data, group)
	case "updated":
		err = d.trtUpdated(data, group)
	default:
		d.odd("unknown event", "", []byte(kind))
	}
	return rank, err
}

// trtCreated takes the sizes of the pools.
func (d *Decoder) trtCreated(data jsonObject) error {
	var sizes []uint64
	if err := data.field("data", "num_blocks_per_cache_level", &sizes); err != nil {
		return err
	}
	if len(sizes) > 0 {
		d.pool = sizes[0]
	}
	return nil
}

// trtStored takes a chain of blocks: runs of those that are alike in all but hash and tokens. A run in which a token is text
// has no tokens.
func (d *Decoder) trtStored(data jsonObject, group event.Group) error {
	var parent *jsonHash
	var blocks []trtBlock
	if err := data.fields("data", value{"parent_hash", &parent}, value{"blocks", &blocks}); err != nil {
		return err
	}
	d.sight.any = true
	var ev *event.Event
	var last *trtBlock
	text := false
	for i := range blocks {
		b := &blocks[i]
		tier, err := d.trtTier(b.Level)
		if err != nil {
			return err
		}
		hash := d.jsonBlocks([]jsonHash{b.Hash})[0]
		if !b.goesOn(last) {
			next := event.Event{
				Kind: event.Stored, Tier: tier, Group: group, LoRAID: event.NoLoRAID, BlockSize: uint32(len(b.Tokens)), Salt: b.Salt,
			}
			if b.LoRA != nil {
				next.LoRAID = *b.LoRA
			}
			switch {
			case ev != nil:
				next.HasParent, next.Parent = true, ev.Blocks[len(ev.Blocks)-1].Hash
			case parent != nil:
				next.HasParent, next.Parent = true, parent.BlockHash
			}
			d.events = append(d.events, next)
			ev, text = &d.events[len(d.events)-1], false
		}
		last = b
		ev.Blocks = append(ev.Blocks, hash)
		var extra []uint64
		for _, t := range b.Tokens {
			ev.Tokens = append(ev.Tokens, t.ID.id)
			text = text || t.ID.text
			if t.Extra != 0 {
				extra = append(extra, t.Extra)
			}
		}
		ev.ExtraKeys = append(ev.ExtraKeys, trtExtraKeys(extra, b.Keys))
		if text { // what stands there is no token that a prompt could be looked up by
			ev.Tokens = nil
			d.odd("tokens that are text", "", nil)
		}
	}
	return nil
}

// trtExtraKeys returns what beside tokens makes up a block's hash, as the edge takes it; nil for nothing.
func trtExtraKeys(extra []uint64, keys []json.RawMessage) []byte {
	if len(extra) == 0 && len(keys) == 0 {
		return nil
	}
	out := msgp.AppendArrayHeader(nil, 2)
	out = msgp.AppendArrayHeader(out, uint32(len(extra)))
	for _, n := range extra {
		out = msgp.AppendUint64(out, n)
	}
	out = msgp.AppendArrayHeader(out, uint32(len(keys)))
	for _, key := range keys {
		out = msgp.AppendBytes(out, key)
	}
	return out
}

func (d *Decoder) trtTier(level int) (event.Tier, error) {
	if level < 0 || level >= len(trtLevels) {
		return "", &DecodeError{Path: "data.cache_level", Reason: "no level that we know"}
	}
	d.sight.medium(string(trtLevels[level]))
	return trtLevels[level], nil
}

func (d *Decoder) trtRemoved(data jsonObject, group event.Group) error {
	var hashes []jsonHash
	if err := data.field("data", "block_hashes", &hashes); err != nil {
		return err
	}
	for _, block := range d.jsonBlocks(hashes) {
		d.events = append(d.events, event.Event{
			Kind: event.Evicted, Tier: event.AnyTier, Group: group, LoRAID: event.NoLoRAID, Blocks: []event.Block{block},
		})
	}
	return nil
}

func (d *Decoder) trtUpdated(data jsonObject, group event.Group) error {
	var hash jsonHash
	var level *struct {
		Old int `json:"old_value"`
		New int `json:"new_value"`
	}
	if err := data.fields("data", value{"block_hash", &hash}, value{"cache_level", &level}); err != nil {
		return err
	}
	if level == nil || level.Old == level.New { // the priority changed
		return nil
	}
	from, err := d.trtTier(level.Old)
	if err != nil {
		return err
	}
	to, err := d.trtTier(level.New)
	if err != nil {
		return err
	}
	move := func(kind event.Kind, tier event.Tier) {
		d.events = append(d.events, event.Event{
			Kind: kind, Tier: tier, Group: group, LoRAID: event.NoLoRAID, Blocks: d.jsonBlocks([]jsonHash{hash}),
		})
	}
	move(event.Evicted, from)
	move(event.Stored, to)
	if to.Warmth() < from.Warmth() {
		move(event.Loaded, to)
		d.events[len(d.events)-1].Load.From = from
	}
	return nil
}
