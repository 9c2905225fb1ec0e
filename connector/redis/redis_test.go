package redis_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"

	"kvstrata/connector"
	"kvstrata/connector/redis"
	"kvstrata/connector/redis/redistest"
	"kvstrata/connector/store"
	"kvstrata/event"
	"kvstrata/leaktest"
)

func TestMain(m *testing.M) { os.Exit(leaktest.Run(m)) }

const blockTokens = 16

var compatibility = [32]byte{0xab, 0xcd, 1, 2, 3, 4, 5, 6, 7}

// open returns a backend for a server.
func open(t testing.TB, addr string, change func(*redis.Config)) *redis.Backend {
	t.Helper()
	cfg := redis.DefaultConfig()
	cfg.Address, cfg.Connections = addr, 2
	if change != nil {
		change(&cfg)
	}
	b, err := redis.New(cfg, compatibility, blockTokens, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := b.Close(); err != nil {
			t.Error(err)
		}
	})
	return b
}

// chain returns n groups of a chain of blocks, each of so many blocks, of one request.
func chain(request uint64, n, blocks int) []store.Group {
	groups := make([]store.Group, n)
	for i := range groups {
		for k := range blocks {
			h := request<<32 | uint64(i*blocks+k+1)
			groups[i].Blocks = append(groups[i].Blocks, connector.Name{Hash: event.IntHash(h), Prefix: event.PrefixHash(h * 31)})
		}
		if i > 0 {
			groups[i].HasParent, groups[i].Parent = true, groups[i-1].Blocks[blocks-1]
		}
	}
	return groups
}

// items returns items for groups with random bytes, each cut into pieces of random sizes, some of them empty.
func items(b *redis.Backend, seed uint64, groups []store.Group, size int) []store.Item {
	r := rand.New(rand.NewPCG(seed, 1))
	noise := rand.NewChaCha8([32]byte{byte(seed)})
	all := make([]store.Item, len(groups))
	for i := range all {
		it := &all[i]
		it.Group, it.Key, it.Bytes = &groups[i], b.Key(&groups[i]), size
		for left := size; left > 0; {
			p := make([]byte, min(r.IntN(max(size/20, 2)+1), left))
			_, _ = noise.Read(p)
			it.Pieces = append(it.Pieces, p)
			left -= len(p)
		}
	}
	return all
}

// sinks returns items that read what others wrote, into pieces of another cut.
func sinks(written []store.Item, pieces int) []store.Item {
	all := make([]store.Item, len(written))
	for i := range all {
		all[i] = store.Item{Key: written[i].Key, Bytes: written[i].Bytes}
		room := make([]byte, written[i].Bytes)
		for k := range pieces {
			all[i].Pieces = append(all[i].Pieces, room[k*len(room)/pieces:(k+1)*len(room)/pieces])
		}
	}
	return all
}

func content(it *store.Item) []byte { return bytes.Join(it.Pieces, nil) }

func put(t testing.TB, b *redis.Backend, all []store.Item) {
	t.Helper()
	for i, err := range b.Put(t.Context(), all) {
		if err != nil {
			t.Fatalf("put item %d: %v", i, err)
		}
	}
}

func TestWhatWasPutIsRead(t *testing.T) {
	s := redistest.Start(t)
	tests := []struct {
		name         string
		change       func(*redis.Config)
		n, size      int
		blocks, into int
	}{
		{"small", nil, 5, 100, 1, 1},
		{"large in small pieces", nil, 9, 3 << 20, 16, 700},
		{"more pieces than a call takes", nil, 2, 1 << 20, 16, 5000},
		{"empty", nil, 2, 0, 1, 1},
		{"one connection, little at a time", func(c *redis.Config) { c.Connections, c.PipelineBytes = 1, 1<<16 }, 40, 50_000, 4, 3},
		{"without checksum", func(c *redis.Config) { c.Checksum = false }, 3, 1 << 18, 16, 8},
		{"a header beyond the first look", nil, 2, 10_000, 2000, 2},
		{"own database and prefix", func(c *redis.Config) { c.DB, c.KeyPrefix = 3, "team/a:kv" }, 2, 1000, 1, 1},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			s.Do("FLUSHALL")
			b := open(t, s.Addr, tt.change)
			written := items(b, 7, chain(1, tt.n, tt.blocks), tt.size)
			put(t, b, written)
			read := sinks(written, tt.into)
			if errs := b.Get(t.Context(), read); errs != nil {
				t.Fatal(errors.Join(errs...))
			}
			for i := range read {
				if !bytes.Equal(content(&read[i]), content(&written[i])) {
					t.Errorf("item %d: other bytes came back", i)
				}
			}
		})
	}
}

