package interop_test

import (
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"kvstrata/leaktest"
	"kvstrata/publisher"
)

// patience is for what comes soon, unless the machine is very busy.
const patience = 30 * time.Second

// version is a release of vLLM, or of LMCache, that setup.sh installs.
type version struct {
	name   string // of its venv
	number string
	form   publisher.Form // of the events that it writes and reads
}

var versions = []version{
	{"new", "0.32.0", publisher.MapForm},
	{"old", "0.23.0", publisher.ArrayForm},
}

// eachVersion runs a test against each release.
func eachVersion(t *testing.T, f func(t *testing.T, v version)) {
	t.Parallel()
	for _, v := range versions {
		t.Run(v.name, func(t *testing.T) {
			t.Parallel()
			v.need(t)
			f(t, v)
		})
	}
}

func (v version) interpreter() string {
	return filepath.Join(".venv", v.name, "bin", "python")
}

// need fails the test where the release must be there, and skips it elsewhere.
func (v version) need(t testing.TB) {
	t.Helper()
	if _, err := os.Stat(v.interpreter()); err == nil {
		return
	}
	why := fmt.Sprintf("%s %s is not installed: run interop/setup.sh %s", v.name, v.number, v.name)
	if os.Getenv("CI") != "" {
		t.Fatal(why)
	}
	fmt.Fprintf(os.Stderr, "SKIPPED %s: %s\n", t.Name(), why)
	t.Skip(why)
}

var workDir string

// TestMain fails when a test leaves a goroutine behind.
func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "kvstrata-interop-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	workDir = dir
	code := leaktest.Run(m)
	_ = os.RemoveAll(dir) // only litter would be left
	os.Exit(code)
}

// binary builds kvstrata, once. It is instrumented as the tests are, so that both share the build cache.
var binary = sync.OnceValues(func() (string, error) {
	path := filepath.Join(workDir, "kvstrata")
	args := []string{"build", "-o", path}
	if info, ok := debug.ReadBuildInfo(); ok && slices.Contains(info.Settings, debug.BuildSetting{Key: "-race", Value: "true"}) {
		args = append(args, "-race")
	}
	out, err := exec.Command("go", append(args, "kvstrata/cmd/kvstrata")...).CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("build kvstrata: %w\n%s", err, out)
	}
	return path, nil
})

// eventually waits until check finds nothing wrong any more.
func eventually(t testing.TB, what string, check func() error) {
	t.Helper()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for deadline := time.Now().Add(patience); ; <-tick.C {
		err := check()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s: not within %v: %v", what, patience, err)
		}
	}
}

// logTo returns a logger whose lines the test prints if it fails.
func logTo(t testing.TB, who string) *slog.Logger {
	lines := &tail{most: 200}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("%s said:\n%s", who, lines)
		}
	})
	return slog.New(slog.NewTextHandler(lines, nil))
}

// tail keeps the last lines written to it. Safe for concurrent use.
type tail struct {
	most int

	mu    sync.Mutex
	lines []string
}

func (w *tail) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.lines = append(w.lines, string(p))
	if len(w.lines) > w.most {
		w.lines = w.lines[1:]
	}
	return len(p), nil
}

func (w *tail) String() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return strings.Join(w.lines, "")
}
