package main

import (
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"kvstrata/connector"
	"kvstrata/connector/device"
)

// The yardsticks move the same pieces in the same scattered order as the connectors, by the plainest means.

// memories returns two caches like those of the ends.
func (b *transferBench) memories() (from, to *connector.Cache, err error) {
	for _, c := range []**connector.Cache{&from, &to} {
		layers := int(b.cmd.Block) / (2 * int(b.cmd.Piece))
		var tensors []connector.Tensor
		for i := range layers {
			tensors = append(tensors, connector.Packed(fmt.Sprint("layer.", i), i*2*b.cmd.Blocks*int(b.cmd.Piece), 1,
				connector.Dim{Axis: connector.AxisKV, Size: 2}, connector.Dim{Axis: connector.AxisBlock, Size: b.cmd.Blocks},
				connector.Dim{Axis: connector.AxisDim, Size: int(b.cmd.Piece)}))
		}
		memory, err := device.Host{}.Alloc("yardstick", b.cmd.Blocks*int(b.cmd.Block))
		if err != nil {
			return nil, nil, err
		}
		b.closers = append(b.closers, memory.Close)
		for i := range memory.Host() {
			memory.Host()[i] = byte(i)
		}
		if *c, err = connector.NewCache(connector.Caches{
			Device: device.Host{}, Memory: memory, Tensors: tensors, Model: connector.Model{BlockTokens: benchTokens},
		}); err != nil {
			return nil, nil, err
		}
	}
	return from, to, nil
}

// memcpy copies piece by piece.
func (b *transferBench) memcpy() (way, error) {
	from, to, err := b.memories()
	if err != nil {
		return way{}, err
	}
	return way{"memcpy", func() (time.Duration, error) {
		src, err := from.Gather(context.Background(), b.order)
		if err != nil {
			return 0, err
		}
		defer src.Release()
		dst, err := to.Scatter(b.order)
		if err != nil {
			return 0, err
		}
		defer dst.Release()
		began := time.Now()
		for i, p := range dst.Pieces {
			copy(p, src.Pieces[i])
		}
		return time.Since(began), nil
	}}, nil
}

func (b *transferBench) bareTCP() (way, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return way{}, err
	}
	return b.bare("bare tcp", l)
}

func (b *transferBench) bareUnix() (way, error) {
	dir, err := os.MkdirTemp("", "kvstrata-bench-")
	if err != nil {
		return way{}, err
	}
	b.closers = append(b.closers, func() error { return os.RemoveAll(dir) })
	l, err := net.Listen("unix", filepath.Join(dir, "socket"))
	if err != nil {
		return way{}, err
	}
	return b.bare("bare unix", l)
}

// bare sends over one connection with writev, and reads each piece to its place.
func (b *transferBench) bare(name string, l net.Listener) (way, error) {
	from, to, err := b.memories()
	if err != nil {
		return way{}, err
	}
	conn, err := net.Dial(l.Addr().Network(), l.Addr().String())
	if err != nil {
		return way{}, err
	}
	peer, err := l.Accept()
	if err != nil {
		return way{}, err
	}
	b.closers = append(b.closers, conn.Close, peer.Close, l.Close)
	return way{name, func() (time.Duration, error) {
		src, err := from.Gather(context.Background(), b.order)
		if err != nil {
			return 0, err
		}
		defer src.Release()
		dst, err := to.Scatter(b.order)
		if err != nil {
			return 0, err
		}
		defer dst.Release()
		began, written := time.Now(), make(chan error, 1)
		go func() {
			buffers := append(net.Buffers(nil), src.Pieces...)
			_, err := buffers.WriteTo(peer)
			written <- err
		}()
		for _, p := range dst.Pieces {
			if _, err := io.ReadFull(conn, p); err != nil {
				return 0, err
			}
		}
		took := time.Since(began)
		return took, <-written
	}}, nil
}

// redisAtOnce is how many commands of go-redis are under way at a time, each on a connection of its own: as many as ours has
// connections.
const redisAtOnce = 2

// goRedis sets and gets the same values with go-redis: gathered for a SET, since it takes one string, and copied to their
// pieces after a GET.
func (b *transferBench) goRedis(ctx context.Context, url string) ([]way, error) {
	options, err := goredis.ParseURL(url)
	if err != nil {
		return nil, usagef("--store: %w", err)
	}
	client := goredis.NewClient(options)
	b.closers = append(b.closers, client.Close)
	from, to, err := b.memories()
	if err != nil {
		return nil, err
	}
	each := func(do func(key string, blocks []int) error) (time.Duration, error) {
		n := b.cmd.Blocks / b.cmd.Group
		began, results := time.Now(), make(chan error, redisAtOnce)
		for worker := range redisAtOnce {
			go func() {
				for i := worker; i < n; i += redisAtOnce {
					if err := do(fmt.Sprint(b.prefix, ":yardstick:", i), b.order[i*b.cmd.Group:(i+1)*b.cmd.Group]); err != nil {
						results <- err
						return
					}
				}
				results <- nil
			}()
		}
		for range redisAtOnce {
			if e := <-results; e != nil {
				err = e
			}
		}
		return time.Since(began), err
	}
	return []way{
		{"go-redis SET", func() (time.Duration, error) {
			return each(func(key string, blocks []int) error {
				w, err := from.Gather(ctx, blocks)
				if err != nil {
					return err
				}
				defer w.Release()
				value := make([]byte, 0, w.Bytes)
				for _, p := range w.Pieces {
					value = append(value, p...)
				}
				return client.Set(ctx, key, value, 0).Err()
			})
		}},
		{"go-redis GET", func() (time.Duration, error) {
			return each(func(key string, blocks []int) error {
				value, err := client.Get(ctx, key).Bytes()
				if err != nil {
					return err
				}
				w, err := to.Scatter(blocks)
				if err != nil {
					return err
				}
				defer w.Release()
				for _, p := range w.Pieces {
					value = value[copy(p, value):]
				}
				return nil
			})
		}},
	}, nil
}

// forget takes this run's keys out of Redis, so that the next round saves them again. Others' are left alone.
func (b *transferBench) forget(ctx context.Context, url string) error {
	if b.cmd.Connector != "redis" {
		return nil
	}
	options, err := goredis.ParseURL(url)
	if err != nil {
		return usagef("--store: %w", err)
	}
	client := goredis.NewClient(options)
	defer client.Close()
	keys := client.Scan(ctx, 0, b.prefix+":*", 1000).Iterator()
	for keys.Next(ctx) {
		if err := client.Unlink(ctx, keys.Val()).Err(); err != nil {
			return fmt.Errorf("take the benchmark's keys out of the store: %w", err)
		}
	}
	return keys.Err()
}
