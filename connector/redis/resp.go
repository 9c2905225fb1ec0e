package redis

import (
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"
	"syscall"

	"github.com/zeebo/xxh3"
	"golang.org/x/sys/unix"

	"kvstrata/connector/store"
	"kvstrata/connector/vectored"
)

// errProtocol says that what came is no RESP, or answers nothing that was asked: the connection is of no use any more.
var errProtocol = errors.New("not the protocol of Redis")

const (
	readAhead  = 4 << 10 // bytes asked for beyond what is needed: what comes with it is copied once more
	readBuffer = maxHeader + readAhead
	maxLine    = readAhead // bytes of a line: a status, an error, a length
)

// reader reads replies. Payloads go straight from the socket into the pieces of their operation; under TLS, through the
// reader's buffer. One goroutine uses it.
type reader struct {
	src  io.Reader
	raw  syscall.RawConn // nil: src is read through the buffer
	buf  []byte
	r, w int // of what is buffered

	scatter scatter
	hash    xxh3.Hasher
	readFn  func(fd uintptr) bool
	op      *op  // whose payload is being read
	n       int  // bytes that the last call brought
	stale   bool // nobody waits for the operation any more
	errno   error
}

func newReader(src io.Reader) *reader {
	r := &reader{src: src, buf: make([]byte, readBuffer), raw: rawConn(src)}
	r.readFn = r.readVectors
	return r
}

// rawConn returns the way to a socket's file descriptor, nil when src is none.
func rawConn(src any) syscall.RawConn {
	switch src.(type) {
	case *net.TCPConn, *net.UnixConn:
		if raw, err := src.(syscall.Conn).SyscallConn(); err == nil {
			return raw
		}
	}
	return nil
}

// fill reads some bytes behind those that are buffered, no more than most.
func (r *reader) fill(most int) error {
	if r.r == r.w {
		r.r, r.w = 0, 0
	}
	n, err := r.src.Read(r.buf[r.w:min(r.w+most, len(r.buf))])
	r.w += n
	if n > 0 {
		return nil
	}
	if err == nil {
		err = io.ErrNoProgress
	}
	return err
}

// peek returns the next n bytes, which stay buffered.
func (r *reader) peek(n int) ([]byte, error) {
	if r.r+n > len(r.buf) {
		r.w = copy(r.buf, r.buf[r.r:r.w])
		r.r = 0
	}
	for r.w-r.r < n {
		if err := r.fill(max(n-(r.w-r.r), readAhead)); err != nil {
			return nil, unexpected(err)
		}
	}
	return r.buf[r.r : r.r+n], nil
}

// line returns the next line without its end. It is valid until the next call. io.EOF means that nothing more came.
func (r *reader) line() ([]byte, error) {
	for at := 0; ; {
		have := r.buf[r.r:r.w]
		for ; at < len(have); at++ {
			if have[at] != '\n' {
				continue
			}
			if at == 0 || have[at-1] != '\r' {
				return nil, fmt.Errorf("%w: a line without its end", errProtocol)
			}
			r.r += at + 1
			return have[:at-1], nil
		}
		if at >= maxLine {
			return nil, fmt.Errorf("%w: a line of more than %d bytes", errProtocol, maxLine)
		}
		if r.r+maxLine > len(r.buf) {
			r.w = copy(r.buf, have)
			r.r = 0
		}
		if err := r.fill(readAhead); err != nil {
			if at > 0 {
				err = unexpected(err)
			}
			return nil, err
		}
	}
}

// drain throws n bytes away.
func (r *reader) drain(n int64) error {
	for n > 0 {
		if r.r == r.w {
			if err := r.fill(len(r.buf)); err != nil {
				return unexpected(err)
			}
		}
		k := min(int64(r.w-r.r), n)
		r.r += int(k)
		n -= k
	}
	return nil
}

