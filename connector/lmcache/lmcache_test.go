package lmcache_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"testing"

	"kvstrata/connector"
	"kvstrata/connector/lmcache"
	"kvstrata/connector/store"
	"kvstrata/event"
)

func TestRoundTrip(t *testing.T) {
	for _, protocol := range []lmcache.Protocol{lmcache.V0, lmcache.V1} {
		t.Run(protocol.String(), func(t *testing.T) {
			cfg := serverConfig()
			cfg.Protocol = protocol
			s := serve(t, cfg, "")
			b := backend(t, "lm://"+s.address, func(c *lmcache.Config) { c.Protocol = protocol.String() })
			const n = 50
			var items, holes []store.Item
			var keys []string
			for i := range uint64(n) {
				items, holes = append(items, item(b, 100+i)), append(holes, hole(b, 100+i))
				keys = append(keys, items[i].Key)
			}
			none(t, "put", b.Put(t.Context(), items))
			if got, err := b.Prefix(t.Context(), keys); got != n || err != nil {
				t.Fatalf("prefix = %d, %v; want %d", got, err, n)
			}
			none(t, "get", b.Get(t.Context(), holes))
			for i := range items {
				if content(items[i]) != content(holes[i]) {
					t.Fatalf("item %d has other bytes", i)
				}
			}
			if st := s.Stats(); st.Keys != n || st.Puts != n || st.Hits != n || st.Refused != 0 {
				t.Errorf("stats %+v", st)
			}
		})
	}
}

// TestPrefix finds how far keys are there, whatever lies behind the first that is not.
func TestPrefix(t *testing.T) {
	s := serve(t, serverConfig(), "")
	b := backend(t, "lm://"+s.address)
	var keys []string
	for i := range uint64(200) {
		it := item(b, 100+i)
		if it.Pieces = [][]byte{make([]byte, it.Bytes)}; i != 150 {
			none(t, "put", b.Put(t.Context(), []store.Item{it}))
		}
		keys = append(keys, it.Key)
	}
	for from, want := range map[int]int{0: 150, 150: 0, 151: 49, 200: 0} {
		if got, err := b.Prefix(t.Context(), keys[from:]); got != want || err != nil {
			t.Errorf("prefix from %d on = %d, %v; want %d", from, got, err, want)
		}
	}
}

// TestAbsent gets what is there, between what is not, and what has another size or meaning.
func TestAbsent(t *testing.T) {
	s := serve(t, serverConfig(), "")
	b := backend(t, "lm://"+s.address, func(c *lmcache.Config) { c.Connections = 1 })
	none(t, "put", b.Put(t.Context(), []store.Item{item(b, 1000), item(b, 2000), item(b, 3000)}))
	short := store.Item{Key: b.Key(group(2000)), Bytes: tokenBytes, Pieces: [][]byte{make([]byte, tokenBytes)}}
	other := shape()
	other.DType = lmcache.Float16 // under the key of bfloat16: somebody's mistake
	holes := []store.Item{hole(b, 1000), hole(b, 1), short, hole(b, 3000)}
	errs := b.Get(t.Context(), holes)
	if len(errs) != 4 || errs[0] != nil || errs[3] != nil || !errors.Is(errs[1], store.ErrAbsent) || !errors.Is(errs[2], store.ErrAbsent) {
		t.Fatalf("errors: %v", errs)
	}
	for i, last := range map[int]uint64{0: 1000, 3: 3000} {
		if content(holes[i]) != content(item(b, last)) {
			t.Errorf("item %d has other bytes", i)
		}
	}
	cfg := lmcache.DefaultConfig()
	cfg.RemoteURL, cfg.ChunkSize = "lm://"+s.address, 16
	half, err := lmcache.New(cfg, model(), other)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = half.Close() }() // nothing is under way
	if errs := half.Get(t.Context(), []store.Item{hole(b, 1000)}); errs == nil || !errors.Is(errs[0], store.ErrAbsent) {
		t.Errorf("another element type: %v", errs)
	}
}

