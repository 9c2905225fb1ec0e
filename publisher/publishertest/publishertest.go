// Package publishertest is the contract that every EventPublisher keeps, as a test to run against each.
package publishertest

import (
	"context"
	"testing"
	"time"

	"kvstrata/event"
	"kvstrata/publisher"
)

// Received returns the next batch that arrived at the far end of a publisher, as far as its wire tells it; it waits for
// one until the test ends. A publisher without a far end has none.
type Received func(t *testing.T) event.Batch

// Run checks a publisher. open makes one, not yet running; received, which may be nil, is called only while it runs.
func Run(t *testing.T, open func(t *testing.T) (publisher.EventPublisher, Received)) {
	t.Run("batches arrive in order and numbered without a gap", func(t *testing.T) {
		p, received := open(t)
		stop := running(t, p)
		defer stop()
		b := new(event.Batch) // reused: a publisher keeps nothing of it
		const n = 100
		for i := range uint64(n) {
			fill(b, i)
			if err := p.Publish(b); err != nil {
				t.Fatal(err)
			}
		}
		if received == nil {
			return
		}
		first := event.Seq(0)
		for i := range uint64(n) {
			got := received(t)
			if i == 0 {
				first = got.First
			}
			if got.First != first+event.Seq(i) {
				t.Fatalf("batch %d has sequence %d, the first had %d", i, got.First, first)
			}
			if len(got.Events) != 1 || len(got.Events[0].Blocks) != 2 || got.Events[0].Blocks[0].Hash != event.IntHash(2*i+1) {
				t.Fatalf("batch %d arrived as %+v", i, got)
			}
			if got.Time != event.Time(1e18)+event.Time(i)*1e9 {
				t.Fatalf("batch %d has time %d", i, got.Time)
			}
		}
	})
	t.Run("what is published before Run is sent by it", func(t *testing.T) {
		p, received := open(t)
		b := new(event.Batch)
		fill(b, 7)
		if err := p.Publish(b); err != nil {
			t.Fatal(err)
		}
		stop := running(t, p)
		defer stop()
		if received != nil && received(t).Events[0].Blocks[0].Hash != event.IntHash(15) {
			t.Error("another batch arrived")
		}
	})
	t.Run("Run ends soon after its context, with nil", func(t *testing.T) {
		p, _ := open(t)
		stop := running(t, p)
		begin := time.Now()
		stop()
		if took := time.Since(begin); took > 5*time.Second {
			t.Errorf("it took %v", took)
		}
	})
}

// fill makes b the i-th batch: two blocks of a run of its own.
func fill(b *event.Batch, i uint64) {
	*b = event.Batch{
		Time: event.Time(1e18) + event.Time(i)*1e9, Rank: -1,
		Events: []event.Event{{
			Kind: event.Stored, Tier: event.GPU, Group: event.NoGroup, LoRAID: event.NoLoRAID, BlockSize: 2,
			Tokens: []uint32{1, 2, 3, uint32(i)},
			Blocks: []event.Block{
				{Hash: event.IntHash(2*i + 1), Copies: -1, Age: -1}, {Hash: event.IntHash(2*i + 2), Copies: -1, Age: -1},
			},
		}},
	}
}

// running runs a publisher; the function returned ends it and checks how it ended.
func running(t *testing.T, p publisher.EventPublisher) (stop func()) {
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- p.Run(ctx) }()
	return func() {
		t.Helper()
		cancel()
		select {
		case err := <-done:
			if err != nil {
				t.Errorf("Run returned %v", err)
			}
		case <-time.After(20 * time.Second):
			t.Fatal("Run did not return")
		}
	}
}
