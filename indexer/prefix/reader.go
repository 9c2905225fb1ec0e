package prefix

import "kvstrata/event"

// Reader answers lookups of one goroutine, from memory of its own.
type Reader struct {
	index  *Index
	scores []Score
}

// Score is how much of a prompt one source holds.
type Score struct {
	Source       *event.Source
	BlockSize    uint32 // tokens a block
	Blocks       uint32 // the prefix that it holds, each block in some tier
	DeviceBlocks uint32 // the prefix that lies on the device without a break
}

// NewReader returns a reader of the index. Any number of them read side by side.
func (x *Index) NewReader() *Reader { return &Reader{index: x} }

// Scores returns how much of a prompt each source holds itself, in no order; one that holds nothing of it is not there. The slice is
// valid until the next call.
func (r *Reader) Scores(req *Request) ([]Score, error) {
	a, err := r.index.Lookup(req)
	if err != nil {
		return nil, err
	}
	r.scores = r.scores[:0]
	for i := range a.Matches {
		if m := &a.Matches[i]; m.Blocks > 0 {
			r.scores = append(r.scores, Score{
				Source: &m.Source, BlockSize: m.BlockSize, Blocks: uint32(m.Blocks), DeviceBlocks: uint32(m.DeviceBlocks),
			})
		}
	}
	return r.scores, nil
}