// TestRefused puts what is too long, what cannot be told to LMCache, and more than there is room for.
func TestRefused(t *testing.T) {
	cfg := serverConfig()
	one := 4 * blockTokens * tokenBytes
	cfg.Bytes, cfg.MaxValue = 5*one, one
	s := serve(t, cfg, "")
	b := backend(t, "lm://"+s.address, func(c *lmcache.Config) { c.Connections = 1 })
	long := item(b, 1)
	long.Pieces, long.Bytes, long.Group = append(long.Pieces, long.Pieces...), 2*one, nil
	uneven := item(b, 3)
	uneven.Pieces, uneven.Bytes = uneven.Pieces[:1], len(uneven.Pieces[0])
	longKey := item(b, 4)
	longKey.Key = strings.Repeat("x", 151)
	errs := b.Put(t.Context(), []store.Item{long, item(b, 2000), uneven, longKey})
	if len(errs) != 4 || !errors.Is(errs[0], lmcache.ErrRefused) || errs[1] != nil || errs[2] == nil || errs[3] == nil {
		t.Fatalf("errors: %v", errs)
	}
	for i := range uint64(20) {
		none(t, "put", b.Put(t.Context(), []store.Item{item(b, 3000+10*i)}))
	}
	st := s.Stats()
	if st.Keys != 5 || st.Bytes != 5*one || st.Evicted != 16 || st.Refused != 1 {
		t.Errorf("stats %+v", st)
	}
	hit := hole(b, 3190)
	none(t, "get", b.Get(t.Context(), []store.Item{hit}))
	if content(hit) != content(item(b, 3190)) {
		t.Error("other bytes")
	}
}

// TestRecent keeps what was got when room is wanted.
func TestRecent(t *testing.T) {
	cfg := serverConfig()
	one := 4 * blockTokens * tokenBytes
	cfg.Bytes, cfg.MaxValue = 3*one, one
	s := serve(t, cfg, "")
	b := backend(t, "lm://"+s.address)
	for _, last := range []uint64{1000, 2000, 3000} {
		none(t, "put", b.Put(t.Context(), []store.Item{item(b, last)}))
	}
	none(t, "get", b.Get(t.Context(), []store.Item{hole(b, 1000)}))
	none(t, "put", b.Put(t.Context(), []store.Item{item(b, 4000)}))
	there, err := b.Exist(t.Context(), []string{b.Key(group(1000)), b.Key(group(2000)), b.Key(group(3000)), b.Key(group(4000))})
	if want := []bool{true, false, true, true}; err != nil || fmt.Sprint(there) != fmt.Sprint(want) {
		t.Errorf("there are %v, %v; want %v", there, err, want)
	}
}

// TestRestart goes on with a server that came back empty, over connections that it had left.
func TestRestart(t *testing.T) {
	s := serve(t, serverConfig(), "")
	b := backend(t, "lm://"+s.address)
	none(t, "put", b.Put(t.Context(), []store.Item{item(b, 1000)}))
	s.stop()
	if errs := b.Get(t.Context(), []store.Item{hole(b, 1000)}); errs == nil || errors.Is(errs[0], store.ErrAbsent) {
		t.Fatalf("get without a server: %v", errs)
	}
	again := serve(t, serverConfig(), s.address)
	if errs := b.Get(t.Context(), []store.Item{hole(b, 1000)}); errs == nil || !errors.Is(errs[0], store.ErrAbsent) {
		t.Fatalf("get after the restart: %v", errs)
	}
	none(t, "put", b.Put(t.Context(), []store.Item{item(b, 1000)}))
	again.stop()
	serve(t, serverConfig(), s.address)
	none(t, "put over a connection that was left", b.Put(t.Context(), []store.Item{item(b, 2000)}))
}

// scripted is a server that plays one connection after another.
func scripted(t *testing.T, play ...func(net.Conn)) string {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var playing sync.WaitGroup
	playing.Go(func() {
		for _, f := range play {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			f(c)
			_ = c.Close() // may be closed already
		}
	})
	t.Cleanup(func() {
		_ = ln.Close() // ends Accept
		playing.Wait()
	})
	return ln.Addr().String()
}

// answer reads a request and sends bytes.
func answer(c net.Conn, reply []byte) {
	if _, err := io.ReadFull(c, make([]byte, lmcache.V1.RequestBytes())); err == nil {
		_, _ = c.Write(reply) // the client may be gone
	}
}

