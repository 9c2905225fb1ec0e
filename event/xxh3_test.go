package event_test

import (
	"encoding/binary"
	"testing"

	"kvstrata/event"

	"github.com/zeebo/xxh3"
	"pgregory.net/rapid"
)

// What is written out for the lengths that blocks are hashed in is XXH3-64, whatever goes in.
func TestHashesAreXXH3(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		seed := rapid.Uint64().Draw(t, "seed")
		tokens := rapid.SliceOfN(rapid.Uint32(), 1, 20).Draw(t, "tokens")
		if rapid.Bool().Draw(t, "usual") {
			tokens = rapid.SliceOfN(rapid.Uint32(), 16, 16).Draw(t, "tokens")
		}
		var input []byte
		for _, token := range tokens {
			input = binary.LittleEndian.AppendUint32(input, token)
		}
		if got, want := event.LocalHash(tokens, seed), xxh3.HashSeed(input, seed); got != want {
			t.Errorf("local hash of %d tokens: %x, want %x", len(tokens), got, want)
		}
		parent, local := rapid.Uint64Min(1).Draw(t, "parent"), rapid.Uint64().Draw(t, "local")
		input = binary.LittleEndian.AppendUint64(binary.LittleEndian.AppendUint64(nil, parent), local)
		if got, want := event.Chain(event.PrefixHash(parent), local), event.PrefixHash(xxh3.HashSeed(input, 1337)); got != want {
			t.Errorf("chain: %v, want %v", got, want)
		}
	})
}

// A mixer's weights are the digest's: XXH3-64 of the hash, the group and the tier's name, of every length.
func TestMixer(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		group := event.Group(rapid.Int32Min(-1).Draw(t, "group"))
		tier := rapid.StringN(0, -1, 40).Draw(t, "tier")
		hash := event.IntHash(rapid.Uint64().Draw(t, "hash"))
		if rapid.IntRange(0, 4).Draw(t, "bytes") == 0 {
			hash = event.BytesHash(string(rapid.SliceOfN(rapid.Byte(), 1, 40).Draw(t, "hash")))
		}
		input := binary.LittleEndian.AppendUint32(hash.AppendTo(nil), group.Index())
		m := event.NewMixer(group, event.Tier(tier))
		if got, want := m.Mix64(hash), event.Digest(xxh3.HashString(string(input)+tier)); got != want {
			t.Errorf("tier of %d bytes: %x, want %x", len(tier), got, want)
		}
	})
}

func BenchmarkMixer(b *testing.B) {
	for _, tier := range []event.Tier{event.GPU, "CPU_TIER1"} {
		b.Run(string(tier), func(b *testing.B) {
			m, sum := event.NewMixer(event.NoGroup, tier), event.Digest(0)
			for n := uint64(0); b.Loop(); n++ {
				sum += m.Mix64(event.IntHash(n))
			}
		})
	}
}
