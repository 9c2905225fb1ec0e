package main

import (
	"fmt"

	"kvstrata/bench/workload"
	"kvstrata/event"
)

const model = "m"

// engine names the source of a worker.
func engine(worker int) event.Source {
	return event.Source{Cluster: event.DefaultCluster, Model: model, Instance: fmt.Sprintf("w%d", worker), Origin: event.Engine}
}

// corpus is work 1, prepared for ours: what is asked and what is written, in the order of deadlines.
type corpus struct {
	span    int64 // milliseconds of the trace
	queries []query
	writes  []write

	requestBlocks, storedBlocks, removedBlocks, events int
}

type query struct {
	millis int64
	hashes []event.PrefixHash
}

type write struct {
	millis  int64
	query   int // the place of the query that it follows
	message event.Message
}

// blockOps is the denominator by blocks: those asked for, stored and removed.
func (c *corpus) blockOps() int { return c.requestBlocks + c.storedBlocks + c.removedBlocks }

// logicalOps is the denominator by operations: requests and events.
func (c *corpus) logicalOps() int { return len(c.queries) + c.events }

// newCorpus prepares disjoint copies of a trace, each with workers of its own. Effects are what the judge would find: a
// pool stores what it does not hold and removes what it holds (TestEffectsAreTheJudges).
func newCorpus(t *workload.Trace, copies int) *corpus {
	steps := t.Steps(workload.WorkersPerCopy, workload.PoolBlocks)
	c := &corpus{span: t.Requests[len(t.Requests)-1].Millis + 1}
	a := new(arena)
	n := copies * len(steps)
	c.queries, c.writes = take[query](a, n)[:0], take[write](a, n)[:0]
	names := make([]*workload.Names, copies)
	for i := range names {
		names[i] = t.Names(i)
	}
	sources := make([]event.Source, copies*workload.WorkersPerCopy)
	next := make([]event.Seq, len(sources))
	for i := range sources {
		sources[i] = engine(i)
	}
	live = append(live, sources)
	for k := range steps {
		r := &t.Requests[k]
		for i, nm := range names {
			hashes := take[event.PrefixHash](a, r.Len())
			for j := range hashes {
				hashes[j] = nm.Prefix[r.Block(j)]
			}
			c.queries = append(c.queries, query{r.Millis, hashes})
			c.requestBlocks += len(hashes)
			worker := i*workload.WorkersPerCopy + steps[k].Worker
			events := c.stepEvents(a, r, &steps[k], nm)
			if len(events) == 0 {
				continue
			}
			m := oneBatch(a, sources[worker], next[worker], events)
			next[worker]++
			c.writes = append(c.writes, write{r.Millis, len(c.queries) - 1, m})
		}
	}
	return c
}

// live holds what prepared messages point to.
var live [][]event.Source

// oneBatch returns the message of one batch.
func oneBatch(a *arena, source event.Source, seq event.Seq, events []event.Event) event.Message {
	batches := take[event.Batch](a, 1)
	batches[0] = event.Batch{First: seq, Last: seq, Way: event.Live, Rank: -1, Time: event.Time(seq+1) * 1e6, Events: events}
	return event.Message{Source: source, Epoch: 1, Fence: 1, Batches: batches}
}

func (c *corpus) stepEvents(a *arena, r *workload.TraceRequest, s *workload.Step, nm *workload.Names) []event.Event {
	n := len(s.Stored)
	if len(s.Removed) > 0 {
		n++
	}
	events := take[event.Event](a, n)[:0]
	if len(s.Removed) > 0 {
		blocks := take[event.Block](a, len(s.Removed))
		for i, b := range s.Removed {
			blocks[i] = event.Block{Hash: event.IntHash(nm.Engine(b)), Prefix: nm.Prefix[b], Effect: -1, Age: -1}
		}
		events = append(events, event.Event{Kind: event.Evicted, Tier: event.GPU, Group: event.NoGroup, Blocks: blocks, LoRAID: event.NoLoRAID})
		c.removedBlocks += len(blocks)
	}
	for _, run := range s.Stored {
		blocks := take[event.Block](a, run.Blocks)
		for i := range blocks {
			b := r.Block(run.First + i)
			blocks[i] = event.Block{Hash: event.IntHash(nm.Engine(b)), Prefix: nm.Prefix[b], Effect: +1, Copies: -1, Age: -1}
		}
		ev := storedRun(blocks)
		if run.First > 0 {
			ev.HasParent, ev.Parent = true, event.IntHash(nm.Engine(r.Block(run.First-1)))
		}
		events = append(events, ev)
		c.storedBlocks += len(blocks)
	}
	c.events += n
	return events
}

// blockSize is the tokens a block of everything but work 1, where it decides nothing.
const blockSize = 16

func storedRun(blocks []event.Block) event.Event {
	return event.Event{
		Kind: event.Stored, Tier: event.GPU, Group: event.NoGroup, Blocks: blocks, LoRAID: event.NoLoRAID,
		BlockSize: blockSize, Seed: event.Hasher{}.Seed("", ""),
	}
}
