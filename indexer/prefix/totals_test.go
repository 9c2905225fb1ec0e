package prefix_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"kvstrata/event"
	"kvstrata/indexer/prefix"
)

// A miss counts with the blocks that were asked for, whoever stands first among the sources: a rate is never too high.
func TestWhatLookupsFound(t *testing.T) {
	x, _ := newIndex()
	p, other := prompt(1, 4), prompt(1000, 3)
	connector := engine("e0")
	connector.Origin = event.Connector
	x.Tell(newPublisher(connector, false).status(event.StateLive, ""))
	pub := newPublisher(engine("e1"), false)
	pub.tell(t, x, p.stored(event.GPU, 0, 2))
	x.Tell(pub.status(event.StateLive, ""))
	ask := func(r *prefix.Request) {
		t.Helper()
		r.Model = "m"
		if _, err := x.Lookup(r); err != nil {
			t.Fatal(err)
		}
	}
	ask(&prefix.Request{Tokens: p.tokens})     // 4 blocks, of which 2 are there
	ask(&prefix.Request{Tokens: other.tokens}) // 3 blocks, none
	want := prefix.Asked{Lookups: 2, AskedBlocks: 7, MatchedBlocks: 2, AskedTokens: 7 * 16, MatchedTokens: 2 * 16}
	if diff := cmp.Diff(want, x.Asked()); diff != "" {
		t.Error(diff)
	}
	x.Tell(pub.status(event.StateGone, "withdrawn")) // nobody is left who answers
	ask(&prefix.Request{Tokens: other.tokens})
	want.Lookups, want.AskedBlocks, want.AskedTokens = 3, 10, 160
	if diff := cmp.Diff(want, x.Asked()); diff != "" {
		t.Error(diff)
	}
	totals := x.Sources()[1].Totals
	if diff := cmp.Diff(prefix.Totals{Stored: 2}, totals); diff != "" {
		t.Error(diff)
	}
}

func TestHotPrefixes(t *testing.T) {
	x, clock := newIndex()
	shared := prompt(1, 2)
	pub := newPublisher(engine("e1"), false)
	pub.tell(t, x, shared.stored(event.GPU, 0, 2))
	for i := range 3 {
		long := prompt(1, 2)
		long.tokens = append(long.tokens, prompt(uint32(5000+100*i), 1).tokens...)
		pub.tell(t, x, long.stored(event.GPU, 2, 3))
	}
	hot := x.Hot(10)
	if len(hot) != 1 {
		t.Fatalf("%+v", hot)
	}
	got := hot[0]
	want := prefix.HotPrefix{
		Prefix: got.Prefix, Model: "m", Blocks: 2, Tokens: 32, BlockSize: 16, Continued: 3, Copies: 1, ResidentTokens: 32,
		Owners: []prefix.HotOwner{{ID: pub.source.Tokens(), Instance: "e1", Tier: event.GPU, Copies: 1}},
		First:  clock.now.UnixMilli(), Last: clock.now.UnixMilli(),
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	answer, err := x.Lookup(&prefix.Request{Model: "m", Hashes: []event.PrefixHash{got.Prefix}})
	if err != nil || answer.Matches[0].Blocks != 1 {
		t.Errorf("the hash is no prefix: %+v, %v", answer, err)
	}
	if got := x.Hot(0); len(got) != 0 {
		t.Errorf("%d rows of none", len(got))
	}
}
