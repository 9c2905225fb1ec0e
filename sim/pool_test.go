package sim_test

import (
	"slices"
	"testing"

	"kvstrata/sim"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

// naivePool is what BlockPool should be, in the plainest terms.
type naivePool struct {
	queue   []sim.BlockID // free, the next to be taken first
	refs    map[sim.BlockID]int
	hash    map[sim.BlockID]uint64
	byHash  map[uint64][]sim.BlockID // oldest first
	evicted []uint64
}

func (n *naivePool) allocate() sim.BlockID {
	id := n.queue[0]
	n.queue = n.queue[1:]
	if h, ok := n.hash[id]; ok {
		delete(n.hash, id)
		n.byHash[h] = slices.DeleteFunc(n.byHash[h], func(other sim.BlockID) bool { return other == id })
		if len(n.byHash[h]) == 0 {
			delete(n.byHash, h)
		}
		n.evicted = append(n.evicted, h)
	}
	n.refs[id] = 1
	return id
}

func (n *naivePool) touch(id sim.BlockID) {
	n.queue = slices.DeleteFunc(n.queue, func(other sim.BlockID) bool { return other == id })
	n.refs[id]++
}

func (n *naivePool) release(ids []sim.BlockID) {
	var spare []sim.BlockID
	for _, id := range slices.Backward(ids) {
		if n.refs[id]--; n.refs[id] > 0 {
			continue
		}
		delete(n.refs, id)
		if _, cached := n.hash[id]; cached {
			n.queue = append(n.queue, id)
		} else {
			spare = append(spare, id)
		}
	}
	n.queue = append(spare, n.queue...)
}

// machine drives a pool and its model with the same operations.
type machine struct {
	pool    *sim.BlockPool
	naive   *naivePool
	evicted []uint64
	held    [][]sim.BlockID // by requests
}

func newMachine(blocks int) *machine {
	m := &machine{naive: &naivePool{
		refs: make(map[sim.BlockID]int), hash: make(map[sim.BlockID]uint64), byHash: make(map[uint64][]sim.BlockID),
	}}
	for id := 1; id < blocks; id++ {
		m.naive.queue = append(m.naive.queue, sim.BlockID(id))
	}
	m.pool = sim.NewBlockPool(blocks, func(h uint64) { m.evicted = append(m.evicted, h) })
	return m
}

// Take allocates blocks for a request and caches some of the leading ones.
func (m *machine) Take(t *rapid.T) {
	n := rapid.IntRange(0, m.pool.Free()).Draw(t, "blocks")
	got := m.pool.Allocate(nil, n)
	var want []sim.BlockID
	for range n {
		want = append(want, m.naive.allocate())
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Fatalf("allocated blocks (-want +got):\n%s", diff)
	}
	for _, id := range got[:rapid.IntRange(0, n).Draw(t, "cached")] {
		h := rapid.Uint64Range(1, 6).Draw(t, "hash")
		m.pool.Cache(id, h)
		m.naive.hash[id] = h
		m.naive.byHash[h] = append(m.naive.byHash[h], id)
	}
	m.held = append(m.held, got)
}

// Share finds blocks by their hashes and adds a holder to them.
func (m *machine) Share(t *rapid.T) {
	var hits []sim.BlockID
	for _, h := range rapid.SliceOfN(rapid.Uint64Range(1, 6), 1, 3).Draw(t, "hashes") {
		id, ok := m.pool.Lookup(h)
		if want := m.naive.byHash[h]; ok != (len(want) > 0) || ok && id != want[0] {
			t.Fatalf("lookup of %d gives block %d, %v; want the first of %v", h, id, ok, want)
		}
		if !ok || slices.Contains(hits, id) {
			continue
		}
		m.pool.Touch(id)
		m.naive.touch(id)
		hits = append(hits, id)
	}
	m.held = append(m.held, hits)
}

// Finish releases one request's blocks.
func (m *machine) Finish(t *rapid.T) {
	if len(m.held) == 0 {
		t.Skip("nothing is held")
	}
	i := rapid.IntRange(0, len(m.held)-1).Draw(t, "request")
	m.pool.Release(m.held[i])
	m.naive.release(m.held[i])
	m.held = slices.Delete(m.held, i, i+1)
}

// Clear resets the prefix cache.
func (m *machine) Clear(t *rapid.T) {
	want := len(m.naive.refs) == 0
	if got := m.pool.Clear(); got != want {
		t.Fatalf("clear gives %v, want %v", got, want)
	}
	if want {
		clear(m.naive.hash)
		clear(m.naive.byHash)
	}
}

// Check compares all that can be seen.
func (m *machine) Check(t *rapid.T) {
	if got, want := m.pool.Free(), len(m.naive.queue); got != want {
		t.Fatalf("%d blocks are free, want %d", got, want)
	}
	if got, want := m.pool.Cached(), len(m.naive.hash); got != want {
		t.Fatalf("%d blocks are cached, want %d", got, want)
	}
	if diff := cmp.Diff(m.naive.evicted, m.evicted); diff != "" {
		t.Fatalf("evictions (-want +got):\n%s", diff)
	}
	got, want := make(map[uint64]int), make(map[uint64]int)
	for h, n := range m.pool.Copies() {
		got[h] = n
	}
	for h, ids := range m.naive.byHash {
		want[h] = len(ids)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Fatalf("copies (-want +got):\n%s", diff)
	}
	for id, h := range m.naive.hash {
		if got, want := m.pool.InUse(id), m.naive.refs[id] > 0; got != want {
			t.Fatalf("block %d (hash %d) in use: %v, want %v", id, h, got, want)
		}
	}
}

func TestBlockPoolIsTheNaiveOne(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := newMachine(rapid.IntRange(2, 12).Draw(t, "pool"))
		t.Repeat(map[string]func(*rapid.T){"take": m.Take, "share": m.Share, "finish": m.Finish, "clear": m.Clear, "": m.Check})
	})
}

