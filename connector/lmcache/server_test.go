package lmcache_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"kvstrata/connector/lmcache"
)

// raw is a connection to a server, frame by frame.
type raw struct {
	net.Conn
	t *testing.T
}

func dialRaw(t *testing.T, address string) *raw {
	t.Helper()
	c, err := net.Dial("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() }) // may be closed already
	if err := c.SetDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	return &raw{c, t}
}

var someContent = lmcache.Content{Format: lmcache.KVT2D, DType: lmcache.FP8E5M2, Shape: [4]int32{3, 2, 1}}

func request(command lmcache.Command, key string, length int) []byte {
	b, err := lmcache.V1.AppendRequest(nil, &lmcache.Request{Command: command, Key: key, Length: length, Content: someContent})
	if err != nil {
		panic(err)
	}
	return b
}

func (r *raw) send(parts ...[]byte) {
	r.t.Helper()
	if _, err := r.Write(bytes.Join(parts, nil)); err != nil {
		r.t.Fatal(err)
	}
}

func (r *raw) reply() lmcache.Reply {
	r.t.Helper()
	b := make([]byte, lmcache.V1.ReplyBytes())
	if _, err := io.ReadFull(r, b); err != nil {
		r.t.Fatal(err)
	}
	reply, err := lmcache.V1.ParseReply(b)
	if err != nil {
		r.t.Fatal(err)
	}
	return reply
}

// ended wants the server to have closed the connection.
func (r *raw) ended() {
	r.t.Helper()
	if n, err := r.Read(make([]byte, 1)); n > 0 || err == nil || isTimeout(err) {
		r.t.Errorf("read %d, %v; want the connection closed", n, err)
	}
}

func isTimeout(err error) bool {
	var e net.Error
	return errors.As(err, &e) && e.Timeout()
}

// TestServerAnswers sends every command together and reads the answers in order; content comes back as it was told.
func TestServerAnswers(t *testing.T) {
	s := serve(t, serverConfig(), "")
	c := dialRaw(t, s.address)
	value := bytes.Repeat([]byte("value"), 1000)
	c.send(request(lmcache.Exist, "k", 0), request(lmcache.Put, "k", len(value)), value, request(lmcache.Exist, "k", 0), request(lmcache.Health, "k", 0),
		request(lmcache.List, "k", 0), request(lmcache.Get, "k", 0), request(lmcache.Put, "empty", 0), request(lmcache.Get, "empty", 0), request(lmcache.Get, "none", 0))
	for _, want := range []lmcache.Code{lmcache.Fail, lmcache.Success, lmcache.Success, lmcache.Fail} {
		if r := c.reply(); r.Code != want || r.Length != 0 {
			t.Errorf("reply %+v, want %v", r, want)
		}
	}
	if r := c.reply(); r.Code != lmcache.Success || r.Length != len(value) || r.Content != someContent {
		t.Errorf("reply %+v", r)
	}
	got := make([]byte, len(value))
	if _, err := io.ReadFull(c, got); err != nil || !bytes.Equal(got, value) {
		t.Errorf("other bytes, %v", err)
	}
	if r := c.reply(); r.Code != lmcache.Success || r.Length != 0 || r.Content != someContent {
		t.Errorf("reply %+v", r)
	}
	if r := c.reply(); r.Code != lmcache.Fail {
		t.Errorf("reply %+v", r)
	}
}

// TestServerRefuses closes connections that say what is no request, and goes on for others.
func TestServerRefuses(t *testing.T) {
	s := serve(t, serverConfig(), "")
	patched := func(at int, b byte) []byte {
		r := request(lmcache.Put, "k", 1)
		r[at] = b
		return r
	}
	for name, frame := range map[string][]byte{
		"negative length":     patched(7, 0x80),
		"command 0":           patched(0, 0),
		"command 6":           patched(0, 6),
		"negative command":    patched(3, 0xff),
		"format 9":            patched(8, 9),
		"element type 9":      patched(12, 9),
		"location 3":          patched(16, 3),
		"negative shape":      patched(23, 0xff),
		"blank key":           append(patched(0, 1)[:36], bytes.Repeat([]byte(" "), 150)...),
		"key that is no text": patched(36, 0xff),
	} {
		t.Run(name, func(t *testing.T) {
			c := dialRaw(t, s.address)
			c.send(frame)
			c.ended()
		})
	}
	c := dialRaw(t, s.address)
	c.send(request(lmcache.Health, "k", 0))
	if r := c.reply(); r.Code != lmcache.Success {
		t.Errorf("reply %+v", r)
	}
	if st := s.Stats(); st.ClosedAmidst != 10 {
		t.Errorf("stats %+v", st)
	}
}

// TestServerTooLong reads on behind a value that it does not keep, and forgets what the key had.
func TestServerTooLong(t *testing.T) {
	cfg := serverConfig()
	cfg.Bytes, cfg.MaxValue = 100, 50
	s := serve(t, cfg, "")
	c := dialRaw(t, s.address)
	c.send(request(lmcache.Put, "k", 50), make([]byte, 50), request(lmcache.Put, "k", 51), make([]byte, 51), request(lmcache.Exist, "k", 0))
	if r := c.reply(); r.Code != lmcache.Fail {
		t.Errorf("reply %+v", r)
	}
	// Promised and never sent: nothing is taken for it.
	c.send(request(lmcache.Put, "huge", 1<<31-1))
	eventually(t, "a refusal", func() error {
		if st := s.Stats(); st.Refused != 2 || st.Bytes > 100 {
			return fmt.Errorf("stats %+v", st)
		}
		return nil
	})
}

// TestServerFull has room taken by values that never come: others are refused rather than the bound broken.
func TestServerFull(t *testing.T) {
	cfg := serverConfig()
	cfg.Bytes, cfg.MaxValue = 100, 60
	s := serve(t, cfg, "")
	slow := dialRaw(t, s.address)
	slow.send(request(lmcache.Put, "slow", 60), make([]byte, 59))
	eventually(t, "room to be taken", func() error {
		if st := s.Stats(); st.Bytes != 60 {
			return fmt.Errorf("stats %+v", st)
		}
		return nil
	})
	c := dialRaw(t, s.address)
	c.send(request(lmcache.Put, "k", 50), make([]byte, 50), request(lmcache.Exist, "k", 0))
	if r := c.reply(); r.Code != lmcache.Fail {
		t.Errorf("reply %+v", r)
	}
	slow.send([]byte{1}, request(lmcache.Exist, "slow", 0))
	if r := slow.reply(); r.Code != lmcache.Success {
		t.Errorf("reply %+v", r)
	}
	c.send(request(lmcache.Put, "k", 50), make([]byte, 50), request(lmcache.Exist, "k", 0), request(lmcache.Exist, "slow", 0))
	if r := c.reply(); r.Code != lmcache.Success {
		t.Errorf("reply %+v", r)
	}
	if r := c.reply(); r.Code != lmcache.Fail {
		t.Errorf("reply %+v", r)
	}
}

// TestServerCutOff forgets a key whose value broke off, also when it had one.
func TestServerCutOff(t *testing.T) {
	s := serve(t, serverConfig(), "")
	c := dialRaw(t, s.address)
	c.send(request(lmcache.Put, "k", 10), make([]byte, 10), request(lmcache.Exist, "k", 0))
	if r := c.reply(); r.Code != lmcache.Success {
		t.Fatalf("reply %+v", r)
	}
	c.send(request(lmcache.Put, "k", 10), make([]byte, 9))
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the key to be forgotten", func() error {
		if st := s.Stats(); st.Keys != 0 || st.Connections != 0 {
			return fmt.Errorf("stats %+v", st)
		}
		return nil
	})
}

