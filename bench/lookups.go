package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"kvstrata/bench/workload"
	"kvstrata/event"
	"kvstrata/indexer/prefix"
)

// Work 4: prompts of so many blocks.
const (
	prompts      = 50
	promptBlocks = 1000
)

// prompt is one, as tokens and as the names of its prefixes.
type prompt struct {
	tokens []uint32
	hashes []event.PrefixHash
}

func newPrompts(seed uint64) []prompt {
	list := make([]prompt, prompts)
	random := workload.NewRandom(seed)
	for i := range list {
		p := &list[i]
		p.tokens = make([]uint32, promptBlocks*blockSize)
		for j := range p.tokens {
			p.tokens[j] = random.Token()
		}
		p.hashes = event.Prefixes(nil, p.tokens, blockSize, event.Hasher{}.Seed("", ""), false)
	}
	return list
}

// feeder stores and evicts runs of names, as its sources' judge would tell it.
type feeder struct {
	index   *prefix.Index
	sources []event.Source
	next    []event.Seq
	random  *workload.Random
	kept    [][]event.Block // of churn, oldest first
}

func newFeeder(x *prefix.Index, workers int) *feeder {
	f := &feeder{index: x, next: make([]event.Seq, workers), random: workload.NewRandom(11)}
	for i := range workers {
		f.sources = append(f.sources, engine(i))
	}
	return f
}

func (f *feeder) apply(worker int, events ...event.Event) error {
	seq := f.next[worker]
	f.next[worker]++
	_, err := f.index.Apply(context.Background(), &event.Message{Source: f.sources[worker], Epoch: 1, Fence: 1, Batches: []event.Batch{
		{First: seq, Last: seq, Way: event.Live, Rank: -1, Time: event.Time(seq+1) * 1e6, Events: events},
	}})
	return err
}

// store stores the first n prefixes of a chain on a worker, under hashes of its own.
func (f *feeder) store(worker int, names []event.PrefixHash) error {
	blocks := make([]event.Block, len(names))
	for i, name := range names {
		blocks[i] = event.Block{Hash: event.IntHash(f.random.Next()), Prefix: name, Effect: +1, Copies: -1, Age: -1}
	}
	return f.apply(worker, storedRun(blocks))
}

// churn stores a run of 64 new blocks on a worker and evicts the one stored longest ago, once so many runs are kept.
func (f *feeder) churn(worker, keep int) (ops int, err error) {
	in := make([]event.Block, fillRun)
	var name event.PrefixHash
	for i := range in {
		name = event.Chain(name, f.random.Next())
		in[i] = event.Block{Hash: event.IntHash(f.random.Next()), Prefix: name, Effect: +1, Copies: -1, Age: -1}
	}
	events := []event.Event{storedRun(in)}
	out := make([]event.Block, len(in))
	copy(out, in)
	for i := range out {
		out[i].Effect, out[i].Copies = -1, 0
	}
	f.kept = append(f.kept, out)
	if len(f.kept) > keep {
		events = append([]event.Event{{Kind: event.Evicted, Tier: event.GPU, Group: event.NoGroup, LoRAID: event.NoLoRAID, Blocks: f.kept[0]}}, events...)
		f.kept = f.kept[1:]
		ops = fillRun
	}
	return ops + fillRun, f.apply(worker, events...)
}

// churnKept is how many runs of 64 the writer beside lookups keeps: a million blocks would only heat the machine.
const churnKept = 2048

// lookups measures every case over so many workers, alone and while writes go on at half the ceiling: µs a lookup, by the
// reader's own clock.
func lookups(workers int) (map[string]float64, error) {
	x := newIndex(workers + 1) // the last one churns
	f := newFeeder(x, workers+1)
	full, stagger, miss := newPrompts(1), newPrompts(2), newPrompts(3)
	staggered := 0
	for i := range prompts {
		for w := range workers {
			if i == 0 {
				staggered += promptBlocks * (w + 1) / workers
			}
			if err := errors.Join(f.store(w, full[i].hashes), f.store(w, stagger[i].hashes[:promptBlocks*(w+1)/workers])); err != nil {
				return nil, err
			}
		}
	}
	cases := []lookupCase{
		{"full", full, workers, workers * promptBlocks},
		{"stagger", stagger, workers, staggered},
		{"miss", miss, 0, 0},
	}
	figures := make(map[string]float64)
	measure := func(suffix string) error {
		r := x.NewReader()
		for _, c := range cases {
			for _, byTokens := range []bool{false, true} {
				took, err := c.measure(r, byTokens)
				if err != nil {
					return err
				}
				kind := map[bool]string{false: "hashes", true: "tokens"}[byTokens]
				figures[fmt.Sprintf("lookup_%s_%dx%d_%s%s_us", c.name, promptBlocks, workers, kind, suffix)] = took
			}
		}
		return nil
	}
	if err := measure(""); err != nil {
		return nil, err
	}
	ceiling, err := f.ceiling(workers, time.Second)
	if err != nil {
		return nil, err
	}
	figures[fmt.Sprintf("churn_ceiling_%d_block_ops_per_s", workers)] = ceiling
	var stop atomic.Bool
	done := make(chan error, 1)
	go func() { done <- f.paced(workers, ceiling/2, &stop) }()
	err = measure("_busy")
	stop.Store(true)
	return figures, errors.Join(err, <-done)
}

type lookupCase struct {
	name          string
	prompts       []prompt
	found, blocks int // sources, and their blocks together
}

// measure returns the median over rounds of what one lookup takes.
func (c *lookupCase) measure(r *prefix.Reader, byTokens bool) (float64, error) {
	const rounds = 41
	var took []float64
	req := &prefix.Request{Model: model, BlockSize: blockSize}
	if byTokens {
		req.BlockSize = 0
	}
	for range rounds {
		began := time.Now()
		for i := range c.prompts {
			if req.Hashes = c.prompts[i].hashes; byTokens {
				req.Hashes, req.Tokens = nil, c.prompts[i].tokens
			}
			scores, err := r.Scores(req)
			if err != nil {
				return 0, err
			}
			if len(scores) != c.found {
				return 0, fmt.Errorf("lookup %s: %d sources hold something, want %d", c.name, len(scores), c.found)
			}
			blocks := 0
			for j := range scores {
				blocks += int(scores[j].Blocks)
			}
			if blocks != c.blocks {
				return 0, fmt.Errorf("lookup %s: %d blocks found, want %d", c.name, blocks, c.blocks)
			}
		}
		took = append(took, float64(time.Since(began).Nanoseconds())/1000/float64(len(c.prompts)))
	}
	slices.Sort(took)
	return took[len(took)/2], nil
}

// ceiling returns block operations a second of the churn alone.
func (f *feeder) ceiling(worker int, length time.Duration) (float64, error) {
	began, ops := time.Now(), 0
	for time.Since(began) < length {
		n, err := f.churn(worker, churnKept)
		if err != nil {
			return 0, err
		}
		ops += n
	}
	return float64(ops) / time.Since(began).Seconds(), nil
}

// paced churns at a rate until it is told to stop.
func (f *feeder) paced(worker int, rate float64, stop *atomic.Bool) error {
	began, ops := time.Now(), 0
	for !stop.Load() {
		waitUntil(began, time.Duration(float64(ops)/rate*1e9))
		n, err := f.churn(worker, churnKept)
		if err != nil {
			return err
		}
		ops += n
	}
	return nil
}
