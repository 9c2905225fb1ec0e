package event

import (
	"encoding/binary"
	"fmt"

	"google.golang.org/protobuf/encoding/protowire"
)

// WireError says where a payload is not what docs/format/event.md describes.
type WireError struct {
	Field  string // the column or field, by its name in event.proto
	Reason string
}

func (e *WireError) Error() string { return fmt.Sprintf("decode %s: %s", e.Field, e.Reason) }

// column is a packed repeated field under construction. A column of zeros is left out of the message.
type column struct {
	buf []byte
	any bool // some entry is not 0
}

func (c *column) varint(v uint64) {
	if v < 0x80 { // most are
		c.buf = append(c.buf, byte(v))
	} else {
		c.buf = protowire.AppendVarint(c.buf, v)
	}
	c.any = c.any || v != 0
}

func (c *column) zigzag(v int64) { c.varint(protowire.EncodeZigZag(v)) }

func (c *column) fixed(v uint64) {
	c.buf = binary.LittleEndian.AppendUint64(c.buf, v)
	c.any = c.any || v != 0
}

func (c *column) reset() { c.buf, c.any = c.buf[:0], false }

// appendTo writes the column as field num, unless it says nothing.
func (c *column) appendTo(dst []byte, num protowire.Number) []byte {
	if !c.any {
		return dst
	}
	return c.appendAlways(dst, num)
}

func (c *column) appendAlways(dst []byte, num protowire.Number) []byte {
	if len(c.buf) == 0 {
		return dst
	}
	dst = protowire.AppendTag(dst, num, protowire.BytesType)
	return protowire.AppendBytes(dst, c.buf)
}

// cursor walks a packed column; one that is absent is all zeros.
type cursor struct {
	buf     []byte
	present bool
	bad     bool // ended too early, or malformed
}

func (c *cursor) varint() uint64 {
	if !c.present {
		return 0
	}
	if len(c.buf) > 0 && c.buf[0] < 0x80 {
		v := uint64(c.buf[0])
		c.buf = c.buf[1:]
		return v
	}
	v, n := protowire.ConsumeVarint(c.buf)
	if n < 0 {
		c.bad, c.buf = true, nil
		return 0
	}
	c.buf = c.buf[n:]
	return v
}

func (c *cursor) zigzag() int64 { return protowire.DecodeZigZag(c.varint()) }

func (c *cursor) fixed() uint64 {
	if !c.present {
		return 0
	}
	if len(c.buf) < 8 {
		c.bad, c.buf = true, nil
		return 0
	}
	v := binary.LittleEndian.Uint64(c.buf)
	c.buf = c.buf[8:]
	return v
}

// rows counts the varints of a column.
func (c *cursor) rows() int {
	n := 0
	for _, b := range c.buf {
		if b < 0x80 {
			n++
		}
	}
	return n
}

// done reports whether the column was walked to its end, and no further.
func (c *cursor) done() bool { return !c.bad && len(c.buf) == 0 }

// dictionary turns strings into small numbers within one message; "" is 0.
type dictionary struct {
	index map[string]uint64
	names []string
	last  string
	lastN uint64
}

func (d *dictionary) id(name string) uint64 {
	if name == d.last { // "" included: lastN starts at 0
		return d.lastN
	}
	if name == "" {
		return 0
	}
	n, ok := d.index[name]
	if !ok {
		if d.index == nil {
			d.index = make(map[string]uint64)
		}
		d.names = append(d.names, name)
		n = uint64(len(d.names))
		d.index[name] = n
	}
	d.last, d.lastN = name, n
	return n
}

func (d *dictionary) appendTo(dst []byte, num protowire.Number) []byte {
	for _, name := range d.names {
		dst = protowire.AppendTag(dst, num, protowire.BytesType)
		dst = protowire.AppendString(dst, name)
	}
	return dst
}

func (d *dictionary) reset() {
	clear(d.index)
	d.names, d.last, d.lastN = d.names[:0], "", 0
}

// interner keeps one copy of strings that come again and again, such as tiers and adapter names.
type interner map[string]string

const maxInterned = 4096 // beyond it strings are allocated anew: the bound of a hostile stream's memory

func (in interner) string(b []byte) string {
	if s, ok := in[string(b)]; ok {
		return s
	}
	s := string(b)
	if len(in) < maxInterned {
		in[s] = s
	}
	return s
}

// hashColumn is the two columns that hold block hashes.
type hashColumn struct {
	bytes []byte
	long  column // lengths
	odd   bool   // some hash is not 8 bytes long
}

func (c *hashColumn) add(h BlockHash) {
	c.bytes = h.AppendTo(c.bytes)
	c.long.varint(uint64(h.Len()))
	c.odd = c.odd || h.Len() != 8
}

func (c *hashColumn) reset() {
	c.bytes, c.odd = c.bytes[:0], false
	c.long.reset()
}

func (c *hashColumn) appendTo(dst []byte, hashes, lengths protowire.Number) []byte {
	if len(c.bytes) > 0 {
		dst = protowire.AppendTag(dst, hashes, protowire.BytesType)
		dst = protowire.AppendBytes(dst, c.bytes)
	}
	if c.odd {
		dst = c.long.appendAlways(dst, lengths)
	}
	return dst
}

// hashCursor walks the two columns of hashes.
type hashCursor struct {
	bytes []byte
	text  string // bytes once more, as the one string that all odd hashes share
	at    int
	long  cursor
	bad   bool
}

func (c *hashCursor) next() BlockHash {
	n := 8
	if c.long.present {
		n = int(min(c.long.varint(), uint64(len(c.bytes))+1))
	}
	if n == 0 || c.at+n > len(c.bytes) {
		c.bad = true
		return BlockHash{}
	}
	at := c.at
	c.at += n
	if n == 8 {
		return IntHash(binary.BigEndian.Uint64(c.bytes[at:]))
	}
	if c.text == "" {
		c.text = string(c.bytes)
	}
	return BytesHash(c.text[at : at+n])
}

func (c *hashCursor) done() bool { return !c.bad && c.at == len(c.bytes) && c.long.done() }

// fields walks the top-level fields of a message. The callback gets length-delimited fields as bytes and the others as
// number; unknown fields are the callback's to skip.
func fields(payload []byte, f func(num protowire.Number, typ protowire.Type, b []byte, v uint64) error) error {
	for len(payload) > 0 {
		num, typ, n := protowire.ConsumeTag(payload)
		if n < 0 {
			return &WireError{Field: "message", Reason: "malformed tag"}
		}
		payload = payload[n:]
		var b []byte
		var v uint64
		switch typ {
		case protowire.BytesType:
			b, n = protowire.ConsumeBytes(payload)
		case protowire.VarintType:
			v, n = protowire.ConsumeVarint(payload)
		case protowire.Fixed64Type:
			v, n = protowire.ConsumeFixed64(payload)
		default:
			n = protowire.ConsumeFieldValue(num, typ, payload)
		}
		if n < 0 {
			return &WireError{Field: fmt.Sprintf("field %d", num), Reason: "truncated or malformed"}
		}
		payload = payload[n:]
		if err := f(num, typ, b, v); err != nil {
			return err
		}
	}
	return nil
}
