package prefix_test

import (
	"slices"
	"strings"
	"testing"

	"kvstrata/event"
	"kvstrata/event/enginehash"
	"kvstrata/indexer/prefix"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

// spoken is a prompt as a real engine names its blocks.
type spoken struct {
	chain
	scheme, seed string
	form         enginehash.Form
}

// names returns what the engine calls the prompt's blocks: integers, or with long the digests.
func (s spoken) names(t tb) []event.BlockHash {
	t.Helper()
	recipe, err := enginehash.ParseRecipe(s.scheme, s.seed)
	if err != nil {
		t.Fatal(err)
	}
	chain, ok := recipe.Chain(s.form, s.tokens, s.size, s.lora, s.salt)
	if !ok {
		t.Fatal("the prompt has no engine hashes")
	}
	if s.eagle && !chain.Pairs() {
		t.Fatal("the scheme has no pairs")
	}
	var all []event.BlockHash
	for d, more := chain.Next(); more; d, more = chain.Next() {
		if s.long {
			all = append(all, d.FullName())
		} else {
			all = append(all, recipe.Scheme.Name(d))
		}
	}
	return all
}

// rename gives an event of the chain the engine's own hashes.
func (s spoken) rename(t tb, ev event.Event, from int) event.Event {
	t.Helper()
	names := s.names(t)
	for i := range ev.Blocks {
		ev.Blocks[i].Hash = names[from+i]
	}
	if ev.HasParent {
		ev.Parent = names[from-1]
	}
	return ev
}

func (s spoken) stored(t tb, tier event.Tier, from, to int) event.Event {
	return s.rename(t, s.chain.stored(tier, from, to), from)
}

// unnamed tells blocks without tokens, but with their size, as events without prompt text do.
func (s spoken) unnamed(t tb, tier event.Tier, from, to int) event.Event {
	ev := s.rename(t, s.chain.offloaded(tier, from, to), from)
	ev.BlockSize, ev.Eagle, ev.Spec = uint32(s.size), s.eagle, s.spec
	return ev
}

func (s spoken) evicted(t tb, tier event.Tier, from, to int) event.Event {
	return s.rename(t, s.chain.evicted(tier, from, to), from)
}

// says returns the status of a publisher that knows how its engine names blocks.
func (s spoken) says(pub *publisher) *event.Status {
	st := pub.status(event.StateLive, "")
	st.HashScheme, st.HashSeed = s.scheme, s.seed
	return st
}

func TestAPromptFindsBlocksWithoutNames(t *testing.T) {
	text := prompt(1, 4)
	salted, adapted := text, text
	salted.salt, adapted.lora = "s", "french"
	long, pairs := text, text
	long.long, pairs.eagle = true, true
	for _, c := range []struct {
		name string
		spoken
		want int
	}{
		{"sha256", spoken{text, "sha256", "0", enginehash.Plain}, 3},
		{"the default seed", spoken{text, "sha256", "", enginehash.Plain}, 3},
		{"a root", spoken{text, "xxhash", "root:0123456789abcdef", enginehash.Plain}, 3},
		{"xxhash_cbor", spoken{text, "xxhash_cbor", "0", enginehash.Plain}, 3},
		{"SGLang", spoken{text, "sglang", "", enginehash.Plain}, 3},
		{"SGLang under EAGLE", spoken{pairs, "sglang", "", enginehash.Plain}, 3},
		{"whole digests", spoken{long, "sha256_cbor", "0", enginehash.Plain}, 3},
		{"a salt", spoken{salted, "sha256", "0", enginehash.Plain}, 3},
		{"a salt since vLLM 0.31", spoken{salted, "sha256", "0", enginehash.Tagged}, 3},
		{"a salt of SGLang", spoken{salted, "sglang", "", enginehash.Plain}, 3},
		{"an adapter", spoken{adapted, "sha256", "0", enginehash.Plain}, 3},
	} {
		t.Run(c.name, func(t *testing.T) {
			x, _ := newIndex()
			pub := newPublisher(engine("e1"), false)
			pub.tell(t, x, c.unnamed(t, event.GPU, 0, 2), c.unnamed(t, event.CPU, 1, 3))
			ask := &prefix.Request{Model: "m", Tokens: c.tokens, LoRA: c.lora, Salt: c.salt}
			if got := lookup(t, x, ask).Matches[0]; got.Blocks != 0 || got.MatchedBy != "" {
				t.Errorf("without a recipe: %+v", got)
			}
			x.Tell(c.says(pub))
			want := prefix.Match{
				Source: pub.source, State: event.StateLive, Epoch: 1, BlockSize: 16, Blocks: c.want, Tokens: 16 * c.want, DeviceBlocks: 2,
				DeviceTokens: 32, Tiers: []prefix.Tier{{Tier: event.GPU, Blocks: 2, Tokens: 32}, {Tier: event.CPU, Blocks: 1, Tokens: 16}},
				MatchedBy: "engine_hash",
			}
			if diff := cmp.Diff(want, lookup(t, x, ask).Matches[0]); diff != "" {
				t.Error(diff)
			}
			if info := x.Sources()[0]; info.Unnamed != 4 || info.Hashes != c.scheme {
				t.Errorf("shown: %d without a name, scheme %q", info.Unnamed, info.Hashes)
			}

			// Who has another salt, or asks by prefix hashes, finds none of it.
			other := *ask
			other.Salt += "x"
			if got := lookup(t, x, &other).Matches[0]; got.Blocks != 0 {
				t.Errorf("another salt finds %d blocks", got.Blocks)
			}
			if got := lookup(t, x, &prefix.Request{Model: "m", Hashes: c.hashes()}).Matches[0]; got.Blocks != 0 {
				t.Errorf("prefix hashes find %d blocks", got.Blocks)
			}

			// A checkpoint keeps what the set holds, and the recipe comes with the next status.
			y, _ := newIndex()
			restore(t, y, pub.checkpoint(t))
			y.Tell(c.says(pub))
			want.Epoch, want.Seq = 1, 0
			if diff := cmp.Diff(want, lookup(t, y, ask).Matches[0]); diff != "" {
				t.Errorf("restored:\n%s", diff)
			}
		})
	}
}

// Blocks with names and blocks without lie in one chain: a match goes on from one to the other.
func TestNamesAndEngineHashesTogether(t *testing.T) {
	s := spoken{prompt(1, 6), "sha256", "0", enginehash.Plain}
	x, _ := newIndex()
	pub := newPublisher(engine("e1"), false)
	pub.tell(t, x, s.stored(t, event.GPU, 0, 2), s.unnamed(t, event.CPU, 2, 4))
	x.Tell(s.says(pub))
	ask := &prefix.Request{Model: "m", Tokens: s.tokens}
	got := lookup(t, x, ask).Matches[0]
	if got.Blocks != 4 || got.DeviceBlocks != 2 || got.MatchedBy != "engine_hash" {
		t.Errorf("got %+v", got)
	}
	ask.Tokens = s.tokens[:32] // all of it has names
	if got := lookup(t, x, ask).Matches[0]; got.Blocks != 2 || got.MatchedBy != "" {
		t.Errorf("got %+v", got)
	}
	if a := x.Asked(); a.MatchedBlocks != 6 || a.AskedBlocks != 8 {
		t.Errorf("asked %+v", a)
	}

	// The same once the tokens are told: the same answer, by names.
	pub.tell(t, x, s.stored(t, event.CPU, 2, 4))
	ask.Tokens = s.tokens
	if got := lookup(t, x, ask).Matches[0]; got.Blocks != 4 || got.MatchedBy != "" {
		t.Errorf("got %+v", got)
	}
	if got := x.Sources()[0].Unnamed; got != 0 {
		t.Errorf("%d blocks without a name", got)
	}
}

// A recipe that can't be read, or none, leaves lookups as they were; so does a source that is left out.
func TestWithoutARecipe(t *testing.T) {
	s := spoken{prompt(1, 2), "sha256", "0", enginehash.Plain}
	x, _ := newIndex()
	pub := newPublisher(engine("e1"), false)
	pub.tell(t, x, s.unnamed(t, event.GPU, 0, 2))
	for _, c := range []struct {
		scheme, seed string
		want         int
	}{{"sha256", "0", 2}, {"sha256", "1", 0}, {"", "", 0}, {"blake3", "0", 0}, {"sha256", "root:x", 0}, {"sha256", "0", 2}} {
		st := pub.status(event.StateLive, "")
		st.HashScheme, st.HashSeed = c.scheme, c.seed
		x.Tell(st)
		if got := blocks(t, x, s.chain); got != c.want {
			t.Errorf("%q %q: %d blocks, want %d", c.scheme, c.seed, got, c.want)
		}
	}
	st := s.says(pub)
	st.State = event.StateStale
	x.Tell(st)
	if got := blocks(t, x, s.chain); got != -1 {
		t.Errorf("a stale source is not left out: %d", got)
	}
	pub.restart(0)
	x.Tell(s.says(pub)) // a new life, of which no batch came yet
	if got := blocks(t, x, s.chain); got != 0 {
		t.Errorf("%d blocks of a life that ended", got)
	}
}

// An engine whose first blocks have no name reaches on in its store.
func TestReachBehindBlocksWithoutNames(t *testing.T) {
	s := spoken{prompt(1, 6), "sha256", "0", enginehash.Plain}
	x, _ := newIndex()
	eng := newPublisher(engine("e1"), false)
	eng.tell(t, x, s.unnamed(t, event.GPU, 0, 2), s.unnamed(t, event.CPU, 4, 5))
	x.Tell(s.says(eng))
	side := engine("e1")
	side.Origin = event.Connector
	conn := newPublisher(side, false)
	st := conn.status(event.StateLive, "")
	st.Stores = []string{"redis"}
	x.Tell(st)
	shelf := newPublisher(event.Source{Cluster: "c", Model: "m", Instance: "redis", Origin: event.Store}, true)
	shelf.tell(t, x, s.chain.stored(event.Storage, 0, 4), s.chain.evicted(event.Storage, 0, 2))
	x.Tell(shelf.status(event.StateLive, ""))
	got := lookup(t, x, &prefix.Request{Model: "m", Tokens: s.tokens}).Matches[0]
	if got.Source != eng.source || got.Blocks != 2 || got.MatchedBy != "engine_hash" || got.Reach == nil {
		t.Fatalf("got %+v", got)
	}
	want := []prefix.Tier{
		{Tier: event.GPU, Blocks: 2, Tokens: 32}, {Tier: event.CPU, Blocks: 1, Tokens: 16}, {Tier: event.Storage, Blocks: 2, Tokens: 32},
	}
	if diff := cmp.Diff(want, got.Reach.Tiers); diff != "" || got.Reach.Blocks != 5 {
		t.Errorf("%d blocks\n%s", got.Reach.Blocks, diff)
	}
}

// plain is what a source holds, by engine hashes alone.
type plain map[plainPlace]int

type plainPlace struct {
	group uint32
	hash  event.BlockHash
	tier  event.Tier
}

// answer walks the chains of a prompt's groups, block by block: the tier of each step is the coldest over the groups of the
// warmest of each block.
func (p plain) answer(t tb, prompts []spoken) (tiers []event.Tier) {
	step := prompts[0].size
	var names [][]event.BlockHash
	for _, s := range prompts {
		names = append(names, s.names(t))
		step = max(step, s.size) // of these layouts one size divides the other
	}
	for n := 0; (n+1)*step <= len(prompts[0].tokens); n++ {
		var coldest event.Tier
		for g, s := range prompts {
			each := step / s.size
			for i := n * each; i < (n+1)*each; i++ {
				var warmest event.Tier
				for at, copies := range p {
					if copies > 0 && at.group == s.group.Index() && at.hash == names[g][i] && (warmest == "" || isColder(warmest, at.tier)) {
						warmest = at.tier
					}
				}
				if warmest == "" {
					return tiers
				}
				if coldest == "" || isColder(warmest, coldest) {
					coldest = warmest
				}
			}
		}
		tiers = append(tiers, coldest)
	}
	return tiers
}

// isColder reports whether p is colder than q; of equally warm ones, the one whose name comes later.
func isColder(p, q event.Tier) bool {
	if p.Warmth() != q.Warmth() {
		return p.Warmth() > q.Warmth()
	}
	return p > q
}

// TestEngineHashModel tells runs with and without tokens of engines with real hashes, and compares each answer with a naive
// walk over engine hashes, and with an index that has only names.
func TestEngineHashModel(t *testing.T) {
	layouts := [][]chain{
		{{size: 16, group: event.NoGroup}},
		{{size: 4, group: 0, spec: event.SpecFull}, {size: 4, group: 1, spec: event.SpecMLA}},
		{{size: 4, group: 0, spec: event.SpecFull}, {size: 16, group: 1, spec: event.SpecSinkFull}},
		{{size: 16, group: 0, spec: event.SpecFull}, {size: 16, group: 1, spec: event.SpecSlidingWindow}},
	}
	rapid.Check(t, func(t *rapid.T) {
		base := spoken{
			scheme: rapid.SampledFrom([]string{"sha256", "xxhash", "sha256_cbor", "xxhash_cbor", "sglang"}).Draw(t, "scheme"), seed: "0",
			form: rapid.SampledFrom([]enginehash.Form{enginehash.Plain, enginehash.Tagged}).Draw(t, "form"),
		}
		if base.scheme == "sglang" {
			base.seed = ""
		}
		layout := rapid.SampledFrom(layouts).Draw(t, "layout")
		isLong := rapid.Bool().Draw(t, "whole digests")
		x, _ := newIndex()
		names, _ := newIndex()
		pub := newPublisher(engine("e1"), false)
		held := make(plain)
		known := make(map[uint32]bool) // groups told of
		draw := func() (spoken, int, int) {
			s := base
			s.chain = rapid.SampledFrom(layout).Draw(t, "group")
			s.tokens, s.long = slices.Clone(rapid.SampledFrom(prompts).Draw(t, "prompt")), isLong
			s.salt = rapid.SampledFrom([]string{"", "", "salt"}).Draw(t, "salt")
			if s.form == enginehash.Plain && s.scheme != "sglang" {
				s.lora = rapid.SampledFrom([]string{"", "", "adapter"}).Draw(t, "lora")
			}
			from := rapid.IntRange(0, s.len()-1).Draw(t, "from")
			return s, from, rapid.IntRange(from+1, s.len()).Draw(t, "to")
		}
		for range rapid.IntRange(1, 12).Draw(t, "batches") {
			s, from, to := draw()
			tier := rapid.SampledFrom([]event.Tier{event.GPU, event.GPU, event.CPU, event.Storage, "ATTIC"}).Draw(t, "tier")
			var ev event.Event
			delta := 1
			switch rapid.IntRange(0, 4).Draw(t, "what") {
			case 0, 1:
				ev = s.unnamed(t, tier, from, to)
			case 2, 3:
				ev = s.stored(t, tier, from, to)
			default:
				ev, delta = s.evicted(t, tier, from, to), -1
			}
			for _, h := range s.names(t)[from:to] {
				at := plainPlace{s.group.Index(), h, tier}
				held[at] = max(0, held[at]+delta)
			}
			known[s.group.Index()] = known[s.group.Index()] || delta > 0
			m := pub.message(t, []event.Event{ev})
			apply(t, x, m)
			apply(t, names, m)
			x.Tell(base.says(pub))
			names.Tell(pub.status(event.StateLive, ""))

			ask, _, _ := draw()
			var groups []spoken
			for _, g := range layout {
				if g.spec.HoldsPrefix() && known[g.group.Index()] {
					one := ask
					one.size, one.group, one.spec = g.size, g.group, g.spec
					groups = append(groups, one)
				}
			}
			r := &prefix.Request{Model: "m", Tokens: ask.tokens, LoRA: ask.lora, Salt: ask.salt}
			got, named := lookup(t, x, r).Matches[0], lookup(t, names, r).Matches[0]
			var want []event.Tier
			if len(groups) > 0 {
				want = held.answer(t, groups)
			}
			checkMatch(t, &got, want)
			if isByHash := got.MatchedBy == "engine_hash"; isByHash != (named.Blocks < got.Blocks) || !isByHash && !cmp.Equal(got, named) {
				t.Fatalf("by names %+v, in all %+v", named, got)
			}
		}
	})
}

// checkMatch compares a match with the tier of each block.
func checkMatch(t *rapid.T, got *prefix.Match, want []event.Tier) {
	device, onDevice := 0, true
	counts := make(map[event.Tier]int)
	for _, tier := range want {
		counts[tier]++
		if onDevice = onDevice && tier.Warmth() == 0; onDevice {
			device++
		}
	}
	for _, tier := range got.Tiers {
		if counts[tier.Tier] != tier.Blocks {
			t.Fatalf("%d blocks in %s, want %v", tier.Blocks, tier.Tier, want)
		}
	}
	if got.Blocks != len(want) || got.DeviceBlocks != device || len(got.Tiers) != len(counts) {
		t.Fatalf("got %+v, want %s", got, strings.Join(tierNames(want), " "))
	}
}

func tierNames(tiers []event.Tier) []string {
	names := make([]string, len(tiers))
	for i, t := range tiers {
		names[i] = string(t)
	}
	return names
}

// BenchmarkLookupByEngineHash asks for a prompt of 64 blocks without names.
func BenchmarkLookupByEngineHash(b *testing.B) {
	s := spoken{prompt(1, 64), "sha256", "0", enginehash.Plain}
	x, _ := newIndex()
	pub := newPublisher(engine("e1"), false)
	pub.tell(b, x, s.unnamed(b, event.GPU, 0, 64))
	x.Tell(s.says(pub))
	ask := &prefix.Request{Model: "m", Tokens: s.tokens}
	b.ReportAllocs()
	for b.Loop() {
		if lookup(b, x, ask).Matches[0].Blocks != 64 {
			b.Fatal("not all found")
		}
	}
}
