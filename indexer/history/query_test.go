package history_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"kvstrata/event"
	"kvstrata/indexer/history"
)

// ago is what a summary says of how long ago something was.
var ago = regexp.MustCompile(`[0-9hms]+ ago`)

// golden compares a text with a file under testdata.
func golden(t *testing.T, name, got string) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *update {
		if err := os.MkdirAll("testdata", 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), got); diff != "" {
		t.Errorf("%s: %s", name, diff)
	}
}

// indented returns a value as JSON for people, with times as seconds since a moment.
func indented(t *testing.T, v any, since time.Time) string {
	t.Helper()
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	enc.SetIndent("", " ")
	if err := enc.Encode(v); err != nil {
		t.Fatal(err)
	}
	var out []string
	for line := range strings.Lines(b.String()) {
		text := strings.TrimRight(strings.TrimSpace(line), ",")
		_, after, _ := strings.Cut(text, ": ")
		for _, word := range []string{text, after} {
			if ms, err := strconv.ParseInt(word, 10, 64); err == nil && ms > 1e12 {
				line = strings.Replace(line, word, "T+"+strconv.FormatFloat(float64(ms-since.UnixMilli())/1000, 'f', -1, 64), 1)
			}
		}
		if strings.Contains(line, `"elapsed_ms"`) {
			continue
		}
		out = append(out, line)
	}
	return strings.Join(out, "")
}

// example keeps a hand-made stream of two engines, and returns when it began.
func example(t *testing.T, e *engine) (began time.Time) {
	t.Helper()
	w, stop := startWriter(t, e.config())
	resume(t, w)
	began = time.Now().UTC().Truncate(24 * time.Hour).Add(-14 * time.Hour)
	a, b := newStream("prefill-0"), newStream("de'code\\1")
	a.now, b.now = began, began.Add(100*time.Millisecond)
	a.publish(run(event.Stored, 0x11, 0x12, 0x13))
	a.publish(under(run(event.Stored, 0x14), 0x13), under(run(event.Stored, 0x15), 0x13))
	a.publish(run(event.Evicted, 0x14))
	load := run(event.Loaded, 0x15)
	load.Load = event.Load{From: event.CPU, Peer: "decode-1", Request: "r", Bytes: 4096, Duration: time.Millisecond}
	a.publish(load)
	a.now = a.now.Add(time.Minute)
	a.publish(under(run(event.Stored, 0x21), 0x20)) // its parent is not known: no name
	a.publish(run(event.Stored, 0x20))              // now it is: both get theirs
	a.publish(run(event.Stored, 0x11))              // a second copy
	a.publish(run(event.Evicted, 0x11))
	a.publish(run(event.Evicted, 0x21))
	a.lost(3)
	a.publish(run(event.Stored, 0x31))
	a.publish(event.Event{Kind: event.Cleared, Cause: event.ByEngine, Group: event.NoGroup, LoRAID: event.NoLoRAID})
	a.publish(run(event.Stored, 0x32))
	first := a.messages
	a.messages = nil
	a.life()
	a.publish(run(event.Stored, 0x11, 0x12))
	b.position.Sequence = 1000
	b.publish(run(event.Stored, 0x11, 0x12, 0x13))
	b.publish(run(event.Stored, 0x41))
	after := b.messages
	b.messages = nil
	b.publish(run(event.Stored, 0x42))
	object := b.checkpoint(t)
	b.messages = nil
	b.publish(run(event.Evicted, 0x42))
	placeholder := run(event.Stored, 0x51)
	placeholder.Tokens = nil
	b.publish(placeholder) // an unnamed block
	feed(t, w, first...)
	feed(t, w, a.messages...)
	feed(t, w, after...)
	if _, err := w.Restore(t.Context(), bytes.NewReader(object)); err != nil {
		t.Fatal(err)
	}
	feed(t, w, b.messages...)
	w.Tell(&event.Status{Source: a.source, Epoch: a.epoch, Fence: 1, Seq: 0, State: event.StateStale, Reason: "silent"})
	w.Compared(b.source, false)
	w.Reached(event.Position{Stream: "KV_EVENTS", Created: 1_000, Sequence: 2000})
	eventually(t, "all is committed", func() bool { return w.Committed().Sequence == 2000 })
	keptOnce(t, e, b, append(after, b.messages...)...)
	keptOnce(t, e, a, append(first, a.messages...)...)
	stop()
	return began
}