// A pool must not cost the memory of blocks that nobody uses, and must still hand out the last one.
func TestBlockPoolGrowsToItsEnd(t *testing.T) {
	const blocks = 1<<17 + 5
	pool := sim.NewBlockPool(blocks, func(uint64) { t.Fatal("evicted from a pool that nothing was cached in") })
	ids := pool.Allocate(nil, pool.Usable())
	for i, id := range ids {
		if id != sim.BlockID(i+1) {
			t.Fatalf("block %d comes as number %d", id, i)
		}
	}
	pool.Release(ids)
	again := pool.Allocate(nil, pool.Usable())
	slices.Reverse(again)
	if !slices.Equal(ids, again) || pool.Free() != 0 {
		t.Fatal("released blocks do not come back in the order of their release")
	}
}

func TestBlockPoolPanicsOnMisuse(t *testing.T) {
	for name, misuse := range map[string]func(*sim.BlockPool){
		"allocate more than is free": func(p *sim.BlockPool) { p.Allocate(nil, 4) },
		"release a free block":       func(p *sim.BlockPool) { p.Release(p.Allocate(nil, 1)); p.Release([]sim.BlockID{1}) },
		"cache a free block":         func(p *sim.BlockPool) { p.Cache(2, 7) },
		"cache a block twice":        func(p *sim.BlockPool) { id := p.Allocate(nil, 1)[0]; p.Cache(id, 7); p.Cache(id, 8) },
	} {
		t.Run(name, func(t *testing.T) {
			defer func() {
				if recover() == nil {
					t.Fatal("no panic")
				}
			}()
			misuse(sim.NewBlockPool(4, func(uint64) {}))
		})
	}
}

func BenchmarkBlockPool(b *testing.B) {
	pool := sim.NewBlockPool(20_000_000, func(uint64) {})
	hash := uint64(0)
	for b.Loop() {
		ids := pool.Allocate(nil, 16)
		for _, id := range ids {
			hash += 0x9e3779b97f4a7c15
			pool.Cache(id, hash)
		}
		pool.Release(ids)
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/16, "ns/block")
}
