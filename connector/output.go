package connector

import (
	"maps"
	"slices"
)

// WorkerMetadata is what a worker sends its scheduler besides the outcome of transfers (vLLM's
// KVConnectorWorkerMetadata). Aggregate adds another rank's; the receiver may be changed and is what counts afterwards.
type WorkerMetadata interface {
	Aggregate(other WorkerMetadata) WorkerMetadata
}

// Output is what one rank's connector did in one step, or, aggregated, what all ranks did (vLLM's KVConnectorOutput).
// Sets are slices in no order, without duplicates.
type Output struct {
	FinishedSending   []string // requests whose blocks may be freed
	FinishedReceiving []string // requests whose asynchronous loads have ended, well or not
	FailedReceiving   []string // those of them whose loads failed
	InvalidBlocks     []int    // blocks whose load failed: computed anew, or their requests fail
	Stats             *Stats   // nil = nothing happened
	Metadata          WorkerMetadata
	ExpectedFinished  int // how many ranks must report a request from now on; 0 = as before
}

// Empty reports whether an output says nothing.
func (o *Output) Empty() bool {
	return len(o.FinishedSending) == 0 && len(o.FinishedReceiving) == 0 && len(o.FailedReceiving) == 0 &&
		len(o.InvalidBlocks) == 0 && o.Stats == nil && o.Metadata == nil && o.ExpectedFinished == 0
}

// Aggregator makes one scheduler's view of all ranks' outputs, step by step (vLLM's KVOutputAggregator,
// vllm/distributed/kv_transfer/kv_connector/utils.py). One goroutine uses it.
type Aggregator struct {
	expected         int
	sending, arrived map[string]int // reports still to come, by request
	failed           map[string]struct{}
}

// NewAggregator returns an aggregator of so many ranks. finished, which may be 0, is how many of them report each
// request (vLLM's get_finished_count); 0 = all.
func NewAggregator(ranks, finished int) *Aggregator {
	if finished <= 0 {
		finished = ranks
	}
	return &Aggregator{
		expected: finished, sending: make(map[string]int), arrived: make(map[string]int), failed: make(map[string]struct{}),
	}
}

// Aggregate adds one step's outputs, one a rank; nil stands for a rank that said nothing. A request counts as finished
// once every expected rank has said so, in this step or in earlier ones; its failure, told by any, is held back until
// then.
func (a *Aggregator) Aggregate(outputs []*Output) Output {
	var all Output
	invalid := make(map[int]struct{})
	for _, o := range outputs {
		if o == nil {
			continue
		}
		if o.ExpectedFinished > 0 {
			a.expected, all.ExpectedFinished = o.ExpectedFinished, o.ExpectedFinished
		}
		all.FinishedSending = a.countDown(a.sending, o.FinishedSending, all.FinishedSending)
		for _, id := range o.FailedReceiving {
			a.failed[id] = struct{}{}
		}
		all.FinishedReceiving = a.countDown(a.arrived, o.FinishedReceiving, all.FinishedReceiving)
		for _, block := range o.InvalidBlocks {
			invalid[block] = struct{}{}
		}
		if o.Stats != nil {
			if all.Stats == nil {
				all.Stats = new(Stats)
			}
			all.Stats.Pool(o.Stats)
		}
		switch {
		case o.Metadata == nil:
		case all.Metadata == nil:
			all.Metadata = o.Metadata
		default:
			all.Metadata = all.Metadata.Aggregate(o.Metadata)
		}
	}
	if all.Stats != nil {
		all.Stats.Ranks = len(outputs) // also those that ended nothing in this step
	}
	for _, id := range all.FinishedReceiving {
		if _, ok := a.failed[id]; ok {
			all.FailedReceiving = append(all.FailedReceiving, id)
			delete(a.failed, id)
		}
	}
	if len(invalid) > 0 {
		all.InvalidBlocks = slices.Sorted(maps.Keys(invalid))
	}
	return all
}

// countDown enters one rank's reports, and appends to done the requests that no rank owes any more.
func (a *Aggregator) countDown(left map[string]int, reported, done []string) []string {
	for _, id := range reported {
		n, ok := left[id]
		if !ok {
			n = a.expected
		}
		if n--; n > 0 {
			left[id] = n
			continue
		}
		delete(left, id)
		done = append(done, id)
	}
	return done
}

// Pending returns how many requests some rank has reported and others still owe.
func (a *Aggregator) Pending() int { return len(a.sending) + len(a.arrived) }
