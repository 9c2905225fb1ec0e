package lmcache_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"testing"

	"kvstrata/connector/lmcache"
	"kvstrata/connector/redis/redistest"
	"kvstrata/connector/store"
)

// redisServer starts a Redis with a password and returns its host:port.
func redisServer(t *testing.T, args ...string) string {
	t.Helper()
	return redistest.Start(t, append([]string{"--requirepass", "hunter2"}, args...)...).Addr
}

func TestRedisRoundTrip(t *testing.T) {
	address := redisServer(t)
	b := backend(t, "redis://:hunter2@"+address+"/3")
	if got, want := b.Name(), "redis://"+address; got != want {
		t.Errorf("name %s, want %s", got, want)
	}
	const n = 50
	var items, holes []store.Item
	var keys []string
	for i := range uint64(n) {
		items, holes = append(items, item(b, 100+i)), append(holes, hole(b, 100+i))
		keys = append(keys, items[i].Key)
	}
	none(t, "put", b.Put(t.Context(), items))
	if got, err := b.Prefix(t.Context(), append(keys, b.Key(group(7)))); got != n || err != nil {
		t.Fatalf("prefix = %d, %v; want %d", got, err, n)
	}
	none(t, "get", b.Get(t.Context(), holes))
	for i := range items {
		if content(items[i]) != content(holes[i]) {
			t.Fatalf("item %d has other bytes", i)
		}
	}
	short := store.Item{Key: keys[1], Bytes: tokenBytes, Pieces: [][]byte{make([]byte, tokenBytes)}}
	errs := b.Get(t.Context(), []store.Item{hole(b, 7), short, hole(b, 102)})
	if len(errs) != 3 || !errors.Is(errs[0], store.ErrAbsent) || !errors.Is(errs[1], store.ErrAbsent) || errs[2] != nil {
		t.Errorf("errors: %v", errs)
	}
	other := backend(t, "redis://:hunter2@"+address)
	if got, err := other.Prefix(t.Context(), keys); got != 0 || err != nil {
		t.Errorf("prefix in another database = %d, %v", got, err)
	}
	for _, url := range []string{"redis://:wrong@" + address, "redis://" + address, "redis://nobody:hunter2@" + address} {
		errs := backend(t, url).Put(t.Context(), items[:1])
		if errs == nil || errs[0] == nil || strings.Contains(errs[0].Error(), "hunter2") {
			t.Errorf("%s: %v", url, errs)
		}
	}
}

// TestRedisFull reports what Redis has no memory for, and goes on.
func TestRedisFull(t *testing.T) {
	b := backend(t, "redis://:hunter2@"+redisServer(t, "--maxmemory", "3mb", "--maxmemory-policy", "noeviction"), func(c *lmcache.Config) { c.Connections = 1 })
	refused := 0
	for i := range uint64(400) {
		items := []store.Item{item(b, 1000+20*i), item(b, 1010+20*i)}
		for j, err := range b.Put(t.Context(), items) {
			if err == nil {
				continue
			}
			if refused++; !strings.Contains(err.Error(), "OOM") {
				t.Fatalf("put %s: %v", items[j].Key, err)
			}
		}
	}
	if refused == 0 {
		t.Error("nothing was refused")
	}
	it := hole(b, 1000)
	none(t, "get", b.Get(t.Context(), []store.Item{it}))
	if content(it) != content(item(b, 1000)) {
		t.Error("other bytes")
	}
}

// TestBadRedis gets from servers that say what they should not.
func TestBadRedis(t *testing.T) {
	one := 4 * blockTokens * tokenBytes
	told, _ := (&lmcache.Shape{Format: lmcache.KV2LTD, DType: lmcache.BFloat16, KV: 2, Layers: layers, Hidden: heads * headSize}).Content(one)
	meta, err := (&lmcache.Metadata{Length: one, Format: told.Format, Groups: []lmcache.MetadataGroup{{DType: told.DType, Shape: told.Shape}}}).Append(nil)
	if err != nil {
		t.Fatal(err)
	}
	head := fmt.Sprintf("$%d\r\n%s\r\n", len(meta), meta)
	value := fmt.Sprintf("$%d\r\n%s\r\n", one, make([]byte, one))
	for name, c := range map[string]struct {
		says   string
		absent bool
	}{
		"nothing":               {"", false},
		"no line":               {strings.Repeat("x", 10000), false},
		"half metadata":         {head[:20], false},
		"half a value":          {head + value[:one/2], false},
		"no end":                {head + value[:len(value)-2] + "xx", false},
		"a huge value":          {head + "$999999999999\r\n", false},
		"a negative value":      {head + "$-2\r\n", false},
		"a list":                {"*1\r\n", false},
		"no number":             {"$x\r\n", false},
		"an objection":          {"-ERR no\r\n-ERR no\r\n", false},
		"metadata that is none": {"$4\r\nmeta\r\n" + value, true},
		"long metadata":         {"$2000\r\n" + strings.Repeat("m", 2000) + "\r\n" + value, true},
		"a short value":         {head + "$3\r\nabc\r\n", true},
		"nothing there":         {"$-1\r\n$-1\r\n", true},
		"a value only":          {"$-1\r\n" + value, true},
	} {
		t.Run(name, func(t *testing.T) {
			address := scripted(t, func(n net.Conn) {
				_, _ = io.ReadFull(n, make([]byte, 100))
				_, _ = io.WriteString(n, c.says)
				if tcp, ok := n.(*net.TCPConn); ok {
					_ = tcp.CloseWrite()
				}
				_, _ = io.Copy(io.Discard, n)
			})
			b := backend(t, "redis://"+address)
			errs := b.Get(t.Context(), []store.Item{hole(b, 1000)})
			if errs == nil || errs[0] == nil || errors.Is(errs[0], store.ErrAbsent) != c.absent {
				t.Errorf("get: %v", errs)
			}
			if err := b.Close(); err != nil {
				t.Error(err)
			}
		})
	}
	address := scripted(t, func(n net.Conn) {
		_, _ = io.ReadFull(n, make([]byte, 100))
		_, _ = io.WriteString(n, head+value)
		_, _ = io.Copy(io.Discard, n)
	})
	b := backend(t, "redis://"+address)
	none(t, "get", b.Get(t.Context(), []store.Item{hole(b, 1000)}))
	if err := b.Close(); err != nil {
		t.Error(err)
	}
}

func TestRedisCancel(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	address := scripted(t, func(n net.Conn) { cancel(); _, _ = io.Copy(io.Discard, n) })
	b := backend(t, "redis://:password@"+address)
	if errs := b.Get(ctx, []store.Item{hole(b, 1000)}); errs == nil || !errors.Is(errs[0], context.Canceled) {
		t.Errorf("get: %v", errs)
	}
}
