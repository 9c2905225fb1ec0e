package redis_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"kvstrata/connector/redis"
	"kvstrata/connector/redis/redistest"
	"kvstrata/connector/store"
	"kvstrata/event"
	"kvstrata/event/resident"
)

// listener is a publisher that keeps the set of blocks that its events come to, and holds each to the contract: STORED for
// what is not there, EVICTED for what is. The judge of every source agrees.
type listener struct {
	mu      sync.Mutex
	judge   *resident.Set
	set     map[event.BlockHash]event.PrefixHash
	stored  []event.Event
	evicted int
	wrong   []string
	hold    chan struct{} // when not nil, Publish waits for it to be closed
}

func (l *listener) Publish(b *event.Batch) error {
	l.mu.Lock()
	hold := l.hold
	l.mu.Unlock()
	if hold != nil {
		<-hold
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if b.Rank != -1 || b.Time == 0 || len(b.Events) == 0 {
		l.wrong = append(l.wrong, fmt.Sprintf("batch of rank %d, time %d, %d events", b.Rank, b.Time, len(b.Events)))
	}
	l.judge.Judge(b)
	for _, ev := range b.Events {
		if ev.Tier != event.Storage {
			l.wrong = append(l.wrong, fmt.Sprintf("tier %q", ev.Tier))
		}
		if ev.Kind == event.Stored {
			l.stored = append(l.stored, ev)
		}
		for _, bl := range ev.Blocks {
			if bl.Effect == 0 || bl.Prefix == 0 {
				l.wrong = append(l.wrong, fmt.Sprintf("%v of %v is judged %d, under the name %v", ev.Kind, bl.Hash, bl.Effect, bl.Prefix))
			}
			_, there := l.set[bl.Hash]
			switch {
			case ev.Kind == event.Stored && !there:
				l.set[bl.Hash] = bl.Prefix
			case ev.Kind == event.Evicted && there:
				if l.set[bl.Hash] != bl.Prefix {
					l.wrong = append(l.wrong, fmt.Sprintf("%v evicted under another name", bl.Hash))
				}
				delete(l.set, bl.Hash)
				l.evicted++
			default:
				l.wrong = append(l.wrong, fmt.Sprintf("%v of %v", ev.Kind, bl.Hash))
			}
		}
	}
	return nil
}

func (l *listener) size() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.set)
}

func (l *listener) check(t *testing.T) {
	t.Helper()
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, w := range l.wrong {
		t.Error(w)
	}
	if odd := l.judge.Oddities(); odd != nil || l.judge.Blocks() != uint64(len(l.set)) {
		t.Errorf("judged: %d blocks, want %d; %v", l.judge.Blocks(), len(l.set), odd)
	}
}

// watch starts a watcher and returns once it is ready.
func watch(t *testing.T, addr string, change func(*redis.Config, *redis.WatchConfig)) (*redis.Watcher, *listener) {
	t.Helper()
	cfg, wc := redis.DefaultConfig(), redis.DefaultWatchConfig()
	cfg.Address = addr
	if change != nil {
		change(&cfg, &wc)
	}
	l := &listener{set: make(map[event.BlockHash]event.PrefixHash), judge: resident.New(resident.DefaultConfig())}
	w, err := redis.NewWatcher(cfg, wc, l, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- w.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("run: %v", err)
		}
		l.check(t)
	})
	await(t, "the watcher to be ready", w.Ready)
	return w, l
}

// names are the blocks of those groups whose keys are on one of the servers.
func names(b *redis.Backend, groups []store.Group, servers ...*redistest.Server) map[event.BlockHash]event.PrefixHash {
	set := make(map[event.BlockHash]event.PrefixHash)
	for i := range groups {
		for _, s := range servers {
			if s.Do("EXISTS", b.Key(&groups[i])) == ":1" {
				for _, n := range groups[i].Blocks {
					set[n.Hash] = n.Prefix
				}
			}
		}
	}
	return set
}

