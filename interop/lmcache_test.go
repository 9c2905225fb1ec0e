package interop_test

import (
	"context"
	"crypto/sha256"
	"crypto/sha3"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"os/exec"
	"slices"
	"strconv"
	"testing"

	"kvstrata/connector"
	"kvstrata/connector/device"
	"kvstrata/connector/lmcache"
	"kvstrata/connector/redis/redistest"
	"kvstrata/connector/store"
	"kvstrata/event"
)

// lmcacheRelease is LMCache's remote store code; its wheel is in a venv of its own. lmcacheOld still has the server of
// version 0 of the protocol.
var (
	lmcacheRelease = version{name: "lmcache", number: "0.5.6"}
	lmcacheOld     = version{name: "lmcache-v0", number: "0.4.1"}
)

// The chunks of these tests: 256 tokens of bfloat16 in 4 layers of 2 heads of 64, as blocks of 16 tokens.
const (
	lmModel                                              = "org/Test-1B"
	lmLayers, lmHeads, lmSize, lmBlock, lmChunk, lmWorld = 4, 2, 64, 16, 256, 2
	lmHidden                                             = lmHeads * lmSize
)

// engine is our side: caches of an engine, and the backend that moves them.
type engine struct {
	*lmcache.Backend
	t     *testing.T
	cache *connector.Cache
	free  int // the next block
}

// newEngine registers caches: a tensor a layer, NHD, keys before values; or MLA's latents.
func newEngine(t *testing.T, url string, mla bool, change ...func(*lmcache.Config)) *engine {
	t.Helper()
	const blocks = 512
	model := connector.Model{Name: lmModel, DType: "bfloat16", Layers: lmLayers, KVHeads: lmHeads, HeadSize: lmSize, BlockTokens: lmBlock, Ranks: lmWorld}
	kv := 2
	if mla {
		kv = 1
	}
	size := kv * blocks * lmBlock * lmHidden * 2
	memory, err := device.Host{}.Alloc("interop", lmLayers*size)
	if err != nil {
		t.Fatal(err)
	}
	caches := connector.Caches{Device: device.Host{}, Memory: memory, Model: model}
	for l := range lmLayers {
		dims := []connector.Dim{{Axis: connector.AxisBlock, Size: blocks}, {Axis: connector.AxisToken, Size: lmBlock}}
		if mla {
			dims = append(dims, connector.Dim{Axis: connector.AxisDim, Size: lmHidden})
		} else {
			dims = append([]connector.Dim{{Axis: connector.AxisKV, Size: 2}}, dims...)
			dims = append(dims, connector.Dim{Axis: connector.AxisHead, Size: lmHeads}, connector.Dim{Axis: connector.AxisDim, Size: lmSize})
		}
		caches.Tensors = append(caches.Tensors, connector.Packed(fmt.Sprint("layer.", l), l*size, 2, dims...))
	}
	caches, shape, err := lmcache.Arrange(caches)
	if err != nil {
		t.Fatal(err)
	}
	e := &engine{t: t}
	if e.cache, err = connector.NewCache(caches); err != nil {
		t.Fatal(err)
	}
	cfg := lmcache.DefaultConfig()
	cfg.RemoteURL, cfg.HashAlgorithm = url, "sha256_cbor"
	for _, f := range change {
		f(&cfg)
	}
	if e.Backend, err = lmcache.New(cfg, model, shape); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		for _, err := range []error{e.Close(), e.cache.Close(), memory.Close()} {
			if err != nil {
				t.Error(err)
			}
		}
	})
	return e
}

// group names a chunk of rank 1 by a hash.
func (e *engine) group(hash uint64) *store.Group {
	g := &store.Group{Blocks: make([]connector.Name, lmChunk/lmBlock), Rank: 1}
	g.Chunk = event.IntHash(hash)
	return g
}

// scattered returns fresh blocks in an order of no sense.
func (e *engine) scattered() []int {
	const n = lmChunk / lmBlock
	blocks := make([]int, n)
	for i := range blocks {
		blocks[i] = e.free + (i*7+3)%n
	}
	e.free += n
	return blocks
}

// chunkOf is the bytes that lmcode.content makes.
func chunkOf(seed string, n int) []byte {
	h := sha3.NewSHAKE128()
	_, _ = h.Write([]byte(seed))
	b := make([]byte, n)
	_, _ = h.Read(b)
	return b
}

// put writes a chunk into blocks of the engine and stores it from there.
func (e *engine) put(hash uint64, seed string) {
	e.t.Helper()
	w, err := e.cache.Scatter(e.scattered())
	if err != nil {
		e.t.Fatal(err)
	}
	defer w.Release()
	data := chunkOf(seed, w.Bytes)
	for _, p := range w.Pieces {
		data = data[copy(p, data):]
	}
	g := e.group(hash)
	if errs := e.Put(e.t.Context(), []store.Item{{Key: e.Key(g), Group: g, Pieces: w.Pieces, Bytes: w.Bytes}}); errs != nil {
		e.t.Fatal(errs)
	}
}

