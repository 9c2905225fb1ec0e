package connector

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sync"

	"kvstrata/connector/device"
)

// Model is what two engines must agree on, beside how bytes are ordered, for one to use the other's blocks.
type Model struct {
	Name        string `json:"model"`
	DType       string `json:"dtype"`       // of the cache's elements, as float16, bfloat16, fp8_e4m3
	Attention   string `json:"attention"`   // backend, where its layout is its own; empty = ordinary paged attention
	Layers      int    `json:"layers"`      // of the model
	KVHeads     int    `json:"kv_heads"`    // of the model, over all ranks
	HeadSize    int    `json:"head_size"`   // elements
	BlockTokens int    `json:"block_size"`  // tokens a block
	Ranks       int    `json:"tp_size"`     // tensor-parallel ranks
	Revision    string `json:"revision"`    // of the weights; empty = not told
	Quantized   string `json:"quantized"`   // scheme and scales of a quantized cache; empty = none
	Speculative string `json:"speculative"` // of a draft model that shares the cache; empty = none
}

// Caches are what an engine registers once, after allocation (vLLM's register_kv_caches): the memory of its blocks, and
// how they lie in it.
type Caches struct {
	Device  device.Device
	Memory  device.Memory
	Tensors []Tensor // in the order in which their bytes travel
	Model   Model
	Rank    int // tensor-parallel rank of this worker
}

// Cache is registered memory, ready to be read and written in blocks. It is safe for concurrent use, as far as no two
// write the same block.
type Cache struct {
	caches  Caches
	layout  *Layout
	hash    [sha256.Size]byte
	windows sync.Pool

	mu   sync.Mutex
	idle []*staging // for memory that the CPU cannot address
}

// NewCache checks what was registered. The memory must outlive the cache.
func NewCache(c Caches) (*Cache, error) {
	if c.Device == nil || c.Memory == nil {
		return nil, errors.New("register caches: no device or no memory")
	}
	layout, err := NewLayout(c.Tensors, c.Memory.Size())
	if err != nil {
		return nil, fmt.Errorf("register caches: %w", err)
	}
	if c.Model.BlockTokens < 1 {
		return nil, fmt.Errorf("register caches: block size %d: want 1 token or more", c.Model.BlockTokens)
	}
	hash, err := compatibility(&c)
	if err != nil {
		return nil, fmt.Errorf("register caches: %w", err)
	}
	return &Cache{caches: c, layout: layout, hash: hash}, nil
}

// compatibilityVersion is part of every compatibility hash: it changes when the order in which bytes travel does.
const compatibilityVersion = 1

// compatibility is the SHA-256 of what must agree: the model, and of each tensor the axes of a block in the order of their
// strides. How far blocks are apart, and how many there are, is each engine's own business.
func compatibility(c *Caches) ([sha256.Size]byte, error) {
	type axis struct {
		Axis string `json:"axis"`
		Size int    `json:"size"`
	}
	type tensor struct {
		Element int    `json:"element"`
		Axes    []axis `json:"axes"`
	}
	told := struct {
		Version int      `json:"version"`
		Model   Model    `json:"model"`
		Tensors []tensor `json:"tensors"`
	}{Version: compatibilityVersion, Model: c.Model}
	for _, t := range c.Tensors {
		dims := slices.DeleteFunc(slices.Clone(t.Dims), func(d Dim) bool { return d.Axis == AxisBlock || d.Size == 1 })
		slices.SortStableFunc(dims, func(a, b Dim) int { return b.Stride - a.Stride })
		row := tensor{Element: t.Element}
		for _, d := range dims {
			row.Axes = append(row.Axes, axis{d.Axis.String(), d.Size})
		}
		told.Tensors = append(told.Tensors, row)
	}
	text, err := json.Marshal(told)
	return sha256.Sum256(text), err
}

// Compatibility returns the hash that two engines must have in common to exchange blocks.
func (c *Cache) Compatibility() [sha256.Size]byte { return c.hash }

// CompatibilityText is the hash in hexadecimal.
func (c *Cache) CompatibilityText() string { return hex.EncodeToString(c.hash[:]) }

// Caches returns what was registered.
func (c *Cache) Caches() Caches { return c.caches }

// Layout returns where blocks lie.
func (c *Cache) Layout() *Layout { return c.layout }

// BlockBytes returns how many bytes one block has.
func (c *Cache) BlockBytes() int { return c.layout.bytes }

// Window is the bytes of some blocks, as pieces of host memory in the order in which they travel. It is used by one
// goroutine and released once.
type Window struct {
	Pieces [][]byte
	Bytes  int // of all pieces

	cache   *Cache
	spans   []device.Span
	scratch []byte // where discarded bytes go: what was read of a piece stays there until the window is released
	staged  *staging
}

// staging is a stream with pinned memory of its own.
type staging struct {
	stream device.Stream
	memory device.Memory
}

// Gather returns the bytes of blocks to be sent. They are not to be written.
func (c *Cache) Gather(ctx context.Context, blocks []int) (*Window, error) {
	if err := c.layout.check(blocks, 0); err != nil {
		return nil, err
	}
	w, err := c.open(blocks)
	if err != nil || w.staged == nil {
		return w, err
	}
	copied, err := w.staged.stream.Gather(w.Pieces[0], c.caches.Memory, w.spans)
	if err == nil {
		err = copied.Wait(ctx)
	}
	if err != nil {
		w.abandon()
		return nil, fmt.Errorf("gather %d blocks from %s: %w", len(blocks), c.caches.Device.Name(), err)
	}
	return w, nil
}

