package subscriber

import (
	"errors"
	"fmt"

	"github.com/tinylib/msgp/msgp"

	"kvstrata/event"
)

// edge is where prompt text ends: token ids, extra keys and salts come in with an engine's events, become hashes, and
// go no further.
type edge struct {
	keepTokens      bool   // --tokens=keep: tokens and extra keys travel on
	allowInvertible bool   // prefix hashes of short blocks too, though a table inverts them
	keyed           bool   // prefix hashes have a key: local hashes made without it can't go into them
	withheld        uint64 // runs of blocks too short, or with local hashes where there is a key
	tellsKeys       bool   // the engine has told extra keys
	unsalted        uint64 // runs in colder tiers that came without the extra keys which the engine tells of the device
	broken          uint64 // runs with extra keys that are not what vLLM sends
	scratch         []byte
}

// minBlockSize is the fewest tokens a block must have for its public prefix hash not to be inverted by a table.
const minBlockSize = 16

// enter readies an event for the judge: from a STORED run's extra keys it takes the salt and what they add to each
// block's local hash. Runs that must not be named lose their tokens here: blocks so short that their hashes would give
// the tokens away, and blocks whose extra keys can't be read.
func (e *edge) enter(ev *event.Event) {
	if ev.Kind != event.Stored {
		return
	}
	if ev.BlockSize < minBlockSize && len(ev.Tokens)+len(ev.Locals) > 0 && !e.allowInvertible || e.keyed && ev.Locals != nil {
		e.withheld++
		ev.Tokens, ev.Locals = nil, nil
	}
	// vLLM's offloading tells tokens without extra keys, the salt's among them: named by the tokens alone, a salted block would pass
	// for another. It has the name that its hash got on the device.
	e.tellsKeys = e.tellsKeys || ev.ExtraKeys != nil
	if e.tellsKeys && ev.ExtraKeys == nil && ev.Salt == "" && len(ev.Tokens) > 0 && ev.Tier.Warmth() > 0 {
		e.unsalted++
		ev.Tokens = nil
	}
	if ev.LoRA == "" && ev.LoRAID != event.NoLoRAID {
		// Engines before vLLM 0.12 tell the adapter by its number alone; it must not pass for the base model.
		ev.LoRA = fmt.Sprintf("lora-id:%d", ev.LoRAID)
	}
	for i, keys := range ev.ExtraKeys {
		if keys == nil || i >= len(ev.Blocks) {
			continue
		}
		root := i == 0 && !ev.HasParent
		salt, term, err := e.split(keys, ev.LoRA, root)
		if err != nil {
			// Hashed as if there were none, the blocks would bear the names of others.
			e.broken++
			ev.Tokens, ev.Salt, ev.Terms = nil, "", nil
			return
		}
		if root && ev.Salt == "" {
			ev.Salt = salt
		}
		if term != 0 {
			if ev.Terms == nil {
				ev.Terms = make([]uint64, len(ev.Blocks))
			}
			ev.Terms[i] = term
		}
	}
}

// leave takes off an event what may not go further.
func (e *edge) leave(ev *event.Event) {
	ev.Salt, ev.Terms, ev.Locals = "", nil, nil
	if !e.keepTokens {
		ev.Tokens, ev.ExtraKeys = nil, nil
	}
}

var errExtraKeys = errors.New("extra keys are no array")

// split takes one block's extra keys apart: (LoRA name, multimodal items…, salt, embeddings), in vLLM's order. The salt
// stands in the first block only, as the last bare string. What is left is hashed as minimal msgpack, so that it does
// not matter who encoded it.
func (e *edge) split(keys []byte, lora string, root bool) (salt string, term uint64, err error) {
	n, rest, err := msgp.ReadArrayHeaderBytes(keys)
	if err != nil {
		return "", 0, fmt.Errorf("%w: %w", errExtraKeys, err)
	}
	var saltAt int
	items := make([][]byte, 0, min(int(n), len(keys)))
	for range n {
		item := rest
		if rest, err = msgp.Skip(rest); err != nil {
			return "", 0, fmt.Errorf("%w: %w", errExtraKeys, err)
		}
		item = item[:len(item)-len(rest)]
		if text, isText := bareString(item); isText {
			if lora != "" && len(items) == 0 && text == lora {
				lora = "" // its own seed term tells it; a second one is not the adapter's name
				continue
			}
			if root {
				salt, saltAt = text, len(items)+1
			}
		}
		items = append(items, item)
	}
	if saltAt > 0 {
		items = append(items[:saltAt-1], items[saltAt:]...)
	}
	if len(items) == 0 {
		return salt, 0, nil
	}
	e.scratch = msgp.AppendArrayHeader(e.scratch[:0], uint32(len(items)))
	for _, item := range items {
		if e.scratch, _, err = appendMinimal(e.scratch, item, 0); err != nil {
			return "", 0, fmt.Errorf("%w: %w", errExtraKeys, err)
		}
	}
	return salt, event.ExtraTerm(e.scratch), nil
}

func bareString(item []byte) (string, bool) {
	if msgp.NextType(item) != msgp.StrType {
		return "", false
	}
	text, _, err := msgp.ReadStringZC(item)
	return string(text), err == nil
}

// maxNesting bounds how deep extra keys may nest; vLLM's nest twice.
const maxNesting = 16

var errKeyType = errors.New("a value of a type that extra keys do not have")

// appendMinimal appends one msgpack value in its shortest form.
func appendMinimal(dst, value []byte, depth int) (out, rest []byte, err error) {
	if depth > maxNesting {
		return dst, nil, errKeyType
	}
	switch msgp.NextType(value) {
	case msgp.NilType:
		rest, err = msgp.ReadNilBytes(value)
		return msgp.AppendNil(dst), rest, err
	case msgp.BoolType:
		b, rest, err := msgp.ReadBoolBytes(value)
		return msgp.AppendBool(dst, b), rest, err
	case msgp.IntType:
		n, rest, err := msgp.ReadInt64Bytes(value)
		if n >= 0 { // msgp would spend a signed format on it
			return msgp.AppendUint64(dst, uint64(n)), rest, err
		}
		return msgp.AppendInt64(dst, n), rest, err
	case msgp.UintType:
		n, rest, err := msgp.ReadUint64Bytes(value)
		return msgp.AppendUint64(dst, n), rest, err
	case msgp.Float64Type, msgp.Float32Type:
		f, rest, err := msgp.ReadFloat64Bytes(value)
		return msgp.AppendFloat64(dst, f), rest, err
	case msgp.StrType:
		s, rest, err := msgp.ReadStringZC(value)
		return msgp.AppendStringFromBytes(dst, s), rest, err
	case msgp.BinType:
		b, rest, err := msgp.ReadBytesZC(value)
		return msgp.AppendBytes(dst, b), rest, err
	case msgp.ArrayType:
		n, rest, err := msgp.ReadArrayHeaderBytes(value)
		dst = msgp.AppendArrayHeader(dst, n)
		for i := uint32(0); i < n && err == nil; i++ {
			dst, rest, err = appendMinimal(dst, rest, depth+1)
		}
		return dst, rest, err
	case msgp.MapType:
		n, rest, err := msgp.ReadMapHeaderBytes(value)
		dst = msgp.AppendMapHeader(dst, n)
		for i := uint64(0); i < 2*uint64(n) && err == nil; i++ {
			dst, rest, err = appendMinimal(dst, rest, depth+1)
		}
		return dst, rest, err
	default:
		return dst, nil, errKeyType
	}
}
