package redis

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"kvstrata/event"
)

// Publisher takes the watcher's batches. It is called by one goroutine at a time, must not wait on a network, and may not
// keep the batch.
type Publisher interface {
	Publish(b *event.Batch) error
}

// WatchConfig says what a [Watcher] watches.
type WatchConfig struct {
	Ranks         int           // tensor-parallel ranks: a block is stored when each has its part
	Compatibility string        // first 16 hexadecimal digits of the engines' compatibility hash; empty = of all engines
	Reconcile     time.Duration // between comparisons with the store in any case: notifications come at most once
	Topology      time.Duration // between looks at who is in the cluster
}

// DefaultWatchConfig returns one rank, all engines, a comparison every five minutes.
func DefaultWatchConfig() WatchConfig {
	return WatchConfig{Ranks: 1, Reconcile: 5 * time.Minute, Topology: 10 * time.Second}
}

// Validate returns every problem at once.
func (c *WatchConfig) Validate() error {
	var errs []error
	if c.Ranks < 1 || c.Ranks > 1<<12 {
		errs = append(errs, fmt.Errorf("ranks %d: want 1 to %d", c.Ranks, 1<<12))
	}
	if _, ok := parseKey("kv:" + c.Compatibility + ":0:00"); c.Compatibility != "" && !ok {
		errs = append(errs, fmt.Errorf("compatibility %q: want 16 hexadecimal digits", c.Compatibility))
	}
	if c.Reconcile < time.Second || c.Topology < 10*time.Millisecond {
		errs = append(errs, fmt.Errorf("reconcile %v, topology %v: want 1s and 10ms or more", c.Reconcile, c.Topology))
	}
	return errors.Join(errs...)
}

const (
	queueNotices = 1 << 16 // changes of keys that wait; beyond it the store is compared as a whole
	roundNotices = 512     // that are looked up at once
	batchEvents  = 256     // events of a batch
	retryAfter   = 200 * time.Millisecond
)

// Watcher tells a store's story as a source of its own: the blocks in it and those that leave it, from the server's own
// notifications, compared with the store as a whole at the start and whenever one may have been missed. There must be one
// watcher a store and model; who it is, is decided elsewhere.
type Watcher struct {
	cfg    WatchConfig
	server endpoint
	match  string // what keys begin with
	pub    Publisher
	log    *slog.Logger

	catalog *Catalog // Run's
	ready   atomic.Bool
	dropped atomic.Uint64
	scans   atomic.Uint64
	groups  atomic.Int64 // of the catalog
}

// NewWatcher returns a watcher of the store that a backend with the same configuration uses. Nothing happens before Run.
func NewWatcher(cfg Config, watch WatchConfig, pub Publisher, log *slog.Logger) (*Watcher, error) {
	if err := watch.Validate(); err != nil {
		return nil, fmt.Errorf("watch redis store: %w", err)
	}
	server, err := cfg.endpoint()
	if err != nil {
		return nil, fmt.Errorf("watch redis store: %w", err)
	}
	match := cfg.KeyPrefix + ":"
	if watch.Compatibility != "" {
		match += watch.Compatibility + ":"
	}
	return &Watcher{cfg: watch, server: server, match: match, pub: pub, log: log, catalog: NewCatalog(watch.Ranks)}, nil
}

// Name returns the server's address without secrets.
func (w *Watcher) Name() string { return w.server.name() }

// Ready reports whether what was published is what the store holds, as far as the server has told: every node is subscribed
// to, and was compared since.
func (w *Watcher) Ready() bool { return w.ready.Load() }

// Dropped returns how many notifications found no room; each time the store was compared as a whole.
func (w *Watcher) Dropped() uint64 { return w.dropped.Load() }

// Groups returns how many groups the store holds, each rank's counted.
func (w *Watcher) Groups() int { return int(w.groups.Load()) }

// Reconciled returns how often the store was compared as a whole.
func (w *Watcher) Reconciled() uint64 { return w.scans.Load() }

