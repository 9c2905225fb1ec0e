package redis_test

import (
	"fmt"
	"maps"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"kvstrata/connector"
	"kvstrata/connector/redis"
	"kvstrata/connector/store"
	"kvstrata/event"
)

// TestCatalogAgainstAModel has keys set, overwritten and removed at random, by several ranks and two kinds of engine, with
// groups that overlap; the model works out from scratch which blocks are stored. Events must take the set from one state to
// the next without a word too many, in chain order.
func TestCatalogAgainstAModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		ranks := rapid.IntRange(1, 3).Draw(t, "ranks")
		c := redis.NewCatalog(ranks)
		keys := make(map[string]redis.Entry)
		set := make(map[event.BlockHash]bool)
		entry := func() (string, redis.Entry) {
			// Of a chain of 8 blocks: any run, named by its last block.
			first := rapid.IntRange(0, 7).Draw(t, "first")
			last := rapid.IntRange(first, 7).Draw(t, "last")
			rank := rapid.IntRange(0, ranks).Draw(t, "rank") // one too many: not counted
			space := rapid.IntRange(1, 2).Draw(t, "space")
			var g store.Group
			g.Rank = rank
			for i := first; i <= last; i++ {
				g.Blocks = append(g.Blocks, connector.Name{Hash: event.IntHash(uint64(i + 1)), Prefix: event.PrefixHash(i + 100)})
			}
			if first > 0 {
				g.HasParent, g.Parent.Hash = true, event.IntHash(uint64(first))
			}
			return fmt.Sprintf("kv:%016x:%d:%016x", space, rank, last+1), redis.Entry{Group: g, BlockTokens: 16, Value: int64(len(g.Blocks) * 100)}
		}
		hear := func() {
			for _, ev := range c.Events() {
				if ev.Kind == event.Stored && len(ev.Blocks) > 0 {
					h, _ := ev.Blocks[0].Hash.Int()
					parent, _ := ev.Parent.Int()
					if ev.HasParent != (h > 1) || ev.HasParent && parent != h-1 || ev.BlockSize != 16 {
						t.Fatalf("run of block %d: parent %v %d", h, ev.HasParent, parent)
					}
				}
				for i, b := range ev.Blocks {
					h, _ := b.Hash.Int()
					if ev.Kind == event.Stored && i > 0 {
						if before, _ := ev.Blocks[i-1].Hash.Int(); before+1 != h {
							t.Fatalf("block %d follows %d", h, before)
						}
					}
					if b.Prefix != event.PrefixHash(h+99) {
						t.Fatalf("block %d is called %v", h, b.Prefix)
					}
					if set[b.Hash] == (ev.Kind == event.Stored) {
						t.Fatalf("%v of %v", ev.Kind, b.Hash)
					}
					set[b.Hash] = ev.Kind == event.Stored
				}
			}
		}
		check := func() {
			hear()
			want := make(map[event.BlockHash]bool)
			for h := range uint64(8) {
				for space := 1; space <= 2; space++ {
					have := make(map[int]bool)
					for key, e := range keys {
						var s, r int
						var l uint64
						if _, err := fmt.Sscanf(key, "kv:%x:%d:%x", &s, &r, &l); err != nil {
							t.Fatal(err)
						}
						if s == space && r < ranks && slices.ContainsFunc(e.Group.Blocks, func(n connector.Name) bool { return n.Hash == event.IntHash(h+1) }) {
							have[r] = true
						}
					}
					if len(have) == ranks {
						want[event.IntHash(h+1)] = true
					}
				}
			}
			maps.DeleteFunc(set, func(_ event.BlockHash, there bool) bool { return !there })
			if !maps.Equal(set, want) {
				t.Fatalf("events come to %v, the keys hold %v", set, want)
			}
			if len(c.Stored()) != len(want) {
				t.Fatalf("%d stored, want %d", len(c.Stored()), len(want))
			}
		}
		t.Repeat(map[string]func(*rapid.T){
			"": func(*rapid.T) { check() },
			"put": func(*rapid.T) {
				key, e := entry()
				keys[key] = e
				c.Put(key, e)
			},
			"remove": func(t *rapid.T) {
				key, _ := entry()
				delete(keys, key)
				c.Remove(key)
			},
			"reconcile": func(t *rapid.T) {
				// Unseen, some keys go and some come.
				for _, key := range slices.Sorted(maps.Keys(keys)) {
					if rapid.Bool().Draw(t, "gone") {
						delete(keys, key)
					}
				}
				for range rapid.IntRange(0, 3).Draw(t, "come") {
					key, e := entry()
					keys[key] = e
				}
				there := make(map[string]int64)
				for key, e := range keys {
					there[key] = e.Value
				}
				for _, key := range c.Reconcile(there) {
					c.Put(key, keys[key])
				}
			},
		})
	})
}
