package main

import (
	"fmt"
	"log/slog"
	"net"
	"os"
	"strings"
	"syscall"
	"testing"

	"kvstrata/bus"
	"kvstrata/connector/redis/redistest"
	"kvstrata/event"
)

// Engines are killed in the middle of transfers: whoever fetched from them, or was fetched from, goes on with the next
// life, and no byte is ever wrong.
func TestEnginesAreKilled(t *testing.T) {
	p := start(t, "demo", "--connector", "tcp", "--processes", "--speed", "20", "--nats-listen", "127.0.0.1:0", "--listen", "127.0.0.1:0",
		"--admin", "127.0.0.1:0")
	url := p.says(`dashboard +(http://\S+)`)
	life := func(instance string, after event.Epoch, blocks uint64) (now event.Epoch) {
		eventually(t, fmt.Sprintf("%d blocks of %s in a life after %d", blocks, instance, after), func() bool {
			for _, s := range sources(t, url) {
				if s.Source.Instance == instance && s.Source.Origin == event.Engine && s.Epoch > after && s.Totals.Stored >= blocks {
					now = s.Epoch
					return true
				}
			}
			return false
		}, p.output)
		return now
	}
	for _, instance := range []string{"decode-0", "prefill-1"} {
		before := life(instance, 0, 1000)
		kill(t, running(t, "engine", "--name", instance), syscall.SIGKILL)
		life(instance, before, 1000)
	}
	if err := p.cmd.Process.Signal(syscall.SIGINT); err != nil {
		t.Fatal(err)
	}
	<-p.exited
	if code := p.cmd.ProcessState.ExitCode(); code != exitOK {
		t.Fatalf("exit %d\n%s", code, p.output())
	}
	if came, wrong, _ := transfers(t, p.output()); came < 1000 || wrong > 0 {
		t.Errorf("%d blocks came, %d were wrong", came, wrong)
	}
	if n := strings.Count(p.output(), "a role's process ended; starting it again"); n != 2 {
		t.Errorf("%d processes were started again, want 2:\n%s", n, p.output())
	}
}

// A store's password is on no command line, and in no line that is printed.
func TestThePasswordOfAStoreStaysPrivate(t *testing.T) {
	const password = "correct-horse-battery"
	store := redistest.Start(t, "--requirepass", password)
	p := start(t, "demo", "--connector", "redis", "--store", "redis://:"+password+"@"+store.Addr+"/0", "--processes", "--speed", "20",
		"--nats-listen", "127.0.0.1:0", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0")
	p.says(`dashboard +(http://\S+)`)
	pids := []int{running(t, "engine", "--name", "decode-0"), running(t, "run", "--roles", "store")}
	for _, pid := range pids {
		line, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		if err != nil {
			t.Fatal(err)
		}
		if strings.Contains(string(line), password) {
			t.Errorf("a command line has it: %q", line)
		}
	}
	p.says(`KV transfers.*connector=redis`)
	if code, _ := p.interrupt(os.Interrupt); code != exitOK {
		t.Fatalf("exit %d\n%s", code, p.output())
	}
	if strings.Contains(p.output(), password) {
		t.Errorf("it is printed:\n%s", p.output())
	}
}

// An engine whose socket can't be bound says so and ends, so that it can be started again.
func TestAnEngineThatCannotPublishEnds(t *testing.T) {
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	server, err := bus.StartServer(bus.ServerConfig{Dir: t.TempDir(), Host: "127.0.0.1", Port: -1}, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	defer server.Shutdown()
	p := start(t, "engine", "--name", "e", "--nats", server.URL(), "--start", "1", "--began", "1", "--events", "tcp://"+taken.Addr().String())
	<-p.exited
	if code := p.cmd.ProcessState.ExitCode(); code != exitFailure || !strings.Contains(p.output(), taken.Addr().String()) {
		t.Errorf("exit %d\n%s", code, p.output())
	}
}

// The benchmark leaves what others have in a store alone, and nothing of its own.
func TestBenchTransferLeavesAStoreAsItWas(t *testing.T) {
	store := redistest.Start(t)
	store.Do("SET", "production", "data")
	var out strings.Builder
	code := run([]string{
		"bench", "transfer", "--connector", "redis", "--store", "redis://" + store.Addr + "/0", "--block", "64K", "--blocks", "16", "--rounds", "1",
	}, &out, &out)
	if code != exitOK || !strings.Contains(out.String(), "gb_per_s") {
		t.Fatalf("exit %d\n%s", code, &out)
	}
	if keys := store.Do("KEYS", "*"); keys != "production" {
		t.Errorf("keys %q", keys)
	}
}
