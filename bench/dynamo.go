package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"

	"kvstrata/bench/workload"
)

// dynamo is the Rust program beside this one, which gives Dynamo's index the same work.
type dynamo struct {
	o       *options
	program string
	folder  string // of work files
}

// build finds the program, or makes it. why says why it cannot be had; then the published figures stand alone.
func (d *dynamo) build() (why string) {
	const crate = "dynamo"
	d.program, _ = filepath.Abs(filepath.Join(crate, "target", "release", "kvstrata-bench-dynamo"))
	if _, err := os.Stat(filepath.Join(crate, "Cargo.toml")); err != nil {
		return "Dynamo was not run: start this in the folder bench, where dynamo/Cargo.toml is"
	}
	if _, err := os.Stat(d.program); err == nil && d.o.smoke {
		return ""
	}
	if d.o.smoke {
		return "Dynamo was not run: --smoke builds nothing (make bench-index does)"
	}
	if _, err := exec.LookPath("cargo"); err != nil {
		return "Dynamo was not run: there is no cargo to build it with; install Rust"
	}
	cmd := exec.Command("cargo", "build", "--release", "--locked")
	cmd.Dir, cmd.Stderr = crate, os.Stderr
	if err := cmd.Run(); err != nil {
		return fmt.Sprintf("Dynamo was not run: cargo build: %v", err)
	}
	return ""
}

// run gives it one file of work.
func (d *dynamo) run(mode, file string, args ...string) (map[string]float64, error) {
	fmt.Fprintln(os.Stderr, "… Dynamo", mode, filepath.Base(file))
	cmd := exec.Command(d.program, append([]string{mode, file}, args...)...)
	cmd.Stderr = os.Stderr
	return answer(cmd, "Dynamo "+mode)
}

// write writes a file of work.
func (d *dynamo) write(name string, fill func(*workFile)) (string, error) {
	path := filepath.Join(d.folder, name)
	w, err := newWorkFile(path)
	if err != nil {
		return "", err
	}
	fill(w)
	return path, w.close()
}

// measure does the works and enters Dynamo's figures beside ours.
func (d *dynamo) measure(r *result) (err error) {
	if why := d.build(); why != "" {
		r.Notes = append(r.Notes, why)
		return nil
	}
	if d.folder, err = os.MkdirTemp("", "kvstrata-bench-"); err != nil {
		return fmt.Errorf("make folder for work: %w", err)
	}
	defer os.RemoveAll(d.folder)
	for _, part := range []func(*result) error{d.traced, d.messages, d.fills, d.lookups} {
		if err := part(r); err != nil {
			return err
		}
	}
	return nil
}

func (d *dynamo) traced(r *result) error {
	if d.o.traces == "" {
		return nil
	}
	t, err := workload.ReadTrace(d.o.traces)
	if err != nil {
		return err
	}
	file, err := d.write("trace", func(w *workFile) { w.trace(t, d.o.copies) })
	if err != nil {
		return err
	}
	defer os.Remove(file)
	closed, err := d.run("closed", file)
	if err != nil {
		return err
	}
	r.dynamo("apply_block_ops_per_s", closed["block_ops_per_s"], "1/s")
	best, err := sweep(d.o.window, func(window float64) (map[string]float64, error) {
		return d.run("timed", file, fmt.Sprintf("%.3f", window))
	})
	if err != nil || best == nil {
		return err
	}
	r.timed(best, r.dynamo)
	told, err := d.run("verify", file)
	if err != nil {
		return err
	}
	want := t.Answers()
	r.Notes = append(r.Notes, fmt.Sprintf("Work 1 in order: the right answers of a copy add up to %d blocks, Dynamo's to %.0f; it refused %.0f of %.0f events",
		want, told["blocks_0"]/float64(d.o.copies), told["refused"], told["writes"]))
	return nil
}

func (d *dynamo) messages(r *result) error {
	n := 1000
	if d.o.smoke {
		n = 60
	}
	for shape, name := range map[workload.Shape]string{workload.Prefill64: "message64_us", workload.Decode1: "message1_us", workload.Churn: "churn_us"} {
		for _, asMaps := range []bool{false, true} {
			file, err := d.write("messages", func(w *workFile) { w.messages(workload.Payloads(shape, 16, n, asMaps)) })
			if err != nil {
				return err
			}
			f, err := d.run("messages", file)
			if err != nil {
				return err
			}
			if asMaps {
				r.dynamo(name+"_map", f["all_us"], "µs")
			} else {
				r.dynamo(name, f["all_us"], "µs")
			}
		}
	}
	return nil
}

func (d *dynamo) fills(r *result) error {
	for shared, name := range map[int]string{1: "bytes_per_entry", 16: "bytes_per_entry_shared16", 64: "bytes_per_entry_shared64"} {
		file, err := d.write("fill", func(w *workFile) { w.fill(shared) })
		if err != nil {
			return err
		}
		f, err := d.run("fill", file)
		if err != nil {
			return err
		}
		r.dynamo(name, f["bytes_per_entry"], "B")
		r.dynamo(name+"_at_2.1M", f["at_end"], "B")
	}
	return nil
}

func (d *dynamo) lookups(r *result) error {
	for _, workers := range []int{16, 64} {
		file, err := d.write("lookups", func(w *workFile) { w.lookups(workers) })
		if err != nil {
			return err
		}
		f, err := d.run("lookups", file)
		if err != nil {
			return err
		}
		told, err := d.run("verify", file)
		if err != nil {
			return err
		}
		for kind, name := range []string{"full", "stagger", "miss"} {
			want := prompts * [...]int{workers * promptBlocks, staggered(workers), 0}[kind]
			if got := told[fmt.Sprintf("blocks_%d", kind)]; got != float64(want) {
				r.Notes = append(r.Notes, fmt.Sprintf("Dynamo's lookups %s of %d workers are left out: its answers add up to %.0f blocks, not %d; it refused %.0f of %.0f events",
					name, workers, got, want, told["refused"], told["writes"]))
				continue
			}
			r.dynamo(fmt.Sprintf("lookup_%s_%dx%d_hashes_us", name, promptBlocks, workers), f[name+"_us"], "µs")
		}
		if workers == 64 {
			r.dynamo("lookup_1000x64_hashes_us", f["full_us"], "µs")
		}
	}
	return nil
}

// staggered returns how many blocks of one staggered prompt so many workers hold together.
func staggered(workers int) (blocks int) {
	for w := range workers {
		blocks += promptBlocks * (w + 1) / workers
	}
	return blocks
}
