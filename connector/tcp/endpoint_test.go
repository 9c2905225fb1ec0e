package tcp_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"kvstrata/connector"
	"kvstrata/connector/tcp"
)

func TestRoundTrip(t *testing.T) {
	from, to := []int{3, 4, 5, 9, 0, 31}, []int{7, 1, 2, 0, connector.Discard, 15}
	for _, tc := range []struct {
		name           string
		ours           order
		shared, single bool
		ordinal        bool
	}{
		{name: "tcp"},
		{name: "tcp, other strides", ours: kvFirst},
		{name: "tcp, block by block", ours: kvFirst, single: true},
		{name: "tcp, by position", ordinal: true},
		{name: "shared", shared: true},
		{name: "shared, other strides", shared: true, ours: kvFirst},
		{name: "shared, by position", shared: true, ordinal: true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			change := func(cfg *tcp.Config, _ *tcp.Identity) {
				cfg.SharedMemory = tc.shared
				if tc.single {
					cfg.ChunkBytes = 1
				}
			}
			p, c := start(t, "p", cache(t, nhd, 32), change), start(t, "c", cache(t, tc.ours, 16), change)
			fill(t, p.cache)
			export(t, p, "r", from...)

			q := pull(p.peer(), "r", c.cache, from, to)
			if tc.ordinal {
				q.Parts, q.Ordinal = []int{0, 1, 2, 3, 4, 5}, true
			}
			r := c.Fetch(t.Context(), q)
			if r.Err != nil || len(r.Failed) > 0 || r.Shared != tc.shared || r.Bytes != uint64(len(from)*blockBytes) || r.Descriptors == 0 {
				t.Fatalf("%+v", r)
			}
			same(t, p.cache, c.cache, from, to, nil)
			for _, b := range []int{3, 4, 5, 6, 8, 14} { // nobody asked for these
				if !bytes.Equal(read(t, c.cache, b), make([]byte, blockBytes)) {
					t.Errorf("block %d was written", b)
				}
			}
			if n := c.Counts(); n.Copied != b2u(tc.shared) || n.Read != b2u(!tc.shared) {
				t.Errorf("%+v", n)
			}

			if err := c.Done(t.Context(), p.peer(), "r"); err != nil {
				t.Fatal(err)
			}
			if done, expired := p.Ended(); len(done) != 1 || done[0] != "r" || len(expired) > 0 || p.Exports() != 0 {
				t.Errorf("done %v, expired %v", done, expired)
			}
		})
	}
}

func b2u(b bool) uint64 {
	if b {
		return 1
	}
	return 0
}

func TestBytes(t *testing.T) {
	kind := func(_ *tcp.Config, id *tcp.Identity) { id.Kind = [32]byte{1} }
	p, c := start(t, "p", nil, kind), start(t, "c", nil, kind)
	pieces := [][]byte{[]byte("one"), {}, bytes.Repeat([]byte("x"), 5<<20), []byte("four")}
	if err := p.Export("image", tcp.Bytes(pieces), 2); err != nil {
		t.Fatal(err)
	}
	got := [][]byte{make([]byte, 4), make([]byte, 5<<20), {}}
	r := c.Fetch(t.Context(), &tcp.Pull{Peer: p.peer(), Name: "image", Parts: []int{3, 2, 1}, Into: tcp.Bytes(got)})
	if r.Err != nil || !bytes.Equal(got[0], pieces[3]) || !bytes.Equal(got[1], pieces[2]) {
		t.Fatalf("%+v", r)
	}
	r = c.Fetch(t.Context(), &tcp.Pull{Peer: p.peer(), Name: "image", Parts: []int{0}, Into: tcp.Bytes([][]byte{make([]byte, 4)})})
	wantError(t, r.Err, tcp.ErrProtocol) // of another length than was told
	// The same consumer twice is one.
	for range 2 {
		if err := c.Done(t.Context(), p.peer(), "image"); err != nil {
			t.Fatal(err)
		}
	}
	other := start(t, "d", nil, kind)
	if err := other.Done(t.Context(), p.peer(), "image"); err != nil || p.Exports() != 0 {
		t.Fatalf("%v, %d exports", err, p.Exports())
	}
}

