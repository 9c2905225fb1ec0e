package lmcache

import (
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"math/bits"
	"strconv"

	"github.com/zeebo/xxh3"

	"kvstrata/event"
)

// Hashing computes the hashes that LMCache 0.5 gives chunks of tokens (lmcache/v1/token_database.py): each is a hash of
// (the one before, the chunk's tokens, no extra keys) in Python's terms, of which the first 8 bytes count. Engines on two
// hosts agree only if algorithm, seed and chunk size do. It is safe for concurrent use.
type Hashing struct {
	sum  func(parent uint64, tokens []uint32) uint64
	none uint64 // stands before the first chunk
	// Signed says that hashes are Python's own integers, which keys spell with a sign.
	Signed bool
}

// defaultSeed is vLLM's when PYTHONHASHSEED is not set, in 0.32; until 0.25 at least, every process took a random one.
const defaultSeed = "vllm-none-hash"

// NewHashing returns LMCache's hashing in a vLLM process: algorithm is its pre_caching_hash_algorithm (builtin by default,
// sha256, sha256_cbor, xxhash or xxhash_cbor), seed the process's PYTHONHASHSEED, empty when that is not set. An algorithm
// that then differs from process to process is an error, as it is useless for a shared store. The results for builtin are
// those of CPython 3.11 or newer.
func NewHashing(algorithm, seed string) (*Hashing, error) {
	text := seed
	if seed == "" {
		text = defaultSeed
	}
	var sum func(b []byte) uint64
	switch algorithm {
	case "builtin", "":
		n, err := strconv.ParseUint(seed, 10, 32)
		if err != nil {
			return nil, fmt.Errorf("pre_caching_hash_algorithm builtin: PYTHONHASHSEED %q: want a number, the same everywhere: without, hashes differ from process to process", seed)
		}
		h := BareHashing()
		h.none = stringHash(uint32(n), seed)
		return h, nil
	case "sha256", "sha256_cbor", "sha256_cbor_64bit":
		sum = func(b []byte) uint64 {
			digest := sha256.Sum256(b)
			return binary.BigEndian.Uint64(digest[:8])
		}
	case "xxhash", "xxhash_cbor":
		if seed == "" {
			return nil, fmt.Errorf("pre_caching_hash_algorithm %s: PYTHONHASHSEED is not set: want it, the same everywhere: without, hashes differ from process to process", algorithm)
		}
		sum = func(b []byte) uint64 { return xxh3.Hash128(b).Hi }
	default:
		return nil, fmt.Errorf("pre_caching_hash_algorithm %q: want builtin, sha256, sha256_cbor, xxhash or xxhash_cbor", algorithm)
	}
	if algorithm == "sha256" || algorithm == "xxhash" {
		return &Hashing{none: sum(pickleText(text)), sum: func(parent uint64, tokens []uint32) uint64 { return sum(pickleChunk(parent, tokens)) }}, nil
	}
	return &Hashing{none: sum(cborText(text)), sum: func(parent uint64, tokens []uint32) uint64 { return sum(cborChunk(parent, tokens)) }}, nil
}

// BareHashing returns LMCache's hashing in a process without vLLM (as under SGLang): Python's own hash, from 0 on, whatever
// algorithm is configured.
func BareHashing() *Hashing {
	return &Hashing{Signed: true, sum: func(parent uint64, tokens []uint32) uint64 {
		return tupleHash(intHash(int64(parent)), tokensHash(tokens), tupleHash())
	}}
}

// maxChunk bounds chunks: beyond, Python's pickle cuts its output into frames in a way of its own.
const maxChunk = 8192

// ErrChunkSize says that a chunk size is out of range.
var ErrChunkSize = errors.New("want 1 to 8192 tokens")

// ChunkHashes returns the hash of every full chunk of a prompt.
func (h *Hashing) ChunkHashes(tokens []uint32, chunk int) ([]event.BlockHash, error) {
	if chunk < 1 || chunk > maxChunk {
		return nil, fmt.Errorf("chunk_size %d: %w", chunk, ErrChunkSize)
	}
	hashes := make([]event.BlockHash, 0, len(tokens)/chunk)
	for parent := h.none; len(tokens) >= chunk; tokens = tokens[chunk:] {
		parent = h.sum(parent, tokens[:chunk])
		hashes = append(hashes, event.IntHash(parent))
	}
	return hashes, nil
}

// cborHead appends the start of a CBOR item in its shortest form (RFC 8949).
func cborHead(dst []byte, major byte, n uint64) []byte {
	major <<= 5
	switch {
	case n < 24:
		return append(dst, major|byte(n))
	case n <= 0xff:
		return append(dst, major|24, byte(n))
	case n <= 0xffff:
		return binary.BigEndian.AppendUint16(append(dst, major|25), uint16(n))
	case n <= 0xffffffff:
		return binary.BigEndian.AppendUint32(append(dst, major|26), uint32(n))
	default:
		return binary.BigEndian.AppendUint64(append(dst, major|27), n)
	}
}

func cborText(text string) []byte {
	return append(cborHead(nil, 3, uint64(len(text))), text...)
}

// cborChunk encodes (parent, tokens, ()).
func cborChunk(parent uint64, tokens []uint32) []byte {
	b := make([]byte, 0, 24+5*len(tokens))
	b = cborHead(b, 4, 3)
	b = cborHead(b, 0, parent)
	b = cborHead(b, 4, uint64(len(tokens)))
	for _, t := range tokens {
		b = cborHead(b, 0, uint64(t))
	}
	return cborHead(b, 4, 0)
}

