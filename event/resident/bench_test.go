package resident_test

import (
	"fmt"
	"testing"

	"kvstrata/event"
	"kvstrata/event/resident"
)

// churn makes batches that store blocks of 16 tokens, one run a STORED, and evict as many stored earlier, while so many are resident.
type churn struct {
	resident, runs, blocks int
	stride                 int // between blocks evicted one after the other, in the order in which they were stored; odd
	set                    *resident.Set

	turn   int
	tokens []uint32
	events []event.Event
}

func newChurn(residents, runs, blocks, stride int) *churn {
	c := &churn{resident: residents, runs: runs, blocks: blocks, stride: stride, set: resident.New(resident.DefaultConfig()), tokens: make([]uint32, blocks*16)}
	for range runs {
		c.events = append(c.events, event.Event{
			Kind: event.Stored, Tier: event.GPU, Group: event.NoGroup, BlockSize: 16, LoRAID: event.NoLoRAID, Tokens: c.tokens, Blocks: make([]event.Block, blocks),
		}, event.Event{Kind: event.Evicted, Tier: event.GPU, Group: event.NoGroup, LoRAID: event.NoLoRAID, Blocks: make([]event.Block, blocks)})
	}
	for range 3 * residents / (runs * blocks) { // names there are as many as blocks
		c.judge()
	}
	return c
}

func (c *churn) judge() {
	n := c.turn * c.runs * c.blocks
	for i := 0; i < len(c.events); i += 2 {
		stored, evicted := c.events[i].Blocks, c.events[i+1].Blocks
		for j := range stored {
			stored[j] = event.Block{Hash: event.IntHash(uint64(n) * 0x9e3779b97f4a7c15)}
			evict := n - n%c.resident - c.resident + n%c.resident*c.stride%c.resident
			evicted[j] = event.Block{Hash: event.IntHash(uint64(evict) * 0x9e3779b97f4a7c15)}
			n++
		}
	}
	c.tokens[0] = uint32(n)
	c.set.Judge(&event.Batch{First: event.Seq(c.turn), Last: event.Seq(c.turn), Time: event.Time(c.turn + 1), Way: event.Live, Rank: -1, Events: c.events})
	c.turn++
}

func BenchmarkJudge(b *testing.B) {
	for _, n := range []int{1 << 10, 1 << 16, 1 << 20} {
		for _, shape := range []struct {
			name                       string
			sets, runs, blocks, stride int
		}{
			{"64-block", 1, 1, 64, 1},
			{"64-block-scattered", 1, 1, 64, 0x9e3779b1},
			{"8x4-block-scattered", 1, 8, 4, 0x9e3779b1},
			{"8x4-block-16-sets", 16, 8, 4, 0x9e3779b1},
			{"1-block-scattered", 1, 1, 1, 0x9e3779b1},
		} {
			b.Run(fmt.Sprintf("resident=%d/%s", n, shape.name), func(b *testing.B) {
				var sets []*churn
				for range shape.sets {
					sets = append(sets, newChurn(n/shape.sets, shape.runs, shape.blocks, shape.stride))
				}
				b.ReportAllocs()
				for i := 0; b.Loop(); i++ {
					sets[i%len(sets)].judge()
				}
				b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*2*shape.runs*shape.blocks), "ns/block-op")
			})
		}
	}
}

// BenchmarkGrow stores new blocks into 16 sets in turn, as long as they grow.
func BenchmarkGrow(b *testing.B) {
	const sets, blocks = 16, 64
	tokens, room := make([]uint32, blocks*16), make([]event.Block, blocks)
	n := uint64(0)
	for b.Loop() {
		var all [sets]*resident.Set
		for i := range all {
			all[i] = resident.New(resident.DefaultConfig())
		}
		for turn := range 400 * sets {
			for i := range room {
				room[i] = event.Block{Hash: event.IntHash(n * 0x9e3779b97f4a7c15)}
				n++
			}
			tokens[0] = uint32(n)
			all[turn%sets].Judge(&event.Batch{Rank: -1, Events: []event.Event{{
				Kind: event.Stored, Tier: event.GPU, Group: event.NoGroup, BlockSize: 16, LoRAID: event.NoLoRAID, Tokens: tokens, Blocks: room,
			}}})
		}
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*400*sets*blocks), "ns/block-op")
}
