package capacity_test

import (
	"fmt"
	"math"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"kvstrata/indexer/history/capacity"
)

// all is a configuration that looks at everything.
func all() capacity.Config { return capacity.Config{MaxBlocks: 1 << 20} }

// mixed makes a number uniform.
func mixed(z uint64) uint64 {
	z += 0x9e3779b97f4a7c15
	z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
	z = (z ^ z>>27) * 0x94d049bb133111eb
	return z ^ z>>31
}

// requests draws prompts that share prefixes: each goes along a tree whose nodes are blocks, and then beyond it.
func requests(t *rapid.T) (list [][]capacity.Block) {
	fan := rapid.Uint64Range(1, 3).Draw(t, "fan")
	for range rapid.IntRange(1, 60).Draw(t, "requests") {
		node := uint64(0)
		var blocks []capacity.Block
		for range rapid.IntRange(1, 8).Draw(t, "length") {
			node = node*4 + 1 + rapid.Uint64Range(0, fan-1).Draw(t, "branch")
			blocks = append(blocks, capacity.Block{Hash: mixed(node), Tokens: uint32(1 + node%16)})
		}
		list = append(list, blocks)
	}
	return list
}

// anything draws requests whose blocks are no prefixes, and may be named twice.
func anything(t *rapid.T) (list [][]capacity.Block) {
	for range rapid.IntRange(1, 60).Draw(t, "requests") {
		var blocks []capacity.Block
		for range rapid.IntRange(1, 6).Draw(t, "length") {
			n := rapid.Uint64Range(0, 12).Draw(t, "block")
			blocks = append(blocks, capacity.Block{Hash: mixed(n), Tokens: uint32(1 + n)})
		}
		list = append(list, blocks)
	}
	return list
}

// lru is a cache, the newest block first.
type lru struct {
	size  int
	order capacity.Order
	held  []uint64
}

// request returns what of a prompt was hit, and which blocks had to leave, the oldest first.
func (c *lru) request(blocks []capacity.Block) (hits capacity.Count, left []uint64) {
	for _, b := range blocks {
		if !slices.Contains(c.held, b.Hash) {
			break
		}
		hits.Blocks++
		hits.Tokens += uint64(b.Tokens)
	}
	blocks = slices.Clone(blocks)
	if c.order == capacity.TailFirst {
		slices.Reverse(blocks)
	}
	for _, b := range blocks {
		c.held = slices.DeleteFunc(c.held, func(h uint64) bool { return h == b.Hash })
		c.held = slices.Insert(c.held, 0, b.Hash)
	}
	for len(c.held) > c.size {
		left = append(left, c.held[len(c.held)-1])
		c.held = c.held[:len(c.held)-1]
	}
	return hits, left
}

func sum(counts ...capacity.Count) (total capacity.Count) {
	for _, c := range counts {
		total.Blocks += c.Blocks
		total.Tokens += c.Tokens
	}
	return total
}

// A curve says of each size what a cache of that size hits.
func TestStackIsLRUOfEverySize(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		list := rapid.OneOf(rapid.Custom(requests), rapid.Custom(anything)).Draw(t, "list")
		cfg := all()
		cfg.Order = rapid.SampledFrom([]capacity.Order{capacity.TailFirst, capacity.PromptOrder}).Draw(t, "order")
		s, err := capacity.NewStack(cfg)
		if err != nil {
			t.Fatal(err)
		}
		var asked capacity.Count
		for _, r := range list {
			s.Request(r)
			for _, b := range r {
				asked = sum(asked, capacity.Count{Blocks: 1, Tokens: uint64(b.Tokens)})
			}
		}
		c := s.Curve()
		if c.Asked != asked || c.Shift != 0 {
			t.Fatalf("asked %v, shift %d, want %v and 0", c.Asked, c.Shift, asked)
		}
		end, most := c.Ceiling()
		for size := range 80 {
			cache := lru{size: size, order: cfg.Order}
			var want capacity.Count
			for _, r := range list {
				hits, _ := cache.request(r)
				want = sum(want, hits)
			}
			if got := c.Hits(uint64(size)); got != want {
				t.Fatalf("%d blocks: hits %v, want %v", size, got, want)
			}
			if reached := c.Hits(uint64(size)) == most; reached != (uint64(size) >= end) {
				t.Fatalf("%d blocks hit %v; the curve ends at %d with %v", size, c.Hits(uint64(size)), end, most)
			}
		}
	})
}

// With the tail first, what a cache holds is whole prefixes: that the blocks before must be hit, too, changes nothing.
func TestTailFirstKeepsWholePrefixes(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		list := rapid.Custom(requests).Draw(t, "list")
		for size := range 40 {
			cache := lru{size: size}
			for _, r := range list {
				held := 0
				for _, b := range r {
					if slices.Contains(cache.held, b.Hash) {
						held++
					}
				}
				if hits, _ := cache.request(r); int(hits.Blocks) != held {
					t.Fatalf("%d blocks: %d of a request were held, %d hit", size, held, hits.Blocks)
				}
			}
		}
	})
}