// prefixOf returns the prefix hash of a chain of the example's blocks.
func prefixOf(hashes ...uint64) string {
	s := newStream("x")
	m := s.publish(run(event.Stored, hashes...))
	blocks := m.Batches[0].Events[0].Blocks
	return history.HashText(uint64(blocks[len(blocks)-1].Prefix))
}

// about returns values to ask a question with: those given, and a block where it wants one; of a window its end where it wants a moment.
func about(q history.Query, hash string, values map[string]string) map[string]string {
	values = maps.Clone(values)
	for _, p := range q.Params {
		switch {
		case p.Kind == "hash":
			values[p.Name] = hash
		case p.Name == "at":
			values["at"] = values["until"]
			delete(values, "since")
			delete(values, "until")
		}
	}
	return values
}

func TestWhatIsKept(t *testing.T) {
	e := startEngine(t)
	began := example(t, e)
	r := newReader(t, e.config())
	window := map[string]string{
		"since": began.Add(-time.Second).Format(time.RFC3339), "until": began.Add(2 * time.Minute).Format(time.RFC3339),
	}
	for _, q := range history.Queries() {
		t.Run(q.Name, func(t *testing.T) {
			a, err := r.Ask(t.Context(), q.Name, about(q, prefixOf(0x11), window))
			if err != nil {
				t.Fatal(err)
			}
			a.SQL = ""
			if len(a.Rows) > 0 && len(a.Rows[0]) != len(a.Columns) {
				t.Errorf("rows of %d cells, and %d columns", len(a.Rows[0]), len(a.Columns))
			}
			golden(t, "query_"+q.Name+".txt", indented(t, a, began))
		})
	}
	for name, hash := range map[string]string{
		"by_prefix":          prefixOf(0x11),
		"parent_in_a_run":    prefixOf(0x11, 0x12),
		"by_engine_hash":     "0000000000000014",
		"parent_across_runs": "0000000000000015",
		"named_later":        prefixOf(0x20, 0x21),
		"cleared":            "0000000000000031",
		"new_life":           "0000000000000032",
		"from_a_checkpoint":  "0000000000000041",
		"behind_one":         "0000000000000042",
		"unnamed":            "0000000000000051",
		"unknown":            "00000000000000ff",
	} {
		t.Run(name, func(t *testing.T) {
			story, err := r.Explain(t.Context(), hash, "")
			if err != nil {
				t.Fatal(err)
			}
			for i := range story.Summary { // these tell how long ago
				story.Summary[i] = ago.ReplaceAllString(story.Summary[i], "… ago")
			}
			for i := range story.Events {
				if story.Events[i].Reason != "" && time.Since(time.UnixMilli(story.Events[i].Time)) < time.Hour {
					story.Events[i].Time = 0 // our own clock
				}
			}
			for i := range story.Resident {
				if time.Since(time.UnixMilli(story.Resident[i].Since)) < time.Hour {
					story.Resident[i].Since = 0
				}
			}
			golden(t, "story_"+name+".txt", indented(t, story, began))
		})
	}
	t.Run("since", func(t *testing.T) {
		story, err := r.Explain(t.Context(), "0000000000000014", "1h")
		if err != nil || !story.Found || len(story.Events) > 0 || len(story.Names) != 1 {
			t.Errorf("%+v %v", story, err)
		}
	})
	t.Run("filters", func(t *testing.T) {
		for _, q := range history.Queries() {
			for _, p := range q.Params {
				for _, value := range []string{
					`' OR 1=1 --`, `\' OR 1=1 --`, "x'; DROP TABLE block_events; --", `\`, `'`, `"`, "a\tb", "a\nb", "{engine:String}", "%27", `\x00`, "é\u0001",
				} {
					asked := about(q, prefixOf(0x11), window)
					asked[p.Name] = value
					a, err := r.Ask(t.Context(), q.Name, asked)
					if p.Kind != "text" || p.Name == "by" { // which are numbers, times, or one of few words
						if !errors.Is(err, history.ErrBadParam) {
							t.Errorf("%s of %s %q: %v %v", q.Name, p.Name, value, a, err)
						}
						continue
					}
					if err != nil || q.Name != "events" && len(a.Rows) > 0 {
						t.Errorf("%s of %s %q: %v %v", q.Name, p.Name, value, a, err)
					}
				}
			}
		}
		for engine, rows := range map[string]int{"prefill-0": 1, `de'code\1`: 1, "prefill": 0} {
			_, err := r.Ask(t.Context(), "engines", map[string]string{"engine": engine, "since": window["since"], "sql": ""})
			if err == nil {
				t.Error("a parameter sql was taken")
			}
			a, err := r.Ask(t.Context(), "engines", map[string]string{"engine": engine, "since": window["since"], "model": "m/model"})
			if err != nil || len(a.Rows) != rows {
				t.Errorf("engine %s: %v %v", engine, a, err)
			}
		}
	})
	t.Run("truncated", func(t *testing.T) {
		a, err := r.Ask(t.Context(), "ledger", map[string]string{"since": "7d", "limit": "2"})
		if err != nil || !a.Truncated || len(a.Rows) != 2 {
			t.Errorf("%v %v", a, err)
		}
	})
	t.Run("http", func(t *testing.T) { checkHTTP(t, r) })
	t.Run("too much", func(t *testing.T) {
		cfg := e.config()
		cfg.MaxTime = time.Second
		for _, sql := range []string{"SELECT sum(sipHash64(number)) FROM numbers(100000000000)", "SELECT groupArray(number) FROM numbers(1000000000)"} {
			err := history.Probe(t.Context(), newReader(t, cfg), sql)
			if !errors.Is(err, history.ErrTooMuch) || !strings.Contains(err.Error(), "narrow the time range") {
				t.Errorf("%s: %v", sql, err)
			}
			t.Log(err)
		}
		w := httptest.NewRecorder()
		history.WriteError(w, history.ErrTooMuch)
		if w.Code != http.StatusUnprocessableEntity {
			t.Errorf("%d", w.Code)
		}
	})
	t.Run("standing", func(t *testing.T) {
		at, err := r.Standing(t.Context())
		if err != nil || at.Rows != 25 || at.At.Sequence != 2000 || at.At.Stream != "KV_EVENTS" || time.Since(at.Written) > time.Minute {
			t.Errorf("%+v %v", at, err)
		}
	})
}

