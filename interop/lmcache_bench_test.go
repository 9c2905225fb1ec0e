package interop_test

import (
	"encoding/json"
	"fmt"
	"os/exec"
	"strconv"
	"testing"

	"kvstrata/connector"
	"kvstrata/connector/device"
	"kvstrata/connector/lmcache"
	"kvstrata/connector/store"
	"kvstrata/event"
)

// BenchmarkLMCache measures our client, and LMCache's own against the same server, ours and LMCache's; it reports GB/s and
// how many times LMCache's they are. LMCache's client asks for one value at a time, ours for 16, as the connector does.
func BenchmarkLMCache(b *testing.B) {
	lmcacheRelease.need(b)
	for _, name := range []string{"our server", "LMCache's server"} {
		b.Run(name, func(b *testing.B) {
			url := remotes[name](b)
			out, err := exec.Command(lmcacheRelease.interpreter(), "lmcache_bench.py", "--url", url).Output()
			if err != nil {
				b.Fatalf("lmcache_bench.py: %v", err)
			}
			var theirs struct {
				Put map[string]float64 `json:"put_gb_per_s"`
				Get map[string]float64 `json:"get_gb_per_s"`
			}
			if err := json.Unmarshal(out, &theirs); err != nil {
				b.Fatal(err)
			}
			for _, size := range []int{1 << 20, 4 << 20} {
				for _, op := range []string{"put", "get"} {
					b.Run(fmt.Sprintf("%s/%dMiB", op, size>>20), func(b *testing.B) {
						base := theirs.Put
						if op == "get" {
							base = theirs.Get
						}
						benchmarkLMCache(b, url, size, op == "get", base[strconv.Itoa(size)])
					})
				}
			}
		})
	}
}

// benchmarkLMCache moves 16 values of a size at a time, each in pieces of 32 KiB or more, to and from an arena.
func benchmarkLMCache(b *testing.B, url string, size int, get bool, base float64) {
	const values, layers, tokens = 16, 4, 16
	hidden := size / (16 * tokens * 2 * layers * 2) // 16 blocks a value
	model := connector.Model{Name: "bench", DType: "bfloat16", Layers: layers, KVHeads: 1, HeadSize: hidden, BlockTokens: tokens, Ranks: 1}
	layer := size * values / layers
	memory, err := device.Host{}.Alloc("bench", layer*layers)
	if err != nil {
		b.Fatal(err)
	}
	caches := connector.Caches{Device: device.Host{}, Memory: memory, Model: model}
	for l := range layers {
		caches.Tensors = append(caches.Tensors, connector.Packed(fmt.Sprint("layer.", l), l*layer, 2, connector.Dim{Axis: connector.AxisKV, Size: 2},
			connector.Dim{Axis: connector.AxisBlock, Size: 16 * values}, connector.Dim{Axis: connector.AxisToken, Size: tokens}, connector.Dim{Axis: connector.AxisDim, Size: hidden}))
	}
	caches, shape, err := lmcache.Arrange(caches)
	if err != nil {
		b.Fatal(err)
	}
	cache, err := connector.NewCache(caches)
	if err != nil {
		b.Fatal(err)
	}
	cfg := lmcache.DefaultConfig()
	cfg.RemoteURL = url
	client, err := lmcache.New(cfg, model, shape)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		for _, err := range []error{client.Close(), cache.Close(), memory.Close()} {
			if err != nil {
				b.Error(err)
			}
		}
	})
	var items []store.Item
	for v := range values {
		blocks := make([]int, 16)
		for i := range blocks {
			blocks[i] = (i*values + v*5) % (16 * values) // never neighbours
		}
		w, err := cache.Scatter(blocks)
		if err != nil {
			b.Fatal(err)
		}
		defer w.Release()
		g := &store.Group{Blocks: make([]connector.Name, 16)}
		g.Chunk = event.IntHash(uint64(v))
		items = append(items, store.Item{Key: client.Key(g), Group: g, Pieces: w.Pieces, Bytes: w.Bytes})
	}
	if errs := client.Put(b.Context(), items); errs != nil {
		b.Fatal(errs)
	}
	b.SetBytes(int64(size * values))
	move := client.Put
	if get {
		move = client.Get
	}
	for b.Loop() {
		if errs := move(b.Context(), items); errs != nil {
			b.Fatal(errs)
		}
	}
	rate := float64(size*values) * float64(b.N) / b.Elapsed().Seconds() / 1e9
	b.ReportMetric(rate, "GB/s")
	b.ReportMetric(rate/base, "times_LMCache")
}
