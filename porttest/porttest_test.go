package porttest

import (
	"net"
	"testing"
)

func TestPortsAreFreeAndNotHandedOut(t *testing.T) {
	first, err := Run(3)
	if err != nil || first < lowest || first+2 > highest {
		t.Fatalf("%d, %v", first, err)
	}
	l, err := net.Listen("tcp", address(first+1))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if free(first, 3) {
		t.Error("a port that is listened on counts as free")
	}
	if !free(first, 1) || !free(first+2, 1) {
		t.Error("its neighbours do not")
	}
	for range 20 { // what the system hands out is elsewhere
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		if port := l.Addr().(*net.TCPAddr).Port; port >= lowest && port <= highest {
			t.Errorf("the system hands out %d", port)
		}
	}
}
