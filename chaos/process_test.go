package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// running runs a shell's script as a process until the test ends.
func running(t *testing.T, script string) (p *process, stop func()) {
	t.Helper()
	p, err := newProcess("script", t.TempDir(), func(int) []string { return []string{"/bin/sh", "-c", script} })
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var group sync.WaitGroup
	group.Go(func() { p.run(ctx) })
	stop = func() {
		cancel()
		group.Wait()
	}
	t.Cleanup(stop)
	return p, stop
}

func (p *process) awaitLife(t *testing.T, life int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	for p.lives() < life || p.said("api") == "" {
		sleep(ctx, 5*time.Millisecond)
		if ctx.Err() != nil {
			t.Fatalf("life %d does not begin", life)
		}
	}
}

func TestProcessIsKilledAndStartedAgain(t *testing.T) {
	p, stop := running(t, "echo api here; exec sleep 1000")
	p.awaitLife(t, 1)
	between := false
	if err := p.end(syscall.SIGKILL, func() { between = true }); err != nil {
		t.Fatal(err)
	}
	p.awaitLife(t, 2)
	p.mu.Lock()
	pid := p.pid
	p.mu.Unlock()
	paused := make(chan error, 1)
	ctx, resume := context.WithCancel(t.Context())
	go func() { paused <- p.pause(ctx, time.Hour) }()
	stateOf := func(want string) {
		t.Helper()
		for deadline := time.Now().Add(patience); ; {
			text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
			if err != nil {
				t.Fatal(err)
			}
			if _, rest, _ := strings.Cut(string(text), ") "); strings.HasPrefix(rest, want) {
				return
			}
			if time.Now().After(deadline) {
				t.Fatalf("its state is not %s: %s", want, text)
			}
		}
	}
	stateOf("T")
	resume()
	if err := <-paused; err != nil {
		t.Error(err)
	}
	stateOf("S")
	stop()
	if !between || len(p.deaths) > 1 { // sleep ends by the signal: not cleanly
		t.Errorf("between: %v, deaths: %v", between, p.deaths)
	}
}

func TestProcessThatEndsByItselfIsTold(t *testing.T) {
	p, stop := running(t, "echo api here; exit 3")
	p.awaitLife(t, 2)
	stop()
	if len(p.deaths) == 0 || !strings.Contains(p.deaths[0], "script ended by itself in life 1: exit status 3") {
		t.Errorf("%q", p.deaths)
	}
}

func TestReadJournal(t *testing.T) {
	path := filepath.Join(t.TempDir(), "journal")
	write := func(text string) {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if got, err := readJournal(path); got != nil || err != nil {
		t.Errorf("of a life without one: %v, %v", got, err)
	}
	write(`{"seq":0,"time":1700000000000000000,"stored":3,"evicted":1,"cleared":0}
{"seq":1,"time":1700000000020000000,"stored":0,"evicted":0,"cleared":1}
{"seq":2,"time":17000000`)
	got, err := readJournal(path)
	want := []batch{{Seq: 0, Time: 1_700_000_000_000_000, Stored: 3, Evicted: 1}, {Seq: 1, Time: 1_700_000_000_020_000, Cleared: 1}}
	if diff := cmp.Diff(want, got); diff != "" || err != nil {
		t.Errorf("%v\n%s", err, diff)
	}
	write("{\"seq\":1}\n")
	if _, err := readJournal(path); err == nil {
		t.Error("a journal that does not begin with sequence 0")
	}
}