// The opcodes of Python's pickle protocol 5 that occur here (pickletools.py).
const (
	opProto, opFrame, opStop         = 0x80, 0x95, '.'
	opInt1, opInt2, opInt4, opLong1  = 'K', 'M', 'J', 0x8a
	opMark, opTuple, opEmpty, opMemo = '(', 't', ')', 0x94
	opTuple1, opShortText            = 0x85, 0x8c
)

// pickled puts content into its only frame.
func pickled(content []byte) []byte {
	content = append(content, opStop)
	b := append(make([]byte, 0, 11+len(content)), opProto, 5, opFrame)
	return append(binary.LittleEndian.AppendUint64(b, uint64(len(content))), content...)
}

func pickleText(text string) []byte {
	b := append([]byte{opShortText, byte(len(text))}, text...) // a PYTHONHASHSEED has 10 digits at most
	return pickled(append(b, opMemo))
}

func pickleInt(dst []byte, n uint64) []byte {
	switch {
	case n <= 0xff:
		return append(dst, opInt1, byte(n))
	case n <= 0xffff:
		return binary.LittleEndian.AppendUint16(append(dst, opInt2), uint16(n))
	case n <= 0x7fffffff:
		return binary.LittleEndian.AppendUint32(append(dst, opInt4), uint32(n))
	}
	size := bits.Len64(n)/8 + 1 // two's complement, so that the highest bit is 0
	dst = append(dst, opLong1, byte(size))
	for range size {
		dst = append(dst, byte(n))
		n >>= 8
	}
	return dst
}

// pickleChunk encodes (parent, tokens, ()).
func pickleChunk(parent uint64, tokens []uint32) []byte {
	b := pickleInt(make([]byte, 0, 32+7*len(tokens)), parent)
	if len(tokens) > 3 {
		b = append(b, opMark)
	}
	for _, t := range tokens {
		b = pickleInt(b, uint64(t))
	}
	if len(tokens) > 3 {
		b = append(b, opTuple, opMemo)
	} else {
		b = append(b, opTuple1+byte(len(tokens)-1), opMemo)
	}
	return pickled(append(b, opEmpty, opTuple1+2, opMemo))
}

// intHash is CPython's hash of an int: modulo 2⁶¹−1, with the sign kept, and never −1.
func intHash(n int64) uint64 {
	const mod = 1<<61 - 1
	if n >= 0 {
		return uint64(n) % mod
	}
	h := -int64(uint64(-n) % mod) // −n of the smallest int64 is itself, and right as a uint64
	if h == -1 {
		h = -2
	}
	return uint64(h)
}

// CPython's hash of a tuple is a variant of xxHash (Objects/tupleobject.c).
const (
	tuplePrime1 = 11400714785074694791
	tuplePrime2 = 14029467366897019727
	tuplePrime5 = 2870177450012600261
)

func tupleLane(acc, lane uint64) uint64 {
	return bits.RotateLeft64(acc+lane*tuplePrime2, 31) * tuplePrime1
}

func tupleEnd(acc uint64, items int) uint64 {
	if acc += uint64(items) ^ (tuplePrime5 ^ 3527539); acc == 1<<64-1 {
		return 1546275796
	}
	return acc
}

func tupleHash(lanes ...uint64) uint64 {
	acc := uint64(tuplePrime5)
	for _, lane := range lanes {
		acc = tupleLane(acc, lane)
	}
	return tupleEnd(acc, len(lanes))
}

func tokensHash(tokens []uint32) uint64 {
	acc := uint64(tuplePrime5)
	for _, t := range tokens { // far below the modulus
		acc = tupleLane(acc, uint64(t))
	}
	return tupleEnd(acc, len(tokens))
}

// stringHash is the hash that CPython gives an ASCII string under a PYTHONHASHSEED: SipHash-1-3, keyed by a generator that
// the seed starts, or by 0.
func stringHash(seed uint32, text string) uint64 {
	var key [16]byte
	if seed != 0 {
		for i := range key {
			seed = seed*214013 + 2531011
			key[i] = byte(seed >> 16)
		}
	}
	h := sipHash13(binary.LittleEndian.Uint64(key[:8]), binary.LittleEndian.Uint64(key[8:]), text)
	if h == 1<<64-1 {
		h--
	}
	return h
}

func sipHash13(k0, k1 uint64, text string) uint64 {
	v0, v1, v2, v3 := k0^0x736f6d6570736575, k1^0x646f72616e646f6d, k0^0x6c7967656e657261, k1^0x7465646279746573
	round := func() {
		v0 += v1
		v2 += v3
		v1 = bits.RotateLeft64(v1, 13) ^ v0
		v3 = bits.RotateLeft64(v3, 16) ^ v2
		v0 = bits.RotateLeft64(v0, 32)
		v2 += v1
		v0 += v3
		v1 = bits.RotateLeft64(v1, 17) ^ v2
		v3 = bits.RotateLeft64(v3, 21) ^ v0
		v2 = bits.RotateLeft64(v2, 32)
	}
	last := uint64(len(text)) << 56
	var word [8]byte
	for len(text) >= 8 {
		copy(word[:], text)
		m := binary.LittleEndian.Uint64(word[:])
		v3 ^= m
		round()
		v0 ^= m
		text = text[8:]
	}
	for i := range len(text) {
		last |= uint64(text[i]) << (8 * i)
	}
	v3 ^= last
	round()
	v0 ^= last
	v2 ^= 0xff
	for range 3 {
		round()
	}
	return v0 ^ v1 ^ v2 ^ v3
}
