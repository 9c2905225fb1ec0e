package lmcache_test

import (
	"context"
	"log/slog"
	"math/rand/v2"
	"net"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"kvstrata/connector"
	"kvstrata/connector/lmcache"
	"kvstrata/connector/store"
	"kvstrata/event"
	"kvstrata/leaktest"
)

func TestMain(m *testing.M) { os.Exit(leaktest.Run(m)) }

// patience is for what comes soon, unless the machine is very busy.
const patience = 30 * time.Second

const (
	layers, blocks, blockTokens, heads, headSize = 3, 64, 4, 2, 8
	tokenBytes                                   = 2 * layers * heads * headSize * 2
)

// model of the tests: bfloat16, 3 layers, 2 heads of 8.
func model() connector.Model {
	return connector.Model{Name: "org/small-1B", DType: "bfloat16", Layers: layers, KVHeads: heads, HeadSize: headSize, BlockTokens: blockTokens, Ranks: 1}
}

func shape() lmcache.Shape {
	return lmcache.Shape{Format: lmcache.KV2LTD, DType: lmcache.BFloat16, KV: 2, Layers: layers, Hidden: heads * headSize}
}

// serverConfig has room for 1 MiB.
func serverConfig() lmcache.ServerConfig {
	cfg := lmcache.DefaultServerConfig()
	cfg.Bytes, cfg.MaxValue, cfg.Timeout = 1<<20, 1<<19, patience
	return cfg
}

func quiet() *slog.Logger { return slog.New(slog.DiscardHandler) }

// running is a server that runs until the test ends, or stop is called.
type running struct {
	*lmcache.Server
	address string
	stop    func()
}

// serve starts a server; an empty address is a free port.
func serve(t testing.TB, cfg lmcache.ServerConfig, address string) *running {
	t.Helper()
	if address == "" {
		address = "127.0.0.1:0"
	}
	ln, err := net.Listen("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	s, err := lmcache.NewServer(cfg, quiet())
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- s.Run(ctx, ln) }()
	r := &running{Server: s, address: ln.Addr().String()}
	r.stop = sync.OnceFunc(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("server: %v", err)
		}
	})
	t.Cleanup(r.stop)
	return r
}

// backend returns a client that is closed when the test ends.
func backend(t testing.TB, url string, change ...func(*lmcache.Config)) *lmcache.Backend {
	t.Helper()
	cfg := lmcache.DefaultConfig()
	cfg.RemoteURL, cfg.ChunkSize = url, 4*blockTokens
	for _, f := range change {
		f(&cfg)
	}
	b, err := lmcache.New(cfg, model(), shape())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := b.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
	})
	return b
}

// group is 4 blocks that end with a hash.
func group(last uint64) *store.Group {
	g := &store.Group{Chunk: event.IntHash(last)}
	for i := range uint64(4) {
		g.Blocks = append(g.Blocks, connector.Name{Hash: event.IntHash(last - 3 + i), Prefix: event.PrefixHash(last - 3 + i)})
	}
	return g
}

// item is a group's bytes, made up from its hash and cut anywhere.
func item(b *lmcache.Backend, last uint64) store.Item {
	it := hole(b, last)
	it.Group = group(last)
	fill := rand.NewChaCha8([32]byte{byte(last), byte(last >> 8), byte(last >> 16)})
	for _, p := range it.Pieces {
		_, _ = fill.Read(p) // never fails
	}
	return it
}

// hole is where a group's bytes go.
func hole(b *lmcache.Backend, last uint64) store.Item {
	it := store.Item{Key: b.Key(group(last)), Bytes: 4 * blockTokens * tokenBytes}
	cuts := rand.New(rand.NewPCG(last, 1))
	for n := it.Bytes; n > 0; {
		k := min(n, 1+cuts.IntN(it.Bytes/4))
		it.Pieces = append(it.Pieces, make([]byte, k))
		n -= k
	}
	return it
}

func content(it store.Item) string { return string(slices.Concat(it.Pieces...)) }

// none wants no errors.
func none(t testing.TB, what string, errs []error) {
	t.Helper()
	for i, err := range errs {
		if err != nil {
			t.Fatalf("%s: item %d: %v", what, i, err)
		}
	}
}

// eventually waits until check finds nothing wrong any more.
func eventually(t testing.TB, what string, check func() error) {
	t.Helper()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for deadline := time.Now().Add(patience); ; <-tick.C {
		err := check()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s: not within %v: %v", what, patience, err)
		}
	}
}
