package event

import (
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"strings"

	"github.com/zeebo/xxh3"
)

// BlockHash is what an engine calls a block: an integer or bytes, opaque to us. A hash of exactly 8 bytes and the
// integer that they spell, big-endian, are the same hash. The zero value is the integer 0.
type BlockHash struct {
	n uint64
	b string // bytes of a hash that is not 8 long; empty for an integer
}

// IntHash returns the hash that an engine sent as an integer; signed ones are cast to their bit pattern.
func IntHash(n uint64) BlockHash { return BlockHash{n: n} }

// BytesHash returns the hash that an engine sent as bytes.
func BytesHash(b string) BlockHash {
	if len(b) == 8 {
		return BlockHash{n: beUint64(b)}
	}
	return BlockHash{b: b}
}

func beUint64(b string) uint64 {
	_ = b[7]
	return uint64(b[0])<<56 | uint64(b[1])<<48 | uint64(b[2])<<40 | uint64(b[3])<<32 |
		uint64(b[4])<<24 | uint64(b[5])<<16 | uint64(b[6])<<8 | uint64(b[7])
}

// Int returns the hash as an integer, and whether it is one.
func (h BlockHash) Int() (n uint64, ok bool) { return h.n, h.b == "" }

// Clone returns the hash with memory of its own: decoders let all byte hashes of a payload share one string.
func (h BlockHash) Clone() BlockHash { return BlockHash{n: h.n, b: strings.Clone(h.b)} }

// Equal reports whether two hashes are the same, as == does.
func (h BlockHash) Equal(other BlockHash) bool { return h == other }

// Len returns how many bytes the hash has on the wire; an integer has 8.
func (h BlockHash) Len() int {
	if h.b == "" {
		return 8
	}
	return len(h.b)
}

// AppendTo appends the hash's bytes; an integer is 8, big-endian.
func (h BlockHash) AppendTo(dst []byte) []byte {
	if h.b == "" {
		return binary.BigEndian.AppendUint64(dst, h.n)
	}
	return append(dst, h.b...)
}

// String returns the hash's bytes in hexadecimal.
func (h BlockHash) String() string { return hex.EncodeToString(h.AppendTo(nil)) }

// MarshalText writes the hash in hexadecimal.
func (h BlockHash) MarshalText() ([]byte, error) { return []byte(h.String()), nil }

// UnmarshalText reads a hash in hexadecimal.
func (h *BlockHash) UnmarshalText(text []byte) (err error) {
	*h, err = ParseBlockHash(string(text))
	return err
}

// ParseBlockHash reads a hash in hexadecimal, as [BlockHash.String] writes it.
func ParseBlockHash(text string) (BlockHash, error) {
	b, err := hex.DecodeString(text)
	if err != nil || len(b) == 0 {
		return BlockHash{}, fmt.Errorf("block hash %q: want hexadecimal bytes, as 6d4fa0e5fdb93342", text)
	}
	return BytesHash(string(b)), nil
}

// Group numbers a KV cache group of a model with several; NoGroup and 0 are the same group.
type Group int32

// NoGroup is the group of an event that names none.
const NoGroup Group = -1

// Index returns the group's number, 0 for NoGroup.
func (g Group) Index() uint32 { return uint32(max(g, 0)) }

// NoLoRAID is the LoRAID of an event that carries none.
const NoLoRAID int64 = -1 << 63

// Tier is where a block lies, by the engine's own word for it.
type Tier string

// The tiers that have an order of warmth; see [Tier.Warmth].
const (
	GPU      Tier = "GPU" // also when the engine names no medium
	CPU      Tier = "CPU"
	Disk     Tier = "DISK"
	Storage  Tier = "STORAGE"
	External Tier = "EXTERNAL"
)

// AnyTier is the tier of an EVICTED whose source does not say where the block was; the judge fills in where it is.
const AnyTier Tier = "?"

// Warmth orders tiers from warm to cold: 0 device, 1 host memory, 2 local disk, 3 shared or remote, 4 a word that we
// do not know. Sources: vLLM, SGLang, TensorRT-LLM, Mooncake and Dynamo (docs/format/event.md).
func (t Tier) Warmth() int {
	switch t {
	case GPU, "", "DEVICE":
		return 0
	case CPU, "CPU_PINNED", "CPU_TIER1", "cpu":
		return 1
	case Disk, "CPU_TIER2", "NVME", "FS", "disk":
		return 2
	case Storage, "OBJ", External, "NETWORK", "REMOTE", "SHARED":
		return 3
	default:
		return 4
	}
}

// Digest sums up a resident set: Σ copies × Mix64 over its (hash, group, tier) entries, modulo 2⁶⁴. Equal sets have
// equal digests; it is kept in constant time, and CLEARED sets it to 0.
type Digest uint64

// Mix64 is one entry's weight in the [Digest]: XXH3-64(hash bytes ‖ group as u32 LE ‖ tier name), seed 0.
func Mix64(h BlockHash, g Group, t Tier) Digest {
	var room [64]byte
	buf := h.AppendTo(room[:0])
	buf = binary.LittleEndian.AppendUint32(buf, g.Index())
	buf = append(buf, t...)
	return Digest(xxh3.Hash(buf))
}
