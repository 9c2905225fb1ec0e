package main

import (
	"testing"
	"time"

	"kvstrata/bench/workload"
	"kvstrata/event"
	"kvstrata/event/resident"

	"github.com/google/go-cmp/cmp"
)

const smallTrace = `{"timestamp": 0, "hash_ids": [0, 1]}
{"timestamp": 1, "hash_ids": [0, 2]}
{"timestamp": 2, "hash_ids": [0, 1]}
`

// TestEffectsAreTheJudges tells the judge what the prepared messages tell, as local hashes, and compares.
func TestEffectsAreTheJudges(t *testing.T) {
	trace, err := workload.ParseTrace([]byte(smallTrace))
	if err != nil {
		t.Fatal(err)
	}
	c := new(corpus)
	names, set := trace.Names(0), resident.New(resident.DefaultConfig())
	local := make(map[event.BlockHash]uint64)
	for b := range trace.Blocks {
		local[event.IntHash(names.Engine(uint32(b)))] = names.Local[b]
	}
	for k, s := range trace.Steps(1, 10) {
		prepared := c.stepEvents(new(arena), &trace.Requests[k], &s, names)
		told := event.Batch{First: event.Seq(k), Last: event.Seq(k), Time: 1}
		for _, ev := range prepared {
			raw := ev
			raw.Blocks = nil
			for _, b := range ev.Blocks {
				raw.Blocks = append(raw.Blocks, event.Block{Hash: b.Hash, Copies: -1, Age: -1})
				if ev.Kind == event.Stored {
					raw.Locals = append(raw.Locals, local[b.Hash])
				}
			}
			told.Events = append(told.Events, raw)
		}
		set.Judge(&told)
		for i := range told.Events {
			for j := range told.Events[i].Blocks {
				got, want := prepared[i].Blocks[j], told.Events[i].Blocks[j]
				if got.Effect != want.Effect || got.Prefix != want.Prefix {
					t.Errorf("step %d event %d block %d: %+v, the judge says %+v", k, i, j, got, want)
				}
			}
		}
	}
}

func TestARunOfTheSmallTrace(t *testing.T) {
	trace, err := workload.ParseTrace([]byte(smallTrace))
	if err != nil {
		t.Fatal(err)
	}
	c := newCorpus(trace, 2)
	if got, want := []int{c.requestBlocks, c.storedBlocks, c.removedBlocks, c.logicalOps()}, []int{48, 48, 0, 12}; !cmp.Equal(got, want) {
		t.Errorf("blocks asked for, stored, removed, operations: %v, want %v", got, want)
	}
	r, err := deadlineDriven(newIndex(32), c, 100*time.Millisecond)
	if err != nil {
		t.Fatal(err)
	}
	if !r.GeneratorValid || r.BlockOps <= 0 {
		t.Errorf("%+v", r)
	}
}

func TestTheBareTableHoldsWhatItShould(t *testing.T) {
	tab := table{slots: make([]uint64, 64), mask: 31}
	keys := []uint64{31, 63, 95, 1, 33, 32}
	for _, k := range keys {
		tab.insert(k)
	}
	for i, k := range keys {
		tab.remove(k) // hangs where a key cannot be found
		n := 0
		for at := 0; at < len(tab.slots); at += 2 {
			if tab.slots[at] != 0 {
				n++
			}
		}
		if n != len(keys)-i-1 {
			t.Fatalf("%d keys after %d removals", n, i+1)
		}
	}
}
