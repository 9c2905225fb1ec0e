package prefix_test

import (
	"bytes"
	"encoding/json"
	"flag"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"kvstrata/event"
	"kvstrata/indexer/prefix"

	"github.com/google/go-cmp/cmp"
)

var update = flag.Bool("update", false, "rewrite the golden files in testdata")

// golden compares what was answered with a file of testdata.
func golden(t *testing.T, name string, got []byte) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *update {
		if err := os.WriteFile(path, got, 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatalf("%v; write it with -update", err)
	}
	if diff := cmp.Diff(string(want), string(got)); diff != "" {
		t.Errorf("%s differs; if that is meant, run with -update:\n%s", path, diff)
	}
}

// fleet is an index of four sources that shows every field of the API.
func fleet(t *testing.T) *prefix.Index {
	x, now := newIndex()
	now.now = began.Add(time.Second)
	p := prompt(1, 4)
	full := p.with(func(c *chain) { c.group, c.spec = 0, event.SpecFull })
	window := p.with(func(c *chain) { c.group, c.spec, c.behind = 1, event.SpecSlidingWindow, 4096 })

	whole := newPublisher(engine("e1"), false)
	whole.tell(t, x, full.stored(event.GPU, 0, 4), full.offloaded(event.CPU, 0, 4), full.evicted(event.GPU, 2, 4))
	whole.tell(t, x, window.stored(event.GPU, 3, 4))
	apply(t, x, whole.lose(t, 2))
	whole.tell(t, x, full.stored(event.GPU, 0, 2), full.offloaded(event.CPU, 0, 4), window.stored(event.GPU, 0, 4))
	whole.message(t, nil) // told of, not applied
	st := whole.status(event.StatePartial, "lost 2 to 3: no replay endpoint")
	st.Dialect, st.Endpoint = "vllm", "tcp://10.0.0.1:5557"
	st.Counters = []event.Counter{{Name: "parent_unknown", Count: 1, Example: "block 6d4fa0e5fdb93342 in batch 1"}}
	x.Tell(st)
	x.Compared(whole.source, true)

	eagle := newPublisher(event.Source{Cluster: "west", Model: "m", Instance: "e2", Rank: 3, Origin: event.Connector}, true)
	eagle.tell(t, x, p.with(func(c *chain) { c.eagle = true }).stored(event.GPU, 0, 1))
	st = eagle.status(event.StateLive, "")
	st.Copies = event.CopiesUnknown
	x.Tell(st)

	silent := newPublisher(event.Source{Cluster: "c", Model: "m", Instance: "e3", Origin: event.Store}, false)
	silent.tell(t, x, p.stored("TAPE", 0, 4))
	x.Tell(silent.status(event.StateGone, "withdrawn"))
	newPublisher(event.Source{Cluster: "c", Model: "org/another.model", Instance: "e4", Origin: event.Engine}, false).tell(t, x)

	now.now = began.Add(2500 * time.Millisecond)
	return x
}

func ask(x *prefix.Index, method, path, body string) *httptest.ResponseRecorder {
	w := httptest.NewRecorder()
	x.Handler().ServeHTTP(w, httptest.NewRequest(method, path, strings.NewReader(body)))
	return w
}

