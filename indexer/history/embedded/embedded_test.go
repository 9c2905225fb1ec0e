package embedded_test

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/ClickHouse/clickhouse-go/v2"
	"github.com/prometheus/client_golang/prometheus"

	"kvstrata/indexer/history/embedded"
	"kvstrata/leaktest"
)

// roleVariable makes this test binary the hidden subcommand, or a parent that somebody kills.
const roleVariable = "KVSTRATA_TEST_ROLE"

const (
	patience = 30 * time.Second
	pause    = 5 * time.Millisecond
)

func TestMain(m *testing.M) {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	log := slog.New(slog.NewTextHandler(os.Stderr, nil))
	var err error
	if os.Getenv(roleVariable) == "" {
		stop()
		os.Setenv(roleVariable, "yes") // of those that the tests start
		os.Exit(leaktest.Run(m))
	}
	switch role := os.Args[1]; role {
	case "child":
		var cfg embedded.ChildConfig
		if cfg, err = embedded.ReadChildConfig(os.Stdin); err == nil {
			err = embedded.Serve(ctx, cfg, log)
		}
	case "parent":
		err = parentRole(ctx, os.Args[2], log)
	case "mute": // a child that never answers
		_, err = io.Copy(io.Discard, os.Stdin)
	case "noisy": // a child that dies with many words
		for i := range 1000 {
			fmt.Fprintln(os.Stderr, "line", i, strings.Repeat("long ", 1000))
		}
		fmt.Fprint(os.Stderr, "the last word")
		os.Exit(7)
	default:
		err = fmt.Errorf("no role %q", role)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

// parentRole runs an engine and tells the child's process id.
func parentRole(ctx context.Context, dir string, log *slog.Logger) error {
	engine, err := embedded.New(config(dir), log, prometheus.NewRegistry())
	if err != nil {
		return err
	}
	go func() {
		if engine.WaitReady(ctx) == nil {
			fmt.Println(engine.PID())
		}
	}()
	return engine.Run(ctx)
}

func config(dir string) embedded.Config {
	cfg := embedded.DefaultConfig()
	cfg.Dir, cfg.Args = dir, []string{"child"}
	cfg.Library = library()
	cfg.Limits.QueueWait = patience
	return cfg
}

// library is where npm puts it; elsewhere Find looks.
func library() string {
	arch := map[string]string{"amd64": "x64"}[runtime.GOARCH]
	path, err := filepath.Abs(filepath.Join("node_modules", "@chdb", "lib-linux-"+arch+"-gnu", "libchdb.so"))
	if _, e := os.Stat(path); err != nil || e != nil {
		return ""
	}
	return path
}

// needLibrary skips where the engine is not installed, but never in CI.
func needLibrary(t testing.TB) {
	t.Helper()
	if _, err := embedded.Find(library()); err != nil {
		if os.Getenv("CI") == "true" {
			t.Fatal(err)
		}
		t.Skip("SKIPPED, THE ENGINE IS NOT INSTALLED: ", err)
	}
}

// running is an engine that a test runs.
type running struct {
	*embedded.Engine
	reg *prometheus.Registry
	log *logged
	dir string
}

// start runs an engine until the test ends, and waits until it answers.
func start(t testing.TB, cfg embedded.Config) *running {
	t.Helper()
	needLibrary(t)
	if cfg.Dir == "" {
		cfg.Dir = t.TempDir()
	}
	r := &running{reg: prometheus.NewRegistry(), log: &logged{}, dir: cfg.Dir}
	engine, err := embedded.New(cfg, slog.New(slog.NewTextHandler(r.log, nil)), r.reg)
	if err != nil {
		t.Fatal(err)
	}
	r.Engine = engine
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- engine.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("run: %v", err)
		}
		if t.Failed() {
			t.Logf("the engine's log:\n%s", r.log.String())
		}
	})
	r.waitReady(t)
	return r
}

func (r *running) waitReady(t testing.TB) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if err := r.WaitReady(ctx); err != nil {
		t.Fatalf("%v\n%s", err, r.log.String())
	}
}

// open connects to a pool, as history does.
func (r *running) open(t testing.TB, pool embedded.Pool) clickhouse.Conn {
	t.Helper()
	conn, err := clickhouse.Open(embedded.Dial(r.Socket(), pool))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return conn
}

// answer is what the child answers to a plain HTTP request.
type answer struct {
	status int
	code   string
	body   string
}

// String keeps a long body out of a test's log.
func (a answer) String() string {
	body := a.body
	if len(body) > 600 {
		body = body[:300] + " … " + body[len(body)-300:]
	}
	return fmt.Sprintf("status %d, code %q, %d bytes: %s", a.status, a.code, len(a.body), body)
}

// send asks the child as curl would.
func (r *running) send(ctx context.Context, pool embedded.Pool, path, sql string) (answer, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://localhost"+path, strings.NewReader(sql))
	if err != nil {
		return answer{}, err
	}
	if pool != "" {
		request.Header.Set(embedded.PoolHeader, string(pool))
	}
	response, err := r.client().Do(request)
	if err != nil {
		return answer{}, err
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	return answer{response.StatusCode, response.Header.Get("X-ClickHouse-Exception-Code"), string(text)}, err
}

func (r *running) client() *http.Client {
	return &http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return embedded.DialSocket(ctx, r.Socket())
		},
	}}
}

// post sends a statement, with parameters in the URL.
func (r *running) post(t *testing.T, pool embedded.Pool, query, sql string) answer {
	t.Helper()
	got, err := r.send(t.Context(), pool, "/?"+query, sql)
	if err != nil {
		t.Fatal(err)
	}
	return got
}

func exec(t testing.TB, conn clickhouse.Conn, sql string) {
	t.Helper()
	if err := conn.Exec(t.Context(), sql); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
}

func count(t *testing.T, conn clickhouse.Conn, from string) (n uint64) {
	t.Helper()
	if err := conn.QueryRow(t.Context(), "SELECT count() FROM "+from).Scan(&n); err != nil {
		t.Fatal(err)
	}
	return n
}

// eventually waits for a condition.
func eventually(t *testing.T, what string, holds func() bool) {
	t.Helper()
	for deadline := time.Now().Add(patience); !holds(); <-time.After(pause) {
		if time.Now().After(deadline) {
			t.Fatalf("after %v: not %s", patience, what)
		}
	}
}
