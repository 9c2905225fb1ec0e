package gather_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"
	"time"

	"kvstrata/event"
	"kvstrata/event/resident"
	"kvstrata/indexer/prefix"
	"kvstrata/indexer/prefix/gather"
	"kvstrata/leaktest"

	"github.com/google/go-cmp/cmp"
)

// TestMain fails when a test leaves a goroutine behind.
func TestMain(m *testing.M) { os.Exit(leaktest.Run(m)) }

const blocks = 64

// prompt is 64 blocks of 16 tokens.
func prompt() []uint32 {
	tokens := make([]uint32, 16*blocks)
	for i := range tokens {
		tokens[i] = uint32(i)
	}
	return tokens
}

// shard is an index behind a server, which knows one engine that holds the whole prompt.
type shard struct {
	*prefix.Index
	*httptest.Server
	notReady error
}

func newShard(t testing.TB, part, model string, models ...string) *shard {
	t.Helper()
	cfg := prefix.DefaultConfig()
	cfg.Models = models
	var err error
	if cfg.Shard, err = prefix.ParseShard(part); err != nil {
		t.Fatal(err)
	}
	s := &shard{Index: prefix.New(cfg)}
	if model != "" {
		s.fill(t, cfg.Shard, event.Source{Cluster: "c", Model: model, Instance: "e1", Origin: event.Engine})
	}
	s.Server = httptest.NewServer(s.ShardHandler(func() error { return s.notReady }))
	t.Cleanup(s.Close)
	return s
}

// fill applies what a shard keeps of a batch that stores the prompt.
func (s *shard) fill(t testing.TB, part prefix.Shard, source event.Source) {
	t.Helper()
	ev := event.Event{
		Kind: event.Stored, Tier: event.GPU, Group: event.NoGroup, BlockSize: 16, LoRAID: event.NoLoRAID, Spec: event.SpecFull, Tokens: prompt(),
	}
	for i := range blocks {
		ev.Blocks = append(ev.Blocks, event.Block{Hash: event.IntHash(uint64(i + 1)), Copies: -1, Age: -1})
	}
	b := event.Batch{Events: []event.Event{ev}, Rank: -1}
	resident.New(resident.DefaultConfig()).Judge(&b)
	told := &b.Events[0]
	var kept []event.Block
	for _, bl := range told.Blocks {
		if part.Holds(bl.Prefix) {
			kept = append(kept, bl)
		}
	}
	told.Blocks = kept
	if _, err := s.Apply(t.Context(), &event.Message{Source: source, Epoch: 1, Fence: 1, Batches: []event.Batch{b}}); err != nil {
		t.Fatal(err)
	}
}

func newGather(t testing.TB, change func(*gather.Config), shards ...*shard) *gather.Gather {
	t.Helper()
	cfg := gather.DefaultConfig()
	cfg.Timeout = 10 * time.Second
	for _, s := range shards {
		cfg.Shards = append(cfg.Shards, s.URL)
	}
	if change != nil {
		change(&cfg)
	}
	transport := http.DefaultTransport.(*http.Transport).Clone()
	t.Cleanup(transport.CloseIdleConnections)
	g, err := gather.New(cfg, &http.Client{Transport: transport}, slog.New(slog.DiscardHandler), nil)
	if err != nil {
		t.Fatal(err)
	}
	g.Refresh(t.Context())
	return g
}

// matched returns how many blocks the one engine of a model holds.
func matched(t testing.TB, g *gather.Gather, model string) int {
	t.Helper()
	a, err := g.Lookup(t.Context(), &prefix.Request{Model: model, Tokens: prompt()})
	if err != nil {
		t.Fatal(err)
	}
	if len(a.Matches) != 1 {
		t.Fatalf("%d matches", len(a.Matches))
	}
	return a.Matches[0].Blocks
}

