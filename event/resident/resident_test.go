package resident_test

import (
	"bytes"
	"fmt"
	"slices"
	"testing"
	"time"

	"kvstrata/event"
	"kvstrata/event/resident"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

const blockSize = 4

// stored returns a STORED run of n blocks under parent (0 = root), with tokens drawn from first.
func stored(parent uint64, first uint32, hashes ...uint64) event.Event {
	ev := event.Event{
		Kind: event.Stored, Tier: event.GPU, Group: event.NoGroup, BlockSize: blockSize, LoRAID: event.NoLoRAID,
		HasParent: parent != 0, Parent: hash(parent),
	}
	for i, h := range hashes {
		ev.Blocks = append(ev.Blocks, raw(h))
		for j := range uint32(blockSize) {
			ev.Tokens = append(ev.Tokens, first+uint32(i)*blockSize+j)
		}
	}
	return ev
}

func evicted(tier event.Tier, hashes ...uint64) event.Event {
	ev := event.Event{Kind: event.Evicted, Tier: tier, Group: event.NoGroup, LoRAID: event.NoLoRAID}
	for _, h := range hashes {
		ev.Blocks = append(ev.Blocks, raw(h))
	}
	return ev
}

func raw(h uint64) event.Block { return event.Block{Hash: hash(h), Copies: -1, Age: -1} }

// hash returns block h's hash: from 200 on, bytes too many for an integer.
func hash(h uint64) event.BlockHash {
	if h < 200 {
		return event.IntHash(h)
	}
	return event.BytesHash(fmt.Sprintf("%032d", h))
}

func batch(seq event.Seq, events ...event.Event) *event.Batch {
	return &event.Batch{
		First: seq, Last: seq, Way: event.Live, Time: event.Time(1e18) + event.Time(seq)*1e9, Rank: -1, Events: events,
	}
}

// prefixes returns the prefix hashes of n blocks of tokens counted from first.
func prefixes(first uint32, n int) []event.PrefixHash {
	tokens := make([]uint32, n*blockSize)
	for i := range tokens {
		tokens[i] = first + uint32(i)
	}
	return event.Prefixes(nil, tokens, blockSize, event.Hasher{}.Seed("", ""), false)
}

func entries(s *resident.Set) map[string]uint32 {
	got := make(map[string]uint32)
	for e := range s.Resident() {
		got[fmt.Sprintf("%v/%d/%s", e.Hash, e.Group.Index(), e.Tier)] = e.Copies
	}
	return got
}

func TestJudgeNamesARunAndItsContinuation(t *testing.T) {
	s := resident.New(resident.DefaultConfig())
	want := prefixes(1, 3)
	b := batch(0, stored(0, 1, 11, 12))
	s.Judge(b)
	next := batch(1, stored(12, 1+2*blockSize, 13))
	s.Judge(next)
	got := []event.PrefixHash{b.Events[0].Blocks[0].Prefix, b.Events[0].Blocks[1].Prefix, next.Events[0].Blocks[0].Prefix}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	if b.Events[0].Seed != 1337 || b.Events[0].Unrooted {
		t.Errorf("seed %d, unrooted %v; want 1337, false", b.Events[0].Seed, b.Events[0].Unrooted)
	}
}

func TestJudgeCountsCopiesAndAges(t *testing.T) {
	s := resident.New(resident.DefaultConfig())
	s.Judge(batch(0, stored(0, 1, 11)))
	s.Judge(batch(1, stored(0, 1, 11)))
	if got := s.Copied(event.IntHash(11), 0, event.GPU); got != 2 {
		t.Fatalf("copies %d, want 2", got)
	}
	type left struct {
		Effect int8
		Copies int32
		Age    time.Duration
	}
	for _, step := range []struct {
		seq  event.Seq
		want left
	}{{5, left{-1, 1, 5 * time.Second}}, {6, left{-1, 0, 6 * time.Second}}, {7, left{0, -1, -1}}} {
		b := batch(step.seq, evicted(event.GPU, 11))
		s.Judge(b)
		bl := b.Events[0].Blocks[0]
		if diff := cmp.Diff(step.want, left{bl.Effect, bl.Copies, bl.Age}); diff != "" {
			t.Errorf("batch %d: %s", step.seq, diff)
		}
		if bl.Prefix != prefixes(1, 1)[0] {
			t.Errorf("batch %d: prefix %v", step.seq, bl.Prefix)
		}
	}
	if s.Digest() != 0 || s.Blocks() != 0 {
		t.Errorf("digest %x, blocks %d; want an empty set", s.Digest(), s.Blocks())
	}
	if diff := cmp.Diff("evicted_absent_block", s.Oddities()[0].Name); diff != "" {
		t.Error(diff)
	}
}

func TestOrphansGetTheirNamesWhenTheParentComes(t *testing.T) {
	s := resident.New(resident.DefaultConfig())
	want := prefixes(1, 4)
	child := batch(0, stored(12, 1+2*blockSize, 13, 14))
	s.Judge(child)
	if !child.Events[0].Unrooted {
		t.Fatal("a run with an unknown parent must be marked unrooted")
	}
	parent := batch(1, stored(0, 1, 11, 12))
	s.Judge(parent)
	if len(parent.Events) != 2 {
		t.Fatalf("%d events, want the run and the names of its two descendants", len(parent.Events))
	}
	named := parent.Events[1]
	var got []event.PrefixHash
	for _, b := range named.Blocks {
		got = append(got, b.Prefix)
		if b.Effect != 0 {
			t.Errorf("a naming has effect %d", b.Effect)
		}
	}
	if diff := cmp.Diff(want[2:], got); diff != "" {
		t.Error(diff)
	}
	if !named.HasParent || named.Parent != event.IntHash(12) {
		t.Errorf("naming's parent is %v", named.Parent)
	}
}

func TestOrphansOfASaltedParentStayNameless(t *testing.T) {
	s := resident.New(resident.DefaultConfig())
	s.Judge(batch(0, stored(11, 1+blockSize, 12)))
	root := stored(0, 1, 11)
	root.Salt = "tenant-a"
	b := batch(1, root)
	s.Judge(b)
	if len(b.Events) != 1 {
		t.Fatalf("the orphan's local hash was computed without the salt: it must not get a name, got %+v", b.Events[1])
	}
	// Stored again, now with its parent known, it inherits the parent's seed.
	again := batch(2, stored(11, 1+blockSize, 12))
	s.Judge(again)
	seed := event.Hasher{}.Seed("", "tenant-a")
	want := event.Prefixes(nil, []uint32{1, 2, 3, 4, 5, 6, 7, 8}, blockSize, seed, false)[1]
	if got := again.Events[0].Blocks[0].Prefix; got != want {
		t.Errorf("prefix %v, want %v", got, want)
	}
}

func TestANameOutlivesItsBlock(t *testing.T) {
	s := resident.New(resident.DefaultConfig())
	s.Judge(batch(0, stored(0, 1, 11)))
	s.Judge(batch(1, evicted(event.GPU, 11)))
	b := batch(2, stored(11, 1+blockSize, 12))
	s.Judge(b)
	if got, want := b.Events[0].Blocks[0].Prefix, prefixes(1, 2)[1]; got != want {
		t.Errorf("prefix %v, want %v", got, want)
	}
}

func TestNamesAreBounded(t *testing.T) {
	cfg := resident.DefaultConfig()
	cfg.MaxNames = 2
	s := resident.New(cfg)
	for h := range uint64(4) {
		s.Judge(batch(event.Seq(2*h), stored(0, uint32(100*h), h+1)))
		s.Judge(batch(event.Seq(2*h+1), evicted(event.GPU, h+1)))
	}
	if got := s.Snapshot().Len; got != 2 {
		t.Errorf("%d names kept, want 2", got)
	}
	b := batch(9, stored(1, 4, 50)) // the oldest name is gone
	s.Judge(b)
	if !b.Events[0].Unrooted {
		t.Error("a forgotten parent must make its child an orphan")
	}
}

func TestAPlaceholderTakesTheNameItsHashHas(t *testing.T) {
	s := resident.New(resident.DefaultConfig())
	s.Judge(batch(0, stored(0, 1, 11)))
	offload := event.Event{
		Kind: event.Stored, Tier: event.CPU, Group: event.NoGroup, LoRAID: event.NoLoRAID, Blocks: []event.Block{raw(11)},
	}
	b := batch(1, offload)
	s.Judge(b)
	if len(b.Events) != 2 || b.Events[1].Blocks[0].Effect != 0 {
		t.Fatalf("want a naming after the placeholder, got %+v", b.Events)
	}
	if got, want := b.Events[1].Blocks[0].Prefix, prefixes(1, 1)[0]; got != want {
		t.Errorf("prefix %v, want %v", got, want)
	}
	want := []resident.TierCount{{Tier: event.GPU, Blocks: 1, Copies: 1}, {Tier: event.CPU, Blocks: 1, Copies: 1}}
	if diff := cmp.Diff(want, s.Tiers()); diff != "" {
		t.Error(diff)
	}
}

// A store's watcher sees no tokens: it reads a block's name where the block lies.
func TestNamesThatTheSourceGives(t *testing.T) {
	s, follower := resident.New(resident.DefaultConfig()), resident.New(resident.DefaultConfig())
	given := stored(0, 1, 11, 12)
	given.Tokens = nil
	given.Blocks[0].Prefix, given.Blocks[1].Prefix = 111, 112
	continued := stored(12, 1, 13)
	continued.Tokens, continued.Blocks[0].Prefix = nil, 113
	other := stored(0, 1, 12)
	other.Tokens, other.Blocks[0].Prefix = nil, 999
	var got []event.PrefixHash
	for i, ev := range []event.Event{given, continued, other, evicted(event.GPU, 11, 12, 12, 13)} {
		b := batch(event.Seq(i), ev)
		s.Judge(b)
		if err := follower.Apply(b); err != nil {
			t.Fatal(err)
		}
		for _, bl := range b.Events[0].Blocks {
			got = append(got, bl.Prefix)
			if want := map[bool]int8{true: -1, false: +1}[ev.Kind == event.Evicted]; bl.Effect != want {
				t.Errorf("batch %d, block %v: effect %d", i, bl.Hash, bl.Effect)
			}
		}
	}
	if diff := cmp.Diff([]event.PrefixHash{111, 112, 113, 0, 111, 112, 112, 113}, got); diff != "" {
		t.Errorf("names (-want +got):\n%s", diff)
	}
	if s.Digest() != 0 || follower.Digest() != 0 {
		t.Error("something is left")
	}
}

func TestRemoteBlocksAreNotResidents(t *testing.T) {
	s := resident.New(resident.DefaultConfig())
	ev := stored(0, 1, 11)
	ev.Locality = event.Remote
	b := batch(0, ev)
	s.Judge(b)
	if s.Blocks() != 0 || b.Events[0].Blocks[0].Effect != 0 {
		t.Error("a block elsewhere was counted")
	}
	if b.Events[0].Blocks[0].Prefix == 0 {
		t.Error("it has tokens, so it has a name")
	}
}

func TestAsSetCountsOnce(t *testing.T) {
	cfg := resident.DefaultConfig()
	cfg.AsSet = true
	s := resident.New(cfg)
	s.Judge(batch(0, stored(0, 1, 11)))
	again := batch(1, stored(0, 1, 11))
	s.Judge(again)
	if again.Events[0].Blocks[0].Effect != 0 {
		t.Error("a re-report was counted")
	}
	out := batch(2, evicted(event.GPU, 11))
	s.Judge(out)
	if bl := out.Events[0].Blocks[0]; bl.Effect != -1 || bl.Copies != -1 {
		t.Errorf("effect %d, copies %d; want -1 and unknown", bl.Effect, bl.Copies)
	}
}

func TestTokensThatDoNotFillTheBlocks(t *testing.T) {
	s := resident.New(resident.DefaultConfig())
	ev := stored(0, 1, 11, 12)
	ev.Tokens = ev.Tokens[:7]
	b := batch(0, ev)
	s.Judge(b)
	if b.Events[0].Blocks[0].Prefix != 0 || s.Blocks() != 2 {
		t.Error("the blocks are resident, but nameless")
	}
	if got := s.Oddities()[0].Name; got != "tokens_do_not_fill_blocks" {
		t.Error(got)
	}
}

func TestApplyRefusesWhatDoesNotFit(t *testing.T) {
	s := resident.New(resident.Config{})
	b := batch(3, evicted(event.GPU, 11))
	b.Events[0].Blocks[0].Effect = -1
	var broken *resident.InvariantError
	if err := s.Apply(b); !asInvariant(err, &broken) || broken.Seq != 3 {
		t.Errorf("got %v", err)
	}
}

func asInvariant(err error, target **resident.InvariantError) bool {
	e, ok := err.(*resident.InvariantError)
	*target = e
	return ok
}

// named returns the prefixes of resident blocks, as they are cut.
func named(s *resident.Set) map[string]int {
	names := make(map[string]int)
	for e := range s.Resident() {
		if e.Prefix != 0 {
			names[fmt.Sprintf("%v/%d/%v/%d/%s", e.Prefix, e.BlockSize, e.Eagle, e.Group.Index(), e.Tier)]++
		}
	}
	return names
}

// TestModel judges random streams and compares, after every batch, the judge with a naive count, a follower with the
// judge, and a set loaded from a checkpoint with the one that wrote it.
func TestModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		cfg := resident.DefaultConfig()
		cfg.MaxNames = rapid.IntRange(1, 8).Draw(t, "names")
		judge := resident.New(cfg)
		follower := resident.New(resident.Config{})
		naive := make(map[string]uint32)
		steps := rapid.IntRange(1, 40).Draw(t, "steps")
		var frozen *resident.Snapshot
		var frozenEntries map[string]uint32
		for seq := range steps {
			b := batch(event.Seq(seq), drawEvents(t)...)
			judge.Judge(b)
			count(naive, b)
			if diff := cmp.Diff(naive, entries(judge)); diff != "" {
				t.Fatalf("after batch %d the judge differs from the count of its effects:\n%s", seq, diff)
			}
			if err := follower.Apply(b); err != nil {
				t.Fatal(err)
			}
			if follower.Digest() != judge.Digest() {
				t.Fatalf("after batch %d the follower's digest differs", seq)
			}
			if frozen == nil && rapid.Bool().Draw(t, "freeze") {
				frozen, frozenEntries = judge.Snapshot(), entries(judge)
			}
		}
		if diff := cmp.Diff(named(judge), named(follower)); diff != "" {
			t.Fatalf("the follower's names are not the judge's:\n%s", diff)
		}
		checkReload(t, judge, cfg)
		if frozen != nil {
			got := make(map[string]uint32)
			for e := range frozen.Entries() {
				if e.Copies > 0 {
					got[fmt.Sprintf("%v/%d/%s", e.Hash, e.Group.Index(), e.Tier)] = e.Copies
				}
			}
			if diff := cmp.Diff(frozenEntries, got); diff != "" {
				t.Fatalf("a snapshot changed after it was taken:\n%s", diff)
			}
		}
	})
}

