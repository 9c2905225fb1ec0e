package prefix_test

import (
	"bytes"
	"context"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"kvstrata/event"
	"kvstrata/indexer/prefix"

	"pgregory.net/rapid"
)

func TestShards(t *testing.T) {
	for text, want := range map[string]prefix.Shard{
		"": {}, "1/1": {}, "1/2": {Index: 0, Of: 2}, "8/8": {Index: 7, Of: 8}, "1024/1024": {Index: 1023, Of: 1024},
	} {
		got, err := prefix.ParseShard(text)
		if err != nil || got != want {
			t.Errorf("%q: %v, %v", text, got, err)
		}
		var again prefix.Shard
		if err := again.UnmarshalText([]byte(got.String())); err != nil || again != want {
			t.Errorf("%q is written as %v and read as %v, %v", text, got, again, err)
		}
	}
	for _, text := range []string{"0/2", "3/2", "2", "a/b", "1/0", "1/1025", "-1/2", "1/2/3", " 1/2"} {
		if s, err := prefix.ParseShard(text); err == nil || !strings.Contains(err.Error(), "shard") {
			t.Errorf("%q: %v, %v", text, s, err)
		}
	}
}

// Every hash falls to one part, ascending ones to ascending parts, and each part gets its share.
func TestEveryHashFallsToOneShard(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		parts := rapid.Uint32Range(1, prefix.MaxShards).Draw(t, "parts")
		a, b := event.PrefixHash(rapid.Uint64().Draw(t, "a")), event.PrefixHash(rapid.Uint64().Draw(t, "b"))
		if a > b {
			a, b = b, a
		}
		if p, q := prefix.PartOf(a, parts), prefix.PartOf(b, parts); p > q || q >= parts {
			t.Fatalf("parts %d and %d of %d", p, q, parts)
		}
		holders := 0
		for i := range parts {
			if (prefix.Shard{Index: i, Of: parts}).Holds(a) {
				holders++
			}
		}
		if holders != 1 {
			t.Fatalf("%d parts hold %v", holders, a)
		}
	})
	counts := make([]int, 8)
	for i := range 80_000 {
		counts[prefix.PartOf(event.PrefixHash(event.LocalHash([]uint32{uint32(i)}, 1)), 8)]++
	}
	for i, n := range counts {
		if n < 9_000 || n > 11_000 {
			t.Errorf("part %d got %d of 80,000", i, n)
		}
	}
}

// parts is an index that keeps everything, and shards of it.
type parts struct {
	clock  *clock
	whole  *prefix.Index
	shards []*prefix.Index
	of     []prefix.Shard
}

func newParts(n int) *parts {
	p := &parts{clock: &clock{began}}
	cfg := prefix.DefaultConfig()
	cfg.Clock = p.clock.Now
	p.whole = prefix.New(cfg)
	for i := range n {
		cfg.Shard = prefix.Shard{}
		if n > 1 {
			cfg.Shard = prefix.Shard{Index: uint32(i), Of: uint32(n)}
		}
		p.of = append(p.of, cfg.Shard)
		p.shards = append(p.shards, prefix.New(cfg))
	}
	return p
}

// each calls f for every index.
func (p *parts) each(f func(*prefix.Index)) {
	f(p.whole)
	for _, x := range p.shards {
		f(x)
	}
}

func (p *parts) apply(t tb, m *event.Message) {
	t.Helper()
	apply(t, p.whole, m)
	for i, x := range p.shards {
		if digest, err := x.Apply(context.Background(), m); err != nil || digest != m.Digest {
			t.Fatalf("shard %v: digest %x, want %x; %v", p.of[i], digest, m.Digest, err)
		}
	}
}

func (p *parts) restore(t tb, object []byte) {
	t.Helper()
	restore(t, p.whole, bytes.NewBuffer(object))
	for _, x := range p.shards {
		restore(t, x, bytes.NewBuffer(object))
	}
}

