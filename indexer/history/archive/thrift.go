package archive

import (
	"encoding/binary"
	"errors"
)

// Bounds of a structure in Thrift's compact protocol. The library makes lists as long as they say that they are, before it has
// read a member.
const (
	maxMembers = 200_000 // of all lists together
	maxDepth   = 16
)

var errThrift = errors.New("not a structure in Thrift's compact protocol, or too large a one")

// checkThrift walks over a structure at the beginning of b and returns how long it is: every list and every text is as long as it says.
func checkThrift(b []byte) (used int, err error) {
	w := thriftWalk{b: b}
	if !w.structure(0) {
		return 0, errThrift
	}
	return w.at, nil
}

type thriftWalk struct {
	b       []byte
	at      int
	members uint64
}

// Types of the compact protocol.
const (
	thriftTrue = 1 + iota
	thriftFalse
	thriftByte
	thriftI16
	thriftI32
	thriftI64
	thriftDouble
	thriftBinary
	thriftList
	thriftSet
	thriftMap
	thriftStruct
)

func (w *thriftWalk) byte() (byte, bool) {
	if w.at >= len(w.b) {
		return 0, false
	}
	w.at++
	return w.b[w.at-1], true
}

func (w *thriftWalk) varint() (uint64, bool) {
	n, size := binary.Uvarint(w.b[w.at:])
	w.at += max(size, 0)
	return n, size > 0
}

func (w *thriftWalk) skip(n uint64) bool {
	if n > uint64(len(w.b)-w.at) {
		return false
	}
	w.at += int(n)
	return true
}

func (w *thriftWalk) structure(depth int) bool {
	if depth > maxDepth {
		return false
	}
	for {
		head, ok := w.byte()
		if !ok {
			return false
		}
		if head == 0 {
			return true
		}
		if head>>4 == 0 {
			if _, ok := w.varint(); !ok { // the field's number
				return false
			}
		}
		if t := head & 15; t != thriftTrue && t != thriftFalse && !w.value(t, depth) {
			return false
		}
	}
}

func (w *thriftWalk) value(t byte, depth int) bool {
	switch t {
	case thriftTrue, thriftFalse, thriftByte: // of a list
		return w.skip(1)
	case thriftI16, thriftI32, thriftI64:
		_, ok := w.varint()
		return ok
	case thriftDouble:
		return w.skip(8)
	case thriftBinary:
		n, ok := w.varint()
		return ok && w.skip(n)
	case thriftList, thriftSet:
		head, ok := w.byte()
		n := uint64(head >> 4)
		if ok && n == 15 {
			n, ok = w.varint()
		}
		return ok && w.list(n, depth, head&15)
	case thriftMap:
		n, ok := w.varint()
		if !ok || n == 0 {
			return ok
		}
		types, ok := w.byte()
		return ok && w.list(n, depth, types>>4, types&15)
	case thriftStruct:
		return w.structure(depth + 1)
	default:
		return false
	}
}

// list walks over so many members, or pairs of them.
func (w *thriftWalk) list(n uint64, depth int, types ...byte) bool {
	if w.members += n; n > maxMembers || w.members > maxMembers || depth > maxDepth {
		return false
	}
	for range n {
		for _, t := range types {
			if !w.value(t, depth+1) {
				return false
			}
		}
	}
	return true
}
