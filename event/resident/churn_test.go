package resident_test

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"testing"

	"kvstrata/event"
	"kvstrata/event/resident"

	"github.com/zeebo/xxh3"
	"golang.org/x/sync/errgroup"
)

// naiveSet is what a set is by its contract: copies by block, and the names of blocks without any, in the order in which they lost
// their last copy.
type naiveSet struct {
	copies  map[naiveKey]int32
	names   []naiveKey
	isName  map[naiveKey]bool
	bound   int
	fullest int
}

type naiveKey struct {
	hash  event.BlockHash
	group uint32
}

func (n *naiveSet) store(k naiveKey) {
	if n.isName[k] {
		delete(n.isName, k)
		i := slices.Index(n.names, k)
		n.names = slices.Delete(n.names, i, i+1)
	}
	n.copies[k]++
	n.fullest = max(n.fullest, len(n.copies))
}

func (n *naiveSet) evict(k naiveKey) (effect int8, left int32) {
	if n.copies[k] == 0 {
		return 0, -1
	}
	if n.copies[k]--; n.copies[k] > 0 {
		return -1, n.copies[k]
	}
	delete(n.copies, k)
	n.names, n.isName[k] = append(n.names, k), true
	for len(n.names) > max(n.bound, n.fullest) {
		delete(n.isName, n.names[0])
		n.names = n.names[1:]
	}
	return -1, 0
}

func (n *naiveSet) known(k naiveKey) bool { return n.copies[k] > 0 || n.isName[k] }

// Blocks by the thousand come, go and come back, in tables that grow meanwhile: nothing is lost, found twice, or forgotten too early
// or too late.
func TestChurnOfManyBlocks(t *testing.T) {
	rnd := rand.New(rand.NewPCG(1, 1))
	random := func(world uint64) func(event.Kind) uint64 {
		return func(event.Kind) uint64 { return rnd.Uint64N(world) }
	}
	stored, evicted := uint64(0), uint64(0)
	for _, c := range []struct {
		name   string
		groups int
		long   bool // some hashes are no integers
		next   func(event.Kind) uint64
	}{
		{"few, again and again", 2, false, random(500)},
		{"many", 2, false, random(12000)},
		{"with long hashes", 2, true, random(12000)},
		{"oldest first", 1, false, func(kind event.Kind) uint64 {
			if kind == event.Stored {
				stored++
				return stored
			}
			if evicted++; rnd.IntN(100) == 0 {
				return evicted / 2 // long forgotten
			}
			return min(evicted, stored)
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			cfg := resident.DefaultConfig()
			cfg.MaxNames = 100
			set := resident.New(cfg)
			naive := naiveSet{copies: make(map[naiveKey]int32), isName: make(map[naiveKey]bool), bound: cfg.MaxNames}
			var readers errgroup.Group
			for seq := range event.Seq(400) {
				if seq%100 == 50 { // a snapshot stays while the set goes on
					snap := set.Snapshot()
					readers.Go(func() error { return addsUp(snap) })
				}
				var events []event.Event
				for range 1 + rnd.IntN(4) {
					ev := event.Event{
						Kind: event.Stored, Tier: event.GPU, Group: event.Group(rnd.IntN(c.groups)), LoRAID: event.NoLoRAID, BlockSize: blockSize, Tokens: []uint32{1, 2, 3, 4},
					}
					if seq > 100 && rnd.IntN(2) == 0 {
						ev.Kind, ev.Tokens = event.Evicted, nil
					}
					for range 1 + rnd.IntN(100) {
						n := c.next(ev.Kind)
						bl := event.Block{Hash: event.IntHash(n)}
						if c.long && n%4 == 0 {
							bl.Hash = event.BytesHash(fmt.Sprintf("%032d", n))
						}
						if ev.Kind == event.Stored && len(ev.Blocks) == 1 { // each a run of its own, so that every block has a name
							events = append(events, ev)
							ev.Blocks = nil
						}
						ev.Blocks = append(ev.Blocks, bl)
					}
					events = append(events, ev)
				}
				b := batch(seq, events...)
				set.Judge(b)
				naive.check(t, b)
				if set.Blocks() != uint64(len(naive.copies)) || set.Entries() != uint64(len(naive.copies)+len(naive.names)) {
					t.Fatalf("batch %d: %d blocks of %d entries, want %d and %d names", seq, set.Blocks(), set.Entries(), len(naive.copies), len(naive.names))
				}
			}
			naive.checkSum(t, set)
			if err := readers.Wait(); err != nil {
				t.Error(err)
			}
		})
	}
}