// What an engine evicts and stores again says what a larger one would have hit.
func TestVictimsAreTheLargerCache(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		list := rapid.Custom(requests).Draw(t, "list")
		engine := lru{size: rapid.IntRange(8, 20).Draw(t, "size")} // the longest request has 8 blocks
		v, err := capacity.NewVictims(all())
		if err != nil {
			t.Fatal(err)
		}
		var hits, asked capacity.Count
		for _, r := range list {
			h, left := engine.request(r)
			for _, hash := range left {
				v.Evicted(hash)
			}
			v.Stored(r[h.Blocks:])
			v.Done()
			hits = sum(hits, h)
			for _, b := range r {
				asked = sum(asked, capacity.Count{Blocks: 1, Tokens: uint64(b.Tokens)})
			}
		}
		c := v.Curve()
		if got := sum(c.Asked, hits); got != asked {
			t.Fatalf("stored %v and hit %v of %v", c.Asked, hits, asked)
		}
		for more := range 60 {
			larger := lru{size: engine.size + more}
			var want capacity.Count
			for _, r := range list {
				h, _ := larger.request(r)
				want = sum(want, h)
			}
			if got := sum(c.Hits(uint64(more)), hits); got != want {
				t.Fatalf("%d blocks more: hits %v, want %v", more, got, want)
			}
		}
	})
}

// A block that leaves and comes back within what is told at once, and one that leaves twice.
func TestVictimsToldAtOnce(t *testing.T) {
	v, err := capacity.NewVictims(all())
	if err != nil {
		t.Fatal(err)
	}
	block := func(n uint64) []capacity.Block { return []capacity.Block{{Hash: mixed(n), Tokens: 16}} }
	v.Evicted(mixed(1))
	v.Evicted(mixed(2))
	v.Done()
	v.Evicted(mixed(3))
	v.Evicted(mixed(4))
	v.Evicted(mixed(4))
	v.Stored(block(3)) // 4 left since
	v.Stored(block(1)) // 2 left since, before now
	v.Stored(block(5)) // never left
	v.Done()
	v.Evicted(mixed(2))
	v.Done()
	v.Stored(block(4)) // 2 left since
	v.Done()
	v.Cleared()
	v.Stored(block(2))
	v.Done()
	c := v.Curve()
	var got []uint64
	for more := range uint64(4) {
		got = append(got, c.Hits(more).Blocks)
	}
	if diff := cmp.Diff([]uint64{0, 0, 3, 3}, got); diff != "" || c.Asked != (capacity.Count{Blocks: 5, Tokens: 80}) {
		t.Errorf("of %v hits by size (-want +got):\n%s", c.Asked, diff)
	}
}

// optimum finds by trying all ways what a cache can hit at most.
func optimum(size int, list [][]capacity.Block) int {
	type state struct {
		at   int
		held string
	}
	known := make(map[state]int)
	var best func(at int, held []uint64) int
	best = func(at int, held []uint64) int {
		if at == len(list) {
			return 0
		}
		s := state{at, fmt.Sprint(held)}
		if n, ok := known[s]; ok {
			return n
		}
		hits := 0
		for hits < len(list[at]) && slices.Contains(held, list[at][hits].Hash) {
			hits++
		}
		all := slices.Clone(held)
		for _, b := range list[at] {
			if !slices.Contains(all, b.Hash) {
				all = append(all, b.Hash)
			}
		}
		slices.Sort(all)
		most := 0
		for kept := range 1 << len(all) {
			var next []uint64
			for i, h := range all {
				if kept>>i&1 == 1 {
					next = append(next, h)
				}
			}
			if len(next) <= size {
				most = max(most, best(at+1, next))
			}
		}
		known[s] = hits + most
		return hits + most
	}
	return best(0, nil)
}

// Nobody hits more.
func TestOptimumIsTheMost(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var list [][]capacity.Block
		for range rapid.IntRange(1, 7).Draw(t, "requests") {
			node := uint64(0)
			var blocks []capacity.Block
			for range rapid.IntRange(1, 3).Draw(t, "length") {
				node = node*2 + 1 + rapid.Uint64Range(0, 1).Draw(t, "branch")
				blocks = append(blocks, capacity.Block{Hash: mixed(node), Tokens: 1})
			}
			list = append(list, blocks)
		}
		o := capacity.NewOptimum(0, 1<<20)
		for _, r := range list {
			o.Request(r)
		}
		for size := range 5 {
			got, ok := o.Hits(uint64(size))
			if want := uint64(optimum(size, list)); !ok || got.Blocks != want || got.Tokens != want {
				t.Fatalf("%d blocks: hits %v, want %d", size, got, want)
			}
		}
	})
}

