package publisher

import (
	"fmt"
	"math"

	"kvstrata/event"

	"github.com/tinylib/msgp/msgp"
)

// Form is how vLLM writes the events inside a batch; the batch itself is an array in both.
type Form uint8

// The forms.
const (
	MapForm   Form = 1 + iota // vLLM 0.24 and newer: each event a map, tagged under "type"
	ArrayForm                 // vLLM 0.23 and older: each event an array, its tag first
)

// String returns the form's name.
func (f Form) String() string {
	switch f {
	case MapForm:
		return "map"
	case ArrayForm:
		return "array"
	default:
		return fmt.Sprintf("Form(%d)", f)
	}
}

// MarshalText writes the form's name.
func (f Form) MarshalText() ([]byte, error) { return []byte(f.String()), nil }

// UnmarshalText reads a form's name.
func (f *Form) UnmarshalText(text []byte) error {
	switch string(text) {
	case "map":
		*f = MapForm
	case "array":
		*f = ArrayForm
	default:
		return fmt.Errorf("form %q: want map or array", text)
	}
	return nil
}

// AppendVLLM appends a batch as vLLM's publisher writes it, byte for byte what msgspec gives for vLLM's event classes:
// the map form with the fields of 0.32, the array form with those of 0.23, which knows no locality, ownership or
// session. Integer hashes are written unsigned, a byte hash of 8 bytes as the integer it spells, an empty tier as nil.
//
// LOADED is left out, since a vLLM subscriber refuses the whole batch for one tag it does not know. Of a batch whose
// events are all LOADED nothing is written: dst comes back as it was. A batch without events is a batch all the same.
func AppendVLLM(dst []byte, b *event.Batch, form Form) []byte {
	events := 0
	for i := range b.Events {
		if b.Events[i].Kind != event.Loaded {
			events++
		}
	}
	if events == 0 && len(b.Events) > 0 {
		return dst
	}
	dst = msgp.AppendArrayHeader(dst, 3)
	dst = msgp.AppendFloat64(dst, seconds(b.Time))
	dst = msgp.AppendArrayHeader(dst, uint32(events))
	for i := range b.Events {
		ev := &b.Events[i]
		switch ev.Kind {
		case event.Loaded:
		case event.Stored:
			dst = appendStored(dst, ev, form)
		case event.Evicted:
			dst = appendRemoved(dst, ev, form)
		case event.Cleared:
			dst = appendHeader(dst, form, 0, "AllBlocksCleared")
		default:
			panic(fmt.Sprintf("publisher: AppendVLLM: event of kind %v", ev.Kind))
		}
	}
	return appendNumber(dst, int64(b.Rank), b.Rank >= 0)
}

// seconds returns the double nearest to a time; dividing the nanoseconds at once would round twice.
func seconds(t event.Time) float64 { return float64(t/1e9) + float64(t%1e9)/1e9 }

func appendStored(dst []byte, ev *event.Event, form Form) []byte {
	all := form == ArrayForm
	has := [...]bool{
		ev.ExtraKeys != nil, ev.Group >= 0, ev.Spec != event.SpecUnknown, ev.Window != 0,
		ev.Locality != event.LocalityUnknown && !all, ev.Ownership != "" && !all, ev.Session != "" && !all,
	}
	fields := 7
	for i, h := range has {
		if h || all && i < 4 {
			fields++
		}
	}
	dst = appendHeader(dst, form, fields, "BlockStored")
	dst = appendKey(dst, form, "block_hashes")
	dst = appendHashes(dst, ev.Blocks)
	dst = appendKey(dst, form, "parent_block_hash")
	if ev.HasParent {
		dst = appendHash(dst, ev.Parent)
	} else {
		dst = msgp.AppendNil(dst)
	}
	dst = appendKey(dst, form, "token_ids")
	dst = appendTokens(dst, ev.Tokens)
	dst = appendKey(dst, form, "block_size")
	dst = msgp.AppendUint32(dst, ev.BlockSize)
	dst = appendKey(dst, form, "lora_id")
	dst = appendNumber(dst, ev.LoRAID, ev.LoRAID != event.NoLoRAID)
	dst = appendKey(dst, form, "medium")
	dst = appendText(dst, string(ev.Tier))
	dst = appendKey(dst, form, "lora_name")
	dst = appendText(dst, ev.LoRA)
	if has[0] || all {
		dst = appendKey(dst, form, "extra_keys")
		dst = appendExtraKeys(dst, ev.ExtraKeys)
	}
	if has[1] || all {
		dst = appendKey(dst, form, "group_idx")
		dst = appendNumber(dst, int64(ev.Group), has[1])
	}
	if has[2] || all {
		dst = appendKey(dst, form, "kv_cache_spec_kind")
		dst = appendText(dst, ev.Spec.String())
	}
	if has[3] || all {
		dst = appendKey(dst, form, "kv_cache_spec_sliding_window")
		dst = appendNumber(dst, int64(ev.Window), has[3])
	}
	dst = appendPlace(dst, ev, form)
	if has[6] {
		dst = appendKey(dst, form, "session_id")
		dst = appendText(dst, ev.Session)
	}
	return dst
}

