package redis

import (
	"net"
	"syscall"

	"golang.org/x/sys/unix"

	"kvstrata/connector/vectored"
)

const (
	writeAhead = 16 << 10 // bytes of small commands that are written at once
	copyBytes  = 64 << 10 // of a payload that are written at once under TLS
)

// writer writes commands. Payloads go straight from the pieces of their operation into the socket; under TLS, through a
// buffer. One goroutine uses it.
type writer struct {
	conn net.Conn
	raw  syscall.RawConn // nil: payloads go through the buffer
	out  []byte          // commands that wait to be written

	writeFn func(fd uintptr) bool
	op      *op // whose payload is being written
	pieces  [][]byte
	tail    []byte       // ends the command; nil once it is in iov
	iov     []unix.Iovec // what is to be written next,
	room    []unix.Iovec // in here
	last    bool         // nothing comes behind iov
	errno   error
}

func newWriter(conn net.Conn) *writer {
	w := &writer{conn: conn, raw: rawConn(conn)}
	w.writeFn = w.writeVectors
	return w
}

// flush writes what waits.
func (w *writer) flush() error {
	if len(w.out) == 0 {
		return nil
	}
	_, err := w.conn.Write(w.out)
	w.out = w.out[:0]
	return err
}

// prepare appends an operation's command, a SET's up to its payload, to what waits. The operation is not touched behind it,
// but for the payload.
func (w *writer) prepare(o *op) {
	switch o.kind {
	case opGet:
		w.out = append(w.out, "*2\r\n$3\r\nGET\r\n"...)
		w.out = appendBulk(w.out, o.key)
	case opExists:
		w.out = append(w.out, "*2\r\n$6\r\nEXISTS\r\n"...)
		w.out = appendBulk(w.out, o.key)
	case opSet:
		w.out = append(w.out, o.head...)
	}
}

// payload writes what waits, an operation's pieces and the end of its command. When its caller leaves meanwhile, the
// connection is of no use any more: the server waits for the rest. The operation is writing until the last byte is written:
// then its reply may come, and it may be another one's soon.
func (w *writer) payload(o *op, tail []byte) error {
	defer w.stop()
	o.mu.Lock()
	left := o.left
	if !left {
		w.pieces, w.tail, w.last = o.item.Pieces, tail, false
	}
	o.mu.Unlock()
	if left {
		return errLeft
	}
	if w.raw == nil {
		return w.throughCopy(o)
	}
	w.op = o
	lead := w.out
	for !w.last || len(w.iov) > 0 {
		if len(w.iov) == 0 {
			w.vectors(lead)
			lead = nil
		}
		if err := w.raw.Write(w.writeFn); err != nil {
			return err
		}
		if w.errno != nil {
			return w.errno
		}
	}
	w.out = w.out[:0]
	return nil
}

// vectors makes vectors of what is to be written next. The pieces are named, not touched.
func (w *writer) vectors(lead []byte) {
	w.room = w.room[:0]
	if len(lead) > 0 {
		w.room = append(w.room, vectored.Of(lead))
	}
	for len(w.pieces) > 0 && len(w.room) < vectored.Max-1 {
		if len(w.pieces[0]) > 0 {
			w.room = append(w.room, vectored.Of(w.pieces[0]))
		}
		w.pieces = w.pieces[1:]
	}
	if w.last = len(w.pieces) == 0; w.last {
		w.room = append(w.room, vectored.Of(w.tail))
	}
	w.iov = w.room
}

// writeVectors is one writev, with the operation locked: see reader.readVectors.
func (w *writer) writeVectors(fd uintptr) bool {
	w.op.mu.Lock()
	defer w.op.mu.Unlock()
	if w.op.left {
		w.errno = errLeft
		return true
	}
	n, errno := vectored.Write(fd, w.iov)
	switch errno {
	case 0:
		w.iov = vectored.Advance(w.iov, n)
		w.op.writing = !w.last || len(w.iov) > 0
	case unix.EAGAIN:
		return false
	default:
		w.errno = errno
	}
	return true
}

// throughCopy writes from a copy of the pieces, for which their caller need not wait.
func (w *writer) throughCopy(o *op) error {
	for at := 0; ; {
		o.mu.Lock()
		if o.left {
			o.mu.Unlock()
			return errLeft
		}
		for len(w.pieces) > 0 && len(w.out) < copyBytes {
			b := w.pieces[0][at:]
			b = b[:min(len(b), copyBytes-len(w.out))]
			w.out = append(w.out, b...)
			if at += len(b); at == len(w.pieces[0]) {
				w.pieces, at = w.pieces[1:], 0
			}
		}
		if w.last = len(w.pieces) == 0; w.last {
			w.out = append(w.out, w.tail...)
			o.writing = false
		}
		o.mu.Unlock()
		if err := w.flush(); err != nil || w.last {
			return err
		}
	}
}

// stop forgets the pieces, so that they are not kept alive.
func (w *writer) stop() {
	clear(w.room)
	w.op, w.pieces, w.tail, w.iov, w.errno = nil, nil, nil, nil, nil
}
