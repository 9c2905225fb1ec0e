package tcp_test

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"kvstrata/connector"
	"kvstrata/connector/direct"
	"kvstrata/connector/tcp"
)

// half is a worker that runs, and what it has told.
type half struct {
	connector.Worker
	cache   *connector.Cache
	address string
	engine  string
	stop    func()

	sent, received, failed []string
	invalid                []int
	stats                  connector.Stats
	report                 connector.Report
}

// worker makes a worker of an engine with one rank.
func worker(t *testing.T, engine string, o order, blocks int, extra map[string]any) *half {
	t.Helper()
	h := newWorker(t, engine, caches(t, o, blocks), 1, extra, nil)
	return h
}

func newWorker(t *testing.T, engine string, c connector.Caches, ranks int, extra map[string]any, now func() time.Time) *half {
	t.Helper()
	cfg := connector.DefaultConfig()
	cfg.Connector, cfg.EngineID, cfg.Role = "tcp", engine, connector.Both
	for k, v := range extra {
		text, err := json.Marshal(v)
		if err != nil {
			t.Fatal(err)
		}
		cfg.Extra[k] = text
	}
	w, err := tcp.NewWorker(connector.Setup{
		Config: cfg, Instance: "i-" + engine, Rank: c.Rank, Ranks: ranks, Model: c.Model, Now: now, Log: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := w.RegisterCaches(c); err != nil {
		t.Fatal(err)
	}
	text, err := w.Handshake()
	if err != nil {
		t.Fatal(err)
	}
	var hand direct.Handshake
	if err := json.Unmarshal(text, &hand); err != nil {
		t.Fatal(err)
	}
	same, err := connector.NewCache(c)
	if err != nil {
		t.Fatal(err)
	}
	h := &half{Worker: w, cache: same, address: hand.Address, engine: engine}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- w.Run(ctx) }()
	h.stop = sync.OnceFunc(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("run: %v", err)
		}
	})
	t.Cleanup(h.stop)
	return h
}