// Scatter returns where the bytes of blocks are to be put; [Window.Commit] puts them in place. [Discard] is allowed.
func (c *Cache) Scatter(blocks []int) (*Window, error) {
	if err := c.layout.check(blocks, Discard); err != nil {
		return nil, err
	}
	return c.open(blocks)
}

// open plans the pieces of blocks that were checked.
func (c *Cache) open(blocks []int) (*Window, error) {
	w, ok := c.windows.Get().(*Window)
	if !ok {
		w = &Window{cache: c}
	}
	w.spans = c.layout.plan(w.spans[:0], blocks)
	w.Pieces, w.Bytes = w.Pieces[:0], 0
	discarded := 0
	for _, s := range w.spans {
		w.Bytes += s.Length
		if s.Offset < 0 {
			discarded += s.Length
		}
	}
	memory := c.caches.Memory.Host()
	if memory == nil {
		if err := w.stage(); err != nil {
			w.Release()
			return nil, err
		}
		return w, nil
	}
	w.scratch = slices.Grow(w.scratch[:0], discarded)[:discarded]
	scratch := w.scratch
	for _, s := range w.spans {
		if s.Offset < 0 {
			w.Pieces, scratch = append(w.Pieces, scratch[:s.Length]), scratch[s.Length:]
		} else {
			w.Pieces = append(w.Pieces, memory[s.Offset:s.Offset+s.Length:s.Offset+s.Length])
		}
	}
	return w, nil
}

// stage gives the window pinned memory of its size as its only piece.
func (w *Window) stage() error {
	s, err := w.cache.staging()
	if err != nil {
		return err
	}
	w.staged = s
	if s.memory == nil || s.memory.Size() < w.Bytes {
		if s.memory != nil {
			if err := s.memory.Close(); err != nil {
				return fmt.Errorf("free pinned memory: %w", err)
			}
			s.memory = nil
		}
		memory, err := w.cache.caches.Device.Pin("staging", max(w.Bytes, 1))
		if err != nil {
			return fmt.Errorf("pin %d bytes for %s: %w", w.Bytes, w.cache.caches.Device.Name(), err)
		}
		s.memory = memory
	}
	w.Pieces = append(w.Pieces, s.memory.Host()[:w.Bytes])
	return nil
}

// staging returns an idle stream, or a new one.
func (c *Cache) staging() (*staging, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if n := len(c.idle); n > 0 {
		s := c.idle[n-1]
		c.idle = c.idle[:n-1]
		return s, nil
	}
	stream, err := c.caches.Device.NewStream()
	if err != nil {
		return nil, fmt.Errorf("make stream on %s: %w", c.caches.Device.Name(), err)
	}
	return &staging{stream: stream}, nil
}

// Close frees what staging took. No window may be open.
func (c *Cache) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	var errs []error
	for _, s := range c.idle {
		errs = append(errs, s.stream.Close())
		if s.memory != nil {
			errs = append(errs, s.memory.Close())
		}
	}
	c.idle = nil
	return errors.Join(errs...)
}

// Commit puts the bytes of a window that Scatter returned in place, and returns when they are.
func (w *Window) Commit(ctx context.Context) error {
	if w.staged == nil {
		return nil
	}
	src := w.Pieces[0]
	for rest := w.spans; len(rest) > 0; {
		// A run of pieces that are wanted, or of such that are thrown away, staged all the same.
		n, bytes := 0, 0
		for n < len(rest) && (rest[n].Offset < 0) == (rest[0].Offset < 0) {
			bytes += rest[n].Length
			n++
		}
		if rest[0].Offset >= 0 {
			// Whoever owns the blocks may have them back when this returns: a copy that has begun is waited for.
			copied, err := w.staged.stream.Scatter(w.cache.caches.Memory, rest[:n], src[:bytes])
			if err == nil {
				err = copied.Wait(context.WithoutCancel(ctx))
			}
			if err != nil {
				name := w.cache.caches.Device.Name()
				w.abandon()
				return fmt.Errorf("scatter to %s: %w", name, err)
			}
		}
		rest, src = rest[n:], src[bytes:]
	}
	return nil
}

// Descriptors returns in how many pieces of the registered memory the blocks lie.
func (w *Window) Descriptors() int {
	n := 0
	for _, s := range w.spans {
		if s.Offset >= 0 {
			n++
		}
	}
	return n
}

// Kept returns how many bytes are put in place: all but those of [Discard].
func (w *Window) Kept() int {
	n := 0
	for _, s := range w.spans {
		if s.Offset >= 0 {
			n += s.Length
		}
	}
	return n
}

// Spans returns the pieces; those of [Discard] have a negative offset.
func (w *Window) Spans() []device.Span { return w.spans }

// Release gives the window back. Its pieces are not to be used any more.
func (w *Window) Release() {
	if w.staged != nil {
		w.cache.mu.Lock()
		w.cache.idle = append(w.cache.idle, w.staged)
		w.cache.mu.Unlock()
		w.staged = nil
	}
	clear(w.Pieces)
	w.cache.windows.Put(w)
}

// abandon leaves a stream whose copy may still be running, and its memory, to the end of the process.
func (w *Window) abandon() { w.staged = nil }
