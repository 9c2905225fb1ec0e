package main

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"kvstrata/bus"
	"kvstrata/connector"
	"kvstrata/connector/lmcache"
	"kvstrata/connector/redis"
	"kvstrata/connector/redis/redistest"
	"kvstrata/connector/store"
	"kvstrata/connector/transports"
	"kvstrata/event"
	"kvstrata/event/resident"
	"kvstrata/indexer/prefix"
	"kvstrata/publisher"
	"kvstrata/sim"
	"kvstrata/subscriber"
)

func silent() *slog.Logger { return slog.New(slog.DiscardHandler) }

// storeWorld is a bus with an index behind it.
type storeWorld struct {
	t     *testing.T
	url   string // of NATS
	bus   *bus.Bus
	index *prefix.Index
}

// background runs something until the test ends, or until the function that it returns is called.
func background(t *testing.T, run func(context.Context) error) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- run(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("run: %v", err)
		}
	})
	t.Cleanup(stop)
	return stop
}

func newStoreWorld(t *testing.T) *storeWorld {
	t.Helper()
	cfg := bus.DefaultServerConfig()
	cfg.Dir = t.TempDir()
	srv, err := bus.StartServer(cfg, silent())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(srv.Shutdown)
	w := &storeWorld{t: t, url: srv.URL()}
	w.bus = w.dial()
	w.index = prefix.New(prefix.DefaultConfig())
	background(t, subscriber.NewConsumer(subscriber.DefaultConsumerConfig(), w.bus, w.index, "test", silent(), nil).Run)
	return w
}

// dial returns a connection of its own, as another process would have it.
func (w *storeWorld) dial() *bus.Bus {
	w.t.Helper()
	cfg := bus.DefaultConfig()
	cfg.URL, cfg.LeaseTTL = w.url, time.Second
	b, err := bus.Dial(w.t.Context(), cfg, "test", silent())
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(b.Close)
	return b
}

// watch runs a watcher of a store on a connection.
func (w *storeWorld) watch(b *bus.Bus, spec storeSpec) (watcher *storeWatch, stop func()) {
	w.t.Helper()
	if err := spec.complete(); err != nil {
		w.t.Fatal(err)
	}
	watcher, err := newStoreWatch(spec, b, silent())
	if err != nil {
		w.t.Fatal(err)
	}
	return watcher, background(w.t, watcher.run)
}

const storeModel = "test/model"

func redisSpec(addr string) storeSpec {
	return storeSpec{
		format: "redis", ranks: 1, blockSize: 16, extra: connector.Extra{"url": json.RawMessage(`"redis://` + addr + `/0"`), "store_name": json.RawMessage(`"shelf"`)},
		source: event.Source{Cluster: event.DefaultCluster, Model: storeModel, Origin: event.Store},
	}
}

func lmSpec(addr string) storeSpec {
	spec := redisSpec(addr)
	spec.format, spec.dtype, spec.every = "lmcache", "float16", 200*time.Millisecond
	spec.extra = connector.Extra{
		"remote_url": json.RawMessage(`"lm://` + addr + `"`), "store_name": json.RawMessage(`"shelf"`), "chunk_size": json.RawMessage(`64`),
		"group_blocks": json.RawMessage(`4`), "chunk_hashes": json.RawMessage(`"engine"`),
	}
	return spec
}

var shelf = event.Source{Cluster: event.DefaultCluster, Model: storeModel, Instance: "shelf", Origin: event.Store}

// info returns what the index knows of the store.
func (w *storeWorld) info() prefix.SourceInfo {
	for _, info := range w.index.Sources() {
		if info.Source == shelf {
			return info
		}
	}
	return prefix.SourceInfo{}
}

// resident returns what the index has of the store; nothing while its publisher's newest life has not begun for it.
func (w *storeWorld) resident() map[event.BlockHash]event.PrefixHash {
	set := make(map[event.BlockHash]event.PrefixHash)
	for e := range w.index.Resident(shelf) {
		set[e.Hash] = e.Prefix
	}
	return set
}

