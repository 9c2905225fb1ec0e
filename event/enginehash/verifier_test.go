package enginehash_test

import (
	"bytes"
	"fmt"
	"slices"
	"strings"
	"testing"

	"kvstrata/event"
	"kvstrata/event/enginehash"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/tinylib/msgp/msgp"
)

// teller tells runs as an engine does that names blocks by a scheme.
type teller struct {
	t      testing.TB
	recipe enginehash.Recipe
	form   enginehash.Form
	whole  bool // events carry whole digests
	size   int
}

func newTeller(t testing.TB, scheme, seed string) *teller {
	t.Helper()
	recipe, err := enginehash.ParseRecipe(scheme, seed)
	if err != nil {
		t.Fatal(err)
	}
	return &teller{t: t, recipe: recipe, form: enginehash.Plain, size: 16}
}

// blockKeys are the extra keys of each block of a prompt.
type blockKeys func(i int) []enginehash.Key

func text(int) []enginehash.Key { return nil }

func (e *teller) name(d enginehash.Digest) event.BlockHash {
	if e.whole {
		return d.FullName()
	}
	return e.recipe.Scheme.Name(d)
}

// stored tells blocks from up to, but without, to, of the prompt of so many tokens that begins with first.
func (e *teller) stored(first uint32, from, to int, keys blockKeys) *event.Event {
	e.t.Helper()
	ev := &event.Event{Kind: event.Stored, Tier: event.GPU, Group: event.NoGroup, LoRAID: event.NoLoRAID, BlockSize: uint32(e.size)}
	hasher := enginehash.NewHasher(e.recipe.Scheme, e.form)
	parent := e.recipe.Root
	for i := range to {
		tokens := make([]uint32, e.size)
		for j := range tokens {
			tokens[j] = first + uint32(i*e.size+j)
		}
		d, err := hasher.Block(parent, tokens, keys(i))
		if err != nil {
			e.t.Fatal(err)
		}
		if i == from && i > 0 {
			ev.HasParent, ev.Parent = true, e.name(parent)
		}
		if i >= from {
			ev.Blocks = append(ev.Blocks, event.Block{Hash: e.name(d)})
			ev.Tokens = append(ev.Tokens, tokens...)
			ev.ExtraKeys = append(ev.ExtraKeys, encodeKeys(keys(i)))
			for _, k := range keys(i) {
				if k.Kind == enginehash.KeyLoRA {
					ev.LoRA = k.Text
				}
			}
		}
		parent = d
	}
	return ev
}

// encodeKeys writes extra keys as events carry them: plain.
func encodeKeys(keys []enginehash.Key) []byte {
	if len(keys) == 0 {
		return nil
	}
	b := msgp.AppendArrayHeader(nil, uint32(len(keys)))
	for _, k := range keys {
		switch k.Kind {
		case enginehash.KeyItem:
			b = msgp.AppendArrayHeader(b, 2)
			b = msgp.AppendInt64(msgp.AppendString(b, k.Text), k.Offset)
		case enginehash.KeyEmbeds:
			b = msgp.AppendBytes(b, []byte(k.Text))
		default:
			b = msgp.AppendString(b, k.Text)
		}
	}
	return b
}