// Run watches until ctx ends. It connects again when it has to; a server that sends no notifications and may not be told to
// ends it with a [*ConfigError], and so does an error of the publisher.
func (w *Watcher) Run(ctx context.Context) error {
	defer w.ready.Store(false)
	for backoff := firstBackoff; ctx.Err() == nil; {
		all, err := w.masters(ctx, nil)
		if err == nil {
			backoff = firstBackoff
			if err := w.watch(ctx, all); err != nil {
				return fmt.Errorf("watch %s: %w", w.Name(), err)
			}
			continue
		}
		if ctx.Err() == nil {
			w.log.Warn("cannot reach the store", "store", w.Name(), "err", err)
		}
		pause(ctx, backoff)
		backoff = min(2*backoff, lastBackoff)
	}
	return nil
}

func pause(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-timer.C:
	}
}

// masters returns the nodes to watch, sorted; one without ranges outside a cluster. It asks the configured one, then those
// that were known.
func (w *Watcher) masters(ctx context.Context, known []master) ([]master, error) {
	ctx, cancel := context.WithTimeout(ctx, w.server.timeout)
	defer cancel()
	all, err := w.server.masters(ctx, w.server.address)
	for i := 0; err != nil && i < len(known); i++ {
		all, err = w.server.masters(ctx, known[i].address)
	}
	if err != nil {
		return nil, errors.New(w.server.hide(err.Error()))
	}
	if all == nil {
		return []master{{address: w.server.address}}, nil
	}
	slices.SortFunc(all, func(a, b master) int { return compareText(a.address, b.address) })
	return all, nil
}

func compareText(a, b string) int {
	switch {
	case a < b:
		return -1
	case a > b:
		return 1
	default:
		return 0
	}
}

// watched is the nodes that are watched as long as they stay the same.
type watched struct {
	masters []master
	feeds   []*feed
	queue   chan notice   // bounded; a feed that finds no room drops, and is lost
	wake    chan struct{} // told when a feed is lost
}

// notice is a change of a key.
type notice struct {
	key string
	set bool // or gone
}

// watch follows nodes until they are others, ctx ends, or something cannot go on.
func (w *Watcher) watch(ctx context.Context, all []master) error {
	group, ctx := errgroup.WithContext(ctx)
	over := errors.New("other nodes")
	n := &watched{masters: all, queue: make(chan notice, queueNotices), wake: make(chan struct{}, 1)}
	for i := range all {
		n.feeds = append(n.feeds, newFeed(w, n, all[i].address))
	}
	for _, f := range n.feeds {
		group.Go(func() error { return f.run(ctx) })
	}
	group.Go(func() error {
		for _, f := range n.feeds {
			defer f.client.Close()
		}
		return w.own(ctx, n, over)
	})
	if err := group.Wait(); !errors.Is(err, over) {
		return err
	}
	return nil
}

// own is the goroutine that owns the catalog.
func (w *Watcher) own(ctx context.Context, n *watched, over error) error {
	compare, look := time.NewTicker(w.cfg.Reconcile), time.NewTicker(w.cfg.Topology)
	defer compare.Stop()
	defer look.Stop()
	round := make([]notice, 0, roundNotices)
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-n.wake:
		case <-compare.C:
			for _, f := range n.feeds {
				f.lose()
			}
		case <-look.C:
			if len(n.masters[0].ranges) == 0 {
				continue
			}
			now, err := w.masters(ctx, n.masters)
			if err == nil && !slices.EqualFunc(now, n.masters, func(a, b master) bool {
				return a.address == b.address && slices.Equal(a.ranges, b.ranges)
			}) {
				w.log.Info("the cluster has changed", "store", w.Name(), "nodes", len(now))
				return over
			}
			continue
		case first := <-n.queue:
			round = append(round[:0], first)
			for more := true; more && len(round) < cap(round); {
				select {
				case next := <-n.queue:
					round = append(round, next)
				default:
					more = false
				}
			}
			if err := w.follow(ctx, n, round); err != nil {
				w.stumble(ctx, n, err)
			}
		}
		if n.lost() {
			if err := w.reconcile(ctx, n); err != nil {
				w.stumble(ctx, n, err)
			}
		}
		if err := w.publish(); err != nil {
			return err
		}
		w.ready.Store(n.live())
	}
}

