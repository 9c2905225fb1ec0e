package subscriber

import (
	"fmt"
	"slices"
	"time"

	"kvstrata/event"
	"kvstrata/event/resident"
)

// breach is a way in which a stream as a whole breaks its contract; what single events break, the judge and the decoder count.
type breach int

const (
	strayMessage breach = iota
	rankDiffers
	timeBackwards
	poolOverfull
	numBreaches
)

var breachNames = [numBreaches]string{
	strayMessage: "stray_messages", rankDiffers: "rank_differs", timeBackwards: "time_runs_backwards", poolOverfull: "more_copies_than_pool",
}

// violationNames are the oddities whose names are ours, and can be labels.
var violationNames = slices.Concat(resident.OddityNames(), breachNames[:], []string{"prefix_hash_withheld", "extra_keys_unreadable", "extra_keys_left_out"})

// ViolationNames returns the values that the label violation has beside unknown_word.
func ViolationNames() []string { return slices.Clone(violationNames) }

// breaches counts breaches, with an example of the first of each.
type breaches struct {
	counters [numBreaches]event.Counter
	last     event.Time // of the newest batch
}

// note counts a breach, and reports whether it is the first.
func (b *breaches) note(kind breach, example string) bool {
	c := &b.counters[kind]
	if c.Count++; c.Count > 1 {
		return false
	}
	c.Name, c.Example = breachNames[kind], example
	return true
}

// list returns the breaches that were seen.
func (b *breaches) list() []event.Counter {
	var seen []event.Counter
	for _, c := range b.counters {
		if c.Count > 0 {
			seen = append(seen, c)
		}
	}
	return seen
}

// time checks that a batch is not older than the one before it.
func (b *breaches) time(batch *event.Batch) {
	if batch.Time != 0 && batch.Time < b.last {
		b.note(timeBackwards, fmt.Sprintf("batch %d is %v older than the one before", batch.First, time.Duration(b.last-batch.Time)))
	}
	b.last = batch.Time
}

// pool checks that no more copies are known than there are blocks: an engine that reports what it uses again, too.
func (b *breaches) pool(batch *event.Batch, copies, pool uint64) {
	if copies > pool {
		b.note(poolOverfull, fmt.Sprintf("%d copies in a pool of %d blocks after batch %d: an engine that reports reused blocks again needs report=full",
			copies, pool, batch.First))
	}
}
