package lmcache_test

import (
	"encoding/hex"
	"encoding/json"
	"os"
	"strconv"
	"strings"
	"testing"

	"kvstrata/connector/lmcache"
	"kvstrata/event"
)

// goldenFile is what LMCache's own code yields (interop/golden_lmcache.py).
type goldenFile struct {
	Version  string
	DTypes   map[string]lmcache.DType  `json:"dtypes"`
	Formats  map[string]lmcache.Format `json:"formats"`
	MaxKey   int                       `json:"max_key"`
	Keys     []goldenKey
	Requests []goldenFrame
	Replies  []goldenFrame
	Metadata []goldenFrame
	Hashings []struct {
		Algorithm   string
		Seed        *string
		Bare        bool
		Chunk       int
		First, Step int64
		Number      int
		Hashes      []string
	}
}

type goldenKey struct {
	Model         string
	World, Worker int
	Hash          string        // decimal, or 32 bytes
	DType         lmcache.DType `json:"dtype"`
	Tags          [][2]string
	Layer         *int
	Text          string
}

type goldenFrame struct {
	Command  lmcache.Command
	Code     lmcache.Code
	Groups   int
	Key      string
	Length   int
	Format   lmcache.Format
	DType    lmcache.DType `json:"dtype"`
	Shape    [4]int32
	Location int32
	Hex      string
}

func (f *goldenFrame) content() lmcache.Content {
	return lmcache.Content{Format: f.Format, DType: f.DType, Shape: f.Shape}
}

func golden(t testing.TB) *goldenFile {
	t.Helper()
	text, err := os.ReadFile("testdata/golden.json")
	if err != nil {
		t.Fatal(err)
	}
	var g goldenFile
	if err := json.Unmarshal(text, &g); err != nil {
		t.Fatal(err)
	}
	return &g
}

func TestGoldenNumbers(t *testing.T) {
	g := golden(t)
	for name, number := range g.DTypes {
		if name == "None" {
			continue
		}
		if d, err := lmcache.ParseDType("torch." + name); err != nil || d != number {
			t.Errorf("%s is %d, %v; want %d", name, d, err, number)
		}
	}
	for name, number := range g.Formats {
		if number.String() != name {
			t.Errorf("format %d is %v, want %s", number, number, name)
		}
	}
	if next := lmcache.Format(len(g.Formats)); next.Valid() {
		t.Errorf("format %d is none of LMCache's", next)
	}
	if g.MaxKey != lmcache.MaxKey {
		t.Errorf("keys have up to %d bytes, want %d", lmcache.MaxKey, g.MaxKey)
	}
}

func TestGoldenKeys(t *testing.T) {
	for _, want := range golden(t).Keys {
		k := lmcache.Key{Model: want.Model, World: want.World, Worker: want.Worker, DType: want.DType}
		for _, tag := range want.Tags {
			k.Tags = append(k.Tags, lmcache.Tag{Name: tag[0], Value: tag[1]})
		}
		if want.Layer != nil {
			k.Layer, k.HasLayer = *want.Layer, true
		}
		if n, err := strconv.ParseInt(want.Hash, 10, 64); err == nil {
			k.Hash, k.Signed = event.IntHash(uint64(n)), n < 0
		} else if n, err := strconv.ParseUint(want.Hash, 10, 64); err == nil {
			k.Hash = event.IntHash(n)
		} else if k.Hash, err = event.ParseBlockHash(want.Hash); err != nil {
			t.Fatal(err)
		}
		if k.String() != want.Text {
			t.Errorf("key %s, want %s", k.String(), want.Text)
		}
		again, err := lmcache.ParseKey(want.Text)
		if err != nil || again.String() != want.Text || again.Hash != k.Hash || again.DType != k.DType || again.HasLayer != k.HasLayer || len(again.Tags) != len(k.Tags) {
			t.Errorf("%s reads as %+v, %v", want.Text, again, err)
		}
	}
}

func TestGoldenFrames(t *testing.T) {
	g := golden(t)
	for _, want := range g.Requests {
		r := lmcache.Request{Command: want.Command, Length: want.Length, Content: want.content(), Location: want.Location, Key: want.Key}
		b, err := lmcache.V1.AppendRequest(nil, &r)
		if err != nil || hex.EncodeToString(b) != want.Hex {
			t.Fatalf("%+v is %x, %v; want %s", r, b, err, want.Hex)
		}
		if again, err := lmcache.V1.ParseRequest(b); err != nil || again != r {
			t.Fatalf("%s reads as %+v, %v; want %+v", want.Hex, again, err, r)
		}
	}
	for _, want := range g.Replies {
		r := lmcache.Reply{Code: want.Code, Length: want.Length, Content: want.content(), Location: want.Location}
		b := lmcache.V1.AppendReply(nil, &r)
		if hex.EncodeToString(b) != want.Hex {
			t.Fatalf("%+v is %x, want %s", r, b, want.Hex)
		}
		if again, err := lmcache.V1.ParseReply(b); err != nil || again != r {
			t.Fatalf("%s reads as %+v, %v; want %+v", want.Hex, again, err, r)
		}
	}
	for _, want := range g.Metadata {
		m := lmcache.Metadata{Length: want.Length, Format: want.Format}
		for range want.Groups {
			m.Groups = append(m.Groups, lmcache.MetadataGroup{DType: want.DType, Shape: want.Shape})
		}
		b, err := m.Append(nil)
		if err != nil || hex.EncodeToString(b) != want.Hex {
			t.Fatalf("%+v is %x, %v; want %s", m, b, err, want.Hex)
		}
		again, err := lmcache.ParseMetadata(b)
		if b, _ := again.Append(nil); err != nil || hex.EncodeToString(b) != want.Hex {
			t.Fatalf("%s reads as %+v, %v", want.Hex, again, err)
		}
	}
}

