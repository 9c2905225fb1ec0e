package history_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"kvstrata/event"
	"kvstrata/indexer/history"
)

// promptOf returns the tokens of the blocks that run makes.
func promptOf(hashes ...uint64) (tokens []uint32) { return run(event.Stored, hashes...).Tokens }

// missing is a hand-made fleet, each engine of which lacks another block of the prompt 1 to 6, for another reason.
func missing(t *testing.T) (r *history.Reader, began time.Time) {
	t.Helper()
	began = time.Now().UTC().Truncate(24 * time.Hour).Add(-14 * time.Hour)
	all := fleet(began, "evicts", "tiers", "clears", "adapter", "other", "whole", "loads")
	evicts, tiers, clears, adapter, other, whole, loads := all[0], all[1], all[2], all[3], all[4], all[5], all[6]
	evicts.at(began, 0, run(event.Stored, hashes(1, 6)...))
	evicts.at(began, 30, run(event.Evicted, 4), run(event.Stored, 50, 51))
	evicts.at(began, 60, under(run(event.Stored, 4), 3))
	evicts.at(began, 80, run(event.Evicted, 5))
	tiers.at(began, 1, run(event.Stored, 1, 2), on(event.CPU, under(run(event.Stored, 3), 2)))
	clears.at(began, 2, run(event.Stored, hashes(1, 6)...))
	clears.now = began.Add(10250 * time.Millisecond)
	clears.publish(event.Event{Kind: event.Cleared, Cause: event.ByEngine, Group: event.NoGroup, LoRAID: event.NoLoRAID})
	under := run(event.Stored, 1, 2)
	under.LoRA = "ad"
	adapter.at(began, 3, under)
	other.at(began, 4, run(event.Stored, 90))
	whole.at(began, 5, run(event.Stored, hashes(1, 6)...))
	whole.at(began, 25, run(event.Evicted, 6, 5, 4, 3, 2, 1))
	loads.source.Instance, loads.source.Origin = "evicts", event.Connector
	load := run(event.Loaded, 4)
	n, err := strconv.ParseUint(prefixOf(1, 2, 3, 4), 16, 64)
	if err != nil {
		t.Fatal(err)
	}
	load.Blocks[0].Prefix = event.PrefixHash(n)
	load.Load = event.Load{From: event.CPU, Peer: "p'\\", Request: `re'q\1`, Bytes: 4096, Duration: 5 * time.Second}
	loads.at(began, 62, load) // begun before the block was stored again
	return keepAll(t, all...), began
}

// told writes endings for people: a line a source, with times as seconds.
func endings(w *history.Walk, began time.Time) (lines []string) {
	for _, e := range w.Endings {
		line := spaced(e.Instance, e.Blocks, e.Of, e.Verdict)
		if e.Time != 0 {
			line += fmt.Sprint(" at ", time.UnixMilli(e.Time).Sub(began))
		}
		if e.Reason != "" {
			line += ", " + e.Reason
		}
		if e.Variant != nil {
			line += ", " + e.Variant.LoRA
		}
		line += fmt.Sprint(" ", e.Tiers)
		for _, p := range e.Elsewhere {
			line += fmt.Sprint("; held by ", p.Instance, " ", p.Tier)
		}
		for _, n := range e.Next {
			line += fmt.Sprint("; then ", n.Op, " ", n.Tier, " ", time.UnixMilli(n.Time).Sub(began))
		}
		lines = append(lines, line)
	}
	return lines
}

