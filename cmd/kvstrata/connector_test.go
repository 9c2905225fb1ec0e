package main

import (
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"kvstrata/connector/redis/redistest"
	"kvstrata/event"
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
		{"redis", []string{"--connector", "redis", "--speed", "100"}},
		{"lmcache", []string{"--connector", "lmcache", "--speed", "100"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			args := append([]string{"demo", "--trace", trace, "--exit"}, test.args...)
			args = append(args, "--nats-listen", "127.0.0.1:0", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--log-level", "error")
			p := start(t, args...)
			<-p.exited
			if code := p.cmd.ProcessState.ExitCode(); code != exitOK {
				t.Fatalf("exit %d\n%s", code, p.output())
			}
			least, most := 1000, 0
			if test.name == "redis" || test.name == "lmcache" { // a demo's store is small: it may evict what was just found in it
				least, most = 100, 1<<30
			}
			if came, wrong, failed := transfers(t, p.output()); came < least || wrong > 0 || failed > most {
				t.Errorf("%d blocks came, %d were wrong, %d failed:\n%s", came, wrong, failed, p.output())
			}
		})
	}
}

// The dashboard's index shows the store of a demo as a source that holds exactly what the store does.
func TestDemoStores(t *testing.T) {
	trace := writeTrace(t, 40)
	for _, test := range []struct {
		name, connector string
		args            []string
	}{
		{"redis", "redis", nil},
		{"redis in processes", "redis", []string{"--processes"}},
		{"lmcache", "lmcache", nil},
		{"lmcache in processes", "lmcache", []string{"--processes"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			var address string
			var blocks func() int
			if test.connector == "redis" {
				s := redistest.Start(t)
				address, blocks = "redis://"+s.Addr+"/0", func() int { return len(inRedis(t, s)) }
			} else {
				server, addr, _ := lmServer(t, "127.0.0.1:0", 1<<30)
				address, blocks = "lm://"+addr, func() int { return 16 * server.Stats().Keys }
			}
			args := append([]string{"demo", "--trace", trace, "--speed", "100", "--connector", test.connector, "--store", address}, test.args...)
			p := start(t, append(args, anyPorts...)...)
			url := p.says(`dashboard +(http://\S+)`)
			p.says(`(The traffic has ended)`)
			var got string
			eventually(t, "the store's source to come to what it holds", func() bool {
				want := blocks()
				for _, info := range sources(t, url) {
					if info.Source.Origin == event.Store && info.Source.Instance == test.connector {
						got = fmt.Sprintf("%d blocks in the store; %v %v", want, info.State, info.Resident)
						return want > 1000 && info.State == event.StateLive && len(info.Resident) == 1 && info.Resident[0].Blocks == uint64(want)
					}
				}
				return false
			}, func() string { return got + p.output() })
			for _, info := range sources(t, url) {
				reads := strings.HasPrefix(info.Source.Instance, "decode")
				if info.Source.Origin == event.Connector && slices.Equal(info.Stores, []string{test.connector}) != reads {
					t.Errorf("%v reads from %v", info.Source, info.Stores)
				}
			}
			if code, _ := p.interrupt(syscall.SIGTERM); code != exitOK {
				t.Fatalf("exit %d\n%s", code, p.output())
			}
			if came, wrong, failed := transfers(t, p.output()); came < 100 || wrong > 0 || failed > 0 { // how much was saved in time, time tells
				t.Errorf("%d blocks came, %d were wrong, %d failed:\n%s", came, wrong, failed, p.output())
			}
		})
	}
}