func encoded(t *testing.T, v any) string {
	t.Helper()
	text, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// The golden files pin every answer's field names.
func TestHTTP(t *testing.T) {
	x := fleet(t)
	p := prompt(1, 4)
	tokens := encoded(t, p.tokens)
	hashes := encoded(t, p.hashes())
	for _, c := range []struct {
		name, method, path, body string
		status                   int
	}{
		{"lookup_tokens", "POST", "/v1/lookup", `{"model": "m", "token_ids": ` + tokens + `}`, 200},
		{"lookup_hashes", "POST", "/v1/lookup", `{"model": "m", "cluster": "c", "prefix_hashes": ` + hashes + `, "block_size": 16}`, 200},
		{"lookup_adapter", "POST", "/v1/lookup", `{"model": "m", "lora_name": "l", "cache_salt": "s", "token_ids": ` + tokens + `}`, 200},
		{"lookup_empty_source", "POST", "/v1/lookup", `{"model": "org/another.model", "token_ids": []}`, 200},
		{"sources", "GET", "/v1/sources", "", 200},
		{"error_not_json", "POST", "/v1/lookup", "model=m", 400},
		{"error_no_body", "POST", "/v1/lookup", "", 400},
		{"error_two_objects", "POST", "/v1/lookup", `{"model": "m"} {"model": "m"}`, 400},
		{"error_stray_brace", "POST", "/v1/lookup", `{"model": "m"}}`, 400},
		{"error_unknown_field", "POST", "/v1/lookup", `{"model": "m", "tokens": [1]}`, 400},
		{"error_not_a_hash", "POST", "/v1/lookup", `{"model": "m", "prefix_hashes": ["12"]}`, 400},
		{"error_every_problem", "POST", "/v1/lookup", `{"token_ids": [1], "prefix_hashes": ["0000000000000001"]}`, 400},
		{"error_unknown_model", "POST", "/v1/lookup", `{"model": "gpt", "token_ids": [1]}`, 404},
		{"error_unknown_path", "GET", "/v1/blocks", "", 404},
		{"error_lookup_method", "GET", "/v1/lookup", "", 405},
		{"error_sources_method", "POST", "/v1/sources", "", 405},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := ask(x, c.method, c.path, c.body)
			if w.Code != c.status {
				t.Errorf("status %d, want %d", w.Code, c.status)
			}
			if got := w.Header().Get("Content-Type"); got != "application/json" {
				t.Errorf("content type %q", got)
			}
			golden(t, c.name+".json", w.Body.Bytes())
		})
	}
}

func TestHTTPAllow(t *testing.T) {
	x, _ := newIndex()
	for path, want := range map[string]string{"/v1/lookup": "POST", "/v1/sources": "GET, HEAD"} {
		if got := ask(x, "DELETE", path, "").Header().Get("Allow"); got != want {
			t.Errorf("%s allows %q, want %q", path, got, want)
		}
	}
}

func TestHTTPBodyTooLarge(t *testing.T) {
	x := fleet(t)
	body := []byte(`{"model": "m", "token_ids": [1`)
	body = append(append(body, bytes.Repeat([]byte(",1"), 8<<20)...), "]}"...)
	w := ask(x, "POST", "/v1/lookup", string(body))
	if w.Code != http.StatusRequestEntityTooLarge {
		t.Errorf("status %d, want 413", w.Code)
	}
	golden(t, "error_too_large.json", w.Body.Bytes())
}

// What clients decode into the package's own types is what the index answered.
func TestHTTPAnswersReadBack(t *testing.T) {
	x := fleet(t)
	req := &prefix.Request{Model: "m", Tokens: prompt(1, 4).tokens}
	var answer prefix.Answer
	if err := json.Unmarshal(ask(x, "POST", "/v1/lookup", encoded(t, req)).Body.Bytes(), &answer); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(lookup(t, x, req), &answer); diff != "" {
		t.Error(diff)
	}
	var list struct {
		Sources []prefix.SourceInfo `json:"sources"`
	}
	if err := json.Unmarshal(ask(x, "GET", "/v1/sources", "").Body.Bytes(), &list); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(x.Sources(), list.Sources); diff != "" {
		t.Error(diff)
	}
	id := list.Sources[0].Source.Tokens()
	if err := json.Unmarshal(ask(x, "GET", "/v1/sources?source="+url.QueryEscape(id), "").Body.Bytes(), &list); err != nil {
		t.Fatal(err)
	}
	if len(list.Sources) != 1 || list.Sources[0].Source.Tokens() != id {
		t.Errorf("one source was asked for, and it answered %+v", list.Sources)
	}
	if code := ask(x, "GET", "/v1/sources?source=no.such.one.0.engine", "").Code; code != http.StatusNotFound {
		t.Errorf("a source that nobody knows: %d", code)
	}
}
