package connector_test

import (
	"math"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"kvstrata/connector"
	"kvstrata/connector/device"
)

func dim(a connector.Axis, n int) connector.Dim { return connector.Dim{Axis: a, Size: n} }

func TestPlan(t *testing.T) {
	const block, layer, kv, token, head, elem = connector.AxisBlock, connector.AxisLayer, connector.AxisKV, connector.AxisToken,
		connector.AxisHead, connector.AxisDim
	for _, test := range []struct {
		name    string
		tensors []connector.Tensor
		blocks  []int
		want    []device.Span
	}{
		{
			"NHD, keys and values apart", // [2, 4 blocks, 2 tokens, 2 heads, 4] of 2 bytes: 32 bytes a block of keys
			[]connector.Tensor{connector.Packed("l0", 0, 2, dim(kv, 2), dim(block, 4), dim(token, 2), dim(head, 2), dim(elem, 4))},
			[]int{1, 3},
			[]device.Span{{Offset: 32, Length: 32}, {Offset: 160, Length: 32}, {Offset: 96, Length: 32}, {Offset: 224, Length: 32}},
		},
		{
			"HND, a block's keys and values together", // [4 blocks, 2, 2 heads, 2 tokens, 4]: 64 bytes a block
			[]connector.Tensor{connector.Packed("l0", 100, 2, dim(block, 4), dim(kv, 2), dim(head, 2), dim(token, 2), dim(elem, 4))},
			[]int{0, 2},
			[]device.Span{{Offset: 100, Length: 64}, {Offset: 228, Length: 64}},
		},
		{
			"neighbours are one",
			[]connector.Tensor{connector.Packed("l0", 0, 2, dim(block, 4), dim(token, 2), dim(elem, 4))},
			[]int{1, 2, 3, 0},
			[]device.Span{{Offset: 16, Length: 48}, {Offset: 0, Length: 16}},
		},
		{
			"MLA, two layers", // latent, no heads: one tensor a layer
			[]connector.Tensor{
				connector.Packed("l0", 0, 2, dim(block, 4), dim(token, 2), dim(elem, 4)),
				connector.Packed("l1", 64, 2, dim(block, 4), dim(token, 2), dim(elem, 4)),
			},
			[]int{3},
			[]device.Span{{Offset: 48, Length: 16}, {Offset: 112, Length: 16}},
		},
		{
			"a block's layers together",
			[]connector.Tensor{connector.Packed("all", 0, 2, dim(block, 4), dim(layer, 3), dim(kv, 2), dim(token, 2), dim(elem, 4))},
			[]int{2, 1},
			[]device.Span{{Offset: 192, Length: 96}, {Offset: 96, Length: 96}},
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			l, err := connector.NewLayout(test.tensors, 400)
			if err != nil {
				t.Fatal(err)
			}
			got, err := l.Plan(nil, test.blocks)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(test.want, got); diff != "" {
				t.Error(diff)
			}
			sum := 0
			for _, s := range got {
				sum += s.Length
			}
			if sum != len(test.blocks)*l.BlockBytes() || l.Blocks() != 4 {
				t.Errorf("%d bytes of %d blocks of %d", sum, l.Blocks(), l.BlockBytes())
			}
			for _, bad := range []int{-1, 4, 1 << 62} {
				if _, err := l.Plan(nil, []int{0, bad}); err == nil {
					t.Errorf("block %d is planned", bad)
				}
			}
		})
	}
}

