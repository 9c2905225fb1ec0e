package prefix_test

import (
	"errors"
	"strings"
	"testing"
	"time"

	"kvstrata/event"
	"kvstrata/event/resident"
	"kvstrata/indexer/prefix"

	"github.com/google/go-cmp/cmp"
)

// held is the part of a match that a table compares.
type held struct {
	Blocks, Tokens, Device int
	Tiers                  []prefix.Tier
}

func heldOf(m prefix.Match) held { return held{m.Blocks, m.Tokens, m.DeviceBlocks, m.Tiers} }

// onGPU is n blocks of 16 tokens, all on the device.
func onGPU(n int) held {
	if n == 0 {
		return held{Tiers: []prefix.Tier{}}
	}
	return held{n, 16 * n, n, []prefix.Tier{{Tier: event.GPU, Blocks: n, Tokens: 16 * n}}}
}

func (c chain) with(change func(*chain)) chain {
	change(&c)
	return c
}

func TestLookup(t *testing.T) {
	p := prompt(1, 4)
	full := p.with(func(c *chain) { c.group, c.spec = 0, event.SpecFull })
	mla := p.with(func(c *chain) { c.group, c.spec = 1, event.SpecMLA })
	window := p.with(func(c *chain) { c.group, c.spec = 1, event.SpecSlidingWindow })
	fine := p.with(func(c *chain) { c.group, c.spec, c.size = 1, event.SpecFull, 4 })
	eagle := p.with(func(c *chain) { c.eagle = true })
	lora := p.with(func(c *chain) { c.lora = "adapter" })
	salted := p.with(func(c *chain) { c.salt = "tenant-a" })
	alias := p.with(func(c *chain) { c.alias = 1 })
	long := p.with(func(c *chain) { c.long = true })
	tail := chain{tokens: p.tokens[16:], size: 16, group: event.NoGroup}
	remote := p.stored(event.GPU, 0, 4)
	remote.Locality = event.Remote
	extra := p.stored(event.GPU, 0, 4)
	extra.Terms = []uint64{0, 7, 0, 0}
	type batches = [][]event.Event
	for _, c := range []struct {
		name    string
		batches batches
		ask     chain
		want    held
	}{
		{"all of it", batches{{p.stored(event.GPU, 0, 4)}}, p, onGPU(4)},
		{"hashes of 32 bytes", batches{{long.stored(event.GPU, 0, 4)}, {long.evicted(event.GPU, 3, 4)}}, p, onGPU(3)},
		{"told in two runs", batches{{p.stored(event.GPU, 0, 1)}, {p.stored(event.GPU, 1, 4)}}, p, onGPU(4)},
		{"a prompt longer than what is held", batches{{p.stored(event.GPU, 0, 4)}}, prompt(1, 6), onGPU(4)},
		{"a prompt shorter than what is held", batches{{p.stored(event.GPU, 0, 4)}}, prompt(1, 2), onGPU(2)},
		{"a last block that is not full", batches{{p.stored(event.GPU, 0, 4)}}, chain{tokens: text(1, 47)}, onGPU(2)},
		{"another prompt", batches{{p.stored(event.GPU, 0, 4)}}, prompt(2, 4), onGPU(0)},
		{"a hole in the middle stops the walk", batches{{p.stored(event.GPU, 0, 4)}, {p.evicted(event.GPU, 1, 2)}}, p, onGPU(1)},
		{"the hole is filled", batches{{p.stored(event.GPU, 0, 4)}, {p.evicted(event.GPU, 1, 2)}, {p.stored(event.GPU, 1, 2)}}, p, onGPU(4)},
		{"without its first block", batches{{p.stored(event.GPU, 0, 4)}, {p.evicted(event.GPU, 0, 1)}}, p, onGPU(0)},
		{"blocks of a later position", batches{{tail.stored(event.GPU, 0, 3)}}, p, onGPU(0)},
		{"two copies, one evicted", batches{{p.stored(event.GPU, 0, 4)}, {p.stored(event.GPU, 0, 4)}, {p.evicted(event.GPU, 0, 4)}}, p, onGPU(4)},
		{"two copies, both evicted", batches{{p.stored(event.GPU, 0, 4)}, {p.stored(event.GPU, 0, 4)}, {p.evicted(event.GPU, 0, 4)}, {p.evicted(event.GPU, 0, 4)}}, p, onGPU(0)},
		{"two engine hashes, one evicted", batches{{p.stored(event.GPU, 0, 4)}, {alias.stored(event.GPU, 0, 4)}, {p.evicted(event.GPU, 0, 4)}}, p, onGPU(4)},
		{"evicted and stored again", batches{{p.stored(event.GPU, 0, 4)}, {p.evicted(event.GPU, 0, 4)}, {p.stored(event.GPU, 0, 4)}}, p, onGPU(4)},
		{"cleared", batches{{p.stored(event.GPU, 0, 4)}, {cleared(event.ByEngine)}}, p, onGPU(0)},
		{"stored after it was cleared", batches{{p.stored(event.GPU, 0, 4)}, {cleared(event.ByEngine), p.stored(event.GPU, 0, 2)}}, p, onGPU(2)},
		{"orphans have no name", batches{{p.stored(event.GPU, 2, 4)}, {p.stored(event.GPU, 0, 1)}}, p, onGPU(1)},
		{"orphans whose parent came later", batches{{p.stored(event.GPU, 2, 4)}, {p.stored(event.GPU, 0, 2)}}, p, onGPU(4)},
		{"remote blocks", batches{{remote}}, p, onGPU(0)},
		{"a block with an image is not its tokens alone", batches{{extra}}, p, onGPU(1)},
		{"an adapter's blocks, asked without it", batches{{lora.stored(event.GPU, 0, 4)}}, p, onGPU(0)},
		{"an adapter's blocks, asked with it", batches{{lora.stored(event.GPU, 0, 2)}, {lora.stored(event.GPU, 2, 4)}}, lora, onGPU(4)},
		{"the base model's blocks, asked with an adapter", batches{{p.stored(event.GPU, 0, 4)}}, lora, onGPU(0)},
		{"salted blocks, asked without the salt", batches{{salted.stored(event.GPU, 0, 4)}}, p, onGPU(0)},
		{"salted blocks, asked with it", batches{{salted.stored(event.GPU, 0, 2)}, {salted.stored(event.GPU, 2, 4)}}, salted, onGPU(4)},
		{"eagle's blocks end a token later", batches{{eagle.stored(event.GPU, 0, 3)}}, p, onGPU(3)},
		{"eagle's blocks in two runs", batches{{eagle.stored(event.GPU, 0, 1)}, {eagle.stored(event.GPU, 1, 3)}}, p, onGPU(3)},
		{"in an offload tier alone", batches{{p.stored(event.GPU, 0, 2), p.offloaded(event.CPU, 0, 2), p.evicted(event.GPU, 0, 2)}}, p, held{
			2, 32, 0, []prefix.Tier{{Tier: event.CPU, Blocks: 2, Tokens: 32}},
		}},
		{"on the device and in host memory", batches{{p.stored(event.GPU, 0, 2)}, {p.offloaded(event.CPU, 0, 2)}}, p, onGPU(2)},
		{"in host memory first", batches{{p.stored(event.CPU, 0, 2)}, {p.stored(event.GPU, 0, 2)}}, p, onGPU(2)},
		{"the copy on the device went", batches{{p.stored(event.GPU, 0, 3)}, {p.offloaded(event.CPU, 0, 3)}, {p.evicted(event.GPU, 1, 3)}}, p, held{
			3, 48, 1, []prefix.Tier{{Tier: event.GPU, Blocks: 1, Tokens: 16}, {Tier: event.CPU, Blocks: 2, Tokens: 32}},
		}},
		{"the prefix on the device ends at the first colder block", batches{{p.stored(event.GPU, 0, 2)}, {p.stored(event.CPU, 2, 3)}, {p.stored(event.GPU, 3, 4)}}, p, held{
			4, 64, 2, []prefix.Tier{{Tier: event.GPU, Blocks: 3, Tokens: 48}, {Tier: event.CPU, Blocks: 1, Tokens: 16}},
		}},
		{"no medium is the device", batches{{p.stored("", 0, 2)}}, p, held{
			2, 32, 2, []prefix.Tier{{Tier: "", Blocks: 2, Tokens: 32}},
		}},
		{"a tier with an unknown name is the coldest", batches{{p.stored("TAPE", 0, 2)}, {p.stored(event.Storage, 0, 1)}}, p, held{
			2, 32, 0, []prefix.Tier{{Tier: event.Storage, Blocks: 1, Tokens: 16}, {Tier: "TAPE", Blocks: 1, Tokens: 16}},
		}},
		{"of equally warm tiers the first by name, the later one told first", batches{{p.stored("TAPE", 0, 1)}, {p.stored("ATTIC", 0, 1)}}, p, held{
			1, 16, 0, []prefix.Tier{{Tier: "ATTIC", Blocks: 1, Tokens: 16}},
		}},
		{"of equally warm tiers the first by name, told first", batches{{p.stored("ATTIC", 0, 1)}, {p.stored("TAPE", 0, 1)}}, p, held{
			1, 16, 0, []prefix.Tier{{Tier: "ATTIC", Blocks: 1, Tokens: 16}},
		}},
		{"a sliding window's blocks alone", batches{{window.stored(event.GPU, 0, 4)}}, p, onGPU(0)},
		{"a sliding window does not shorten", batches{{full.stored(event.GPU, 0, 4), window.stored(event.GPU, 3, 4)}}, p, onGPU(4)},
		{"a sliding window does not lengthen", batches{{full.stored(event.GPU, 0, 2), window.stored(event.GPU, 0, 4)}}, p, onGPU(2)},
		{"two groups that hold prefixes", batches{{full.stored(event.GPU, 0, 4), mla.stored(event.GPU, 0, 3)}}, p, onGPU(3)},
		{"a hole in one of two groups", batches{{full.stored(event.GPU, 0, 4), mla.stored(event.GPU, 0, 4)}, {mla.evicted(event.GPU, 2, 3)}}, p, onGPU(2)},
		{"two groups, in the colder one's tier", batches{{full.stored(event.GPU, 0, 2), mla.stored(event.GPU, 0, 1), mla.stored(event.CPU, 1, 2)}}, p, held{
			2, 32, 1, []prefix.Tier{{Tier: event.GPU, Blocks: 1, Tokens: 16}, {Tier: event.CPU, Blocks: 1, Tokens: 16}},
		}},
		{"two groups of different block sizes, in steps of both", batches{{full.stored(event.GPU, 0, 3), fine.stored(event.GPU, 0, 11)}}, p, onGPU(2)},
		{"two groups of different block sizes, a colder fine block", batches{{full.stored(event.GPU, 0, 2), fine.stored(event.GPU, 0, 5), fine.stored(event.CPU, 5, 8)}}, p, held{
			2, 32, 1, []prefix.Tier{{Tier: event.GPU, Blocks: 1, Tokens: 16}, {Tier: event.CPU, Blocks: 1, Tokens: 16}},
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			x, _ := newIndex()
			pub := newPublisher(engine("e1"), false)
			for _, events := range c.batches {
				pub.tell(t, x, events...)
			}
			a := lookup(t, x, &prefix.Request{Model: "m", Tokens: c.ask.tokens, LoRA: c.ask.lora, Salt: c.ask.salt})
			if diff := cmp.Diff(c.want, heldOf(a.Matches[0])); diff != "" {
				t.Error(diff)
			}
			// Whoever joins late knows the same.
			late, _ := newIndex()
			restore(t, late, pub.checkpoint(t))
			a = lookup(t, late, &prefix.Request{Model: "m", Tokens: c.ask.tokens, LoRA: c.ask.lora, Salt: c.ask.salt})
			if diff := cmp.Diff(c.want, heldOf(a.Matches[0])); diff != "" {
				t.Errorf("from a checkpoint: %s", diff)
			}
		})
	}
}

