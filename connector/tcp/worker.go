package tcp

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"kvstrata/connector"
	"kvstrata/connector/direct"
)

const (
	maxQueued  = 1 << 16 // loads that wait for their turn; above, they fail at once
	maxAwaited = 1024    // loads that wait for a producer that has not finished; above, they fail at once
	maxNotices = 1 << 16 // above, they are dropped and counted: the lease ends without them
	notifiers  = 4       // notices told at a time

	// pullWait is how long a producer lets a read wait for the metadata that tells it of the hold: that comes with its next
	// step, and the consumer may be faster.
	pullWait = 2 * time.Second
)

// Worker is the worker's half of the transport tcp.
type Worker struct {
	setup connector.Setup
	cfg   Config
	log   *slog.Logger

	endpoint *Endpoint
	cache    *connector.Cache
	queue    chan *load
	notices  chan direct.Remote
	beatNow  chan struct{}

	mu      sync.Mutex
	begin   []*load          // bound, to be started by StartLoad
	loads   map[string]*load // by request, those that have not ended
	waiting chan *load       // loads of producers that have not finished, on their way to be awaited
	ended   connector.Output
	stats   connector.Stats
	report  connector.Report
	held    map[string]bool        // requests that are held or sent: whether the engine has told them as finished
	recent  [2]map[string]struct{} // of other requests, those that it told last
	sent    map[string]struct{}    // requests that are sent, and not finished yet as far as was told
}

var _ connector.Worker = (*Worker)(nil)

// NewWorker makes the half.
func NewWorker(s connector.Setup) (connector.Worker, error) {
	if err := s.Validate(); err != nil {
		return nil, err
	}
	cfg, err := ReadConfig(s.Config.Extra)
	if err != nil {
		return nil, err
	}
	if cfg.Listen, err = listenAt(&s, cfg.Listen); err != nil {
		return nil, err
	}
	return &Worker{
		setup: s, cfg: cfg, log: s.Log, queue: make(chan *load, maxQueued), notices: make(chan direct.Remote, maxNotices),
		beatNow: make(chan struct{}, 1), loads: make(map[string]*load), waiting: make(chan *load, maxAwaited),
		held: make(map[string]bool), sent: make(map[string]struct{}), recent: [2]map[string]struct{}{{}, {}},
	}, nil
}

// listenAt returns where a rank listens: where listen says, or at kv_ip. Every rank has the same configuration, so a port
// that is told is the first rank's, and those of the others follow it.
func listenAt(s *connector.Setup, listen string) (string, error) {
	host, port := s.Config.IP, s.Config.Port
	if listen == "" {
		// Upstream's default port is the same on every host: it says nothing of where this worker is to be.
		if port == connector.DefaultConfig().Port {
			port = 0
		}
	} else {
		var text string
		var err error
		if host, text, err = net.SplitHostPort(listen); err == nil {
			port, err = strconv.Atoi(text)
		}
		if err != nil {
			return "", fmt.Errorf("listen %q: want host:port, the port a number", listen)
		}
	}
	if port > 0 {
		port += s.Rank
	}
	if port < 0 || port > 65535 {
		return "", fmt.Errorf("listen on port %d of rank %d: want 65535 at most", port, s.Rank)
	}
	return net.JoinHostPort(host, strconv.Itoa(port)), nil
}

// RegisterCaches takes the memory and binds the sockets.
func (w *Worker) RegisterCaches(c connector.Caches) error {
	cache, err := connector.NewCache(c)
	if err != nil {
		return err
	}
	if c.Rank != w.setup.Rank {
		return fmt.Errorf("register caches: rank %d instead of %d", c.Rank, w.setup.Rank)
	}
	e, err := New(w.cfg, Identity{
		Engine: w.setup.Config.EngineID, Rank: w.setup.Rank, Ranks: w.setup.Ranks, Cache: cache, Log: w.log, Now: w.setup.Now,
	})
	if err != nil {
		return err
	}
	if err := e.Listen(); err != nil {
		return err
	}
	w.cache, w.endpoint = cache, e
	return nil
}

// Endpoint returns the data plane; nil before RegisterCaches.
func (w *Worker) Endpoint() *Endpoint { return w.endpoint }

// Handshake tells where peers reach this worker.
func (w *Worker) Handshake() ([]byte, error) {
	if w.endpoint == nil {
		return nil, errors.New("handshake: no caches are registered")
	}
	host, port, err := net.SplitHostPort(w.endpoint.Address())
	if err != nil {
		return nil, fmt.Errorf("handshake: %w", err)
	}
	if ip := net.ParseIP(host); ip != nil && ip.IsUnspecified() {
		host = w.setup.Config.IP
	}
	return json.Marshal(direct.Handshake{Address: net.JoinHostPort(host, port)})
}

