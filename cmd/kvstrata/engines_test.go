package main

import (
	"fmt"
	"strings"
	"syscall"
	"testing"

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
