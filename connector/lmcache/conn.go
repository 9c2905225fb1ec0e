package lmcache

import (
	"bufio"
	"errors"
	"io"
	"net"
	"syscall"

	"golang.org/x/sys/unix"

	"kvstrata/connector/vectored"
)

// conn is one connection to a server. One goroutine uses it at a time.
type conn struct {
	net    net.Conn
	raw    syscall.RawConn // of a socket that readv works on
	in     *bufio.Reader   // for replies that come together; values are read past it
	frames []byte          // requests on their way out
	out    net.Buffers
	vecs   []unix.Iovec
}

func newConn(c net.Conn) *conn {
	k := &conn{net: c}
	if s, ok := c.(syscall.Conn); ok {
		k.raw, _ = s.SyscallConn() // without it, pieces are read one by one
	}
	k.in = bufio.NewReaderSize(prompt{k}, 4096)
	return k
}

// prompt reads from a socket whose kernel acknowledges what comes at once. LMCache's server leaves Nagle's algorithm on: a
// reply waits there until the one before is acknowledged, which would otherwise be after 40 ms.
type prompt struct{ c *conn }

func (p prompt) Read(b []byte) (int, error) {
	if p.c.raw != nil {
		// The kernel forgets it again. Where it cannot be had, things are slow and right.
		_ = p.c.raw.Control(func(fd uintptr) { _ = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_QUICKACK, 1) })
	}
	return p.c.net.Read(b)
}

// flush writes what was put into out, and forgets it.
func (c *conn) flush() error {
	out := c.out // WriteTo consumes it
	_, err := out.WriteTo(c.net)
	clear(c.out)
	c.out = c.out[:0]
	return err
}

// fill reads into pieces, as many of them by one system call as it takes.
func (c *conn) fill(pieces [][]byte) error {
	first, offset := 0, 0 // what is not there yet
	for ; first < len(pieces) && c.in.Buffered() > 0; first, offset = first+1, 0 {
		offset = min(len(pieces[first]), c.in.Buffered())
		if _, err := io.ReadFull(c.in, pieces[first][:offset]); err != nil {
			return unexpected(err)
		}
		if offset < len(pieces[first]) {
			break
		}
	}
	if first == len(pieces) {
		return nil
	}
	if c.raw == nil || len(pieces) == 1 {
		for ; first < len(pieces); first, offset = first+1, 0 {
			if _, err := io.ReadFull(c.net, pieces[first][offset:]); err != nil {
				return unexpected(err)
			}
		}
		return nil
	}
	skip := func() {
		for first < len(pieces) && offset == len(pieces[first]) {
			first, offset = first+1, 0
		}
	}
	var failed error
	err := c.raw.Read(func(fd uintptr) bool {
		for skip(); first < len(pieces); skip() {
			c.vecs = c.vecs[:0]
			for i := first; i < len(pieces) && len(c.vecs) < vectored.Max; i++ {
				p := pieces[i]
				if i == first {
					p = p[offset:]
				}
				if len(p) > 0 {
					c.vecs = append(c.vecs, vectored.Of(p))
				}
			}
			n, errno := vectored.Read(fd, c.vecs)
			switch {
			case errno == unix.EAGAIN:
				return false
			case errno != 0:
				failed = errno
				return true
			case n == 0:
				failed = io.ErrUnexpectedEOF
				return true
			}
			for n > 0 {
				step := min(n, len(pieces[first])-offset)
				n, offset = n-step, offset+step
				skip()
			}
		}
		return true
	})
	clear(c.vecs) // holds no piece back
	if err == nil {
		err = failed
	}
	return err
}

// discard reads n bytes and throws them away.
func (c *conn) discard(n int) error {
	_, err := io.CopyN(io.Discard, c.in, int64(n))
	return unexpected(err)
}

func unexpected(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}