func TestLookupByHashes(t *testing.T) {
	x, _ := newIndex()
	coarse, fine := prompt(1, 4), prompt(1, 4)
	fine.size = 4
	newPublisher(engine("e16"), false).tell(t, x, coarse.stored(event.GPU, 0, 3))
	newPublisher(engine("e4"), false).tell(t, x, fine.stored(event.GPU, 0, 5))
	for _, c := range []struct {
		name      string
		hashes    []event.PrefixHash
		blockSize uint32
		want      map[string]int // blocks by instance
	}{
		{"every block size is tried", coarse.hashes(), 0, map[string]int{"e16": 3, "e4": 0}},
		{"the fine ones", fine.hashes(), 0, map[string]int{"e16": 0, "e4": 5}},
		{"of a block size", coarse.hashes(), 16, map[string]int{"e16": 3, "e4": 0}},
		{"of another block size", coarse.hashes(), 4, map[string]int{"e16": 0, "e4": 0}},
		{"without the first", coarse.hashes()[3:], 16, map[string]int{"e16": 0, "e4": 0}},
		{"none", nil, 16, map[string]int{"e16": 0, "e4": 0}},
	} {
		t.Run(c.name, func(t *testing.T) {
			a := lookup(t, x, &prefix.Request{Model: "m", Hashes: c.hashes, BlockSize: c.blockSize})
			got := make(map[string]int)
			for _, m := range a.Matches {
				got[m.Source.Instance] = m.Blocks
			}
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Error(diff)
			}
			if a.Blocks != len(c.hashes) {
				t.Errorf("asked for %d blocks, want %d", a.Blocks, len(c.hashes))
			}
		})
	}
}