// agrees waits until the store's source is live and the index has of it exactly what there is.
func (w *storeWorld) agrees(what string, there func() map[event.BlockHash]event.PrefixHash) {
	w.t.Helper()
	var want, got map[event.BlockHash]event.PrefixHash
	eventually(w.t, what, func() bool {
		want, got = there(), w.resident()
		info := w.info()
		return info.State == event.StateLive && info.Started && maps.Equal(want, got) && info.Digest.Differed == 0
	}, func() string {
		return fmt.Sprintf("%d blocks in the store, %d in the index; %+v", len(want), len(got), w.info())
	})
}

// inRedis returns the blocks that a server holds, by SCAN and the headers of the values.
func inRedis(t *testing.T, s *redistest.Server) map[event.BlockHash]event.PrefixHash {
	t.Helper()
	set := make(map[event.BlockHash]event.PrefixHash)
	for _, key := range strings.Fields(s.Do("KEYS", "kv:*")) {
		text := s.Do("GETRANGE", key, "0", "65535")
		size, err := strconv.Atoi(strings.TrimPrefix(s.Do("STRLEN", key), ":"))
		if err != nil || size == 0 {
			continue // gone since
		}
		h, _, err := redis.ParseHeader([]byte(text), int64(size))
		if err != nil {
			t.Fatalf("%s: %v", key, err)
		}
		for _, n := range h.Group.Blocks {
			set[n.Hash] = n.Prefix
		}
	}
	return set
}

// judged publishes an engine's events as its subscriber would.
type judged struct {
	stream *publisher.Stream
	set    *resident.Set
	next   event.Seq
	ledger event.Ledger
}

func (j *judged) Publish(b *event.Batch) error {
	own := *b
	own.First, own.Last, own.Way, own.Received = j.next, j.next, event.Live, event.UnixTime(time.Now())
	j.next++
	j.set.Judge(&own)
	j.ledger.Count(&own)
	j.stream.Publish(context.Background(), 1, &own, j.set.Digest())
	return j.tell()
}

func (j *judged) tell() error {
	return j.stream.Status(&event.Status{Epoch: 1, Seq: j.ledger.Last, State: event.StateLive, Digest: j.set.Digest(), Ledger: j.ledger.Clone()})
}

// engine runs a simulated engine with a connector.
func (w *storeWorld) engine(name string, spec storeSpec, pool int) *sim.Host {
	w.t.Helper()
	source := event.Source{Cluster: event.DefaultCluster, Model: storeModel, Instance: name, Origin: event.Engine}
	feed := &judged{stream: publisher.NewStream(publisher.DefaultStreamConfig(), w.bus, source, 1, silent()), set: resident.New(resident.DefaultConfig())}
	background(w.t, feed.stream.Run)
	if err := feed.tell(); err != nil {
		w.t.Fatal(err)
	}
	cfg := sim.DefaultEngineConfig()
	cfg.Name, cfg.PoolBlocks = name, pool
	e, err := sim.NewEngine(cfg, feed)
	if err != nil {
		w.t.Fatal(err)
	}
	text, err := json.Marshal(map[string]any{"kv_connector": spec.format, "kv_role": connector.Both, "kv_connector_extra_config": spec.extra})
	if err != nil {
		w.t.Fatal(err)
	}
	transfer, err := connector.ParseConfig(text)
	if err != nil {
		w.t.Fatal(err)
	}
	source.Origin = event.Connector
	pubCfg := publisher.DefaultNATSConfig()
	pubCfg.Stores = []string{"shelf"}
	events, err := publisher.NewNATS(pubCfg, w.bus, source, silent())
	if err != nil {
		w.t.Fatal(err)
	}
	kv := sim.DefaultKVConfig()
	kv.Factory, kv.Transfer, kv.Model, kv.Log = transports.Default(), transfer, storeModel, silent()
	kv.Events, kv.Records, kv.Stats = events, func(event.Records) {}, func(*connector.Stats) {}
	if err := e.Connect(kv); err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() {
		if err := e.Close(); err != nil {
			w.t.Error(err)
		}
	})
	background(w.t, events.Run)
	background(w.t, e.Run)
	steps := sim.DefaultFleetConfig()
	steps.Speed = 1000
	host := sim.NewHost(steps, e)
	background(w.t, func(ctx context.Context) error {
		return host.Run(ctx, sim.Clock{Began: time.Now(), Start: event.UnixTime(time.Now()), Speed: steps.Speed})
	})
	return host
}

