package web

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync/atomic"
	"time"

	"github.com/gorilla/websocket"
)

const (
	maxRequest  = 4 << 10 // bytes of a client's message
	compressMin = 1 << 10 // bytes of a frame that is worth compressing
)

// client is one browser. Its reader runs in the HTTP server's goroutine and its writer in one of its own; when one ends,
// so does the other.
type client struct {
	hub  *Hub
	conn *websocket.Conn
	wire *wire // set under the hub's lock

	answers chan string   // errors, from the reader to the writer; the reader waits, so that a flood slows itself down
	gone    chan struct{} // closed when the reader has ended
	ended   chan struct{} // closed when the writer has ended

	tail atomic.Pointer[subscription] // set by the reader
}

// serveLive turns a request into a client, and returns when it has left.
func (h *Hub) serveLive(w http.ResponseWriter, r *http.Request) {
	c := &client{hub: h, answers: make(chan string), gone: make(chan struct{}), ended: make(chan struct{})}
	if err := h.join(c); err != nil {
		h.stats.refused.Inc()
		w.Header().Set("Retry-After", "5")
		writeError(w, http.StatusServiceUnavailable, err.Error())
		return
	}
	defer h.leave(c)
	conn, err := h.upgrader.Upgrade(&hijacker{ResponseWriter: w, client: c}, r, nil)
	if err != nil {
		return // Upgrade has answered
	}
	c.conn = conn
	go c.write()
	c.read()
	close(c.gone)
	if h.tail != nil {
		h.tail.unsubscribe(c.tail.Load())
	}
	<-c.ended
}

// attach gives a client its connection.
func (c *client) attach(w *wire) {
	c.hub.mu.Lock()
	defer c.hub.mu.Unlock()
	c.wire = w
	if c.hub.finished {
		w.hurry()
	}
}

// hurry lets a write that is under way end soon. The hub's lock is held.
func (c *client) hurry() {
	if c.wire != nil {
		c.wire.hurry()
	}
}

// write sends what there is, one frame after the other, each made when the one before it is out.
func (c *client) write() {
	defer close(c.ended)
	defer c.conn.Close() // ends the reader
	if err := c.send(); err != nil && c.wire.stalled.Load() {
		c.hub.stats.slow.Inc()
		c.hub.log.Info("browser took nothing for too long; disconnected", "remote", c.conn.RemoteAddr(), "after", c.hub.cfg.Stall)
	}
}

func (c *client) send() error {
	ping := time.NewTicker(c.hub.cfg.Ping)
	defer ping.Stop()
	var version uint64
	for {
		f, ticked, err := c.hub.next(version)
		if err != nil {
			return err
		}
		if f != nil {
			if err := c.sendFrame(f); err != nil {
				return err
			}
			if version > 0 {
				c.hub.stats.coalesced.Add(float64(f.version - version - 1))
			}
			version = f.version
		}
		select {
		case <-ticked:
			err = c.sendTail()
		case text := <-c.answers:
			err = c.sendJSON(errorFrame{text})
		case <-ping.C:
			err = c.conn.WriteControl(websocket.PingMessage, nil, time.Now().Add(c.hub.cfg.Stall))
		case <-c.gone:
			return nil
		case <-c.hub.stop:
			bye := websocket.FormatCloseMessage(websocket.CloseGoingAway, "kvstrata stops")
			return c.conn.WriteControl(websocket.CloseMessage, bye, time.Now().Add(c.hub.cfg.Stall))
		}
		if err != nil {
			return err
		}
	}
}

func (c *client) sendFrame(f *frame) error {
	c.conn.EnableWriteCompression(f.size >= compressMin)
	if err := c.conn.WritePreparedMessage(f.message); err != nil {
		return err
	}
	c.hub.stats.frames.Inc()
	return nil
}

func (c *client) sendJSON(v any) error {
	data, err := json.Marshal(v)
	if err != nil {
		return err
	}
	c.conn.EnableWriteCompression(len(data) >= compressMin)
	if err := c.conn.WriteMessage(websocket.TextMessage, data); err != nil {
		return err
	}
	c.hub.stats.frames.Inc()
	return nil
}

// sendTail sends the lines gathered since the last time, if there are any.
func (c *client) sendTail() error {
	sub := c.tail.Load()
	if sub == nil {
		return nil
	}
	lines, matched := sub.take()
	if matched == 0 {
		return nil
	}
	c.hub.stats.tailLines.Add(float64(len(lines)))
	return c.sendJSON(tailFrame{tailLines{Lines: lines, Matched: matched, Shown: len(lines)}})
}

type errorFrame struct {
	Error string `json:"error"`
}

type tailFrame struct {
	Tail tailLines `json:"tail"`
}

type tailLines struct {
	Lines   []json.RawMessage `json:"lines"`
	Matched uint64            `json:"matched"`
	Shown   int               `json:"shown"`
}

// read takes the client's messages until the connection ends.
func (c *client) read() {
	patience := c.hub.cfg.Ping * 5 / 2
	alive := func(string) error { return c.conn.SetReadDeadline(time.Now().Add(patience)) }
	c.conn.SetReadLimit(maxRequest)
	c.conn.SetPongHandler(alive)
	for {
		if alive("") != nil {
			return
		}
		kind, r, err := c.conn.NextReader()
		if err != nil {
			return
		}
		// The read limit counts what comes over the wire, which may be compressed.
		data, err := io.ReadAll(io.LimitReader(r, maxRequest+1))
		if err != nil {
			return
		}
		if err := c.take(kind, data); err != nil {
			select {
			case c.answers <- err.Error():
			case <-c.ended:
				return
			}
		}
	}
}

// take does what one message asks for.
func (c *client) take(kind int, data []byte) error {
	if kind != websocket.TextMessage || len(data) > maxRequest {
		return errors.New("want a text message of at most 4096 bytes")
	}
	const want = `want {"tail": {"source": "prefill-*", "kinds": ["EVICTED"], "hash": ""}} or {"tail": null}`
	var req struct {
		Tail json.RawMessage `json:"tail"`
	}
	if err := decodeStrictly(data, &req); err != nil {
		return errors.New(want + ": " + err.Error())
	}
	if req.Tail == nil {
		return errors.New(want)
	}
	if c.hub.tail == nil {
		return errors.New("this process has no event stream to tail")
	}
	var sub *subscription
	if string(req.Tail) != "null" {
		var spec filterSpec
		if err := decodeStrictly(req.Tail, &spec); err != nil {
			return errors.New(want + ": " + err.Error())
		}
		f, err := newFilter(spec)
		if err != nil {
			return err
		}
		sub = &subscription{filter: f}
	}
	c.hub.tail.unsubscribe(c.tail.Swap(sub))
	if !c.hub.tail.subscribe(sub) {
		c.tail.Store(nil)
		return fmt.Errorf("%d pages tail already, as many as may; close one, or use kvstrata tail", maxTails)
	}
	return nil
}

func decodeStrictly(data []byte, into any) error {
	dec := json.NewDecoder(bytes.NewReader(data))
	dec.DisallowUnknownFields()
	if err := dec.Decode(into); err != nil {
		return errors.New(strings.TrimPrefix(err.Error(), "json: "))
	}
	if _, err := dec.Token(); err != io.EOF {
		return errors.New("something follows the object")
	}
	return nil
}
