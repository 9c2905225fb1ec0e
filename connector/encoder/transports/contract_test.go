package transports_test

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"io"
	"log/slog"
	"net"
	"os"
	"testing"
	"time"

	"kvstrata/connector/encoder"
	"kvstrata/connector/encoder/encodertest"
	"kvstrata/connector/encoder/transports"
	"kvstrata/connector/lmcache"
	"kvstrata/connector/redis/redistest"
	"kvstrata/event"
	"kvstrata/leaktest"
)

func TestMain(m *testing.M) { os.Exit(leaktest.Run(m)) }

// config returns an engine's configuration with so much extra.
func config(name string, role encoder.Role, extra map[string]any) encoder.Config {
	c := encoder.DefaultConfig()
	c.Connector, c.Role = name, role
	for key, value := range extra {
		c.Extra[key], _ = json.Marshal(value) // strings, numbers and truth values
	}
	return c
}

func TestTCP(t *testing.T) {
	for _, extra := range []map[string]any{
		{"listen": "127.0.0.1:0", "stall_timeout": 0.5},
		{"listen": "127.0.0.1:0", "stall_timeout": 0.5, "secret": "correct horse battery", "connections": 1},
	} {
		t.Run("", func(t *testing.T) {
			encodertest.Run(t, encodertest.Rig{Direct: true, Setup: func(*testing.T) encodertest.Environment {
				return encodertest.Environment{
					Factory: transports.Default(),
					Config:  func(role encoder.Role, _ string) encoder.Config { return config("tcp", role, extra) },
				}
			}})
		})
	}
}

func TestRedis(t *testing.T) {
	encodertest.Run(t, encodertest.Rig{Setup: func(t *testing.T) encodertest.Environment {
		server := redistest.Start(t)
		return encodertest.Environment{
			Factory: transports.Default(), Address: server.Addr,
			Config: func(role encoder.Role, through string) encoder.Config {
				return config("redis", role, map[string]any{"address": cmp.Or(through, server.Addr), "timeout": 1})
			},
			Remove: func(t *testing.T, m encoder.Model, i encoder.Item) {
				if got := server.Do("DEL", redisKey(m, i)); got != ":1" {
					t.Errorf("DEL %s: %s", redisKey(m, i), got)
				}
			},
			Spoil: func(t *testing.T, m encoder.Model, i encoder.Item) {
				// A byte of the payload, which only its checksum tells.
				if got := server.Do("SETRANGE", redisKey(m, i), "500000", "x"); got[0] != ':' {
					t.Errorf("SETRANGE %s: %s", redisKey(m, i), got)
				}
			},
		}
	}})
}

func TestLMCache(t *testing.T) {
	encodertest.Run(t, encodertest.Rig{Sealed: true, Setup: func(t *testing.T) encodertest.Environment {
		address := serveLMCache(t)
		return encodertest.Environment{
			Factory: transports.Default(), Address: address,
			Config: func(role encoder.Role, through string) encoder.Config {
				return config("lmcache", role, map[string]any{"remote_url": "lm://" + cmp.Or(through, address), "blocking_timeout_secs": 1})
			},
			Remove: func(t *testing.T, m encoder.Model, i encoder.Item) { forget(t, address, lmcacheKey(m, i)) },
		}
	}})
}

// TestLMCacheInRedis is LMCache's other remote format.
func TestLMCacheInRedis(t *testing.T) {
	encodertest.Run(t, encodertest.Rig{Setup: func(t *testing.T) encodertest.Environment {
		server := redistest.Start(t)
		return encodertest.Environment{
			Factory: transports.Default(), Address: server.Addr,
			Config: func(role encoder.Role, through string) encoder.Config {
				return config("lmcache", role, map[string]any{"remote_url": "redis://" + cmp.Or(through, server.Addr), "blocking_timeout_secs": 1})
			},
			Remove: func(t *testing.T, m encoder.Model, i encoder.Item) {
				key := lmcacheKey(m, i)
				if got := server.Do("DEL", key+lmcache.MetadataSuffix, key+lmcache.BytesSuffix); got != ":2" {
					t.Errorf("DEL %s: %s", key, got)
				}
			},
			Spoil: func(t *testing.T, m encoder.Model, i encoder.Item) {
				if got := server.Do("SET", lmcacheKey(m, i)+lmcache.BytesSuffix, "something else"); got != "+OK" {
					t.Errorf("SET: %s", got)
				}
			},
		}
	}})
}

func redisKey(m encoder.Model, i encoder.Item) string {
	space := m.Compatibility()
	return "ec:" + hex.EncodeToString(space[:8]) + ":0:" + event.BytesHash(i.Hash).String()
}

// lmcacheKey is where an item is.
func lmcacheKey(m encoder.Model, i encoder.Item) string {
	space, name := m.Compatibility(), i.Hash
	if len(name) > 32 {
		sum := sha256.Sum256([]byte(name))
		name = string(sum[:])
	}
	k := lmcache.Key{Model: "ec-" + hex.EncodeToString(space[:16]), World: 1, Hash: event.BytesHash(name), DType: lmcache.Uint8}
	return k.String()
}

// longest is the longest value that the server takes.
const longest = 9 << 20

func serveLMCache(t *testing.T) string {
	t.Helper()
	cfg := lmcache.DefaultServerConfig()
	cfg.MaxValue, cfg.Bytes = longest, 256<<20
	server, err := lmcache.NewServer(cfg, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- server.Run(ctx, l) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return l.Addr().String()
}

// forget has a server forget a key: it does so when it is sent a value that is too long for it.
func forget(t *testing.T, address, key string) {
	t.Helper()
	c, err := net.Dial("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := c.SetDeadline(time.Now().Add(30 * time.Second)); err != nil {
		t.Fatal(err)
	}
	ask := func(r lmcache.Request) (frame []byte) {
		r.Key, r.Content = key, lmcache.Content{Format: lmcache.KV2LTD, DType: lmcache.Float16}
		frame, err := lmcache.V1.AppendRequest(nil, &r)
		if err != nil {
			t.Fatal(err)
		}
		return frame
	}
	out := net.Buffers{
		ask(lmcache.Request{Command: lmcache.Exist}), ask(lmcache.Request{Command: lmcache.Put, Length: longest + 1}), make([]byte, longest+1),
		ask(lmcache.Request{Command: lmcache.Exist}),
	}
	if _, err := out.WriteTo(c); err != nil {
		t.Fatal(err)
	}
	for _, want := range []lmcache.Code{lmcache.Success, lmcache.Fail} {
		answer := make([]byte, lmcache.V1.ReplyBytes())
		if _, err := io.ReadFull(c, answer); err != nil {
			t.Fatal(err)
		}
		if r, err := lmcache.V1.ParseReply(answer); err != nil || r.Code != want {
			t.Fatalf("%s: %+v, %v; want %v", key, r, err, want)
		}
	}
}
