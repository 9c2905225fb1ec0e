package capacity_test

import (
	"math/rand/v2"
	"testing"

	"kvstrata/indexer/history/capacity"
)

// prompts are requests for blocks of a working set, 64 blocks each, with Zipf's popularity of conversations.
func prompts(requests, conversations int) (list [][]capacity.Block) {
	r := rand.New(rand.NewPCG(1, 2))
	zipf := rand.NewZipf(r, 1.1, 8, uint64(conversations-1))
	for range requests {
		c := zipf.Uint64()
		blocks := make([]capacity.Block, 64)
		for i := range blocks {
			blocks[i] = capacity.Block{Hash: mixed(c<<8 + uint64(i)), Tokens: 16}
		}
		list = append(list, blocks)
	}
	return list
}

func blocksPerSecond(b *testing.B, blocks int) {
	b.ReportMetric(float64(blocks)/b.Elapsed().Seconds()/1e6, "Mblocks/s")
}

func benchmarkStack(b *testing.B, cfg capacity.Config, list [][]capacity.Block) {
	blocks := 0
	for b.Loop() {
		s, err := capacity.NewStack(cfg)
		if err != nil {
			b.Fatal(err)
		}
		for _, r := range list {
			s.Request(r)
		}
		blocks += int(s.Curve().Asked.Blocks)
	}
	blocksPerSecond(b, blocks)
}

// Everything is looked at; 2 million blocks are tracked.
func BenchmarkStack(b *testing.B) {
	benchmarkStack(b, capacity.Config{MaxBlocks: 1 << 24}, prompts(100_000, 1_000_000))
}

func BenchmarkStackTrace(b *testing.B) {
	benchmarkStack(b, capacity.Config{MaxBlocks: 1 << 24}, trace(b, "mooncake_conversation_trace.jsonl"))
}

// 8,192 blocks are tracked.
func BenchmarkStackSampled(b *testing.B) {
	benchmarkStack(b, capacity.Config{MaxBlocks: 1 << 13}, prompts(100_000, 1_000_000))
}

// Next to nothing is looked at.
func BenchmarkStackSampledOut(b *testing.B) {
	benchmarkStack(b, capacity.Config{MaxBlocks: 1 << 13, Shift: 20}, prompts(100_000, 1_000_000))
}

func BenchmarkVictims(b *testing.B) {
	list := prompts(100_000, 1_000_000)
	blocks := 0
	for b.Loop() {
		v, err := capacity.NewVictims(capacity.Config{MaxBlocks: 1 << 24})
		if err != nil {
			b.Fatal(err)
		}
		for i, r := range list {
			v.Stored(r)
			if i > 100 {
				for _, block := range list[i-100] {
					v.Evicted(block.Hash)
				}
				blocks += 64
			}
			v.Done()
			blocks += 64
		}
	}
	blocksPerSecond(b, blocks)
}

func BenchmarkOptimum(b *testing.B) {
	o := capacity.NewOptimum(0, 1<<20)
	list := trace(b, "mooncake_conversation_trace.jsonl")
	for _, r := range list {
		o.Request(r)
	}
	blocks := 0
	for b.Loop() {
		if _, ok := o.Hits(5_000); !ok {
			b.Fatal("no answer")
		}
		blocks += 288_500
	}
	blocksPerSecond(b, blocks)
}