// endBulk reads the end of a bulk string.
func (r *reader) endBulk() error {
	end, err := r.peek(2)
	if err != nil {
		return err
	}
	if string(end) != "\r\n" {
		return fmt.Errorf("%w: a bulk string without its end", errProtocol)
	}
	r.r += 2
	return nil
}

// value reads a bulk string of n bytes that answers a GET. fail is the operation's own error; err is the connection's.
func (r *reader) value(o *op, n int64, compatibility *[32]byte, checksum bool) (fail, err error) {
	left := n
	if n < fixedBytes {
		fail = fmt.Errorf("%w: %d bytes", ErrCorrupt, n)
	}
	var p preamble
	if fail == nil {
		var b []byte
		if b, err = r.peek(fixedBytes); err != nil {
			return nil, err
		}
		p, fail = readPreamble(b, n)
	}
	if fail == nil {
		var head []byte
		if head, err = r.peek(p.size); err != nil {
			return nil, err
		}
		if fail = p.check(head, o.key, compatibility, o.bytes); fail == nil {
			r.r += p.size
			left -= int64(p.size)
			return r.payload(o, &p, checksum)
		}
	}
	if err := r.drain(left); err != nil {
		return nil, err
	}
	return fail, r.endBulk()
}

// payload reads the payload of a value into the pieces of the operation that asked for it.
func (r *reader) payload(o *op, p *preamble, checksum bool) (fail, err error) {
	checksum = checksum && p.flags&flagChecksum != 0
	if checksum {
		r.hash.Reset()
	}
	o.mu.Lock()
	stale, buffered := o.left, r.raw == nil
	if !stale {
		r.scatter.start(o.item.Pieces)
	}
	o.mu.Unlock()
	left := o.bytes
	for left > 0 && !stale {
		n := 0
		if buffered || r.r < r.w {
			if r.r == r.w {
				if err := r.fill(len(r.buf)); err != nil {
					return nil, unexpected(err)
				}
			}
			n, stale = r.copyOut(o, left, checksum)
		} else if n, stale, err = r.readOut(o, left, checksum); err != nil {
			return nil, unexpected(err)
		}
		left -= n
	}
	r.scatter.stop()
	if err := r.drain(int64(left)); err != nil {
		return nil, err
	}
	if checksum && !stale && r.hash.Sum64() != p.sum {
		fail = fmt.Errorf("%w: the payload's checksum differs", ErrCorrupt)
	}
	return fail, r.endBulk()
}

// copyOut moves what is buffered into the pieces.
func (r *reader) copyOut(o *op, left int, checksum bool) (n int, stale bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.left {
		return 0, true
	}
	have := r.buf[r.r:min(r.w, r.r+left)]
	if checksum {
		_, _ = r.hash.Write(have)
	}
	r.scatter.fill(have)
	r.r += len(have)
	return len(have), false
}

// readOut reads from the socket into the pieces, and a little of what follows them into the buffer, which is empty.
func (r *reader) readOut(o *op, left int, checksum bool) (n int, stale bool, err error) {
	r.op, r.n, r.stale, r.errno = o, 0, false, nil
	r.r, r.w = 0, 0
	r.scatter.prepare(r.buf[:readAhead])
	for r.n == 0 && !r.stale && r.errno == nil {
		if err := r.raw.Read(r.readFn); err != nil {
			return 0, false, err
		}
	}
	r.op = nil
	if r.stale || r.errno != nil {
		return 0, r.stale, r.errno
	}
	n = min(r.n, left)
	r.w = r.n - n
	if checksum {
		// The pieces are read again while they are in the processor's cache, and only as long as they are ours.
		o.mu.Lock()
		if stale = o.left; !stale {
			r.scatter.each(n, &r.hash)
		}
		o.mu.Unlock()
	}
	r.scatter.advance(n)
	return n, stale, nil
}