// addsUp compares a snapshot's digest with its entries, and lets others run meanwhile.
func addsUp(snap *resident.Snapshot) error {
	defer snap.Release()
	digest, n := event.Digest(0), uint64(0)
	for e := range snap.Entries() {
		digest += event.Digest(e.Copies) * event.Mix64(e.Hash, e.Group, e.Tier)
		if n++; n%64 == 0 {
			runtime.Gosched()
		}
	}
	if digest != snap.Digest || n != snap.Len {
		return fmt.Errorf("%d entries, want %d; their digest is %x, the snapshot's %x", n, snap.Len, digest, snap.Digest)
	}
	return nil
}

// check does what a batch tells, and compares it with what was judged.
func (n *naiveSet) check(t *testing.T, b *event.Batch) {
	t.Helper()
	for _, ev := range b.Events {
		for _, bl := range ev.Blocks {
			k := naiveKey{bl.Hash, ev.Group.Index()}
			if ev.Kind == event.Stored {
				n.store(k)
				continue
			}
			known := n.known(k)
			effect, left := n.evict(k)
			if bl.Effect != effect || bl.Copies != left || bl.Prefix != 0 != known {
				t.Fatalf("batch %d, block %v: effect %d, copies %d, name %v; want %d, %d, known %v", b.First, bl.Hash, bl.Effect, bl.Copies, bl.Prefix, effect, left, known)
			}
		}
	}
}

// checkSum compares the entries of a set's snapshot, and their digest.
func (n *naiveSet) checkSum(t *testing.T, set *resident.Set) {
	t.Helper()
	snap := set.Snapshot()
	defer snap.Release()
	digest, entries := event.Digest(0), 0
	for e := range snap.Entries() {
		entries++
		k := naiveKey{e.Hash, e.Group.Index()}
		if !n.known(k) || int32(e.Copies) != n.copies[k] {
			t.Errorf("block %v has %d copies, want %d", e.Hash, e.Copies, n.copies[k])
		}
		digest += event.Digest(e.Copies) * event.Mix64(e.Hash, e.Group, e.Tier)
	}
	if entries != len(n.copies)+len(n.names) || digest != set.Digest() {
		t.Errorf("%d entries, want %d; their digest is %x, the set's %x", entries, len(n.copies)+len(n.names), digest, set.Digest())
	}
}

// What a stream is judged to be, and what a checkpoint behind it holds, in its order, stay the same.
func TestJudgedBytesStay(t *testing.T) {
	set := resident.New(resident.DefaultConfig())
	rnd := rand.New(rand.NewPCG(1, 2))
	var encoder event.Encoder
	hash := func(n uint64) event.BlockHash {
		if n%3 == 0 {
			return event.BytesHash(fmt.Sprintf("%032d", n))
		}
		return event.IntHash(n * 0x9e3779b97f4a7c15)
	}
	for seq := range event.Seq(2000) {
		var events []event.Event
		for range 1 + rnd.IntN(4) {
			chain, at, n := rnd.Uint64N(400)*100, 1+rnd.Uint64N(40), 1+rnd.Uint64N(30)
			ev := event.Event{
				Kind: event.Stored, Tier: []event.Tier{event.GPU, event.CPU, "CPU_TIER1"}[rnd.IntN(3)], Group: event.Group(rnd.IntN(3)) - 1,
				LoRAID: event.NoLoRAID, BlockSize: 2,
			}
			for i := at; i < at+n; i++ {
				ev.Blocks = append(ev.Blocks, event.Block{Hash: hash(chain + i), Copies: -1, Age: -1})
				ev.Tokens = append(ev.Tokens, uint32(chain+i), uint32(i))
			}
			if at > 1 {
				ev.HasParent, ev.Parent = true, hash(chain+at-1)
			}
			switch what := rnd.IntN(40); {
			case what == 0:
				ev = event.Event{Kind: event.Cleared, Cause: event.ByEngine, Group: event.NoGroup, LoRAID: event.NoLoRAID}
			case what < 3:
				ev.Tokens, ev.BlockSize = nil, 0
			case what < 18:
				ev.Kind, ev.Tokens, ev.HasParent, ev.Parent = event.Evicted, nil, false, event.BlockHash{}
			}
			events = append(events, ev)
		}
		b := batch(seq, events...)
		set.Judge(b)
		for i := range b.Events {
			b.Events[i].Tokens = nil
		}
		encoder.Append(b)
	}
	judged := bytes.NewBuffer(encoder.Encode(nil))
	for e := range set.Snapshot().Entries() {
		fmt.Fprintln(judged, e.Hash, e.Group, e.Tier, e.Copies, e.Stored, e.Prefix, e.Local, e.HasParent, e.Parent, e.Seed, e.BlockSize, e.Eagle)
	}
	fmt.Fprintln(judged, set.Digest())
	const want = 0xb4ac673de282260e
	if got := xxh3.Hash(judged.Bytes()); got != want {
		t.Errorf("%d bytes with XXH3 %#x, want %#x", judged.Len(), got, uint64(want))
	}
}