// drawEvents draws operations on a small world of chains, some told without their root, some with copies and tiers.
func drawEvents(t *rapid.T) []event.Event {
	var events []event.Event
	for range rapid.IntRange(1, 3).Draw(t, "events") {
		chain := rapid.Uint64Range(0, 2).Draw(t, "chain") * 100
		at := rapid.Uint64Range(1, 5).Draw(t, "at")
		n := rapid.Uint64Range(1, 3).Draw(t, "n")
		tier := rapid.SampledFrom([]event.Tier{event.GPU, event.CPU, event.Storage}).Draw(t, "tier")
		var hashes []uint64
		for h := at; h < at+n; h++ {
			hashes = append(hashes, chain+h)
		}
		switch rapid.SampledFrom([]string{"store", "store", "store", "evict", "evict", "clear", "placeholder"}).Draw(t, "op") {
		case "store":
			parent := chain + at - 1
			if at == 1 {
				parent = 0
			}
			ev := stored(parent, uint32(chain*100+(at-1)*blockSize), hashes...)
			ev.Tier = tier
			events = append(events, ev)
		case "placeholder":
			ev := stored(0, 0, hashes...)
			ev.Tier, ev.Tokens, ev.BlockSize = tier, nil, 0
			events = append(events, ev)
		case "evict":
			events = append(events, evicted(tier, hashes...))
		case "clear":
			if rapid.IntRange(0, 9).Draw(t, "rarely") == 0 {
				events = append(events, event.Event{
					Kind: event.Cleared, Cause: event.ByEngine, Group: event.NoGroup, LoRAID: event.NoLoRAID,
				})
			}
		}
	}
	return events
}

