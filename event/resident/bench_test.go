package resident_test

import (
	"fmt"
	"testing"

	"kvstrata/event"
	"kvstrata/event/resident"
)

// BenchmarkJudge judges batches that store 64 blocks of 16 tokens and evict 64 stored earlier, while so many are resident.
func BenchmarkJudge(b *testing.B) {
	const run, size = 64, 16
	for _, n := range []int{1 << 10, 1 << 16, 1 << 20} {
		b.Run(fmt.Sprintf("resident=%d", n), func(b *testing.B) {
			s := resident.New(resident.DefaultConfig())
			tokens := make([]uint32, run*size)
			stored, evicted := make([]event.Block, run), make([]event.Block, run)
			events := make([]event.Event, 0, 2)
			turn := func(k int) {
				events = events[:1]
				for i := range stored {
					stored[i] = event.Block{Hash: event.IntHash(uint64(k*run+i) * 0x9e3779b97f4a7c15)}
					evicted[i] = event.Block{Hash: event.IntHash(uint64((k-n/run)*run+i) * 0x9e3779b97f4a7c15)}
				}
				tokens[0] = uint32(k)
				events[0] = event.Event{
					Kind: event.Stored, Tier: event.GPU, Group: event.NoGroup, BlockSize: size, LoRAID: event.NoLoRAID, Tokens: tokens, Blocks: stored,
				}
				if k >= n/run {
					events = append(events, event.Event{Kind: event.Evicted, Tier: event.GPU, Group: event.NoGroup, LoRAID: event.NoLoRAID, Blocks: evicted})
				}
				s.Judge(&event.Batch{First: event.Seq(k), Last: event.Seq(k), Way: event.Live, Rank: -1, Events: events})
			}
			k := 0
			for ; k < n/run; k++ {
				turn(k)
			}
			for ; b.Loop(); k++ {
				turn(k)
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*2*run), "ns/block-op")
		})
	}
}