// serve has an engine serve prompts of so many blocks, which share nothing.
func (w *storeWorld) serve(host *sim.Host, first uint32, prompts, blocks int) (all [][]uint32) {
	w.t.Helper()
	for i := range prompts {
		tokens := make([]uint32, 16*blocks)
		for k := range tokens {
			tokens[k] = (first+uint32(i))<<16 + uint32(k)
		}
		ctx, cancel := context.WithTimeout(w.t.Context(), patience)
		if _, err := host.Do(ctx, sim.Request{ID: fmt.Sprintf("%s-%d-%d", host.Name(), first, i), Prompt: tokens, Output: 1}); err != nil {
			w.t.Fatal(err)
		}
		cancel()
		all = append(all, tokens)
	}
	return all
}

// reach asks the index for a prompt, and returns the match of an engine.
func (w *storeWorld) reach(tokens []uint32, engine string) prefix.Match {
	w.t.Helper()
	answer, err := w.index.Lookup(&prefix.Request{Model: storeModel, Tokens: tokens})
	if err != nil {
		w.t.Fatal(err)
	}
	for _, m := range answer.Matches {
		if m.Source.Instance == engine && m.Source.Origin == event.Engine {
			return m
		}
	}
	w.t.Fatalf("no match of %s: %+v", engine, answer)
	return prefix.Match{}
}

// reaches waits until an engine reaches all of a prompt, some of it through the store alone.
func (w *storeWorld) reaches(tokens []uint32, engine string) {
	w.t.Helper()
	var m prefix.Match
	eventually(w.t, "the store's part of a prompt", func() bool {
		m = w.reach(tokens, engine)
		return m.Reach != nil && m.Reach.Tokens == len(tokens) && m.Tokens+m.Reach.Stores[0].Tokens == len(tokens) && m.Reach.Stores[0].Tokens > 0
	}, func() string { return fmt.Sprintf("%+v %+v", m, m.Reach) })
}

// Two engines save into one Redis; what they evicted themselves is answered from the store, whatever becomes of it.
func TestStoreOfRedis(t *testing.T) {
	s := redistest.Start(t)
	w := newStoreWorld(t)
	spec := redisSpec(s.Addr)
	spec.extra["group_blocks"] = json.RawMessage("4")
	watcher, _ := w.watch(w.bus, spec)
	a, b := w.engine("a", spec, 64), w.engine("b", spec, 64)
	there := func() map[event.BlockHash]event.PrefixHash { return inRedis(t, s) }
	prompts := w.serve(a, 1, 8, 16) // twice the pool
	w.serve(b, 100, 8, 16)
	eventually(t, "all groups in the store", func() bool { return s.Do("DBSIZE") == ":64" }, func() string { return s.Do("DBSIZE") })
	w.agrees("what was saved", there)
	w.reaches(prompts[0], "a")
	w.reaches(prompts[0], "b") // which never computed it
	answer := func() prefix.Match { return w.reach(prompts[0], "b") }
	if m := answer(); m.Tokens != 0 || len(m.Reach.Tiers) != 1 || m.Reach.Tiers[0].Tier != event.Storage || m.BlockSize != 16 {
		t.Errorf("%+v %+v", m, m.Reach)
	}
	registry := prometheus.NewRegistry()
	registry.MustRegister(watcher)
	if n, err := testutil.GatherAndCount(registry); err != nil || n != 7 || watcher.ready() != nil {
		t.Errorf("%d metrics, %v; ready: %v", n, err, watcher.ready())
	}

	s.Do("FLUSHALL")
	w.agrees("nothing, after FLUSHALL", there)
	eventually(t, "no part of the store", func() bool { return answer().Reach.Tokens == 0 }, func() string { return fmt.Sprintf("%+v", answer()) })
	w.serve(b, 200, 2, 16)
	w.agrees("what was saved since", there)
	s.Restart()
	w.agrees("nothing, after a restart", there)
	if len(w.resident()) > 0 {
		t.Errorf("%d blocks in an empty store", len(w.resident()))
	}
}

