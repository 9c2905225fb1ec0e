package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"os"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"

	"kvstrata/bus"
	"kvstrata/connector"
	"kvstrata/connector/lmcache"
	"kvstrata/connector/redis"
	"kvstrata/connector/store"
	"kvstrata/event"
	"kvstrata/publisher"
	"kvstrata/server"
)

// storeFlags say which shared store the role store tells of.
type storeFlags struct {
	Store              string        `help:"The shared store of the role store: redis://host:port/db (or rediss, valkey, unix), or lm://host:port. Its password goes into --store-password-file or KVSTRATA_STORE_PASSWORD." placeholder:"URL" env:"KVSTRATA_STORE"`
	StoreFormat        string        `help:"What lies in it: redis (our own), lmcache, or auto: lmcache behind lm://." enum:"auto,redis,lmcache" default:"auto" env:"KVSTRATA_STORE_FORMAT"`
	StoreModel         string        `help:"The model whose blocks are told, as its engines serve it." placeholder:"NAME" env:"KVSTRATA_STORE_MODEL"`
	StoreCluster       string        `help:"The cluster of its engines." default:"default" env:"KVSTRATA_STORE_CLUSTER"`
	StoreName          string        `help:"What events call the store, the same as the connectors' store_name. Empty: where it is." placeholder:"NAME" env:"KVSTRATA_STORE_NAME"`
	StoreRanks         int           `help:"Tensor-parallel ranks: a block is stored when each has its part." default:"1" env:"KVSTRATA_STORE_RANKS"`
	StoreConfig        string        `help:"kv_connector_extra_config of the engines' connectors: key_prefix, tls, chunk_size and so on." default:"{}" placeholder:"JSON" env:"KVSTRATA_STORE_CONFIG"`
	StorePasswordFile  string        `help:"A file whose first line is the store's password." type:"path" env:"KVSTRATA_STORE_PASSWORD_FILE"`
	StoreCompatibility string        `help:"First 16 digits of the engines' compatibility hash, as keys have it; empty: of all engines (redis)." placeholder:"HEX" env:"KVSTRATA_STORE_COMPATIBILITY"`
	StoreBlockSize     int           `help:"Tokens a block (lmcache)." default:"16" env:"KVSTRATA_STORE_BLOCK_SIZE"`
	StoreDType         string        `name:"store-dtype" help:"Element type of the engines' caches (lmcache)." default:"float16" env:"KVSTRATA_STORE_DTYPE"`
	StoreMLA           bool          `name:"store-mla" help:"The model has MLA: every rank holds the same (lmcache)." env:"KVSTRATA_STORE_MLA"`
	StoreEvery         time.Duration `help:"Between comparisons with the store. 0: 5m for redis, which tells what changes, 10s for lmcache, which does not." default:"0s" env:"KVSTRATA_STORE_EVERY"`
}

// storePassword is the variable that may hold the store's password.
const storePassword = "KVSTRATA_STORE_PASSWORD"

// storeSpec is a shared store that is told of as a source of its own.
type storeSpec struct {
	format        string // redis or lmcache
	extra         connector.Extra
	source        event.Source
	ranks         int
	compatibility string
	blockSize     int
	dtype         string
	mla           bool
	every         time.Duration // 0 = the format's default
}

// spec returns the store that flags name.
func (f *storeFlags) spec() (storeSpec, error) {
	s := storeSpec{
		format: f.StoreFormat, ranks: f.StoreRanks, compatibility: f.StoreCompatibility, blockSize: f.StoreBlockSize, dtype: f.StoreDType,
		mla: f.StoreMLA, every: f.StoreEvery,
		source: event.Source{Cluster: f.StoreCluster, Model: f.StoreModel, Instance: f.StoreName, Origin: event.Store},
	}
	var errs []error
	if f.Store == "" {
		errs = append(errs, errors.New("--store: missing; the role store watches redis://host:port/db or lm://host:port"))
	}
	if f.StoreModel == "" {
		errs = append(errs, errors.New("--store-model: missing; name the model as its engines serve it"))
	}
	u, err := url.Parse(f.Store)
	if err != nil { // the error repeats it
		errs = append(errs, errors.New("--store: want redis://host:port/db or lm://host:port"))
	} else if _, secret := u.User.Password(); secret {
		errs = append(errs, fmt.Errorf("--store: holds a password; put it into --store-password-file or %s", storePassword))
	}
	if err := json.Unmarshal([]byte(f.StoreConfig), &s.extra); err != nil || s.extra == nil {
		errs = append(errs, errors.New("--store-config: want a JSON object"))
	}
	if err := errors.Join(errs...); err != nil {
		return s, usagef("%w", err)
	}
	if s.format == "auto" {
		s.format = map[bool]string{true: "lmcache", false: "redis"}[u.Scheme == "lm"]
	}
	f.locate(&s, u)
	if err := s.complete(); err != nil {
		return s, usagef("%w", err)
	}
	return s, nil
}

