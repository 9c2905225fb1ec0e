package tcp_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"net"
	"os"
	"sync"
	"testing"
	"time"

	"kvstrata/connector"
	"kvstrata/connector/device"
	"kvstrata/connector/tcp"
	"kvstrata/leaktest"
)

func TestMain(m *testing.M) { os.Exit(leaktest.Run(m)) }

// order is how a test cache lies in memory.
type order uint8

const (
	nhd     order = iota // block, kv, token, head
	kvFirst              // kv, block, token, head: blocks lie otherwise, and travel alike
	hnd                  // block, kv, head, token: another order of travel
)

const (
	tokens, heads, dim, layers = 16, 4, 64, 3
	blockBytes                 = layers * 2 * tokens * heads * dim * 2
)

func caches(tb testing.TB, o order, blocks int) connector.Caches {
	tb.Helper()
	var tensors []connector.Tensor
	offset := 0
	for i := range layers {
		b, kv := connector.Dim{Axis: connector.AxisBlock, Size: blocks}, connector.Dim{Axis: connector.AxisKV, Size: 2}
		t, h := connector.Dim{Axis: connector.AxisToken, Size: tokens}, connector.Dim{Axis: connector.AxisHead, Size: heads}
		d := connector.Dim{Axis: connector.AxisDim, Size: dim}
		dims := [][]connector.Dim{nhd: {b, kv, t, h, d}, kvFirst: {kv, b, t, h, d}, hnd: {b, kv, h, t, d}}[o]
		tensors = append(tensors, connector.Packed(string(rune('a'+i)), offset, 2, dims...))
		offset += blocks * blockBytes / layers
	}
	mem, err := device.Host{}.Alloc("test", offset)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { _ = mem.Close() })
	return connector.Caches{
		Device: device.Host{}, Memory: mem, Tensors: tensors,
		Model: connector.Model{Name: "m", DType: "float16", Layers: layers, KVHeads: heads, HeadSize: dim, BlockTokens: tokens, Ranks: 1},
	}
}

func cache(tb testing.TB, o order, blocks int) *connector.Cache {
	tb.Helper()
	c, err := connector.NewCache(caches(tb, o, blocks))
	if err != nil {
		tb.Fatal(err)
	}
	return c
}

// read returns a block's bytes as they travel.
func read(tb testing.TB, c *connector.Cache, block int) []byte {
	tb.Helper()
	w, err := c.Gather(tb.Context(), []int{block})
	if err != nil {
		tb.Fatal(err)
	}
	defer w.Release()
	return bytes.Join(w.Pieces, nil)
}

// fill gives every block bytes of its own.
func fill(tb testing.TB, c *connector.Cache) {
	tb.Helper()
	r := rand.NewChaCha8([32]byte{1})
	_, _ = r.Read(c.Caches().Memory.Host())
}

func blank(c *connector.Cache) []byte { return bytes.Clone(c.Caches().Memory.Host()) }

// engine is an endpoint that runs.
type engine struct {
	*tcp.Endpoint
	cache *connector.Cache
	stop  func()
}

func (e *engine) peer() tcp.Peer { return tcp.Peer{Address: e.Address(), Engine: "p"} }

// start runs an endpoint. change may change its configuration; it listens unless it has been given a way to dial.
func start(tb testing.TB, name string, c *connector.Cache, change func(*tcp.Config, *tcp.Identity)) *engine {
	tb.Helper()
	cfg, id := tcp.DefaultConfig(), tcp.Identity{Engine: name, Ranks: 1, Cache: c, Log: slog.New(slog.DiscardHandler)}
	cfg.SharedMemory = false
	if change != nil {
		change(&cfg, &id)
	}
	e, err := tcp.New(cfg, id)
	if err != nil {
		tb.Fatal(err)
	}
	if id.Dial == nil {
		if err := e.Listen(); err != nil {
			tb.Fatal(err)
		}
	}
	return run(tb, e, c)
}

func run(tb testing.TB, e *tcp.Endpoint, c *connector.Cache) *engine {
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- e.Run(ctx) }()
	stop := sync.OnceFunc(func() {
		cancel()
		if err := <-ended; err != nil {
			tb.Errorf("run: %v", err)
		}
	})
	tb.Cleanup(stop)
	return &engine{Endpoint: e, cache: c, stop: stop}
}

// tap is a connection that a test looks into.
type tap struct {
	net.Conn
	onRead, onWrite func([]byte)
}

func (c *tap) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if c.onRead != nil {
		c.onRead(p[:n])
	}
	return n, err
}

func (c *tap) Write(p []byte) (int, error) {
	if c.onWrite != nil {
		c.onWrite(p)
	}
	return c.Conn.Write(p)
}

// piped connects to an endpoint by a pipe without a buffer: what one side has written the other has read.
func piped(to *engine, onRead, onWrite func([]byte)) func(*tcp.Config, *tcp.Identity) {
	return func(_ *tcp.Config, id *tcp.Identity) {
		id.Dial = func(context.Context, string) (net.Conn, error) {
			here, there := net.Pipe()
			to.Serve(there)
			return &tap{Conn: here, onRead: onRead, onWrite: onWrite}, nil
		}
	}
}

func both(changes ...func(*tcp.Config, *tcp.Identity)) func(*tcp.Config, *tcp.Identity) {
	return func(cfg *tcp.Config, id *tcp.Identity) {
		for _, c := range changes {
			c(cfg, id)
		}
	}
}

func shared(cfg *tcp.Config, _ *tcp.Identity)   { cfg.SharedMemory = true }
func oneBlock(cfg *tcp.Config, _ *tcp.Identity) { cfg.ChunkBytes, cfg.Connections = 1, 1 }

func pull(p tcp.Peer, name string, c *connector.Cache, from, to []int) *tcp.Pull {
	return &tcp.Pull{Peer: p, Name: name, Parts: from, Into: tcp.Blocks(c, to)}
}

func export(tb testing.TB, e *engine, name string, blocks ...int) {
	tb.Helper()
	if err := e.Export(name, tcp.Blocks(e.cache, blocks), 1); err != nil {
		tb.Fatal(err)
	}
}

func wantError(tb testing.TB, err, want error) {
	tb.Helper()
	if !errors.Is(err, want) {
		tb.Fatalf("error %v: want %v", err, want)
	}
}

// eventually waits for what another goroutine is about to do.
func eventually(tb testing.TB, what string, done func() bool) {
	tb.Helper()
	for deadline := time.Now().Add(20 * time.Second); !done(); <-time.After(time.Millisecond) {
		if time.Now().After(deadline) {
			tb.Fatalf("timed out: %s", what)
		}
	}
}

// same wants blocks of two caches to have the same bytes, but for those that are left out.
func same(tb testing.TB, a, b *connector.Cache, from, to []int, failed map[int]bool) {
	tb.Helper()
	for i := range from {
		if to[i] != connector.Discard && !failed[i] && !bytes.Equal(read(tb, a, from[i]), read(tb, b, to[i])) {
			tb.Fatalf("block %d has other bytes than %d", to[i], from[i])
		}
	}
}