// A Redis that is full evicts; the index follows.
func TestStoreOfRedisEvicts(t *testing.T) {
	s := redistest.Start(t, "--maxmemory", "6mb", "--maxmemory-policy", "allkeys-lru")
	w := newStoreWorld(t)
	spec := redisSpec(s.Addr)
	spec.extra["group_blocks"] = json.RawMessage("4") // 128 KiB
	w.watch(w.bus, spec)
	a := w.engine("a", spec, 64)
	w.serve(a, 1, 24, 16) // 12 MiB
	w.agrees("what is left", func() map[event.BlockHash]event.PrefixHash { return inRedis(t, s) })
	if info := w.info(); info.Totals.Evicted == 0 || info.Totals.Stored <= uint64(len(w.resident())) {
		t.Errorf("nothing was evicted: %+v", info.Totals)
	}
}

// The watcher's connection breaks; then the lease is taken from its heir. The store changes all the time.
func TestStoreIsTakenOver(t *testing.T) {
	s := redistest.Start(t)
	w := newStoreWorld(t)
	spec := redisSpec(s.Addr)
	there := func() map[event.BlockHash]event.PrefixHash { return inRedis(t, s) }
	backend, groups := redisGroups(t, s.Addr, 40)
	saveGroups(t, backend, groups[:10])

	first := w.dial()
	w.watch(first, spec)
	w.agrees("the first watcher", there)
	fence := w.info().Fence
	second, stop := w.watch(w.dial(), spec)
	first.Close() // without a farewell; its lease runs out
	saveGroups(t, backend, groups[10:20])
	s.Do("DEL", backend.Key(&groups[3]))
	eventually(t, "the second watcher", func() bool { return w.info().Fence > fence }, func() string { return fmt.Sprintf("%+v", w.info()) })
	w.agrees("the second watcher", there)
	if w.info().Epoch != event.Epoch(w.info().Fence) {
		t.Errorf("%+v", w.info())
	}
	fence = w.info().Fence

	third, _ := w.watch(w.dial(), spec)
	w.loseLease()
	saveGroups(t, backend, groups[20:30])
	s.Do("DEL", backend.Key(&groups[4]))
	eventually(t, "a new life", func() bool { return w.info().Fence > fence }, func() string { return fmt.Sprintf("%+v", w.info()) })
	w.agrees("whoever is elected now", there)
	stop()
	eventually(t, "the third watcher", func() bool {
		third.mu.Lock()
		defer third.mu.Unlock()
		return third.teller != nil
	}, func() string { return fmt.Sprintf("%+v", w.info()) })
	saveGroups(t, backend, groups[30:])
	w.agrees("the third watcher", there)
	if err := second.ready(); err != nil {
		t.Errorf("a process that tells of nothing lacks nothing: %v", err)
	}
}

// loseLease takes the lease from whoever has it.
func (w *storeWorld) loseLease() {
	w.t.Helper()
	conn, err := nats.Connect(w.url)
	if err != nil {
		w.t.Fatal(err)
	}
	defer conn.Close()
	js, err := jetstream.New(conn)
	if err != nil {
		w.t.Fatal(err)
	}
	leases, err := js.KeyValue(w.t.Context(), bus.LeaseBucket)
	if err != nil {
		w.t.Fatal(err)
	}
	keys, err := leases.Keys(w.t.Context())
	if err != nil || len(keys) != 1 {
		w.t.Fatalf("leases %v, %v", keys, err)
	}
	value, err := json.Marshal(map[string]any{"holder": "another", "fence": 1})
	if err == nil {
		_, err = leases.Put(w.t.Context(), keys[0], value) // it runs out
	}
	if err != nil {
		w.t.Fatal(err)
	}
}

// redisGroups returns a store and groups of a chain.
func redisGroups(t *testing.T, addr string, n int) (*redis.Backend, []store.Group) {
	t.Helper()
	cfg := redis.DefaultConfig()
	cfg.Address, cfg.Connections = addr, 1
	b, err := redis.New(cfg, [32]byte{1, 2, 3}, 16, silent())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := b.Close(); err != nil {
			t.Error(err)
		}
	})
	groups := make([]store.Group, n)
	for i := range groups {
		for k := range uint64(4) {
			h := uint64(i)*4 + k + 1
			groups[i].Blocks = append(groups[i].Blocks, connector.Name{Hash: event.IntHash(h), Prefix: event.PrefixHash(h * 31)})
		}
		if i > 0 {
			groups[i].HasParent, groups[i].Parent = true, groups[i-1].Blocks[3]
		}
	}
	return b, groups
}