func reply(code lmcache.Code, length int) []byte {
	content, _ := (&lmcache.Shape{Format: lmcache.KV2LTD, DType: lmcache.BFloat16, KV: 2, Layers: layers, Hidden: heads * headSize}).Content(4 * blockTokens * tokenBytes)
	return lmcache.V1.AppendReply(nil, &lmcache.Reply{Code: code, Length: length, Content: content})
}

// TestBadServer gets from servers that say what they should not. Nothing hangs, and nothing counts as come.
func TestBadServer(t *testing.T) {
	one := 4 * blockTokens * tokenBytes
	for name, bytes := range map[string][]byte{
		"nothing":           nil,
		"half a reply":      reply(lmcache.Success, one)[:20],
		"half a value":      append(reply(lmcache.Success, one), make([]byte, one/2)...),
		"negative length":   reply(lmcache.Success, -1),
		"huge length":       reply(lmcache.Success, 1<<31-1),
		"unknown code":      reply(302, 0),
		"absent with bytes": append(reply(lmcache.Fail, 8), make([]byte, 8)...),
	} {
		t.Run(name, func(t *testing.T) {
			address := scripted(t, func(c net.Conn) { answer(c, bytes) })
			b := backend(t, "lm://"+address)
			errs := b.Get(t.Context(), []store.Item{hole(b, 1000)})
			if errs == nil || errs[0] == nil || errors.Is(errs[0], store.ErrAbsent) {
				t.Errorf("get: %v", errs)
			}
		})
	}
}

// TestPoisoned gets over a value that ends the connection each time: what stands behind it comes all the same.
func TestPoisoned(t *testing.T) {
	one := 4 * blockTokens * tokenBytes
	value := append(reply(lmcache.Success, one), make([]byte, one)...)
	requests := func(c net.Conn, n int) { _, _ = io.ReadFull(c, make([]byte, n*lmcache.V1.RequestBytes())) }
	address := scripted(t,
		func(c net.Conn) { requests(c, 3); _, _ = c.Write(append(value, reply(lmcache.Success, one)...)) },
		func(c net.Conn) { requests(c, 1); _, _ = c.Write(value) })
	b := backend(t, "lm://"+address, func(c *lmcache.Config) { c.Connections = 1 })
	errs := b.Get(t.Context(), []store.Item{hole(b, 1000), hole(b, 2000), hole(b, 3000)})
	if len(errs) != 3 || errs[0] != nil || errs[1] == nil || errs[2] != nil {
		t.Errorf("errors: %v", errs)
	}
}

// TestCancel ends calls whose server does not answer, at once and by the time limit, and touches no piece afterwards.
func TestCancel(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	address := scripted(t, func(c net.Conn) {
		answer(c, append(reply(lmcache.Success, 4*blockTokens*tokenBytes), make([]byte, 100)...))
		cancel()
		_, _ = io.Copy(io.Discard, c)
	})
	b := backend(t, "lm://"+address)
	it := hole(b, 1000)
	if errs := b.Get(ctx, []store.Item{it}); errs == nil || !errors.Is(errs[0], context.Canceled) {
		t.Errorf("get: %v", errs)
	}
	for _, p := range it.Pieces {
		clear(p) // the race detector knows who else writes
	}
	if errs := b.Put(ctx, []store.Item{item(b, 1000)}); errs == nil || !errors.Is(errs[0], context.Canceled) {
		t.Errorf("put: %v", errs)
	}
	if _, err := b.Prefix(ctx, []string{it.Key}); !errors.Is(err, context.Canceled) {
		t.Errorf("prefix: %v", err)
	}

	silent := scripted(t, func(c net.Conn) { _, _ = io.Copy(io.Discard, c) })
	b = backend(t, "lm://"+silent, func(c *lmcache.Config) { c.Timeout = 1 })
	var limit net.Error
	if errs := b.Put(t.Context(), []store.Item{item(b, 1000)}); errs == nil || !errors.As(errs[0], &limit) || !limit.Timeout() {
		t.Errorf("put: %v", errs)
	}
}