func appendRemoved(dst []byte, ev *event.Event, form Form) []byte {
	fields := 2
	hasGroup := ev.Group >= 0
	switch {
	case form == ArrayForm:
		fields = 3
	default:
		for _, has := range [...]bool{hasGroup, ev.Locality != event.LocalityUnknown, ev.Ownership != ""} {
			if has {
				fields++
			}
		}
	}
	dst = appendHeader(dst, form, fields, "BlockRemoved")
	dst = appendKey(dst, form, "block_hashes")
	dst = appendHashes(dst, ev.Blocks)
	dst = appendKey(dst, form, "medium")
	dst = appendText(dst, string(ev.Tier))
	if hasGroup || form == ArrayForm {
		dst = appendKey(dst, form, "group_idx")
		dst = appendNumber(dst, int64(ev.Group), hasGroup)
	}
	return appendPlace(dst, ev, form)
}

// appendPlace writes locality and ownership, which only the map form knows.
func appendPlace(dst []byte, ev *event.Event, form Form) []byte {
	if form == ArrayForm {
		return dst
	}
	if ev.Locality != event.LocalityUnknown {
		dst = appendKey(dst, form, "locality")
		dst = appendText(dst, ev.Locality.String())
	}
	if ev.Ownership != "" {
		dst = appendKey(dst, form, "ownership")
		dst = appendText(dst, ev.Ownership)
	}
	return dst
}

// appendHeader opens an event of so many fields beside its tag, and writes the tag.
func appendHeader(dst []byte, form Form, fields int, tag string) []byte {
	if form == ArrayForm {
		dst = msgp.AppendArrayHeader(dst, uint32(fields+1))
	} else {
		dst = msgp.AppendMapHeader(dst, uint32(fields+1))
		dst = msgp.AppendString(dst, "type")
	}
	return msgp.AppendString(dst, tag)
}

// appendKey writes a field's name where fields have names.
func appendKey(dst []byte, form Form, name string) []byte {
	if form == ArrayForm {
		return dst
	}
	return msgp.AppendString(dst, name)
}

// appendText writes a string, and nil for none.
func appendText(dst []byte, s string) []byte {
	if s == "" {
		return msgp.AppendNil(dst)
	}
	return msgp.AppendString(dst, s)
}

// appendNumber writes a number in the least width, and nil for none. msgp's signed writer is no use: it takes the
// signed formats for positive numbers too, and msgspec the unsigned ones.
func appendNumber(dst []byte, n int64, has bool) []byte {
	switch {
	case !has:
		return msgp.AppendNil(dst)
	case n < 0:
		return msgp.AppendInt64(dst, n)
	default:
		return msgp.AppendUint64(dst, uint64(n))
	}
}

func appendHashes(dst []byte, blocks []event.Block) []byte {
	dst = msgp.AppendArrayHeader(dst, uint32(len(blocks)))
	for i := range blocks {
		dst = appendHash(dst, blocks[i].Hash)
	}
	return dst
}

func appendHash(dst []byte, h event.BlockHash) []byte {
	if n, ok := h.Int(); ok {
		return msgp.AppendUint64(dst, n)
	}
	dst = msgp.AppendBytesHeader(dst, uint32(h.Len()))
	return h.AppendTo(dst)
}

func appendTokens(dst []byte, tokens []uint32) []byte {
	dst = msgp.AppendArrayHeader(dst, uint32(len(tokens)))
	for _, t := range tokens {
		switch {
		case t < 1<<7:
			dst = append(dst, byte(t))
		case t <= math.MaxUint8:
			dst = append(dst, 0xcc, byte(t))
		case t <= math.MaxUint16:
			dst = append(dst, 0xcd, byte(t>>8), byte(t))
		default:
			dst = append(dst, 0xce, byte(t>>24), byte(t>>16), byte(t>>8), byte(t))
		}
	}
	return dst
}

func appendExtraKeys(dst []byte, keys [][]byte) []byte {
	if keys == nil {
		return msgp.AppendNil(dst)
	}
	dst = msgp.AppendArrayHeader(dst, uint32(len(keys)))
	for _, key := range keys {
		if len(key) == 0 {
			dst = msgp.AppendNil(dst)
		} else {
			dst = append(dst, key...)
		}
	}
	return dst
}
