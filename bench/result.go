package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"runtime"
	"slices"
	"strings"
	"text/tabwriter"
)

// figure is one measured number; baseline is the strongest peer's on the same work. What does not apply is left out.
type figure struct {
	Value    float64  `json:"value"`
	Unit     string   `json:"unit"`
	Baseline *float64 `json:"baseline,omitempty"`
	Ratio    *float64 `json:"ratio,omitempty"`
	Goal     *float64 `json:"goal,omitempty"`

	peers map[string]string // by column
}

type result struct {
	Bench    string             `json:"bench"`
	Machine  string             `json:"machine"`
	Workload string             `json:"workload"`
	KeptUp   bool               `json:"kept_up"`
	Figures  map[string]*figure `json:"figures"`
	Notes    []string           `json:"notes,omitempty"`
}

var goals = map[string]float64{
	"apply_block_ops_per_s": 5e6, "lookup_p50_us": 1, "lookup_p99_us": 5, "lookup_1000x64_hashes_us": 8, "lookup_1000x64_tokens_us": 40,
	"message64_us": 20, "message1_us": 0.5, "churn_us": 1, "bytes_per_entry": 48, "bytes_per_entry_shared16": 24, "visible_p99_ms": 1,
	"restart_s": 1,
}

// recordedFigures were measured elsewhere, of programs that cannot be imported, or were published.
var recordedFigures = []struct{ name, column, value string }{
	{"message64_us", "AIBrix", "248"},
	{"message1_us", "AIBrix", "6.3"},
	{"churn_us", "AIBrix", "10.3"},
	{"message64_us", "llm-d-router", "535"},
	{"message1_us", "llm-d-router", "11.2"},
	{"churn_us", "llm-d-router", "23.4"},
	{"lookup_1000x64_tokens_us", "AIBrix", "2660"},
	{"lookup_1000x64_hashes_us", "llm-d-router", "41500"},
	{"lookup_full_1000x16_tokens_us", "AIBrix", "806"},
	{"lookup_full_1000x16_hashes_us", "llm-d-router", "12300"},
	{"bytes_per_entry", "AIBrix", "460 heap"},
	{"bytes_per_entry_shared16", "AIBrix", "231 heap"},
	{"bytes_per_entry_shared64", "AIBrix", "223 heap"},
	{"bytes_per_entry", "llm-d-router", "1270 heap"},
	{"apply_block_ops_per_s", "Dynamo published", "1.1 M (EPYC 7742)"},
	{"lookup_p50_us", "Dynamo published", "2.38 (EPYC 7702P)"},
	{"lookup_p99_us", "Dynamo published", "10.12 (EPYC 7702P)"},
	{"visible_p99_ms", "Dynamo published", "8.7 (EPYC 7702P)"},
	{"bytes_per_entry", "Dynamo published", "339"},
}

func newResult() *result {
	return &result{Bench: "index", Machine: machine(), Figures: make(map[string]*figure)}
}

func (r *result) ours(name string, value float64, unit string) {
	f := &figure{Value: value, Unit: unit}
	if g, ok := goals[name]; ok {
		f.Goal = &g
	}
	if strings.HasSuffix(name, "_per_s") {
		f.Unit = "1/s"
	}
	r.Figures[name] = f
}

// dynamo enters what Dynamo's index did with the same work in this run.
func (r *result) dynamo(name string, value float64, _ string) {
	f := r.Figures[name]
	if f == nil || value == 0 { // not measured
		return
	}
	ratio := f.Value / value
	f.Baseline, f.Ratio = &value, &ratio
}

// timed enters work 1's figures at keep-up.
func (r *result) timed(f map[string]float64, enter func(name string, value float64, unit string)) {
	for name, unit := range map[string]string{"lookup_p50_us": "µs", "lookup_p99_us": "µs"} {
		enter(name, f[name], unit)
	}
	for name, unit := range map[string]string{
		"block_ops_per_s": "1/s", "logical_ops_per_s": "1/s", "scheduled_p50_us": "µs", "scheduled_p99_us": "µs", "applied_p99_us": "µs",
		"drain_ms": "ms", "window_s": "s", "generator_valid": "",
	} {
		enter("trace_"+name, f[name], unit)
	}
}

func (r *result) recorded() {
	for _, p := range recordedFigures {
		if f := r.Figures[p.name]; f != nil {
			if f.peers == nil {
				f.peers = make(map[string]string)
			}
			f.peers[p.column] = p.value
		}
	}
}

func (r *result) print(w io.Writer, format string) error {
	if format == "json" {
		enc := json.NewEncoder(w)
		enc.SetIndent("", "  ")
		return enc.Encode(r)
	}
	fmt.Fprintf(w, "%s: %s\non %s; kept up: %v\n\n", r.Bench, r.Workload, r.Machine, r.KeptUp)
	t := tabwriter.NewWriter(w, 2, 0, 2, ' ', tabwriter.AlignRight)
	columns := []string{"AIBrix", "llm-d-router", "Dynamo published"}
	fmt.Fprintln(t, "FIGURE\tOURS\tUNIT\tGOAL\tDYNAMO HERE\tRATIO\tAIBRIX recorded\tLLM-D recorded\tDYNAMO published\t")
	names := make([]string, 0, len(r.Figures))
	for name := range r.Figures {
		names = append(names, name)
	}
	slices.Sort(names)
	for _, name := range names {
		f := r.Figures[name]
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%s\t", name, number(f.Value), f.Unit, optional(f.Goal), optional(f.Baseline), optional(f.Ratio))
		for _, c := range columns {
			fmt.Fprintf(t, "%s\t", f.peers[c])
		}
		fmt.Fprintln(t)
	}
	err := t.Flush()
	for _, note := range r.Notes {
		fmt.Fprintln(w, note)
	}
	return err
}

func optional(v *float64) string {
	if v == nil {
		return "–"
	}
	return number(*v)
}

func number(v float64) string {
	if v >= 1000 {
		return fmt.Sprintf("%.0f", v)
	}
	return fmt.Sprintf("%.3g", v)
}

// machine describes what the figures were measured on.
func machine() string {
	name := "unknown processor"
	if info, err := os.ReadFile("/proc/cpuinfo"); err == nil {
		for line := range strings.Lines(string(info)) {
			if key, value, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(key) == "model name" {
				name = strings.TrimSpace(value)
				break
			}
		}
	}
	return fmt.Sprintf("%s, %d processors, %s", name, runtime.GOMAXPROCS(0), runtime.Version())
}
