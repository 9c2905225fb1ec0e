package tcp_test

import (
	"bytes"
	"encoding/json"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"kvstrata/connector"
	"kvstrata/connector/device"
	"kvstrata/connector/tcp"
)

// TestPeerMemoryIsCut reads memory whose file was cut: an error, and not the end of the process.
func TestPeerMemoryIsCut(t *testing.T) {
	file, err := os.Create(filepath.Join(t.TempDir(), "memory"))
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	const size = 64 << 10
	if err := file.Truncate(size); err != nil {
		t.Fatal(err)
	}
	mem, err := unix.Mmap(int(file.Fd()), 0, size, unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Munmap(mem)
	to := make([]byte, size)
	if err := tcp.CopyAll(to, mem); err != nil {
		t.Fatal(err)
	}
	if err := file.Truncate(4096); err != nil {
		t.Fatal(err)
	}
	wantError(t, tcp.CopyAll(to, mem), tcp.ErrFault)
}

// TestPeerMemoryIsSealed maps nothing that the peer could cut.
func TestPeerMemoryIsSealed(t *testing.T) {
	c := cache(t, nhd, 8)
	e := quiet(t, c, nil)
	size := c.Caches().Memory.Size()
	layout, err := json.Marshal(map[string]any{"size": size, "tensors": c.Caches().Tensors})
	if err != nil {
		t.Fatal(err)
	}
	if err := e.MapFile(c.Caches().Memory.File(), layout); err != nil {
		t.Fatal(err)
	}
	fd, err := unix.MemfdCreate("open", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		t.Fatal(err)
	}
	file := os.NewFile(uintptr(fd), "open")
	defer file.Close()
	if err := file.Truncate(int64(size)); err != nil {
		t.Fatal(err)
	}
	wantError(t, e.MapFile(file, layout), tcp.ErrProtocol)
}

func TestOtherProcessAtTheAddress(t *testing.T) {
	p := start(t, "p", cache(t, nhd, 8), shared)
	fill(t, p.cache)
	export(t, p, "r", 1)
	address := p.Address()
	c := start(t, "c", cache(t, nhd, 8), shared)
	to := tcp.Peer{Address: address, Engine: "p"}
	if r := c.Fetch(t.Context(), pull(to, "r", c.cache, []int{1}, []int{1})); r.Err != nil || !r.Shared {
		t.Fatalf("%+v", r)
	}
	p.stop()
	// The engine is started anew with the same id and address, and other bytes: what was mapped is not to be used any more.
	q := start(t, "p", cache(t, nhd, 8), both(shared, func(cfg *tcp.Config, _ *tcp.Identity) { cfg.Listen = address }))
	host := q.cache.Caches().Memory.Host()
	for i := range host {
		host[i] = 9
	}
	export(t, q, "r", 1)
	for range 2 {
		r := c.Fetch(t.Context(), pull(to, "r", c.cache, []int{1}, []int{2}))
		if r.Err != nil {
			t.Fatal(r.Err)
		}
		same(t, q.cache, c.cache, []int{1}, []int{2}, nil)
	}
	if n := c.Counts(); n.Copied < 2 {
		t.Errorf("%+v", n)
	}
}

// otherFile is memory with a file behind it that is not its own.
type otherFile struct {
	device.Memory
	file *os.File
}

func (o otherFile) File() *os.File { return o.file }

// TestSharedMemoryFallsBack fetches over TCP where the peer has no memory to share, or such that it could cut; what stands in
// the way is told once.
func TestSharedMemoryFallsBack(t *testing.T) {
	fd, err := unix.MemfdCreate("open", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		t.Fatal(err)
	}
	file := os.NewFile(uintptr(fd), "open")
	defer file.Close()
	k := caches(t, nhd, 8)
	if err := file.Truncate(int64(k.Memory.Size())); err != nil {
		t.Fatal(err)
	}
	k.Memory = otherFile{k.Memory, file}
	unsealed, err := connector.NewCache(k)
	if err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		name  string
		p     *engine
		lines int
	}{
		{"not shared", start(t, "p", cache(t, nhd, 8), nil), 0},
		{"not sealed", start(t, "p", unsealed, shared), 1},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var log bytes.Buffer
			c := start(t, "c", cache(t, nhd, 8), both(shared, func(_ *tcp.Config, id *tcp.Identity) {
				id.Log = slog.New(slog.NewTextHandler(&log, nil))
			}))
			fill(t, tc.p.cache)
			export(t, tc.p, "r", 1)
			for range 3 {
				if r := c.Fetch(t.Context(), pull(tc.p.peer(), "r", c.cache, []int{1}, []int{2})); r.Err != nil || r.Shared {
					t.Fatalf("%+v", r)
				}
			}
			same(t, tc.p.cache, c.cache, []int{1}, []int{2}, nil)
			c.stop()
			if n := strings.Count(log.String(), "\n"); n != tc.lines {
				t.Errorf("%d lines in the log: %s", n, &log)
			}
		})
	}
}
