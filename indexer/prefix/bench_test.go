package prefix_test

import (
	"bytes"
	"context"
	"fmt"
	"testing"

	"kvstrata/event"
	"kvstrata/indexer/prefix"
)

// BenchmarkApply applies messages of one batch that stores a prompt's 64 blocks and evicts another's, while so many
// blocks are resident.
func BenchmarkApply(b *testing.B) {
	const perPrompt = 64
	for _, resident := range []int{1 << 10, 1 << 16} {
		b.Run(fmt.Sprintf("resident=%d", resident), func(b *testing.B) {
			x := prefix.New(prefix.DefaultConfig())
			messages := churn(b, x, resident/perPrompt, perPrompt)
			b.ReportAllocs()
			seq := messages[len(messages)-1].Batches[0].Last
			for n := 0; b.Loop(); n++ {
				m := messages[n%len(messages)]
				seq++
				m.Batches[0].First, m.Batches[0].Last = seq, seq
				if _, err := x.Apply(context.Background(), m); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*2*perPrompt), "ns/block-op")
		})
	}
}

// churn fills an index with prompts and returns messages, to be applied in a circle, that each store a prompt and evict
// the one stored longest ago.
func churn(b *testing.B, x *prefix.Index, prompts, perPrompt int) []*event.Message {
	pub := newPublisher(engine("e1"), false)
	chains := make([]chain, 2*prompts)
	for i := range chains {
		chains[i] = prompt(uint32(i*perPrompt*16), perPrompt)
	}
	for _, c := range chains[:prompts] {
		pub.tell(b, x, c.stored(event.GPU, 0, perPrompt))
	}
	messages := make([]*event.Message, len(chains))
	for i := range messages {
		in, out := chains[(prompts+i)%len(chains)], chains[i]
		messages[i] = pub.message(b, []event.Event{out.evicted(event.GPU, 0, perPrompt), in.stored(event.GPU, 0, perPrompt)})
		pub.dec = event.Decoder{} // the message stays
	}
	for _, m := range messages { // once round
		apply(b, x, m)
	}
	return messages
}

// BenchmarkLookup asks for a prompt that every source holds.
func BenchmarkLookup(b *testing.B) {
	const length = 1000
	p := prompt(1, length)
	for _, sources := range []int{1, 16, 64} {
		x := prefix.New(prefix.DefaultConfig())
		for i := range sources {
			newPublisher(engine(fmt.Sprintf("e%d", i)), false).tell(b, x, p.stored(event.GPU, 0, length))
		}
		for name, r := range map[string]*prefix.Request{
			"hashes": {Model: "m", Hashes: p.hashes(), BlockSize: 16},
			"tokens": {Model: "m", Tokens: p.tokens},
		} {
			b.Run(fmt.Sprintf("%dx%d/%s", length, sources, name), func(b *testing.B) {
				b.ReportAllocs()
				for b.Loop() {
					if a := lookup(b, x, r); a.Matches[sources-1].Blocks != length {
						b.Fatalf("%d blocks, want %d", a.Matches[sources-1].Blocks, length)
					}
				}
			})
		}
	}
}

// BenchmarkReach asks for a prompt of which every engine holds the first tenth, and a store that all of them read from the rest.
func BenchmarkReach(b *testing.B) {
	const length = 1000
	p := prompt(1, length)
	for _, sources := range []int{1, 16, 64} {
		x := prefix.New(prefix.DefaultConfig())
		newPublisher(event.Source{Cluster: "c", Model: "m", Instance: "s0", Origin: event.Store}, true).tell(b, x, p.stored(event.Storage, 0, length))
		for i := range sources {
			e := newPublisher(engine(fmt.Sprintf("e%d", i)), false)
			e.tell(b, x, p.stored(event.GPU, 0, length/10))
			e.source.Origin = event.Connector
			st := e.status(event.StateLive, "")
			st.Stores = []string{"s0"}
			x.Tell(st)
		}
		b.Run(fmt.Sprintf("%dx%d/hashes", length, sources), func(b *testing.B) {
			r := &prefix.Request{Model: "m", Hashes: p.hashes(), BlockSize: 16}
			b.ReportAllocs()
			for b.Loop() {
				if a := lookup(b, x, r); a.Matches[sources-1].Reach == nil || a.Matches[sources-1].Reach.Blocks != length {
					b.Fatalf("%+v", a.Matches[sources-1])
				}
			}
		})
	}
}

// BenchmarkRestore loads a checkpoint.
func BenchmarkRestore(b *testing.B) {
	const prompts, perPrompt = 1 << 10, 64
	pub := newPublisher(engine("e1"), false)
	for i := range prompts {
		pub.message(b, []event.Event{prompt(uint32(i*perPrompt*16), perPrompt).stored(event.GPU, 0, perPrompt)})
	}
	object := pub.checkpoint(b).Bytes()
	x := prefix.New(prefix.DefaultConfig())
	b.ReportAllocs()
	for b.Loop() {
		restore(b, x, bytes.NewBuffer(object))
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*prompts*perPrompt), "ns/block")
}