func TestShardHTTP(t *testing.T) {
	cfg := prefix.DefaultConfig()
	cfg.Shard, cfg.Models = prefix.Shard{Index: 1, Of: 2}, []string{"m"}
	x := prefix.New(cfg)
	pub := newPublisher(engine("e1"), false)
	p := prompt(1, 8)
	m := pub.message(t, []event.Event{p.stored(event.GPU, 0, 6), p.offloaded(event.CPU, 6, 7)})
	if _, err := x.Apply(t.Context(), m); err != nil {
		t.Fatal(err)
	}
	h := x.ShardHandler(func() error { return nil })
	ask := func(method, path, body string) *httptest.ResponseRecorder {
		w := httptest.NewRecorder()
		h.ServeHTTP(w, httptest.NewRequest(method, path, strings.NewReader(body)))
		return w
	}
	req := prefix.ShardRequest{Shard: cfg.Shard, Model: "m", Cuts: []prefix.Cut{{BlockSize: 16, Blocks: 8}, {BlockSize: 4, Blocks: 0}}}
	for i, hash := range p.hashes() {
		if cfg.Shard.Holds(hash) {
			req.Cuts[0].Positions, req.Cuts[0].Hashes = append(req.Cuts[0].Positions, i), append(req.Cuts[0].Hashes, hash)
		}
	}
	other := req
	other.Shard = prefix.Shard{}
	strange := req
	strange.Cuts = []prefix.Cut{{BlockSize: 16, Blocks: 8, Positions: []int{0}, Hashes: prefix.HashList{1}}}
	descending := req
	descending.Cuts = []prefix.Cut{{BlockSize: 16, Blocks: 8, Positions: []int{1, 0}, Hashes: req.Cuts[0].Hashes[:2]}}
	unknown := req
	unknown.Model = "n"
	for _, c := range []struct {
		name, method, path, body string
		status                   int
	}{
		{"shard", "GET", "/v1/shard", "", 200},
		{"shard_lookup", "POST", "/v1/shard/lookup", encoded(t, req), 200},
		{"shard_unknown_model", "POST", "/v1/shard/lookup", encoded(t, unknown), 200},
		{"error_shard_other", "POST", "/v1/shard/lookup", encoded(t, other), http.StatusMisdirectedRequest},
		{"error_shard_strange", "POST", "/v1/shard/lookup", encoded(t, strange), 400},
		{"error_shard_descending", "POST", "/v1/shard/lookup", encoded(t, descending), 400},
		{"error_shard_hashes", "POST", "/v1/shard/lookup", `{"shard": "2/2", "model": "m", "cuts": [{"block_size": 16, "blocks": 1, "positions": [], "prefix_hashes": "AAA="}]}`, 400},
		{"error_shard_method", "GET", "/v1/shard/lookup", "", 405},
	} {
		w := ask(c.method, c.path, c.body)
		if w.Code != c.status {
			t.Errorf("%s: status %d, want %d", c.name, w.Code, c.status)
		}
		golden(t, c.name+".json", w.Body.Bytes())
	}
	w := httptest.NewRecorder()
	x.RefuseLookup().ServeHTTP(w, httptest.NewRequest("POST", "/v1/lookup", nil))
	if w.Code != http.StatusMisdirectedRequest || !strings.Contains(w.Body.String(), "kvstrata gather") {
		t.Errorf("a whole lookup: %d %s", w.Code, w.Body)
	}
}

// Shards keep what falls to them and no more, also of blocks that get their names late.
func TestShardsDivideTheBlocks(t *testing.T) {
	p := newParts(4)
	pub := newPublisher(engine("e1"), false)
	text := prompt(1, 64)
	for _, ev := range []event.Event{text.offloaded(event.CPU, 8, 16), text.stored(event.GPU, 4, 64), text.stored(event.GPU, 0, 4)} {
		p.apply(t, pub.message(t, []event.Event{ev}))
	}
	count := func(x *prefix.Index) (n int) {
		for range x.Resident(pub.source) {
			n++
		}
		return n
	}
	sum := 0
	for i, x := range p.shards {
		n := count(x)
		if sum += n; n == 0 || n > 40 {
			t.Errorf("shard %v keeps %d of 72 blocks", p.of[i], n)
		}
	}
	if whole := count(p.whole); sum != whole || whole != 72 {
		t.Errorf("the shards keep %d blocks, the whole index %d", sum, whole)
	}
	p.apply(t, pub.message(t, []event.Event{text.evicted(event.GPU, 0, 64), text.evicted(event.CPU, 8, 16)}))
	for i, x := range p.shards {
		if n := count(x); n != 0 {
			t.Errorf("shard %v keeps %d blocks that are gone", p.of[i], n)
		}
	}
}
