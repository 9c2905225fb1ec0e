package main

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"kvstrata/sim"
)

// writeTrace writes a trace of so many requests, each a third as long again as a shared beginning.
func writeTrace(t *testing.T, requests int) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "trace.jsonl")
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	w := sim.NewTraceWriter(f)
	random := rand.New(rand.NewPCG(1, 2))
	next := uint64(1000)
	for i := range requests {
		r := sim.TraceRequest{Timestamp: int64(i), OutputLength: 20}
		family := uint64(random.IntN(20)) * 20
		for n := range uint64(10) {
			r.HashIDs = append(r.HashIDs, family+n)
		}
		for range 2 + random.IntN(10) {
			next++
			r.HashIDs = append(r.HashIDs, next)
		}
		r.InputLength = 512 * len(r.HashIDs)
		if err := w.Write(&r); err != nil {
			t.Fatal(err)
		}
	}
	return path
}

// running finds a process that the tests started by words of its command line.
func running(t *testing.T, words ...string) int {
	t.Helper()
	found := 0
	eventually(t, fmt.Sprintf("a process %v", words), func() bool {
		commands, err := filepath.Glob("/proc/[0-9]*/cmdline")
		if err != nil {
			t.Fatal(err)
		}
		for _, path := range commands {
			line, err := os.ReadFile(path)
			if err != nil || !bytes.HasPrefix(line, []byte(binary+"\x00"+strings.Join(words, "\x00")+"\x00")) {
				continue
			}
			if found, err = strconv.Atoi(filepath.Base(filepath.Dir(path))); err == nil {
				return true
			}
		}
		return false
	}, func() string { return "" })
	return found
}

func kill(t *testing.T, pid int, sig syscall.Signal) {
	t.Helper()
	if err := syscall.Kill(pid, sig); err != nil {
		t.Fatal(err)
	}
}

// TestProcessesAreKilled runs each role as a process, kills the ClickHouse engine and the history role while events flow,
// and wants the simulator, the index and history to agree block for block.
func TestProcessesAreKilled(t *testing.T) {
	p := start(t, "demo", "--processes", "--trace", writeTrace(t, 3000), "--speed", "max", "--exit", "--pool-blocks", "8192",
		"--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--nats-listen", "127.0.0.1:0")
	url := p.says(`dashboard +(http://\S+)`)
	applied := func(blocks uint64) {
		eventually(t, fmt.Sprintf("%d block events", blocks), func() bool {
			sum := uint64(0)
			for _, s := range sources(t, url) {
				sum += s.Totals.Stored
			}
			return sum >= blocks
		}, p.output)
	}
	applied(100_000)
	kill(t, running(t, historyEngineArg), syscall.SIGKILL)
	applied(400_000)
	kill(t, running(t, "run", "--roles", "history"), syscall.SIGKILL)
	applied(700_000)
	kill(t, running(t, historyEngineArg), syscall.SIGKILL)
	<-p.exited
	if code := p.cmd.ProcessState.ExitCode(); code != exitOK {
		t.Fatalf("exit %d\n%s", code, p.output())
	}
	for _, want := range []string{
		"a role's process ended; starting it again", "history engine died; starting it again",
		"every engine's resident set and totals are the same in the simulator, in the index and in history, block for block",
	} {
		if !strings.Contains(p.output(), want) {
			t.Errorf("the output does not say %q:\n%s", want, p.output())
		}
	}
}