func TestRefused(t *testing.T) {
	secret := func(s string) func(*tcp.Config, *tcp.Identity) {
		return func(cfg *tcp.Config, _ *tcp.Identity) { cfg.Secret = tcp.Secret(s) }
	}
	const right, wrong = "0123456789abcdef", "fedcba9876543210"
	rank := func(_ *tcp.Config, id *tcp.Identity) { id.Rank, id.Ranks = 1, 2 }
	for _, tc := range []struct {
		name         string
		ours         order
		server, mine func(*tcp.Config, *tcp.Identity)
		engine       string
		want         error
	}{
		{name: "same secret", server: secret(right), mine: secret(right)},
		{name: "wrong secret", server: secret(right), mine: secret(wrong), want: tcp.ErrSecret},
		{name: "no secret here", server: secret(right), want: tcp.ErrSecret},
		{name: "no secret there", mine: secret(right), want: tcp.ErrSecret},
		{name: "head before token", ours: hnd, want: tcp.ErrCompatibility},
		{name: "another rank", mine: rank, want: tcp.ErrRank},
		{name: "restarted", engine: "q", want: tcp.ErrEngine},
	} {
		t.Run(tc.name, func(t *testing.T) {
			p, c := start(t, "p", cache(t, nhd, 4), tc.server), start(t, "c", cache(t, tc.ours, 4), tc.mine)
			export(t, p, "r", 1)
			to := p.peer()
			if tc.engine != "" {
				to.Engine = tc.engine
			}
			r := c.Fetch(t.Context(), pull(to, "r", c.cache, []int{1}, []int{2}))
			if tc.want == nil {
				if r.Err != nil {
					t.Fatal(r.Err)
				}
				return
			}
			wantError(t, r.Err, tc.want)
			if len(r.Failed) != 1 {
				t.Errorf("failed %v", r.Failed)
			}
			if text := r.Err.Error(); strings.Contains(text, right) || strings.Contains(text, wrong) {
				t.Errorf("the error tells a secret: %v", text)
			}
			if tc.ours == hnd {
				for _, hash := range []string{p.cache.CompatibilityText()[:8], c.cache.CompatibilityText()[:8]} {
					if !strings.Contains(r.Err.Error(), hash) {
						t.Errorf("the error does not name %s: %v", hash, r.Err)
					}
				}
			}
			wantError(t, c.Done(t.Context(), to, "r"), tc.want)
		})
	}
}

func TestHostileClient(t *testing.T) {
	p, c := start(t, "p", cache(t, nhd, 32), nil), start(t, "c", cache(t, nhd, 8192), nil)
	fill(t, p.cache)
	export(t, p, "mine", 1, 2)
	export(t, p, "other", 5)
	huge := make([]int, 5000)
	into := make([]int, 5000)
	for i := range into {
		huge[i], into[i] = 1, i
	}
	for _, tc := range []struct {
		name, request string
		parts, to     []int
		ordinal       bool
		want          error
	}{
		{"foreign block", "mine", []int{1, 5}, []int{0, 1}, false, tcp.ErrForeign},
		{"no such block", "mine", []int{1 << 30}, []int{0}, false, tcp.ErrForeign},
		{"no such position", "mine", []int{2}, []int{0}, true, tcp.ErrForeign},
		{"unknown request", "yours", []int{1}, []int{0}, false, tcp.ErrNotHeld},
		{"more parts than one read takes", "mine", huge, into, false, nil},
	} {
		t.Run(tc.name, func(t *testing.T) {
			q := pull(p.peer(), tc.request, c.cache, tc.parts, tc.to)
			q.Ordinal = tc.ordinal
			r := c.Fetch(t.Context(), q)
			if tc.want != nil {
				wantError(t, r.Err, tc.want)
			} else if r.Err != nil {
				t.Fatal(r.Err)
			}
		})
	}
}

func TestReadWaitsForExport(t *testing.T) {
	for _, shm := range []bool{false, true} {
		memory := func(cfg *tcp.Config, _ *tcp.Identity) { cfg.SharedMemory = shm }
		p, c := start(t, "p", cache(t, nhd, 8), memory), start(t, "c", cache(t, nhd, 8), memory)
		fill(t, p.cache)
		ended := make(chan tcp.Result)
		go func() {
			q := pull(p.peer(), "r", c.cache, []int{3}, []int{4})
			q.Wait = 10 * time.Second
			ended <- c.Fetch(t.Context(), q)
		}()
		eventually(t, "the read waits", func() bool { return p.Counts().Waiting == 1 })
		export(t, p, "r", 3)
		if r := <-ended; r.Err != nil || r.Shared != shm {
			t.Fatalf("%+v", r)
		}
		same(t, p.cache, c.cache, []int{3}, []int{4}, nil)
	}
}

func TestAwait(t *testing.T) {
	p, c := start(t, "p", cache(t, nhd, 8), nil), start(t, "c", cache(t, nhd, 8), nil)
	ended := make(chan error)
	go func() { ended <- c.Await(t.Context(), p.peer(), "r", time.Minute) }()
	eventually(t, "the open waits", func() bool { return p.Counts().Waiting == 1 })
	export(t, p, "r", 3)
	if err := <-ended; err != nil {
		t.Fatal(err)
	}
	wantError(t, c.Await(t.Context(), p.peer(), "never", time.Millisecond), tcp.ErrNotHeld)
	// One that is not wanted any more is withdrawn at the peer.
	ctx, cancel := context.WithCancel(t.Context())
	go func() { ended <- c.Await(ctx, p.peer(), "later", time.Hour) }()
	eventually(t, "the open waits", func() bool { return p.Counts().Waiting == 1 })
	cancel()
	wantError(t, <-ended, context.Canceled)
	eventually(t, "the open is withdrawn", func() bool { return p.Counts().Waiting == 0 })
}

