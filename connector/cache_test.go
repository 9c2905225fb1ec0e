package connector_test

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"os"
	"testing"

	"kvstrata/connector"
	"kvstrata/connector/device"
)

// card is a device whose memory the CPU cannot address, as a GPU's: everything goes through streams and pinned memory.
type card struct {
	device.Host
	streams int
	broken  error // of the next copy
}

type cardMemory struct{ device.Memory }

func (cardMemory) Host() []byte   { return nil }
func (cardMemory) File() *os.File { return nil }

type cardStream struct {
	card *card
	host device.Stream
}

func (c *card) Name() string { return "card:0" }

func (c *card) Alloc(name string, size int) (device.Memory, error) {
	m, err := c.Host.Alloc(name, size)
	return cardMemory{m}, err
}

func (c *card) NewStream() (device.Stream, error) {
	c.streams++
	s, err := c.Host.NewStream()
	return cardStream{c, s}, err
}

func (s cardStream) Gather(dst []byte, src device.Memory, spans []device.Span) (device.Event, error) {
	if s.card.broken != nil {
		return nil, s.card.broken
	}
	return s.host.Gather(dst, src.(cardMemory).Memory, spans)
}

func (s cardStream) Scatter(dst device.Memory, spans []device.Span, src []byte) (device.Event, error) {
	if s.card.broken != nil {
		return nil, s.card.broken
	}
	return s.host.Scatter(dst.(cardMemory).Memory, spans, src)
}

func (s cardStream) Close() error { return s.host.Close() }

// caches returns registered caches of 8 blocks in two layers.
func caches(t *testing.T, d device.Device) connector.Caches {
	t.Helper()
	var tensors []connector.Tensor
	for i := range 2 {
		tensors = append(tensors, connector.Packed("layer", i*8*2*4*2*8, 2, dim(connector.AxisKV, 2), dim(connector.AxisBlock, 8),
			dim(connector.AxisToken, 4), dim(connector.AxisHead, 2), dim(connector.AxisDim, 4)))
	}
	memory, err := d.Alloc("test", 4096)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := memory.Close(); err != nil {
			t.Error(err)
		}
	})
	return connector.Caches{Device: d, Memory: memory, Tensors: tensors, Model: connector.Model{Name: "m", BlockTokens: 4}}
}

func newCache(t *testing.T, c connector.Caches) *connector.Cache {
	t.Helper()
	cache, err := connector.NewCache(c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := cache.Close(); err != nil {
			t.Error(err)
		}
	})
	return cache
}

// Blocks of a memory that the CPU can address and of one that it can't travel alike, discarded ones included.
func TestWindowsOfHostAndDevice(t *testing.T) {
	host, gpu := newCache(t, caches(t, device.Host{})), newCache(t, caches(t, &card{}))
	random := rand.New(rand.NewPCG(1, 2))
	for _, c := range []struct{ from, to *connector.Cache }{{host, gpu}, {gpu, host}, {gpu, gpu}, {host, host}} {
		payload := make([]byte, 3*c.from.BlockBytes())
		for i := range payload {
			payload[i] = byte(random.Uint32())
		}
		put(t, c.from, []int{6, 1, 2}, payload)
		got := get(t, c.from, []int{6, 1, 2})
		if !bytes.Equal(got, payload) {
			t.Fatal("what was put is not what is there")
		}
		before := get(t, c.to, []int{0, 3, 4, 5, 7})
		put(t, c.to, []int{1, connector.Discard, 6}, got) // block 6's content to block 1, block 2's to block 6
		if !bytes.Equal(get(t, c.to, []int{1}), get2(t, payload, c.to, 0)) || !bytes.Equal(get(t, c.to, []int{6}), get2(t, payload, c.to, 2)) {
			t.Error("blocks did not arrive")
		}
		if !bytes.Equal(get(t, c.to, []int{0, 3, 4, 5, 7}), before) {
			t.Error("other blocks were written")
		}
	}
}

// get2 returns the bytes of block i of a payload of three blocks: they travel tensor by tensor.
func get2(t *testing.T, payload []byte, c *connector.Cache, i int) (out []byte) {
	t.Helper()
	part := c.BlockBytes() / 4 // two layers of keys and values: per layer, keys of all blocks stand before values
	for layer := range 2 {
		for block := range 3 {
			if block == i {
				at := layer*2*3*part + block*2*part
				out = append(out, payload[at:at+2*part]...)
			}
		}
	}
	return out
}

func put(t *testing.T, c *connector.Cache, blocks []int, payload []byte) {
	t.Helper()
	w, err := c.Scatter(blocks)
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range w.Pieces {
		payload = payload[copy(p, payload):]
	}
	if err := w.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	w.Release()
}

func get(t *testing.T, c *connector.Cache, blocks []int) (out []byte) {
	t.Helper()
	w, err := c.Gather(t.Context(), blocks)
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range w.Pieces {
		out = append(out, p...)
	}
	if len(out) != w.Bytes {
		t.Errorf("%d bytes in pieces, %d told", len(out), w.Bytes)
	}
	w.Release()
	return out
}

