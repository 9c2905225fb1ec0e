package enginehash

import (
	"encoding/binary"
	"errors"
	"math"
)

var errMsgpack = errors.New("broken msgpack")

// reader reads the few msgpack types that extra keys are made of. After an error it reads zeros.
type reader struct {
	b   []byte
	err error
}

type kind uint8

const (
	kindOther kind = iota
	kindText
	kindBytes
	kindArray
	kindInt
)

func (r *reader) fail(err error) {
	if r.err == nil {
		r.err, r.b = err, nil
	}
}

// end returns what went wrong, if only that more follows.
func (r *reader) end() error {
	if r.err == nil && len(r.b) > 0 {
		r.fail(errMsgpack)
	}
	return r.err
}

// kind returns what comes next.
func (r *reader) kind() kind {
	if len(r.b) == 0 {
		return kindOther
	}
	switch c := r.b[0]; {
	case c < 0x80, c >= 0xe0, c >= 0xcc && c <= 0xd3:
		return kindInt
	case c&0xe0 == 0xa0, c >= 0xd9 && c <= 0xdb:
		return kindText
	case c >= 0xc4 && c <= 0xc6:
		return kindBytes
	case c&0xf0 == 0x90, c == 0xdc, c == 0xdd:
		return kindArray
	default:
		return kindOther
	}
}

// isNil takes a nil if it comes next.
func (r *reader) isNil() bool {
	if len(r.b) == 0 || r.b[0] != 0xc0 {
		return false
	}
	r.b = r.b[1:]
	return true
}

func (r *reader) take(n uint64) []byte {
	if n > uint64(len(r.b)) {
		r.fail(errMsgpack)
		return nil
	}
	b := r.b[:n]
	r.b = r.b[n:]
	return b
}

// uint reads a big-endian number of 1, 2, 4 or 8 bytes.
func (r *reader) uint(size uint64) uint64 {
	switch b := r.take(size); len(b) {
	case 1:
		return uint64(b[0])
	case 2:
		return uint64(binary.BigEndian.Uint16(b))
	case 4:
		return uint64(binary.BigEndian.Uint32(b))
	case 8:
		return binary.BigEndian.Uint64(b)
	default:
		return 0
	}
}

func (r *reader) tag() byte { return byte(r.uint(1)) }

// array returns how many items follow; never more than there are bytes left.
func (r *reader) array() int {
	if r.kind() != kindArray {
		r.fail(ErrKeys)
		return 0
	}
	var n uint64
	switch c := r.tag(); c {
	case 0xdc:
		n = r.uint(2)
	case 0xdd:
		n = r.uint(4)
	default:
		n = uint64(c & 0x0f)
	}
	if n > uint64(len(r.b)) {
		r.fail(errMsgpack)
		return 0
	}
	return int(n)
}

func (r *reader) text() string {
	switch c := r.tag(); c {
	case 0xd9:
		return string(r.take(r.uint(1)))
	case 0xda:
		return string(r.take(r.uint(2)))
	case 0xdb:
		return string(r.take(r.uint(4)))
	default:
		return string(r.take(uint64(c & 0x1f)))
	}
}

func (r *reader) bytes() string { return string(r.take(r.uint(1 << (r.tag() - 0xc4)))) }

func (r *reader) int() int64 {
	switch c := r.tag(); {
	case c < 0x80 || c >= 0xe0:
		return int64(int8(c))
	case c <= 0xcf:
		n := r.uint(1 << (c - 0xcc))
		if n > math.MaxInt64 {
			r.fail(ErrKeys)
		}
		return int64(n)
	case c == 0xd0:
		return int64(int8(r.uint(1)))
	case c == 0xd1:
		return int64(int16(r.uint(2)))
	case c == 0xd2:
		return int64(int32(r.uint(4)))
	default:
		return int64(r.uint(8))
	}
}
