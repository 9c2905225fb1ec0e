package event

import (
	"encoding/binary"
	"math/bits"
)

// What every block is hashed in has one of few lengths. The functions here are XXH3-64 for those lengths alone, without the
// general one's search for what to do, and with what many blocks have in common worked out once.

// Words of XXH3's default secret, by their offset in bytes.
const (
	secret0  = 0xbe4ba423396cfeb8
	secret8  = 0x1cad21f72c81017c
	secret16 = 0xdb979083e96dd4de
	secret24 = 0x1f67b3b7a4a44072
	secret32 = 0x78e5c0cc4ee679cb
	secret40 = 0x2172ffcc7dd05a82
	secret48 = 0x8e2443f7744608b8
	secret56 = 0x4c263a81e69035e0
)

const xxhPrime = 0x9e3779b185ebca87

func fold(a, b uint64) uint64 {
	hi, lo := bits.Mul64(a, b)
	return hi ^ lo
}

func avalanche(h uint64) uint64 {
	h ^= h >> 37
	h *= 0x165667919e3779f9
	return h ^ h>>32
}

// hash16 hashes the 16 bytes of two little-endian words.
func hash16(a, b, seed uint64) uint64 {
	a ^= (secret24 ^ secret32) + seed
	b ^= (secret40 ^ secret48) - seed
	return avalanche(16 + bits.ReverseBytes64(a) + b + fold(a, b))
}

// hash64 hashes the 64 bytes of 16 little-endian tokens.
func hash64(t *[16]uint32, seed uint64) uint64 {
	word := func(i int) uint64 { return uint64(t[2*i]) | uint64(t[2*i+1])<<32 }
	prime := uint64(xxhPrime)
	return avalanche(64*prime +
		fold(word(0)^(secret0+seed), word(1)^(secret8-seed)) +
		fold(word(2)^(secret32+seed), word(3)^(secret40-seed)) +
		fold(word(4)^(secret48+seed), word(5)^(secret56-seed)) +
		fold(word(6)^(secret16+seed), word(7)^(secret24-seed)))
}

// Mixer computes [Mix64] of one group's blocks in one tier: what is the same for all of them is worked out beforehand.
type Mixer struct {
	group Group
	tier  Tier

	// Of integers: their input's other bytes and the secret's, as they are mixed.
	long              bool  // more than 16 bytes
	shift             uint8 // bits of the integer before the word that begins in it, or behind it
	start             uint64
	first, next, last uint64
}

// NewMixer returns the mixer of a group and a tier.
func NewMixer(g Group, t Tier) Mixer {
	m := Mixer{group: g, tier: t}
	length := 12 + len(t)
	if length > 32 {
		return m
	}
	var input [32]byte
	binary.LittleEndian.PutUint32(input[8:], g.Index())
	copy(input[12:], t)
	word := func(at int) uint64 { return binary.LittleEndian.Uint64(input[at:]) }
	if length <= 16 {
		m.shift = uint8(8 * (length - 8))
		m.start, m.first, m.last = uint64(length), secret24^secret32, word(length-8)^secret40^secret48
		return m
	}
	prime := uint64(xxhPrime)
	m.long, m.shift = true, uint8(8*(length-16))
	m.start, m.first, m.next, m.last = uint64(length)*prime, word(8)^secret8, word(length-16)^secret16, word(length-8)^secret24
	return m
}

// Mix64 returns a block's weight in the [Digest].
func (m *Mixer) Mix64(h BlockHash) Digest {
	if n, isInt := h.Int(); isInt && m.start != 0 {
		return m.mix(bits.ReverseBytes64(n))
	}
	return Mix64(h, m.group, m.tier)
}

func (m *Mixer) mix(n uint64) Digest {
	if m.long {
		return Digest(avalanche(m.start + fold(n^secret0, m.first) + fold(n>>m.shift^m.next, m.last)))
	}
	a, b := n^m.first, n>>m.shift^m.last
	return Digest(avalanche(m.start + bits.ReverseBytes64(a) + b + fold(a, b)))
}
