package web_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/gorilla/websocket"
	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"

	"kvstrata/web"
)

const patience = 20 * time.Second

var quiet = slog.New(slog.DiscardHandler)

// site is a hub that runs behind an HTTP server.
type site struct {
	*web.Hub
	reg  *prometheus.Registry
	dial func(header http.Header) (*websocket.Conn, *http.Response, error)
	url  string
	stop func() // the hub, then the server
}

// open serves a hub on a listener. connect makes a client's end of a connection.
func open(cfg web.Config, panels []web.Panel, tail *web.Tail, l net.Listener, connect func() (net.Conn, error)) (*site, error) {
	reg := prometheus.NewPedanticRegistry()
	hub, err := web.New(cfg, panels, tail, quiet, reg)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(context.Background())
	var group errgroup.Group
	group.Go(func() error { return hub.Run(ctx) })
	srv := &http.Server{Handler: hub.Handler()}
	group.Go(func() error {
		if err := srv.Serve(l); !errors.Is(err, http.ErrServerClosed) {
			return err
		}
		return nil
	})
	s := &site{Hub: hub, reg: reg, url: "http://" + l.Addr().String()}
	dialer := websocket.Dialer{
		NetDialContext:   func(context.Context, string, string) (net.Conn, error) { return connect() },
		HandshakeTimeout: patience,
	}
	s.dial = func(header http.Header) (*websocket.Conn, *http.Response, error) {
		return dialer.Dial("ws://"+l.Addr().String()+"/v1/live", header)
	}
	s.stop = func() {
		cancel()
		_ = srv.Close()
		if err := group.Wait(); err != nil {
			panic(err)
		}
	}
	return s, nil
}

// serve opens a hub on loopback TCP for a test.
func serve(t testing.TB, cfg web.Config, panels []web.Panel, tail *web.Tail) *site {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s, err := open(cfg, panels, tail, l, func() (net.Conn, error) { return net.Dial("tcp", l.Addr().String()) })
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.stop)
	return s
}

// pipes is a listener without a network, for use under synctest. Its connections hold no byte: what is written is read.
type pipes struct {
	conns  chan net.Conn
	closed chan struct{}
	once   sync.Once
}

func newPipes() *pipes { return &pipes{conns: make(chan net.Conn), closed: make(chan struct{})} }

func (p *pipes) Accept() (net.Conn, error) {
	select {
	case c := <-p.conns:
		return c, nil
	case <-p.closed:
		return nil, net.ErrClosed
	}
}

func (p *pipes) Close() error   { p.once.Do(func() { close(p.closed) }); return nil }
func (p *pipes) Addr() net.Addr { return &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 80} }

func (p *pipes) connect() (net.Conn, error) {
	here, there := net.Pipe()
	select {
	case p.conns <- there:
		return here, nil
	case <-p.closed:
		return nil, net.ErrClosed
	}
}

// serveBubble opens a hub on pipes, inside a synctest bubble.
func serveBubble(t *testing.T, cfg web.Config, panels []web.Panel, tail *web.Tail) *site {
	t.Helper()
	p := newPipes()
	s, err := open(cfg, panels, tail, p, p.connect)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.stop)
	synctest.Wait()
	return s
}

// frame is what the hub sends.
type frame struct {
	V    uint64
	Full bool
	Now  int64
	Set  map[string]json.RawMessage
	Del  []string

	Tail *struct {
		Lines          []json.RawMessage
		Matched, Shown int
	}
	Error string
}

// browser is a client, and the state that frames left it with.
type browser struct {
	conn   *websocket.Conn
	v      uint64
	frames int
	docs   map[string]string
}

func connect(t testing.TB, s *site) *browser {
	t.Helper()
	b, err := join(s)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(b.close)
	return b
}

// join connects, as often as it takes until the hub runs.
func join(s *site) (*browser, error) {
	deadline := time.Now().Add(patience)
	for {
		conn, resp, err := s.dial(nil)
		switch {
		case err == nil:
			return &browser{conn: conn, docs: make(map[string]string)}, nil
		case resp == nil || resp.StatusCode != http.StatusServiceUnavailable || time.Now().After(deadline):
			return nil, err
		}
	}
}

func (b *browser) close() { _ = b.conn.Close() }

