package tcp_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net"
	"testing"
	"time"

	"kvstrata/connector"
	"kvstrata/connector/tcp"
)

// script is a connection whose other side has said everything already, and does not care for the answers.
type script struct {
	in     *bytes.Reader
	closed bool
}

func (s *script) Read(p []byte) (int, error) {
	if s.closed {
		return 0, net.ErrClosed
	}
	return s.in.Read(p)
}

func (s *script) Write(p []byte) (int, error) {
	if s.closed {
		return 0, net.ErrClosed
	}
	return len(p), nil
}

func (s *script) Close() error                     { s.closed = true; return nil }
func (s *script) LocalAddr() net.Addr              { return &net.TCPAddr{} }
func (s *script) RemoteAddr() net.Addr             { return &net.TCPAddr{} }
func (s *script) SetDeadline(time.Time) error      { return nil }
func (s *script) SetReadDeadline(time.Time) error  { return nil }
func (s *script) SetWriteDeadline(time.Time) error { return nil }

// quiet makes an endpoint that is not run.
func quiet(tb testing.TB, c *connector.Cache, dial func(context.Context, string) (net.Conn, error)) *tcp.Endpoint {
	tb.Helper()
	cfg := tcp.DefaultConfig()
	cfg.SharedMemory, cfg.Connections, cfg.ChunkBytes = false, 1, 2*blockBytes
	e, err := tcp.New(cfg, tcp.Identity{Engine: "e", Ranks: 1, Cache: c, Log: slog.New(slog.DiscardHandler), Dial: dial})
	if err != nil {
		tb.Fatal(err)
	}
	e.LimitReadWait(0)
	return e
}

// FuzzServerFrames lets a peer that shook hands send anything.
func FuzzServerFrames(f *testing.F) {
	c := cache(f, nhd, 8)
	fill(f, c)
	before := blank(c)
	client, _ := tcp.Greeted(quiet(f, c, nil))
	f.Add(tcp.ReadFrame("r", 1, 2, 3))
	f.Add(append(tcp.OpenFrame("r", 1, 0, 1), tcp.ConfirmFrame(2, 1, "r")...))
	f.Add(append(tcp.BeatFrame(1, "r", "s"), tcp.DoneFrame(2, "r")...))
	f.Add(tcp.ReadFrame("r", 1, 1<<31))
	f.Add(bytes.Repeat([]byte{0xff}, 64))
	f.Fuzz(func(t *testing.T, text []byte) {
		e := quiet(t, c, nil)
		if err := e.Export("r", tcp.Blocks(c, []int{2, 3}), 1); err != nil {
			t.Fatal(err)
		}
		e.ServeNow(&script{in: bytes.NewReader(append(bytes.Clone(client), text...))})
		if !bytes.Equal(before, c.Caches().Memory.Host()) {
			t.Fatal("the server's memory was written")
		}
	})
}

// FuzzServerHandshake lets anybody send anything.
func FuzzServerHandshake(f *testing.F) {
	c := cache(f, nhd, 8)
	client, server := tcp.Greeted(quiet(f, c, nil))
	f.Add(client)
	f.Add(server)
	f.Add([]byte("GET / HTTP/1.1\r\n\r\n"))
	f.Fuzz(func(t *testing.T, text []byte) {
		quiet(t, c, nil).ServeNow(&script{in: bytes.NewReader(text)})
	})
}