func TestBadLayouts(t *testing.T) {
	block, elem := connector.AxisBlock, connector.AxisDim
	for want, tensors := range map[string][]connector.Tensor{
		"no tensors":      nil,
		"no block axis":   {connector.Packed("l", 0, 2, dim(elem, 4))},
		"two block axes":  {connector.Packed("l", 0, 2, dim(block, 2), dim(block, 2))},
		"ends at 132":     {connector.Packed("l", 4, 2, dim(block, 8), dim(elem, 8))},
		"offset -1":       {connector.Packed("l", -1, 2, dim(block, 2), dim(elem, 4))},
		"offset 9223":     {{Name: "l", Offset: math.MaxInt - 1, Element: 2, Dims: []connector.Dim{{block, 2, 8}, {elem, 4, 2}}}},
		"does not fit":    {connector.Packed("l", 0, 2, dim(block, 1<<40), dim(elem, 1<<40))},
		"they overlap":    {{Name: "l", Element: 2, Dims: []connector.Dim{{block, 2, 64}, {connector.AxisHead, 2, 4}, {elem, 4, 2}}}},
		"4 blocks, and":   {connector.Packed("l", 0, 2, dim(block, 2), dim(elem, 4)), connector.Packed("m", 64, 2, dim(block, 4), dim(elem, 4))},
		"does not fit an": {{Name: "l", Element: 2, Dims: []connector.Dim{{block, 2, 0}, {elem, 4, 2}}}},
	} {
		if _, err := connector.NewLayout(tensors, 128); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
}

// Whatever the layout, the spans of a block hold each of its elements once and nothing of another block.
func TestEveryElementTravelsOnce(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		axes := rapid.Permutation([]connector.Axis{connector.AxisBlock, connector.AxisKV, connector.AxisToken, connector.AxisHead, connector.AxisDim}).Draw(t, "axes")
		dims := make([]connector.Dim, len(axes))
		for i, a := range axes {
			dims[i] = dim(a, rapid.IntRange(1, 4).Draw(t, a.String()))
		}
		element := rapid.IntRange(1, 4).Draw(t, "element")
		tensor := connector.Packed("l", rapid.IntRange(0, 9).Draw(t, "offset"), element, dims...)
		if rapid.Bool().Draw(t, "gap") { // the outermost axis is further apart than need be
			tensor.Dims[0].Stride += rapid.IntRange(0, 20).Draw(t, "apart")
		}
		// Every element, by hand: which block it is of.
		of := map[int]int{}
		var walk func(i, at, block int)
		walk = func(i, at, block int) {
			if i == len(tensor.Dims) {
				for b := range element {
					of[at+b] = block
				}
				return
			}
			for n := range tensor.Dims[i].Size {
				next := block
				if tensor.Dims[i].Axis == connector.AxisBlock {
					next = n
				}
				walk(i+1, at+n*tensor.Dims[i].Stride, next)
			}
		}
		walk(0, tensor.Offset, 0)
		l, err := connector.NewLayout([]connector.Tensor{tensor}, 1<<20)
		if err != nil {
			t.Fatal(err)
		}
		seen := map[int]int{}
		for block := range l.Blocks() {
			spans, err := l.Plan(nil, []int{block})
			if err != nil {
				t.Fatal(err)
			}
			for _, s := range spans {
				for at := s.Offset; at < s.Offset+s.Length; at++ {
					if of, ok := of[at]; !ok || of != block {
						t.Fatalf("byte %d travels with block %d, and is of %d (%v)", at, block, of, ok)
					}
					seen[at]++
				}
			}
		}
		if len(seen) != len(of) {
			t.Fatalf("%d bytes travel, of %d", len(seen), len(of))
		}
		for at, n := range seen {
			if n != 1 {
				t.Fatalf("byte %d travels %d times", at, n)
			}
		}
	})
}

func TestArena(t *testing.T) {
	a, err := device.NewArena("test", 1<<16)
	if err != nil {
		t.Fatal(err)
	}
	copy(a.Host(), "abc")
	read := make([]byte, 3)
	if _, err := a.File().ReadAt(read, 0); err != nil || string(read) != "abc" {
		t.Errorf("%q, %v", read, err)
	}
	if err := a.File().Truncate(0); err == nil {
		t.Error("the memory could be cut under whoever has it mapped")
	}
	if err := a.Close(); err != nil {
		t.Error(err)
	}
	if err := a.Close(); err != nil || a.Host() != nil {
		t.Errorf("the second time: %v", err)
	}
	if _, err := device.NewArena("none", 0); err == nil {
		t.Error("an arena of nothing")
	}
}
