package subscriber

import (
	"encoding/binary"
	"math"
)

// shape is the shape of a msgpack value, integers apart by sign, as the first byte tells it.
type shape uint8

const (
	shapeNone shape = iota // the payload ended, or the byte is the one that msgpack never uses
	shapeNil
	shapeBool
	shapeUint // an integer of 0 and above, in whatever width
	shapeInt  // one below 0
	shapeFloat
	shapeStr
	shapeBin
	shapeExt
	shapeArray
	shapeMap
)

var shapeNames = [...]string{
	shapeNone: "nothing", shapeNil: "nil", shapeBool: "a bool", shapeUint: "an integer", shapeInt: "a negative integer",
	shapeFloat: "a float", shapeStr: "a string", shapeBin: "bytes", shapeExt: "an extension", shapeArray: "an array",
	shapeMap: "a map",
}

func (s shape) String() string { return shapeNames[s] }

// formats describes the first bytes 0xc0 … 0xdf: the value's shape, how many bytes of number or length follow, and,
// of a fixed extension, its size.
var formats = [32]struct {
	shape       shape
	width, size uint8
}{
	0x00: {shape: shapeNil},
	0x02: {shape: shapeBool}, 0x03: {shape: shapeBool},
	0x04: {shapeBin, 1, 0}, 0x05: {shapeBin, 2, 0}, 0x06: {shapeBin, 4, 0},
	0x07: {shapeExt, 1, 0}, 0x08: {shapeExt, 2, 0}, 0x09: {shapeExt, 4, 0},
	0x0a: {shapeFloat, 4, 0}, 0x0b: {shapeFloat, 8, 0},
	0x0c: {shapeUint, 1, 0}, 0x0d: {shapeUint, 2, 0}, 0x0e: {shapeUint, 4, 0}, 0x0f: {shapeUint, 8, 0},
	0x10: {shapeInt, 1, 0}, 0x11: {shapeInt, 2, 0}, 0x12: {shapeInt, 4, 0}, 0x13: {shapeInt, 8, 0},
	0x14: {shapeExt, 0, 1}, 0x15: {shapeExt, 0, 2}, 0x16: {shapeExt, 0, 4}, 0x17: {shapeExt, 0, 8}, 0x18: {shapeExt, 0, 16},
	0x19: {shapeStr, 1, 0}, 0x1a: {shapeStr, 2, 0}, 0x1b: {shapeStr, 4, 0},
	0x1c: {shapeArray, 2, 0}, 0x1d: {shapeArray, 4, 0},
	0x1e: {shapeMap, 2, 0}, 0x1f: {shapeMap, 4, 0},
}

// maxDepth is how deep a value may be nested that is skipped or kept raw.
const maxDepth = 32

// reader walks one msgpack payload and allocates nothing. It remembers the first thing that is not as its caller
// wants and ends there: from then on every read gives nothing. So a caller may read on and look at failed where a
// loop could run long. No length that the payload announces is believed unless as many bytes are left.
type reader struct {
	buf    []byte
	at     int
	offset int    // of the failure
	reason string // of the failure; it tells shapes, never values
	failed bool
}

func (r *reader) fail(at int, reason string) {
	if !r.failed {
		r.failed, r.offset, r.reason = true, at, reason
	}
	r.at = len(r.buf)
}

// want fails because the value at a place has another shape than the caller's.
func (r *reader) want(at int, what string, have shape) {
	if !r.failed {
		r.fail(at, "want "+what+", have "+have.String())
	}
}

func (r *reader) left() int { return len(r.buf) - r.at }

// peek returns the next byte without reading it, and a byte that msgpack never uses at the end.
func (r *reader) peek() byte {
	if r.at < len(r.buf) {
		return r.buf[r.at]
	}
	return 0xc1
}