func newVerifier(t testing.TB, edit func(*enginehash.Config)) *enginehash.Verifier {
	t.Helper()
	cfg := enginehash.DefaultConfig()
	cfg.Every = 1
	if edit != nil {
		edit(&cfg)
	}
	v, err := enginehash.NewVerifier(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return v
}

const secret = "20251130"

func TestVerifierFindsEveryScheme(t *testing.T) {
	for _, c := range []struct{ scheme, seed, name string }{
		{"sha256", "vllm-none-hash", "default"},
		{"sha256", "0", "0"},
		{"sha256", "random", `"random"`},
		{"sha256", secret, "configured"},
		{"sha256_cbor", "vllm-none-hash", "default"},
		{"sha256_cbor", "0", "0"},
		{"xxhash", "0", "0"},
		{"xxhash", secret, "configured"},
		{"xxhash_cbor", "0", "0"},
		{"sglang", "", ""},
	} {
		for _, whole := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s seed %s whole=%v", c.scheme, c.name, whole), func(t *testing.T) {
				e := newTeller(t, c.scheme, c.seed)
				e.whole = whole
				v := newVerifier(t, func(cfg *enginehash.Config) { cfg.Seed = secret })
				v.Observe(1, e.stored(1, 0, 3, text))
				v.Observe(2, e.stored(1, 3, 7, text))
				v.Observe(3, e.stored(9000, 0, 2, text))
				want := event.HashContract{Verdict: event.HashesVerified, Scheme: c.scheme, Seed: c.name, Verified: 9}
				if diff := cmp.Diff(want, v.Contract()); diff != "" {
					t.Error(diff)
				}
				scheme, seed, ok := v.Recipe()
				if scheme != c.scheme || seed != c.seed || !ok {
					t.Errorf("recipe %s %s %v", scheme, seed, ok)
				}
				if strings.Contains(fmt.Sprint(v.Contract()), secret) {
					t.Error("the contract holds the configured seed")
				}
			})
		}
	}
}

func TestVerifierOfARawRoot(t *testing.T) {
	seed := "root:" + strings.Repeat("ab", 32)
	e := newTeller(t, "xxhash", seed)
	v := newVerifier(t, func(cfg *enginehash.Config) { cfg.Seed = seed })
	v.Observe(1, e.stored(1, 0, 3, text))
	want := event.HashContract{Verdict: event.HashesVerified, Scheme: "xxhash", Seed: "configured", Verified: 3}
	if diff := cmp.Diff(want, v.Contract()); diff != "" {
		t.Error(diff)
	}
}

func TestVerifierOfARandomRoot(t *testing.T) {
	e := newTeller(t, "sha256", "root:"+strings.Repeat("5a", 32))
	v := newVerifier(t, nil)
	for i := range event.Seq(2) {
		v.Observe(i, e.stored(uint32(1+1000*i), 0, 3, text))
	}
	if got := v.Contract().Verdict; got != event.HashesUnknown {
		t.Errorf("after two runs: %v", got)
	}
	v.Observe(2, e.stored(5000, 0, 3, text))
	want := event.HashContract{Verdict: event.HashesDiffer, Skipped: 9}
	if diff := cmp.Diff(want, v.Contract(), ignoreReason); diff != "" {
		t.Error(diff)
	}
	if got := v.Contract().Reason; !strings.HasPrefix(got, "block hashes match no known scheme") {
		t.Errorf("reason %q", got)
	}
	if _, _, ok := v.Recipe(); ok {
		t.Error("there is a recipe")
	}

	// Where events carry whole digests, all but first blocks can be compared.
	e.whole = true
	v.Reset()
	v.Observe(1, e.stored(1, 0, 3, text))
	v.Observe(2, e.stored(1, 3, 7, text))
	want = event.HashContract{Verdict: event.HashesVerified, Scheme: "sha256", Seed: "unknown", Verified: 4, Skipped: 3}
	if diff := cmp.Diff(want, v.Contract(), ignoreReason); diff != "" {
		t.Error(diff)
	}
	if _, _, ok := v.Recipe(); ok {
		t.Error("there is a recipe without a root")
	}
}

func TestVerifierLearnsTheRootLater(t *testing.T) {
	e := newTeller(t, "sha256_cbor", "0")
	e.whole = true
	v := newVerifier(t, nil)
	v.Observe(1, e.stored(1, 3, 7, text)) // joined late
	if got := v.Contract(); got.Seed != "unknown" || got.Verified != 4 {
		t.Errorf("got %+v", got)
	}
	v.Observe(2, e.stored(500, 0, 2, text))
	if got := v.Contract(); got.Seed != "0" || got.Verified != 6 {
		t.Errorf("got %+v", got)
	}
}

