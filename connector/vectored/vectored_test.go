package vectored_test

import (
	"bytes"
	"testing"

	"golang.org/x/sys/unix"

	"kvstrata/connector/vectored"
)

// Pieces go through a socket in pieces of other sizes, over as many calls as it takes.
func TestPiecesThroughASocket(t *testing.T) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _, _ = unix.Close(fds[0]), unix.Close(fds[1]) }()
	sent := make([]byte, 3<<20)
	for i := range sent {
		sent[i] = byte(i * 7)
	}
	got := make([]byte, len(sent))
	cut := func(b []byte, size int) (iov []unix.Iovec) {
		for len(b) > 0 {
			n := min(size, len(b))
			iov, b = append(iov, vectored.Of(b[:n])), b[n:]
		}
		return iov
	}
	out, in := cut(sent, 4093), cut(got, 9001)
	for len(in) > 0 {
		if len(out) > 0 {
			n, errno := vectored.Write(uintptr(fds[0]), out[:min(len(out), vectored.Max)])
			if errno != 0 && errno != unix.EAGAIN {
				t.Fatal(errno)
			}
			out = vectored.Advance(out, n)
		}
		n, errno := vectored.Read(uintptr(fds[1]), in[:min(len(in), vectored.Max)])
		if errno != 0 && errno != unix.EAGAIN {
			t.Fatal(errno)
		}
		in = vectored.Advance(in, n)
	}
	if !bytes.Equal(sent, got) {
		t.Error("other bytes came than were sent")
	}
	if _, errno := vectored.Read(uintptr(fds[1]), cut(got, 1<<20)); errno != unix.EAGAIN {
		t.Errorf("nothing is left: %v", errno)
	}
	if err := unix.Close(fds[0]); err != nil {
		t.Fatal(err)
	}
	fds[0] = -1
	if n, errno := vectored.Read(uintptr(fds[1]), cut(got, 1<<20)); n != 0 || errno != 0 {
		t.Errorf("the end of the stream: %d, %v", n, errno)
	}
}