func TestLookupOrdersAndFiltersSources(t *testing.T) {
	x, _ := newIndex()
	p := prompt(1, 4)
	for _, s := range []struct {
		source event.Source
		tier   event.Tier
		blocks int
	}{
		{engine("short"), event.GPU, 1},
		{engine("cold"), event.CPU, 3},
		{engine("warm"), event.GPU, 3},
		{event.Source{Cluster: "other", Model: "m", Instance: "long", Rank: 2, Origin: event.Connector}, event.GPU, 4},
		{event.Source{Cluster: "c", Model: "another", Instance: "e", Origin: event.Engine}, event.GPU, 4},
	} {
		newPublisher(s.source, false).tell(t, x, p.stored(s.tier, 0, s.blocks))
	}
	instances := func(r *prefix.Request) (names []string) {
		for _, m := range lookup(t, x, r).Matches {
			names = append(names, m.Source.Instance)
		}
		return names
	}
	if diff := cmp.Diff([]string{"long", "warm", "cold", "short"}, instances(&prefix.Request{Model: "m", Tokens: p.tokens})); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff([]string{"warm", "cold", "short"}, instances(&prefix.Request{Model: "m", Cluster: "c", Tokens: p.tokens})); diff != "" {
		t.Error(diff)
	}
	if got := instances(&prefix.Request{Model: "m", Cluster: "nowhere", Tokens: p.tokens}); len(got) > 0 {
		t.Errorf("an unknown cluster has no sources, got %v", got)
	}
}