func TestPrefixStopsAtTheFirstMiss(t *testing.T) {
	s := redistest.Start(t)
	b := open(t, s.Addr, nil)
	groups := chain(1, 200, 1)
	all := items(b, 1, groups, 64)
	keys := make([]string, len(all))
	for i := range all {
		keys[i] = all[i].Key
	}
	for _, there := range []int{0, 1, 63, 64, 65, 150, 200} {
		s.Do("FLUSHALL")
		put(t, b, all[:there])
		if there+2 < len(all) {
			put(t, b, all[there+1:there+2]) // behind the miss
		}
		if got, err := b.Prefix(t.Context(), keys); got != there || err != nil {
			t.Errorf("%d there: got %d, %v", there, got, err)
		}
	}
	if got, err := b.Prefix(t.Context(), nil); got != 0 || err != nil {
		t.Errorf("no keys: got %d, %v", got, err)
	}
}

// TestWhatIsNotThereOrNotRightIsAnErrorOfItsItem also has the next item right behind it come whole: the connection stays in
// step.
func TestWhatIsNotThereOrNotRightIsAnErrorOfItsItem(t *testing.T) {
	s := redistest.Start(t)
	for _, tt := range []struct {
		name   string
		spoil  func(key string)
		change func(*store.Item)
		want   error
	}{
		{"absent", func(key string) { s.Do("DEL", key) }, nil, store.ErrAbsent},
		{"a byte of the payload", func(key string) { s.Do("SETRANGE", key, "5000", "x1x") }, nil, redis.ErrCorrupt},
		{"a byte of a name", func(key string) { s.Do("SETRANGE", key, "97", "\xfe") }, nil, redis.ErrCorrupt},
		{"the magic", func(key string) { s.Do("SETRANGE", key, "0", "KVSG") }, nil, redis.ErrCorrupt},
		{"the version", func(key string) { s.Do("SETRANGE", key, "4", "\x02") }, nil, redis.ErrIncompatible},
		{"the compatibility hash", func(key string) { s.Do("SETRANGE", key, "40", "\xff") }, nil, redis.ErrIncompatible},
		{"header length", func(key string) { s.Do("SETRANGE", key, "8", "\xff\xff\xff\x7f") }, nil, redis.ErrCorrupt},
		{"longer", func(key string) { s.Do("APPEND", key, strings.Repeat("z", 100_000)) }, nil, redis.ErrCorrupt},
		{"truncated", func(key string) { s.Do("SET", key, s.Do("GETRANGE", key, "0", "4000")) }, nil, redis.ErrCorrupt},
		{"truncated in the header", func(key string) { s.Do("SET", key, s.Do("GETRANGE", key, "0", "50")) }, nil, redis.ErrCorrupt},
		{"empty", func(key string) { s.Do("SET", key, "") }, nil, redis.ErrCorrupt},
		{"not a string", func(key string) { s.Do("DEL", key); s.Do("LPUSH", key, "x") }, nil, nil},
		{"under another's key", func(key string) { s.Do("RENAME", key, key[:len(key)-2]+"ff") }, func(it *store.Item) {
			it.Key = it.Key[:len(it.Key)-2] + "ff"
		}, redis.ErrCorrupt},
		{"of another size", func(string) {}, func(it *store.Item) {
			it.Pieces, it.Bytes = append(it.Pieces, make([]byte, 10)), it.Bytes+10
		}, store.ErrAbsent},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s.Do("FLUSHALL")
			b := open(t, s.Addr, func(c *redis.Config) { c.Connections = 1 })
			written := items(b, 3, chain(2, 5, 4), 300_000)
			put(t, b, written)
			read := sinks(written, 3)
			tt.spoil(written[2].Key)
			if tt.change != nil {
				tt.change(&read[2])
			}
			errs := b.Get(t.Context(), read)
			for i := range read {
				var err error
				if errs != nil {
					err = errs[i]
				}
				switch {
				case i != 2 && (err != nil || !bytes.Equal(content(&read[i]), content(&written[i]))):
					t.Errorf("item %d: %v, or other bytes", i, err)
				case i == 2 && (err == nil || tt.want != nil && !errors.Is(err, tt.want)):
					t.Errorf("got %v, want %v", err, tt.want)
				}
			}
		})
	}
}

func TestTTL(t *testing.T) {
	s := redistest.Start(t)
	b := open(t, s.Addr, func(c *redis.Config) { c.TTL = 500 })
	written := items(b, 3, chain(2, 1, 4), 1<<10)
	put(t, b, written)
	left, err := strconv.Atoi(strings.TrimPrefix(s.Do("PTTL", written[0].Key), ":"))
	if err != nil || left < 400_000 || left > 500_000 {
		t.Errorf("PTTL %d, %v, want nearly 500000", left, err)
	}
}

