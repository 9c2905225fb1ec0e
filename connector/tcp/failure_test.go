package tcp_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"kvstrata/connector/tcp"
)

// TestExpiryInTransfer ends the lease while bytes are on their way: they came, and do not count.
func TestExpiryInTransfer(t *testing.T) {
	for _, overMemory := range []bool{false, true} {
		t.Run(fmt.Sprintf("shared %v", overMemory), func(t *testing.T) {
			var late atomic.Bool
			began := time.Now()
			clock := func(_ *tcp.Config, id *tcp.Identity) {
				id.Now = func() time.Time {
					if late.Load() {
						return began.Add(time.Hour)
					}
					return began
				}
			}
			memory := func(cfg *tcp.Config, _ *tcp.Identity) { cfg.SharedMemory = overMemory }
			p := start(t, "p", cache(t, nhd, 8), both(clock, memory))
			fill(t, p.cache)
			export(t, p, "r", 1)
			onRead := func(b []byte) { late.Store(late.Load() || len(b) > 4096) }
			onWrite := func(b []byte) { late.Store(late.Load() || tcp.IsConfirm(b)) }
			c := start(t, "c", cache(t, nhd, 8), both(piped(p, onRead, onWrite), memory))
			r := c.Fetch(t.Context(), pull(p.peer(), "r", c.cache, []int{1}, []int{1}))
			wantError(t, r.Err, tcp.ErrEnded)
			if len(r.Failed) != 1 || r.Bytes != 0 || c.Counts().Copied != b2u(overMemory) {
				t.Errorf("%+v", r)
			}
			if done, expired := p.Ended(); len(done) != 0 || len(expired) != 1 {
				t.Errorf("done %v, expired %v", done, expired)
			}
		})
	}
}

func TestReplacedExport(t *testing.T) {
	p := start(t, "p", cache(t, nhd, 8), nil)
	export(t, p, "r", 1)
	again := func(b []byte) {
		if len(b) > 4096 {
			export(t, p, "r", 1) // a request of the same id, with other bytes
		}
	}
	c := start(t, "c", cache(t, nhd, 8), piped(p, again, nil))
	r := c.Fetch(t.Context(), pull(p.peer(), "r", c.cache, []int{1}, []int{1}))
	wantError(t, r.Err, tcp.ErrEnded)
}

// stuck is a server's connection that takes so many bytes, and then no more.
type stuck struct {
	net.Conn
	room int
	gone chan struct{}
}

func (s *stuck) Write(p []byte) (int, error) {
	if s.room -= len(p); s.room < 0 {
		<-s.gone
		return 0, net.ErrClosed
	}
	return s.Conn.Write(p)
}

func (s *stuck) Close() error {
	select {
	case <-s.gone:
	default:
		close(s.gone)
	}
	return s.Conn.Close()
}

func TestStalledPeer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := start(t, "p", cache(t, nhd, 8), func(_ *tcp.Config, id *tcp.Identity) {
			id.Dial = func(context.Context, string) (net.Conn, error) { return nil, errors.New("nobody") }
		})
		export(t, p, "r", 1, 2, 3)
		c := start(t, "c", cache(t, nhd, 8), both(oneBlock, func(cfg *tcp.Config, id *tcp.Identity) {
			cfg.InflightBytes = 1
			id.Dial = func(context.Context, string) (net.Conn, error) {
				here, there := net.Pipe()
				p.Serve(&stuck{Conn: there, room: blockBytes + blockBytes/2, gone: make(chan struct{})})
				return here, nil
			}
		}))
		began := time.Now()
		r := c.Fetch(t.Context(), pull(tcp.Peer{Address: "p"}, "r", c.cache, []int{1, 2, 3}, []int{1, 2, 3}))
		wantError(t, r.Err, tcp.ErrStalled)
		if d := time.Since(began); d != 5*time.Second || len(r.Failed) != 2 || r.Failed[0] != 1 {
			t.Errorf("after %v: %+v", d, r)
		}
		p.stop()
		c.stop()
	})
}

func TestCorruptedPayload(t *testing.T) {
	p := start(t, "p", cache(t, nhd, 16), nil)
	fill(t, p.cache)
	from := []int{0, 1, 2, 3, 4, 5, 6, 7}
	export(t, p, "r", from...)
	seen := 0
	flip := func(b []byte) {
		if seen += len(b); seen > 3*blockBytes+blockBytes/2 && len(b) > 4096 {
			b[100] ^= 1
			seen = -1 << 40
		}
	}
	c := start(t, "c", cache(t, nhd, 16), both(oneBlock, func(cfg *tcp.Config, id *tcp.Identity) {
		cfg.InflightBytes = 1
		id.Dial = func(ctx context.Context, address string) (net.Conn, error) {
			conn, err := new(net.Dialer).DialContext(ctx, "tcp", address)
			return &tap{Conn: conn, onRead: flip}, err
		}
	}))
	r := c.Fetch(t.Context(), pull(p.peer(), "r", c.cache, from, from))
	wantError(t, r.Err, tcp.ErrChecksum)
	if len(r.Failed) != 1 || r.Failed[0] != 3 {
		t.Errorf("failed %v", r.Failed)
	}
	same(t, p.cache, c.cache, from, from, map[int]bool{3: true})
}