// TestManyCallers makes 10,240 requests from 64 goroutines against a server that evicts under them.
func TestManyCallers(t *testing.T) {
	cfg := serverConfig()
	one := 4 * blockTokens * tokenBytes
	cfg.Bytes, cfg.MaxValue = 100*one, one
	s := serve(t, cfg, "")
	b := backend(t, "lm://"+s.address, func(c *lmcache.Config) { c.Connections = 8 })
	var wait sync.WaitGroup
	for g := range uint64(64) {
		wait.Go(func() {
			for i := range uint64(40) {
				first, second := 1000+10*(i%17), 1000*(g+2)+10*(i%3)
				if errs := b.Put(t.Context(), []store.Item{item(b, first), item(b, second)}); errs != nil {
					// Between a PUT and its EXIST others may have pushed it out.
					for _, err := range errs {
						if err != nil && !errors.Is(err, lmcache.ErrRefused) {
							t.Error(err)
						}
					}
				}
				holes := []store.Item{hole(b, first), hole(b, second)}
				errs := b.Get(t.Context(), holes)
				for j, last := range []uint64{first, second} {
					switch {
					case errs != nil && errs[j] != nil:
						if !errors.Is(errs[j], store.ErrAbsent) {
							t.Error(errs[j])
						}
					case content(holes[j]) != content(item(b, last)):
						t.Errorf("item %d has other bytes", last)
					}
				}
			}
		})
	}
	wait.Wait()
	if st := s.Stats(); st.Puts != 5120 || st.Gets != 5120 || st.Bytes > cfg.Bytes || st.Hits == 0 || st.Connections > 8 {
		t.Errorf("stats %+v", st)
	}
}

func TestNewRefuses(t *testing.T) {
	good := lmcache.DefaultConfig()
	good.RemoteURL, good.ChunkSize = "lm://h:1", 16
	if _, err := lmcache.New(good, model(), shape()); err != nil {
		t.Fatal(err)
	}
	bad := lmcache.Config{RemoteURL: "redis://user:hunter2@/x y", ChunkSize: 6, HashAlgorithm: "md5", Protocol: "v2"}
	m := model()
	m.Name = "a@b"
	_, err := lmcache.New(bad, m, lmcache.Shape{})
	for _, word := range []string{"remote_url", "chunk_size", "pre_caching_hash_algorithm", "chunk_hashes", "blocking_timeout_secs", "connections", "pipeline", "protocol", "a@b", "shape"} {
		if err == nil || !strings.Contains(err.Error(), word) {
			t.Errorf("error does not name %s: %v", word, err)
		}
	}
	if strings.Contains(err.Error(), "hunter2") {
		t.Errorf("error tells the password: %v", err)
	}
	m = model()
	m.Name = strings.Repeat("long", 40)
	if _, err := lmcache.New(good, m, shape()); err == nil || !strings.Contains(err.Error(), "150") {
		t.Errorf("a name that is too long: %v", err)
	}
	for _, url := range []string{"", "lm://h", "lm://:1", "http://h:1", "lm://h:1/x", "lm://u@h:1"} {
		cfg := good
		cfg.RemoteURL = url
		if err := cfg.Validate(); err == nil {
			t.Errorf("%q is taken", url)
		}
	}
}

func TestKeys(t *testing.T) {
	b := backend(t, "lm://h:1")
	if got, want := b.Key(&store.Group{Chunk: event.IntHash(1<<64 - 0xabc)}), "org/small-1B@1@0@-abc@bfloat16"; got != want {
		t.Errorf("key %s, want %s", got, want)
	}
	b = backend(t, "lm://h:1", func(c *lmcache.Config) { c.HashAlgorithm = "sha256_cbor" })
	if got, want := b.Key(&store.Group{Chunk: event.IntHash(0xabc)}), "org/small-1B@1@0@abc@bfloat16"; got != want {
		t.Errorf("key %s, want %s", got, want)
	}
	b = backend(t, "lm://h:1", func(c *lmcache.Config) { c.ChunkHashes = "engine" })
	g := &store.Group{Chunk: event.IntHash(1), Blocks: []connector.Name{{Hash: event.IntHash(2)}, {Hash: event.BytesHash(strings.Repeat("z", 32))}}}
	if got, want := b.Key(g), "org/small-1B@1@0@"+strings.Repeat("7a", 32)+"@bfloat16"; got != want {
		t.Errorf("key %s, want %s", got, want)
	}
}