// get loads a chunk into blocks, and compares them, element by element where LMCache has it, with what it should be.
func (e *engine) get(hash uint64, seed string) {
	e.t.Helper()
	blocks := e.scattered()
	w, err := e.cache.Scatter(blocks)
	if err != nil {
		e.t.Fatal(err)
	}
	defer w.Release()
	if errs := e.Get(e.t.Context(), []store.Item{{Key: e.Key(e.group(hash)), Pieces: w.Pieces, Bytes: w.Bytes}}); errs != nil {
		e.t.Fatal(errs)
	}
	data := chunkOf(seed, w.Bytes)
	memory := e.cache.Caches().Memory.Host()
	kv := w.Bytes / (lmLayers * lmChunk * lmHidden * 2)
	const row = lmHidden * 2 // bytes of a token in a layer
	for k := range kv {
		for l := range lmLayers {
			for token := range lmChunk {
				// In memory: [layer][kv][block][token in it][hidden].
				at := l*kv*512*lmBlock*row + k*512*lmBlock*row + (blocks[token/lmBlock]*lmBlock+token%lmBlock)*row
				want := data[((k*lmLayers+l)*lmChunk+token)*row:][:row]
				if string(memory[at:at+row]) != string(want) {
					e.t.Fatalf("chunk %x: kv %d, layer %d, token %d has other bytes", hash, k, l, token)
				}
			}
		}
	}
}

// peer is LMCache's own client.
type peer struct{ *python }

// said is a line of lmcache_client.py.
type said struct {
	OK      bool
	Op      string
	Error   string
	Version string
	Bytes   int
	There   bool
	Key     string
	Chunk   *struct {
		Shape  []int
		DType  string
		Format lmcache.Format
		SHA256 string
	}
}

func newPeer(t *testing.T, url string, mla bool) *peer {
	t.Helper()
	p := &peer{lmcacheRelease.start(t, "lmcache_client.py")}
	kv, world := 2, lmWorld
	if mla {
		kv, world = 1, 1
	}
	worker := world - 1
	p.do(map[string]any{"op": "open", "url": url, "model": lmModel, "world": world, "worker": worker, "dtype": "bfloat16", "shape": []int{kv, lmLayers, lmChunk, lmHidden}, "mla": mla})
	return p
}

func (p *peer) do(command map[string]any) said {
	p.t.Helper()
	p.write(command)
	var s said
	p.read(&s)
	if !s.OK {
		p.t.Fatalf("lmcache_client.py: %v: %s", command, s.Error)
	}
	return s
}

func (p *peer) put(hash uint64, seed string) {
	p.t.Helper()
	p.do(map[string]any{"op": "put", "hash": strconv.FormatUint(hash, 10), "seed": seed})
}

func (p *peer) there(hash uint64) bool {
	p.t.Helper()
	return p.do(map[string]any{"op": "exists", "hash": strconv.FormatUint(hash, 10)}).There
}

// get gets a chunk and compares what LMCache makes of it.
func (p *peer) get(hash uint64, seed string, format lmcache.Format) {
	p.t.Helper()
	c := p.do(map[string]any{"op": "get", "hash": strconv.FormatUint(hash, 10)}).Chunk
	if c == nil {
		p.t.Fatalf("LMCache does not find %x", hash)
	}
	kv := 2
	if format == lmcache.KVMLA {
		kv = 1
	}
	sum := sha256.Sum256(chunkOf(seed, kv*lmLayers*lmChunk*lmHidden*2))
	if want := []int{kv, lmLayers, lmChunk, lmHidden}; c.SHA256 != hex.EncodeToString(sum[:]) || c.DType != "bfloat16" || c.Format != format || !slices.Equal(c.Shape, want) {
		p.t.Fatalf("LMCache reads %x as %+v", hash, *c)
	}
}

// remotes are stores of both kinds that both sides use: ours, LMCache's own, and Redis.
var remotes = map[string]func(testing.TB) string{
	"our server": func(t testing.TB) string {
		cfg := lmcache.DefaultServerConfig()
		cfg.Bytes, cfg.MaxValue = 512<<20, 8<<20
		s, err := lmcache.NewServer(cfg, logTo(t, "lmcache.Server"))
		if err != nil {
			t.Fatal(err)
		}
		ln, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(context.Background())
		ended := make(chan error, 1)
		go func() { ended <- s.Run(ctx, ln) }()
		t.Cleanup(func() {
			cancel()
			if err := <-ended; err != nil {
				t.Error(err)
			}
		})
		return "lm://" + ln.Addr().String()
	},
	"LMCache's server": func(t testing.TB) string {
		var hello struct{ Port int }
		lmcacheRelease.start(t, "lmcache_server.py").read(&hello)
		return fmt.Sprintf("lm://127.0.0.1:%d", hello.Port)
	},
	"Redis": func(t testing.TB) string { return "redis://" + redisServer(t) },
}

