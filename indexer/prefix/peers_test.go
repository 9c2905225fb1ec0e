package prefix_test

import (
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"

	"kvstrata/event"
	"kvstrata/indexer/prefix"
)

// peers is engines of model m, each with a publisher of its own, around one index.
type peers struct {
	t       *testing.T
	index   *prefix.Index
	engines map[string]*publisher
}

func newPeers(t *testing.T) *peers {
	x, _ := newIndex()
	return &peers{t, x, make(map[string]*publisher)}
}

// tell applies one batch of an engine.
func (f *peers) tell(name string, events ...event.Event) {
	f.t.Helper()
	if f.engines[name] == nil {
		f.engines[name] = newPublisher(engine(name), false)
	}
	f.engines[name].tell(f.t, f.index, events...)
}

// want compares how many blocks of a prompt each engine holds; one that holds nothing of it is left out. A lookup and a
// reader must say the same.
func (f *peers) want(p chain, want map[string]int) {
	f.t.Helper()
	req := &prefix.Request{Model: "m", Tokens: p.tokens, LoRA: p.lora, Salt: p.salt}
	looked, read := map[string]int{}, map[string]int{}
	for _, m := range lookup(f.t, f.index, req).Matches {
		if m.Blocks > 0 {
			looked[m.Source.Instance] = m.Blocks
		}
	}
	scores, err := f.index.NewReader().Scores(req)
	if err != nil {
		f.t.Fatal(err)
	}
	for _, s := range scores {
		read[s.Source.Instance] = int(s.Blocks)
	}
	if diff := cmp.Diff(want, looked); diff != "" {
		f.t.Errorf("lookup (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(want, read); diff != "" {
		f.t.Errorf("scores (-want +got):\n%s", diff)
	}
}

// A filled hole hides nothing. Dynamo's standalone indexer 1.6.1 counts 2 of 4 blocks when the second was removed and stored
// again, until what lies behind it is stored again too.
func TestAHoleThatIsFilledCountsInFull(t *testing.T) {
	for hole := range 8 {
		t.Run(fmt.Sprint(hole), func(t *testing.T) {
			f, p := newPeers(t), prompt(1, 8)
			f.tell("other", p.stored(event.GPU, 0, 8)) // shares every block, so that none of them goes
			f.tell("e", p.stored(event.GPU, 0, 8))
			f.tell("e", p.evicted(event.GPU, hole, hole+1))
			want := map[string]int{"other": 8, "e": hole}
			if hole == 0 {
				delete(want, "e")
			}
			f.want(p, want)
			f.tell("e", p.stored(event.GPU, hole, hole+1))
			f.want(p, map[string]int{"other": 8, "e": 8})
		})
	}
}

// Two holes are filled in either order: what lies behind the second counts once both are.
func TestHolesAreFilledInAnyOrder(t *testing.T) {
	for _, order := range [][2]int{{2, 5}, {5, 2}} {
		f, p := newPeers(t), prompt(1, 8)
		f.tell("e", p.stored(event.GPU, 0, 8))
		f.tell("e", p.evicted(event.GPU, 2, 3), p.evicted(event.GPU, 5, 6))
		f.want(p, map[string]int{"e": 2})
		f.tell("e", p.stored(event.GPU, order[0], order[0]+1))
		f.want(p, map[string]int{"e": map[int]int{2: 5, 5: 2}[order[0]]})
		f.tell("e", p.stored(event.GPU, order[1], order[1]+1))
		f.want(p, map[string]int{"e": 8})
	}
}

// An engine that begins anew has nothing, whatever it had: llm-d's router with replay off, which is its default, goes on giving
// it credit, and Dynamo's standalone indexer knows of no lives.
func TestARestartedEmptyEngineLosesItsCreditAlone(t *testing.T) {
	f, p := newPeers(t), prompt(1, 6)
	f.tell("e", p.stored(event.GPU, 0, 6))
	f.tell("other", p.stored(event.GPU, 0, 4))
	f.engines["e"].restart(0)
	f.index.Tell(f.engines["e"].status(event.StateLive, ""))
	f.want(p, map[string]int{"other": 4})
	f.tell("e", p.stored(event.GPU, 0, 1))
	f.want(p, map[string]int{"e": 1, "other": 4})
}

// The probes of the peers' correctness, as far as they are of an index: S1, S2, S6, S7, S8, S11.

// S1: each block of one event has the one before it as its parent. AIBrix finds the first alone.
func TestEveryBlockOfAnEventIsFound(t *testing.T) {
	f, p := newPeers(t), prompt(1, 8)
	f.tell("e", p.stored(event.GPU, 0, 8))
	for n := 1; n <= 8; n++ {
		f.want(p.with(func(c *chain) { c.tokens = c.tokens[:16*n] }), map[string]int{"e": n})
	}
}

// S2: who removes a block removes its own. AIBrix removed everybody's.
func TestTheOtherHolderStays(t *testing.T) {
	for _, alias := range []int{0, 1} { // the second engine has the same names for the blocks, and others
		f, p := newPeers(t), prompt(1, 4)
		q := p.with(func(c *chain) { c.alias = alias })
		f.tell("a", p.stored(event.GPU, 0, 4))
		f.tell("b", q.stored(event.GPU, 0, 4))
		f.tell("a", p.evicted(event.GPU, 1, 4))
		f.want(p, map[string]int{"a": 1, "b": 4})
		f.tell("a", cleared(event.ByEngine))
		f.want(p, map[string]int{"b": 4})
	}
}

// S6: nobody is forgotten because many hold a block. llm-d remembers 10 of a block's holders.
func TestManyHoldersAreAllRemembered(t *testing.T) {
	for _, distinct := range []bool{false, true} {
		f, p, want := newPeers(t), prompt(1, 3), map[string]int{}
		for i := range 100 {
			name := fmt.Sprint("e", i)
			q := p.with(func(c *chain) {
				if distinct {
					c.alias = i
				}
			})
			f.tell(name, q.stored(event.GPU, 0, 1+i%3))
			want[name] = 1 + i%3
		}
		f.want(p, want)
	}
}

// S7 and S8: what lies behind a block that an engine does not hold counts for nothing, even where another holds it.
func TestNobodysBlocksBridgeAGap(t *testing.T) {
	f, p := newPeers(t), prompt(1, 8)
	f.tell("whole", p.stored(event.GPU, 0, 8))
	f.tell("holed", p.stored(event.GPU, 0, 8), p.evicted(event.GPU, 3, 4))
	f.tell("late", p.stored(event.GPU, 0, 6), p.evicted(event.GPU, 0, 5)) // holds block 5 alone
	f.want(p, map[string]int{"whole": 8, "holed": 3})
	f.tell("whole", cleared(event.ByEngine))
	f.want(p, map[string]int{"holed": 3})
}

// S11: where engines name the same blocks differently, nothing stays of what all have removed.
func TestNothingIsLeftOfWhatAllRemoved(t *testing.T) {
	f, p := newPeers(t), prompt(1, 8)
	for i, name := range []string{"a", "b"} {
		q := p.with(func(c *chain) { c.alias = i })
		f.tell(name, q.stored(event.GPU, 0, 8))
		f.tell(name, q.evicted(event.GPU, 0, 8))
	}
	f.want(p, map[string]int{})
	for _, s := range f.index.Sources() {
		for e := range f.index.Resident(s.Source) {
			t.Errorf("%s still lists %v", s.Source.Instance, e.Hash)
		}
	}
}

// S15: where reports of one block mean one block, stored twice and removed once is gone; llm-d's router, which counts them,
// goes on advertising it. Where an engine's reports are of copies, one is left.
func TestStoredTwiceRemovedOnce(t *testing.T) {
	for _, c := range []struct {
		asSet bool
		want  int
	}{{true, 0}, {false, 2}} {
		x, _ := newIndex()
		pub, p := newPublisher(engine("e"), c.asSet), prompt(1, 2)
		pub.tell(t, x, p.stored(event.GPU, 0, 2))
		pub.tell(t, x, p.stored(event.GPU, 0, 2))
		pub.tell(t, x, p.evicted(event.GPU, 0, 2))
		if got := blocks(t, x, p); got != c.want {
			t.Errorf("as set %v: %d blocks, want %d", c.asSet, got, c.want)
		}
	}
}

// A salted prompt's blocks are no credit for the same tokens without the salt, nor the other way round.
func TestSaltsAreNotMixed(t *testing.T) {
	f, p := newPeers(t), prompt(1, 4)
	salted := p.with(func(c *chain) { c.salt = "s" })
	f.tell("e", salted.stored(event.GPU, 0, 4))
	f.want(p, map[string]int{})
	f.want(salted, map[string]int{"e": 4})
}

// A prefix goes on in a colder tier whatever the engine calls its blocks, and whoever stored them first.
func TestColdTiersGoOnUnderAnyName(t *testing.T) {
	f, p := newPeers(t), prompt(1, 6)
	q := p.with(func(c *chain) { c.alias = 1 })
	f.tell("first", p.stored(event.GPU, 0, 4))
	f.tell("e", q.stored(event.GPU, 0, 3), q.stored(event.CPU, 3, 5))
	f.want(p, map[string]int{"first": 4, "e": 5})
}