func TestTheAnswerIsThatOfAnIndex(t *testing.T) {
	whole := newShard(t, "", "m")
	g := newGather(t, nil, newShard(t, "1/3", "m"), newShard(t, "2/3", "m"), newShard(t, "3/3", "m"))
	for _, r := range []any{
		prefix.Request{Model: "m", Tokens: prompt()},
		prefix.Request{Model: "m", Tokens: prompt()[:100]},
		prefix.Request{Model: "m"},
		prefix.Request{Model: "n", Tokens: prompt()},
		prefix.Request{},
		map[string]int{"tokens": 1},
		prefix.Request{Model: "m", Hashes: event.Prefixes(nil, prompt(), 16, event.Hasher{}.Seed("", ""), false)},
		prefix.Request{Model: "m", BlockSize: 4, Hashes: []event.PrefixHash{1, 2}},
	} {
		body, err := json.Marshal(r)
		if err != nil {
			t.Fatal(err)
		}
		var got [2]*httptest.ResponseRecorder
		for i, h := range []http.Handler{whole.Handler(), g.Handler()} {
			got[i] = httptest.NewRecorder()
			h.ServeHTTP(got[i], httptest.NewRequest("POST", "/v1/lookup", bytes.NewReader(body)))
		}
		if got[0].Code != got[1].Code {
			t.Errorf("%.80s: status %d, want %d", body, got[1].Code, got[0].Code)
		}
		if diff := cmp.Diff(got[0].Body.String(), got[1].Body.String()); diff != "" {
			t.Errorf("%.80s: %s", body, diff)
		}
	}
	for path, want := range map[string]int{"GET /v1/lookup": 405, "GET /v1/sources": 404} {
		method, path, _ := strings.Cut(path, " ")
		w := httptest.NewRecorder()
		g.Handler().ServeHTTP(w, httptest.NewRequest(method, path, nil))
		if w.Code != want || !strings.Contains(w.Body.String(), `"error"`) {
			t.Errorf("%s %s: %d %s", method, path, w.Code, w.Body)
		}
	}
}

func TestReplicasTakeOver(t *testing.T) {
	one, a, b := newShard(t, "1/2", "m"), newShard(t, "2/2", "m"), newShard(t, "2/2", "m")
	g := newGather(t, nil, one, a, b)
	if err := g.Ready(); err != nil {
		t.Error(err)
	}
	a.Close()
	for range 10 {
		if n := matched(t, g, "m"); n != blocks {
			t.Fatalf("%d blocks, want all", n)
		}
	}
	b.CloseClientConnections()
	b.Close()
	_, err := g.Lookup(t.Context(), &prefix.Request{Model: "m", Tokens: prompt()})
	var shard *gather.ShardError
	if !errors.As(err, &shard) || shard.Shard.String() != "2/2" {
		t.Fatalf("error %v, want one of shard 2/2", err)
	}
	w := httptest.NewRecorder()
	g.Handler().ServeHTTP(w, httptest.NewRequest("POST", "/v1/lookup", strings.NewReader(`{"model": "m", "token_ids": [1]}`)))
	if w.Code != http.StatusServiceUnavailable || !strings.Contains(w.Body.String(), "2/2") || !strings.Contains(w.Body.String(), a.URL) || !strings.Contains(w.Body.String(), b.URL) {
		t.Errorf("%d %s", w.Code, w.Body)
	}
	g.Refresh(t.Context())
	if err := g.Ready(); err == nil || !strings.Contains(err.Error(), "2/2") {
		t.Errorf("ready without a shard: %v", err)
	}
}

func TestWhoHasNotCaughtUpIsAskedLast(t *testing.T) {
	behind, whole := newShard(t, "", "", "m"), newShard(t, "", "m", "m")
	behind.notReady = errors.New("not caught up")
	g := newGather(t, nil, behind, whole)
	for range 10 {
		if n := matched(t, g, "m"); n != blocks {
			t.Fatalf("%d blocks, want all", n)
		}
	}
	whole.Close()
	g.Refresh(t.Context())
	if err := g.Ready(); err == nil || !strings.Contains(err.Error(), "caught up") {
		t.Errorf("ready with nothing but an index that is not: %v", err)
	}
	if _, err := g.Lookup(t.Context(), &prefix.Request{Model: "m", Tokens: prompt()}); !errors.Is(err, prefix.ErrUnknownModel) {
		t.Errorf("what the one that is left knows is nothing: %v", err)
	}
}

func TestModelsAreRouted(t *testing.T) {
	m, n1, n2 := newShard(t, "", "m", "m"), newShard(t, "1/2", "n", "n", "o"), newShard(t, "2/2", "n", "n", "o")
	g := newGather(t, nil, m, n1, n2)
	if err := g.Ready(); err != nil {
		t.Error(err)
	}
	if got := matched(t, g, "m"); got != blocks {
		t.Errorf("m: %d blocks", got)
	}
	if got := matched(t, g, "n"); got != blocks {
		t.Errorf("n: %d blocks", got)
	}
	n1.Close()
	if got := matched(t, g, "m"); got != blocks {
		t.Errorf("m without a shard of n: %d blocks", got)
	}
	_, err := g.Lookup(t.Context(), &prefix.Request{Model: "p", Tokens: prompt()})
	if !errors.Is(err, prefix.ErrUnknownModel) || !strings.Contains(err.Error(), "known: m, n, o") {
		t.Errorf("a model that nobody has: %v", err)
	}
}

