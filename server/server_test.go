package server_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"regexp"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"kvstrata/leaktest"
	"kvstrata/server"

	gocmp "github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
)

// TestMain fails when a test leaves a goroutine behind.
func TestMain(m *testing.M) { os.Exit(leaktest.Run(m)) }

// free takes free ports.
var free = server.Config{Listen: "127.0.0.1:0", Admin: "127.0.0.1:0"}

// running is a server under way, and a client of it.
type running struct {
	*server.Server
	client *http.Client
	stop   context.CancelFunc
	done   chan error
}

// start runs a server until the test ends, or until it is stopped.
func start(t *testing.T, handlers map[string]http.Handler, ready []server.Ready, reg prometheus.Gatherer) *running {
	t.Helper()
	return startWith(t, free, handlers, ready, reg, slog.New(slog.DiscardHandler))
}

func startWith(t *testing.T, cfg server.Config, handlers map[string]http.Handler, ready []server.Ready, reg prometheus.Gatherer, log *slog.Logger) *running {
	t.Helper()
	s, err := server.New(cfg, handlers, ready, reg, log)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	transport := &http.Transport{}
	r := &running{Server: s, client: &http.Client{Transport: transport}, stop: cancel, done: make(chan error, 1)}
	go func() { r.done <- s.Run(ctx); close(r.done) }()
	t.Cleanup(func() {
		cancel()
		transport.CloseIdleConnections()
		if err := <-r.done; err != nil {
			t.Errorf("run: %v", err)
		}
	})
	return r
}

// get returns the status and body of an answer.
func (r *running) get(t *testing.T, url string) (int, string) {
	t.Helper()
	resp, err := r.client.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(body)
}

func echo(text string) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, text) })
}

func TestListeners(t *testing.T) {
	reg := prometheus.NewRegistry()
	blocks := prometheus.NewCounter(prometheus.CounterOpts{Name: "kvstrata_test_blocks_total", Help: "Blocks."})
	reg.MustRegister(blocks)
	blocks.Add(7)
	r := start(t, map[string]http.Handler{"/v1/": echo("index"), "/v1/history/": echo("history")}, nil, reg)
	for _, c := range []struct {
		url    string
		status int
		has    string
	}{
		{r.URL() + "/v1/lookup", 200, "index"},
		{r.URL() + "/v1/history/why", 200, "history"},
		{r.URL() + "/elsewhere", 404, ""},
		{r.URL() + "/metrics", 404, ""}, // the admin listener's own
		{r.URL() + "/debug/pprof/", 404, ""},
		{r.AdminURL() + "/healthz", 200, "ok\n"},
		{r.AdminURL() + "/readyz", 200, "ready\n"},
		{r.AdminURL() + "/metrics", 200, "kvstrata_test_blocks_total 7"},
		{r.AdminURL() + "/debug/pprof/", 200, "goroutine"},
		{r.AdminURL() + "/debug/pprof/goroutine?debug=1", 200, "goroutine profile: total"},
		{r.AdminURL() + "/debug/pprof/heap?debug=1", 200, "heap profile"},
		{r.AdminURL() + "/debug/pprof/cmdline", 404, "not found"},
		{r.AdminURL() + "/debug/pprof/symbol", 200, "num_symbols"},
		{r.AdminURL() + "/v1/lookup", 404, ""},
	} {
		status, body := r.get(t, c.url)
		if status != c.status || !strings.Contains(body, c.has) {
			t.Errorf("%s: status %d, want %d with %q in\n%s", c.url, status, c.status, c.has, body)
		}
	}
	resp, err := r.client.Post(r.AdminURL()+"/readyz", "text/plain", strings.NewReader("x"))
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if resp.StatusCode != http.StatusMethodNotAllowed {
		t.Errorf("POST /readyz: status %d", resp.StatusCode)
	}
}

// A name of elsewhere that resolves to loopback gets no answer.
func TestLoopbackHasNoOtherNames(t *testing.T) {
	r := start(t, map[string]http.Handler{"/": echo("ours")}, nil, prometheus.NewRegistry())
	for host, want := range map[string]int{
		"evil.example": 421, "evil.example:80": 421, "10.0.0.1": 421, "127.0.0.1.evil.example": 421,
		"localhost:1234": 200, "127.0.0.2": 200, "[::1]:80": 200,
	} {
		for _, base := range []string{r.URL() + "/", r.AdminURL() + "/healthz"} {
			req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, base, nil)
			if err != nil {
				t.Fatal(err)
			}
			req.Host = host
			resp, err := r.client.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			resp.Body.Close()
			if resp.StatusCode != want {
				t.Errorf("%s as %s: status %d, want %d", base, host, resp.StatusCode, want)
			}
		}
	}
}

