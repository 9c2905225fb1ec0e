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

type benchCmd struct {
	Pipeline benchPipelineCmd `cmd:"" help:"Block events from the ZeroMQ socket through JetStream to the index."`
	Decode   benchDecodeCmd   `cmd:"" help:"Engines' payloads to prefix hashes, and through the subscriber into JetStream."`
	History  benchHistoryCmd  `cmd:"" help:"Block events through history's writer into ClickHouse: rows a second, bytes a row, times of queries."`
	Transfer benchTransferCmd `cmd:"" help:"KV blocks from one engine to another, beside the plainest means."`
}

// figure is one measured number. What does not apply is left out.
type figure struct {
	Value    float64  `json:"value"`
	Unit     string   `json:"unit"`
	Baseline *float64 `json:"baseline,omitempty"`
	Ratio    *float64 `json:"ratio,omitempty"`
	Goal     *float64 `json:"goal,omitempty"`
}

// result is what a benchmark prints: a table for people, or with --format json this object.
type result struct {
	Bench    string            `json:"bench"`
	Machine  string            `json:"machine"`
	Workload string            `json:"workload"`
	KeptUp   bool              `json:"kept_up"`
	Figures  map[string]figure `json:"figures"`
}

// print writes the result in a format.
func (r *result) print(w io.Writer, format string) error {
	if format == "json" {
		enc := json.NewEncoder(w)
		enc.SetIndent("", "  ")
		return enc.Encode(r)
	}
	fmt.Fprintf(w, "%s: %s\non %s; kept up: %v\n\n", r.Bench, r.Workload, r.Machine, r.KeptUp)
	t := tabwriter.NewWriter(w, 2, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "FIGURE\tVALUE\tUNIT\tBASELINE\tRATIO\tGOAL\t")
	var names []string
	for name := range r.Figures {
		names = append(names, name)
	}
	slices.Sort(names)
	for _, name := range names {
		f := r.Figures[name]
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%s\t\n", name, number(f.Value), f.Unit, optional(f.Baseline), optional(f.Ratio), optional(f.Goal))
	}
	return t.Flush()
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
	model := "unknown processor"
	if info, err := os.ReadFile("/proc/cpuinfo"); err == nil {
		for line := range strings.Lines(string(info)) {
			if name, value, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(name) == "model name" {
				model = strings.TrimSpace(value)
				break
			}
		}
	}
	return fmt.Sprintf("%s, %d processors, %s", model, runtime.GOMAXPROCS(0), runtime.Version())
}

func goal(v float64) *float64 { return &v }
