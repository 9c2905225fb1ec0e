// Package porttest finds ports that stay free until a test's process listens there.
package porttest

import (
	"fmt"
	"math/rand/v2"
	"net"
	"strconv"
	"testing"
)

// The ports lie below those that systems hand out by themselves (32768 on Linux, 49152 elsewhere), so that no listener on port 0
// and no outgoing connection takes one in the meantime; and so does the one 10,000 above each, where a Redis node listens for its cluster.
const (
	lowest  = 12_000
	highest = 21_999
)

// Run returns the first of n consecutive ports of loopback on which nobody listens.
func Run(n int) (int, error) {
	for range 100 {
		first := lowest + rand.IntN(highest-lowest-n+2)
		if free(first, n) {
			return first, nil
		}
	}
	return 0, fmt.Errorf("no %d consecutive ports between %d and %d are free", n, lowest, highest)
}

func free(first, n int) bool {
	for port := first; port < first+n; port++ {
		l, err := net.Listen("tcp", address(port))
		if err != nil || l.Close() != nil {
			return false
		}
	}
	return true
}

func address(port int) string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(port)) }

// Port returns a port of loopback on which nobody listens.
func Port(t testing.TB) int {
	t.Helper()
	port, err := Run(1)
	if err != nil {
		t.Fatal(err)
	}
	return port
}

// Address returns an address of loopback at which nobody listens.
func Address(t testing.TB) string {
	t.Helper()
	return address(Port(t))
}
