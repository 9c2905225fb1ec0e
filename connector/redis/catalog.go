package redis

import (
	"cmp"
	"maps"
	"slices"
	"strconv"
	"strings"

	"kvstrata/connector"
	"kvstrata/connector/store"
	"kvstrata/event"
)

// Catalog is what a store holds, as far as it was told: which keys, and which blocks in them. It turns changes of keys into
// changes of blocks: a block is stored when, among the engines of one compatibility hash, every tensor-parallel rank has it
// in some key, however groups are cut; it is evicted when the first rank has lost it. It is pure; one goroutine owns it.
type Catalog struct {
	ranks  int
	keys   map[string]*Entry
	blocks map[event.BlockHash]*held
	events []event.Event
	gone   []event.Block
	rose   []bool // of the blocks of the group that is applied
}

// Entry is one key's group.
type Entry struct {
	Group       store.Group
	BlockTokens uint32
	Value       int64 // bytes of the value, header included

	space uint64 // first 8 bytes of the compatibility hash
}

// held is where a block is.
type held struct {
	prefix event.PrefixHash
	stored bool // as events have told
	spaces []holders
}

// holders count the keys that hold a block among the engines of one compatibility hash.
type holders struct {
	space uint64
	keys  []int32 // by rank
	have  int     // ranks with a key or more
}

// NewCatalog returns an empty catalog of a store that engines of so many tensor-parallel ranks use.
func NewCatalog(ranks int) *Catalog {
	return &Catalog{ranks: max(ranks, 1), keys: make(map[string]*Entry), blocks: make(map[event.BlockHash]*held)}
}

// Len returns how many keys there are.
func (c *Catalog) Len() int { return len(c.keys) }

// Value returns how many bytes a key's value had, and whether the key is there.
func (c *Catalog) Value(key string) (int64, bool) {
	e, ok := c.keys[key]
	if !ok {
		return 0, false
	}
	return e.Value, true
}

// Keys returns the keys, sorted.
func (c *Catalog) Keys() []string { return slices.Sorted(maps.Keys(c.keys)) }

// Stored returns the blocks that count as stored, in no order.
func (c *Catalog) Stored() []event.BlockHash {
	var all []event.BlockHash
	for h, b := range c.blocks {
		if b.stored {
			all = append(all, h)
		}
	}
	return all
}

// Put says that a key holds a group, whatever it held before. A rank that no engine should have is not counted.
func (c *Catalog) Put(key string, e Entry) {
	k, ok := parseKey(key)
	if !ok || k.rank != e.Group.Rank || k.rank >= c.ranks {
		c.Remove(key)
		return
	}
	e.space = k.space
	old := c.keys[key]
	if old != nil && old.BlockTokens == e.BlockTokens && old.Group.LoRA == e.Group.LoRA && slices.Equal(old.Group.Blocks, e.Group.Blocks) {
		old.Value = e.Value
		return
	}
	c.keys[key] = &e
	c.rose = c.rose[:0]
	for i := range e.Group.Blocks {
		n := &e.Group.Blocks[i]
		b := c.blocks[n.Hash]
		if b == nil {
			b = &held{prefix: n.Prefix}
			c.blocks[n.Hash] = b
		}
		b.add(e.space, e.Group.Rank, c.ranks)
		rises := !b.stored && b.complete(c.ranks)
		if rises {
			b.stored = true
			if n.Prefix != 0 {
				b.prefix = n.Prefix
			}
		}
		c.rose = append(c.rose, rises)
	}
	if old != nil { // behind the new one: what is in both stays all along
		c.take(old)
	}
	c.tellStored(&e)
}

// tellStored tells the blocks of a group that rose, a run where they are a chain.
func (c *Catalog) tellStored(e *Entry) {
	g := &e.Group
	for i := 0; i < len(g.Blocks); i++ {
		if !c.rose[i] {
			continue
		}
		ev := event.Event{
			Kind: event.Stored, Tier: event.Storage, Group: event.NoGroup, LoRAID: event.NoLoRAID, LoRA: g.LoRA, BlockSize: e.BlockTokens,
		}
		switch {
		case i > 0:
			ev.HasParent, ev.Parent = true, g.Blocks[i-1].Hash
		case g.HasParent:
			ev.HasParent, ev.Parent = true, g.Parent.Hash
		}
		for ; i < len(g.Blocks) && c.rose[i]; i++ {
			ev.Blocks = append(ev.Blocks, event.Block{Hash: g.Blocks[i].Hash, Prefix: g.Blocks[i].Prefix})
		}
		c.events = append(c.events, ev)
	}
}

// Remove says that a key is gone.
func (c *Catalog) Remove(key string) {
	if e := c.keys[key]; e != nil {
		delete(c.keys, key)
		c.take(e)
	}
}