// FuzzClientFrames lets a server answer a fetch with anything: nothing but the blocks that are to be filled is written.
func FuzzClientFrames(f *testing.F) {
	c := cache(f, nhd, 8)
	_, server := tcp.Greeted(quiet(f, c, nil))
	good := append(tcp.DataFrames(1, make([]byte, 2*blockBytes)), tcp.DataFrames(2, make([]byte, blockBytes))...)
	f.Add(good)
	f.Add(good[:len(good)-3])
	f.Add(good[:100])
	f.Add(bytes.Repeat([]byte{0xff}, 64))
	f.Fuzz(func(t *testing.T, text []byte) {
		host := c.Caches().Memory.Host()
		for i := range host {
			host[i] = 7
		}
		dials := 0
		e := quiet(t, c, func(context.Context, string) (net.Conn, error) {
			if dials++; dials > 1 {
				return nil, errors.New("no second try")
			}
			return &script{in: bytes.NewReader(append(bytes.Clone(server), text...))}, nil
		})
		r := e.Fetch(t.Context(), pull(tcp.Peer{Address: "p"}, "r", c, []int{5, 6, 7}, []int{1, 3, 4}))
		if (r.Err == nil) != (len(r.Failed) == 0) {
			t.Fatalf("%+v", r)
		}
		if bytes.Equal(text, good) && r.Err != nil {
			t.Fatal(r.Err)
		}
		for _, b := range []int{0, 2, 5, 6, 7} {
			if got := read(t, c, b); len(bytes.Trim(got, "\x07")) > 0 {
				t.Fatalf("block %d was written", b)
			}
		}
	})
}

// FuzzClientHandshake lets a server shake hands anyhow.
func FuzzClientHandshake(f *testing.F) {
	c := cache(f, nhd, 8)
	client, server := tcp.Greeted(quiet(f, c, nil))
	f.Add(server)
	f.Add(client)
	f.Add(server[:len(server)-10])
	f.Fuzz(func(t *testing.T, text []byte) {
		e := quiet(t, c, func(context.Context, string) (net.Conn, error) {
			return &script{in: bytes.NewReader(text)}, nil
		})
		if r := e.Fetch(t.Context(), pull(tcp.Peer{Address: "p"}, "r", c, []int{5}, []int{1})); r.Err == nil {
			t.Fatal("no error")
		}
	})
}

// FuzzPeerLayout lets a peer on the same host tell any layout.
func FuzzPeerLayout(f *testing.F) {
	c := cache(f, nhd, 8)
	e := quiet(f, c, nil)
	size := c.Caches().Memory.Size()
	good, err := json.Marshal(map[string]any{"size": size, "tensors": c.Caches().Tensors})
	if err != nil {
		f.Fatal(err)
	}
	if err := e.ParseLayout(good, int64(size)); err != nil {
		f.Fatal(err)
	}
	if err := e.ParseLayout(good, int64(size)-1); err == nil {
		f.Fatal("a layout beyond the file's end")
	}
	f.Add(good)
	f.Add(bytes.ReplaceAll(good, []byte(`"Offset":0`), []byte(`"Offset":9223372036854775807`)))
	f.Add(bytes.ReplaceAll(good, []byte(`"Size":2,`), []byte(`"Size":3,`)))
	f.Fuzz(func(t *testing.T, text []byte) {
		_ = e.ParseLayout(text, int64(size))
	})
}

// TestTruncatedFrames cuts every message off at every place.
func TestTruncatedFrames(t *testing.T) {
	c := cache(t, nhd, 8)
	client, _ := tcp.Greeted(quiet(t, c, nil))
	text := bytes.Join([][]byte{
		client, tcp.ReadFrame("r", 1, 2), tcp.OpenFrame("r", 2, 0), tcp.ConfirmFrame(3, 1, "r"), tcp.BeatFrame(4, "r"), tcp.DoneFrame(5, "r"),
	}, nil)
	for n := range len(text) {
		e := quiet(t, c, nil)
		if err := e.Export("r", tcp.Blocks(c, []int{2, 3}), 1); err != nil {
			t.Fatal(err)
		}
		e.ServeNow(&script{in: bytes.NewReader(text[:n])})
		if e.Exports() != 1 {
			t.Fatalf("after %d of %d bytes the export has gone", n, len(text))
		}
	}
	e := quiet(t, c, nil)
	if err := e.Export("r", tcp.Blocks(c, []int{2, 3}), 1); err != nil {
		t.Fatal(err)
	}
	e.ServeNow(&script{in: bytes.NewReader(text)})
	if e.Exports() != 0 {
		t.Fatal("the whole text does not end the export")
	}
}

var _ io.ReadWriteCloser = (*script)(nil)