func TestReadyTellsWhatIsMissing(t *testing.T) {
	var nats, index atomic.Bool
	check := func(holds *atomic.Bool, reason string) func() error {
		return func() error {
			if holds.Load() {
				return nil
			}
			return errors.New(reason)
		}
	}
	r := start(t, nil, []server.Ready{
		{Name: "nats", Check: check(&nats, "not connected")}, {Name: "prefix", Check: check(&index, "not caught up with the stream")},
	}, prometheus.NewRegistry())
	for _, step := range []struct {
		then   func()
		status int
		body   string
	}{
		{func() {}, 503, "nats: not connected\nprefix: not caught up with the stream\n"},
		{func() { nats.Store(true) }, 503, "prefix: not caught up with the stream\n"},
		{func() { index.Store(true) }, 200, "ready\n"},
		{func() { nats.Store(false) }, 503, "nats: not connected\n"},
	} {
		step.then()
		status, body := r.get(t, r.AdminURL()+"/readyz")
		if diff := gocmp.Diff(step.body, body); status != step.status || diff != "" {
			t.Errorf("status %d, want %d\n%s", status, step.status, diff)
		}
		if status, _ := r.get(t, r.AdminURL()+"/healthz"); status != 200 {
			t.Errorf("healthz: status %d", status)
		}
	}
}

func TestDefaultConfigIsValidAndOnLoopback(t *testing.T) {
	cfg := server.DefaultConfig()
	if err := cfg.Validate(); err != nil {
		t.Error(err)
	}
	for _, addr := range []string{cfg.Listen, cfg.Admin} {
		if !strings.HasPrefix(addr, "127.0.0.1:") {
			t.Errorf("%s is not on loopback", addr)
		}
	}
}

func TestBadAddresses(t *testing.T) {
	const form = ": want host:port, as 127.0.0.1:8080"
	for _, c := range []struct {
		cfg  server.Config
		want string // "" = valid
	}{
		{server.Config{Listen: ":0", Admin: "[::1]:0"}, ""},
		{server.Config{Listen: "localhost:http", Admin: "127.0.0.1:65535"}, ""},
		{server.Config{Listen: "8080", Admin: "127.0.0.1:0"}, `--listen "8080"` + form},
		{server.Config{Listen: "127.0.0.1:0", Admin: "127.0.0.1"}, `--admin "127.0.0.1"` + form},
		{server.Config{Listen: "::1:80", Admin: "127.0.0.1:0"}, `--listen "::1:80"` + form},
		{server.Config{Listen: "127.0.0.1:http2000", Admin: "127.0.0.1:0"}, `--listen "127.0.0.1:http2000"` + form},
		{server.Config{Listen: "127.0.0.1:0", Admin: "127.0.0.1:65536"}, `--admin "127.0.0.1:65536"` + form},
		{server.Config{Listen: "127.0.0.1:-1", Admin: "127.0.0.1:0"}, `--listen "127.0.0.1:-1"` + form},
		{server.Config{}, `--listen ""` + form + "\n" + `--admin ""` + form},
		{server.Config{Listen: "a", Admin: "b"}, `--listen "a"` + form + "\n" + `--admin "b"` + form},
	} {
		err := c.cfg.Validate()
		if c.want == "" {
			if err != nil {
				t.Errorf("%+v: %v", c.cfg, err)
			}
			continue
		}
		if err == nil || err.Error() != c.want {
			t.Errorf("%+v: got %v, want %s", c.cfg, err, c.want)
		}
		if _, err := server.New(c.cfg, nil, nil, prometheus.NewRegistry(), slog.New(slog.DiscardHandler)); err == nil || err.Error() != c.want {
			t.Errorf("New: got %v", err)
		}
	}
}

