package connector

import (
	"cmp"
	"errors"
	"fmt"
	"slices"

	"kvstrata/connector/device"
)

// Axis says what a dimension of a cache tensor counts.
type Axis uint8

// The axes.
const (
	AxisBlock Axis = 1 + iota // physical blocks
	AxisLayer                 // layers that share one tensor
	AxisKV                    // keys, then values
	AxisToken                 // tokens of a block
	AxisHead                  // KV heads
	AxisDim                   // elements of a head, or of MLA's latent
)

var axisNames = []string{AxisBlock: "block", AxisLayer: "layer", AxisKV: "kv", AxisToken: "token", AxisHead: "head", AxisDim: "dim"}

func (a Axis) String() string {
	if a >= AxisBlock && a <= AxisDim {
		return axisNames[a]
	}
	return fmt.Sprintf("Axis(%d)", uint8(a))
}

// Dim is one dimension of a tensor: how many, and how far apart in memory, in bytes.
type Dim struct {
	Axis   Axis
	Size   int
	Stride int
}

// Tensor is one layer's cache, or that of several layers, somewhere in an arena. The order of its dimensions says what
// layout it has: NHD is token before head, HND head before token; a layer axis behind the block axis makes a block's layers
// contiguous.
type Tensor struct {
	Name    string // layer
	Offset  int    // of its first element in the arena
	Element int    // bytes of an element
	Dims    []Dim
}

// Packed returns a tensor of axes and sizes, outermost first, without gaps.
func Packed(name string, offset, element int, dims ...Dim) Tensor {
	t := Tensor{Name: name, Offset: offset, Element: element, Dims: slices.Clone(dims)}
	stride := element
	for i := len(dims) - 1; i >= 0; i-- {
		t.Dims[i].Stride = stride
		stride *= dims[i].Size
	}
	return t
}

// Layout is the cache of an engine: its tensors in the order in which their bytes travel, and within a block of each by
// address. Engines may exchange blocks only if they order them alike: head before token is another order than token before
// head.
type Layout struct {
	tensors []tensorSpans
	blocks  int
	bytes   int // of one block over all tensors
}

// tensorSpans are the pieces of block 0 of a tensor, and how far the next block is.
type tensorSpans struct {
	pieces []device.Span
	stride int
}

// maxPieces bounds the pieces of one block of one tensor: a tensor whose elements lie apart one by one is a mistake.
const maxPieces = 1 << 16

// NewLayout checks tensors against an arena of so many bytes: every block of each must lie within it.
func NewLayout(tensors []Tensor, arena int) (*Layout, error) {
	if len(tensors) == 0 {
		return nil, errors.New("layout: no tensors")
	}
	l := &Layout{}
	for i := range tensors {
		t := &tensors[i]
		spans, blocks, err := t.spans(arena)
		if err != nil {
			return nil, fmt.Errorf("layout of %q: %w", t.Name, err)
		}
		if i > 0 && blocks != l.blocks {
			return nil, fmt.Errorf("layout of %q: %d blocks, and the tensors before it have %d", t.Name, blocks, l.blocks)
		}
		l.blocks = blocks
		for _, p := range spans.pieces {
			l.bytes += p.Length
		}
		l.tensors = append(l.tensors, spans)
	}
	return l, nil
}

// Blocks returns how many physical blocks there are.
func (l *Layout) Blocks() int { return l.blocks }

// BlockBytes returns how many bytes one block has over all tensors.
func (l *Layout) BlockBytes() int { return l.bytes }

