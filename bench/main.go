// Command bench gives the same work to our prefix index and to its peers, in one run on one machine, and prints one table.
// docs/performance.md says what each figure means.
package main

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
)

type options struct {
	traces string
	format string
	smoke  bool
	growth bool
	floor  bool
	copies int
	child  string

	window float64 // seconds in which the sweep of work 1 begins
}

func main() {
	var o options
	flag.StringVar(&o.traces, "traces", os.Getenv("KVSTRATA_TRACES"), "folder of the Mooncake trace (KVSTRATA_TRACES)")
	flag.StringVar(&o.format, "format", "table", "table or json")
	flag.BoolVar(&o.smoke, "smoke", false, "small work, under a minute: figures mean nothing, and Dynamo runs only where it is built")
	flag.BoolVar(&o.growth, "growth", false, "the figures at 1, 4 and 16 times the workers and blocks")
	flag.BoolVar(&o.floor, "floor", false, "what this machine's memory gives: reads, bandwidth, bare tables")
	flag.IntVar(&o.copies, "copies", 20, "copies of the trace in work 1, each with 16 workers of its own")
	flag.StringVar(&o.child, "child", "", "one part, in this process (the parent's own use)")
	flag.Parse()
	if err := o.run(); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

func (o *options) run() error {
	switch {
	case o.format != "table" && o.format != "json":
		return fmt.Errorf("--format %q: want table or json", o.format)
	case o.child != "":
		figures, err := runPart(o.child, o.traces)
		if err != nil {
			return err
		}
		return json.NewEncoder(os.Stdout).Encode(figures)
	case o.floor:
		return printFloor(os.Stdout)
	case o.growth:
		return o.runGrowth()
	}
	r, err := o.measure()
	if err != nil {
		return err
	}
	return r.print(os.Stdout, o.format)
}

// part runs one part of the work in a fresh process of its own, so that no part inherits another's heap.
func (o *options) part(format string, args ...any) (map[string]float64, error) {
	name := fmt.Sprintf(format, args...)
	self, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("find own program: %w", err)
	}
	fmt.Fprintln(os.Stderr, "…", name)
	cmd := exec.Command(self, "--child", name, "--traces", o.traces)
	cmd.Stderr = os.Stderr
	return answer(cmd, name)
}

// answer runs a program that prints a map of figures.
func answer(cmd *exec.Cmd, name string) (map[string]float64, error) {
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("run %s: %w", name, err)
	}
	figures := make(map[string]float64)
	if err := json.Unmarshal(out, &figures); err != nil {
		return nil, fmt.Errorf("read what %s printed: %w", name, err)
	}
	return figures, nil
}

// sweep finds the smallest window in which work 1 keeps up. run answers for a window in seconds; first is where it begins.
func sweep(first float64, run func(window float64) (map[string]float64, error)) (best map[string]float64, err error) {
	var all error
	for window, tried := first, 0; tried < 8; tried++ {
		f, err := run(window)
		all = errors.Join(all, err)
		if err != nil {
			return best, all
		}
		f["window_s"] = window
		switch {
		case f["kept_up"] == 1:
			best = f
			window *= 0.8
		case best != nil:
			return best, nil
		default:
			window *= 1.5
		}
	}
	return best, all
}