// next reads a value's head. With it comes a number's bits (of a float those of a float64), a bool as 0 or 1, the
// length of a string, of bytes or of an extension's type and bytes, which are still to be read, or the count of an
// array or a map.
func (r *reader) next() (shape, uint64) {
	if r.at >= len(r.buf) {
		r.fail(r.at, "truncated")
		return shapeNone, 0
	}
	tag := r.buf[r.at]
	switch {
	case tag < 0x80:
		r.at++
		return shapeUint, uint64(tag)
	case tag < 0x90:
		r.at++
		return shapeMap, uint64(tag & 0x0f)
	case tag < 0xa0:
		r.at++
		return shapeArray, uint64(tag & 0x0f)
	case tag < 0xc0:
		r.at++
		return shapeStr, uint64(tag & 0x1f)
	case tag >= 0xe0:
		r.at++
		return shapeInt, uint64(int64(int8(tag)))
	}
	return r.wide(tag)
}

// wide is next for the heads that are longer than a byte, and the few rare ones that are not.
func (r *reader) wide(tag byte) (shape, uint64) {
	f := &formats[tag&0x1f]
	width := int(f.width)
	if r.left() < 1+width {
		r.fail(r.at, "truncated")
		return shapeNone, 0
	}
	rest := r.buf[r.at+1:]
	var v uint64
	switch width {
	case 1:
		v = uint64(rest[0])
	case 2:
		v = uint64(binary.BigEndian.Uint16(rest))
	case 4:
		v = uint64(binary.BigEndian.Uint32(rest))
	case 8:
		v = binary.BigEndian.Uint64(rest)
	}
	switch f.shape {
	case shapeNone:
		r.fail(r.at, "a byte that msgpack never uses")
		return shapeNone, 0
	case shapeBool:
		v = uint64(tag & 1)
	case shapeFloat:
		if width == 4 {
			v = math.Float64bits(float64(math.Float32frombits(uint32(v))))
		}
	case shapeInt:
		unused := 64 - 8*width
		v = uint64(int64(v<<unused) >> unused)
		if int64(v) >= 0 {
			r.at += 1 + width
			return shapeUint, v
		}
	case shapeExt:
		v += uint64(f.size) + 1
	}
	r.at += 1 + width
	return f.shape, v
}

// isNil reads a nil if there is one.
func (r *reader) isNil() bool {
	if r.peek() == 0xc0 {
		r.at++
		return true
	}
	return false
}

// array reads the head of an array and returns its count, of which as many bytes are left.
func (r *reader) array() int {
	at := r.at
	if n := int(r.peek() ^ 0x90); n < 16 && n < r.left() {
		r.at++
		return n
	}
	s, n := r.next()
	switch {
	case s != shapeArray:
		r.want(at, "an array", s)
		return 0
	case n > uint64(r.left()):
		r.fail(at, "an array longer than the payload")
		return 0
	}
	return int(n)
}

// fields reads the head of a map and returns how many keys it has.
func (r *reader) fields() int {
	at := r.at
	s, n := r.next()
	switch {
	case s != shapeMap:
		r.want(at, "a map", s)
		return 0
	case 2*n > uint64(r.left()):
		r.fail(at, "a map longer than the payload")
		return 0
	}
	return int(n)
}

// text reads a string, which is a part of the payload.
func (r *reader) text() []byte {
	if tag := r.peek(); tag&0xe0 == 0xa0 { // the usual one, shorter than 32 bytes
		start := r.at + 1
		end := start + int(tag&0x1f)
		if end <= len(r.buf) {
			r.at = end
			return r.buf[start:end]
		}
	}
	at := r.at
	s, n := r.next()
	if s != shapeStr {
		r.want(at, "a string", s)
		return nil
	}
	return r.take(at, n)
}

// take reads the n bytes that belong to the head at a place.
func (r *reader) take(at int, n uint64) []byte {
	if n > uint64(r.left()) {
		r.fail(at, "truncated")
		return nil
	}
	start := r.at
	r.at += int(n)
	return r.buf[start:r.at]
}