// TestFrameV0 holds version 0, which LMCache 0.5 has no more, against bytes made by hand from its struct formats.
func TestFrameV0(t *testing.T) {
	b, err := lmcache.V0.AppendRequest(nil, &lmcache.Request{Command: lmcache.Put, Length: 258, Key: "k"})
	if want := "\x01\x00\x00\x00\x02\x01\x00\x00k" + strings.Repeat(" ", 149); err != nil || string(b) != want {
		t.Errorf("request %q, %v", b, err)
	}
	if b := lmcache.V0.AppendReply(nil, &lmcache.Reply{Code: lmcache.Success, Length: 258}); string(b) != "\xc8\x00\x00\x00\x02\x01\x00\x00" {
		t.Errorf("reply %q", b)
	}
}

// TestGoldenHashes computes the chunk hashes of every algorithm as LMCache does.
func TestGoldenHashes(t *testing.T) {
	for _, want := range golden(t).Hashings {
		seed := ""
		if want.Seed != nil {
			seed = *want.Seed
		}
		h := lmcache.BareHashing()
		if !want.Bare {
			var err error
			if h, err = lmcache.NewHashing(want.Algorithm, seed); err != nil {
				t.Fatal(err)
			}
		}
		tokens := make([]uint32, 600)
		for i := range tokens {
			tokens[i] = uint32(want.First + int64(i)*want.Step)
		}
		hashes, err := h.ChunkHashes(tokens, want.Chunk)
		if err != nil || len(hashes) != want.Number {
			t.Fatalf("%s %s: %d chunks of %d, %v; want %d", want.Algorithm, seed, len(hashes), want.Chunk, err, want.Number)
		}
		for i, text := range want.Hashes {
			if len(want.Hashes) < len(hashes) && i == len(want.Hashes)-1 {
				i = len(hashes) - 1 // of many, the first ones and the last
			}
			k := lmcache.Key{Hash: hashes[i], Signed: h.Signed}
			if got := strings.Split(k.String(), "@")[3]; got != text {
				t.Fatalf("%s, seed %q, bare %t, chunk %d of %d tokens from %d by %d: %s, want %s", want.Algorithm, seed, want.Bare, i, want.Chunk, want.First, want.Step, got, text)
			}
		}
	}
}

func TestHashingRefuses(t *testing.T) {
	for _, c := range [][2]string{{"builtin", ""}, {"builtin", "random"}, {"xxhash", ""}, {"xxhash_cbor", ""}, {"md5", "0"}} {
		if _, err := lmcache.NewHashing(c[0], c[1]); err == nil {
			t.Errorf("%s with seed %q is taken", c[0], c[1])
		}
	}
	for _, chunk := range []int{-1, 0, 1 << 20} {
		if _, err := lmcache.BareHashing().ChunkHashes(nil, chunk); err == nil {
			t.Errorf("chunks of %d are taken", chunk)
		}
	}
}

func FuzzParseRequest(f *testing.F) {
	for _, frame := range golden(f).Requests {
		b, _ := hex.DecodeString(frame.Hex)
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		for _, p := range []lmcache.Protocol{lmcache.V0, lmcache.V1} {
			r, err := p.ParseRequest(b)
			if err != nil {
				continue
			}
			again, err := p.AppendRequest(nil, &r)
			if err != nil {
				t.Fatalf("%+v was read and cannot be written: %v", r, err)
			}
			if third, err := p.ParseRequest(again); err != nil || third != r {
				t.Fatalf("%+v comes back as %+v, %v", r, third, err)
			}
		}
	})
}

func FuzzParseReply(f *testing.F) {
	for _, frame := range golden(f).Replies {
		b, _ := hex.DecodeString(frame.Hex)
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		for _, p := range []lmcache.Protocol{lmcache.V0, lmcache.V1} {
			if r, err := p.ParseReply(b); err == nil && string(p.AppendReply(nil, &r)) != string(b) {
				t.Fatalf("%x reads as %+v", b, r)
			}
		}
	})
}

func FuzzParseMetadata(f *testing.F) {
	for _, frame := range golden(f).Metadata {
		b, _ := hex.DecodeString(frame.Hex)
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := lmcache.ParseMetadata(b)
		if err != nil {
			return
		}
		if again, err := m.Append(nil); err != nil || string(again) != string(b) {
			t.Fatalf("%x reads as %+v and is written %x, %v", b, m, again, err)
		}
	})
}

func FuzzParseKey(f *testing.F) {
	for _, k := range golden(f).Keys {
		f.Add(k.Text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		k, err := lmcache.ParseKey(text)
		if err != nil {
			return
		}
		if again, err := lmcache.ParseKey(k.String()); err != nil || again.String() != k.String() || again.Hash != k.Hash {
			t.Fatalf("%q reads as %+v, and that as %+v, %v", text, k, again, err)
		}
	})
}