func TestLookupUnderAHashKey(t *testing.T) {
	judge := resident.New(resident.Config{Hasher: event.NewHasher("secret"), MaxNames: 8})
	pub := newPublisher(engine("e1"), false)
	pub.judge = judge
	p := prompt(1, 2)
	m := pub.message(t, []event.Event{p.stored(event.GPU, 0, 2)})
	for key, want := range map[string]int{"secret": 2, "": 0, "other": 0} {
		cfg := prefix.DefaultConfig()
		cfg.HashKey = key
		x := prefix.New(cfg)
		apply(t, x, m)
		if got := lookup(t, x, &prefix.Request{Model: "m", Tokens: p.tokens}).Matches[0].Blocks; got != want {
			t.Errorf("key %q: %d blocks, want %d", key, got, want)
		}
	}
}

func TestRequestValidate(t *testing.T) {
	tokens, hashes := []uint32{1}, []event.PrefixHash{1}
	for _, c := range []struct {
		name string
		req  prefix.Request
		want []string // what the error tells
	}{
		{"by tokens", prefix.Request{Model: "m", Tokens: tokens, LoRA: "l", Salt: "s", Cluster: "c"}, nil},
		{"by hashes", prefix.Request{Model: "m", Hashes: hashes, BlockSize: 16}, nil},
		{"no model", prefix.Request{Tokens: tokens}, []string{"model: missing"}},
		{"tokens and hashes", prefix.Request{Model: "m", Tokens: tokens, Hashes: hashes}, []string{"token_ids, prefix_hashes"}},
		{"hashes and an adapter", prefix.Request{Model: "m", Hashes: hashes, LoRA: "l"}, []string{"lora_name, cache_salt"}},
		{"hashes and a salt", prefix.Request{Model: "m", Hashes: hashes, Salt: "s"}, []string{"lora_name, cache_salt"}},
		{"tokens and a block size", prefix.Request{Model: "m", Tokens: tokens, BlockSize: 16}, []string{"block_size"}},
		{"everything at once", prefix.Request{Tokens: tokens, Hashes: hashes, Salt: "s", BlockSize: 1}, []string{
			"model: missing", "token_ids, prefix_hashes", "lora_name, cache_salt", "block_size",
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			err := c.req.Validate()
			if (err != nil) != (c.want != nil) {
				t.Fatalf("got %v", err)
			}
			for _, part := range c.want {
				if !strings.Contains(err.Error(), part) {
					t.Errorf("%q does not tell of %q", err, part)
				}
			}
		})
	}
}

