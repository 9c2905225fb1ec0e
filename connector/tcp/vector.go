package tcp

import (
	"io"
	"net"
	"syscall"

	"golang.org/x/sys/unix"

	"kvstrata/connector/vectored"
)

// vector reads from a connection straight into many pieces of memory with one system call; from one that is not a bare TCP
// connection, piece by piece. One goroutine uses it.
type vector struct {
	conn net.Conn
	raw  syscall.RawConn // nil = piece by piece
	call func(fd uintptr) bool
	iov  []unix.Iovec
	n    int
	err  error
}

func newVector(conn net.Conn) *vector {
	v := &vector{conn: conn}
	if tcp, ok := conn.(*net.TCPConn); ok {
		if raw, err := tcp.SyscallConn(); err == nil {
			v.raw = raw
		}
	}
	v.call = v.readv // once, so that no call allocates
	return v
}

// readv is called when the socket may be readable; false has the poller wait.
func (v *vector) readv(fd uintptr) bool {
	n, errno := vectored.Read(fd, v.iov)
	switch {
	case errno == unix.EAGAIN:
		return false
	case errno != 0:
		v.n, v.err = 0, errno
	case n == 0:
		v.n, v.err = 0, io.EOF
	default:
		v.n, v.err = n, nil
	}
	return true
}

// read reads one byte or more into the pieces, of the first one from an offset on, and at most so many.
func (v *vector) read(pieces [][]byte, offset, most int) (int, error) {
	if v.raw == nil {
		p := pieces[0][offset:]
		return v.conn.Read(p[:min(len(p), most)])
	}
	v.iov = v.iov[:0]
	for _, p := range pieces {
		p = p[offset:]
		offset = 0
		p = p[:min(len(p), most)]
		if len(p) == 0 {
			continue
		}
		v.iov = append(v.iov, vectored.Of(p))
		if most -= len(p); most == 0 || len(v.iov) == vectored.Max {
			break
		}
	}
	if err := v.raw.Read(v.call); err != nil {
		return 0, err
	}
	return v.n, v.err
}
