package lmcache

import (
	"cmp"
	"fmt"
	"math"
	"slices"

	"kvstrata/connector"
)

// Shape is what a token's bytes are in LMCache's terms: [KV, Layers, tokens, Hidden] elements.
type Shape struct {
	Format Format // KV2LTD or KVMLA
	DType  DType
	KV     int // 2: keys and values; 1: MLA's latent
	Layers int
	Hidden int // elements of a token in one layer: this rank's heads × head size
}

// TokenBytes returns the bytes of one token over all layers.
func (s *Shape) TokenBytes() int { return s.KV * s.Layers * s.Hidden * s.DType.Bytes() }

// Content returns what stands in the frame of a value of so many bytes.
func (s *Shape) Content(bytes int) (Content, error) {
	token := s.TokenBytes()
	if token < 1 || bytes < token || bytes%token != 0 || bytes > math.MaxInt32 {
		return Content{}, fmt.Errorf("a value of %d bytes: want whole tokens of %d bytes each, less than 2 GiB", bytes, token)
	}
	return Content{Format: s.Format, DType: s.DType, Shape: [4]int32{int32(s.KV), int32(s.Layers), int32(bytes / token), int32(s.Hidden)}}, nil
}

// Arrange returns the caches with their tensors cut, and put in the order, in which LMCache has a chunk's bytes: the keys
// of all layers, then the values of all layers, each token by token (KV_2LTD), or for MLA the latents of all layers
// (KV_MLA_FMT). The memory stays as it is.
//
// Layers that share a tensor are cut apart, and so are keys and values however they lie. What cannot be had is a layout
// whose blocks have heads before tokens (HND), or otherwise do not go token, head, element: a chunk spans blocks, and the
// plan of a tensor goes block by block, so that no cutting yields token by token. LMCache's own engines transpose on the
// GPU there; let the engine use NHD (vLLM: VLLM_KV_CACHE_LAYOUT=NHD).
func Arrange(c connector.Caches) (connector.Caches, Shape, error) {
	var s Shape
	fail := func(format string, args ...any) (connector.Caches, Shape, error) {
		return connector.Caches{}, Shape{}, fmt.Errorf("arrange caches for LMCache: "+format, args...)
	}
	dtype, err := ParseDType(c.Model.DType)
	if err != nil {
		return fail("%w", err)
	}
	s.DType = dtype
	if len(c.Tensors) == 0 {
		return fail("no tensors")
	}
	var keys, values []connector.Tensor
	for i := range c.Tensors {
		parts, hidden, err := cut(&c.Tensors[i], dtype)
		if err != nil {
			return fail("tensor %q: %w", c.Tensors[i].Name, err)
		}
		if i == 0 {
			s.KV, s.Hidden = len(parts), hidden
		}
		if len(parts) != s.KV || hidden != s.Hidden {
			return fail("tensor %q has %d × %d elements a token, and those before it %d × %d: LMCache has one shape for all layers", c.Tensors[i].Name, len(parts), hidden, s.KV, s.Hidden)
		}
		keys = append(keys, parts[0]...)
		if s.KV == 2 {
			values = append(values, parts[1]...)
		}
	}
	s.Layers = len(keys)
	s.Format = KV2LTD
	if s.KV == 1 {
		s.Format = KVMLA
	}
	c.Tensors = append(keys, values...)
	return c, s, nil
}

// cut returns a tensor's layers, of keys and, if it has both, of values, and how many elements a token has in each.
func cut(t *connector.Tensor, dtype DType) (parts [][]connector.Tensor, hidden int, err error) {
	if t.Element != dtype.Bytes() {
		return nil, 0, fmt.Errorf("elements of %d bytes, and %v has %d", t.Element, dtype, dtype.Bytes())
	}
	var inner []connector.Dim // of a layer's keys, or its values
	kv, layer := connector.Dim{Size: 1}, connector.Dim{Size: 1}
	sizes := map[connector.Axis]int{}
	for _, d := range t.Dims {
		if sizes[d.Axis]++; sizes[d.Axis] > 1 {
			return nil, 0, fmt.Errorf("two %v axes", d.Axis)
		}
		switch d.Axis {
		case connector.AxisKV:
			kv = d
		case connector.AxisLayer:
			layer = d
		default:
			inner = append(inner, d)
		}
	}
	if hidden, err = checkOrder(inner); err != nil {
		return nil, 0, err
	}
	if kv.Size != 2 && sizes[connector.AxisKV] > 0 || kv.Size > 2 {
		return nil, 0, fmt.Errorf("%d of keys and values: want 2", kv.Size)
	}
	parts = make([][]connector.Tensor, kv.Size)
	for k := range kv.Size {
		for l := range layer.Size {
			name := t.Name
			if layer.Size > 1 {
				name = fmt.Sprintf("%s.%d", name, l)
			}
			if kv.Size == 2 {
				name += []string{".k", ".v"}[k]
			}
			parts[k] = append(parts[k], connector.Tensor{
				Name: name, Offset: t.Offset + k*kv.Stride + l*layer.Stride, Element: t.Element, Dims: slices.Clone(inner),
			})
		}
	}
	return parts, hidden, nil
}

// checkOrder wants a block to go token, head, element by address, and returns the elements of a token.
func checkOrder(dims []connector.Dim) (hidden int, err error) {
	hidden = 1
	order := []connector.Dim{} // of what has more than one
	for _, d := range dims {
		switch d.Axis {
		case connector.AxisHead, connector.AxisDim:
			hidden *= d.Size
		case connector.AxisBlock:
			continue
		}
		if d.Size > 1 {
			order = append(order, d)
		}
	}
	slices.SortStableFunc(order, func(a, b connector.Dim) int { return cmp.Compare(b.Stride, a.Stride) })
	// The axes are numbered in the order that is wanted.
	if !slices.IsSortedFunc(order, func(a, b connector.Dim) int { return cmp.Compare(a.Axis, b.Axis) }) {
		var words []string
		for _, d := range order {
			words = append(words, d.Axis.String())
		}
		return 0, fmt.Errorf("a block goes %v: LMCache's chunks go [token head dim], which only an NHD layout has", words)
	}
	return hidden, nil
}
