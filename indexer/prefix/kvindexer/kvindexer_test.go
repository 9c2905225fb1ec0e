package kvindexer_test

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"kvstrata/event"
	"kvstrata/event/resident"
	"kvstrata/indexer/prefix"
	"kvstrata/indexer/prefix/kvindexer"
)

// list is a follower that only remembers.
type list struct {
	mu      sync.Mutex
	engines map[event.Source]kvindexer.Engine
}

func (l *list) Follow(e kvindexer.Engine) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if _, ok := l.engines[e.Source]; ok {
		return kvindexer.ErrFollowed
	}
	l.engines[e.Source] = e
	return nil
}

func (l *list) Unfollow(_ context.Context, s event.Source) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if _, ok := l.engines[s]; !ok {
		return kvindexer.ErrNotFollowed
	}
	delete(l.engines, s)
	return nil
}

func (l *list) Heard(s event.Source) *event.Status {
	return &event.Status{Source: s, State: event.StateLive}
}

// rig is a service over an index that is fed as a subscriber's stream would.
type rig struct {
	t      *testing.T
	index  *prefix.Index
	follow *list
	url    string
	sets   map[event.Source]*resident.Set
	seqs   map[event.Source]event.Seq
}

func newRig(t *testing.T, cfg kvindexer.Config) *rig {
	r := &rig{
		t: t, index: prefix.New(prefix.DefaultConfig()), follow: &list{engines: make(map[event.Source]kvindexer.Engine)},
		sets: make(map[event.Source]*resident.Set), seqs: make(map[event.Source]event.Seq),
	}
	server := httptest.NewServer(kvindexer.New(cfg, r.index, r.follow, slog.New(slog.DiscardHandler)).Handler())
	t.Cleanup(server.Close)
	r.url = server.URL
	return r
}

