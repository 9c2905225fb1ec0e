package tcp_test

import (
	"context"
	"fmt"
	"io"
	"net"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"kvstrata/connector"
	"kvstrata/connector/device"
	"kvstrata/connector/tcp"
)

// benchCache is a cache of blocks of 2 MiB, 32 layers of keys and values, in pieces of 32 KiB: Llama-3-8B on one rank.
func benchCache(b *testing.B, blocks int) *connector.Cache {
	b.Helper()
	var tensors []connector.Tensor
	const piece = 32 << 10
	for i := range 32 {
		tensors = append(tensors, connector.Packed(string(rune('a'+i)), i*2*blocks*piece, 2,
			connector.Dim{Axis: connector.AxisKV, Size: 2}, connector.Dim{Axis: connector.AxisBlock, Size: blocks},
			connector.Dim{Axis: connector.AxisToken, Size: 16}, connector.Dim{Axis: connector.AxisHead, Size: 8},
			connector.Dim{Axis: connector.AxisDim, Size: 128}))
	}
	mem, err := device.Host{}.Alloc("bench", 64*blocks*piece)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = mem.Close() })
	c, err := connector.NewCache(connector.Caches{Device: device.Host{}, Memory: mem, Tensors: tensors, Model: connector.Model{BlockTokens: 16}})
	if err != nil {
		b.Fatal(err)
	}
	fill(b, c)
	return c
}

// scattered is every block of 64, out of order: 128 MiB.
func scattered() (blocks []int) {
	for i := range 64 {
		blocks = append(blocks, i*37%64)
	}
	return blocks
}

// fetching returns a function that fetches all of it, and how many bytes that is.
func fetching(b *testing.B, change func(*tcp.Config, *tcp.Identity)) (fetch func(), bytes int) {
	b.Helper()
	pc, cc := benchCache(b, 64), benchCache(b, 64)
	p, c := start(b, "p", pc, change), start(b, "c", cc, change)
	blocks := scattered()
	if err := p.Export("r", tcp.Blocks(pc, blocks), 1); err != nil {
		b.Fatal(err)
	}
	q := pull(p.peer(), "r", cc, blocks, blocks)
	return func() {
		if r := c.Fetch(context.Background(), q); r.Err != nil {
			b.Fatal(r.Err)
		}
	}, len(blocks) * pc.BlockBytes()
}

// raw returns a function that moves the same pieces over one connection, as the kernel gives it: written with writev, and
// read piece by piece where they go.
func raw(b *testing.B) func() {
	b.Helper()
	from, to := benchCache(b, 64), benchCache(b, 64)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	go func() {
		conn, err := l.Accept()
		if err != nil {
			return
		}
		defer conn.Close()
		var ask [1]byte
		for {
			if _, err := io.ReadFull(conn, ask[:]); err != nil {
				return
			}
			w, err := from.Gather(context.Background(), scattered())
			if err != nil {
				return
			}
			out := append(net.Buffers(nil), w.Pieces...)
			if _, err := out.WriteTo(conn); err != nil {
				return
			}
			w.Release()
		}
	}()
	conn, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _, _ = conn.Close(), l.Close() })
	return func() {
		w, err := to.Scatter(scattered())
		if err != nil {
			b.Fatal(err)
		}
		if _, err := conn.Write([]byte{1}); err != nil {
			b.Fatal(err)
		}
		for _, p := range w.Pieces {
			if _, err := io.ReadFull(conn, p); err != nil {
				b.Fatal(err)
			}
		}
		w.Release()
	}
}

// memcpy returns a function that copies the same pieces within the process.
func memcpy(b *testing.B) func() {
	b.Helper()
	from, to := benchCache(b, 64), benchCache(b, 64)
	return func() {
		src, err := from.Gather(context.Background(), scattered())
		if err != nil {
			b.Fatal(err)
		}
		dst, err := to.Scatter(scattered())
		if err != nil {
			b.Fatal(err)
		}
		for i := range dst.Pieces {
			copy(dst.Pieces[i], src.Pieces[i])
		}
		src.Release()
		dst.Release()
	}
}

// compare runs both in turn, since the machine is not equally fast all the time, and reports the medians: bytes a second,
// those of the yardstick, and the one over the other; and the CPU time of the one
// over that of the other, which says more on a machine that others use too.
func compare(b *testing.B, bytes int, fetch, yardstick func()) {
	fetch()
	yardstick()
	var ours, theirs []time.Duration
	var ourCPU, theirCPU time.Duration
	timed := func(f func(), cpu *time.Duration) time.Duration {
		began, spent := time.Now(), processTime(b)
		f()
		*cpu += processTime(b) - spent
		return time.Since(began)
	}
	for b.Loop() {
		ours, theirs = append(ours, timed(fetch, &ourCPU)), append(theirs, timed(yardstick, &theirCPU))
	}
	slices.Sort(ours)
	slices.Sort(theirs)
	rate := func(d []time.Duration) float64 { return float64(bytes) / d[len(d)/2].Seconds() / 1e9 }
	b.ReportMetric(rate(ours), "GB/s")
	b.ReportMetric(rate(theirs), "yardstick-GB/s")
	b.ReportMetric(rate(ours)/rate(theirs), "of-yardstick")
	b.ReportMetric(float64(ourCPU)/float64(theirCPU), "CPU-of-yardstick")
}

// processTime is the CPU time of the process, both ends of a transfer together.
func processTime(b *testing.B) time.Duration {
	b.Helper()
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

func BenchmarkFetch(b *testing.B) {
	for _, bc := range []struct {
		name        string
		connections int
		checksum    bool
	}{{"1conn", 1, true}, {"1conn-nosum", 1, false}, {"2conn", 2, true}, {"2conn-nosum", 2, false}} {
		change := func(cfg *tcp.Config, _ *tcp.Identity) { cfg.Connections, cfg.Checksum = bc.connections, bc.checksum }
		b.Run(bc.name, func(b *testing.B) {
			fetch, bytes := fetching(b, change)
			b.SetBytes(int64(bytes))
			b.ReportAllocs()
			for b.Loop() {
				fetch()
			}
		})
	}
}

// BenchmarkAgainstTCP compares a fetch with what the kernel gives over one connection.
func BenchmarkAgainstTCP(b *testing.B) {
	for _, bc := range []struct {
		name        string
		connections int
		checksum    bool
	}{{"1conn", 1, true}, {"1conn-nosum", 1, false}, {"2conn", 2, true}, {"2conn-nosum", 2, false}} {
		b.Run(bc.name, func(b *testing.B) {
			fetch, bytes := fetching(b, func(cfg *tcp.Config, _ *tcp.Identity) { cfg.Connections, cfg.Checksum = bc.connections, bc.checksum })
			compare(b, bytes, fetch, raw(b))
		})
	}
}

// BenchmarkAgainstMemcpy compares a fetch out of shared memory with a copy within the process by one goroutine.
func BenchmarkAgainstMemcpy(b *testing.B) {
	for _, connections := range []int{1, 2} {
		b.Run(fmt.Sprintf("%dcopier", connections), func(b *testing.B) {
			fetch, bytes := fetching(b, func(cfg *tcp.Config, _ *tcp.Identity) { cfg.Connections, cfg.SharedMemory = connections, true })
			compare(b, bytes, fetch, memcpy(b))
		})
	}
}
