package prefix_test

import (
	"testing"

	"kvstrata/event"
	"kvstrata/indexer/prefix"
)

// holds returns how many blocks from one on a source holds.
func holds(t tb, x *prefix.Index, source event.Source, p chain, from int) int {
	t.Helper()
	for _, m := range lookup(t, x, &prefix.Request{Model: "m", Hashes: p.hashes()[from:], Anywhere: from > 0}).Matches {
		if m.Source == source {
			return m.Blocks
		}
	}
	return 0
}

func sound(t tb, x *prefix.Index) {
	t.Helper()
	if err := x.Check(); err != nil {
		t.Fatal(err)
	}
}

// Blocks that come without the ones before them are found wherever they lie. A forest where that goes on becomes dense, and sparse again once it
// is over.
func TestBlocksWithoutTheOnesBeforeThem(t *testing.T) {
	const length, lone = 3000, 100
	x, _ := newIndex()
	p := prompt(1, length)
	whole, holey := newPublisher(engine("e1"), false), newPublisher(engine("e2"), false)
	whole.tell(t, x, p.stored(event.GPU, 0, length))
	holey.tell(t, x, p.stored(event.GPU, 0, 10), p.evicted(event.GPU, 0, 10))
	wasDense := false
	for i := 10; i < 10+lone; i++ {
		holey.tell(t, x, p.stored(event.GPU, i, i+1))
		if got := holds(t, x, holey.source, p, i); got != 1 {
			t.Fatalf("block %d: %d blocks from there on, want 1", i, got)
		}
		sound(t, x)
		if i == 10 && x.Dense() {
			t.Fatal("dense after one search")
		}
		holey.tell(t, x, p.evicted(event.GPU, i, i+1))
		wasDense = wasDense || x.Dense()
	}
	if !wasDense {
		t.Fatalf("sparse after %d searches", lone)
	}
	if got := holds(t, x, whole.source, p, 0); got != length {
		t.Fatalf("%d blocks, want %d", got, length)
	}
	for i := range 16 {
		other := prompt(uint32(1e6*(i+1)), length)
		whole.tell(t, x, other.stored(event.GPU, 0, length))
		sound(t, x)
		whole.tell(t, x, other.evicted(event.GPU, 0, length))
	}
	if x.Dense() {
		t.Error("dense though nothing had to be searched for long")
	}
	whole.tell(t, x, cleared(event.ByEngine))
	sound(t, x)
}

// A store tells its blocks one by one, without the parents that they have.
func TestAStoreSharesTheBlocksOfEngines(t *testing.T) {
	x, _ := newIndex()
	p := prompt(1, 8)
	e := newPublisher(engine("e1"), false)
	e.tell(t, x, p.stored(event.GPU, 0, 8))
	name := engine("s1")
	name.Origin = event.Store
	s := newPublisher(name, true)
	for _, i := range []int{5, 2, 6} {
		one := p.offloaded("STORAGE", i, i+1)
		one.BlockSize, one.Blocks[0].Prefix = uint32(p.size), p.hashes()[i]
		s.tell(t, x, one)
		sound(t, x)
	}
	for from, want := range map[int]int{2: 1, 5: 2, 3: 0} {
		if got := holds(t, x, s.source, p, from); got != want {
			t.Errorf("%d blocks from block %d on, want %d", got, from, want)
		}
		if got := holds(t, x, e.source, p, from); got != 8-from {
			t.Errorf("engine: %d blocks from block %d on, want %d", got, from, 8-from)
		}
	}
}

// A hot prefix is asked for by its hash alone, also after it left and came back in the middle of a run.
func TestAHotPrefixThatCameBack(t *testing.T) {
	x, clock := newIndex()
	p := prompt(1, 6)
	pub := newPublisher(engine("e1"), false)
	pub.tell(t, x, p.stored(event.GPU, 0, 3))
	pub.tell(t, x, p.stored(event.GPU, 3, 6))
	if hot := x.Hot(1); len(hot) != 1 || len(hot[0].Owners) != 1 || hot[0].Prefix != p.hashes()[2] {
		t.Fatalf("hot: %+v", hot)
	}
	back := func() {
		t.Helper()
		pub.tell(t, x, p.evicted(event.GPU, 0, 6))
		if hot := x.Hot(1); len(hot) != 1 || len(hot[0].Owners) != 0 {
			t.Fatalf("hot: %+v", hot)
		}
		pub.tell(t, x, p.stored(event.GPU, 0, 6))
		if hot := x.Hot(1); len(hot) != 1 || len(hot[0].Owners) != 1 {
			t.Fatalf("hot: %+v", hot)
		}
		sound(t, x)
	}
	back()
	for i := range uint32(2) {
		other := prompt(9000*(i+1), 2)
		pub.tell(t, x, other.stored(event.GPU, 0, 1))
		pub.tell(t, x, other.stored(event.GPU, 1, 2))
	}
	pub.tell(t, x, p.evicted(event.GPU, 3, 6))
	pub.tell(t, x, p.stored(event.GPU, 3, 6)) // hotter than the others
	x.CoolDown(clock.now)
	back()
}

// A checkpoint tells blocks in any order, beside others that were there.
func TestRestoreInAnyOrder(t *testing.T) {
	x, _ := newIndex()
	p := prompt(1, 40)
	before := newPublisher(engine("e1"), false)
	before.tell(t, x, p.stored(event.GPU, 0, 20))
	pub := newPublisher(engine("e2"), false)
	// What is stored again takes the places of what was evicted last.
	pub.message(t, []event.Event{p.stored(event.GPU, 0, 40)}, []event.Event{p.evicted(event.GPU, 0, 30)}, []event.Event{p.stored(event.GPU, 0, 30)},
		[]event.Event{p.evicted(event.GPU, 5, 10)})
	restore(t, x, pub.checkpoint(t))
	sound(t, x)
	if x.Dense() {
		t.Error("dense after a checkpoint")
	}
	for from, want := range map[int]int{0: 5, 10: 30} {
		if got := holds(t, x, pub.source, p, from); got != want {
			t.Errorf("%d blocks from block %d on, want %d", got, from, want)
		}
	}
	if got := holds(t, x, before.source, p, 0); got != 20 {
		t.Errorf("the other source: %d blocks, want 20", got)
	}
}
