package enginehash_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"kvstrata/event"
	"kvstrata/event/enginehash"

	"github.com/google/go-cmp/cmp"
)

func TestSchemesHaveNames(t *testing.T) {
	for _, s := range enginehash.Schemes() {
		text, err := s.MarshalText()
		if err != nil {
			t.Fatal(err)
		}
		var back enginehash.Scheme
		if err := back.UnmarshalText(text); err != nil || back != s {
			t.Errorf("%s: got %v, %v", text, back, err)
		}
	}
	if _, err := enginehash.ParseScheme("md5"); err == nil || !strings.Contains(err.Error(), "sha256_cbor") {
		t.Errorf("an unknown scheme: %v", err)
	}
}

func TestParseRecipe(t *testing.T) {
	for _, c := range []struct{ scheme, seed, root, err string }{
		{"sha256", "", "066b1e8987e027138e98701c46128929378935f9b6cd1549105ae6b4f0d71198", ""}, // vLLM's default
		{"sha256", "0", "1973e23848344dc43a988a9b478663803cfffe1243480253f9a3cf004b14aa7c", ""},
		{"xxhash_cbor", "0", "1ebe36576dcb573f26b99533a20aaeca", ""},
		{"xxhash", "root:00ff", "00ff", ""},
		{"sglang", "", "", ""},
		{"xxhash", "", "", "random unless PYTHONHASHSEED is set"},
		{"sglang", "0", "", "leave it out"},
		{"sha256", "root:0g", "", "no hexadecimal"},
		{"sha256", "root:", "", "want 1 to 32"},
		{"sha256", "root:" + strings.Repeat("00", 33), "", "want 1 to 32"},
		{"sha512", "0", "", "want one of"},
	} {
		got, err := enginehash.ParseRecipe(c.scheme, c.seed)
		if c.err != "" {
			if err == nil || !strings.Contains(err.Error(), c.err) {
				t.Errorf("%s %q: error %v, want %q", c.scheme, c.seed, err, c.err)
			}
			continue
		}
		if err != nil || got.Root.String() != c.root || got.Scheme.String() != c.scheme {
			t.Errorf("%s %q: %v, %v", c.scheme, c.seed, got, err)
		}
	}
}

func TestIs(t *testing.T) {
	d, err := enginehash.ParseDigest([]byte("0123456789abcdef"))
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name   string
		scheme enginehash.Scheme
		hash   event.BlockHash
		want   bool
	}{
		{"vLLM's integer", enginehash.XXHash, event.BytesHash("89abcdef"), true},
		{"SGLang's integer", enginehash.SGLang, event.BytesHash("01234567"), true},
		{"the other's integer", enginehash.XXHash, event.BytesHash("01234567"), false},
		{"the digest", enginehash.XXHash, event.BytesHash("0123456789abcdef"), true},
		{"another", enginehash.XXHash, event.BytesHash("0123456789abcdeF"), false},
		{"a longer one", enginehash.XXHash, event.BytesHash("0123456789abcdef0"), false},
		{"one longer than any", enginehash.XXHash, event.BytesHash(strings.Repeat("0", 40)), false},
	} {
		if got := c.scheme.Is(c.hash, d); got != c.want {
			t.Errorf("%s: %v", c.name, got)
		}
	}
	if got := enginehash.XXHash.Name(d); got != event.BytesHash("89abcdef") {
		t.Errorf("name %v", got)
	}
	if got := d.FullName(); got != event.BytesHash("0123456789abcdef") {
		t.Errorf("full name %v", got)
	}
}

func TestChain(t *testing.T) {
	tokens := make([]uint32, 40)
	lora, salt := enginehash.Key{Kind: enginehash.KeyLoRA, Text: "a"}, enginehash.Key{Kind: enginehash.KeySalt, Text: "s"}
	for _, c := range []struct {
		name, scheme, lora, salt string
		form                     enginehash.Form
		keys                     [2][]enginehash.Key // of the two full blocks; nil of none: no chain
		none                     bool
	}{
		{name: "text", scheme: "sha256", form: enginehash.Plain},
		{name: "adapter and salt", scheme: "sha256", lora: "a", salt: "s", form: enginehash.Plain, keys: [2][]enginehash.Key{{lora, salt}, {lora}}},
		{name: "salt, tagged", scheme: "xxhash_cbor", salt: "s", form: enginehash.Tagged, keys: [2][]enginehash.Key{{salt}, nil}},
		{name: "adapter, tagged", scheme: "sha256", lora: "a", form: enginehash.Tagged, none: true},
		{name: "SGLang's adapter", scheme: "sglang", lora: "a", form: enginehash.Plain, none: true},
	} {
		t.Run(c.name, func(t *testing.T) {
			seed := "0"
			if c.scheme == "sglang" {
				seed = ""
			}
			recipe, err := enginehash.ParseRecipe(c.scheme, seed)
			if err != nil {
				t.Fatal(err)
			}
			chain, ok := recipe.Chain(c.form, tokens, 16, c.lora, c.salt)
			if ok == c.none {
				t.Fatalf("a chain: %v", ok)
			}
			if c.none {
				return
			}
			var want, got []string
			parent := recipe.Root
			for i, keys := range c.keys {
				d, err := enginehash.NewHasher(recipe.Scheme, c.form).Block(parent, tokens[16*i:16*(i+1)], keys)
				if err != nil {
					t.Fatal(err)
				}
				want, parent = append(want, d.String()), d
			}
			for d, more := chain.Next(); more; d, more = chain.Next() {
				got = append(got, d.String())
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Error(diff)
			}
		})
	}
	if _, ok := (enginehash.Recipe{}).Chain(enginehash.Plain, tokens, 16, "", ""); ok {
		t.Error("no recipe has a chain")
	}
}