// same waits until what a listener heard comes to what the store holds.
func same(t *testing.T, l *listener, want func() map[event.BlockHash]event.PrefixHash) {
	t.Helper()
	await(t, "events to come to what the store holds", func() bool {
		w := want()
		l.mu.Lock()
		defer l.mu.Unlock()
		if len(w) != len(l.set) {
			return false
		}
		for h, p := range w {
			if got, ok := l.set[h]; !ok || got != p {
				return false
			}
		}
		return true
	})
}

func TestWatcherTellsWhatIsStored(t *testing.T) {
	s := redistest.Start(t)
	b := open(t, s.Addr, func(c *redis.Config) { c.Connections = 1 }) // the server gets groups in order
	groups := chain(5, 3, 4)
	for i := range groups {
		groups[i].LoRA = "poet"
	}
	all := items(b, 1, groups, 1000)
	put(t, b, all[:1]) // before the watcher
	_, l := watch(t, s.Addr, nil)
	put(t, b, all[1:])
	put(t, b, all) // once more: nothing new
	same(t, l, func() map[event.BlockHash]event.PrefixHash { return names(b, groups, s) })
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.stored) != 3 {
		t.Fatalf("%d STORED events, want one a group", len(l.stored))
	}
	for i, ev := range l.stored {
		g := groups[i]
		if ev.BlockSize != blockTokens || ev.LoRA != "poet" || ev.HasParent != g.HasParent || ev.HasParent && ev.Parent != g.Parent.Hash || len(ev.Blocks) != 4 {
			t.Errorf("event %d: %+v", i, ev)
		}
		for k, bl := range ev.Blocks {
			if bl.Hash != g.Blocks[k].Hash || bl.Prefix != g.Blocks[k].Prefix {
				t.Errorf("event %d, block %d: %+v", i, k, bl)
			}
		}
	}
}

func TestWatcherTellsWhatIsGone(t *testing.T) {
	for name, remove := range map[string]func(s *redistest.Server, key string){
		"DEL":      func(s *redistest.Server, key string) { s.Do("DEL", key) },
		"UNLINK":   func(s *redistest.Server, key string) { s.Do("UNLINK", key) },
		"expiry":   func(s *redistest.Server, key string) { s.Do("PEXPIRE", key, "1") },
		"RENAME":   func(s *redistest.Server, key string) { s.Do("RENAME", key, "elsewhere") },
		"MOVE":     func(s *redistest.Server, key string) { s.Do("MOVE", key, "1") },
		"SET":      func(s *redistest.Server, key string) { s.Do("SET", key, "something else") },
		"APPEND":   func(s *redistest.Server, key string) { s.Do("APPEND", key, "too long") },
		"FLUSHALL": func(s *redistest.Server, _ string) { s.Do("FLUSHALL") },
		"FLUSHDB":  func(s *redistest.Server, _ string) { s.Do("FLUSHDB", "ASYNC") },
	} {
		t.Run(name, func(t *testing.T) {
			s := redistest.Start(t)
			b := open(t, s.Addr, nil)
			all := items(b, 1, chain(5, 1, 4), 1000)
			_, l := watch(t, s.Addr, nil)
			put(t, b, all)
			await(t, "STORED", func() bool { return l.size() == 4 })
			remove(s, all[0].Key)
			await(t, "EVICTED", func() bool { return l.size() == 0 })
		})
	}
}

func TestWatcherFollowsExpiryByTTL(t *testing.T) {
	s := redistest.Start(t, "--hz", "100")
	b := open(t, s.Addr, func(c *redis.Config) { c.TTL = 0.2 })
	_, l := watch(t, s.Addr, nil)
	put(t, b, items(b, 1, chain(5, 20, 4), 1000))
	await(t, "STORED and EVICTED", func() bool { l.mu.Lock(); defer l.mu.Unlock(); return l.evicted == 80 })
}