func TestWrongItems(t *testing.T) {
	s := redistest.Start(t)
	b := open(t, s.Addr, nil)
	good := items(b, 3, chain(2, 1, 4), 100)
	long := event.BytesHash(strings.Repeat("h", 300))
	wrong := []store.Item{
		{Key: "a", Group: good[0].Group, Pieces: good[0].Pieces, Bytes: 99},
		{Key: "b", Bytes: 0},
		{Key: "c", Group: &store.Group{Blocks: []connector.Name{{Hash: long}}}},
		{Key: "d", Group: &store.Group{Blocks: make([]connector.Name, 1<<13)}},
		good[0],
	}
	errs := b.Put(t.Context(), wrong)
	for i, err := range errs {
		if (err == nil) != (i == len(wrong)-1) {
			t.Errorf("item %d: %v", i, err)
		}
	}
}

func TestManyAtOnce(t *testing.T) {
	s := redistest.Start(t)
	b := open(t, s.Addr, nil)
	var moving sync.WaitGroup
	for k := range 64 {
		moving.Go(func() {
			written := items(b, uint64(k), chain(uint64(k+10), 4, 3), 30_000+k)
			for range 3 {
				if errs := b.Put(t.Context(), written); errs != nil {
					t.Error(errors.Join(errs...))
				}
				read := sinks(written, 1+k)
				if errs := b.Get(t.Context(), read); errs != nil {
					t.Error(errors.Join(errs...))
				}
				keys := make([]string, len(read))
				for i := range read {
					keys[i] = read[i].Key
					if !bytes.Equal(content(&read[i]), content(&written[i])) {
						t.Errorf("goroutine %d, item %d: other bytes", k, i)
					}
				}
				if n, err := b.Prefix(t.Context(), keys); n != len(keys) || err != nil {
					t.Errorf("prefix %d, %v", n, err)
				}
			}
		})
	}
	moving.Wait()
}

func TestCluster(t *testing.T) {
	for _, n := range []int{1, 3} {
		t.Run(fmt.Sprintf("%d nodes", n), func(t *testing.T) {
			nodes := redistest.Cluster(t, n)
			b := open(t, nodes[0].Addr, nil)
			written := items(b, 3, chain(2, 50, 4), 30_000)
			put(t, b, written)
			read := sinks(written, 2)
			if errs := b.Get(t.Context(), read); errs != nil {
				t.Fatal(errors.Join(errs...))
			}
			for i := range read {
				if !bytes.Equal(content(&read[i]), content(&written[i])) {
					t.Errorf("item %d: other bytes", i)
				}
			}
			keys := make([]string, len(written))
			for i := range written {
				keys[i] = written[i].Key
			}
			if got, err := b.Prefix(t.Context(), keys); got != len(keys) || err != nil {
				t.Errorf("prefix %d, %v", got, err)
			}
			if n == 1 {
				return
			}
			// A slot moves: the backend learns it from MOVED.
			slot := strings.TrimPrefix(nodes[0].Do("CLUSTER", "KEYSLOT", keys[0]), ":")
			owner := -1
			for i, s := range nodes {
				if strings.HasPrefix(s.Do("GETRANGE", keys[0], "0", "3"), "kvsg") {
					owner = i
				}
			}
			to := nodes[(owner+1)%n]
			id := strings.TrimPrefix(to.Do("CLUSTER", "MYID"), "+")
			nodes[owner].Do("DEL", keys[0])
			for _, s := range nodes {
				if got := s.Do("CLUSTER", "SETSLOT", slot, "NODE", id); got != "+OK" {
					t.Fatalf("SETSLOT: %s", got)
				}
			}
			put(t, b, written[:1])
			if errs := b.Get(t.Context(), read[:1]); errs != nil {
				t.Error(errs)
			}
		})
	}
}

func TestNoAllocationsPerGroup(t *testing.T) {
	s := redistest.Start(t)
	b := open(t, s.Addr, nil)
	written := items(b, 3, chain(2, 64, 16), 4000)
	put(t, b, written)
	read := sinks(written, 3)
	for name, f := range map[string]func(context.Context, []store.Item) []error{"put": b.Put, "get": b.Get} {
		all := written
		if name == "get" {
			all = read
		}
		per := testing.AllocsPerRun(50, func() {
			if errs := f(t.Context(), all); errs != nil {
				t.Error(errors.Join(errs...))
			}
		}) / float64(len(all))
		t.Logf("%s: %.3f allocations a group", name, per)
		if per > 0.1 && !raceEnabled { // of the call as a whole
			t.Errorf("%s: %.2f allocations a group, want none", name, per)
		}
	}
}