func saveGroups(t *testing.T, b *redis.Backend, groups []store.Group) {
	t.Helper()
	var items []store.Item
	for i := range groups {
		items = append(items, store.Item{Key: b.Key(&groups[i]), Group: &groups[i], Pieces: [][]byte{make([]byte, 100)}, Bytes: 100})
	}
	for i, err := range b.Put(t.Context(), items) {
		if err != nil {
			t.Fatalf("put group %d: %v", i, err)
		}
	}
}

// lmServer serves LMCache's protocol at an address; with none, at a free one.
func lmServer(t *testing.T, addr string, bytes int) (*lmcache.Server, string, func()) {
	t.Helper()
	cfg := lmcache.DefaultServerConfig()
	cfg.Bytes, cfg.MaxValue = bytes, bytes
	server, err := lmcache.NewServer(cfg, silent())
	if err != nil {
		t.Fatal(err)
	}
	var l net.Listener
	eventually(t, "the address", func() bool {
		l, err = net.Listen("tcp", addr)
		return err == nil
	}, func() string { return fmt.Sprint(err) })
	stop := background(t, func(ctx context.Context) error { return server.Run(ctx, l) })
	return server, l.Addr().String(), stop
}

// A store that tells nothing is told of by connectors, confirmed by asking, and swept.
func TestStoreOfLMCache(t *testing.T) {
	server, addr, stopServer := lmServer(t, "127.0.0.1:0", 4<<20) // 32 groups of 128 KiB
	w := newStoreWorld(t)
	spec := lmSpec(addr)
	watchBus := w.dial()
	_, stop := w.watch(watchBus, spec)
	a, b := w.engine("a", spec, 64), w.engine("b", spec, 64)
	probe, err := spec.sweeper(publisher.Null{}, nil, 0, silent())
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := probe.close(); err != nil {
			t.Error(err)
		}
	}()
	// same waits until the index has exactly the groups that the store answers for.
	same := func(what string) {
		t.Helper()
		eventually(t, what, func() bool {
			info, set := w.info(), w.resident()
			keys := server.Stats().Keys
			if info.State != event.StateLive || !info.Started || len(set) != 4*keys {
				return false
			}
			var groups []string
			for h := range set {
				groups = append(groups, probe.Key(&store.Group{Blocks: []connector.Name{{Hash: h}}}))
			}
			there, err := probe.backend.Exist(t.Context(), groups)
			n := 0
			for _, ok := range there {
				if ok {
					n++
				}
			}
			return err == nil && n == keys
		}, func() string {
			return fmt.Sprintf("%d blocks, store %+v, %+v", len(w.resident()), server.Stats(), w.info())
		})
	}
	prompts := w.serve(a, 1, 6, 16)
	same("what was saved")
	w.reaches(prompts[0], "a")
	w.reaches(prompts[0], "b")
	w.serve(b, 100, 8, 16) // more than the store takes
	eventually(t, "evictions", func() bool { return server.Stats().Evicted > 0 }, func() string { return fmt.Sprint(server.Stats()) })
	same("what is left")

	fence := w.info().Fence
	watchBus.Close() // as a process that was killed
	w.serve(a, 200, 2, 16)
	w.watch(w.dial(), spec)
	eventually(t, "another watcher", func() bool { return w.info().Fence > fence }, func() string { return fmt.Sprintf("%+v", w.info()) })
	same("another watcher")
	stop()

	stopServer()
	server, _, _ = lmServer(t, addr, 4<<20)
	same("nothing, after a restart")
	if len(w.resident()) > 0 {
		t.Errorf("%d blocks in an empty store", len(w.resident()))
	}
	w.serve(b, 300, 2, 16)
	same("what was saved since")
}