// next reads a frame and does what it says. An error tells of a broken promise, or that the connection ended.
func (b *browser) next() (*frame, error) {
	if err := b.conn.SetReadDeadline(time.Now().Add(patience)); err != nil {
		return nil, err
	}
	_, data, err := b.conn.ReadMessage()
	if err != nil {
		return nil, err
	}
	f := new(frame)
	if err := json.Unmarshal(data, f); err != nil {
		return nil, fmt.Errorf("frame %q: %w", data, err)
	}
	if f.V == 0 {
		return f, nil
	}
	switch {
	case b.frames == 0 && !f.Full:
		return nil, errors.New("the first frame is not full")
	case f.V <= b.v:
		return nil, fmt.Errorf("version %d after %d", f.V, b.v)
	case f.Full && len(f.Del) > 0:
		return nil, errors.New("a full frame deletes")
	case f.Full:
		clear(b.docs)
	}
	b.v = f.V
	b.frames++
	for key, doc := range f.Set {
		b.docs[key] = string(doc)
	}
	for _, key := range f.Del {
		if _, there := b.docs[key]; there && f.Set[key] != nil {
			return nil, fmt.Errorf("%s is both set and deleted", key)
		}
		delete(b.docs, key)
	}
	return f, nil
}

// until reads frames until a document has a value.
func (b *browser) until(t testing.TB, key, doc string) {
	t.Helper()
	for b.docs[key] != doc {
		if _, err := b.next(); err != nil {
			t.Fatalf("waiting for %s = %s: %v", key, doc, err)
		}
	}
}

// board is a panel's documents, which tests change. Each time the hub collects, the board takes the next step, if it has
// one, and remembers what it told under the number of the step, which is a document too.
type board struct {
	mu    sync.Mutex
	docs  map[string]string // key → JSON
	steps []func(docs map[string]string)
	step  int
	told  []map[string]string // by step
	asked int                 // collections
}

func newBoard(docs map[string]string, steps ...func(map[string]string)) *board {
	b := &board{docs: maps.Clone(docs), steps: steps}
	if b.docs == nil {
		b.docs = make(map[string]string)
	}
	return b
}

func (b *board) panel() web.Panel { return web.Panel{Collect: b.collect} }

func (b *board) collect(_ time.Time, put func(string, any)) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.asked++
	if len(b.told) > 0 && b.step < len(b.steps) {
		b.steps[b.step](b.docs)
		b.step++
	}
	b.docs["step"] = fmt.Sprint(b.step)
	if len(b.told) == b.step {
		b.told = append(b.told, maps.Clone(b.docs))
	}
	for key, doc := range b.docs {
		put(key, json.RawMessage(doc))
	}
}

func (b *board) add(step func(map[string]string)) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.steps = append(b.steps, step)
}

func (b *board) asks() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.asked
}

// compare returns how a browser's state differs from what was told at its step.
func (b *board) compare(docs map[string]string) string {
	var step int
	if _, err := fmt.Sscan(docs["step"], &step); err != nil {
		return "no step: " + err.Error()
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	return cmp.Diff(b.told[step], docs)
}

// follow reads until the last step, with a nap before each frame, and compares after each.
func (b *board) follow(c *browser, nap time.Duration) error {
	last := fmt.Sprint(len(b.steps))
	for c.docs["step"] != last {
		if nap > 0 {
			<-time.After(nap)
		}
		if _, err := c.next(); err != nil {
			return err
		}
		if diff := b.compare(c.docs); diff != "" {
			return fmt.Errorf("after frame %d (-told +got):\n%s", c.v, diff)
		}
	}
	return nil
}

func config() web.Config {
	cfg := web.DefaultConfig()
	cfg.Interval = 2 * time.Millisecond
	return cfg
}

// metric returns a counter's or gauge's value.
func (s *site) metric(t testing.TB, name string) float64 {
	t.Helper()
	families, err := s.reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		if f.GetName() == name {
			return f.GetMetric()[0].GetCounter().GetValue() + f.GetMetric()[0].GetGauge().GetValue()
		}
	}
	t.Fatalf("no metric %s", name)
	return 0
}

// eventually waits for a condition.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(patience); !ok(); <-time.After(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("it did not come to pass: ", what)
		}
	}
}
