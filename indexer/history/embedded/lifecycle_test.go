package embedded_test

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	osexec "os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"kvstrata/indexer/history/embedded"
)

func TestAKilledChildIsStartedAgainWithItsData(t *testing.T) {
	r := start(t, config(""))
	w := r.open(t, embedded.Writer)
	exec(t, w, numbersTable)
	if err := fill(t.Context(), w, "numbers", 0, 1000); err != nil {
		t.Fatal(err)
	}
	pid := r.PID()
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	eventually(t, "another child", func() bool { p := r.PID(); return p != 0 && p != pid })
	r.waitReady(t)
	if n := count(t, w, "numbers"); n != 1000 {
		t.Errorf("%d rows after the restart", n)
	}
	if n := strings.Count(r.log.String(), "level=WARN"); n != 1 {
		t.Errorf("%d warnings of one death:\n%s", n, r.log.String())
	}
	want := "# HELP kvstrata_history_engine_restarts_total Times that the history engine's child process died and was started again.\n" +
		"# TYPE kvstrata_history_engine_restarts_total counter\nkvstrata_history_engine_restarts_total 1\n" +
		"# HELP kvstrata_history_engine_up 1 while the history engine's child process answers.\n" +
		"# TYPE kvstrata_history_engine_up gauge\nkvstrata_history_engine_up 1\n"
	if err := testutil.GatherAndCompare(r.reg, strings.NewReader(want)); err != nil {
		t.Error(err)
	}
}

func TestAWedgedChildIsKilled(t *testing.T) {
	cfg := config("")
	cfg.Patience = time.Second
	r := start(t, cfg)
	pid := r.PID()
	if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	eventually(t, "another child", func() bool { p := r.PID(); return p != 0 && p != pid })
	r.waitReady(t)
	if !strings.Contains(r.log.String(), "answered no ping") {
		t.Error(r.log.String())
	}
}

func TestAPingWaitsForNoStatement(t *testing.T) {
	r := start(t, config(""))
	pools := []embedded.Pool{embedded.Writer, embedded.Dashboard, embedded.Dashboard, embedded.Free} // every connection
	done := make(chan answer, len(pools))
	for _, pool := range pools {
		go func() {
			got, _ := r.send(t.Context(), pool, "/", "SELECT sum(sleepEachRow(0.5)) FROM numbers(5)")
			done <- got
		}()
	}
	pings := 0
	for len(done) == 0 {
		if got, err := r.send(t.Context(), "", "/ping", ""); err != nil || got.body != "Ok.\n" {
			t.Fatalf("ping: %v, %v", got, err)
		}
		pings++
	}
	for range pools {
		if got := <-done; got.body != "0\n" {
			t.Errorf("a statement: %v", got)
		}
	}
	if pings < 10 {
		t.Errorf("%d pings while statements ran", pings)
	}
}

func TestNoChildOutlivesItsParent(t *testing.T) {
	needLibrary(t)
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	parent := osexec.Command(exe, "parent", t.TempDir())
	out, err := parent.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := parent.Start(); err != nil {
		t.Fatal(err)
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(line))
	if err != nil {
		t.Fatal(err)
	}
	if err := parent.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = parent.Wait()
	eventually(t, "gone", func() bool { return gone(pid) })
}

// gone reports whether a process has ended; that nobody has reaped it yet, as in a container without init, is no life.
func gone(pid int) bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	return err != nil || strings.Contains(string(stat), ") Z ")
}

func TestTheEndOfStandardInputStopsTheChild(t *testing.T) {
	needLibrary(t)
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	path, err := embedded.Find(library())
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	child := osexec.Command(exe, "child")
	stdin, err := child.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := child.Start(); err != nil {
		t.Fatal(err)
	}
	cfg := embedded.ChildConfig{Dir: dir, Library: path, Limits: embedded.DefaultLimits()}
	if err := json.NewEncoder(stdin).Encode(cfg); err != nil {
		t.Fatal(err)
	}
	eventually(t, "listening", func() bool { _, err := os.Stat(embedded.SocketPath(dir)); return err == nil })
	if err := stdin.Close(); err != nil {
		t.Fatal(err)
	}
	if err := child.Wait(); err != nil {
		t.Error(err)
	}
}

func TestAFolderHasOneEngine(t *testing.T) {
	r := start(t, config(""))
	path, err := embedded.Find(library())
	if err != nil {
		t.Fatal(err)
	}
	err = embedded.Serve(t.Context(), embedded.ChildConfig{Dir: r.dir, Library: path, Limits: embedded.DefaultLimits()}, slog.New(slog.DiscardHandler))
	if err == nil || !strings.Contains(err.Error(), r.dir) || !strings.Contains(err.Error(), strconv.Itoa(r.PID())) {
		t.Errorf("got %v, want an error that names the folder and its holder", err)
	}
	if got := r.post(t, embedded.Free, "", "SELECT 1"); got.body != "1\n" {
		t.Errorf("the first one afterwards: %v", got)
	}
	second, err := embedded.New(config(r.dir), slog.New(slog.DiscardHandler), prometheus.NewRegistry())
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- second.Run(ctx) }()
	eventually(t, "told why", func() bool { _, reason := second.State(); return strings.Contains(reason, "another history engine") })
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