func TestWatcherFollowsEviction(t *testing.T) {
	s := redistest.Start(t, "--maxmemory", "12mb", "--maxmemory-policy", "allkeys-lru")
	b := open(t, s.Addr, nil)
	w, l := watch(t, s.Addr, nil)
	groups := chain(5, 150, 4)
	all := items(b, 1, groups, 200_000)
	for part := range slices.Chunk(all, 10) {
		put(t, b, part)
	}
	same(t, l, func() map[event.BlockHash]event.PrefixHash { return names(b, groups, s) })
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.evicted == 0 || w.Dropped() != 0 {
		t.Errorf("%d blocks evicted, %d notifications dropped", l.evicted, w.Dropped())
	}
}

func TestWatcherReconcilesAfterALostSubscription(t *testing.T) {
	s := redistest.Start(t)
	b := open(t, s.Addr, nil)
	w, l := watch(t, s.Addr, nil)
	groups := chain(5, 200, 2)
	all := items(b, 1, groups, 500)
	for i := range all {
		switch {
		case i%20 == 7:
			s.Do("CLIENT", "KILL", "TYPE", "pubsub")
		case i%9 == 0 && i > 0:
			s.Do("DEL", all[i-1].Key)
		}
		put(t, b, all[i:i+1])
	}
	await(t, "the watcher to be ready", w.Ready)
	same(t, l, func() map[event.BlockHash]event.PrefixHash { return names(b, groups, s) })
	if w.Reconciled() < 2 {
		t.Errorf("compared %d times", w.Reconciled())
	}
}

func TestWatcherSurvivesARestart(t *testing.T) {
	s := redistest.Start(t)
	b := open(t, s.Addr, nil)
	_, l := watch(t, s.Addr, nil)
	groups := chain(5, 10, 2)
	all := items(b, 1, groups, 500)
	put(t, b, all)
	await(t, "STORED", func() bool { return l.size() == 20 })
	s.Restart() // empty, and with its configuration as at first
	await(t, "EVICTED", func() bool { return l.size() == 0 })
	await(t, "the backend to be back", func() bool { return b.Put(t.Context(), all[:5]) == nil })
	same(t, l, func() map[event.BlockHash]event.PrefixHash { return names(b, groups, s) })
}

// TestWatcherReconcilesAfterOverflow has the publisher stand still while more keys change than the queue holds.
func TestWatcherReconcilesAfterOverflow(t *testing.T) {
	s := redistest.Start(t)
	b := open(t, s.Addr, nil)
	w, l := watch(t, s.Addr, nil)
	groups := chain(5, 100, 1)
	all := items(b, 1, groups, 50)
	hold := make(chan struct{})
	l.mu.Lock()
	l.hold = hold
	l.mu.Unlock()
	release := sync.OnceFunc(func() {
		l.mu.Lock()
		l.hold = nil
		l.mu.Unlock()
		close(hold)
	})
	defer release()
	deadline := time.Now().Add(60 * time.Second)
	for i := 0; w.Dropped() == 0; i++ {
		put(t, b, all)
		if i%3 == 1 {
			s.Do("DEL", all[i%100].Key, all[(i*7)%100].Key)
		}
		if time.Now().After(deadline) {
			t.Fatal("the queue does not overflow")
		}
	}
	s.Do("DEL", all[50].Key)
	release()
	same(t, l, func() map[event.BlockHash]event.PrefixHash { return names(b, groups, s) })
	await(t, "the watcher to be ready", w.Ready)
}

func TestWatcherWaitsForAllRanks(t *testing.T) {
	s := redistest.Start(t)
	b := open(t, s.Addr, nil)
	_, l := watch(t, s.Addr, func(_ *redis.Config, wc *redis.WatchConfig) {
		wc.Ranks, wc.Compatibility = 2, "abcd010203040506"
	})
	groups := chain(5, 2, 3)
	other := slices.Clone(groups)
	for i := range other {
		other[i].Rank = 1
	}
	zero, one := items(b, 1, groups, 100), items(b, 2, other, 100)
	put(t, b, zero)
	put(t, b, one[1:])
	await(t, "the group that both have", func() bool { return l.size() == 3 })
	put(t, b, one[:1])
	await(t, "both groups", func() bool { return l.size() == 6 })
	s.Do("DEL", zero[1].Key)
	await(t, "the first rank's loss", func() bool { return l.size() == 3 })
}

