package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"kvstrata/bench/workload"
	"kvstrata/indexer/prefix"
)

// runPart does one part of the work with ours. Its name and arguments are words: "trace 20 6.5" is work 1 with 20 copies in
// a window of 6.5 s.
func runPart(name, traces string) (map[string]float64, error) {
	words := strings.Fields(name)
	rest := strings.Join(words[1:], " ")
	switch words[0] {
	case "closed":
		return closedPart(rest, traces)
	case "trace":
		return tracePart(rest, traces)
	case "ingest":
		return ingestPart(rest)
	case "fill":
		var shared int
		if _, err := fmt.Sscan(rest, &shared); err != nil {
			return nil, fmt.Errorf("part %q: %w", name, err)
		}
		f, err := fill(shared)
		if err != nil {
			return nil, err
		}
		return map[string]float64{"bytes_per_entry": f.BytesPerEntry, "at": float64(f.At), "at_end": f.AtEnd}, nil
	case "lookups":
		var workers int
		if _, err := fmt.Sscan(rest, &workers); err != nil {
			return nil, fmt.Errorf("part %q: %w", name, err)
		}
		return lookups(workers)
	case "visible":
		var batches int
		if _, err := fmt.Sscan(rest, &batches); err != nil {
			return nil, fmt.Errorf("part %q: %w", name, err)
		}
		p50, p99, err := visible(batches)
		return map[string]float64{"p50_ms": p50, "p99_ms": p99}, err
	case "write":
		return nil, writePart(rest, traces)
	case "verify":
		return verifyPart(rest, traces)
	case "restart":
		took, err := restart()
		return map[string]float64{"restart_s": took}, err
	default:
		return nil, fmt.Errorf("part %q: unknown", name)
	}
}

func prepare(traces string, copies int) (*corpus, error) {
	t, err := workload.ReadTrace(traces)
	if err != nil {
		return nil, err
	}
	c := newCorpus(t, copies)
	if want := copies * workload.RemovedPerCopy; c.removedBlocks != want && t.SHA256 == workload.TraceSHA256 {
		return nil, fmt.Errorf("prepare trace: %d blocks removed, want %d", c.removedBlocks, want)
	}
	return c, nil
}

func closedPart(args, traces string) (map[string]float64, error) {
	var copies int
	if _, err := fmt.Sscan(args, &copies); err != nil {
		return nil, err
	}
	c, err := prepare(traces, copies)
	if err != nil {
		return nil, err
	}
	rate, err := closedLoop(newIndex(copies*workload.WorkersPerCopy), c)
	return map[string]float64{
		"block_ops_per_s": rate, "block_ops": float64(c.blockOps()), "logical_ops": float64(c.logicalOps()),
		"writes": float64(c.storedBlocks + c.removedBlocks),
	}, err
}

func tracePart(args, traces string) (map[string]float64, error) {
	var copies int
	var window float64
	if _, err := fmt.Sscan(args, &copies, &window); err != nil {
		return nil, err
	}
	c, err := prepare(traces, copies)
	if err != nil {
		return nil, err
	}
	r, err := deadlineDriven(newIndex(copies*workload.WorkersPerCopy), c, time.Duration(window*1e9))
	if err != nil {
		return nil, err
	}
	return map[string]float64{
		"kept_up": truth(r.KeptUp), "generator_valid": truth(r.GeneratorValid),
		"block_ops_per_s": r.BlockOps, "logical_ops_per_s": r.LogicalOps, "lookup_p50_us": r.LookupP50, "lookup_p99_us": r.LookupP99,
		"scheduled_p50_us": r.ScheduledP50, "scheduled_p99_us": r.ScheduledP99, "applied_p99_us": r.AppliedP99, "drain_ms": r.DrainMillis,
	}, nil
}

func truth(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

func ingestPart(args string) (map[string]float64, error) {
	var shape, pods, messages int
	var asMaps bool
	if _, err := fmt.Sscan(args, &shape, &pods, &messages, &asMaps); err != nil {
		return nil, err
	}
	g, err := ingest(workload.Shape(shape), pods, messages, asMaps)
	if err != nil {
		return nil, err
	}
	return map[string]float64{"all_us": g.All, "decode_us": g.Decode, "judge_us": g.Judge, "apply_us": g.Apply}, nil
}

// verifyPart does work 1 in order and returns what the answers add up to; Dynamo's program has the same mode.
func verifyPart(args, traces string) (map[string]float64, error) {
	var copies int
	if _, err := fmt.Sscan(args, &copies); err != nil {
		return nil, err
	}
	c, err := prepare(traces, copies)
	if err != nil {
		return nil, err
	}
	x := newIndex(copies * workload.WorkersPerCopy)
	r, req := x.NewReader(), &prefix.Request{Model: model, BlockSize: blockSize}
	sources, blocks, next := 0, 0, 0
	for i := range c.queries {
		q := &c.queries[i]
		if i%copies == 0 { // the writes of the step before are due
			for ; next < len(c.writes) && c.writes[next].query < i; next++ {
				if _, err := x.Apply(context.Background(), &c.writes[next].message); err != nil {
					return nil, err
				}
			}
		}
		req.Hashes = q.hashes
		scores, err := r.Scores(req)
		if err != nil && !errors.Is(err, prefix.ErrUnknownModel) {
			return nil, err
		}
		sources += len(scores)
		for j := range scores {
			blocks += int(scores[j].Blocks)
		}
	}
	return map[string]float64{"sources_0": float64(sources), "blocks_0": float64(blocks), "writes": float64(len(c.writes))}, nil
}

// writePart writes a work file for Dynamo's program: "trace COPIES PATH", "lookups WORKERS PATH" or "fill SHARED PATH".
func writePart(args, traces string) error {
	var kind, path string
	var n int
	if _, err := fmt.Sscan(args, &kind, &n, &path); err != nil {
		return fmt.Errorf("part %q: %w", args, err)
	}
	w, err := newWorkFile(path)
	if err != nil {
		return err
	}
	switch kind {
	case "trace":
		t, err := workload.ReadTrace(traces)
		if err != nil {
			return err
		}
		w.trace(t, n)
	case "lookups":
		w.lookups(n)
	case "fill":
		w.fill(n)
	default:
		return fmt.Errorf("part %q: unknown work", kind)
	}
	return w.close()
}