// take takes a group out, and tells the blocks that fell.
func (c *Catalog) take(e *Entry) {
	c.gone = c.gone[:0]
	for i := range e.Group.Blocks {
		n := &e.Group.Blocks[i]
		b := c.blocks[n.Hash]
		b.remove(e.space, e.Group.Rank)
		if b.stored && !b.complete(c.ranks) {
			b.stored = false
			c.gone = append(c.gone, event.Block{Hash: n.Hash, Prefix: b.prefix, Copies: -1, Age: -1})
		}
		if len(b.spaces) == 0 {
			delete(c.blocks, n.Hash)
		}
	}
	if len(c.gone) > 0 {
		c.events = append(c.events, event.Event{
			Kind: event.Evicted, Tier: event.Storage, Group: event.NoGroup, LoRAID: event.NoLoRAID, Blocks: slices.Clone(c.gone),
		})
	}
}

// Reconcile compares with all keys that there are: those not among them are gone; those it returns, sorted, are not known
// yet, or their value has another size, and are to be Put or Removed.
func (c *Catalog) Reconcile(there map[string]int64) (ask []string) {
	for _, key := range c.Keys() {
		if _, ok := there[key]; !ok {
			c.Remove(key)
		}
	}
	for key, value := range there {
		if e := c.keys[key]; e == nil || e.Value != value {
			ask = append(ask, key)
		}
	}
	slices.Sort(ask)
	return ask
}

// Events returns what happened since the last call, in order. The slice is the caller's.
func (c *Catalog) Events() []event.Event {
	events := c.events
	c.events = nil
	return events
}

func (b *held) add(space uint64, rank, ranks int) {
	i := slices.IndexFunc(b.spaces, func(h holders) bool { return h.space == space })
	if i < 0 {
		i = len(b.spaces)
		b.spaces = append(b.spaces, holders{space: space, keys: make([]int32, ranks)})
	}
	h := &b.spaces[i]
	if h.keys[rank]++; h.keys[rank] == 1 {
		h.have++
	}
}

func (b *held) remove(space uint64, rank int) {
	i := slices.IndexFunc(b.spaces, func(h holders) bool { return h.space == space })
	h := &b.spaces[i]
	if h.keys[rank]--; h.keys[rank] > 0 {
		return
	}
	if h.have--; h.have == 0 {
		b.spaces = slices.Delete(b.spaces, i, i+1)
	}
}

func (b *held) complete(ranks int) bool {
	return slices.ContainsFunc(b.spaces, func(h holders) bool { return h.have == ranks })
}

// keyParts are what a key is made of.
type keyParts struct {
	space uint64
	rank  int
	hash  event.BlockHash
}

// parseKey reads what stands behind the prefix of a key. The prefix may hold colons of its own.
func parseKey(key string) (keyParts, bool) {
	var p keyParts
	rest, hash, ok := cutLast(key)
	if !ok {
		return p, false
	}
	rest, rank, ok := cutLast(rest)
	if !ok {
		return p, false
	}
	_, space, ok := cutLast(rest)
	if !ok || len(space) != 16 {
		return p, false
	}
	var err error
	if p.hash, err = event.ParseBlockHash(hash); err != nil || p.hash.String() != hash {
		return p, false
	}
	if p.rank, err = strconv.Atoi(rank); err != nil || p.rank < 0 || strconv.Itoa(p.rank) != rank {
		return p, false
	}
	if p.space, err = strconv.ParseUint(space, 16, 64); err != nil {
		return p, false
	}
	return p, true
}

func cutLast(s string) (before, after string, ok bool) {
	i := strings.LastIndexByte(s, ':')
	if i < 0 {
		return s, "", false
	}
	return s[:i], s[i+1:], true
}

// parentsFirst puts entries into an order in which a group follows the one that holds its parent, where that is among them.
func parentsFirst(keys []string, entries map[string]*Entry) []string {
	type chainEnd struct {
		space uint64
		rank  int
		hash  event.BlockHash
	}
	byLast := make(map[chainEnd]string, len(keys))
	end := func(e *Entry, n connector.Name) chainEnd { return chainEnd{e.space, e.Group.Rank, n.Hash} }
	for _, key := range keys {
		if e := entries[key]; e != nil {
			byLast[end(e, e.Group.Blocks[len(e.Group.Blocks)-1])] = key
		}
	}
	depth := make(map[string]int, len(keys))
	var path []string
	for _, key := range keys {
		path = path[:0]
		at := key
		for {
			if _, known := depth[at]; known {
				break
			}
			depth[at] = 0 // also ends a circle, which only a corrupt store has
			path = append(path, at)
			e := entries[at]
			if e == nil || !e.Group.HasParent {
				break
			}
			next, ok := byLast[end(e, e.Group.Parent)]
			if !ok {
				break
			}
			at = next
		}
		below := depth[at]
		for i := len(path) - 1; i >= 0; i-- {
			if path[i] != at {
				below++
			}
			depth[path[i]] = below
		}
	}
	sorted := slices.Clone(keys)
	slices.SortStableFunc(sorted, func(a, b string) int { return cmp.Compare(depth[a], depth[b]) })
	return sorted
}