// Run serves peers and does loads until ctx has ended. Loads that are under way then are told as failed by nobody.
func (w *Worker) Run(ctx context.Context) error {
	if w.endpoint == nil {
		<-ctx.Done()
		return nil
	}
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return w.endpoint.Run(ctx) })
	g.Go(func() error { w.keep(ctx); return nil })
	g.Go(func() error { w.await(ctx); return nil })
	for range w.cfg.Parallel {
		g.Go(func() error { w.load(ctx); return nil })
	}
	for range notifiers {
		g.Go(func() error { w.notify(ctx); return nil })
	}
	return errors.Join(g.Wait(), w.cache.Close())
}

// Bind begins the holds of a step and notes its loads; their producers hear heartbeats from now on.
func (w *Worker) Bind(m connector.Metadata) {
	meta, ok := m.(*direct.Metadata)
	if !ok || w.endpoint == nil {
		return
	}
	for _, h := range meta.Holds {
		if err := w.endpoint.Export(h.Request, Blocks(w.cache, h.Blocks), 1); err != nil {
			w.log.Error("hold blocks for a consumer", "request", h.Request, "err", err)
			w.mu.Lock()
			w.sent[h.Request] = struct{}{} // nobody will fetch them: they are free
			w.mu.Unlock()
		}
		w.hold(h.Request)
	}
	for i := range meta.Notices {
		w.tell(meta.Notices[i])
	}
	for i := range meta.Loads {
		w.note(&meta.Loads[i])
	}
	for _, id := range meta.Cancels { // last: a load may be cancelled in the step that orders it
		w.cancel(id)
	}
}

// hold notes a request that is to be told as sent one day. The engine tells it as finished in the same step, as upstream
// does, or has told it before.
func (w *Worker) hold(request string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	finished := w.held[request]
	for _, recent := range w.recent {
		_, ok := recent[request]
		finished = finished || ok
		delete(recent, request)
	}
	w.held[request] = finished
}

// maxRecent bounds the finished requests that are remembered though nothing of them is held.
const maxRecent = 1 << 14

// noteFinished notes what the engine tells as finished. The worker's mu is held.
func (w *Worker) noteFinished(finished []string) {
	for _, id := range finished {
		if _, ok := w.held[id]; ok {
			w.held[id] = true
			continue
		}
		if len(w.recent[0]) >= maxRecent {
			w.recent[0], w.recent[1] = make(map[string]struct{}), w.recent[0]
		}
		w.recent[0][id] = struct{}{}
	}
}

// Clear forgets nothing: what Bind brought was taken over.
func (w *Worker) Clear() {}

// HandlePreemptions returns at once: only the blocks of requests that have finished are read.
func (w *Worker) HandlePreemptions(context.Context, []string) error { return nil }

// StartLoad queues the loads of the step.
func (w *Worker) StartLoad(context.Context) error {
	w.mu.Lock()
	begin := w.begin
	w.begin = nil
	w.mu.Unlock()
	queued := false
	for _, l := range begin {
		to := w.queue
		if l.order.Remote.Push {
			to = w.waiting
		}
		select {
		case to <- l:
			queued = true
		default:
			w.end(l, Result{Failed: all(len(l.order.Local)), Err: errors.New("too many loads are waiting")})
		}
	}
	if queued && len(w.queue)+len(w.waiting) > 0 {
		select {
		case w.beatNow <- struct{}{}:
		default:
		}
	}
	return nil
}

// WaitForLayer returns at once: loads go on between steps.
func (w *Worker) WaitForLayer(context.Context, string) error { return nil }

// SaveLayer returns at once: blocks are read where they are.
func (w *Worker) SaveLayer(context.Context, string) error { return nil }

// WaitForSave returns at once.
func (w *Worker) WaitForSave(context.Context) error { return nil }

// Collect returns what ended since the last call.
func (w *Worker) Collect(finished []string) *connector.Output {
	var done, expired []string
	if w.endpoint != nil {
		done, expired = w.endpoint.Ended()
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.noteFinished(finished)
	for _, id := range slices.Concat(done, expired) {
		w.sent[id] = struct{}{}
	}
	w.report.Expired = append(w.report.Expired, expired...)
	w.stats.ExpiredRequests += uint64(len(expired))
	for id := range w.sent {
		if w.held[id] {
			w.ended.FinishedSending = append(w.ended.FinishedSending, id)
			delete(w.sent, id)
			delete(w.held, id)
		}
	}
	if w.ended.Empty() && w.stats.Empty() && len(w.report.Done)+len(w.report.Expired) == 0 {
		return nil
	}
	out := new(connector.Output)
	*out, w.ended = w.ended, connector.Output{}
	slices.Sort(out.InvalidBlocks)
	out.InvalidBlocks = slices.Compact(out.InvalidBlocks)
	if !w.stats.Empty() {
		stats := w.stats
		stats.Ranks = 1
		out.Stats, w.stats = &stats, connector.Stats{}
	}
	if len(w.report.Done)+len(w.report.Expired) > 0 {
		report := w.report
		out.Metadata, w.report = &report, connector.Report{}
	}
	return out
}