func TestWatcherOfACluster(t *testing.T) {
	nodes := redistest.Cluster(t, 3)
	b := open(t, nodes[1].Addr, nil)
	_, l := watch(t, nodes[0].Addr, func(_ *redis.Config, wc *redis.WatchConfig) { wc.Topology = 50 * time.Millisecond })
	groups := chain(5, 40, 2)
	all := items(b, 1, groups, 500)
	put(t, b, all)
	same(t, l, func() map[event.BlockHash]event.PrefixHash { return names(b, groups, nodes...) })
	for i, s := range nodes {
		for k := i; k < len(all); k += 5 {
			s.Do("DEL", all[k].Key) // MOVED where it is not there
		}
	}
	nodes[2].Do("FLUSHALL")
	same(t, l, func() map[event.BlockHash]event.PrefixHash { return names(b, groups, nodes...) })
	slot := strings.TrimPrefix(nodes[0].Do("CLUSTER", "KEYSLOT", "empty"), ":")
	id := strings.TrimPrefix(nodes[1].Do("CLUSTER", "MYID"), "+")
	for _, s := range nodes {
		if err := s.Do("CLUSTER", "SETSLOT", slot, "NODE", id); err != "+OK" && !strings.Contains(err, "keys in") {
			t.Fatal(err)
		}
	}
	put(t, b, all[:7])
	same(t, l, func() map[event.BlockHash]event.PrefixHash { return names(b, groups, nodes...) })
}

func TestNotificationsAreConfigured(t *testing.T) {
	for _, tt := range []struct{ have, want string }{{"", "$gxeE"}, {"KA", "AKE"}, {"Elx", "g$lxeE"}, {"AKE", "AKE"}} {
		t.Run(tt.have, func(t *testing.T) {
			s := redistest.Start(t, "--notify-keyspace-events", tt.have)
			watch(t, s.Addr, nil)
			got := strings.Fields(s.Do("CONFIG", "GET", "notify-keyspace-events"))[1]
			for _, flag := range tt.want {
				if !strings.ContainsRune(got, flag) {
					t.Errorf("notify-keyspace-events is %q, want all of %q", got, tt.want)
				}
			}
		})
	}
}

func TestNotificationsThatMayNotBeConfigured(t *testing.T) {
	s := redistest.Start(t)
	s.Do("ACL", "SETUSER", "reader", "on", ">pw", "~*", "&*", "+@all", "-config|set")
	t.Setenv("READER", "pw")
	cfg := redis.DefaultConfig()
	cfg.Address, cfg.Username, cfg.PasswordEnv = s.Addr, "reader", "READER"
	w, err := redis.NewWatcher(cfg, redis.DefaultWatchConfig(), &listener{}, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	err = w.Run(t.Context())
	var wrong *redis.ConfigError
	if !errors.As(err, &wrong) || !strings.Contains(err.Error(), "notify-keyspace-events") || strings.Contains(err.Error(), "pw") {
		t.Fatalf("got %v", err)
	}
}

func TestAPublishersErrorEndsTheWatcher(t *testing.T) {
	s := redistest.Start(t)
	b := open(t, s.Addr, nil)
	put(t, b, items(b, 1, chain(1, 1, 1), 10))
	cfg := redis.DefaultConfig()
	cfg.Address = s.Addr
	w, err := redis.NewWatcher(cfg, redis.DefaultWatchConfig(), failing{}, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	if err := w.Run(t.Context()); !errors.Is(err, errFailing) {
		t.Errorf("got %v", err)
	}
}

var errFailing = errors.New("no")

type failing struct{}

func (failing) Publish(*event.Batch) error { return errFailing }

func TestWatcherReadsLongHeaders(t *testing.T) {
	s := redistest.Start(t)
	b := open(t, s.Addr, nil)
	put(t, b, items(b, 1, chain(1, 1, 1500), 10))
	_, l := watch(t, s.Addr, nil)
	put(t, b, items(b, 1, append(chain(2, 1, 2500), chain(3, 2, 2)...), 10))
	await(t, "all blocks", func() bool { return l.size() == 4004 })
}