// locate enters the address, and where the password is.
func (f *storeFlags) locate(s *storeSpec, u *url.URL) {
	password, given := os.LookupEnv(storePassword)
	if s.format == "lmcache" {
		if given {
			u.User = url.UserPassword(u.User.Username(), password)
		}
		setExtra(s.extra, "remote_url", u.String())
		return
	}
	setExtra(s.extra, "url", f.Store)
	switch {
	case f.StorePasswordFile != "":
		setExtra(s.extra, "password_file", f.StorePasswordFile)
	case given:
		setExtra(s.extra, "password_env", storePassword)
	}
}

func setExtra(extra connector.Extra, key string, value any) {
	extra[key], _ = json.Marshal(value) // strings and numbers
}

// complete checks the store, and gives it its name.
func (s *storeSpec) complete() error {
	pub := publisher.Null{}
	w, err := s.watcher(pub, nil, 0, slog.New(slog.DiscardHandler))
	if err != nil {
		return err
	}
	family := store.DefaultConfig()
	if err := s.extra.Into(&family, append(append(store.Keys(), redis.Keys()...), lmcache.Keys()...)...); err != nil {
		return err
	}
	if s.source.Instance == "" {
		s.source.Instance = family.Name
	}
	if s.source.Instance == "" {
		s.source.Instance = w.Name()
	}
	return w.close()
}

// storyteller tells what a store holds, from nothing on.
type storyteller interface {
	Name() string
	// Run tells until ctx ends. It is called once.
	Run(ctx context.Context) error
	// state is how far what was told is what the store holds.
	state() (event.State, string)
	counts() storeCounts
	close() error // where Run is not called
}

// storeCounts are what the metrics show of a store.
type storeCounts struct {
	groups              int
	reconciled, dropped uint64
}

// watcher makes who tells of the store.
func (s *storeSpec) watcher(pub publisher.EventPublisher, b *bus.Bus, fence event.Fence, log *slog.Logger) (storyteller, error) {
	if s.format == "lmcache" {
		return s.sweeper(pub, b, fence, log)
	}
	cfg, err := redis.FromExtra(s.extra)
	if err != nil {
		return nil, err
	}
	watch := redis.DefaultWatchConfig()
	watch.Ranks, watch.Compatibility = s.ranks, s.compatibility
	if s.every > 0 {
		watch.Reconcile = s.every
	}
	w, err := redis.NewWatcher(cfg, watch, pub, log)
	if err != nil {
		return nil, err
	}
	return redisTeller{w}, nil
}

// redisTeller is told by the server itself.
type redisTeller struct{ *redis.Watcher }

func (w redisTeller) state() (event.State, string) {
	if !w.Ready() {
		return event.StateRecovering, "not compared with the store since it was last lost"
	}
	return event.StateLive, ""
}

func (w redisTeller) counts() storeCounts {
	return storeCounts{groups: w.Groups(), reconciled: w.Reconciled(), dropped: w.Dropped()}
}

func (redisTeller) close() error { return nil }

func pauseFor(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-timer.C:
	}
}

// storeWatch is the role store: of all processes that have it for one store, the one with the source's lease tells the store's
// story. Each that is elected begins a new life of the source with nothing, and tells everything that it finds in the store:
// until that is done the source is recovering.
type storeWatch struct {
	spec   storeSpec
	bus    *bus.Bus
	holder string
	log    *slog.Logger

	mu      sync.Mutex
	teller  storyteller // nil while another process is elected
	pub     *publisher.NATS
	ended   storeCounts // of terms that are over
	elected uint64
}

// staleAfter is how long a store may go without being found as it was told, before it is left out of lookups.
const staleAfter = time.Minute

func newStoreWatch(spec storeSpec, b *bus.Bus, log *slog.Logger) (*storeWatch, error) {
	host, err := os.Hostname()
	if err != nil {
		return nil, err
	}
	return &storeWatch{spec: spec, bus: b, holder: fmt.Sprintf("%s/%d", host, os.Getpid()), log: log.With("store", spec.source.Instance)}, nil
}

// run is elected again and again until ctx ends.
func (w *storeWatch) run(ctx context.Context) error {
	for ctx.Err() == nil {
		err := w.term(ctx)
		var config *redis.ConfigError
		switch {
		case ctx.Err() != nil:
			return nil
		case errors.As(err, &config):
			return err
		case errors.Is(err, bus.ErrLeaseLost):
			w.log.Warn("another process tells of the store from now on", "err", err)
		default:
			w.log.Warn("telling of the store was interrupted", "err", err)
		}
		pauseFor(ctx, time.Second)
	}
	return nil
}