func TestLookupOfAnUnknownModel(t *testing.T) {
	x, _ := newIndex()
	_, err := x.Lookup(&prefix.Request{Model: "none"})
	if !errors.Is(err, prefix.ErrUnknownModel) || !strings.Contains(err.Error(), "known: none yet") {
		t.Errorf("got %v", err)
	}
	x.Tell(newPublisher(engine("e1"), false).status(event.StateLive, ""))
	x.Tell(newPublisher(event.Source{Model: "a/b"}, false).status(event.StateLive, ""))
	_, err = x.Lookup(&prefix.Request{Model: "none"})
	if !errors.Is(err, prefix.ErrUnknownModel) || !strings.Contains(err.Error(), "known: a/b, m") {
		t.Errorf("got %v", err)
	}
}

func TestStatesInLookups(t *testing.T) {
	p := prompt(1, 2)
	for _, c := range []struct {
		name    string
		told    event.State
		silence time.Duration
		want    event.State
		counted bool
		reason  string
	}{
		{"live", event.StateLive, 0, event.StateLive, true, "said"},
		{"recovering", event.StateRecovering, 0, event.StateRecovering, true, "said"},
		{"partial", event.StatePartial, 0, event.StatePartial, true, "said"},
		{"stale", event.StateStale, 0, event.StateStale, false, "said"},
		{"gone", event.StateGone, 0, event.StateGone, false, "said"},
		{"live, a minute ago", event.StateLive, time.Minute, event.StateLive, true, "said"},
		{"live, but silent", event.StateLive, time.Minute + time.Second, event.StateStale, false, "no word from its subscriber for 1m1s"},
		{"recovering, but silent", event.StateRecovering, time.Hour, event.StateStale, false, "no word from its subscriber for 1h0m0s"},
		{"gone, and silent", event.StateGone, time.Hour, event.StateGone, false, "said"},
	} {
		t.Run(c.name, func(t *testing.T) {
			x, now := newIndex()
			pub := newPublisher(engine("e1"), false)
			pub.tell(t, x, p.stored(event.GPU, 0, 2))
			x.Tell(pub.status(c.told, "said"))
			now.now = now.now.Add(c.silence)
			a := lookup(t, x, &prefix.Request{Model: "m", Tokens: p.tokens})
			if !c.counted {
				want := []prefix.LeftOut{{Source: pub.source, State: c.want, Reason: c.reason}}
				if diff := cmp.Diff(want, a.LeftOut); diff != "" || len(a.Matches) > 0 {
					t.Errorf("%v\n%s", a.Matches, diff)
				}
				return
			}
			if len(a.Matches) != 1 || len(a.LeftOut) > 0 {
				t.Fatalf("got %+v", a)
			}
			m := a.Matches[0]
			if m.State != c.want || m.Reason != c.reason || m.Blocks != 2 || m.Epoch != 1 || m.Seq != 0 {
				t.Errorf("got %+v", m)
			}
		})
	}
}

func TestBatchesBreakTheSilence(t *testing.T) {
	x, now := newIndex()
	pub := newPublisher(engine("e1"), false)
	p := prompt(1, 2)
	pub.tell(t, x, p.stored(event.GPU, 0, 1))
	x.Tell(pub.status(event.StateLive, ""))
	now.now = now.now.Add(time.Minute)
	pub.tell(t, x, p.stored(event.GPU, 1, 2))
	now.now = now.now.Add(time.Minute)
	if a := lookup(t, x, &prefix.Request{Model: "m", Tokens: p.tokens}); len(a.Matches) != 1 || a.Matches[0].Blocks != 2 {
		t.Errorf("got %+v", a)
	}
}
