package subscriber

import (
	"encoding/hex"
	"strconv"
	"strings"

	"kvstrata/event"
)

// The master of a Mooncake store sends batches as vLLM's publisher does, with a time in whole milliseconds, and events that are
// maps with fields of their own: an object each, which is a block, or a part of one. Its sequence begins at 1, and nothing can be
// replayed. Builds before 0.3.14 told the hash that an object's key spells; since then the key alone is told, and read here. It
// knows no tokens, so its blocks have no names of ours; lookups find them by the engine's own hashes.

// mooncakeEvent reads one event.
func (d *Decoder) mooncakeEvent() {
	r := &d.r
	ev := event.Event{Kind: event.Stored, Tier: event.CPU, Group: event.NoGroup, LoRAID: event.NoLoRAID}
	var kind, object []byte
	for range r.fields() {
		d.place.field, d.place.item = noField, -1
		key := r.text()
		if r.failed {
			return
		}
		d.sight.name("event." + string(printable(key[:min(len(key), maxWord)])))
		if r.isNil() {
			continue
		}
		switch string(key) {
		case "event_type":
			kind = r.text()
		case "medium":
			d.place.field = medium
			ev.Tier = d.tier(r.text())
		case "seq_hashes":
			d.place.field = blockHashes
			d.hashes(&ev)
		case "block_hashes": // the same, signed, for readers of vLLM's
			d.place.field = blockHashes
			if len(ev.Blocks) > 0 {
				r.skip()
				continue
			}
			d.hashes(&ev)
		case "parent_hash":
			d.place.field = parentHash
			ev.Parent, ev.HasParent = d.hash(), true
		case "token_ids":
			d.place.field = tokenIDs
			d.tokenIDs(&ev)
		case "block_size":
			d.place.field = blockSize
			ev.BlockSize = uint32(r.number(maxBlockSize))
		case "lora_name":
			d.place.field = loraName
			ev.LoRA = d.words.keep(r.text())
		case "additional_salt":
			d.place.field = cacheSalt
			ev.Salt = again(&d.words.salt, r.text())
		case "backend_id":
			d.place.field = ownership
			ev.Ownership = d.words.keep(r.text())
		case "object_key":
			object = r.text()
		case "session_id":
			d.place.field = sessionID
			ev.Session = valid(again(&d.words.session, r.text()))
		case "event_id", "timestamp", "type", "model_name", "tenant_id", "group_id", "dp_rank", "base_block_idx", "parent_block_hash":
			r.skip()
		default:
			d.odd("unknown field", "mooncake", key)
			r.skip()
		}
	}
	if r.failed {
		return
	}
	d.sight.dialect = DialectMooncake
	d.sight.forms |= mapForm
	switch string(kind) {
	case "stored":
	case "removed":
		ev.Kind = event.Evicted
	case "cleared":
		ev = event.Event{Kind: event.Cleared, Cause: event.ByEngine, Group: event.NoGroup, LoRAID: event.NoLoRAID}
	default:
		d.odd("unknown event", "", kind)
		return
	}
	d.sight.any = d.sight.any || ev.Kind == event.Stored
	if ev.Kind != event.Cleared && len(ev.Blocks) == 0 {
		if h, ok := hashOfObject(string(object)); ok {
			ev.Blocks = append(ev.Blocks, event.Block{Hash: h, Copies: -1, Age: -1})
		}
	}
	if ev.Kind != event.Cleared && len(ev.Blocks) == 0 {
		d.odd("objects whose key names no block", "", nil)
		return
	}
	d.events = append(d.events, ev)
}

// hashOfObject returns the hash that an object's key spells, as the engine's events have it: of vLLM's connector
// (model@…@digest) the digest's last eight bytes, of SGLang's (digest_rank_k) its first eight, of LMCache's
// (model@world@worker@hash@dtype) the hash. A block of several ranks, or of keys and values, has an object each, all of one hash.
func hashOfObject(key string) (event.BlockHash, bool) {
	parts := strings.Split(key, "@")
	if len(parts) >= 5 {
		if n, err := strconv.ParseInt(parts[3], 16, 64); err == nil {
			return event.IntHash(uint64(n)), true
		}
		if n, err := strconv.ParseUint(parts[3], 16, 64); err == nil {
			return event.IntHash(n), true
		}
	}
	if digest, err := hex.DecodeString(parts[len(parts)-1]); len(parts) > 1 && err == nil && len(digest) >= 8 {
		return event.BytesHash(string(digest[len(digest)-8:])), true
	}
	for part := range strings.SplitSeq(key, "_") {
		if digest, err := hex.DecodeString(part); err == nil && len(digest) == 32 {
			return event.BytesHash(string(digest[:8])), true
		}
	}
	return event.BlockHash{}, false
}