func TestATakenPortNamesItsFlag(t *testing.T) {
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	busy := taken.Addr().String()
	for flag, cfg := range map[string]server.Config{
		"--listen": {Listen: busy, Admin: "127.0.0.1:0"}, "--admin": {Listen: "127.0.0.1:0", Admin: busy},
	} {
		_, err := server.New(cfg, nil, nil, prometheus.NewRegistry(), slog.New(slog.DiscardHandler))
		if err == nil {
			t.Fatalf("%s: a taken port was bound", flag)
		}
		for _, part := range []string{flag + " " + busy, "address already in use"} {
			if !strings.Contains(err.Error(), part) {
				t.Errorf("%s: %q does not tell %q", flag, err, part)
			}
		}
		offered := regexp.MustCompile(flag + ` (127\.0\.0\.1:\d+) is free`).FindStringSubmatch(err.Error())
		if offered == nil || offered[1] == busy {
			t.Fatalf("%s: %q offers no other address", flag, err)
		}
		l, err := net.Listen("tcp", offered[1])
		if err != nil {
			t.Fatalf("what is offered can't be bound: %v", err)
		}
		l.Close()
	}
	// The public port of a server whose admin port was taken is free again.
	s, err := server.New(free, nil, nil, prometheus.NewRegistry(), slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	public := strings.TrimPrefix(s.URL(), "http://")
	s.Close()
	if _, err := server.New(server.Config{Listen: public, Admin: busy}, nil, nil, prometheus.NewRegistry(), slog.New(slog.DiscardHandler)); err == nil {
		t.Fatal("a taken port was bound")
	}
	again, err := net.Listen("tcp", public)
	if err != nil {
		t.Fatalf("the public port is still held: %v", err)
	}
	again.Close()
}

// gate is a handler that tells when a request has come, and waits.
type gate struct {
	entered chan struct{}
	open    chan struct{}
}

func (g gate) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	g.entered <- struct{}{}
	select {
	case <-g.open:
		fmt.Fprint(w, "whole answer")
	case <-r.Context().Done():
	}
}

// request sends a request that waits at the gate, and returns where its answer will come.
func (g gate) request(r *running) <-chan string {
	answer := make(chan string, 1)
	go func() {
		resp, err := r.client.Get(r.URL() + "/slow")
		if err != nil {
			answer <- "error"
			return
		}
		defer resp.Body.Close()
		body, _ := io.ReadAll(resp.Body)
		answer <- string(body)
	}()
	<-g.entered
	return answer
}

func TestStopServesTheRequestUnderWay(t *testing.T) {
	g := gate{make(chan struct{}), make(chan struct{})}
	r := start(t, map[string]http.Handler{"/slow": g}, nil, prometheus.NewRegistry())
	answer := g.request(r)
	r.stop()
	began := time.Now()
	for accepts(r.URL()) { // until nothing new is taken
		if time.Since(began) > 10*time.Second {
			t.Fatal("it goes on listening")
		}
	}
	close(g.open)
	if got := <-answer; got != "whole answer" {
		t.Errorf("the request under way was answered %q", got)
	}
	if err := <-r.done; err != nil {
		t.Errorf("run: %v", err)
	}
	if took := time.Since(began); took > time.Second {
		t.Errorf("stopping took %v", took)
	}
}

func accepts(url string) bool {
	conn, err := net.Dial("tcp", strings.TrimPrefix(url, "http://"))
	if err != nil {
		return false
	}
	conn.Close()
	return true
}

func TestStopCutsARequestThatDoesNotEnd(t *testing.T) {
	g := gate{make(chan struct{}), nil}
	r := start(t, map[string]http.Handler{"/slow": g}, nil, prometheus.NewRegistry())
	answer := g.request(r)
	began := time.Now()
	r.stop()
	if err := <-r.done; err != nil {
		t.Errorf("run: %v", err)
	}
	if took := time.Since(began); took > 1500*time.Millisecond {
		t.Errorf("stopping took %v", took)
	}
	if got := <-answer; got != "error" {
		t.Errorf("the request was answered %q", got)
	}
}

func TestStopBeforeServing(t *testing.T) {
	s, err := server.New(free, nil, nil, prometheus.NewRegistry(), slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if err := s.Run(ctx); err != nil {
		t.Error(err)
	}
	if accepts(s.URL()) || accepts(s.AdminURL()) {
		t.Error("a listener is still open")
	}
}

func TestRunFailsWhenAListenerDoes(t *testing.T) {
	s, err := server.New(free, nil, nil, prometheus.NewRegistry(), slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	s.Close() // behind its back
	if err := s.Run(t.Context()); err == nil || !strings.Contains(err.Error(), "serve 127.0.0.1:") {
		t.Errorf("got %v", err)
	}
}
