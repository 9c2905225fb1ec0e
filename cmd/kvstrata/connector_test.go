package main

import (
	"regexp"
	"strconv"
	"testing"
)

// transfersLine is how the demo says what came by transfer.
var transfersLine = regexp.MustCompile(`transfers +(\d+) blocks came and were compared byte for byte: (\d+) were wrong; (\d+) did not come`)

// transfers reads how many blocks came, were wrong, and failed.
func transfers(t *testing.T, out string) (came, wrong, failed int) {
	t.Helper()
	m := transfersLine.FindStringSubmatch(out)
	if m == nil {
		t.Fatalf("nothing is said of transfers:\n%s", out)
	}
	for i, n := range []*int{&came, &wrong, &failed} {
		*n, _ = strconv.Atoi(m[i+1])
	}
	return came, wrong, failed
}

// Prefill engines hand their blocks to decode engines: every byte is compared where it arrives, and simulator, index and
// history agree.
func TestDemoConnectors(t *testing.T) {
	trace := writeTrace(t, 120)
	for _, test := range []struct {
		name string
		args []string
	}{
		{"tcp", []string{"--connector", "tcp", "--speed", "max"}},
		{"tcp without shared memory", []string{"--connector", "tcp", "--speed", "max", "--connector-config", `{"shared_memory":false}`}},
		{"tcp in processes", []string{"--connector", "tcp", "--processes", "--speed", "100"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			args := append([]string{"demo", "--trace", trace, "--exit"}, test.args...)
			args = append(args, "--nats-listen", "127.0.0.1:0", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--log-level", "error")
			p := start(t, args...)
			<-p.exited
			if code := p.cmd.ProcessState.ExitCode(); code != exitOK {
				t.Fatalf("exit %d\n%s", code, p.output())
			}
			if came, wrong, failed := transfers(t, p.output()); came < 1000 || wrong > 0 || failed > 0 {
				t.Errorf("%d blocks came, %d were wrong, %d failed:\n%s", came, wrong, failed, p.output())
			}
		})
	}
}