// ask sends a request, and returns its answer.
func (r *rig) ask(method, path, kind, body string) (*http.Response, string) {
	r.t.Helper()
	req, err := http.NewRequestWithContext(r.t.Context(), method, r.url+path, strings.NewReader(body))
	if err != nil {
		r.t.Fatal(err)
	}
	if kind != "" {
		req.Header.Set("Content-Type", kind)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		r.t.Fatal(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		r.t.Fatal(err)
	}
	return resp, string(text)
}

// post sends a JSON body, and returns the status and the answer.
func (r *rig) post(path string, body any) (int, any) {
	r.t.Helper()
	text, err := json.Marshal(body)
	if err != nil {
		r.t.Fatal(err)
	}
	resp, said := r.ask("POST", path, "application/json", string(text))
	var answer any
	if err := json.Unmarshal([]byte(said), &answer); err != nil {
		answer = said
	}
	return resp.StatusCode, answer
}

// feed judges events of a source, and applies them.
func (r *rig) feed(source event.Source, events ...event.Event) {
	r.t.Helper()
	set := r.sets[source]
	if set == nil {
		cfg := resident.DefaultConfig()
		cfg.Hasher = event.NewHasher("")
		set = resident.New(cfg)
		r.sets[source] = set
		r.index.Tell(&event.Status{Source: source, Epoch: 1, Fence: 1, State: event.StateLive})
	}
	seq := r.seqs[source]
	r.seqs[source]++
	b := event.Batch{First: seq, Last: seq, Rank: -1, Events: events}
	set.Judge(&b)
	if _, err := r.index.Apply(r.t.Context(), &event.Message{Source: source, Epoch: 1, Fence: 1, Batches: []event.Batch{b}}); err != nil {
		r.t.Fatal(err)
	}
}

// stored tells blocks of four tokens that begin with the prompt's first, or follow a parent.
func stored(tier event.Tier, first, last int) event.Event {
	e := event.Event{Kind: event.Stored, Tier: tier, Group: event.NoGroup, LoRAID: event.NoLoRAID, BlockSize: 4}
	if first > 0 {
		e.HasParent, e.Parent = true, event.IntHash(uint64(100+first-1))
	}
	for n := first; n <= last; n++ {
		e.Blocks = append(e.Blocks, event.Block{Hash: event.IntHash(uint64(100 + n))})
		e.Tokens = append(e.Tokens, prompt(n)...)
	}
	return e
}

// prompt returns the tokens of block n.
func prompt(n int) []uint32 {
	return []uint32{uint32(4*n + 1), uint32(4*n + 2), uint32(4*n + 3), uint32(4*n + 4)}
}

func source(instance string, rank uint32) event.Source {
	return event.Source{Cluster: "default", Model: "m", Instance: instance, Rank: rank, Origin: event.Engine}
}

// golden is one request to Dynamo's own indexer, and its answer.
type golden struct {
	Method     string `json:"method"`
	Path       string `json:"path"`
	Type       string `json:"type"`
	Body       string `json:"body"`
	Status     int    `json:"status"`
	AnswerType string `json:"answer_type"`
	Allow      string `json:"allow"`
	Answer     any    `json:"answer"`
}

// refused are the requests that Dynamo takes and we do not, by a part of the body, and why.
var refused = map[string]string{
	`"block_size": 0`:         "blocks of no tokens",
	`"endpoint": "ipc://`:     "sockets of other machines are reached by TCP",
	`"endpoint": "tcp://*:1"`: "nothing is reached there",
	`"model_name": ""`:        "no engine serves it",
	`"routing_group": ""`:     "a lookup takes no cluster for all of them",
}

// The same requests in the same order get the answers of Dynamo's own indexer: status, headers and body.
func TestAnswersOfDynamo(t *testing.T) {
	text, err := os.ReadFile("testdata/golden.json")
	if err != nil {
		t.Fatal(err)
	}
	var all []golden
	if err := json.Unmarshal(text, &all); err != nil {
		t.Fatal(err)
	}
	r := newRig(t, kvindexer.Config{})
	differ := 0
	var after bool // the request before was refused by us alone: what takes it back finds nothing
	for i, want := range all {
		resp, said := r.ask(want.Method, want.Path, want.Type, want.Body)
		name := fmt.Sprintf("%d %s %s %.90s", i, want.Method, want.Path, want.Body)
		why := ""
		for part, reason := range refused {
			if strings.Contains(want.Body, part) && want.Path == "/register" {
				why = reason
			}
		}
		if why != "" {
			if want.Status != 201 || resp.StatusCode != 400 || !strings.Contains(said, `"error"`) {
				t.Errorf("%s: %d %s, want a refusal where Dynamo takes %s", name, resp.StatusCode, said, why)
			}
			differ++
			after = true
			continue
		}
		if after && want.Path == "/unregister" {
			after = false
			if resp.StatusCode != 404 {
				t.Errorf("%s: %d %s", name, resp.StatusCode, said)
			}
			continue
		}
		after = false
		if resp.StatusCode != want.Status || resp.Header.Get("Content-Type") != want.AnswerType || resp.Header.Get("Allow") != want.Allow {
			t.Errorf("%s: %s %v %s, want %d %s Allow %s", name, resp.Status, resp.Header, said, want.Status, want.AnswerType, want.Allow)
		}
		switch want.AnswerType {
		case "application/json":
			var got any
			if err := json.Unmarshal([]byte(said), &got); err != nil {
				t.Errorf("%s: %v", name, err)
			}
			if want.Path == "/dump" {
				got, want.Answer = keys(got), keys(want.Answer)
			}
			if diff := cmp.Diff(want.Answer, got); diff != "" {
				t.Errorf("%s:\n%s", name, diff)
			}
		case "": // no body
			if said != "" {
				t.Errorf("%s: %q", name, said)
			}
		default: // the sentence begins as theirs does; what follows are their parser's words
			begin, _, _ := strings.Cut(want.Answer.(string), ":")
			if !strings.HasPrefix(said, begin) {
				t.Errorf("%s: %q, want as %q", name, said, want.Answer)
			}
		}
	}
	if differ != len(refused) {
		t.Errorf("%d requests were refused, want %d", differ, len(refused))
	}
	if len(r.follow.engines) > 0 {
		t.Errorf("followed at the end: %v", r.follow.engines)
	}
}

func keys(v any) []string {
	var all []string
	for k := range v.(map[string]any) {
		all = append(all, k)
	}
	slices.Sort(all)
	return all
}

// Counts are tokens; each tier's contains those of the warmer ones; an instance shows the best of its ranks.
func TestUnits(t *testing.T) {
	r := newRig(t, kvindexer.Config{})
	r.feed(source("7", 0), stored(event.GPU, 0, 2), stored(event.CPU, 3, 4), stored(event.Disk, 5, 5), stored(event.External, 6, 6))
	r.feed(source("7", 1), stored(event.GPU, 0, 0))
	r.feed(source("8", 0), stored(event.CPU, 0, 1))
	var tokens []uint32
	var hashes []int64
	for n := range 9 {
		tokens = append(tokens, prompt(n)...)
		hashes = append(hashes, int64(event.LocalHash(prompt(n), event.NewHasher("").Seed("", ""))))
	}
	want := map[string]any{
		"scores":      map[string]any{"7": map[string]any{"0": 12.0, "1": 4.0}},
		"frequencies": []any{},
		"instances": map[string]any{
			"7": map[string]any{"longest_matched": 28.0, "gpu": 12.0, "dp": map[string]any{"0": 12.0, "1": 4.0}, "cpu": 20.0, "disk": 28.0},
			"8": map[string]any{"longest_matched": 8.0, "gpu": 0.0, "dp": map[string]any{"0": 0.0}, "cpu": 8.0, "disk": 8.0},
		},
	}
	for path, body := range map[string]any{
		"/query":         map[string]any{"model_name": "m", "token_ids": tokens},
		"/query_by_hash": map[string]any{"model_name": "m", "block_hashes": hashes},
	} {
		if status, got := r.post(path, body); status != 200 || cmp.Diff(want, got) != "" {
			t.Errorf("%s: %d %s", path, status, cmp.Diff(want, got))
		}
	}
	for body, want := range map[string]int{
		`{"model_name":"m","token_ids":[1],"routing_group":"other"}`: 404, // another cluster's
		`{"model_name":"x","token_ids":[1]}`:                         404,
		`{"model_name":"m","token_ids":[1]}`:                         200, // configured engines count, registered or not
	} {
		if resp, said := r.ask("POST", "/query", "application/json", body); resp.StatusCode != want {
			t.Errorf("%s: %s %s", body, resp.Status, said)
		}
	}
}

// With a key of its own the index can't be asked by hashes that others computed, and says so.
func TestHashesOfAnotherScheme(t *testing.T) {
	r := newRig(t, kvindexer.Config{Keyed: true})
	status, answer := r.post("/query_by_hash", map[string]any{"model_name": "m", "block_hashes": []int{1}})
	if status != 400 || !strings.Contains(fmt.Sprint(answer), "--hash-key") {
		t.Errorf("%d %v", status, answer)
	}
}

// Where no subscriber runs nothing can be registered, and all else is answered.
func TestWithoutSubscriber(t *testing.T) {
	server := httptest.NewServer(kvindexer.New(kvindexer.Config{}, prefix.New(prefix.DefaultConfig()), nil, slog.New(slog.DiscardHandler)).Handler())
	t.Cleanup(server.Close)
	r := &rig{t: t, url: server.URL}
	body := map[string]any{"instance_id": 1, "endpoint": "tcp://127.0.0.1:1", "model_name": "m", "block_size": 4}
	if status, answer := r.post("/register", body); status != 503 || !strings.Contains(fmt.Sprint(answer), "subscriber") {
		t.Errorf("%d %v", status, answer)
	}
	if resp, said := r.ask("GET", "/workers", "", ""); resp.StatusCode != 200 || said != "[]\n" {
		t.Errorf("%s %q", resp.Status, said)
	}
	if status, _ := r.post("/unregister", body); status != 404 {
		t.Errorf("%d", status)
	}
}

// What is longer than Dynamo takes is refused as there, and no prompt text is repeated.
func TestBodies(t *testing.T) {
	r := newRig(t, kvindexer.Config{})
	long := `{"model_name":"m","token_ids":[` + strings.Repeat("1,", 4<<20) + `1]}`
	if resp, said := r.ask("POST", "/query", "application/json", long); resp.StatusCode != 413 {
		t.Errorf("%s %s", resp.Status, said)
	}
	_, said := r.ask("POST", "/query", "application/json", `{"model_name":"m","token_ids":["secret words"]}`)
	if strings.Contains(said, "secret") {
		t.Error(said)
	}
}