func TestPeerDies(t *testing.T) {
	p := start(t, "p", cache(t, nhd, 64), nil)
	fill(t, p.cache)
	var from []int
	for i := range 64 {
		from = append(from, i)
	}
	export(t, p, "r", from...)
	seen := 0
	die := func(b []byte) {
		if seen += len(b); seen > 20*blockBytes {
			p.stop()
		}
	}
	c := start(t, "c", cache(t, nhd, 64), both(oneBlock, func(cfg *tcp.Config, id *tcp.Identity) {
		cfg.InflightBytes = 1
		id.Dial = func(ctx context.Context, address string) (net.Conn, error) {
			conn, err := new(net.Dialer).DialContext(ctx, "tcp", address)
			if err != nil {
				return nil, err
			}
			return &tap{Conn: conn, onRead: die}, nil
		}
	}))
	r := c.Fetch(t.Context(), pull(p.peer(), "r", c.cache, from, from))
	if r.Err == nil || len(r.Failed) == 0 || len(r.Failed) > 64-19 {
		t.Fatalf("%+v", r)
	}
	failed := map[int]bool{}
	for _, i := range r.Failed {
		failed[i] = true
	}
	same(t, p.cache, c.cache, from, from, failed)
}

func TestBrokenConnectionIsMadeAnew(t *testing.T) {
	p := start(t, "p", cache(t, nhd, 16), nil)
	fill(t, p.cache)
	from := []int{0, 1, 2, 3, 4, 5, 6, 7}
	export(t, p, "r", from...)
	var broke atomic.Bool
	c := start(t, "c", cache(t, nhd, 16), both(oneBlock, func(_ *tcp.Config, id *tcp.Identity) {
		id.Dial = func(ctx context.Context, address string) (net.Conn, error) {
			conn, err := new(net.Dialer).DialContext(ctx, "tcp", address)
			seen := 0
			return &tap{Conn: conn, onRead: func(b []byte) {
				if seen += len(b); seen > 3*blockBytes && broke.CompareAndSwap(false, true) {
					_ = conn.Close()
				}
			}}, err
		}
	}))
	r := c.Fetch(t.Context(), pull(p.peer(), "r", c.cache, from, from))
	if r.Err != nil || c.Counts().Reconnects != 1 {
		t.Fatalf("%+v, %+v", r, c.Counts())
	}
	same(t, p.cache, c.cache, from, from, nil)
}

func TestCancel(t *testing.T) {
	for _, shm := range []bool{false, true} {
		memory := func(cfg *tcp.Config, _ *tcp.Identity) { cfg.SharedMemory = shm }
		p, c := start(t, "p", cache(t, nhd, 8), memory), start(t, "c", cache(t, nhd, 8), memory)
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan tcp.Result)
		go func() {
			q := pull(p.peer(), "r", c.cache, []int{1}, []int{1})
			q.Wait = 10 * time.Second
			ended <- c.Fetch(ctx, q)
		}()
		eventually(t, "the read waits", func() bool { return p.Counts().Waiting == 1 })
		cancel()
		r := <-ended
		wantError(t, r.Err, context.Canceled)
		if len(r.Failed) != 1 {
			t.Errorf("%+v", r)
		}
	}
}

func TestCloseEndsFetches(t *testing.T) {
	p, c := start(t, "p", cache(t, nhd, 8), nil), start(t, "c", cache(t, nhd, 8), nil)
	ended := make(chan tcp.Result)
	go func() {
		q := pull(p.peer(), "r", c.cache, []int{1}, []int{1})
		q.Wait = 10 * time.Second
		ended <- c.Fetch(t.Context(), q)
	}()
	eventually(t, "the read waits", func() bool { return p.Counts().Waiting == 1 })
	c.stop()
	if r := <-ended; r.Err == nil {
		t.Error("no error")
	}
	if r := c.Fetch(t.Context(), pull(p.peer(), "r", c.cache, []int{1}, []int{1})); r.Err == nil {
		t.Error("no error after the end")
	}
}

// TestPeersThatDoNothing are cut off: one that does not shake hands, one that does not take what it asked for, and one that
// asks for nothing.
func TestPeersThatDoNothing(t *testing.T) {
	for _, tc := range []struct {
		name   string
		says   bool
		reads  int
		within time.Duration
	}{
		{"no handshake", false, 0, 5 * time.Second},
		{"takes half a block", true, 1000, 5 * time.Second},
		{"asks no more", true, 1 << 30, 5 * time.Minute},
	} {
		t.Run(tc.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p := start(t, "p", cache(t, nhd, 8), func(_ *tcp.Config, id *tcp.Identity) {
					id.Dial = func(context.Context, string) (net.Conn, error) { return nil, errors.New("nobody") }
				})
				if err := p.Export("r", tcp.Blocks(p.cache, []int{1}), 1); err != nil {
					t.Fatal(err)
				}
				here, there := net.Pipe()
				p.Serve(there)
				began := time.Now()
				if tc.says {
					client, _ := tcp.Greeted(p.Endpoint)
					go func() { _, _ = here.Write(append(client, tcp.ReadFrame("r", 1, 1)...)) }()
				}
				_, _ = io.CopyN(io.Discard, here, int64(tc.reads)) // until the server has had enough, if not before
				for p.Counts().Serving > 0 {
					<-time.After(100 * time.Millisecond)
				}
				if d := time.Since(began); d < tc.within || d > tc.within+time.Second {
					t.Errorf("cut off after %v", d)
				}
				_ = here.Close()
				p.stop()
			})
		})
	}
}
