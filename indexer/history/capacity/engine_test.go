package capacity_test

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"kvstrata/event"
	"kvstrata/event/resident"
	"kvstrata/indexer/history/capacity"
	"kvstrata/sim"
	"kvstrata/tracetest"
)

// listener hands what an engine tells to victims, as history has it: judged, without blocks that changed nothing.
type listener struct {
	set     *resident.Set
	victims *capacity.Victims
	most    int // resident at a time
	now     int
}

func (l *listener) Publish(b *event.Batch) error {
	l.set.Judge(b)
	for i := range b.Events {
		ev := &b.Events[i]
		var run []capacity.Block
		for _, block := range ev.Blocks {
			l.now += int(block.Effect)
			switch {
			case ev.Kind == event.Stored && block.Effect > 0:
				run = append(run, capacity.Block{Hash: uint64(block.Prefix), Tokens: ev.BlockSize})
			case ev.Kind == event.Evicted && block.Effect < 0 && block.Copies == 0:
				l.victims.Evicted(uint64(block.Prefix))
			}
		}
		l.most = max(l.most, l.now)
		l.victims.Stored(run)
	}
	l.victims.Done()
	return nil
}

// replay runs the conversation trace on a simulated engine with so many blocks of 512 tokens.
func replay(t *testing.T, pool int, cfg capacity.Config) *listener {
	t.Helper()
	file := tracetest.Open(t, "mooncake_conversation_trace.jsonl")
	l := &listener{set: resident.New(resident.DefaultConfig())}
	var err error
	if l.victims, err = capacity.NewVictims(cfg); err != nil {
		t.Fatal(err)
	}
	engine := sim.DefaultEngineConfig()
	engine.PoolBlocks, engine.BlockSize = pool+1, 512
	e, err := sim.NewEngine(engine, l)
	if err != nil {
		t.Fatal(err)
	}
	fleet := sim.DefaultFleetConfig()
	fleet.Speed = 0
	f, err := sim.NewFleet(fleet, []*sim.Engine{e}, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := f.Run(t.Context(), sim.NewTraceReader(file).Arrivals()); err != nil {
		t.Fatal(err)
	}
	return l
}

// What an engine of 10,000 blocks tells says how many blocks engines of other sizes store, to the block. The blocks that
// answers add are in it: the trace alone does not have them.
func TestTraceLargerEngines(t *testing.T) {
	if testing.Short() {
		t.Skip("SKIPPED with -short: the real trace is run five times")
	}
	trace(t, "mooncake_conversation_trace.jsonl") // is there
	const pool = 10_000
	base := replay(t, pool, all())
	sampled := all()
	sampled.Shift = 4
	exact, sample := base.victims.Curve(), replay(t, pool, sampled).victims.Curve()
	if base.most != pool {
		t.Errorf("%d blocks were resident at most", base.most)
	}
	for _, size := range []int{pool * 5 / 4, pool * 2, pool * 4} {
		stored := replay(t, size, all()).victims.Curve().Asked
		more := uint64(size - pool)
		hits := exact.Hits(more)
		if got := (capacity.Count{Blocks: exact.Asked.Blocks - hits.Blocks, Tokens: exact.Asked.Tokens - hits.Tokens}); got != stored || hits.Blocks == 0 {
			t.Errorf("%d blocks: %v stored, foretold were %v", size, stored, got)
		}
		if off := math.Abs(float64(sample.Hits(more).Blocks)-float64(hits.Blocks)) / float64(exact.Asked.Blocks); off > 0.01 {
			t.Errorf("%d blocks: a sample of one of 16 foretells %v, all of it %v", size, sample.Hits(more), hits)
		}
	}
}

// Long lines move together, tables grow, and colliding hashes make room for each other: whatever happens, counts are those of
// a list.
func TestVictimsAreAList(t *testing.T) {
	for seed := range uint64(4) {
		r := rand.New(rand.NewPCG(seed, 1))
		v, err := capacity.NewVictims(all())
		if err != nil {
			t.Fatal(err)
		}
		var left []uint64 // the newest last
		var want [4001]uint64
		for range 20_000 {
			hash := r.Uint64N(1000)<<32 | r.Uint64N(1+seed)*5
			at := slices.Index(left, hash)
			if at >= 0 {
				left = slices.Delete(left, at, at+1)
			}
			if r.IntN(8) > 0 {
				left = append(left, hash)
				v.Evicted(hash)
			} else {
				v.Stored([]capacity.Block{{Hash: hash}})
				if at >= 0 {
					want[len(left)-at+1]++
				}
			}
			v.Done()
		}
		c, hits := v.Curve(), uint64(0)
		for size := range want {
			if hits += want[size]; c.Hits(uint64(size)).Blocks != hits {
				t.Fatalf("seed %d: %d blocks more: hits %d, want %d", seed, size, c.Hits(uint64(size)).Blocks, hits)
			}
		}
	}
}
