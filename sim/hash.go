package sim

import (
	"encoding/binary"
	"math"

	"kvstrata/event"

	"github.com/zeebo/xxh3"
)

// hasher names blocks as an engine does: each by its parent, its tokens and its extra keys. It stands for vLLM's
// SHA-256, which would take most of a simulation's time; what matters is kept: a hash tells a whole prefix, and two
// engines with different seeds call the same prefix by different hashes.
type hasher struct {
	none uint64 // the parent of a first block: vLLM's NONE_HASH
	buf  []byte
}

func newHasher(seed uint64) hasher {
	return hasher{none: xxh3.Hash(binary.LittleEndian.AppendUint64(nil, seed))}
}

func (h *hasher) block(parent uint64, tokens []uint32, extra []byte) uint64 {
	buf := binary.LittleEndian.AppendUint64(h.buf[:0], parent)
	for _, t := range tokens {
		buf = binary.LittleEndian.AppendUint32(buf, t)
	}
	buf = append(buf, extra...)
	h.buf = buf
	return xxh3.Hash(buf)
}

// digestBytes makes a hash as long as SHA-256's. As in vLLM, the integer that stands for a digest is its last 8 bytes,
// big-endian.
func digestBytes(hash uint64) event.BlockHash {
	var b [32]byte
	for i := range uint64(3) {
		binary.BigEndian.PutUint64(b[8*i:], mix(hash+(i+1)*golden))
	}
	binary.BigEndian.PutUint64(b[24:], hash)
	return event.BytesHash(string(b[:]))
}

// appendExtraKeys appends a block's extra keys as vLLM orders them, LoRA name before salt, as a msgpack array of
// strings; nothing when there are none.
func appendExtraKeys(dst []byte, lora, salt string) []byte {
	count := byte(0)
	for _, key := range []string{lora, salt} {
		if key != "" {
			count++
		}
	}
	if count == 0 {
		return dst
	}
	dst = append(dst, 0x90|count)
	for _, key := range []string{lora, salt} {
		if key != "" {
			dst = appendString(dst, key)
		}
	}
	return dst
}

func appendString(dst []byte, s string) []byte {
	switch n := len(s); {
	case n < 32:
		dst = append(dst, 0xa0|byte(n))
	case n <= math.MaxUint8:
		dst = append(dst, 0xd9, byte(n))
	case n <= math.MaxUint16:
		dst = binary.BigEndian.AppendUint16(append(dst, 0xda), uint16(n))
	default:
		dst = binary.BigEndian.AppendUint32(append(dst, 0xdb), uint32(n))
	}
	return append(dst, s...)
}
