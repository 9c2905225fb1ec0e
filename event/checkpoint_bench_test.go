package event_test

import (
	"bytes"
	"testing"

	"kvstrata/event"
)

// BenchmarkReadCheckpoint decodes a checkpoint of 100,000 blocks.
func BenchmarkReadCheckpoint(b *testing.B) {
	const blocks = 100_000
	cp := &event.Checkpoint{Source: event.Source{Cluster: "c", Model: "m", Instance: "e", Origin: event.Engine}, Entries: blocks}
	var object bytes.Buffer
	if err := event.WriteCheckpoint(&object, cp, func(yield func(*event.Entry) bool) {
		for i := range blocks {
			hash := event.LocalHash([]uint32{uint32(i)}, 1)
			if !yield(&event.Entry{
				Hash: event.IntHash(hash), Tier: event.GPU, Group: event.NoGroup, Copies: 1, Stored: 1_796_000_000_000_000_000, BlockSize: 16,
				Prefix: event.PrefixHash(hash + 1), HasParent: i%64 > 0, Parent: event.IntHash(hash + 2), Seed: 1337,
			}) {
				return
			}
		}
	}); err != nil {
		b.Fatal(err)
	}
	b.SetBytes(int64(object.Len()))
	b.ReportAllocs()
	for b.Loop() {
		if _, err := event.ReadCheckpoint(bytes.NewReader(object.Bytes()), func(*event.Entry) {}); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/blocks, "ns/block")
}