// A watcher that was killed and is started again finds the store as it is.
func TestStoreProcessIsKilled(t *testing.T) {
	s := redistest.Start(t, "--requirepass", "sesame")
	t.Setenv(storePassword, "sesame")
	cfg := redis.DefaultConfig()
	cfg.Address, cfg.PasswordEnv = s.Addr, storePassword
	b, err := redis.New(cfg, [32]byte{1}, 16, silent())
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	_, groups := redisGroups(t, s.Addr, 20)
	index := start(t, append([]string{"run", "--roles", "prefix", "--data", t.TempDir(), "--lease-ttl", "1s"}, anyPorts...)...)
	natsURL, url := index.says(`embedded at (\S+),`), index.says(`api +(http://\S+)`)
	watch := func() *process {
		return start(t, "run", "--roles", "store", "--nats", natsURL, "--lease-ttl", "1s", "--store", "redis://"+s.Addr, "--store-name", "shelf",
			"--store-model", storeModel, "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0")
	}
	blocks := func(want int) {
		t.Helper()
		var got string
		eventually(t, fmt.Sprintf("%d blocks in the index", want), func() bool {
			for _, info := range sources(t, url) {
				if info.Source == shelf && info.State == event.StateLive {
					got = fmt.Sprint(info.Resident)
					return slices.ContainsFunc(info.Resident, func(r prefix.TierInfo) bool { return r.Blocks == uint64(want) })
				}
			}
			return false
		}, func() string { return got + index.output() })
	}
	saveGroups(t, b, groups[:10])
	first := watch()
	blocks(40)
	kill(t, first.cmd.Process.Pid, syscall.SIGKILL)
	<-first.exited
	saveGroups(t, b, groups[10:])
	again := watch()
	blocks(80)
	if code, _ := again.interrupt(syscall.SIGTERM); code != exitOK {
		t.Errorf("exit %d\n%s", code, again.output())
	}
	if out := again.output(); strings.Contains(out, "sesame") {
		t.Error("the password is told")
	}
}

// What is wrong with a store's flags is said, and no password is repeated.
func TestStoreFlags(t *testing.T) {
	ok := storeFlags{Store: "redis://host:6379/0", StoreFormat: "auto", StoreModel: "m", StoreRanks: 1, StoreConfig: "{}", StoreBlockSize: 16, StoreDType: "float16"}
	tests := []struct {
		name   string
		change func(*storeFlags)
		want   string // instance, or part of the error
	}{
		{"redis", func(*storeFlags) {}, "redis://host:6379/0"},
		{"with a user", func(f *storeFlags) { f.Store = "rediss://reader@host" }, "rediss://host:6379/0"},
		{"lmcache", func(f *storeFlags) { f.Store, f.StoreConfig = "lm://host:65432", `{"chunk_hashes":"engine"}` }, "lm://host:65432"},
		{"named", func(f *storeFlags) { f.StoreName = "shelf" }, "shelf"},
		{"named as in the engines' configuration", func(f *storeFlags) { f.StoreConfig = `{"store_name":"shelf"}` }, "shelf"},
		{"nothing", func(f *storeFlags) { f.Store, f.StoreModel = "", "" }, "--store-model: missing"},
		{"a password", func(f *storeFlags) { f.Store = "redis://:sesame@host" }, "--store: holds a password"},
		{"no address", func(f *storeFlags) { f.Store = "redis://:sesame@host:x:y" }, "--store: want"},
		{"another store", func(f *storeFlags) { f.Store = "ftp://host" }, "want redis"},
		{"keys of tokens", func(f *storeFlags) { f.Store = "lm://host:1" }, "chunk_hashes"},
		{"an unknown key", func(f *storeFlags) { f.StoreConfig = `{"key_prefx":"x"}` }, "key_prefix"},
		{"ranks", func(f *storeFlags) { f.StoreRanks = 0 }, "ranks 0"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			f := ok
			tt.change(&f)
			spec, err := f.spec()
			got := spec.source.Instance
			if err != nil {
				got = err.Error()
			}
			if !strings.Contains(got, tt.want) || err == nil && got != tt.want {
				t.Errorf("%q, want %q", got, tt.want)
			}
			if strings.Contains(got, "sesame") {
				t.Errorf("%q tells the password", got)
			}
		})
	}
}