// term waits for the lease, and tells of the store until ctx ends or the lease is lost.
func (w *storeWatch) term(ctx context.Context) error {
	lease, err := w.bus.Acquire(ctx, w.spec.source, w.holder)
	if err != nil {
		return err
	}
	cfg := publisher.DefaultNATSConfig()
	cfg.Judge.AsSet, cfg.Fence = true, lease.Fence // a store has a block, or has it not
	cfg.State = w.state(time.Now())
	pub, err := publisher.NewNATS(cfg, w.bus, w.spec.source, w.log)
	if err != nil {
		return err
	}
	teller, err := w.spec.watcher(pub, w.bus, lease.Fence, w.log)
	if err != nil {
		return err
	}
	w.log.Info("this process tells of the store from now on", "fence", lease.Fence)
	defer w.begin(teller, pub)()
	// With the first batch consumers forget what the life before held, however long the first comparison takes.
	begin := event.Batch{Time: event.UnixTime(time.Now()), Rank: -1, Events: []event.Event{{
		Kind: event.Cleared, Cause: event.ByResync, Group: event.NoGroup, LoRAID: event.NoLoRAID,
	}}}
	if err := pub.Publish(&begin); err != nil {
		return err
	}
	group, termCtx := errgroup.WithContext(ctx)
	pubCtx, stopPub := context.WithCancel(context.WithoutCancel(ctx))
	defer stopPub()
	group.Go(func() error { return lease.Keep(termCtx) })
	group.Go(func() error { return pub.Run(pubCtx) })
	group.Go(func() error {
		defer stopPub() // behind everything that was told
		if err := teller.Run(termCtx); err != nil {
			return err
		}
		return context.Cause(termCtx)
	})
	err = group.Wait()
	release, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
	defer cancel()
	if !errors.Is(err, bus.ErrLeaseLost) {
		err = errors.Join(err, lease.Release(release))
	}
	return err
}

// begin notes whose term it is; the function that it returns ends it.
func (w *storeWatch) begin(t storyteller, pub *publisher.NATS) (end func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.teller, w.pub = t, pub
	w.elected++
	return func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		c := t.counts()
		w.ended.reconciled += c.reconciled
		w.ended.dropped += c.dropped
		w.teller, w.pub = nil, nil
	}
}

// state returns what the publisher asks for: the teller's state, which is stale when the store has been out of sight too long.
func (w *storeWatch) state(since time.Time) func() (event.State, string) {
	return func() (event.State, string) {
		w.mu.Lock()
		t := w.teller
		w.mu.Unlock()
		if t == nil {
			return event.StateRecovering, "not begun"
		}
		state, reason := t.state()
		if state != event.StateRecovering {
			since = time.Now()
		} else if time.Since(since) > staleAfter {
			return event.StateStale, reason
		}
		return state, reason
	}
}

// ready says what is missing. A process that waits for its election lacks nothing.
func (w *storeWatch) ready() error {
	w.mu.Lock()
	t := w.teller
	w.mu.Unlock()
	if t == nil {
		return nil
	}
	if state, reason := t.state(); state == event.StateRecovering {
		return errors.New(reason)
	}
	return nil
}

// Describe names the metrics.
func (w *storeWatch) Describe(ch chan<- *prometheus.Desc) { prometheus.DescribeByCollect(w, ch) }

// Collect reads what is told now, and what was.
func (w *storeWatch) Collect(ch chan<- prometheus.Metric) {
	w.mu.Lock()
	t, pub, sum, elected := w.teller, w.pub, w.ended, w.elected
	w.mu.Unlock()
	var up, tells, blocks float64
	if t != nil {
		tells, blocks = 1, float64(pub.Blocks())
		c := t.counts()
		sum.groups, sum.reconciled, sum.dropped = c.groups, sum.reconciled+c.reconciled, sum.dropped+c.dropped
		if state, _ := t.state(); state != event.StateRecovering {
			up = 1
		}
	}
	put := func(name, help string, kind prometheus.ValueType, v float64) {
		desc := prometheus.NewDesc("kvstrata_store_"+name, help, nil, prometheus.Labels{"store": w.spec.source.Instance, "model": w.spec.source.Model})
		ch <- prometheus.MustNewConstMetric(desc, kind, v)
	}
	put("up", "1 while this process tells of the store, and the store is as it was told.", prometheus.GaugeValue, up)
	put("elected", "1 while this process tells of the store.", prometheus.GaugeValue, tells)
	put("groups", "Groups of blocks in the store, of one rank or of all.", prometheus.GaugeValue, float64(sum.groups))
	put("blocks", "Blocks in the store, as was told.", prometheus.GaugeValue, blocks)
	put("elections_total", "How often this process was elected.", prometheus.CounterValue, float64(elected))
	put("reconciliations_total", "Comparisons with the store as a whole.", prometheus.CounterValue, float64(sum.reconciled))
	put("dropped_total", "Notifications, or groups to watch, for which there was no room.", prometheus.CounterValue, float64(sum.dropped))
}

// addStore adds the role store.
func (s *stack) addStore(spec storeSpec) error {
	w, err := newStoreWatch(spec, s.bus, s.app.log)
	if err != nil {
		return err
	}
	if err := s.registry.Register(w); err != nil {
		return fmt.Errorf("register store metrics: %w", err)
	}
	s.ready = append(s.ready, server.Ready{Name: "store", Check: w.ready})
	s.runs = append(s.runs, w.run)
	return nil
}