// TestLMCacheShares has LMCache's client and ours store chunks that the other reads, byte for byte, in each kind of store.
func TestLMCacheShares(t *testing.T) {
	t.Parallel()
	lmcacheRelease.need(t)
	for name, open := range remotes {
		for _, format := range []lmcache.Format{lmcache.KV2LTD, lmcache.KVMLA} {
			t.Run(name+"/"+format.String(), func(t *testing.T) {
				t.Parallel()
				url, mla := open(t), format == lmcache.KVMLA
				e, p := newEngine(t, url, mla), newPeer(t, url, mla)
				const high = 0xfedcba9876543210
				var keys []string
				for i := range uint64(4) {
					keys = append(keys, e.Key(e.group(high+i)))
					if got := p.do(map[string]any{"op": "key", "hash": strconv.FormatUint(high+i, 10)}).Key; got != keys[i] {
						t.Fatalf("LMCache's key is %s, ours %s", got, keys[i])
					}
				}
				if n, err := e.Prefix(t.Context(), keys); n != 0 || err != nil || p.there(high) {
					t.Fatalf("prefix of nothing: %d, %v", n, err)
				}
				e.put(high, "ours-0")
				p.put(high+1, "theirs-1")
				p.put(high+2, "theirs-2")
				// LMCache's PUT over lm:// has no end that its client knows; ours asks behind it on another connection.
				eventually(t, "three chunks", func() error {
					if n, err := e.Prefix(t.Context(), keys); n != 3 || err != nil {
						return fmt.Errorf("prefix %d, %w", n, err)
					}
					return nil
				})
				if p.there(high+3) || !p.there(high) {
					t.Error("LMCache does not find what is there, or finds what is not")
				}
				p.get(high, "ours-0", format)
				e.get(high+1, "theirs-1")
				p.get(high+1, "theirs-1", format)
				e.get(high+2, "theirs-2")
				e.put(high+1, "ours-1") // over theirs
				p.get(high+1, "ours-1", format)
				for i := range uint64(20) {
					e.put(i, fmt.Sprint("many-", i))
					p.get(i, fmt.Sprint("many-", i), format)
				}
			})
		}
	}
}

// TestLMCacheV0 has our client store in LMCache's server of version 0, and load from it.
func TestLMCacheV0(t *testing.T) {
	t.Parallel()
	lmcacheOld.need(t)
	var hello struct{ Port int }
	lmcacheOld.start(t, "lmcache_server.py", "--v0").read(&hello)
	e := newEngine(t, fmt.Sprintf("lm://127.0.0.1:%d", hello.Port), false, func(c *lmcache.Config) { c.Protocol = "v0" })
	var keys []string
	for i := range uint64(20) {
		e.put(i, fmt.Sprint("many-", i))
		keys = append(keys, e.Key(e.group(i)))
	}
	if n, err := e.Prefix(t.Context(), append(keys, e.Key(e.group(99)))); n != 20 || err != nil {
		t.Errorf("prefix %d, %v; want 20", n, err)
	}
	for i := range uint64(10) {
		e.get(i, fmt.Sprint("many-", i))
	}
	w, err := e.cache.Scatter(make([]int, lmChunk/lmBlock))
	if err != nil {
		t.Fatal(err)
	}
	defer w.Release()
	if errs := e.Get(t.Context(), []store.Item{{Key: e.Key(e.group(99)), Pieces: w.Pieces, Bytes: w.Bytes}}); errs == nil || !errors.Is(errs[0], store.ErrAbsent) {
		t.Errorf("get: %v", errs)
	}
}

// TestLMCacheHalf gets a chunk of which Redis has lost the bytes: neither side takes it to be there any more.
func TestLMCacheHalf(t *testing.T) {
	t.Parallel()
	lmcacheRelease.need(t)
	address := redisServer(t)
	e, p := newEngine(t, "redis://"+address, false), newPeer(t, "redis://"+address, false)
	p.put(7, "theirs")
	key := e.Key(e.group(7))
	if out, err := exec.Command("redis-cli", "-u", "redis://"+address, "DEL", key+lmcache.BytesSuffix).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if n, err := e.Prefix(t.Context(), []string{key}); n != 0 || err != nil {
		t.Errorf("prefix %d, %v", n, err)
	}
	if !p.there(7) {
		t.Error("LMCache goes by the metadata no more: so should we")
	}
	w, err := e.cache.Scatter(e.scattered())
	if err != nil {
		t.Fatal(err)
	}
	defer w.Release()
	if errs := e.Get(t.Context(), []store.Item{{Key: key, Pieces: w.Pieces, Bytes: w.Bytes}}); errs == nil || !errors.Is(errs[0], store.ErrAbsent) {
		t.Errorf("get: %v", errs)
	}
	if p.there(7) {
		t.Error("the metadata is there still")
	}
}

// redisServer starts a Redis and returns its host:port.
func redisServer(t testing.TB) string {
	t.Helper()
	return redistest.Start(t, "--maxmemory", "64mb").Addr
}
