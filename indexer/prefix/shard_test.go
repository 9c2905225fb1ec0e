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

// ofShard returns what a shard keeps of a message: blocks whose names fall to it, and those without a name, since one may still be
// told.
func ofShard(s prefix.Shard, m *event.Message) *event.Message {
	part := *m
	part.Batches = nil
	for _, b := range m.Batches {
		events := b.Events
		b.Events = nil
		for _, ev := range events {
			var kept []event.Block
			for _, bl := range ev.Blocks {
				if bl.Prefix == 0 || ev.Unrooted || s.Holds(bl.Prefix) {
					kept = append(kept, bl)
				}
			}
			ev.Blocks = kept
			b.Events = append(b.Events, ev)
		}
		part.Batches = append(part.Batches, b)
	}
	return &part
}

// objectOfShard returns a checkpoint object without what does not fall to a shard.
func objectOfShard(t tb, s prefix.Shard, object []byte) *bytes.Buffer {
	t.Helper()
	var kept []event.Entry
	cp, err := event.ReadCheckpoint(bytes.NewReader(object), func(e *event.Entry) {
		if e.Prefix == 0 || s.Holds(e.Prefix) {
			kept = append(kept, *e)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	cp.Entries, cp.Digest = uint64(len(kept)), 0
	for i := range kept {
		cp.Digest += event.Digest(kept[i].Copies) * event.Mix64(kept[i].Hash, kept[i].Group, kept[i].Tier)
	}
	var out bytes.Buffer
	if err := event.WriteCheckpoint(&out, cp, func(yield func(*event.Entry) bool) {
		for i := range kept {
			if !yield(&kept[i]) {
				return
			}
		}
	}); err != nil {
		t.Fatal(err)
	}
	return &out
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
		if _, err := x.Apply(context.Background(), ofShard(p.of[i], m)); err != nil {
			t.Fatalf("shard %v: %v", p.of[i], err)
		}
	}
}

func (p *parts) restore(t tb, object []byte) {
	t.Helper()
	restore(t, p.whole, bytes.NewBuffer(object))
	for i, x := range p.shards {
		restore(t, x, objectOfShard(t, p.of[i], object))
	}
}

func TestShardHTTP(t *testing.T) {
	cfg := prefix.DefaultConfig()
	cfg.Shard, cfg.Models = prefix.Shard{Index: 1, Of: 2}, []string{"m"}
	x := prefix.New(cfg)
	pub := newPublisher(engine("e1"), false)
	p := prompt(1, 8)
	m := pub.message(t, []event.Event{p.stored(event.GPU, 0, 6), p.offloaded(event.CPU, 6, 7)})
	if _, err := x.Apply(t.Context(), ofShard(cfg.Shard, m)); err != nil {
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