// count adds a judged batch's effects to a naive map.
func count(naive map[string]uint32, b *event.Batch) {
	for _, ev := range b.Events {
		if ev.Kind == event.Cleared {
			clear(naive)
		}
		for _, bl := range ev.Blocks {
			id := fmt.Sprintf("%v/%d/%s", bl.Hash, ev.Group.Index(), ev.Tier)
			if naive[id] += uint32(int32(bl.Effect)); naive[id] == 0 {
				delete(naive, id)
			}
		}
	}
}

func checkReload(t *rapid.T, judge *resident.Set, cfg resident.Config) {
	snap := judge.Snapshot()
	cp := event.Checkpoint{
		Source: event.Source{Cluster: "c", Model: "m", Instance: "i", Origin: event.Engine}, Epoch: 1, Digest: snap.Digest,
		Groups: snap.Groups, Entries: snap.Len, Fullest: snap.Fullest,
	}
	var object bytes.Buffer
	if err := event.WriteCheckpoint(&object, &cp, snap.Entries()); err != nil {
		t.Fatal(err)
	}
	again := resident.New(cfg)
	if _, err := again.Load(bytes.NewReader(object.Bytes())); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(rows(snap), rows(again.Snapshot())); diff != "" {
		t.Fatalf("a set loaded from a checkpoint differs from the one that wrote it:\n%s", diff)
	}
	// Both go on alike: what waits for a parent, waits still.
	more := drawEvents(t)
	a, b := batch(1000, more...), batch(1000, cloneEvents(more)...)
	judge.Judge(a)
	again.Judge(b)
	if judge.Digest() != again.Digest() {
		t.Fatal("a reloaded set judges differently")
	}
	if len(a.Events) != len(b.Events) {
		t.Fatalf("a reloaded set names other orphans:\n%v\n%v", a.Events, b.Events)
	}
}

func cloneEvents(events []event.Event) []event.Event {
	events = slices.Clone(events)
	for i := range events {
		events[i].Blocks = slices.Clone(events[i].Blocks)
	}
	return events
}

func rows(snap *resident.Snapshot) map[string]event.Entry {
	all := make(map[string]event.Entry)
	for e := range snap.Entries() {
		all[fmt.Sprintf("%v/%d/%s/%v", e.Hash, e.Group, e.Tier, e.Copies == 0)] = *e
	}
	return all
}