// stumble handles an error of a server: everything is compared again, after a while.
func (w *Watcher) stumble(ctx context.Context, n *watched, err error) {
	if ctx.Err() != nil {
		return
	}
	w.log.Warn("cannot read the store; comparing again", "store", w.Name(), "err", w.server.hide(err.Error()))
	pause(ctx, retryAfter)
	for _, f := range n.feeds {
		f.lose()
	}
}

// publish tells what happened.
func (w *Watcher) publish() error {
	w.groups.Store(int64(w.catalog.Len()))
	for part := range slices.Chunk(w.catalog.Events(), batchEvents) {
		b := event.Batch{Time: event.UnixTime(time.Now()), Way: event.Live, Rank: -1, Events: part}
		if err := w.pub.Publish(&b); err != nil {
			return fmt.Errorf("publish %d events: %w", len(part), err)
		}
	}
	return nil
}

// follow applies changes in the order in which they were told. What a key holds is looked up now: when it is gone already,
// the notice that says so is still to come.
func (w *Watcher) follow(ctx context.Context, n *watched, round []notice) error {
	var keys []string
	for _, c := range round {
		if c.set {
			keys = append(keys, c.key)
		}
	}
	slices.Sort(keys)
	entries, err := w.entries(ctx, n, slices.Compact(keys))
	if err != nil {
		return err
	}
	for _, c := range round {
		w.apply(c.key, c.set, entries)
	}
	return nil
}

func (w *Watcher) apply(key string, set bool, entries map[string]*Entry) {
	if e := entries[key]; set && e != nil {
		w.catalog.Put(key, *e)
	} else {
		w.catalog.Remove(key)
	}
}

// reconcile compares the catalog with the store. Who was lost is live from before the scan: what happens since waits in the
// queue, and what waited in it before is in the scan. Keys of nodes that cannot be asked now stay as they are.
func (w *Watcher) reconcile(ctx context.Context, n *watched) error {
	w.ready.Store(false)
	for range len(n.queue) {
		<-n.queue
	}
	asked := make([]bool, len(n.feeds))
	for i, f := range n.feeds {
		asked[i] = f.find()
	}
	there := make(map[string]int64)
	for i, f := range n.feeds {
		if asked[i] {
			if err := f.scan(ctx, w.match, there); err != nil {
				return err
			}
		}
	}
	for _, key := range w.catalog.Keys() {
		if i := n.nodeOf(key); i >= 0 && !asked[i] {
			there[key], _ = w.catalog.Value(key)
		}
	}
	ask := w.catalog.Reconcile(there)
	entries, err := w.entries(ctx, n, ask)
	if err != nil {
		return err
	}
	for _, key := range parentsFirst(ask, entries) {
		w.apply(key, true, entries)
	}
	w.scans.Add(1)
	w.log.Debug("compared with the store", "store", w.Name(), "keys", w.catalog.Len(), "read", len(ask))
	return nil
}

// nodeOf returns which node has a key, −1 when none does.
func (n *watched) nodeOf(key string) int {
	if len(n.masters[0].ranges) == 0 {
		return 0
	}
	slot := slotOf(key)
	for i := range n.masters {
		for _, r := range n.masters[i].ranges {
			if slot >= r[0] && slot <= r[1] {
				return i
			}
		}
	}
	return -1
}

// lost reports whether a node has to be compared.
func (n *watched) lost() bool {
	return slices.ContainsFunc(n.feeds, func(f *feed) bool { return f.state.Load() == feedLost })
}

// live reports whether every node is subscribed to and was compared since.
func (n *watched) live() bool {
	return !slices.ContainsFunc(n.feeds, func(f *feed) bool { return f.state.Load() != feedLive })
}

// entries reads what keys hold. Those that hold nothing of ours are left out.
func (w *Watcher) entries(ctx context.Context, n *watched, keys []string) (map[string]*Entry, error) {
	entries := make(map[string]*Entry, len(keys))
	byNode := make([][]string, len(n.feeds))
	for _, key := range keys {
		if i := n.nodeOf(key); i >= 0 {
			byNode[i] = append(byNode[i], key)
		}
	}
	for i, keys := range byNode {
		if err := n.feeds[i].entries(ctx, keys, entries); err != nil {
			return nil, err
		}
	}
	return entries, nil
}