// step is one step of an engine.
func (h *half) step(t *testing.T, m *direct.Metadata, finished ...string) {
	t.Helper()
	if err := h.HandlePreemptions(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
	if m.Empty() {
		h.Bind(connector.Nothing{})
	} else {
		h.Bind(m)
	}
	if err := h.StartLoad(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := h.WaitForSave(t.Context()); err != nil {
		t.Fatal(err)
	}
	if o := h.Collect(finished); o != nil {
		h.sent, h.received, h.failed = append(h.sent, o.FinishedSending...), append(h.received, o.FinishedReceiving...), append(h.failed, o.FailedReceiving...)
		h.invalid = append(h.invalid, o.InvalidBlocks...)
		if o.Stats != nil {
			h.stats.Extend(o.Stats)
		}
		if o.Metadata != nil {
			h.report.Aggregate(o.Metadata)
		}
	}
	h.Clear()
}

// idle runs steps without work until something is so.
func (h *half) idle(t *testing.T, what string, done func() bool) {
	t.Helper()
	eventually(t, what, func() bool {
		h.step(t, &direct.Metadata{})
		return done()
	})
}

func (h *half) remote(request string) direct.Remote {
	return direct.Remote{EngineID: h.engine, Instance: "i-" + h.engine, Request: request, Ranks: []string{h.address}}
}

func counts(h *half) tcp.Counts { return h.Worker.(*tcp.Worker).Endpoint().Counts() }

func TestWorkerPull(t *testing.T) {
	for _, shm := range []bool{false, true} {
		t.Run(fmt.Sprintf("shared %v", shm), func(t *testing.T) {
			extra := map[string]any{"shared_memory": shm}
			p, c := worker(t, "p", nhd, 32, extra), worker(t, "c", kvFirst, 16, extra)
			fill(t, p.cache)
			from, to := []int{8, 9, 20}, []int{5, 2, 3}
			p.step(t, &direct.Metadata{Holds: []direct.Hold{{Request: "r", Blocks: from}}})
			c.step(t, &direct.Metadata{Loads: []direct.Load{{Request: "q", First: 1, Local: to, Blocks: from, Remote: p.remote("r")}}})
			c.idle(t, "the load ends", func() bool { return len(c.received) > 0 })
			if !slices.Equal(c.received, []string{"q"}) || len(c.failed)+len(c.invalid) > 0 {
				t.Fatalf("received %v, failed %v, invalid %v: %+v", c.received, c.failed, c.invalid, c.report)
			}
			same(t, p.cache, c.cache, from, to, nil)
			if n := counts(c); n.Copied != b2u(shm) {
				t.Errorf("%+v", n)
			}
			d := c.report.Done
			if len(d) != 1 || d[0].Op != connector.Load || d[0].Request != "q" || d[0].First != 1 || d[0].Blocks != 3 || d[0].Peer != "i-p" ||
				d[0].Err != nil || d[0].Bytes != 3*blockBytes || d[0].Duration <= 0 || d[0].Post <= 0 {
				t.Errorf("%+v", d)
			}
			if len(c.stats.Transfers) != 1 || c.stats.Ranks != 1 || c.stats.Transfers[0].Descriptors == 0 {
				t.Errorf("%+v", c.stats)
			}
			// The producer hears that the blocks are not needed; it tells so once its engine told the request as finished.
			e := p.Worker.(*tcp.Worker).Endpoint()
			eventually(t, "the hold ends", func() bool { return e.Exports() == 0 })
			p.step(t, &direct.Metadata{})
			if len(p.sent) > 0 {
				t.Fatalf("sent %v before it was finished", p.sent)
			}
			p.step(t, &direct.Metadata{}, "r", "another")
			if !slices.Equal(p.sent, []string{"r"}) {
				t.Errorf("sent %v", p.sent)
			}
		})
	}
}

// TestWorkerPullIsFaster has the consumer ask before the producer's workers know of the hold.
func TestWorkerPullIsFaster(t *testing.T) {
	p, c := worker(t, "p", nhd, 32, nil), worker(t, "c", nhd, 16, nil)
	fill(t, p.cache)
	c.step(t, &direct.Metadata{Loads: []direct.Load{{Request: "q", Local: []int{1}, Blocks: []int{7}, Remote: p.remote("r")}}})
	eventually(t, "the read waits", func() bool { return counts(p).Waiting == 1 })
	p.step(t, &direct.Metadata{Holds: []direct.Hold{{Request: "r", Blocks: []int{7}}}}, "r")
	c.idle(t, "the load ends", func() bool { return len(c.received) > 0 })
	if len(c.failed) > 0 {
		t.Fatalf("%+v", c.report)
	}
	p.idle(t, "the hold ends", func() bool { return len(p.sent) == 1 })
}

func TestWorkerPush(t *testing.T) {
	for _, shm := range []bool{false, true} {
		extra := map[string]any{"shared_memory": shm, "parallel": 1, "mode": "push"}
		p, c := worker(t, "p", nhd, 32, extra), worker(t, "c", nhd, 16, extra)
		fill(t, p.cache)
		var m direct.Metadata
		for i := range 5 {
			r := p.remote(fmt.Sprint("r", i))
			r.Push = true
			m.Loads = append(m.Loads, direct.Load{Request: fmt.Sprint("q", i), First: 1, Local: []int{2 * i, 2*i + 1}, Remote: r})
		}
		c.step(t, &m)
		eventually(t, "the loads wait for their producer", func() bool { return counts(p).Waiting == 5 })
		// They hold up nobody else, though one load is done at a time.
		p.step(t, &direct.Metadata{Holds: []direct.Hold{{Request: "s", Blocks: []int{30}}}}, "s")
		c.step(t, &direct.Metadata{Loads: []direct.Load{{Request: "other", Local: []int{15}, Blocks: []int{30}, Remote: p.remote("s")}}})
		c.idle(t, "the other load ends", func() bool { return slices.Equal(c.received, []string{"other"}) })
		m = direct.Metadata{}
		var finished []string
		for i := range 5 {
			finished = append(finished, fmt.Sprint("r", i))
			m.Holds = append(m.Holds, direct.Hold{Request: finished[i], Blocks: []int{31, 3 * i, 3*i + 1}})
		}
		p.step(t, &m, finished...)
		c.idle(t, "the loads end", func() bool { return len(c.received) == 6 })
		if len(c.failed) > 0 {
			t.Fatalf("%+v", c.report)
		}
		for i := range 5 {
			same(t, p.cache, c.cache, []int{3 * i, 3*i + 1}, []int{2 * i, 2*i + 1}, nil)
		}
		p.idle(t, "the holds end", func() bool { return len(p.sent) == 6 })
	}
}

func TestWorkerFailures(t *testing.T) {
	p, c := worker(t, "p", nhd, 32, nil), worker(t, "c", nhd, 16, nil)
	p.step(t, &direct.Metadata{Holds: []direct.Hold{{Request: "r", Blocks: []int{7, 8}}}})
	gone := p.remote("r")
	gone.Ranks = []string{"127.0.0.1:1"}
	restarted := p.remote("r")
	restarted.EngineID = "former"
	ranks := p.remote("r")
	ranks.Ranks = append(ranks.Ranks, p.address)
	c.step(t, &direct.Metadata{Loads: []direct.Load{
		{Request: "foreign", Local: []int{1, connector.Discard}, Blocks: []int{7, 9}, Remote: p.remote("r")},
		{Request: "gone", Local: []int{2}, Blocks: []int{7}, Remote: gone},
		{Request: "restarted", Local: []int{3}, Blocks: []int{7}, Remote: restarted},
		{Request: "ranks", Local: []int{4}, Blocks: []int{7}, Remote: ranks},
	}})
	c.idle(t, "the loads end", func() bool { return len(c.received) == 4 })
	slices.Sort(c.failed)
	slices.Sort(c.invalid)
	if !slices.Equal(c.failed, []string{"foreign", "gone", "ranks", "restarted"}) || !slices.Equal(c.invalid, []int{1, 2, 3, 4}) {
		t.Errorf("failed %v, invalid %v", c.failed, c.invalid)
	}
	if c.stats.FailedTransfers != 4 || len(c.stats.Transfers) != 0 || len(c.report.Done) != 4 {
		t.Errorf("%+v", c.stats)
	}
	for _, d := range c.report.Done {
		if d.Err == nil || d.Request == "ranks" && !strings.Contains(d.Err.Error(), "2 tensor-parallel ranks") {
			t.Errorf("%+v", d)
		}
	}
}

func TestWorkerCancel(t *testing.T) {
	p, c := worker(t, "p", nhd, 32, nil), worker(t, "c", nhd, 16, map[string]any{"parallel": 1})
	push := p.remote("never")
	push.Push = true
	c.step(t, &direct.Metadata{Loads: []direct.Load{
		{Request: "waits", Local: []int{1}, Blocks: []int{7}, Remote: p.remote("r")},
		{Request: "queued", Local: []int{2}, Blocks: []int{7}, Remote: p.remote("r")},
		{Request: "pushed", Local: []int{3}, Remote: push},
	}})
	eventually(t, "both wait", func() bool { return counts(p).Waiting == 2 })
	c.step(t, &direct.Metadata{Cancels: []string{"waits", "queued", "pushed", "unknown"}})
	c.idle(t, "all end", func() bool { return len(c.received) == 3 })
	if len(c.failed) != 3 || len(c.invalid) != 3 {
		t.Errorf("failed %v, invalid %v", c.failed, c.invalid)
	}
}

func TestWorkerNoticeAndExpiry(t *testing.T) {
	var mu sync.Mutex
	began, late := time.Now(), false
	p := newWorker(t, "p", caches(t, nhd, 32), 1, nil, func() time.Time {
		mu.Lock()
		defer mu.Unlock()
		if late {
			return began.Add(31 * time.Second)
		}
		return began
	})
	c := worker(t, "c", nhd, 16, nil)
	p.step(t, &direct.Metadata{Holds: []direct.Hold{{Request: "r", Blocks: []int{7}}, {Request: "s", Blocks: []int{8}}}}, "r", "s")
	c.step(t, &direct.Metadata{Notices: []direct.Remote{p.remote("r")}})
	p.idle(t, "the one ends", func() bool { return len(p.sent) == 1 })
	mu.Lock()
	late = true
	mu.Unlock()
	p.idle(t, "the other ends", func() bool { return len(p.sent) == 2 })
	if !slices.Equal(p.report.Expired, []string{"s"}) || p.stats.ExpiredRequests != 1 {
		t.Errorf("expired %v, %+v", p.report.Expired, p.stats)
	}
}

// TestWorkerHeartbeats keeps a lease that is far shorter than the time in which its load waits for its turn.
func TestWorkerHeartbeats(t *testing.T) {
	lease := map[string]any{"kv_lease_duration": 3, "parallel": 1}
	silent, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	p, c := worker(t, "p", nhd, 32, lease), worker(t, "c", nhd, 16, lease)
	p.step(t, &direct.Metadata{Holds: []direct.Hold{{Request: "r", Blocks: []int{7}}}}, "r")
	stuck := p.remote("x")
	stuck.Ranks = []string{silent.Addr().String()}
	c.step(t, &direct.Metadata{Loads: []direct.Load{
		{Request: "stuck", Local: []int{1}, Blocks: []int{7}, Remote: stuck},
		{Request: "q", Local: []int{2}, Blocks: []int{7}, Remote: p.remote("r")},
	}})
	c.idle(t, "both end", func() bool { return len(c.received) == 2 })
	if !slices.Equal(c.failed, []string{"stuck"}) {
		t.Errorf("failed %v: %+v", c.failed, c.report)
	}
}

func TestWorkerRanks(t *testing.T) {
	var ps, cs []*half
	for rank := range 2 {
		for _, to := range []*[]*half{&ps, &cs} {
			k := caches(t, nhd, 16)
			k.Rank, k.Model.Ranks = rank, 2
			*to = append(*to, newWorker(t, fmt.Sprint("e", len(ps)-rank), k, 2, nil, nil))
		}
	}
	remote := direct.Remote{EngineID: ps[0].engine, Request: "r", Ranks: []string{ps[0].address, ps[1].address}}
	for rank, p := range ps {
		fill(t, p.cache)
		p.step(t, &direct.Metadata{Holds: []direct.Hold{{Request: "r", Blocks: []int{7}}}}, "r")
		remote.EngineID = p.engine
		c := cs[rank]
		c.step(t, &direct.Metadata{Loads: []direct.Load{{Request: "q", Local: []int{2}, Blocks: []int{7}, Remote: remote}}})
		c.idle(t, "the load ends", func() bool { return len(c.received) == 1 })
		if len(c.failed) > 0 {
			t.Fatalf("%+v", c.report)
		}
	}
}

func TestWorkerRunsThoughContextHasEnded(t *testing.T) {
	p := worker(t, "p", nhd, 8, nil)
	p.stop()
	cfg := connector.DefaultConfig()
	cfg.Connector, cfg.Role = "tcp", connector.Both
	w, err := tcp.NewWorker(connector.Setup{Config: cfg, Ranks: 1, Model: connector.Model{BlockTokens: 16}, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	if err := w.RegisterCaches(caches(t, nhd, 8)); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := w.Run(ctx); err != nil {
		t.Error(err)
	}
}