func TestOnlyTheUserMayConnect(t *testing.T) {
	r := start(t, config(""))
	for path, want := range map[string]fs.FileMode{r.Socket(): fs.ModeSocket | 0o600, filepath.Join(r.dir, "lock"): 0o600} {
		info, err := os.Stat(path)
		if err != nil {
			t.Fatal(err)
		}
		if info.Mode() != want {
			t.Errorf("%s: mode %v, want %v", path, info.Mode(), want)
		}
	}
}

func TestALongFolderName(t *testing.T) {
	r := start(t, config(filepath.Join(t.TempDir(), strings.Repeat("long/", 30))))
	if len(r.Socket()) < 108 {
		t.Fatalf("%s is not long", r.Socket())
	}
	if n := count(t, r.open(t, embedded.Free), "system.one"); n != 1 {
		t.Errorf("%d rows", n)
	}
}

func TestAChildThatNeverAnswersIsKilled(t *testing.T) {
	cfg := config(t.TempDir())
	cfg.Args, cfg.Patience = []string{"mute"}, 50*time.Millisecond
	e, log, stop := unready(t, cfg)
	eventually(t, "killed", func() bool { return strings.Count(log.String(), "answered no ping for 50ms") > 1 })
	if up, _ := e.State(); up {
		t.Error("up")
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := e.WaitReady(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("wait: %v", err)
	}
	stop()
}

func TestADeathIsToldInOneLine(t *testing.T) {
	cfg := config(t.TempDir())
	cfg.Args = []string{"noisy"}
	_, log, stop := unready(t, cfg)
	eventually(t, "told", func() bool { return strings.Contains(log.String(), `reason="exit status 7: the last word"`) })
	stop()
	lines := strings.Split(strings.TrimSpace(log.String()), "\n")
	warnings, children := 0, strings.Count(log.String(), "engine died")
	for _, line := range lines {
		if strings.Contains(line, "level=WARN") {
			warnings++
		}
		if len(line) > 2000 {
			t.Errorf("a line of %d bytes", len(line))
		}
	}
	if warnings != children || len(lines) > 110*(children+1) {
		t.Errorf("%d warnings and %d lines of %d children", warnings, len(lines), children)
	}
}

// unready runs an engine whose child is no engine, and needs no library.
func unready(t *testing.T, cfg embedded.Config) (e *embedded.Engine, log *logged, stop func()) {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cfg.Library, log = exe, &logged{}
	e, err = embedded.New(cfg, slog.New(slog.NewTextHandler(log, nil)), prometheus.NewRegistry())
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- e.Run(ctx) }()
	return e, log, func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
}

func TestAConfigurationTellsAllThatIsWrong(t *testing.T) {
	_, err := embedded.New(embedded.Config{}, slog.New(slog.DiscardHandler), prometheus.NewRegistry())
	for _, want := range []string{"folder", "arguments", "memory", "writers", "patience"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s is not told: %v", want, err)
		}
	}
}

func TestFind(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "libchdb.so")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	nowhere := filepath.Join(dir, "nowhere")
	for _, tt := range []struct{ name, explicit, variable, want string }{
		{"the flag", file, nowhere, file},
		{"the flag names the folder", dir, "", file},
		{"the variable", "", file, file},
		{"the flag is wrong", nowhere, file, ""},
		{"the variable is wrong", "", nowhere, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Setenv("KVSTRATA_CHDB", tt.variable)
			got, err := embedded.Find(tt.explicit)
			if got != tt.want || (err != nil) != (tt.want == "") {
				t.Errorf("got %q, %v", got, err)
			}
			if err != nil && !strings.Contains(err.Error(), "make setup") {
				t.Errorf("no remedy: %v", err)
			}
		})
	}
	t.Run("the usual places", func(t *testing.T) {
		t.Setenv("KVSTRATA_CHDB", "")
		t.Chdir(dir)
		cache := filepath.Join(dir, "cache")
		t.Setenv("XDG_CACHE_HOME", cache)
		if _, err := embedded.Find(""); err == nil || !strings.Contains(err.Error(), "make setup") || !strings.Contains(err.Error(), cache) {
			t.Errorf("got %v", err)
		}
		if err := os.MkdirAll(filepath.Join(cache, "kvstrata"), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(file, filepath.Join(cache, "kvstrata", "libchdb.so")); err != nil {
			t.Fatal(err)
		}
		if got, err := embedded.Find(""); got != filepath.Join(cache, "kvstrata", "libchdb.so") {
			t.Errorf("got %q, %v", got, err)
		}
	})
}
