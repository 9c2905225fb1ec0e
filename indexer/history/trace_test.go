package history_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"kvstrata/indexer/history"
)

// The example's export has what happened in it, a process a source, and every residence that begins ends.
func TestExport(t *testing.T) {
	e := startEngine(t)
	began := example(t, e)
	r := newReader(t, e.config())
	window := map[string]string{
		"since": began.Add(-time.Second).Format(time.RFC3339), "until": began.Add(2 * time.Minute).Format(time.RFC3339),
	}
	var out bytes.Buffer
	if err := r.Export(t.Context(), &out, window); err != nil {
		t.Fatal(err)
	}
	var read struct {
		Events []struct {
			Name, Ph, ID string
			Pid, Tid     int
			Ts           int64
			Args         map[string]any
		} `json:"traceEvents"`
	}
	if err := json.Unmarshal(out.Bytes(), &read); err != nil {
		t.Fatalf("%v: %s", err, out.String())
	}
	var names []string
	open := make(map[string]int)
	phases := make(map[string]int)
	for _, ev := range read.Events {
		phases[ev.Ph]++
		switch ev.Ph {
		case "M":
			if ev.Name == "process_name" {
				names = append(names, fmt.Sprint(ev.Args["name"]))
			}
			continue
		case "b":
			open[ev.ID]++
		case "e":
			open[ev.ID]--
		}
		if ev.Pid == 0 || ev.Ts < began.Add(-time.Minute).UnixMicro() {
			t.Errorf("%+v", ev)
		}
		if open[ev.ID] < 0 || open[ev.ID] > 1 {
			t.Errorf("%s at %d: %d times open", ev.ID, ev.Ts, open[ev.ID])
		}
	}
	for id, n := range open {
		if n != 0 {
			t.Errorf("%s does not end", id)
		}
	}
	slices.Sort(names)
	if len(names) < 2 || !strings.Contains(names[0], "m/model") || slices.Compact(slices.Clone(names))[len(names)-1] != names[len(names)-1] {
		t.Errorf("processes %q", names)
	}
	for _, phase := range []string{"i", "C", "X", "b", "e"} {
		if phases[phase] == 0 {
			t.Errorf("no event of phase %s: %v", phase, phases)
		}
	}
	for _, text := range []string{`"STORED `, `"EVICTED `, `"copies gained"`, `"life"`} {
		if !strings.Contains(out.String(), text) {
			t.Errorf("nothing named %s", text)
		}
	}
	if err := r.Export(t.Context(), &out, map[string]string{"blocks": "'; DROP TABLE block_events"}); !errors.Is(err, history.ErrBadParam) {
		t.Errorf("injection: %v", err)
	}
	out.Reset()
	if err := r.Export(t.Context(), &out, map[string]string{"since": window["since"], "engine": "nobody"}); err != nil || strings.Contains(out.String(), "process_name") {
		t.Errorf("another engine: %v: %s", err, out.String())
	}
	if !json.Valid(out.Bytes()) {
		t.Errorf("an empty export: %s", out.String())
	}
}