// readVectors is one readv. The operation is locked meanwhile, so that whoever leaves it knows that no piece is written any
// more; waiting for bytes happens outside, by returning false.
func (r *reader) readVectors(fd uintptr) bool {
	r.op.mu.Lock()
	defer r.op.mu.Unlock()
	if r.stale = r.op.left; r.stale {
		return true
	}
	n, errno := vectored.Read(fd, r.scatter.iov)
	switch {
	case errno == 0 && n == 0:
		r.errno = io.ErrUnexpectedEOF
	case errno == 0:
		r.n = n
	case errno == unix.EAGAIN:
		return false
	default:
		r.errno = errno
	}
	return true
}

// unexpected turns an end of input within a reply into an error that says so.
func unexpected(err error) error {
	if err == io.EOF {
		return io.ErrUnexpectedEOF
	}
	return err
}

// number reads the decimal digits of a line, behind its first byte.
func number(line []byte) (int64, error) {
	if len(line) < 2 || len(line) > 20 {
		return 0, fmt.Errorf("%w: a number of %d bytes", errProtocol, max(len(line)-1, 0))
	}
	negative, n := line[1] == '-', int64(0)
	digits := line[1:]
	if negative {
		digits = digits[1:]
	}
	for _, d := range digits {
		if d < '0' || d > '9' || n > (1<<62)/10 {
			return 0, fmt.Errorf("%w: no number", errProtocol)
		}
		n = 10*n + int64(d-'0')
	}
	if len(digits) == 0 {
		return 0, fmt.Errorf("%w: no number", errProtocol)
	}
	if negative {
		n = -n
	}
	return n, nil
}

// maxBulk is the longest bulk string that Redis allows (proto-max-bulk-len may raise it beyond its 512 MiB).
const maxBulk = 1 << 40

// reply reads the reply to an operation, of which line is the first line.
func (r *reader) reply(o *op, line []byte, compatibility *[32]byte, checksum bool) (fail, err error) {
	if len(line) == 0 {
		return nil, fmt.Errorf("%w: an empty line", errProtocol)
	}
	switch kind := line[0]; {
	case kind == '-':
		return serverError(line[1:]), nil
	case kind == '+' && o.kind == opSet:
		return nil, nil
	case kind == ':' && o.kind == opExists:
		n, err := number(line)
		if err == nil && n == 0 {
			fail = store.ErrAbsent
		}
		return fail, err
	case kind == '$' && o.kind == opGet:
		n, err := number(line)
		switch {
		case err != nil:
			return nil, err
		case n == -1:
			return store.ErrAbsent, nil
		case n < 0 || n > maxBulk:
			return nil, fmt.Errorf("%w: a bulk string of %d bytes", errProtocol, n)
		}
		return r.value(o, n, compatibility, checksum)
	default:
		return nil, fmt.Errorf("%w: a reply of type %q to %s", errProtocol, kind, o.kind)
	}
}

// ServerError is what a server answered instead of doing what it was asked to.
type ServerError string

func (e ServerError) Error() string { return "the server answers: " + string(e) }

// serverError returns the error that a line tells.
func serverError(text []byte) error { return ServerError(text) }

// appendCommand appends a command of text arguments.
func appendCommand(dst []byte, args ...string) []byte {
	dst = append(dst, '*')
	dst = strconv.AppendInt(dst, int64(len(args)), 10)
	dst = append(dst, "\r\n"...)
	for _, a := range args {
		dst = appendBulk(dst, a)
	}
	return dst
}

func appendBulk(dst []byte, text string) []byte {
	dst = appendLength(dst, len(text))
	dst = append(dst, text...)
	return append(dst, "\r\n"...)
}

func appendLength(dst []byte, n int) []byte {
	dst = append(dst, '$')
	dst = strconv.AppendInt(dst, int64(n), 10)
	return append(dst, "\r\n"...)
}

// lineError is the error that a line tells, when it is one.
func lineError(line []byte) error {
	if len(line) > 0 && line[0] == '-' {
		return serverError(line[1:])
	}
	return errProtocol
}
