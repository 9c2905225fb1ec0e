package sim

import "github.com/zeebo/xxh3"

// Token ids of prompts lie below vocabulary, generated ones in the range of the same size above it: a generated token
// matches no token of any trace or of any user.
const vocabulary = 1 << 17

// golden is 2⁶⁴ divided by the golden ratio: the step of the counter that [mix] turns into tokens (SplitMix64).
const golden = 0x9e3779b97f4a7c15

// mix scrambles a counter; SplitMix64's finaliser.
func mix(x uint64) uint64 {
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// appendTokens appends the tokens of stream key at offsets from … from+n−1, each a function of key and its offset
// alone, in base … base+vocabulary−1.
func appendTokens(dst []uint32, key uint64, from, n int, base uint32) []uint32 {
	x := mix(key) + uint64(from)*golden
	for range n {
		x += golden
		dst = append(dst, base+uint32(mix(x)>>(64-17)))
	}
	return dst
}

// outputKey names the stream of tokens that a request generates.
func outputKey(id string) uint64 { return xxh3.HashString(id) }

// AppendOutput appends the first n tokens that any engine generates for the request with this id: a conversation's
// next prompt holds them.
func AppendOutput(dst []uint32, id string, n int) []uint32 {
	return appendTokens(dst, outputKey(id), 0, n, vocabulary)
}
