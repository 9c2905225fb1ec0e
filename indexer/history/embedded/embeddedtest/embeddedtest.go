// Package embeddedtest gives tests the real ClickHouse engine: their own binary is its child process.
package embeddedtest

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"kvstrata/indexer/history/embedded"
	"kvstrata/leaktest"
)

// childVariable makes a test binary the engine's child process.
const childVariable = "KVSTRATA_TEST_ENGINE_CHILD"

// Main is a package's TestMain: it runs the tests, or, in a child that one of them started, the engine. It does not return.
func Main(m *testing.M) {
	if os.Getenv(childVariable) == "" {
		os.Setenv(childVariable, "1") // of the children that the tests start
		os.Exit(leaktest.Run(m))
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	cfg, err := embedded.ReadChildConfig(os.Stdin)
	if err == nil {
		err = embedded.Serve(ctx, cfg, slog.New(slog.NewTextHandler(os.Stderr, nil)))
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

// Start starts the engine on a folder of its own, and stops it with the test. Without its library the test fails in CI, and
// is skipped elsewhere.
func Start(t testing.TB, log *slog.Logger) *embedded.Engine {
	t.Helper()
	return start(t, log)
}

func start(t testing.TB, log *slog.Logger, boot ...string) *embedded.Engine {
	t.Helper()
	cfg := embedded.DefaultConfig()
	cfg.Dir, cfg.Boot, cfg.Args, cfg.Library = t.TempDir(), boot, []string{"child"}, library(t)
	e, err := embedded.New(cfg, log, prometheus.NewRegistry())
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- e.Run(ctx) }()
	t.Cleanup(func() {
		stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	if err := e.WaitReady(t.Context()); err != nil {
		t.Fatal(err)
	}
	return e
}

// library returns where the engine's library is: where make setup put it below the module's root, or where Find looks.
func library(t testing.TB) string {
	t.Helper()
	dir, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	for ; dir != filepath.Dir(dir); dir = filepath.Dir(dir) {
		found, err := filepath.Glob(filepath.Join(dir, "indexer/history/embedded/node_modules/@chdb/lib-linux-*-gnu/libchdb.so"))
		if err == nil && len(found) > 0 && os.Getenv("KVSTRATA_CHDB") == "" {
			return found[0]
		}
	}
	lib, err := embedded.Find("")
	switch {
	case err == nil:
		return lib
	case os.Getenv("CI") != "":
		t.Fatal(err)
	default:
		t.Skipf("SKIPPED: %v", err)
	}
	return ""
}
