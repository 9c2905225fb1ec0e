// Package leaktest runs a package's tests and fails them when they leave a goroutine behind.
package leaktest

import (
	"bytes"
	"flag"
	"fmt"
	"os"
	"runtime"
	"testing"
	"time"
)

// natsLeak is where a goroutine of nats.go v1.55.0 may wait for ever: an object store's Put starts it, and when it is
// scheduled only after the Put has ended, its channel is gone. It holds nothing but itself.
var natsLeak = []byte("jetstream.(*jetStream).resetPendingAcksOnReconnect(")

// patience is how long goroutines have to end once the tests have.
const patience = 30 * time.Second

// Run runs the tests and returns the exit code. The fuzzer leaves goroutines of its own: they are let be.
func Run(m *testing.M) int {
	before := runtime.NumGoroutine()
	code := m.Run()
	if flag.Lookup("test.fuzz").Value.String() != "" {
		return code
	}
	for deadline := time.Now().Add(patience); code == 0 && runtime.NumGoroutine() > before; <-time.After(time.Millisecond) {
		stacks := make([]byte, 1<<20)
		stacks = stacks[:runtime.Stack(stacks, true)]
		if runtime.NumGoroutine()-bytes.Count(stacks, natsLeak) <= before {
			break
		}
		if time.Now().After(deadline) {
			fmt.Fprintf(os.Stderr, "goroutines left:\n%s\n", stacks)
			code = 1
		}
	}
	return code
}