// A story longer than what is shown keeps its end, and still knows where the block is.
func TestLongStory(t *testing.T) {
	e := startEngine(t)
	w, _ := startWriter(t, e.config())
	resume(t, w)
	s := newStream("e0")
	s.now = time.Now().Add(-12 * time.Hour)
	for range 2600 {
		s.publish(run(event.Stored, 1), run(event.Evicted, 1))
	}
	s.publish(run(event.Stored, 1))
	feed(t, w, s.messages...)
	committed(t, w, s.messages[len(s.messages)-1])
	story, err := newReader(t, e.config()).Explain(t.Context(), "0000000000000001", "")
	if err != nil {
		t.Fatal(err)
	}
	last := story.Events[len(story.Events)-1]
	if !story.Truncated || len(story.Events) != 5000 || last.Seq != 2600 || len(story.Resident) != 1 || story.Resident[0].Copies != 1 {
		t.Errorf("truncated %v, %d events, the last %+v, resident %+v", story.Truncated, len(story.Events), last, story.Resident)
	}
	if text := story.Summary[len(story.Summary)-1]; text != "Only the newest 5000 events are shown, and counted here." {
		t.Error(text)
	}
}

func TestParameters(t *testing.T) {
	now := time.Date(2026, 11, 29, 18, 0, 0, 0, time.UTC)
	for _, test := range []struct {
		name, query string
		values      map[string]string
		since       time.Time
		want        string // in the error
	}{
		{"defaults", "events", nil, now.Add(-time.Hour), ""},
		{"empty ones", "events", map[string]string{"since": "", "limit": ""}, now.Add(-time.Hour), ""},
		{"minutes", "events", map[string]string{"since": "90m"}, now.Add(-90 * time.Minute), ""},
		{"days", "events", map[string]string{"since": "1.5d"}, now.Add(-36 * time.Hour), ""},
		{"a time", "events", map[string]string{"since": "2026-11-28T18:00:00Z"}, now.Add(-24 * time.Hour), ""},
		{"a zone", "events", map[string]string{"since": "2026-11-28T18:00:00+02:00"}, now.Add(-26 * time.Hour), ""},
		{"milliseconds", "events", map[string]string{"since": strconv.FormatInt(now.Add(-time.Minute).UnixMilli(), 10)}, now.Add(-time.Minute), ""},
		{"before all", "events", map[string]string{"since": "36500d"}, time.Unix(0, 0), ""},
		{"in antiquity", "events", map[string]string{"since": "0001-01-01T00:00:00Z"}, time.Unix(0, 0), ""},
		{"the far future", "events", map[string]string{"until": "9999-01-01T00:00:00Z"}, now.Add(-time.Hour), ""},
		{"no time", "events", map[string]string{"since": "yesterday"}, time.Time{}, `parameter since: "yesterday": want a duration as 1h or 7d`},
		{"negative", "events", map[string]string{"since": "-1h"}, time.Time{}, `parameter since: "-1h"`},
		{"seconds", "events", map[string]string{"since": "1795000000"}, time.Time{}, "Unix milliseconds"},
		{"not a number of days", "events", map[string]string{"since": "NaNd"}, time.Time{}, "parameter since"},
		{"too many days", "events", map[string]string{"since": "1e300d"}, time.Time{}, "parameter since"},
		{"until first", "events", map[string]string{"since": "1h", "until": "2h"}, time.Time{}, "is not before until"},
		{"empty window", "events", map[string]string{"since": "1h", "until": "1h"}, time.Time{}, "is not before until"},
		{"both in the future", "events", map[string]string{"since": "2027-01-01T00:00:00Z", "until": "2028-01-01T00:00:00Z"}, time.Time{}, "is not before"},
		{"unknown parameter", "events", map[string]string{"modle": "x"}, time.Time{}, `parameter modle: events does not have it; did you mean "model"? it has since, until, model, engine, limit`},
		{"limit 0", "events", map[string]string{"limit": "0"}, time.Time{}, `parameter limit: "0": want 1 to 10000`},
		{"limit too high", "events", map[string]string{"limit": "10001"}, time.Time{}, "want 1 to 10000"},
		{"limit no number", "events", map[string]string{"limit": "1;"}, time.Time{}, "want 1 to 10000"},
		{"a length", "thrash", map[string]string{"within": "90s", "sample": "1"}, now.Add(-time.Hour), ""},
		{"a length of nothing", "thrash", map[string]string{"within": "0s"}, time.Time{}, `parameter within: "0s": want 1s to 24h, in whole seconds`},
		{"half a second", "thrash", map[string]string{"within": "1.5s"}, time.Time{}, "parameter within"},
		{"too long", "storms", map[string]string{"bucket": "25h"}, time.Time{}, "parameter bucket"},
		{"a time as a length", "storms", map[string]string{"bucket": "2026-11-28T18:00:00Z"}, time.Time{}, "parameter bucket"},
		{"negative number", "storms", map[string]string{"factor": "-1"}, time.Time{}, `parameter factor: "-1": want a number`},
		{"no block", "lineage", nil, time.Time{}, "parameter hash"},
		{"no such length", "events", map[string]string{"within": "5m"}, time.Time{}, "parameter within: events does not have it"},
		{"before", "compare", map[string]string{"before_since": "3h", "before_until": "2h"}, now.Add(-time.Hour), ""},
		{"before is empty", "compare", map[string]string{"before_since": "1h"}, time.Time{}, "parameter before_since"},
		{"before is no time", "compare", map[string]string{"before_until": "x"}, time.Time{}, `parameter before_until: "x"`},
		{"a moment", "state", map[string]string{"at": "2026-11-28T18:00:00Z", "by": "depth", "offset": "5"}, time.Unix(0, 0), ""},
		{"no moment", "state", map[string]string{"at": "noon"}, time.Time{}, `parameter at: "noon"`},
		{"by what there is not", "state", map[string]string{"by": "teir"}, time.Time{}, `parameter by: "teir": did you mean "tier"? want tier, group, depth, blocks`},
		{"a window for a moment", "state", map[string]string{"since": "1h"}, time.Time{}, "parameter since: state does not have it"},
		{"zero byte", "events", map[string]string{"model": "a\x00b"}, time.Time{}, "parameter model: holds a zero byte"},
		{"unknown query", "evnts", nil, time.Time{}, `no such query "evnts"; did you mean "events"? there are events, engines`},
		{"a far query", "tresh", nil, time.Time{}, `no such query "tresh"; did you mean "thrash"? there are`},
		{"a query like none", "nonsense", nil, time.Time{}, `no such query "nonsense"; there are events`},
		{"no name of a query", "", nil, time.Time{}, `no such query ""; there are events`},
		{"a parameter like none", "events", map[string]string{"bogus": "x"}, time.Time{}, "events does not have it; it has since"},
		{"a long name", strings.Repeat("e", 1<<16), nil, time.Time{}, `"; there are events`},
	} {
		t.Run(test.name, func(t *testing.T) {
			since, until, err := history.Bind(test.query, test.values, now)
			if test.want != "" {
				if err == nil || !strings.Contains(err.Error(), test.want) {
					t.Errorf("%v, want %q", err, test.want)
				}
				return
			}
			if err != nil || !since.Equal(test.since) || until.After(now.Add(24*time.Hour)) {
				t.Errorf("since %v until %v: %v", since, until, err)
			}
		})
	}
}