func TestWalk(t *testing.T) {
	r, began := missing(t)
	at := func(seconds int) string { return began.Add(time.Duration(seconds) * time.Second).Format(time.RFC3339) }
	walk := func(t *testing.T, p history.Prompt) *history.Walk {
		t.Helper()
		if p.Model == "" && p.Request == "" {
			p.Model = "m/model"
		}
		w, err := r.Walk(t.Context(), &p)
		if err != nil {
			t.Fatal(err)
		}
		return w
	}
	const room = "to make room, by what it seems: the same step stored 2 blocks there"
	for _, test := range []struct {
		name   string
		prompt history.Prompt
		want   []string
	}{
		{"after an eviction", history.Prompt{Tokens: promptOf(hashes(1, 6)...), At: at(40), Engine: "evicts"}, []string{
			"evicts 3 6 evicted at 30s, " + room + " [GPU]; then STORED GPU 1m0s",
		}},
		{"before it", history.Prompt{Tokens: promptOf(hashes(1, 6)...), At: at(29), Engine: "evicts"}, []string{"evicts 6 6 complete []"}},
		{"later, another block", history.Prompt{Tokens: promptOf(hashes(1, 6)...), Engine: "evicts"}, []string{
			"evicts 4 6 evicted at 1m20s, the engine tells no reason, and the same step stored nothing there [GPU]",
		}},
		{"a tier", history.Prompt{Tokens: promptOf(hashes(1, 6)...), At: at(20), Tier: "GPU", Engine: "tiers"}, []string{
			"tiers 2 6 other_tier [CPU]; held by evicts GPU; held by whole GPU",
		}},
		{"any tier", history.Prompt{Tokens: promptOf(hashes(1, 6)...), At: at(20), Engine: "tiers"}, []string{
			"tiers 3 6 other_engine []; held by evicts GPU; held by whole GPU",
		}},
		{"nobody", history.Prompt{Tokens: promptOf(hashes(1, 6)...), At: at(40), Engine: "tiers"}, []string{"tiers 3 6 never_stored []"}},
		{"cleared", history.Prompt{Hashes: prefixes(t, hashes(1, 6)...), At: at(26), Engine: "clears"}, []string{
			"clears 0 6 reset at 10.25s, the engine cleared its cache []; held by evicts GPU; held by tiers GPU",
		}},
		{"another adapter", history.Prompt{Tokens: promptOf(1, 2), At: at(26), Engine: "adapter", Others: []history.Variant{{Salt: "x"}, {LoRA: "ad"}}}, []string{
			"adapter 0 2 other_variant, ad []; held by evicts GPU; held by tiers GPU",
		}},
		{"under the adapter", history.Prompt{Tokens: promptOf(1, 2, 3), LoRA: "ad", At: at(26), Engine: "adapter"}, []string{"adapter 2 3 never_stored []"}},
		{"without the adapter", history.Prompt{Tokens: promptOf(1), LoRA: "else", At: at(26), Engine: "tiers"}, []string{"tiers 0 1 other_variant,  []"}},
		{"everybody", history.Prompt{Tokens: promptOf(1), At: at(26)}, []string{
			"evicts 1 1 complete []", "tiers 1 1 complete []",
			"adapter 0 1 other_engine []; held by evicts GPU; held by tiers GPU",
			"clears 0 1 reset at 10.25s, the engine cleared its cache []; held by evicts GPU; held by tiers GPU",
			"other 0 1 other_engine []; held by evicts GPU; held by tiers GPU",
			"whole 0 1 evicted at 25s, the engine tells no reason, and the same step stored nothing there [GPU]; held by evicts GPU; held by tiers GPU",
		}},
		{"a request", history.Prompt{Request: `re'q\1`}, []string{"evicts 0 1 evicted at 30s, " + room + " [GPU]; then STORED GPU 1m0s"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			w := walk(t, test.prompt)
			got := endings(w, began)
			if diff := cmp.Diff(test.want, got); diff != "" {
				t.Error(diff)
			}
			for i, e := range w.Endings {
				if e.Inferred || e.Text == "" || len(w.Summary) < len(w.Endings) || !strings.Contains(strings.Join(w.Summary, "\n"), w.Endings[i].Text) {
					t.Errorf("%+v", e)
				}
			}
		})
	}
	t.Run("sentences", func(t *testing.T) {
		w := walk(t, history.Prompt{Tokens: promptOf(hashes(1, 6)...), At: at(40), Engine: "evicts"})
		clock := func(seconds int) string {
			return began.Add(time.Duration(seconds) * time.Second).Format("2006-01-02 15:04:05.000 UTC")
		}
		want := fmt.Sprintf("evicts held 3 of 6 blocks (48 tokens); block 4 (%s) was evicted from GPU at %s after 30s (%s); stored in GPU at %s.",
			prefixOf(1, 2, 3, 4), clock(30), room, clock(60))
		if diff := cmp.Diff([]string{want}, w.Summary); diff != "" {
			t.Error(diff)
		}
		w = walk(t, history.Prompt{Request: `re'q\1`})
		want = `evicts loaded 1 block (4.0 KiB) from CPU to GPU in 5s; peer p'\.`
		if len(w.Told) != 1 || w.Summary[0] != want || w.Told[0].Time != began.Add(62*time.Second).UnixMilli() {
			t.Errorf("%+v", w)
		}
	})
	t.Run("a story's moments", func(t *testing.T) {
		story, err := r.Explain(t.Context(), prefixOf(1, 2, 3, 4, 5, 6), "")
		if err != nil {
			t.Fatal(err)
		}
		var cleared []time.Duration
		for _, l := range story.Events {
			if l.Op == "CLEARED" {
				cleared = append(cleared, time.UnixMilli(l.Time).Sub(began))
			}
		}
		if diff := cmp.Diff([]time.Duration{10250 * time.Millisecond}, cleared); diff != "" {
			t.Error(diff)
		}
	})
	t.Run("nothing known", func(t *testing.T) {
		for want, p := range map[string]history.Prompt{
			"History knows no engine of this model and name":                {Model: "m", Tokens: promptOf(1)},
			"The prompt fills no block: history knows blocks of 16 tokens.": {Model: "m/model", Tokens: []uint32{1, 2}},
			"No connector told of this request in what is kept.":            {Request: "x"},
		} {
			if w := walk(t, p); len(w.Endings) > 0 || len(w.Summary) != 1 || !strings.HasPrefix(w.Summary[0], want) {
				t.Errorf("%+v, want %s", w, want)
			}
		}
	})
	t.Run("injection", func(t *testing.T) {
		for _, text := range []string{`' OR 1=1 --`, `\' OR 1=1 --`, "x'; DROP TABLE block_events; --", `\`, `'`, "a\tb\nc", "{model:String}", "%27"} {
			for _, p := range []history.Prompt{
				{Model: text, Tokens: promptOf(1)},
				{Model: "m/model", Engine: text, Tokens: promptOf(1)},
				{Request: text},
				{Request: `re'q\1`, Engine: text},
			} {
				if w := walk(t, p); len(w.Endings) > 0 || len(w.Told) > 0 {
					t.Errorf("%q: %+v", text, w)
				}
			}
			for _, p := range []history.Prompt{
				{Model: "m/model", Tier: text, Tokens: promptOf(1), At: at(26), Engine: "tiers"},
				{Model: "m/model", LoRA: text, Tokens: promptOf(1), At: at(26), Engine: "tiers"},
				{Model: "m/model", Salt: text, Tokens: promptOf(1), At: at(26), Engine: "tiers"},
			} {
				if w := walk(t, p); len(w.Endings) != 1 || w.Endings[0].Blocks != 0 {
					t.Errorf("%q: %+v", text, w)
				}
			}
		}
	})
	t.Run("http", func(t *testing.T) {
		for _, test := range []struct {
			method, body string
			status       int
			want         string
		}{
			{"POST", `{"model": "m/model", "token_ids": [1], "engine": "tiers"}`, 200, "fills no block"},
			{"POST", `{"model": "m/model", "prefix_hashes": ["` + prefixOf(1) + `"], "engine": "tiers"}`, 200, `"verdict":"complete"`},
			{"POST", `{}`, 400, "parameter token_ids, prefix_hashes, request: give one of them"},
			{"POST", `{"token_ids": [1]}`, 400, "parameter model: missing"},
			{"POST", `{"request": "r", "at": "yesterday"}`, 400, "parameter at"},
			{"POST", `{"request": "r\u0000"}`, 400, "zero byte"},
			{"POST", `{"model": "m", "prefix_hashes": ["` + prefixOf(1) + `"], "cache_salt": "x"}`, 400, "go with token_ids"},
			{"POST", `{"model": "m", "token_ids": [-1]}`, 400, "parameter of the body"},
			{"POST", `{"modle": "m"}`, 400, "modle"},
			{"POST", `{`, 400, "parameter of the body"},
			{"GET", ``, 405, "use POST, or GET /v1/explain/HASH"},
		} {
			w := httptest.NewRecorder()
			r.Handler().ServeHTTP(w, httptest.NewRequest(test.method, "/v1/explain", strings.NewReader(test.body)))
			if w.Code != test.status || !strings.Contains(w.Body.String(), test.want) || !json.Valid(w.Body.Bytes()) {
				t.Errorf("%s %s: %d %s, want %d and %s", test.method, test.body, w.Code, w.Body, test.status, test.want)
			}
		}
		w := httptest.NewRecorder()
		long := append(append([]byte(`{"model": "`), bytes.Repeat([]byte("x"), 17<<20)...), `"}`...)
		r.Handler().ServeHTTP(w, httptest.NewRequest(http.MethodPost, "/v1/explain", bytes.NewReader(long)))
		if w.Code != http.StatusBadRequest {
			t.Errorf("a body of 17 MiB: %d", w.Code)
		}
	})
}

// prefixes are the prefix hashes of a chain of the fleet's blocks.
func prefixes(t *testing.T, chain ...uint64) (list []event.PrefixHash) {
	t.Helper()
	for i := range chain {
		var h event.PrefixHash
		if err := h.UnmarshalText([]byte(prefixOf(chain[:i+1]...))); err != nil {
			t.Fatal(err)
		}
		list = append(list, h)
	}
	return list
}

// What is too much is refused.
func TestPromptBounds(t *testing.T) {
	for want, p := range map[string]history.Prompt{
		"tokens, or":  {Model: "m", Tokens: make([]uint32, 1<<20+1)},
		"block_size":  {Model: "m", Tokens: []uint32{1}, BlockSize: 1 << 17},
		"others":      {Model: "m", Tokens: []uint32{1}, Others: make([]history.Variant, 9)},
		"give one of": {Model: "m", Tokens: []uint32{1}, Request: "r"},
	} {
		if err := p.Validate(); !errors.Is(err, history.ErrBadParam) || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %s", err, want)
		}
	}
}