// An index that takes a request and never answers costs its time, and then its replica answers.
func TestAnIndexThatHangs(t *testing.T) {
	one, two := newShard(t, "1/2", "m"), newShard(t, "2/2", "m")
	release := make(chan struct{})
	hangs := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodGet {
			fmt.Fprint(w, `{"shard": "2/2", "models": [], "ready": true}`)
			return
		}
		<-release
	}))
	t.Cleanup(hangs.Close)
	t.Cleanup(func() { close(release) })
	alone := newGather(t, func(c *gather.Config) { c.Timeout = 50 * time.Millisecond }, one, &shard{Server: hangs})
	if _, err := alone.Lookup(t.Context(), &prefix.Request{Model: "m", Tokens: prompt()}); err == nil || !strings.Contains(err.Error(), "2/2") {
		t.Errorf("without a replica: %v", err)
	}
	g := newGather(t, func(c *gather.Config) { c.Timeout = time.Second }, one, two, &shard{Server: hangs})
	for range 4 {
		if n := matched(t, g, "m"); n != blocks {
			t.Errorf("%d blocks, want all", n)
		}
	}
}

// While a fleet is divided anew, a division counts when all of it is there.
func TestADivisionCountsWhenItIsWhole(t *testing.T) {
	one, two, whole := newShard(t, "1/2", "m"), newShard(t, "2/2", "m"), newShard(t, "", "m")
	half := newGather(t, nil, one)
	if _, err := half.Lookup(t.Context(), &prefix.Request{Model: "m", Tokens: prompt()}); err == nil || !strings.Contains(err.Error(), "shard 2/2") {
		t.Errorf("half of the range: %v", err)
	}
	if err := half.Ready(); err == nil {
		t.Error("ready with half of the range")
	}
	if n := matched(t, newGather(t, nil, one, whole), "m"); n != blocks {
		t.Errorf("a half and a whole: %d blocks", n)
	}
	if n := matched(t, newGather(t, nil, one, two), "m"); n != blocks {
		t.Errorf("both halves: %d blocks", n)
	}
}

// What an index answers that keeps another part than it said is not believed.
func TestAnIndexThatChanged(t *testing.T) {
	one, two := newShard(t, "1/2", "m"), newShard(t, "2/2", "m")
	mux := http.NewServeMux()
	mux.HandleFunc("GET /v1/shard", func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprint(w, `{"shard": "2/2", "models": [], "ready": true}`)
	})
	mux.Handle("POST /v1/shard/lookup", one.ShardHandler(func() error { return nil }))
	changed := httptest.NewServer(mux)
	t.Cleanup(changed.Close)
	g := newGather(t, nil, one, &shard{Server: changed})
	if _, err := g.Lookup(t.Context(), &prefix.Request{Model: "m", Tokens: prompt()}); err == nil || !strings.Contains(err.Error(), "it is 1/2") {
		t.Errorf("error %v", err)
	}
	if n := matched(t, newGather(t, nil, one, &shard{Server: changed}, two), "m"); n != blocks {
		t.Errorf("with one that keeps it: %d blocks", n)
	}
}

func TestRunLearnsWhatShardsKeep(t *testing.T) {
	s := newShard(t, "", "m")
	cfg := gather.DefaultConfig()
	cfg.Shards, cfg.Refresh = []string{s.URL}, time.Millisecond
	transport := http.DefaultTransport.(*http.Transport).Clone()
	defer transport.CloseIdleConnections()
	g, err := gather.New(cfg, &http.Client{Transport: transport}, slog.New(slog.DiscardHandler), nil)
	if err != nil {
		t.Fatal(err)
	}
	if g.Ready() == nil {
		t.Error("ready before anything was heard")
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- g.Run(ctx) }()
	for g.Ready() != nil {
		<-time.After(time.Millisecond)
	}
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

func TestConfigNamesEveryProblem(t *testing.T) {
	err := gather.Config{Shards: []string{"10.0.0.1:80", "http://user@a", "http://b", "http://b"}}.Validate()
	for _, want := range []string{"10.0.0.1:80", "http://user@a", "twice", "--shard-timeout"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v does not name %q", err, want)
		}
	}
	if err := (gather.Config{}).Validate(); err == nil || !strings.Contains(err.Error(), "--shards: 0") {
		t.Error(err)
	}
}

// BenchmarkLookup asks for a prompt of 64 blocks that one engine holds whole, over loopback.
func BenchmarkLookup(b *testing.B) {
	for _, n := range []int{1, 2, 4, 8, 16} {
		b.Run(fmt.Sprint("shards=", n), func(b *testing.B) {
			var shards []*shard
			for i := range n {
				shards = append(shards, newShard(b, fmt.Sprintf("%d/%d", i+1, n), "m"))
			}
			g := newGather(b, nil, shards...)
			r := &prefix.Request{Model: "m", Tokens: prompt()}
			matched(b, g, "m")
			b.ReportAllocs()
			for b.Loop() {
				if _, err := g.Lookup(b.Context(), r); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