// number reads an integer of 0 … limit.
func (r *reader) number(limit uint64) uint64 {
	at := r.at
	if tag := uint64(r.peek()); tag < 0x80 && tag <= limit {
		r.at++
		return tag
	}
	s, n := r.next()
	switch {
	case s == shapeInt:
		r.fail(at, "a negative integer")
		return 0
	case s != shapeUint:
		r.want(at, "an integer", s)
		return 0
	case n > limit:
		r.fail(at, "an integer out of range")
		return 0
	}
	return n
}

// signed reads an integer of either sign that an int64 holds.
func (r *reader) signed() int64 {
	at := r.at
	s, n := r.next()
	switch {
	case s == shapeInt || s == shapeUint && n <= math.MaxInt64:
		return int64(n)
	case s == shapeUint:
		r.fail(at, "an integer out of range")
	default:
		r.want(at, "an integer", s)
	}
	return 0
}

// skip passes over one value of any kind and returns its bytes.
func (r *reader) skip() []byte {
	start := r.at
	r.skipNested(maxDepth)
	return r.buf[start:r.at]
}

func (r *reader) skipNested(depth int) {
	at := r.at
	s, n := r.next()
	switch s {
	case shapeStr, shapeBin, shapeExt:
		r.take(at, n)
	case shapeArray, shapeMap:
		if s == shapeMap {
			n *= 2
		}
		if n > uint64(r.left()) {
			r.fail(at, s.String()+" longer than the payload")
			return
		}
		if depth == 0 {
			r.fail(at, "nested too deep")
			return
		}
		for range n {
			if r.failed {
				return
			}
			r.skipNested(depth - 1)
		}
	}
}

// tokens fills dst with integers of 32 bits and returns how many it read: fewer than asked for when it failed.
//
// Most token ids take 3 or 5 bytes, in no order that a processor could guess. So these two are read without a branch
// between them: the next place depends on nothing but the first byte.
func (r *reader) tokens(dst []uint32) int {
	buf, at := r.buf, r.at
	for i := range dst {
		if len(buf)-at < 8 {
			r.at = at
			return i + r.tokensSlow(dst[i:])
		}
		tag := buf[at]
		if wide := uint64(tag) - 0xcd; wide <= 1 {
			dst[i] = uint32(binary.BigEndian.Uint64(buf[at:]) << 8 >> ((48 - 16*wide) & 63))
			at += 3 + 2*int(wide)
			continue
		}
		switch {
		case tag < 0x80:
			dst[i] = uint32(tag)
			at++
		case tag == 0xcc:
			dst[i] = uint32(buf[at+1])
			at += 2
		default:
			r.at = at
			v := r.number(math.MaxUint32)
			if r.failed {
				return i
			}
			dst[i] = uint32(v)
			at = r.at
		}
	}
	r.at = at
	return len(dst)
}

// tokensSlow is tokens near the payload's end.
func (r *reader) tokensSlow(dst []uint32) int {
	for i := range dst {
		v := r.number(math.MaxUint32)
		if r.failed {
			return i
		}
		dst[i] = uint32(v)
	}
	return len(dst)
}

// arena hands out slices of one piece of memory that is used again after reset. When the piece is too short, another
// takes its place and what was handed out before stays as it is; the next reset makes one piece for all.
type arena[T any] struct {
	buf  []T
	used int // elements handed out since reset
}

func (a *arena[T]) reset() {
	if a.used > cap(a.buf) {
		a.buf = make([]T, 0, a.used)
	}
	a.buf, a.used = a.buf[:0], 0
}

// take returns n elements, whose contents are left from an earlier use. bound is the most that may still be asked for
// until reset: no piece is larger than what it allows.
func (a *arena[T]) take(n, bound int) []T {
	start := len(a.buf)
	if cap(a.buf)-start < n {
		a.buf = make([]T, 0, max(n, min(2*cap(a.buf), bound)))
		start = 0
	}
	a.buf = a.buf[:start+n]
	a.used += n
	return a.buf[start : start+n : start+n]
}
