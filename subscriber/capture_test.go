package subscriber_test

import (
	"context"
	"io"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"kvstrata/event"
	"kvstrata/subscriber"
)

// page is a file that is read while it is written.
type page struct {
	mu   sync.Mutex
	text strings.Builder
}

func (p *page) Write(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.text.Write(b)
}

func (p *page) lines() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return strings.Split(strings.TrimSpace(p.text.String()), "\n")
}

var _ io.Writer = (*page)(nil)

// What was captured of an engine, from the middle of its life and over its restart, is played back whole: what came before is in the answer to the
// replay that a capture asks for.
func TestCapture(t *testing.T) {
	e := startEngine(t)
	store := func(block int) {
		e.raw(true, batchOf(keyed{
			"type", "BlockStored", "block_hashes", list(block), "parent_block_hash", nil, "token_ids", list(block, block), "block_size", 2,
		}))
	}
	store(10)
	store(11)
	out := new(page)
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		_, err := subscriber.Capture(ctx, e.config("e"), out, 0)
		done <- err
	}()
	has := func(what string, times int) {
		t.Helper()
		eventually(t, what, func() bool { return strings.Count(strings.Join(out.lines(), ""), what) >= times })
	}
	has(`"kind":"end"`, 1)
	store(12)
	store(13)
	has(`"kind":"live"`, 2)
	e.restart()
	has(`"kind":"connected"`, 2)
	next := 20
	eventually(t, "a batch of the second life", func() bool { // the first ones may come before the subscription
		store(next)
		next++
		return strings.Count(strings.Join(out.lines(), ""), `"kind":"live"`) >= 4
	})
	stop()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	played, st := playBack(t, subscriber.EngineConfig{}, true, out.lines()...)
	hash := func(n uint64) string { return event.IntHash(n).String() }
	want := []string{
		"life 0: 0-0 recovered STORED " + hash(10) + "+1", "life 0: 1-1 recovered STORED " + hash(11) + "+1",
		"life 0: 2-2 live STORED " + hash(12) + "+1", "life 0: 3-3 live STORED " + hash(13) + "+1",
	}
	if diff := cmp.Diff(want, played.story[:min(4, len(played.story))]); diff != "" {
		t.Error(diff)
	}
	for _, b := range played.story[4:] {
		if !strings.HasPrefix(b, "life 1: ") || strings.Contains(b, "lost") {
			t.Errorf("after the restart: %s", b)
		}
	}
	if len(played.story) < 6 || st.Ledger.Lost > 0 || len(st.PastLives) != 1 {
		t.Errorf("%d batches, %+v", len(played.story), st.Ledger)
	}
}