// spans works out the pieces of a tensor's block 0.
func (t *Tensor) spans(arena int) (tensorSpans, int, error) {
	s, blocks := tensorSpans{}, 0
	var rest []Dim
	if t.Element < 1 || t.Element > 64 || t.Offset < 0 || t.Offset > arena-t.Element {
		return s, 0, fmt.Errorf("offset %d, element of %d bytes: want elements of 1 to 64 bytes within %d", t.Offset, t.Element, arena)
	}
	end := t.Offset + t.Element // behind the last element
	for _, d := range t.Dims {
		if d.Axis < AxisBlock || d.Axis > AxisDim || d.Size < 1 || d.Size > 1<<40 || d.Stride < 1 || d.Stride > arena || (d.Size-1) > arena/d.Stride {
			return s, 0, fmt.Errorf("%v of %d, %d bytes apart: does not fit an arena of %d bytes", d.Axis, d.Size, d.Stride, arena)
		}
		if end += (d.Size - 1) * d.Stride; end > arena {
			return s, 0, fmt.Errorf("it ends at %d, and the arena at %d", end, arena)
		}
		switch {
		case d.Axis == AxisBlock && blocks > 0:
			return s, 0, errors.New("two block axes")
		case d.Axis == AxisBlock:
			blocks, s.stride = d.Size, d.Stride
		case d.Size > 1:
			rest = append(rest, d)
		}
	}
	if blocks == 0 {
		return s, 0, errors.New("no block axis")
	}
	// From the innermost outwards: what lies without a gap behind what there is makes the piece longer, anything else makes
	// more pieces.
	slices.SortStableFunc(rest, func(a, b Dim) int { return cmp.Compare(a.Stride, b.Stride) })
	length := t.Element
	for len(rest) > 0 && rest[0].Stride == length {
		length *= rest[0].Size
		rest = rest[1:]
	}
	s.pieces = []device.Span{{Offset: t.Offset, Length: length}}
	// The widest strides come first: that is the order in which bytes travel.
	for _, d := range slices.Backward(rest) {
		if d.Stride < length {
			return s, 0, fmt.Errorf("%v: %d bytes apart, and a piece has %d: they overlap", d.Axis, d.Stride, length)
		}
		if len(s.pieces)*d.Size > maxPieces {
			return s, 0, fmt.Errorf("a block lies in more than %d pieces", maxPieces)
		}
		more := make([]device.Span, 0, len(s.pieces)*d.Size)
		for _, p := range s.pieces {
			for i := range d.Size {
				more = append(more, device.Span{Offset: p.Offset + i*d.Stride, Length: p.Length})
			}
		}
		s.pieces = more
	}
	return s, blocks, nil
}

// Discard stands in a list of blocks for one whose bytes travel and are thrown away on arrival: of a group that is read
// whole though its first blocks are there.
const Discard = -1

// Plan appends the pieces of blocks, tensor by tensor and block by block, as they travel; pieces that follow each other in
// memory as well are one. Of a peer's request every block is checked: one that does not exist is an error.
func (l *Layout) Plan(spans []device.Span, blocks []int) ([]device.Span, error) {
	if err := l.check(blocks, 0); err != nil {
		return spans, err
	}
	return l.plan(spans, blocks), nil
}

// check wants every block to be one that exists, or no less than least.
func (l *Layout) check(blocks []int, least int) error {
	for _, b := range blocks {
		if b < least || b >= l.blocks {
			return fmt.Errorf("block %d: there are %d", b, l.blocks)
		}
	}
	return nil
}

// plan is Plan of blocks that were checked. The pieces of [Discard] have no place: their offset is negative.
func (l *Layout) plan(spans []device.Span, blocks []int) []device.Span {
	first := len(spans)
	for i := range l.tensors {
		t := &l.tensors[i]
		for _, b := range blocks {
			at := b * t.stride
			for _, p := range t.pieces {
				offset := p.Offset + at
				if b == Discard {
					offset = Discard
				}
				if n := len(spans); n > first && joins(spans[n-1], offset) {
					spans[n-1].Length += p.Length
					continue
				}
				spans = append(spans, device.Span{Offset: offset, Length: p.Length})
			}
		}
	}
	return spans
}

// joins reports whether a piece at an offset makes the one before it longer: they follow each other in memory, or both have no
// place.
func joins(s device.Span, offset int) bool {
	if s.Offset < 0 || offset < 0 {
		return s.Offset < 0 && offset < 0
	}
	return s.Offset+s.Length == offset
}
