package sim_test

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"

	"kvstrata/event"
	"kvstrata/leaktest"
	"kvstrata/sim"
)

// TestMain fails when a test leaves a goroutine behind.
func TestMain(m *testing.M) { os.Exit(leaktest.Run(m)) }

// recorder is a publisher that keeps what it gets, and can fail.
type recorder struct {
	batches []*event.Batch
	failAt  int // the batch, from 1 on, that fails; 0 = none
}

var errPublish = errors.New("socket is gone")

func (r *recorder) Publish(b *event.Batch) error {
	r.batches = append(r.batches, b)
	if len(r.batches) == r.failAt {
		return errPublish
	}
	return nil
}

// counter is a publisher that keeps nothing.
type counter struct{ batches, blocks int }

func (c *counter) Publish(b *event.Batch) error {
	c.batches++
	c.blocks += b.Blocks()
	return nil
}

var (
	_ sim.Publisher = (*recorder)(nil)
	_ sim.Publisher = (*counter)(nil)
)

// copies replays the events as a consumer would.
func (r *recorder) copies(t testing.TB) map[sim.BlockKey]int {
	t.Helper()
	set := make(map[sim.BlockKey]int)
	for _, b := range r.batches {
		for i := range b.Events {
			apply(t.Fatalf, set, &b.Events[i])
		}
	}
	return set
}

// apply applies one event to a resident set, and fails on one that cannot be true.
func apply(fatalf func(string, ...any), set map[sim.BlockKey]int, ev *event.Event) {
	key := func(h event.BlockHash) sim.BlockKey { return sim.BlockKey{Hash: h, Tier: ev.Tier, Group: ev.Group} }
	switch ev.Kind {
	case event.Cleared:
		clear(set)
	case event.Evicted:
		for _, b := range ev.Blocks {
			if set[key(b.Hash)]--; set[key(b.Hash)] < 0 {
				fatalf("block %v is evicted more often than it was stored", b.Hash)
			} else if set[key(b.Hash)] == 0 {
				delete(set, key(b.Hash))
			}
		}
	case event.Stored:
		if len(ev.Tokens) != len(ev.Blocks)*int(ev.BlockSize) || len(ev.ExtraKeys) != len(ev.Blocks) {
			fatalf("%d blocks with %d tokens and %d extra keys", len(ev.Blocks), len(ev.Tokens), len(ev.ExtraKeys))
		}
		if ev.HasParent && set[key(ev.Parent)] == 0 {
			fatalf("block %v continues one that is not there", ev.Blocks[0].Hash)
		}
		for _, b := range ev.Blocks {
			set[key(b.Hash)]++
		}
	default:
		fatalf("an engine tells %v", ev.Kind)
	}
}

// story tells the batches as one line each, the blocks called a, b, c … in the order of their first appearance.
func (r *recorder) story() []string {
	names := make(map[event.BlockHash]string)
	name := func(h event.BlockHash) string {
		if names[h] == "" {
			names[h] = string(rune('a' + len(names)))
		}
		return names[h]
	}
	var lines []string
	for _, b := range r.batches {
		var events []string
		for i := range b.Events {
			ev := &b.Events[i]
			text := ev.Kind.String()
			if ev.HasParent {
				text += " " + name(ev.Parent) + "→"
			}
			for _, block := range ev.Blocks {
				text += " " + name(block.Hash)
			}
			events = append(events, text)
		}
		lines = append(lines, fmt.Sprintf("%d: %s", b.Time, strings.Join(events, ", ")))
	}
	return lines
}

func resident(e *sim.Engine) map[sim.BlockKey]int {
	set := make(map[sim.BlockKey]int)
	for key, n := range e.Resident() {
		set[key] = n
	}
	return set
}

// newEngine returns an engine with blocks of 4 tokens and that many usable blocks.
func newEngine(t testing.TB, usable int, edit ...func(*sim.EngineConfig)) (*sim.Engine, *recorder) {
	t.Helper()
	cfg := sim.DefaultEngineConfig()
	cfg.PoolBlocks, cfg.BlockSize = usable+1, 4
	for _, f := range edit {
		f(&cfg)
	}
	r := &recorder{}
	e, err := sim.NewEngine(cfg, r)
	if err != nil {
		t.Fatal(err)
	}
	return e, r
}

func submit(t testing.TB, e *sim.Engine, requests ...sim.Request) {
	t.Helper()
	for _, r := range requests {
		if err := e.Submit(r); err != nil {
			t.Fatal(err)
		}
	}
}

// step runs n steps at times first, first+1, …
func step(t testing.TB, e *sim.Engine, first event.Time, n int) (last sim.Progress) {
	t.Helper()
	for i := range n {
		var err error
		if last, err = e.Step(first + event.Time(i)); err != nil {
			t.Fatal(err)
		}
	}
	return last
}

// prompt returns n tokens from first on.
func prompt(first uint32, n int) []uint32 {
	tokens := make([]uint32, n)
	for i := range tokens {
		tokens[i] = first + uint32(i)
	}
	return tokens
}