func TestHeartbeats(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dead := func(_ *tcp.Config, id *tcp.Identity) {
			id.Dial = func(context.Context, string) (net.Conn, error) { return nil, errors.New("nobody") }
		}
		p := start(t, "p", cache(t, nhd, 8), dead)
		c := start(t, "c", cache(t, nhd, 8), piped(p, nil, nil))
		export(t, p, "r", 1)
		export(t, p, "s", 2)
		for range 60 {
			<-time.After(5 * time.Second)
			if err := c.Beat(t.Context(), tcp.Peer{Address: "p"}, []string{"r", "unknown"}); err != nil {
				t.Fatal(err)
			}
		}
		if done, expired := p.Ended(); len(done) != 0 || len(expired) != 1 || expired[0] != "s" {
			t.Errorf("done %v, expired %v", done, expired)
		}
		last := time.Now()
		for p.Exports() > 0 {
			<-time.After(time.Second)
		}
		if d := time.Since(last); d < 20*time.Second || d > 21*time.Second {
			t.Errorf("the lease held for %v after the last heartbeat", d)
		}
		p.stop()
		c.stop()
	})
}

func TestTooManyConnections(t *testing.T) {
	p := start(t, "p", cache(t, nhd, 8), func(cfg *tcp.Config, _ *tcp.Identity) { cfg.MaxConnections = 1 })
	export(t, p, "r", 1)
	silent, err := net.Dial("tcp", p.Address())
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	eventually(t, "the silent one is served", func() bool { return p.Counts().Serving == 1 })
	c := start(t, "c", cache(t, nhd, 8), nil)
	if r := c.Fetch(t.Context(), pull(p.peer(), "r", c.cache, []int{1}, []int{1})); r.Err == nil {
		t.Error("no error")
	}
	_ = silent.Close()
	eventually(t, "there is room again", func() bool { return p.Counts().Serving == 0 })
	if r := c.Fetch(t.Context(), pull(p.peer(), "r", c.cache, []int{1}, []int{1})); r.Err != nil {
		t.Error(r.Err)
	}
}

func files(tb testing.TB) int {
	tb.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		tb.Skip(err)
	}
	return len(entries)
}

func TestManySmallRequests(t *testing.T) {
	before := files(t)
	memory := shared
	for _, change := range []func(*tcp.Config, *tcp.Identity){nil, memory} {
		p, c := start(t, "p", cache(t, nhd, 64), change), start(t, "c", cache(t, nhd, 64), change)
		fill(t, p.cache)
		for i := range 5000 {
			name, b := fmt.Sprint("r", i), i%64
			export(t, p, name, b)
			if r := c.Fetch(t.Context(), pull(p.peer(), name, c.cache, []int{b}, []int{b})); r.Err != nil {
				t.Fatal(r.Err)
			}
			if err := c.Done(t.Context(), p.peer(), name); err != nil {
				t.Fatal(err)
			}
		}
		if done, expired := p.Ended(); len(done) != 5000 || len(expired) != 0 || p.Exports() != 0 {
			t.Errorf("%d done, %d expired, %d exports", len(done), len(expired), p.Exports())
		}
		if n := p.Counts(); n.Serving > 3 || n.Waiting != 0 {
			t.Errorf("%+v", n)
		}
		c.stop()
		p.stop()
	}
	if after := files(t); after > before+4 { // the arenas are open until the test's end
		t.Errorf("%d files before, %d after", before, after)
	}
}

func TestSum(t *testing.T) {
	text := bytes.Repeat([]byte("0123456789abcdef"), 5000)
	want := tcp.Sum(text)
	for _, n := range []int{1, 100, 16 << 10, 16<<10 + 1, 40000} {
		var pieces [][]byte
		for rest := text; len(rest) > 0; {
			k := min(n, len(rest))
			pieces, rest = append(pieces, rest[:k]), rest[k:]
		}
		if got := tcp.Sum(pieces...); got != want {
			t.Errorf("in pieces of %d: %x instead of %x", n, got, want)
		}
	}
	text[70000] ^= 1
	if tcp.Sum(text) == want {
		t.Error("a changed byte does not change the sum")
	}
}

func TestAllocations(t *testing.T) {
	p, c := start(t, "p", cache(t, nhd, 1024), nil), start(t, "c", cache(t, kvFirst, 1024), nil)
	fill(t, p.cache)
	var blocks []int
	for i := range 1024 {
		blocks = append(blocks, (i*7)%1024)
	}
	export(t, p, "r", blocks...)
	allocs := func(n int) float64 {
		q := pull(p.peer(), "r", c.cache, blocks[:n], blocks[:n])
		return testing.AllocsPerRun(20, func() {
			if r := c.Fetch(context.Background(), q); r.Err != nil {
				t.Fatal(r.Err)
			}
		})
	}
	few, many := allocs(64), allocs(1024)
	t.Logf("allocations of a fetch of 64 blocks: %v, of 1024: %v", few, many)
	if raceEnabled {
		t.Skip("the race detector makes pools forget")
	}
	if (many-few)/(1024-64) > 0.02 {
		t.Errorf("allocations of a fetch of 64 blocks: %v, of 1024: %v", few, many)
	}
}
