package web

import (
	"bufio"
	"errors"
	"net"
	"net/http"
	"os"
	"sync/atomic"
	"time"
)

const (
	wirePiece   = 32 << 10               // bytes of one write: progress is seen between two
	hurryWithin = 250 * time.Millisecond // for what is under way when the hub ends
)

// wire is a client's TCP connection. It counts what is sent, and ends a write that makes no progress for the stall time
// rather than one that takes long: a big frame over a thin line is no reason to disconnect.
type wire struct {
	net.Conn
	client  *client
	stalled atomic.Bool
	hurried atomic.Bool
}

// SetWriteDeadline does nothing: Write has its own.
func (w *wire) SetWriteDeadline(time.Time) error { return nil }

// Write blocks for as long as the peer takes something now and then.
func (w *wire) Write(p []byte) (int, error) {
	sent := 0
	for sent < len(p) {
		if err := w.Conn.SetWriteDeadline(time.Now().Add(w.client.hub.cfg.Stall)); err != nil {
			return sent, err
		}
		if w.hurried.Load() { // after the line above, so that hurry's deadline stands
			if err := w.Conn.SetWriteDeadline(time.Now().Add(hurryWithin)); err != nil {
				return sent, err
			}
		}
		n, err := w.Conn.Write(p[sent:min(len(p), sent+wirePiece)])
		sent += n
		w.client.hub.stats.sent.Add(float64(n))
		switch {
		case err == nil:
		case !errors.Is(err, os.ErrDeadlineExceeded) || w.hurried.Load():
			return sent, err
		case n == 0:
			w.stalled.Store(true)
			return sent, err
		}
	}
	return sent, nil
}

// hurry bounds the write that is under way, and those that follow.
func (w *wire) hurry() {
	w.hurried.Store(true)
	_ = w.Conn.SetWriteDeadline(time.Now().Add(hurryWithin)) // a connection that is closed is in no need of it
}

// hijacker gives the upgrade a wire instead of the bare connection.
type hijacker struct {
	http.ResponseWriter
	client *client
}

var _ http.Hijacker = (*hijacker)(nil)

// Hijack takes the connection over from the HTTP server.
func (h *hijacker) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	conn, rw, err := http.NewResponseController(h.ResponseWriter).Hijack()
	if err != nil {
		return nil, nil, err
	}
	w := &wire{Conn: conn, client: h.client}
	h.client.attach(w)
	return w, rw, nil
}
