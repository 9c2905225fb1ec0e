package interop_test

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"slices"

	"github.com/tinylib/msgp/msgp"

	"kvstrata/event"
)

// classes names vLLM's event classes.
var classes = map[event.Kind]string{
	event.Stored: "BlockStored", event.Evicted: "BlockRemoved", event.Cleared: "AllBlocksCleared",
}

// docOf describes an event as publish.py takes it and subscribe.py gives it: every field of the class that a release
// has, by its name, null where it is not set.
func docOf(ev event.Event, fields map[string][]string) map[string]any {
	doc := map[string]any{"type": classes[ev.Kind]}
	for _, field := range fields[classes[ev.Kind]] {
		doc[field] = fieldOf(ev, field)
	}
	return doc
}

func fieldOf(ev event.Event, field string) any {
	switch field {
	case "block_hashes":
		hashes := []any{}
		for _, b := range ev.Blocks {
			hashes = append(hashes, hashDoc(b.Hash))
		}
		return hashes
	case "parent_block_hash":
		return orNull(hashDoc(ev.Parent), ev.HasParent)
	case "token_ids":
		return append([]uint32{}, ev.Tokens...) // [] rather than null
	case "block_size":
		return ev.BlockSize
	case "lora_id":
		return orNull(ev.LoRAID, ev.LoRAID != event.NoLoRAID)
	case "medium":
		return orNull(ev.Tier, ev.Tier != "")
	case "lora_name":
		return orNull(ev.LoRA, ev.LoRA != "")
	case "extra_keys":
		return orNull(keyDocs(ev.ExtraKeys), ev.ExtraKeys != nil)
	case "group_idx":
		return orNull(ev.Group, ev.Group != event.NoGroup)
	case "kv_cache_spec_kind":
		return orNull(ev.Spec, ev.Spec != event.SpecUnknown)
	case "kv_cache_spec_sliding_window":
		return orNull(ev.Window, ev.Window != 0)
	case "locality":
		return orNull(ev.Locality, ev.Locality != event.LocalityUnknown)
	case "ownership":
		return orNull(ev.Ownership, ev.Ownership != "")
	case "session_id":
		return orNull(ev.Session, ev.Session != "")
	default:
		panic("a field of vLLM that the tests do not know: " + field)
	}
}

func orNull[T any](v T, has bool) any {
	if !has {
		return nil
	}
	return v
}

func hashDoc(h event.BlockHash) any {
	if n, ok := h.Int(); ok {
		return n
	}
	return map[string]string{"hex": h.String()}
}

// without takes off an event what a release has no field for.
func without(ev event.Event, fields map[string][]string) event.Event {
	has := func(field string) bool { return slices.Contains(fields[classes[ev.Kind]], field) }
	if !has("locality") {
		ev.Locality = event.LocalityUnknown
	}
	if !has("ownership") {
		ev.Ownership = ""
	}
	if !has("session_id") {
		ev.Session = ""
	}
	return ev
}

// keys encodes one block's extra keys: strings, bytes, ints, and lists of these.
func keys(items ...any) []byte {
	b := msgp.AppendArrayHeader(nil, uint32(len(items)))
	for _, item := range items {
		switch item := item.(type) {
		case string:
			b = msgp.AppendString(b, item)
		case []byte:
			b = msgp.AppendBytes(b, item)
		case int:
			if item >= 0 {
				b = msgp.AppendUint64(b, uint64(item))
			} else {
				b = msgp.AppendInt64(b, int64(item))
			}
		case []any:
			b = append(b, keys(item...)...)
		default:
			panic(fmt.Sprintf("extra key %T", item))
		}
	}
	return b
}

func keyDocs(all [][]byte) []any {
	docs := []any{}
	for _, k := range all {
		if k == nil {
			docs = append(docs, nil)
			continue
		}
		v, _, err := msgp.ReadIntfBytes(k)
		if err != nil {
			panic(err)
		}
		docs = append(docs, jsonable(v))
	}
	return docs
}

// jsonable writes bytes as {"hex": …}, within lists too.
func jsonable(v any) any {
	switch v := v.(type) {
	case []byte:
		return map[string]string{"hex": hex.EncodeToString(v)}
	case []any:
		for i := range v {
			v[i] = jsonable(v[i])
		}
		return v
	default:
		return v
	}
}

// plain gives a document the types that decoded JSON has, so that both can be compared.
func plain(doc map[string]any) map[string]any {
	text, err := json.Marshal(doc)
	if err != nil {
		panic(err)
	}
	dec := json.NewDecoder(bytes.NewReader(text))
	dec.UseNumber()
	var again map[string]any
	if err := dec.Decode(&again); err != nil {
		panic(err)
	}
	return again
}
