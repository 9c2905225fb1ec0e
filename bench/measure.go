package main

import (
	"errors"
	"fmt"

	"kvstrata/bench/workload"
)

// measure does all the work: ours first, then Dynamo's, where its program can be built.
func (o *options) measure() (*result, error) {
	r := newResult()
	messages, visibles := 1000, 2000
	if o.smoke {
		messages, visibles, o.copies = 60, 200, 1
	}
	r.Workload = fmt.Sprintf("Mooncake conversation trace, %d copies; vLLM messages of 16 pods; %d to %d entries; prompts of %d blocks",
		o.copies, fillFrom, fillTo, promptBlocks)
	err := errors.Join(o.works(r, messages, visibles), o.fills(r))
	if err != nil {
		return nil, err
	}
	dynamo := &dynamo{o: o}
	if err := dynamo.measure(r); err != nil {
		return nil, err
	}
	r.recorded()
	return r, nil
}

func (o *options) works(r *result, messages, visibles int) error {
	if o.traces == "" {
		r.Notes = append(r.Notes, "work 1 is left out: KVSTRATA_TRACES names no folder with "+workload.TraceFile)
	} else if err := o.traced(r); err != nil {
		return err
	}
	for _, asMaps := range []bool{false, true} {
		for shape, name := range map[workload.Shape]string{workload.Prefill64: "message64_us", workload.Decode1: "message1_us", workload.Churn: "churn_us"} {
			f, err := o.part("ingest %d 16 %d %v", shape, messages, asMaps)
			if err != nil {
				return err
			}
			if asMaps {
				name += "_map"
			}
			r.ours(name, f["all_us"], "µs")
			for _, stage := range []string{"decode", "judge", "apply"} {
				r.ours(name+"_"+stage, f[stage+"_us"], "µs")
			}
		}
	}
	for _, workers := range []int{16, 64} {
		f, err := o.part("lookups %d", workers)
		if err != nil {
			return err
		}
		for name, v := range f {
			r.ours(name, v, "µs")
		}
		if workers == 64 {
			r.ours("lookup_1000x64_hashes_us", f["lookup_full_1000x64_hashes_us"], "µs")
			r.ours("lookup_1000x64_tokens_us", f["lookup_full_1000x64_tokens_us"], "µs")
		}
	}
	f, err := o.part("visible %d", visibles)
	if err != nil {
		return err
	}
	r.ours("visible_p50_ms", f["p50_ms"], "ms")
	r.ours("visible_p99_ms", f["p99_ms"], "ms")
	f, err = o.part("restart")
	r.ours("restart_s", f["restart_s"], "s")
	return err
}

// traced does work 1: the ceiling of writes alone, then windows until one is too short.
func (o *options) traced(r *result) error {
	closed, err := o.part("closed %d", o.copies)
	if err != nil {
		return err
	}
	r.ours("apply_block_ops_per_s", closed["block_ops_per_s"], "1/s")
	o.window = closed["writes"] / closed["block_ops_per_s"] * 1.5
	best, err := sweep(o.window, func(window float64) (map[string]float64, error) {
		return o.part("trace %d %.3f", o.copies, window)
	})
	r.KeptUp = best != nil
	if err != nil || best == nil {
		return err
	}
	r.timed(best, r.ours)
	return nil
}

func (o *options) fills(r *result) error {
	for shared, name := range map[int]string{1: "bytes_per_entry", 16: "bytes_per_entry_shared16", 64: "bytes_per_entry_shared64"} {
		f, err := o.part("fill %d", shared)
		if err != nil {
			return err
		}
		r.ours(name, f["bytes_per_entry"], "B")
		r.ours(name+"_at_2.1M", f["at_end"], "B")
	}
	return nil
}

// runGrowth prints the figures that depend on size at 1, 4 and 16 times the workers and blocks: work 1 with 4, 16 and 64 copies
// (64, 256 and 1,024 workers), churn and lookups with 16, 64 and 256 workers.
func (o *options) runGrowth() error {
	for _, times := range []int{1, 4, 16} {
		fmt.Printf("%d×:", times)
		if o.traces != "" {
			f, err := o.part("closed %d", 4*times)
			if err != nil {
				return err
			}
			fmt.Printf(" apply %.2f M block-ops/s;", f["block_ops_per_s"]/1e6)
		}
		f, err := o.part("ingest %d %d 500 false", workload.Churn, 16*times)
		if err != nil {
			return err
		}
		fmt.Printf(" churn %.2f µs;", f["all_us"])
		if f, err = o.part("lookups %d", 16*times); err != nil {
			return err
		}
		key := func(kind string) float64 {
			return f[fmt.Sprintf("lookup_full_%dx%d_%s_us", promptBlocks, 16*times, kind)]
		}
		fmt.Printf(" lookup of %d blocks by hashes %.1f µs, by tokens %.1f µs\n", promptBlocks, key("hashes"), key("tokens"))
	}
	return nil
}
