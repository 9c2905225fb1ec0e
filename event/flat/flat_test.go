package flat_test

import (
	"maps"
	"math/rand/v2"
	"testing"
	"unsafe"

	"kvstrata/event/flat"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

// A map does what Go's does, through growth, shrinking and walks that are cut short.
func TestMap(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		pool := flat.NewPool(nil)
		m, want := flat.NewMap(pool), make(map[uint64]uint32)
		keys := uint64(rapid.SampledFrom([]int{10, 1000, 20000}).Draw(t, "keys"))
		rnd := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 0))
		for range rapid.IntRange(1, 12).Draw(t, "rounds") {
			switch n := rapid.IntRange(0, int(keys)).Draw(t, "n"); rapid.IntRange(0, 5).Draw(t, "what") {
			case 0, 1:
				for range n {
					k, v := rnd.Uint64N(keys), rnd.Uint32()|1
					*m.Entry(k) = v
					want[k] = v
				}
			case 2:
				for range n {
					k := rnd.Uint64N(keys)
					if got := m.Delete(k); got != want[k] {
						t.Fatalf("deleted %d of key %d, want %d", got, k, want[k])
					}
					delete(want, k)
				}
			case 3:
				shrink(m)
			case 5: // few stay
				for k := range want {
					if k%16 != 0 {
						m.Delete(k)
						delete(want, k)
					}
				}
				shrink(m)
			case 4:
				m.Clear()
				clear(want)
			}
			if m.Len() != len(want) {
				t.Fatalf("%d keys, want %d", m.Len(), len(want))
			}
			if diff := cmp.Diff(want, maps.Collect(m.All())); diff != "" {
				t.Fatalf("keys and values (-want +got):\n%s", diff)
			}
			for k := range keys {
				if got := m.Get(k); got != want[k] {
					t.Fatalf("key %d has %d, want %d", k, got, want[k])
				}
			}
		}
	})
}

func shrink(m *flat.Map) {
	for place := uint64(0); place < flat.Done; {
		place = m.Shrink(place)
	}
}

// A walk in pieces meets every key once that stays, while others come and go and pages split and join.
func TestWalkMeetsWhatStays(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := flat.NewMap(flat.NewPool(nil))
		const stay = 3000
		for k := range uint64(stay) {
			*m.Entry(k) = 1
		}
		next, seen := uint64(stay), make(map[uint64]int)
		var passing []uint64
		for place := uint64(0); place < flat.Done; {
			place = m.From(place, func(key uint64, _ uint32) bool {
				seen[key]++
				return true
			})
			if rapid.Bool().Draw(t, "grow") {
				for range rapid.IntRange(0, 2000).Draw(t, "more") {
					*m.Entry(next) = 2
					passing = append(passing, next)
					next++
				}
				continue
			}
			for _, k := range passing {
				m.Delete(k)
			}
			passing = nil
			shrink(m)
		}
		for k := range uint64(stay) {
			if seen[k] != 1 {
				t.Fatalf("key %d was met %d times", k, seen[k])
			}
		}
		for k, n := range seen {
			if n > 1 {
				t.Fatalf("key %d was met %d times", k, n)
			}
		}
	})
}

// The bytes a key stay within bounds at every size.
func TestBytesAKey(t *testing.T) {
	m := flat.NewMap(flat.NewPool(nil))
	worst, best := 0.0, 100.0
	for k := range uint64(2_000_000) {
		*m.Entry(k * 0x9e3779b97f4a7c15) = 1
		if k > 200_000 && k%1000 == 0 {
			bytes := float64(m.Bytes()) / float64(m.Len())
			worst, best = max(worst, bytes), min(best, bytes)
		}
	}
	t.Logf("%.1f to %.1f bytes a key", best, worst)
	if worst > 21 {
		t.Errorf("%.1f bytes a key", worst)
	}
}

func BenchmarkMap(b *testing.B) {
	for _, n := range []uint64{1 << 16, 1 << 20, 1 << 23} {
		m := flat.NewMap(flat.NewPool(nil))
		for k := range n {
			*m.Entry(k) = 1
		}
		b.Run("churn", func(b *testing.B) {
			for k := n; b.Loop(); k++ {
				*m.Entry(k) = 1
				m.Delete(k - n)
			}
		})
		b.Run("prefetched", func(b *testing.B) {
			lines := make([]unsafe.Pointer, 0, 256)
			for k := n; b.Loop(); k += 64 {
				lines = lines[:0]
				for j := range uint64(64) {
					lines = m.AppendLines(m.AppendLines(lines, k+j), k+j-n)
				}
				flat.Prefetch(lines)
				for j := range uint64(64) {
					*m.Entry(k + j) = 1
				}
				for j := range uint64(64) {
					m.Delete(k + j - n)
				}
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*128), "ns/op-each")
		})
	}
}