func TestWindowsRefuseBlocksThatAreNotThere(t *testing.T) {
	c := newCache(t, caches(t, device.Host{}))
	for _, blocks := range [][]int{{8}, {-2}, {0, 1 << 40}} {
		if _, err := c.Gather(t.Context(), blocks); err == nil {
			t.Errorf("gathered %v", blocks)
		}
		if _, err := c.Scatter(blocks); err == nil {
			t.Errorf("scattered %v", blocks)
		}
	}
	if _, err := c.Gather(t.Context(), []int{connector.Discard}); err == nil {
		t.Error("gathered what is to be discarded")
	}
}

func TestADeviceThatFails(t *testing.T) {
	d := &card{}
	c := newCache(t, caches(t, d))
	get(t, c, []int{1})
	get(t, c, []int{2})
	if d.streams != 1 {
		t.Errorf("%d streams for windows one after another", d.streams)
	}
	d.broken = errors.New("the card fell off the bus")
	if _, err := c.Gather(context.Background(), []int{1}); !errors.Is(err, d.broken) {
		t.Errorf("gather: %v", err)
	}
	w, err := c.Scatter([]int{1})
	if err != nil {
		t.Fatal(err)
	}
	if err := w.Commit(t.Context()); !errors.Is(err, d.broken) {
		t.Errorf("commit: %v", err)
	}
	w.Release()
}

// Two engines may lay out and number their blocks as they like; whatever changes what bytes mean changes the hash.
func TestCompatibility(t *testing.T) {
	hash := func(edit func(*connector.Caches)) string {
		c := caches(t, device.Host{})
		edit(&c)
		return newCache(t, c).CompatibilityText()
	}
	same := hash(func(*connector.Caches) {})
	for name, edit := range map[string]func(*connector.Caches){
		"fewer blocks": func(c *connector.Caches) {
			for i := range c.Tensors {
				c.Tensors[i].Dims[1].Size = 4
			}
		},
		"another place":    func(c *connector.Caches) { c.Tensors[1].Offset += 128 },
		"names of tensors": func(c *connector.Caches) { c.Tensors[0].Name = "other" },
		"another rank":     func(c *connector.Caches) { c.Rank = 3 },
		"blocks further apart": func(c *connector.Caches) {
			c.Tensors = c.Tensors[:1]
			c.Tensors = append(c.Tensors, caches(t, device.Host{}).Tensors[1])
		},
	} {
		if hash(edit) != same {
			t.Errorf("%s: another hash", name)
		}
	}
	seen := map[string]string{same: "as it was"}
	for name, edit := range map[string]func(*connector.Caches){
		"model":      func(c *connector.Caches) { c.Model.Name = "n" },
		"dtype":      func(c *connector.Caches) { c.Model.DType = "fp8" },
		"block size": func(c *connector.Caches) { c.Model.BlockTokens = 8 },
		"ranks":      func(c *connector.Caches) { c.Model.Ranks = 2 },
		"revision":   func(c *connector.Caches) { c.Model.Revision = "r" },
		"one layer":  func(c *connector.Caches) { c.Tensors = c.Tensors[:1] },
		"element": func(c *connector.Caches) {
			c.Tensors[0].Element, c.Tensors[0].Dims[4].Size = 1, 8
			c.Tensors[0].Dims[4].Stride = 1
		},
		"head before token": func(c *connector.Caches) {
			d := c.Tensors[0].Dims
			d[2].Axis, d[3].Axis = d[3].Axis, d[2].Axis
			d[2].Size, d[3].Size = 2, 4
			d[3].Stride, d[2].Stride = 8, 32
		},
	} {
		h := hash(edit)
		if other, ok := seen[h]; ok {
			t.Errorf("%s: the hash of %s", name, other)
		}
		seen[h] = name
	}
}

func TestCachesAreChecked(t *testing.T) {
	for name, edit := range map[string]func(*connector.Caches){
		"no device":     func(c *connector.Caches) { c.Device = nil },
		"no memory":     func(c *connector.Caches) { c.Memory = nil },
		"no tensors":    func(c *connector.Caches) { c.Tensors = nil },
		"out of it":     func(c *connector.Caches) { c.Tensors[1].Offset = 1 << 20 },
		"no block size": func(c *connector.Caches) { c.Model.BlockTokens = 0 },
	} {
		c := caches(t, device.Host{})
		edit(&c)
		if _, err := connector.NewCache(c); err == nil {
			t.Errorf("%s: taken", name)
		}
	}
}

// A piece that is thrown away is not one with the piece in memory that happens to begin where it would end.
func TestDiscardedPiecesSwallowNothing(t *testing.T) {
	memory, err := device.Host{}.Alloc("test", 64)
	if err != nil {
		t.Fatal(err)
	}
	defer memory.Close()
	c := newCache(t, connector.Caches{
		Device: device.Host{}, Memory: memory, Model: connector.Model{BlockTokens: 1},
		Tensors: []connector.Tensor{connector.Packed("l", 7, 1, dim(connector.AxisBlock, 4), dim(connector.AxisDim, 8))},
	})
	put(t, c, []int{connector.Discard, 0}, []byte("thrown!!and kept"))
	if got := string(memory.Host()[7:15]); got != "and kept" {
		t.Errorf("block 0 holds %q", got)
	}
}