// checkHTTP asks a reader's handler.
func checkHTTP(t *testing.T, r *history.Reader) {
	h := r.Handler()
	for _, test := range []struct {
		method, path string
		status       int
		want         string
	}{
		{"GET", "/v1/queries", 200, `"name":"hot-prefixes"`},
		{"GET", "/v1/query/events?since=7d", 200, `"rows":[[`},
		{"GET", "/v1/query/ledger?since=7d&sql=1", 200, `"sql":"SET param_`},
		{"GET", "/v1/query/ledger?since=7d", 200, `"truncated":false,"elapsed_ms"`},
		{"GET", "/v1/query/capacity?since=7d&blocks=100", 200, `"memory","×1.25",125,2000,null`},
		{"GET", "/v1/query/capacity?since=7d&sql=1", 200, `SET param_stored_hash`},
		{"GET", "/v1/query/capacity?blocks=x", 400, `parameter blocks`},
		{"GET", "/v1/explain/0000000000000014", 200, `"found":true`},
		{"GET", "/v1/explain/0000000000000014?since=1h", 200, `"events":[]`},
		{"GET", "/v1/explain/00000000000000fe", 200, `"found":false,"summary":["Never seen`},
		{"GET", "/v1/explain/xyz", 400, `want hexadecimal digits`},
		{"GET", "/v1/explain/123", 400, `want hexadecimal digits`},
		{"GET", "/v1/explain/11?since=x", 400, `parameter since`},
		{"GET", "/v1/explain/11?sinse=1h", 400, `parameter sinse: a story does not have it; did you mean \"since\"? it has since`},
		{"GET", "/v1/query/evnts", 404, `did you mean \"events\"? there are events, engines`},
		{"GET", "/v1/query/events?since=1h&since=2h", 400, `parameter since: given 2 times`},
		{"GET", "/v1/query/events?bogus=1", 400, `parameter bogus`},
		{"GET", "/v1/query/", 404, `"error"`},
		{"GET", "/v1/other", 404, `"error":"nothing is at /v1/other`},
		{"POST", "/v1/queries", 405, `"error":"method POST: use GET"`},
		{"DELETE", "/v1/query/events", 405, `"error":"method DELETE: use GET"`},
		{"PUT", "/v1/explain/11", 405, `"error":"method PUT: use GET"`},
	} {
		w := httptest.NewRecorder()
		h.ServeHTTP(w, httptest.NewRequest(test.method, test.path, http.NoBody))
		if w.Code != test.status || !strings.Contains(w.Body.String(), test.want) || w.Header().Get("Content-Type") != "application/json" ||
			!json.Valid(w.Body.Bytes()) {
			t.Errorf("%s %s: %d %s %s, want %d and %s", test.method, test.path, w.Code, w.Header(), w.Body, test.status, test.want)
		}
	}
}