// TestWhatHasNoDigest: what pickle would write in several frames, and identifiers that the tagged form does not know.
func TestWhatHasNoDigest(t *testing.T) {
	long := make([]uint32, 1<<14)
	for i := range long {
		long[i] = 1 << 20
	}
	if _, err := enginehash.NewHasher(enginehash.SHA256, enginehash.Plain).Block(enginehash.Digest{}, long, nil); !errors.Is(err, enginehash.ErrTooLong) {
		t.Errorf("a block of %d tokens: %v", len(long), err)
	}
	if _, err := enginehash.NewHasher(enginehash.SHA256CBOR, enginehash.Plain).Block(enginehash.Digest{}, long, nil); err != nil {
		t.Errorf("CBOR has no frames: %v", err)
	}
	bare := []enginehash.Key{{Kind: enginehash.KeyIdentifier, Text: "image"}}
	if _, err := enginehash.NewHasher(enginehash.SHA256, enginehash.Tagged).Block(enginehash.Digest{}, long[:1], bare); !errors.Is(err, enginehash.ErrKeys) {
		t.Errorf("a bare identifier, tagged: %v", err)
	}
	if _, err := enginehash.NewHasher(enginehash.SGLang, enginehash.Plain).Block(enginehash.Digest{}, long[:1], bare); !errors.Is(err, enginehash.ErrKeys) {
		t.Errorf("extra keys of SGLang: %v", err)
	}
}

func TestDecodeKeysRefuses(t *testing.T) {
	for name, msgpack := range map[string]string{
		"a text":                  "\xa1a",
		"a flag":                  "\x91\xc3",
		"a map":                   "\x91\x80",
		"cut":                     "\x92\xa1a",
		"a length beyond the end": "\x91\xdb\xff\xff\xff\xff",
		"a count beyond the end":  "\xdd\xff\xff\xff\xff",
		"more behind it":          "\x90\xc0",
		"a tuple of one":          "\x91\x91\xa1a",
		"a tuple of four":         "\x91\x94\xa1a\x01\x01\x01",
		"an offset of text":       "\x91\x92\xa1a\xa1b",
		"a huge offset":           "\x91\x92\xa1a\xcf\xff\xff\xff\xff\xff\xff\xff\xff",
		"an unknown tag":          "\x91\x93\xa1a\xa1b\x01",
		"nested twice":            "\x91\x92\x90\x01",
		"too many":                "\xdc\x04\x01" + strings.Repeat("\xa0", 1025),
	} {
		if keys, err := enginehash.DecodeKeys(nil, []byte(msgpack), "", true); err == nil {
			t.Errorf("%s: read as %v", name, keys)
		}
	}
	for name, msgpack := range map[string]string{"nothing": "", "nil": "\xc0", "none": "\x90"} {
		if keys, err := enginehash.DecodeKeys(nil, []byte(msgpack), "", true); err != nil || len(keys) > 0 {
			t.Errorf("%s: %v, %v", name, keys, err)
		}
	}
}

func TestHashingAllocatesNothing(t *testing.T) {
	tokens := make([]uint32, 16)
	for _, s := range enginehash.Schemes() {
		h := enginehash.NewHasher(s, enginehash.Plain)
		d := s.Root("0")
		name := s.Name(d)
		if n := testing.AllocsPerRun(100, func() {
			d, _ = h.Block(d, tokens, nil)
			_ = s.Is(name, d)
		}); n > 0 {
			t.Errorf("%v: %v allocations a block", s, n)
		}
	}
}

func BenchmarkBlock(b *testing.B) {
	tokens := make([]uint32, 16)
	for i := range tokens {
		tokens[i] = uint32(7919 * (i + 1))
	}
	for _, s := range enginehash.Schemes() {
		b.Run(s.String(), func(b *testing.B) {
			h := enginehash.NewHasher(s, enginehash.Plain)
			d := s.Root("0")
			b.ReportAllocs()
			for b.Loop() {
				d, _ = h.Block(d, tokens, nil)
			}
		})
	}
}

// BenchmarkObserve compares every block of runs of 16, and, as by default, one in 64.
func BenchmarkObserve(b *testing.B) {
	for _, every := range []int{1, enginehash.DefaultConfig().Every} {
		b.Run(fmt.Sprintf("every=%d", every), func(b *testing.B) {
			e := newTeller(b, "sha256", "0")
			var runs []*event.Event
			for i := range 64 {
				runs = append(runs, e.stored(uint32(i*1000), 0, 16, text))
			}
			v := newVerifier(b, func(cfg *enginehash.Config) { cfg.Every = every })
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				v.Observe(event.Seq(i), runs[i%len(runs)])
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*16), "ns/block")
		})
	}
}
