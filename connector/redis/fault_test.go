package redis_test

import (
	"bytes"
	"context"
	"errors"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"kvstrata/connector/redis"
	"kvstrata/connector/redis/redistest"
	"kvstrata/connector/store"
	"kvstrata/porttest"
)

func TestStoreFull(t *testing.T) {
	s := redistest.Start(t, "--maxmemory", "6mb", "--maxmemory-policy", "noeviction")
	b := open(t, s.Addr, nil)
	written := items(b, 3, chain(2, 12, 4), 1<<20)
	errs := b.Put(t.Context(), written)
	full := 0
	for _, err := range errs {
		var answer redis.ServerError
		if err != nil {
			full++
			if !errors.As(err, &answer) || !strings.HasPrefix(string(answer), "OOM") {
				t.Errorf("got %v, want the server's OOM", err)
			}
		}
	}
	if full == 0 || full == len(written) {
		t.Fatalf("%d of %d items found no room", full, len(written))
	}
	for i := range written {
		read := sinks(written[i:i+1], 1)
		err := errors.Join(b.Get(t.Context(), read)...)
		if (err == nil) != (errs[i] == nil) {
			t.Errorf("item %d: put %v, get %v", i, errs[i], err)
		}
	}
}

func TestServerThatIsNotThere(t *testing.T) {
	b := open(t, "127.0.0.1:"+strconv.Itoa(porttest.Port(t)), nil)
	start := time.Now()
	for _, err := range b.Put(t.Context(), items(b, 3, chain(2, 3, 4), 1<<10)) {
		if err == nil {
			t.Error("no error")
		}
	}
	if d := time.Since(start); d > 5*time.Second {
		t.Errorf("it took %v to say so", d)
	}
}

func TestRestartInTheMiddle(t *testing.T) {
	s := redistest.Start(t)
	b := open(t, s.Addr, nil)
	written := items(b, 3, chain(2, 8, 4), 1<<20)
	put(t, b, written)
	ctx, cancel := context.WithCancel(t.Context())
	var moving sync.WaitGroup
	var failed, done int
	var mu sync.Mutex
	for k := range 4 {
		moving.Go(func() {
			for n := 0; ctx.Err() == nil; n++ {
				var errs []error
				read := sinks(written, 5)
				if (k+n)%2 == 0 {
					errs = b.Put(ctx, written)
				} else {
					errs = b.Get(ctx, read)
				}
				mu.Lock()
				for i := range written {
					switch {
					case errs != nil && errs[i] != nil:
						failed++
					case (k+n)%2 == 1 && !bytes.Equal(content(&read[i]), content(&written[i])):
						t.Errorf("item %d: other bytes", i)
					default:
						done++
					}
				}
				mu.Unlock()
			}
		})
	}
	await(t, "transfers", func() bool { mu.Lock(); defer mu.Unlock(); return done > 20 })
	s.Restart()
	await(t, "the backend to be back", func() bool { return b.Put(t.Context(), written) == nil })
	cancel()
	moving.Wait()
	if failed == 0 {
		t.Log("no operation noticed the restart")
	}
}

// await looks until something is so.
func await(t testing.TB, what string, so func() bool) {
	t.Helper()
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for deadline := time.After(20 * time.Second); !so(); {
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatalf("waited too long for %s", what)
		}
	}
}

