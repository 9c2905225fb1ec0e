package redis_test

import (
	"context"
	"fmt"
	"log/slog"
	"testing"

	goredis "github.com/redis/go-redis/v9"

	"kvstrata/connector"
	"kvstrata/connector/redis"
	"kvstrata/connector/redis/redistest"
	"kvstrata/connector/store"
	"kvstrata/event"
)

// BenchmarkMove compares with go-redis, which reads a value into memory of its own and has to be given one piece: from
// there the bytes still have to go to the blocks, and be gathered from them. Eight values a call, pieces of 32 KiB.
func BenchmarkMove(b *testing.B) {
	const values, piece = 8, 32 << 10
	s := redistest.Start(b)
	for _, size := range []int{256 << 10, 1 << 20} {
		items := make([]store.Item, values)
		arena := make([]byte, values*size)
		for i := range items {
			it := &items[i]
			it.Group = &store.Group{}
			for k := range 16 {
				n := uint64(i*16 + k + 1)
				it.Group.Blocks = append(it.Group.Blocks, connector.Name{Hash: event.IntHash(n), Prefix: event.PrefixHash(n)})
			}
			for k := range size / piece { // scattered: neighbours in the value are not neighbours in memory
				at := ((k*values + i) * piece) % len(arena)
				it.Pieces = append(it.Pieces, arena[at:at+piece])
			}
			it.Bytes = size
		}
		for _, own := range []struct {
			name     string
			checksum bool
			conns    int
		}{{"own", true, 1}, {"own-2conns", true, 2}, {"own-nosum", false, 1}} {
			cfg := redis.DefaultConfig()
			cfg.Address, cfg.Checksum, cfg.Connections = s.Addr, own.checksum, own.conns
			be, err := redis.New(cfg, [32]byte{1}, 16, slog.New(slog.DiscardHandler))
			if err != nil {
				b.Fatal(err)
			}
			for i := range items {
				items[i].Key = be.Key(items[i].Group)
			}
			if errs := be.Put(b.Context(), items); errs != nil {
				b.Fatal(errs)
			}
			run := func(name string, f func(context.Context, []store.Item) []error) {
				b.Run(fmt.Sprintf("%s/%dKiB/%s", name, size>>10, own.name), func(b *testing.B) {
					b.SetBytes(values * int64(size))
					b.ReportAllocs()
					for b.Loop() {
						for _, err := range f(b.Context(), items) {
							if err != nil {
								b.Fatal(err)
							}
						}
					}
				})
			}
			run("SET", be.Put)
			run("GET", be.Get)
			if err := be.Close(); err != nil {
				b.Fatal(err)
			}
		}
		client := goredis.NewClient(&goredis.Options{Addr: s.Addr, Protocol: 2, DisableIdentity: true})
		one := make([]byte, size)
		b.Run(fmt.Sprintf("SET/%dKiB/go-redis", size>>10), func(b *testing.B) {
			b.SetBytes(values * int64(size))
			b.ReportAllocs()
			for b.Loop() {
				for i := range items {
					at := 0
					for _, p := range items[i].Pieces {
						at += copy(one[at:], p)
					}
					if err := client.Set(b.Context(), items[i].Key, one, 0).Err(); err != nil {
						b.Fatal(err)
					}
				}
			}
		})
		b.Run(fmt.Sprintf("GET/%dKiB/go-redis", size>>10), func(b *testing.B) {
			b.SetBytes(values * int64(size))
			b.ReportAllocs()
			for b.Loop() {
				for i := range items {
					got, err := client.Get(b.Context(), items[i].Key).Bytes()
					if err != nil {
						b.Fatal(err)
					}
					for _, p := range items[i].Pieces {
						got = got[copy(p, got):]
					}
				}
			}
		})
		b.Run(fmt.Sprintf("GET/%dKiB/go-redis-pipe", size>>10), func(b *testing.B) {
			b.SetBytes(values * int64(size))
			for b.Loop() {
				pipe := client.Pipeline()
				for i := range items {
					pipe.Get(b.Context(), items[i].Key)
				}
				cmds, err := pipe.Exec(b.Context())
				if err != nil {
					b.Fatal(err)
				}
				for i := range items {
					got, _ := cmds[i].(*goredis.StringCmd).Bytes()
					for _, p := range items[i].Pieces {
						got = got[copy(p, got):]
					}
				}
			}
		})
		if err := client.Close(); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkDepth shows what [redis.Config].PipelineBytes does.
func BenchmarkDepth(b *testing.B) {
	s := redistest.Start(b)
	for _, size := range []int{256 << 10, 1 << 20} {
		for _, conns := range []int{1, 2} {
			for _, depth := range []int{64 << 10, 1 << 20, 1<<20 + 1<<19, 2<<20 + 1<<19, 5 << 20, 9 << 20} {
				be := open(b, s.Addr, func(c *redis.Config) { c.Connections, c.PipelineBytes = conns, depth })
				w := items(be, 1, chain(1, 16, 16), size)
				if errs := be.Put(b.Context(), w); errs != nil {
					b.Fatal(errs)
				}
				r := sinks(w, size>>15)
				b.Run(fmt.Sprintf("GET/%dKiB/conns=%d/depth=%dKiB", size>>10, conns, depth>>10), func(b *testing.B) {
					b.SetBytes(int64(16 * size))
					for b.Loop() {
						be.Get(b.Context(), r)
					}
				})
			}
		}
	}
}