// The optimum never hits less than LRU does, and as much where nothing is evicted; beyond that the farthest block leaves.
func TestOptimumAboveLRU(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		list := rapid.Custom(requests).Draw(t, "list")
		list = list[:min(len(list), 20)]
		o := capacity.NewOptimum(0, 1<<20)
		s, err := capacity.NewStack(all())
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range list {
			o.Request(r)
			s.Request(r)
		}
		c := s.Curve()
		end, most := c.Ceiling()
		for size := range end + 1 {
			got, ok := o.Hits(size)
			if !ok || got.Blocks < c.Hits(size).Blocks || got != farthest(int(size), list) {
				t.Fatalf("%d blocks: optimum %v, LRU %v, want %v", size, got, c.Hits(size), farthest(int(size), list))
			}
		}
		if got, _ := o.Hits(end); got != most {
			t.Fatalf("%d blocks: optimum %v, want %v", end, got, most)
		}
	})
}

// farthest runs Belady's policy naively.
func farthest(size int, list [][]capacity.Block) (hits capacity.Count) {
	var held []uint64
	for at, r := range list {
		for _, b := range r {
			if !slices.Contains(held, b.Hash) {
				break
			}
			hits = sum(hits, capacity.Count{Blocks: 1, Tokens: uint64(b.Tokens)})
		}
		for _, b := range r {
			if !slices.Contains(held, b.Hash) {
				held = append(held, b.Hash)
			}
		}
		again := func(hash uint64) int {
			for later := at + 1; later < len(list); later++ {
				for i, b := range list[later] {
					if b.Hash == hash {
						return later*1000 + i
					}
				}
			}
			return math.MaxInt
		}
		slices.SortFunc(held, func(a, b uint64) int { return again(a) - again(b) })
		held = held[:min(size, len(held))]
	}
	return hits
}

func TestKneeAndShares(t *testing.T) {
	s, err := capacity.NewStack(all())
	if err != nil {
		t.Fatal(err)
	}
	one := func(n uint64) { s.Request([]capacity.Block{{Hash: mixed(n), Tokens: 16}}) }
	if c := s.Curve(); c.Knee() != 0 || c.Reaching(0.99) != 0 || !slices.Equal(c.Grid(), []uint64{1}) || c.Hits(5) != (capacity.Count{}) {
		t.Errorf("an empty curve: %+v, sizes %v", c, c.Grid())
	}
	for range 3 { // 4 blocks in turn, many times, and between these 2,000 that come three times
		for i := range uint64(2000) {
			for n := range uint64(4) {
				one(n)
			}
			one(100 + i)
		}
	}
	c := s.Curve()
	end, most := c.Ceiling()
	if c.Knee() != 5 || end != 2004 || most != (capacity.Count{Blocks: 4*6000 - 4 + 2*2000, Tokens: 16 * (4*6000 - 4 + 2*2000)}) {
		t.Errorf("knee at %d, ceiling %v at %d", c.Knee(), most, end)
	}
	for _, share := range []float64{0, 0.5, 0.9, 0.99, 1} {
		size := c.Reaching(share)
		if float64(c.Hits(size).Blocks) < share*float64(most.Blocks) || size > 1 && float64(c.Hits(size-1).Blocks) >= share*float64(most.Blocks) {
			t.Errorf("%v of %v is reached at %d: %v, and one less: %v", share, most, size, c.Hits(size), c.Hits(size-1))
		}
	}
	if diff := cmp.Diff([]uint64{2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000}, c.Grid()); diff != "" {
		t.Errorf("sizes (-want +got):\n%s", diff)
	}
}

func TestConfig(t *testing.T) {
	for _, test := range []struct {
		cfg  capacity.Config
		want string
	}{
		{capacity.DefaultConfig(), ""},
		{capacity.Config{MaxBlocks: 1}, "blocks 1: want 1024 to 268435456"},
		{capacity.Config{Shift: 41, MaxBlocks: 1 << 29, Order: 2}, "shift 41: want 0 to 40\nblocks 536870912: want 1024 to 268435456\norder 2: want 0 or 1"},
	} {
		got := ""
		if err := test.cfg.Validate(); err != nil {
			got = err.Error()
		}
		if got != test.want {
			t.Errorf("%+v: %q, want %q", test.cfg, got, test.want)
		}
		if _, err := capacity.NewStack(test.cfg); (err != nil) != (test.want != "") {
			t.Error(err)
		}
		if _, err := capacity.NewVictims(test.cfg); (err != nil) != (test.want != "") {
			t.Error(err)
		}
	}
}
