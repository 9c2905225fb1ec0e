package sim

import (
	"iter"
	"math/rand/v2"
)

// Shape of a synthetic trace.
const (
	syntheticTopics   = 3    // shared system prompts, each syntheticSystem hash ids long
	syntheticSystem   = 2    // hash ids
	syntheticChats    = 8    // open at a time
	syntheticTurn     = 700  // tokens, at most, that a turn adds
	syntheticOutput   = 60   // tokens, at most, generated
	syntheticInterval = 1500 // ms, at most, between requests
)

// SyntheticTrace yields a trace of conversations for tests, each a function of the seed alone: testdata/small.jsonl is
// seed 1 with 150 requests. Chats begin with one of a few system prompts and grow by a turn at a time; the partial hash
// id at the end of a turn gets another name in the next, as in Mooncake's own traces.
func SyntheticTrace(seed uint64, requests int) iter.Seq[TraceRequest] {
	return func(yield func(TraceRequest) bool) {
		rng := rand.New(rand.NewPCG(seed, traceBlock))
		next := uint64(syntheticTopics * syntheticSystem)
		chats := make([][]uint64, syntheticChats) // the full hash ids that a chat's next prompt begins with
		var now int64
		for range requests {
			now += rng.Int64N(syntheticInterval)
			c := rng.IntN(syntheticChats)
			if len(chats[c]) == 0 {
				first := uint64(rng.IntN(syntheticTopics) * syntheticSystem)
				for i := range uint64(syntheticSystem) {
					chats[c] = append(chats[c], first+i)
				}
			}
			t := TraceRequest{
				Timestamp: now, OutputLength: 1 + rng.IntN(syntheticOutput),
				InputLength: traceBlock*len(chats[c]) + 1 + rng.IntN(syntheticTurn),
				HashIDs:     append([]uint64(nil), chats[c]...),
			}
			for traceBlock*len(t.HashIDs) < t.InputLength {
				t.HashIDs = append(t.HashIDs, next)
				next++
			}
			if chats[c] = t.HashIDs[:t.InputLength/traceBlock]; rng.IntN(5) == 0 {
				chats[c] = nil // the conversation ends; a new one takes its place
			}
			if !yield(t) {
				return
			}
		}
	}
}
