package tcp

import (
	"context"
	"fmt"
	"math"
	"slices"

	"kvstrata/connector"
)

// Content is bytes in numbered parts: what an export offers, or where a fetch puts what it gets. The blocks of a cache are
// one kind: part i is block i of the list. Pieces of memory are the other: part i is piece i.
type Content struct {
	cache  *connector.Cache
	blocks []int
	pieces [][]byte
}

// Blocks is the blocks of a cache. Among those that a fetch fills, [connector.Discard] is allowed.
func Blocks(cache *connector.Cache, blocks []int) Content {
	return Content{cache: cache, blocks: blocks}
}

// Bytes is pieces of memory. As an export they stay readable until the endpoint's Run has returned, though after the lease's end
// they may hold anything; as a destination they are exactly as long as the parts that are fetched.
func Bytes(pieces [][]byte) Content { return Content{pieces: pieces} }

// parts returns how many there are.
func (c *Content) parts() int {
	if c.cache != nil {
		return len(c.blocks)
	}
	return len(c.pieces)
}

// size returns the bytes of a part.
func (c *Content) size(part int) int {
	if c.cache != nil {
		return c.cache.BlockBytes()
	}
	return len(c.pieces[part])
}

// export is content that peers may read.
type export struct {
	name       string
	content    Content
	sorted     []int // of a cache: the blocks
	generation uint64
	consumers  int
	done       map[string]struct{} // consumers that are done
}

func newExport(name string, c Content, consumers int) (*export, error) {
	x := &export{name: name, content: c, consumers: max(consumers, 1)}
	if len(name) < 1 || len(name) > maxName {
		return nil, fmt.Errorf("export %q: a name of %d bytes; want 1 to %d", name, len(name), maxName)
	}
	if c.cache != nil {
		x.content.blocks, x.sorted = slices.Clone(c.blocks), slices.Sorted(slices.Values(c.blocks))
		if n := len(x.sorted); n > 0 && (x.sorted[0] < 0 || x.sorted[n-1] >= c.cache.Layout().Blocks()) {
			return nil, fmt.Errorf("export %q: blocks %d to %d; there are %d", name, x.sorted[0], x.sorted[n-1], c.cache.Layout().Blocks())
		}
	}
	return x, nil
}

// resolve turns the parts that a peer names, in place, into blocks of the cache or positions of pieces, and checks every one.
// It returns how many bytes they have.
func (x *export) resolve(parts []int, ordinal bool) (int, status) {
	bytes, of := 0, x.content.parts()
	for i, p := range parts {
		switch {
		case x.content.cache == nil || ordinal:
			if p < 0 || p >= of {
				return 0, statusForeign
			}
			if x.content.cache != nil {
				parts[i] = x.content.blocks[p]
			}
		default:
			if _, ok := slices.BinarySearch(x.sorted, p); !ok {
				return 0, statusForeign
			}
		}
		size := x.content.size(p)
		if size > maxPayload-bytes {
			return 0, statusTooLarge
		}
		bytes += size
	}
	return bytes, statusOK
}

// opened is the memory of some parts, in the order in which their bytes travel.
type opened struct {
	pieces [][]byte
	bytes  int
	window *connector.Window // of a cache
}

// gather opens parts that resolve returned to be sent. own keeps pieces between calls.
func (x *export) gather(ctx context.Context, parts []int, own [][]byte) (o opened, _ [][]byte, err error) {
	if x.content.cache != nil {
		w, err := x.content.cache.Gather(ctx, parts)
		if err != nil {
			return o, own, err
		}
		return opened{pieces: w.Pieces, bytes: w.Bytes, window: w}, own, nil
	}
	own = own[:0]
	for _, p := range parts {
		own = append(own, x.content.pieces[p])
		o.bytes += len(x.content.pieces[p])
	}
	o.pieces = own
	return o, own, nil
}

// scatter opens the parts from one to another, to be filled.
func (c *Content) scatter(from, to int) (o opened, err error) {
	if c.cache != nil {
		w, err := c.cache.Scatter(c.blocks[from:to])
		if err != nil {
			return o, err
		}
		return opened{pieces: w.Pieces, bytes: w.Bytes, window: w}, nil
	}
	o.pieces = c.pieces[from:to]
	for _, p := range o.pieces {
		o.bytes += len(p)
	}
	return o, nil
}

func (o *opened) commit(ctx context.Context) error {
	if o.window == nil {
		return nil
	}
	return o.window.Commit(ctx)
}

func (o *opened) descriptors() int {
	if o.window == nil {
		return len(o.pieces)
	}
	return o.window.Descriptors()
}

func (o *opened) release() {
	if o.window != nil {
		o.window.Release()
	}
}

// wirePart reports whether a number can be sent as a part.
func wirePart(p int) bool { return p >= 0 && p <= math.MaxUint32 }