func TestVerifierWithExtraKeys(t *testing.T) {
	image := func(i int) []enginehash.Key {
		return []enginehash.Key{{Kind: enginehash.KeyItem, Text: "image", Offset: int64(3 - 16*i)}}
	}
	salted := func(i int) []enginehash.Key {
		if i > 0 {
			return nil
		}
		return []enginehash.Key{{Kind: enginehash.KeySalt, Text: "pepper"}}
	}
	adapter := func(int) []enginehash.Key {
		return []enginehash.Key{{Kind: enginehash.KeyLoRA, Text: "french", Path: "/loras/french"}}
	}
	embeds := func(int) []enginehash.Key {
		return []enginehash.Key{{Kind: enginehash.KeyEmbeds, Text: strings.Repeat("e", 32)}}
	}
	for _, form := range []enginehash.Form{enginehash.Plain, enginehash.Tagged} {
		t.Run(form.String(), func(t *testing.T) {
			e := newTeller(t, "sha256", "0")
			e.form = form
			v := newVerifier(t, nil)
			v.Observe(1, e.stored(1, 0, 2, text))
			for i, keys := range []blockKeys{image, salted, embeds, adapter} {
				v.Observe(event.Seq(2*i), e.stored(1, 0, 2, keys))
				v.Observe(event.Seq(2*i+1), e.stored(1, 2, 4, keys))
			}
			want := event.HashContract{Verdict: event.HashesVerified, Scheme: "sha256", Seed: "0", Keys: form.String(), Verified: 18}
			if form == enginehash.Tagged {
				want.Verified, want.Skipped = 14, 4
				want.Reason = "adapters are hashed with their path since vLLM 0.31, which events do not tell"
			}
			if diff := cmp.Diff(want, v.Contract()); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestVerifierTellsTheFirstDifference(t *testing.T) {
	e := newTeller(t, "sha256", "0")
	v := newVerifier(t, nil)
	v.Observe(1, e.stored(1, 0, 4, text))
	odd := e.stored(1, 4, 8, func(i int) []enginehash.Key {
		if i < 5 {
			return nil
		}
		return []enginehash.Key{{Kind: enginehash.KeyItem, Text: "image"}}
	})
	odd.ExtraKeys[1] = encodeKeys([]enginehash.Key{{Kind: enginehash.KeyItem, Text: "secret image", Offset: 3}})
	v.Observe(17, odd)
	v.Observe(18, e.stored(800, 0, 1, text))
	want := event.HashContract{
		Verdict: event.HashesDiffer, Scheme: "sha256", Seed: "0", Verified: 6, Differ: 1, Skipped: 2,
		Reason: "scheme sha256 with seed 0 explains 6 of 7 blocks; first difference: multimodal run in batch 17",
	}
	if diff := cmp.Diff(want, v.Contract()); diff != "" {
		t.Error(diff)
	}
}

const cantHash = "blocks that can't be hashed: extra keys of another kind, pairs of tokens (EAGLE) outside SGLang, or too long for one frame of pickle"

func TestVerifierSkips(t *testing.T) {
	e := newTeller(t, "sha256", "0")
	for _, c := range []struct {
		name    string
		edit    func(*event.Event)
		skipped uint64
		reason  string
	}{
		{"a placeholder", func(ev *event.Event) { ev.Tokens, ev.BlockSize = nil, 0 }, 2, "runs without tokens can't be compared"},
		{"blocks that tokens do not fill", func(ev *event.Event) { ev.Tokens = ev.Tokens[1:] }, 2, "tokens that do not fill their blocks can't be compared"},
		{"pairs of tokens", func(ev *event.Event) { ev.Eagle, ev.Tokens = true, append(ev.Tokens, 1) }, 2, cantHash},
		{"exotic extra keys", func(ev *event.Event) { ev.ExtraKeys[1] = []byte{0x91, 0xc3} }, 1, cantHash},
		{"a block too long", func(ev *event.Event) {
			ev.Blocks, ev.BlockSize, ev.Tokens = ev.Blocks[:1], 1<<15, make([]uint32, 1<<15)
		}, 1, cantHash},
		{"an unknown parent", func(ev *event.Event) { ev.HasParent, ev.Parent = true, event.IntHash(7) }, 2, ""},
		{"no STORED", func(ev *event.Event) { ev.Kind = event.Evicted }, 0, ""},
		{"no blocks", func(ev *event.Event) { ev.Blocks = nil }, 0, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			v := newVerifier(t, nil)
			v.Observe(1, e.stored(500, 0, 1, text))
			ev := e.stored(1, 0, 2, text)
			c.edit(ev)
			v.Observe(2, ev)
			got := v.Contract()
			if got.Verdict != event.HashesVerified || got.Skipped != c.skipped || got.Reason != c.reason {
				t.Errorf("got %+v", got)
			}
		})
	}
}

// Hybrid models hash at the smallest block size: a group of larger blocks takes the last of the hashes within each.
func TestVerifierOfSeveralGroups(t *testing.T) {
	e := newTeller(t, "sha256", "0")
	v := newVerifier(t, nil)
	small := e.stored(1, 0, 4, text)
	large := e.stored(1, 0, 4, text)
	large.Group, large.BlockSize = 1, 32
	large.Blocks = []event.Block{large.Blocks[1], large.Blocks[3]}
	large.ExtraKeys = nil
	v.Observe(1, small)
	v.Observe(1, large)
	got := v.Contract()
	if got.Verdict != event.HashesVerified || got.Verified != 4 || got.Skipped != 2 || !strings.Contains(got.Reason, "several block sizes") {
		t.Errorf("got %+v", got)
	}

	// Of equal sizes every group is compared.
	v.Reset()
	second := e.stored(1, 0, 4, text)
	second.Group = 1
	v.Observe(1, small)
	v.Observe(1, second)
	if got := v.Contract(); got.Verified != 8 || got.Skipped != 0 {
		t.Errorf("got %+v", got)
	}
}

func TestVerifierKeepsItsBudget(t *testing.T) {
	e := newTeller(t, "sha256", "0")
	v := newVerifier(t, func(cfg *enginehash.Config) { cfg.Burst, cfg.Every = 100, 10 })
	for i := range 1000 {
		v.Observe(event.Seq(i), e.stored(uint32(i*100), 0, 4, text))
	}
	got := v.Contract()
	if got.Verdict != event.HashesVerified || got.Verified < 400 || got.Verified > 100+400 || got.Verified+got.Skipped != 4000 {
		t.Errorf("got %+v", got)
	}
}

func TestVerifierForgetsTheOldest(t *testing.T) {
	e := newTeller(t, "sha256", "0")
	v := newVerifier(t, func(cfg *enginehash.Config) { cfg.Digests = 4 })
	v.Observe(1, e.stored(1, 0, 2, text))
	v.Observe(2, e.stored(1000, 0, 4, text))
	v.Observe(3, e.stored(1, 2, 4, text)) // its parent is forgotten
	v.Observe(4, e.stored(1000, 4, 6, text))
	if got := v.Contract(); got.Verified != 8 || got.Skipped != 2 {
		t.Errorf("got %+v", got)
	}
}

// TestVerifierOfVLLM feeds the runs that vLLM's own code hashed.
func TestVerifierOfVLLM(t *testing.T) {
	all := readVectors[vector](t, "vllm_hashes.json")
	for _, algo := range []string{"sha256", "sha256_cbor", "xxhash", "xxhash_cbor"} {
		for _, release := range []string{"0.11.2", "0.23.0", "0.25.1", "0.32.0"} {
			t.Run(algo+" "+release, func(t *testing.T) {
				v := newVerifier(t, nil)
				fed := uint64(0)
				for i, vec := range all {
					if vec.Algo != algo || vec.Seed != "0" || !slices.Contains(vec.Versions, release) || vec.Name == "root" {
						continue
					}
					root := vec.Name != "t2" && (vec.Keys == nil || vec.IsRoot)
					if !root && vec.Name != "t2" {
						continue // behind a parent that nobody told
					}
					ev := &event.Event{
						Kind: event.Stored, BlockSize: uint32(len(vec.Tokens)), Tokens: vec.Tokens, LoRA: vec.LoRA, HasParent: !root,
						Blocks: []event.Block{{Hash: event.IntHash(vec.Int)}},
					}
					if !root {
						ev.Parent = enginehash.SHA256.Name(digestOf(t, vec.Parent))
					}
					if vec.Event != "" {
						ev.ExtraKeys = [][]byte{unhex(t, vec.Event)}
					}
					v.Observe(event.Seq(i), ev)
					fed++
				}
				if fed == 0 {
					if release == "0.11.2" && strings.HasPrefix(algo, "xxhash") {
						return // it had none yet
					}
					t.Fatal("no vectors")
				}
				got := v.Contract()
				if got.Differ > 0 || got.Verified+got.Skipped != fed || got.Verified < fed/2 || got.Scheme != algo || got.Seed != "0" {
					t.Errorf("fed %d: %+v", fed, got)
				}
				if release != "0.32.0" && got.Skipped > 0 {
					t.Errorf("skipped %d: %s", got.Skipped, got.Reason)
				}
			})
		}
	}
}

func TestNewVerifierRefusesASeedThatCantBeRead(t *testing.T) {
	cfg := enginehash.DefaultConfig()
	cfg.Seed = "root:xyz"
	if _, err := enginehash.NewVerifier(cfg); err == nil {
		t.Error("no error")
	}
}

var ignoreReason = cmpopts.IgnoreFields(event.HashContract{}, "Reason")

func FuzzDecodeKeys(f *testing.F) {
	for _, v := range readVectors[vector](f, "vllm_hashes.json") {
		if v.Event != "" {
			f.Add(unhex(f, v.Event), v.LoRA, v.IsRoot)
		}
	}
	f.Add([]byte("\x93\x93\xa4lora\xa1n\xa2/p\x93\xa2mm\xa1i\xd3\x80\x00\x00\x00\x00\x00\x00\x00\x92\xaacache_salt\xa1s"), "n", true)
	f.Fuzz(func(t *testing.T, msgpack []byte, lora string, root bool) {
		was := bytes.Clone(msgpack)
		keys, err := enginehash.DecodeKeys(nil, msgpack, lora, root)
		if !bytes.Equal(was, msgpack) {
			t.Fatal("the input was changed")
		}
		if err != nil {
			if len(keys) > 0 {
				t.Fatal("keys beside an error")
			}
			return
		}
		if len(keys) > len(msgpack) {
			t.Fatalf("%d keys of %d bytes", len(keys), len(msgpack))
		}
		// What was read and written again is the same, and can be hashed.
		again, err := enginehash.DecodeKeys(nil, encodeKeys(keys), lora, root)
		if isPlain := !slices.ContainsFunc(keys, func(k enginehash.Key) bool { return k.Path != "" }); isPlain && err != nil {
			t.Fatalf("read again: %v", err)
		} else if isPlain && len(again) != len(keys) {
			t.Fatalf("%d keys became %d", len(keys), len(again))
		}
		for _, s := range enginehash.Schemes()[:4] {
			for _, form := range []enginehash.Form{enginehash.Plain, enginehash.Tagged} {
				_, _ = enginehash.NewHasher(s, form).Block(s.Root("0"), []uint32{1, 2}, keys)
			}
		}
	})
}
