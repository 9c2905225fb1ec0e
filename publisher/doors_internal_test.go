package publisher

import (
	"syscall"
	"testing"

	"github.com/pebbe/zmq4"
)

// A stop that comes between a monitor's being ready and its being read is a clean one, too. From outside the moment can't be
// met.
func TestDoorsStopWhileTheyRead(t *testing.T) {
	zctx, err := zmq4.NewContext()
	if err != nil {
		t.Fatal(err)
	}
	monitor, err := zctx.NewSocket(zmq4.PAIR)
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- zctx.Term() }() // waits for the socket
	var d doors
	for err = d.hear(monitor); zmq4.AsErrno(err) == zmq4.Errno(syscall.EAGAIN); err = d.hear(monitor) {
	}
	if err = stopped(err); err != nil {
		t.Errorf("a stop is told as %v", err)
	}
	if err := monitor.Close(); err != nil {
		t.Error(err)
	}
	if err := <-ended; err != nil {
		t.Error(err)
	}
}
