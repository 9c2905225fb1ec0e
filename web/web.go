// Package web shows a fleet's live state in browsers: a hub that sends documents over WebSocket, aggregates of the event
// stream ([Rates], [Tail]) that feed it, and the embedded dashboard.
//
// What a browser gets is the present, not a log: a set of documents by key, and with each frame those that changed since
// the last frame that this browser got. Nothing is queued for anybody, so that a slow browser gets fewer frames and
// never older ones. docs/api.md has the frames and the documents.
package web

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"sync"
	"time"

	"github.com/gorilla/websocket"
	"github.com/prometheus/client_golang/prometheus"
)

// What collecting may cost, in documents a second. They bound what a browser is sent and what panels and marshalling
// take of a core, however many sources there are: a source's document is about 700 bytes.
const (
	changedPerSecond = 500
	putPerSecond     = 5000
)

// Config bounds a hub.
type Config struct {
	// Interval is the time between two ticks of the hub, and so between two frames that a client gets.
	Interval time.Duration
	// Stall is how long a client may take no byte of a frame before it is disconnected.
	Stall time.Duration
	// Ping is how often an idle client is asked whether it is there; one that is silent for two and a half of them is
	// disconnected.
	Ping time.Duration
	// MaxClients are served at once; others get 503.
	MaxClients int
	// Dashboard holds index.html and assets/; nil takes the one that was built into the binary.
	Dashboard fs.FS
}

// DefaultConfig sends at most ten frames a second to at most 500 browsers.
func DefaultConfig() Config {
	return Config{Interval: 100 * time.Millisecond, Stall: 5 * time.Second, Ping: 25 * time.Second, MaxClients: 500}
}

// Validate reports every problem at once.
func (c Config) Validate() error {
	var errs []error
	for _, d := range []struct {
		name  string
		value time.Duration
	}{{"interval", c.Interval}, {"stall", c.Stall}, {"ping", c.Ping}} {
		if d.value <= 0 {
			errs = append(errs, fmt.Errorf("web: %s %v: want more than 0", d.name, d.value))
		}
	}
	if c.MaxClients <= 0 {
		errs = append(errs, fmt.Errorf("web: clients %d: want at least 1", c.MaxClients))
	}
	return errors.Join(errs...)
}

// Panel gives a share of the documents.
//
// Collect puts every document of the panel each time; a key that it leaves out is deleted. It is called from the hub's
// goroutine, only while somebody watches, and holds up all frames until it returns. A document is marshalled before put
// returns; a [json.RawMessage] is taken as it is, and may be reused afterwards. A key belongs to the panel that put it
// first.
//
// Collect is called every max(Every, the hub's interval, documents that changed last time / 500 s, documents put last
// time / 5000 s).
type Panel struct {
	Every   time.Duration
	Collect func(now time.Time, put func(key string, doc any))
}

// Hub sends documents to browsers. Handler may be used, and its requests served, from any number of goroutines; Run is
// called once.
//
// Run's goroutine collects and makes versions. A connection has two goroutines, a reader (the HTTP server's) and a
// writer; both end with the connection, and when Run's context does, which waits for them.
type Hub struct {
	cfg       Config
	tail      *Tail
	log       *slog.Logger
	stats     *metrics
	dashboard *dashboard
	upgrader  websocket.Upgrader

	// Of Run's goroutine.
	panels   []*panel
	owners   map[string]*panel
	buffer   bytes.Buffer
	encoder  *json.Encoder
	warnedAt time.Time

	wake chan struct{} // there is a client again
	stop chan struct{} // closed when Run's context ends

	mu       sync.Mutex
	clients  map[*client]struct{}
	left     sync.WaitGroup // of clients
	running  bool
	resting  bool // nobody watched since state was collected, so it is old
	state    state
	ticked   chan struct{} // closed at the next tick
	finished bool
}

// New returns a hub of the panels' documents. Nothing is served before Run runs: clients get 503. tail may be nil: then
// no client can have one. The metrics are registered with reg, which may be nil.
func New(cfg Config, panels []Panel, tail *Tail, log *slog.Logger, reg prometheus.Registerer) (*Hub, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	files := cfg.Dashboard
	if files == nil {
		files = embedded()
	}
	dash, err := newDashboard(files)
	if err != nil {
		return nil, fmt.Errorf("load dashboard: %w", err)
	}
	h := &Hub{
		cfg: cfg, tail: tail, log: log, stats: newMetrics(), dashboard: dash,
		owners: make(map[string]*panel), clients: make(map[*client]struct{}), resting: true, state: newState(),
		ticked: make(chan struct{}), wake: make(chan struct{}, 1), stop: make(chan struct{}),
	}
	h.encoder = json.NewEncoder(&h.buffer)
	h.upgrader = websocket.Upgrader{
		HandshakeTimeout: cfg.Stall, EnableCompression: true, WriteBufferPool: &sync.Pool{}, ReadBufferSize: 1024,
		Error: refuseUpgrade,
	}
	for _, p := range panels {
		h.panels = append(h.panels, &panel{Panel: p, docs: make(map[string]*document)})
	}
	if reg != nil {
		if err := h.stats.register(reg, h.Clients); err != nil {
			return nil, fmt.Errorf("register web metrics: %w", err)
		}
	}
	return h, nil
}

