package sim

import "kvstrata/connector"

// sequence is a request on its way through an engine.
type sequence struct {
	Request
	outputKey         uint64
	firstExtra, extra []byte // extra keys of block 0 and of every other, msgpack; nil = none

	hashes []uint64  // of the leading full blocks, as far as they were needed
	blocks []BlockID // physical, in order
	cached int       // leading blocks that the pool knows by their hashes

	computed  int // tokens whose KV is in blocks
	generated int
	scheduled int // tokens that this step computes

	external bool // the prompt is still to be loaded
	loading  bool // its load is under way and done by the next step
	admitted bool // once, so that a second lookup after a preemption is not counted

	kv       *connector.Request   // of an engine with a connector
	content  []uint64             // names of the leading full blocks' contents, as far as they were needed
	incoming int                  // tokens that a connector is bringing
	invalid  map[BlockID]struct{} // blocks of them that it said do not come
}

// tokens returns how many tokens the sequence has, prompt and generated.
func (s *sequence) tokens() int { return len(s.Prompt) + s.generated }

// done reports whether everything asked for is generated.
func (s *sequence) done() bool { return s.generated >= max(s.Output, 1) }

// slice returns the tokens from … to−1. Inside the prompt it is the prompt's own memory.
func (s *sequence) slice(from, to int) []uint32 {
	p := len(s.Prompt)
	if to <= p {
		return s.Prompt[from:to:to]
	}
	out := make([]uint32, 0, to-from)
	if from < p {
		out = append(out, s.Prompt[from:]...)
		from = p
	}
	return appendTokens(out, s.outputKey, from-p, to-from, vocabulary)
}

// extraKeys returns the extra keys of block i, msgpack; nil when it has none.
func (s *sequence) extraKeys(i int) []byte {
	if i == 0 {
		return s.firstExtra
	}
	return s.extra
}
