package main

import (
	"context"
	"fmt"
	"os"
	"runtime"

	"kvstrata/bench/workload"
	"kvstrata/event"
	"kvstrata/indexer/prefix"
)

// The sizes of work 3, in entries: (block, worker).
const (
	fillFrom  = 1_000_000
	fillTo    = 2_100_000
	fillEvery = 20_000
	fillRun   = 64 // blocks a message
)

// filling is work 3's answer.
type filling struct {
	BytesPerEntry float64 // at the worst size on the way
	At            int     // that size
	AtEnd         float64
}

// rss returns the resident memory of the process in bytes.
func rss() int64 {
	text, err := os.ReadFile("/proc/self/statm")
	if err != nil {
		return 0
	}
	var size, resident int64
	fmt.Sscan(string(text), &size, &resident)
	return resident * int64(os.Getpagesize())
}

// fill stores runs until the index has fillTo entries: each run on `shared` workers under different engine hashes. It counts
// all growth of resident memory since the empty index, after a collection at every size: what the collector needs beyond
// that is the process's, and is counted where it was not given back.
func fill(shared int) (*filling, error) {
	workers := max(shared, 16)
	x := newIndex(workers)
	random := workload.NewRandom(7)
	next := make([]event.Seq, workers)
	blocks := make([]event.Block, fillRun)
	events := []event.Event{storedRun(blocks)}
	batches := make([]event.Batch, 1)
	sources := make([]event.Source, workers)
	for i := range sources {
		sources[i] = engine(i)
	}
	runtime.GC()
	before := rss()
	f := new(filling)
	var names [fillRun]event.PrefixHash
	for entries, run := 0, 0; entries < fillTo; run++ {
		for i := range names {
			local := random.Next()
			if names[i] = event.PrefixHash(local); i > 0 {
				names[i] = event.Chain(names[i-1], local)
			}
		}
		for s := range shared {
			w := (run + s) % workers
			for i := range blocks {
				blocks[i] = event.Block{Hash: event.IntHash(random.Next()), Prefix: names[i], Effect: +1, Copies: -1, Age: -1}
			}
			batches[0] = event.Batch{First: next[w], Last: next[w], Way: event.Live, Rank: -1, Time: event.Time(run+1) * 1e6, Events: events}
			next[w]++
			if _, err := x.Apply(context.Background(), &event.Message{Source: sources[w], Epoch: 1, Fence: 1, Batches: batches}); err != nil {
				return nil, err
			}
			entries += fillRun
			if entries >= fillFrom && (entries-fillRun)/fillEvery != entries/fillEvery {
				f.sample(entries, before)
			}
		}
	}
	runtime.KeepAlive(x)
	return f, check(x, workers, shared)
}

func (f *filling) sample(entries int, before int64) {
	runtime.GC()
	f.AtEnd = float64(rss()-before) / float64(entries)
	if f.AtEnd > f.BytesPerEntry {
		f.BytesPerEntry, f.At = f.AtEnd, entries
	}
}

// check makes sure that the entries are there.
func check(x *prefix.Index, workers, shared int) error {
	var blocks uint64
	for _, s := range x.Sources() {
		for _, t := range s.Resident {
			blocks += t.Blocks
		}
	}
	if blocks < fillTo {
		return fmt.Errorf("the index of %d workers sharing by %d holds %d blocks, want %d", workers, shared, blocks, fillTo)
	}
	return nil
}
