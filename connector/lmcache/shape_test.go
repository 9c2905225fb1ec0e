package lmcache_test

import (
	"context"
	"encoding/binary"
	"slices"
	"strings"
	"testing"

	"kvstrata/connector"
	"kvstrata/connector/device"
	"kvstrata/connector/lmcache"
)

// axes of an engine's layout, outermost first.
type axes []connector.Axis

const (
	kvAxis, blockAxis, layerAxis = connector.AxisKV, connector.AxisBlock, connector.AxisLayer
	tokenAxis, headAxis, dimAxis = connector.AxisToken, connector.AxisHead, connector.AxisDim
	elementBytes                 = 2
	kvBytes                      = blocks * blockTokens * heads * headSize * elementBytes
	allBytes                     = 2 * layers * kvBytes
)

func sizeOf(a connector.Axis) int {
	return map[connector.Axis]int{kvAxis: 2, blockAxis: blocks, layerAxis: layers, tokenAxis: blockTokens, headAxis: heads, dimAxis: headSize}[a]
}

// laid returns caches of a layout; without a layer axis they are a tensor a layer.
func laid(t *testing.T, order axes) connector.Caches {
	t.Helper()
	memory, err := device.Host{}.Alloc("test", allBytes)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := memory.Close(); err != nil {
			t.Error(err)
		}
	})
	var dims []connector.Dim
	bytes := elementBytes
	for _, a := range order {
		dims = append(dims, connector.Dim{Axis: a, Size: sizeOf(a)})
		bytes *= sizeOf(a)
	}
	c := connector.Caches{Device: device.Host{}, Memory: memory, Model: model()}
	tensors := layers
	if slices.Contains(order, layerAxis) {
		tensors = 1
	}
	for i := range tensors {
		c.Tensors = append(c.Tensors, connector.Packed("t", i*bytes, elementBytes, dims...))
	}
	return c
}

// label is what an element says of itself: where LMCache has it.
func label(kv, layer, block, token, head, dim int) uint16 {
	return uint16(((((kv*layers+layer)*blocks+block)*blockTokens+token)*heads+head)*headSize + dim)
}

// TestArrange gathers blocks of every layout that can be had, and finds each element in its place of [2, L, T, H, D].
func TestArrange(t *testing.T) {
	if 2*layers*blocks*blockTokens*heads*headSize > 1<<16 {
		t.Fatal("the labels are not unique")
	}
	for name, order := range map[string]axes{
		"a tensor a layer, keys before values": {kvAxis, blockAxis, tokenAxis, headAxis, dimAxis},
		"keys and values within a block":       {blockAxis, kvAxis, tokenAxis, headAxis, dimAxis},
		"keys and values within a token":       {blockAxis, tokenAxis, kvAxis, headAxis, dimAxis},
		"layers within a block":                {blockAxis, layerAxis, kvAxis, tokenAxis, headAxis, dimAxis},
		"layers before blocks":                 {layerAxis, kvAxis, blockAxis, tokenAxis, headAxis, dimAxis},
		"layers within keys":                   {kvAxis, blockAxis, layerAxis, tokenAxis, headAxis, dimAxis},
	} {
		t.Run(name, func(t *testing.T) {
			c := laid(t, order)
			mem := c.Memory.Host()
			for i := range c.Tensors {
				each(c.Tensors[i].Dims, func(at int, index map[connector.Axis]int) {
					layer := index[layerAxis]
					if !slices.Contains(order, layerAxis) {
						layer = i
					}
					binary.LittleEndian.PutUint16(mem[c.Tensors[i].Offset+at:], label(index[kvAxis], layer, index[blockAxis], index[tokenAxis], index[headAxis], index[dimAxis]))
				})
			}
			arranged, s, err := lmcache.Arrange(c)
			if err != nil {
				t.Fatal(err)
			}
			if s != shape() || s.TokenBytes() != tokenBytes {
				t.Fatalf("shape %+v, %d bytes a token", s, s.TokenBytes())
			}
			cache, err := connector.NewCache(arranged)
			if err != nil {
				t.Fatal(err)
			}
			picked := []int{5, 6, 63, 0}
			w, err := cache.Gather(context.Background(), picked)
			if err != nil {
				t.Fatal(err)
			}
			defer w.Release()
			got := slices.Concat(w.Pieces...)
			var want []byte
			for kv := range 2 {
				for layer := range layers {
					for _, block := range picked {
						for i := range blockTokens * heads * headSize {
							want = binary.LittleEndian.AppendUint16(want, label(kv, layer, block, 0, 0, i))
						}
					}
				}
			}
			if string(got) != string(want) {
				t.Error("the bytes are not in LMCache's order")
			}
		})
	}
}

// each calls f for every element of a tensor.
func each(dims []connector.Dim, f func(at int, index map[connector.Axis]int)) {
	index := map[connector.Axis]int{}
	var walk func(at int, rest []connector.Dim)
	walk = func(at int, rest []connector.Dim) {
		if len(rest) == 0 {
			f(at, index)
			return
		}
		for i := range rest[0].Size {
			index[rest[0].Axis] = i
			walk(at+i*rest[0].Stride, rest[1:])
		}
	}
	walk(0, dims)
}

func TestArrangeRefuses(t *testing.T) {
	for name, order := range map[string]axes{
		"HND":                        {kvAxis, blockAxis, headAxis, tokenAxis, dimAxis},
		"elements before tokens":     {kvAxis, blockAxis, headAxis, dimAxis, tokenAxis},
		"HND with layers in a block": {blockAxis, layerAxis, kvAxis, headAxis, tokenAxis, dimAxis},
	} {
		if _, _, err := lmcache.Arrange(laid(t, order)); err == nil || !strings.Contains(err.Error(), "NHD") {
			t.Errorf("%s: %v", name, err)
		}
	}
	c := laid(t, axes{kvAxis, blockAxis, tokenAxis, headAxis, dimAxis})
	c.Model.DType = "int3"
	if _, _, err := lmcache.Arrange(c); err == nil {
		t.Error("an element type that LMCache has not is taken")
	}
	c.Model.DType = "fp8"
	if _, _, err := lmcache.Arrange(c); err == nil {
		t.Error("elements of another size are taken")
	}
	c.Model.DType, c.Tensors[1].Dims[4].Size = "bfloat16", headSize/2
	if _, _, err := lmcache.Arrange(c); err == nil {
		t.Error("layers that differ are taken")
	}
	c.Tensors = nil
	if _, _, err := lmcache.Arrange(c); err == nil {
		t.Error("no tensors are taken")
	}
}

// TestArrangeMLA has one latent a token, and an HND layout of one head is NHD as well.
func TestArrangeMLA(t *testing.T) {
	c := laid(t, axes{blockAxis, tokenAxis, dimAxis})
	_, s, err := lmcache.Arrange(c)
	if want := (lmcache.Shape{Format: lmcache.KVMLA, DType: lmcache.BFloat16, KV: 1, Layers: layers, Hidden: headSize}); err != nil || s != want {
		t.Errorf("shape %+v, %v; want %+v", s, err, want)
	}
	c = laid(t, axes{kvAxis, blockAxis, headAxis, tokenAxis, dimAxis})
	for i := range c.Tensors {
		c.Tensors[i].Dims[2].Size = 1
	}
	if _, s, err = lmcache.Arrange(c); err != nil || s.Hidden != headSize {
		t.Errorf("one head: shape %+v, %v", s, err)
	}
}