// Clients returns how many browsers are connected.
func (h *Hub) Clients() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return len(h.clients)
}

// Run collects and sends until ctx ends; then it closes every connection, waits until their goroutines have ended, and
// returns nil.
func (h *Hub) Run(ctx context.Context) error {
	h.mu.Lock()
	if h.running || h.finished {
		h.mu.Unlock()
		return errors.New("web: Run was called twice")
	}
	h.running = true
	h.mu.Unlock()
	defer h.finish()

	ticker := time.NewTicker(h.cfg.Interval)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-h.wake:
			if h.rests() {
				h.tick(time.Now(), true)
				ticker.Reset(h.cfg.Interval)
			}
		case now := <-ticker.C:
			if !h.rest() {
				h.tick(now, false)
			} else {
				ticker.Stop() // until a client wakes it
			}
		}
	}
}

// finish ends every client: those that take what they are sent get a close frame.
func (h *Hub) finish() {
	h.mu.Lock()
	h.running, h.finished = false, true
	close(h.stop)
	for c := range h.clients {
		c.hurry()
	}
	h.mu.Unlock()
	h.left.Wait()
}

func (h *Hub) rests() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.resting
}

// rest stops collecting if nobody watches, and reports whether it did.
func (h *Hub) rest() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.clients) == 0 {
		h.resting = true
	}
	return h.resting
}

// join takes a client in, or says why not.
func (h *Hub) join(c *client) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	switch {
	case !h.running:
		return errors.New("the live socket is not served at the moment; try again")
	case len(h.clients) >= h.cfg.MaxClients:
		return fmt.Errorf("%d browsers are connected, which is the limit; close one, or raise the limit", len(h.clients))
	}
	h.clients[c] = struct{}{}
	h.left.Add(1)
	if h.resting {
		select {
		case h.wake <- struct{}{}:
		default:
		}
	}
	return nil
}

func (h *Hub) leave(c *client) {
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.clients, c)
	h.left.Done()
}

// next returns the frame that brings a client from a version (0: from nothing) to the present, nil when it is there,
// and a channel that is closed at the next tick.
func (h *Hub) next(version uint64) (*frame, <-chan struct{}, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.resting {
		return nil, h.ticked, nil
	}
	f, err := h.state.frame(version)
	return f, h.ticked, err
}

// tick asks the panels that are due (or all), makes a version of what changed, and tells the clients.
func (h *Hub) tick(now time.Time, all bool) {
	var changed []*document
	var removed []*document
	for _, p := range h.panels {
		if all || !now.Add(h.cfg.Interval/2).Before(p.due) {
			changed, removed = h.collect(p, now, changed, removed)
		}
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.state.advance(now, changed, removed)
	h.resting = false
	close(h.ticked)
	h.ticked = make(chan struct{})
}

// panel is a panel and what it last put. It belongs to Run's goroutine; documents' bodies and versions are shared with
// the state.
type panel struct {
	Panel
	docs  map[string]*document
	round uint64
	due   time.Time
}

// collect asks one panel, and appends what it changed.
func (h *Hub) collect(p *panel, now time.Time, changed, removed []*document) (_, _ []*document) {
	p.round++
	before := len(changed)
	p.Collect(now, func(key string, doc any) {
		d := p.docs[key]
		if d == nil {
			if h.owners[key] != nil {
				h.warn(now, "two panels put one document; the second is left out", key, nil)
				return
			}
			d = newDocument(key)
			p.docs[key], h.owners[key] = d, p
		}
		d.round = p.round
		body, err := h.marshal(doc)
		switch {
		case err != nil:
			h.warn(now, "document can't be marshalled; its last form stays", key, err)
		case bytes.Equal(body, d.body):
			d.next = nil
		default:
			d.next = bytes.Clone(body)
		}
	})
	for key, d := range p.docs {
		switch {
		case d.round != p.round:
			delete(p.docs, key)
			delete(h.owners, key)
			removed = append(removed, d)
		case d.next != nil:
			changed = append(changed, d)
		}
	}
	p.due = now.Add(max(p.Every, time.Second*time.Duration(len(changed)-before)/changedPerSecond,
		time.Second*time.Duration(len(p.docs))/putPerSecond))
	return changed, removed
}

// marshal returns a document's JSON, valid until the next call.
func (h *Hub) marshal(doc any) ([]byte, error) {
	if raw, ok := doc.(json.RawMessage); ok {
		return raw, nil
	}
	h.buffer.Reset()
	if err := h.encoder.Encode(doc); err != nil {
		return nil, err
	}
	return bytes.TrimSuffix(h.buffer.Bytes(), []byte("\n")), nil
}

// warn tells of a document that a panel got wrong, once a minute: it would come again every tick.
func (h *Hub) warn(now time.Time, what, key string, err error) {
	if now.Sub(h.warnedAt) < time.Minute {
		return
	}
	h.warnedAt = now
	h.log.Warn(what, "key", key, "err", err)
}