func TestClickHouseIsDown(t *testing.T) {
	cfg := history.DefaultConfig()
	cfg.Address = "unix:///nowhere/clickhouse.sock"
	r := newReader(t, cfg)
	if _, err := r.Standing(t.Context()); !errors.Is(err, history.ErrUnavailable) {
		t.Error(err)
	}
	for _, path := range []string{"/v1/query/events", "/v1/explain/11"} {
		w := httptest.NewRecorder()
		r.Handler().ServeHTTP(w, httptest.NewRequest("GET", path, http.NoBody))
		if w.Code != http.StatusServiceUnavailable || !strings.Contains(w.Body.String(), "ClickHouse does not answer") {
			t.Errorf("%s: %d %s", path, w.Code, w.Body)
		}
	}
}

// Before the first round there are no tables.
func TestNoHistoryYet(t *testing.T) {
	e := startEngine(t)
	r := newReader(t, e.config())
	w := httptest.NewRecorder()
	r.Handler().ServeHTTP(w, httptest.NewRequest("GET", "/v1/query/events", http.NoBody))
	if w.Code != http.StatusServiceUnavailable || !strings.Contains(w.Body.String(), "holds no history yet") {
		t.Errorf("%d %s", w.Code, w.Body)
	}
	writer, _ := startWriter(t, e.config())
	resume(t, writer)
	at, err := r.Standing(t.Context())
	if err != nil || at.Rows != 0 || at.At.Sequence != 0 {
		t.Errorf("%+v %v", at, err)
	}
	if story, err := r.Explain(t.Context(), "11", ""); err != nil || story.Found {
		t.Errorf("%+v %v", story, err)
	}
}
