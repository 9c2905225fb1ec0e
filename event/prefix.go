package event

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"unsafe"

	"github.com/zeebo/xxh3"
)

// PrefixHash names the prefix that ends with a block, by its tokens and what else decides the block's content (adapter,
// cache salt, multimodal items): the same on every engine, in every process, today and tomorrow. Among the blocks of one model and one block size, one name is one prefix. 0 means unknown.
//
// local = XXH3-64(tokens as u32 LE, seed); the first block's prefix hash is its local hash; every other's is
// XXH3-64(parent's prefix hash as u64 LE ‖ local as u64 LE, seed 1337). These are Dynamo's values (its lib/kv-hashing).
type PrefixHash uint64

// String returns the hash as 16 hexadecimal digits.
func (p PrefixHash) String() string {
	var b [8]byte
	binary.BigEndian.PutUint64(b[:], uint64(p))
	return hex.EncodeToString(b[:])
}

// MarshalText writes the hash as 16 hexadecimal digits.
func (p PrefixHash) MarshalText() ([]byte, error) { return []byte(p.String()), nil }

// UnmarshalText reads 16 hexadecimal digits.
func (p *PrefixHash) UnmarshalText(text []byte) error {
	var b [8]byte
	if n, err := hex.Decode(b[:], text); err != nil || n != 8 || len(text) != 16 {
		return fmt.Errorf("prefix hash %q: want 16 hexadecimal digits", text)
	}
	*p = PrefixHash(binary.BigEndian.Uint64(b[:]))
	return nil
}

const (
	chainSeed = 1337 // of the chain, and the base of local seeds without a key
	saltSeed  = 1
	extraSeed = 2
)

// Hasher computes prefix hashes. The zero value is the public scheme; NewHasher makes a keyed one. It is a value, safe
// for concurrent use.
type Hasher struct {
	base   uint64 // of local seeds, when keyed
	secret string // empty for the public scheme
}

// NewHasher returns the scheme whose base seed is XXH3-64(key, seed 1337); an empty key gives the public scheme.
// Prefix hashes are pseudonyms: below 16 tokens a block a table inverts the public ones.
func NewHasher(key string) Hasher {
	if key == "" {
		return Hasher{}
	}
	return Hasher{base: xxh3.HashStringSeed(key, chainSeed), secret: key}
}

// Seed returns the seed of local hashes under a LoRA adapter and a cache salt; empty strings add nothing.
func (h Hasher) Seed(lora, salt string) uint64 {
	seed := uint64(chainSeed)
	if h.secret != "" {
		seed = h.base
	}
	if lora != "" {
		seed += xxh3.HashString(lora)
	}
	if salt != "" {
		seed += xxh3.HashStringSeed(salt, saltSeed)
	}
	return seed
}

// Seal returns the seed of a run as it travels: itself in the public scheme; otherwise enciphered under the key, since
// whoever knew the seed could make the table that the key is there to prevent. Equal seeds are sealed alike.
func (h Hasher) Seal(seed uint64) uint64 {
	if h.secret == "" || seed == 0 {
		return seed
	}
	left, right := uint32(seed>>32), uint32(seed)
	for round := range byte(sealRounds) {
		left, right = right, left^h.round(round, right)
	}
	return uint64(left)<<32 | uint64(right)
}

// Open returns the seed that was sealed.
func (h Hasher) Open(sealed uint64) uint64 {
	if h.secret == "" || sealed == 0 {
		return sealed
	}
	left, right := uint32(sealed>>32), uint32(sealed)
	for round := byte(sealRounds); round > 0; round-- {
		left, right = right^h.round(round-1, left), left
	}
	return uint64(left)<<32 | uint64(right)
}

// sealRounds makes the Feistel network of Seal a pseudo-random permutation (Luby and Rackoff).
const sealRounds = 4

func (h Hasher) round(round byte, half uint32) uint32 {
	mac := hmac.New(sha256.New, []byte(h.secret))
	mac.Write([]byte{round, byte(half), byte(half >> 8), byte(half >> 16), byte(half >> 24)})
	return binary.LittleEndian.Uint32(mac.Sum(nil))
}

// ExtraTerm returns what a block's other extra keys (multimodal items, embeddings; LoRA name and salt taken out) add
// to its local seed: XXH3-64 of their minimal msgpack with seed 2, and nothing when there are none.
func ExtraTerm(msgpack []byte) uint64 {
	if len(msgpack) == 0 {
		return 0
	}
	return xxh3.HashSeed(msgpack, extraSeed)
}

// littleEndian says whether tokens lie in memory as they are hashed.
var littleEndian = binary.NativeEndian.Uint16([]byte{1, 0}) == 1

// LocalHash hashes one block's tokens (with an EAGLE window, BlockSize+1 of them).
func LocalHash(tokens []uint32, seed uint64) uint64 {
	if len(tokens) == 16 { // what most engines' blocks have
		return hash64((*[16]uint32)(tokens), seed)
	}
	if littleEndian {
		raw := unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(tokens))), 4*len(tokens))
		return xxh3.HashSeed(raw, seed)
	}
	buf := make([]byte, 0, 4*len(tokens))
	for _, t := range tokens {
		buf = binary.LittleEndian.AppendUint32(buf, t)
	}
	return xxh3.HashSeed(buf, seed)
}

// Chain continues parent, the prefix hash of the block before (0 at the root), by a block's local hash.
func Chain(parent PrefixHash, local uint64) PrefixHash {
	if parent == 0 {
		return PrefixHash(local)
	}
	return PrefixHash(hash16(uint64(parent), local, chainSeed))
}

// Prefixes appends to dst the prefix hashes of every full block of a prompt. blockSize is in tokens; eagle makes each
// block cover one token more, so that a prompt has a block less when it ends on a block's edge.
func Prefixes(dst []PrefixHash, tokens []uint32, blockSize int, seed uint64, eagle bool) []PrefixHash {
	if blockSize <= 0 {
		return dst
	}
	window := blockSize
	if eagle {
		window++
	}
	var parent PrefixHash
	for start := 0; start+window <= len(tokens); start += blockSize {
		parent = Chain(parent, LocalHash(tokens[start:start+window], seed))
		dst = append(dst, parent)
	}
	return dst
}
