package event_test

import (
	"testing"

	"kvstrata/event"

	"github.com/google/go-cmp/cmp"
)

// Golden vectors of Dynamo's tests: block size 4, seed 1337.
func TestPrefixesAreDynamos(t *testing.T) {
	tokens := []uint32{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13}
	want := []event.PrefixHash{14643705804678351452, 4945711292740353085, 12583592247330656132}
	if diff := cmp.Diff(want, event.Prefixes(nil, tokens, 4, event.Hasher{}.Seed("", ""), false)); diff != "" {
		t.Error(diff)
	}
	locals := []uint64{event.LocalHash(tokens[4:8], 1337), event.LocalHash(tokens[8:12], 1337)}
	if diff := cmp.Diff([]uint64{16777012769546811212, 483935686894639516}, locals); diff != "" {
		t.Error(diff)
	}
}

func TestSeeds(t *testing.T) {
	tokens := []uint32{1, 2, 3, 4}
	for _, c := range []struct {
		name, key, lora, salt string
		want                  event.PrefixHash
	}{
		{"lora", "", "my-lora", "", 15671544057904749233},
		{"salt", "", "", "tenant-a", 5738685477468498325},
	} {
		if got := event.Prefixes(nil, tokens, 4, event.NewHasher(c.key).Seed(c.lora, c.salt), false)[0]; got != c.want {
			t.Errorf("%s: %d, want %d", c.name, got, c.want)
		}
	}
	if event.NewHasher("secret").Seed("", "") == event.NewHasher("").Seed("", "") {
		t.Error("a key must change the seed")
	}
}

func TestSealedSeedsTellNothingAndComeBack(t *testing.T) {
	public, keyed, other := event.NewHasher(""), event.NewHasher("secret"), event.NewHasher("another")
	seen := make(map[uint64]bool)
	for _, salt := range []string{"", "a", "b"} {
		seed := keyed.Seed("", salt)
		sealed := keyed.Seal(seed)
		if sealed == seed || seen[sealed] || keyed.Open(sealed) != seed || keyed.Seal(seed) != sealed {
			t.Errorf("salt %q: %x is sealed as %x, opened as %x", salt, seed, sealed, keyed.Open(sealed))
		}
		if other.Open(sealed) == seed {
			t.Errorf("salt %q: another key opens it", salt)
		}
		seen[sealed] = true
	}
	if public.Seal(1337) != 1337 || public.Open(1337) != 1337 || keyed.Seal(0) != 0 {
		t.Error("public seeds, and unknown ones, travel as they are")
	}
}

func TestEagleWindowsOverlapByOneToken(t *testing.T) {
	tokens := []uint32{1, 2, 3, 4, 5, 6, 7, 8}
	got := event.Prefixes(nil, tokens, 4, 1337, true)
	want := []event.PrefixHash{event.PrefixHash(event.LocalHash(tokens[:5], 1337))}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("eight tokens hold one window of five: %s", diff)
	}
}

func TestSourceTokens(t *testing.T) {
	for _, c := range []struct {
		source event.Source
		want   string
	}{
		{event.Source{Cluster: "eu", Model: "meta/Llama-3.1", Instance: "10.0.0.1:8000", Rank: 3, Origin: event.Engine}, "eu.meta%2FLlama-3%2E1.10%2E0%2E0%2E1%3A8000.3.engine"},
		{event.Source{Instance: "a b>*%", Origin: event.Store}, "%.%.a%20b%3E%2A%25.0.store"},
	} {
		if got := c.source.Tokens(); got != c.want {
			t.Errorf("got %s, want %s", got, c.want)
		}
		back, err := event.ParseSource(c.want)
		if err != nil || back != c.source {
			t.Errorf("parsed back: %+v, %v", back, err)
		}
	}
	for _, bad := range []string{"", "a.b.c.0", "a.b.c.x.engine", "a.b.c.007.engine", "a.b.c.0.nobody", "a.%zz.c.0.engine", "a.%61.c.0.engine", "a.%2.c.0.engine"} {
		if s, err := event.ParseSource(bad); err == nil {
			t.Errorf("%q gave %+v", bad, s)
		}
	}
}

func TestEightByteHashesAreIntegers(t *testing.T) {
	h := event.BytesHash("\x6d\x4f\xa0\xe5\xfd\xb9\x33\x42")
	if h != event.IntHash(7876691182959014722) {
		t.Error("bytes and the integer they spell must be one hash")
	}
	back, err := event.ParseBlockHash(h.String())
	if err != nil || back != h {
		t.Errorf("%v, %v", back, err)
	}
	if event.Mix64(h, event.NoGroup, event.GPU) != event.Mix64(h, 0, event.GPU) {
		t.Error("no group and group 0 must weigh the same")
	}
}

func TestSeconds(t *testing.T) {
	for _, c := range []struct {
		in   float64
		want event.Time
	}{{1.5, 1_500_000_000}, {1789095808.8378847, 1789095808837884664}, {-1, 0}, {1e300, 0}} {
		if got := event.Seconds(c.in); got != c.want {
			t.Errorf("Seconds(%v) = %d, want %d", c.in, got, c.want)
		}
	}
}

func BenchmarkLocalHash(b *testing.B) {
	tokens := make([]uint32, 16)
	for b.Loop() {
		event.LocalHash(tokens, 1337)
	}
}