// TestServerSlow ends connections that stop within a request, or take no reply; idle ones stay.
func TestServerSlow(t *testing.T) {
	cfg := serverConfig()
	cfg.Timeout = 200 * time.Millisecond
	s := serve(t, cfg, "")
	idle := dialRaw(t, s.address)
	half := dialRaw(t, s.address)
	half.send(request(lmcache.Exist, "k", 0)[:100])
	half.ended()
	value := dialRaw(t, s.address)
	value.send(request(lmcache.Put, "k", 100), make([]byte, 99))
	value.ended()
	deaf := dialRaw(t, s.address)
	deaf.send(request(lmcache.Put, "k", 1<<18), make([]byte, 1<<18), bytes.Repeat(request(lmcache.Get, "k", 0), 200))
	eventually(t, "the deaf to be left", func() error {
		if st := s.Stats(); st.ClosedAmidst != 3 {
			return fmt.Errorf("stats %+v", st)
		}
		return nil
	})
	idle.send(request(lmcache.Exist, "k", 0))
	if r := idle.reply(); r.Code != lmcache.Success {
		t.Errorf("reply %+v", r)
	}
}

func TestServerTurnsAway(t *testing.T) {
	cfg := serverConfig()
	cfg.Connections = 1
	s := serve(t, cfg, "")
	first := dialRaw(t, s.address)
	first.send(request(lmcache.Health, "k", 0))
	first.reply()
	dialRaw(t, s.address).ended()
	first.send(request(lmcache.Health, "k", 0))
	first.reply()
	if st := s.Stats(); st.TurnedAway != 1 || st.Connections != 1 {
		t.Errorf("stats %+v", st)
	}
}

func TestServerConfig(t *testing.T) {
	good := lmcache.DefaultServerConfig()
	if err := good.Validate(); err != nil {
		t.Fatal(err)
	}
	_, err := lmcache.NewServer(lmcache.ServerConfig{Bytes: -1, MaxValue: -1, Connections: -1, Timeout: -1, Protocol: 7}, quiet())
	for _, word := range []string{"bytes", "max value", "connections", "timeout", "protocol"} {
		if err == nil || !strings.Contains(err.Error(), word) {
			t.Errorf("error does not name %s: %v", word, err)
		}
	}
}

// TestServerListenerFails ends with the listener's error.
func TestServerListenerFails(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s, err := lmcache.NewServer(serverConfig(), quiet())
	if err != nil {
		t.Fatal(err)
	}
	if err := ln.Close(); err != nil {
		t.Fatal(err)
	}
	if err := s.Run(context.Background(), ln); !errors.Is(err, net.ErrClosed) {
		t.Errorf("run: %v", err)
	}
}