func TestSlowServer(t *testing.T) {
	s := redistest.Start(t)
	patient := open(t, s.Addr, nil)
	b := open(t, s.Addr, func(c *redis.Config) { c.Timeout = 0.15; c.Connections = 1 })
	written := items(b, 3, chain(2, 4, 4), 4<<20)
	put(t, patient, written)
	await(t, "the connection", func() bool { n, err := b.Prefix(t.Context(), []string{written[0].Key}); return n == 1 && err == nil })
	s.Do("CLIENT", "PAUSE", "600", "ALL")
	errs := b.Get(t.Context(), sinks(written, 2))
	for i := range written {
		if errs == nil || !errors.Is(errs[i], redis.ErrTimeout) {
			t.Fatalf("item %d: want a timeout, got %v", i, errs)
		}
	}
	errs = b.Put(t.Context(), written)
	for i := range written {
		if errs == nil || errs[i] == nil {
			t.Fatalf("item %d: stored by a server that does nothing", i)
		}
	}
	await(t, "the backend to be itself again", func() bool { return b.Put(t.Context(), written[:1]) == nil })
	put(t, patient, written)
	read := sinks(written, 2)
	if errs := patient.Get(t.Context(), read); errs != nil {
		t.Fatal(errors.Join(errs...))
	}
	for i := range read {
		if !bytes.Equal(content(&read[i]), content(&written[i])) {
			t.Errorf("item %d: other bytes", i)
		}
	}
}

// TestCancel has the pieces written to right after each call: the race detector would see a backend that still uses them
// through Go, and other bytes would come back from one that does in the kernel.
func TestCancel(t *testing.T) {
	s := redistest.Start(t)
	b := open(t, s.Addr, nil)
	written := items(b, 3, chain(2, 6, 4), 1<<20)
	put(t, b, written)
	for n := range 40 {
		ctx, cancel := context.WithCancel(t.Context())
		timer := time.AfterFunc(time.Duration(n*75)*time.Microsecond, cancel)
		read := sinks(written, 9)
		for i, err := range b.Get(ctx, read) {
			if err != nil && !errors.Is(err, context.Canceled) {
				t.Errorf("get %d: %v", i, err)
			}
		}
		for i := range read {
			for _, p := range read[i].Pieces {
				clear(p)
			}
		}
		other := items(b, 3, *groupsOf(written), 1<<20) // equal bytes in memory of their own
		for i, err := range b.Put(ctx, other) {
			if err != nil && !errors.Is(err, context.Canceled) {
				t.Errorf("put %d: %v", i, err)
			}
		}
		for i := range other {
			for _, p := range other[i].Pieces {
				clear(p)
			}
		}
		for i := range read {
			for _, p := range read[i].Pieces {
				if len(bytes.Trim(p, "\x00")) != 0 {
					t.Fatalf("get %d: bytes came after the call had ended", i)
				}
			}
		}
		timer.Stop()
		cancel()
	}
	read := sinks(written, 9)
	if errs := b.Get(t.Context(), read); errs != nil {
		t.Fatal(errors.Join(errs...))
	}
	for i := range read {
		if !bytes.Equal(content(&read[i]), content(&written[i])) {
			t.Errorf("item %d: other bytes", i)
		}
	}
}

func groupsOf(all []store.Item) *[]store.Group {
	groups := make([]store.Group, len(all))
	for i := range all {
		groups[i] = *all[i].Group
	}
	return &groups
}

func TestClusterWithoutANode(t *testing.T) {
	nodes := redistest.Cluster(t, 3)
	b := open(t, nodes[0].Addr, nil)
	written := items(b, 3, chain(2, 60, 4), 10_000)
	put(t, b, written)
	gone := make(map[string]bool)
	for i := range written {
		gone[written[i].Key] = nodes[2].Do("EXISTS", written[i].Key) == ":1"
	}
	nodes[2].Kill()
	read := sinks(written, 2)
	errs := b.Get(t.Context(), read)
	for i := range read {
		var err error
		if errs != nil {
			err = errs[i]
		}
		switch {
		case gone[read[i].Key] != (err != nil):
			t.Errorf("item %d, on the node that is gone %v: %v", i, gone[read[i].Key], err)
		case err == nil && !bytes.Equal(content(&read[i]), content(&written[i])):
			t.Errorf("item %d: other bytes", i)
		}
	}
	nodes[2].Restart() // it remembers its slots, and is empty
	await(t, "the node to be back", func() bool { return b.Put(t.Context(), written) == nil })
	if errs := b.Get(t.Context(), read); errs != nil {
		t.Error(errors.Join(errs...))
	}
}
