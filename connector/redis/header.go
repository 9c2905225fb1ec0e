package redis

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/zeebo/xxh3"

	"kvstrata/connector"
	"kvstrata/connector/store"
	"kvstrata/event"
)

// A value begins with a header, all integers little-endian:
//
//	 0  4 B  "kvsg"
//	 4  u16  version, 1
//	 6  u16  flags: 1 = the group has a parent, 2 = the payload has a checksum
//	 8  u32  bytes of the header
//	12  u32  blocks
//	16  u64  bytes of the payload
//	24  u64  XXH3-64 of the payload, 0 without flag 2
//	32  32 B compatibility hash
//	64  u32  tokens a block
//	68  u32  tensor-parallel rank
//	72  u64  prefix hash of the parent, 0 = unknown
//	80  u16  bytes of the parent's hash, 0 without flag 1
//	82  u16  bytes of the LoRA name
//	84  u32  0
//	88  u64  XXH3-64 of what follows in the header, seeded with the XXH3-64 of the 88 bytes before
//	96       the parent's hash, the LoRA name, and of each block: u64 prefix hash, u8 bytes of its hash, its hash
const (
	magic         = "kvsg"
	formatVersion = 1
	fixedBytes    = 96
	maxHeader     = 64 << 10 // bytes: what a reader holds of a value at most before it knows where its payload goes
	maxHash       = 255      // bytes of a block's hash

	flagParent   = 1
	flagChecksum = 2
)

// ErrCorrupt says that a value is not what was written: its header or its checksum is wrong.
var ErrCorrupt = errors.New("corrupt value")

// ErrIncompatible says that a value was written by an engine whose blocks are not ours to use, though its key is the same.
var ErrIncompatible = errors.New("value of an incompatible engine")

// Header is what a value tells of its payload.
type Header struct {
	Group         store.Group
	Compatibility [32]byte
	BlockTokens   uint32
	Payload       uint64 // bytes
	Sum           uint64 // XXH3-64 of the payload, if HasSum
	HasSum        bool
}

// AppendHeader appends a header to dst. A group whose names do not fit is an error.
func AppendHeader(dst []byte, h *Header) ([]byte, error) {
	g, start := &h.Group, len(dst)
	if len(g.Blocks) == 0 {
		return dst, errors.New("group without blocks")
	}
	if g.Rank < 0 {
		return dst, fmt.Errorf("rank %d: want 0 or more", g.Rank)
	}
	var flags, parent uint16
	var parentPrefix event.PrefixHash
	if g.HasParent {
		if g.Parent.Hash.Len() > maxHash {
			return dst, fmt.Errorf("hash of %d bytes: want %d at most", g.Parent.Hash.Len(), maxHash)
		}
		flags, parent, parentPrefix = flagParent, uint16(g.Parent.Hash.Len()), g.Parent.Prefix
	}
	if h.HasSum {
		flags |= flagChecksum
	}
	if len(g.LoRA) > maxHeader/2 {
		return dst, fmt.Errorf("LoRA name of %d bytes: want %d at most", len(g.LoRA), maxHeader/2)
	}
	size := fixedBytes + int(parent) + len(g.LoRA)
	for i := range g.Blocks {
		n := g.Blocks[i].Hash.Len()
		if n > maxHash {
			return dst, fmt.Errorf("hash of %d bytes: want %d at most", n, maxHash)
		}
		size += 9 + n
	}
	if size > maxHeader {
		return dst, fmt.Errorf("names of %d blocks take %d bytes: want %d at most; make groups smaller", len(g.Blocks), size, maxHeader)
	}
	le := binary.LittleEndian
	dst = append(dst, magic...)
	dst = le.AppendUint16(dst, formatVersion)
	dst = le.AppendUint16(dst, flags)
	dst = le.AppendUint32(dst, uint32(size))
	dst = le.AppendUint32(dst, uint32(len(g.Blocks)))
	dst = le.AppendUint64(dst, h.Payload)
	dst = le.AppendUint64(dst, h.Sum)
	dst = append(dst, h.Compatibility[:]...)
	dst = le.AppendUint32(dst, h.BlockTokens)
	dst = le.AppendUint32(dst, uint32(g.Rank))
	dst = le.AppendUint64(dst, uint64(parentPrefix))
	dst = le.AppendUint16(dst, parent)
	dst = le.AppendUint16(dst, uint16(len(g.LoRA)))
	dst = le.AppendUint32(dst, 0)
	dst = le.AppendUint64(dst, 0) // the header's own checksum, below
	if g.HasParent {
		dst = g.Parent.Hash.AppendTo(dst)
	}
	dst = append(dst, g.LoRA...)
	for i := range g.Blocks {
		dst = le.AppendUint64(dst, uint64(g.Blocks[i].Prefix))
		dst = append(dst, byte(g.Blocks[i].Hash.Len()))
		dst = g.Blocks[i].Hash.AppendTo(dst)
	}
	head := dst[start:]
	le.PutUint64(head[88:], headerSum(head))
	return dst, nil
}

func headerSum(head []byte) uint64 {
	return xxh3.HashSeed(head[fixedBytes:], xxh3.Hash(head[:88]))
}

// preamble is the part of a header that has the same place in every value.
type preamble struct {
	flags, parent, lora uint16
	size, blocks        int
	payload, sum        uint64
}

// readPreamble reads the first 96 bytes of a value, which has so many bytes in all.
func readPreamble(b []byte, value int64) (preamble, error) {
	le := binary.LittleEndian
	var p preamble
	if len(b) < fixedBytes || string(b[:4]) != magic {
		return p, fmt.Errorf("%w: not a group of blocks", ErrCorrupt)
	}
	if v := le.Uint16(b[4:]); v != formatVersion {
		return p, fmt.Errorf("%w: format version %d, this reads %d", ErrIncompatible, v, formatVersion)
	}
	p = preamble{
		flags: le.Uint16(b[6:]), size: int(le.Uint32(b[8:])), blocks: int(le.Uint32(b[12:])), payload: le.Uint64(b[16:]), sum: le.Uint64(b[24:]),
		parent: le.Uint16(b[80:]), lora: le.Uint16(b[82:]),
	}
	least := fixedBytes + int(p.parent) + int(p.lora)
	switch {
	case p.size < least || p.size > maxHeader:
		return p, fmt.Errorf("%w: header of %d bytes", ErrCorrupt, p.size)
	case p.blocks < 1 || p.blocks > (p.size-least)/10: // each takes 10 bytes or more
		return p, fmt.Errorf("%w: %d blocks in a header of %d bytes", ErrCorrupt, p.blocks, p.size)
	case p.parent > maxHash || (p.flags&flagParent != 0) != (p.parent > 0):
		return p, fmt.Errorf("%w: parent's hash of %d bytes", ErrCorrupt, p.parent)
	case int64(p.size) > value || p.payload != uint64(value)-uint64(p.size):
		return p, fmt.Errorf("%w: value of %d bytes with a header of %d and a payload of %d", ErrCorrupt, value, p.size, p.payload)
	}
	return p, nil
}

// names checks a whole header and calls yield with the prefix hash and the hash of each block.
func (p *preamble) names(head []byte, yield func(prefix uint64, hash []byte)) error {
	if len(head) != p.size || binary.LittleEndian.Uint64(head[88:]) != headerSum(head) {
		return fmt.Errorf("%w: the header's checksum differs", ErrCorrupt)
	}
	rest := head[fixedBytes+int(p.parent)+int(p.lora):]
	for range p.blocks {
		if len(rest) < 10 {
			return fmt.Errorf("%w: the header ends within its names", ErrCorrupt)
		}
		n := int(rest[8])
		if n == 0 || len(rest) < 9+n {
			return fmt.Errorf("%w: the header ends within its names", ErrCorrupt)
		}
		yield(binary.LittleEndian.Uint64(rest), rest[9:9+n])
		rest = rest[9+n:]
	}
	if len(rest) != 0 {
		return fmt.Errorf("%w: %d bytes behind the header's names", ErrCorrupt, len(rest))
	}
	return nil
}

// ParseHeader reads the header that begins a value of so many bytes. b is the value or its beginning; where that is too
// short for the header, more says how many bytes are needed.
func ParseHeader(b []byte, value int64) (h Header, more int, err error) {
	if len(b) < fixedBytes && int64(len(b)) < value {
		return h, fixedBytes, nil
	}
	p, err := readPreamble(b, value)
	if err != nil {
		return h, 0, err
	}
	if len(b) < p.size {
		return h, p.size, nil
	}
	le := binary.LittleEndian
	h = Header{Payload: p.payload, Sum: p.sum, HasSum: p.flags&flagChecksum != 0, BlockTokens: le.Uint32(b[64:])}
	copy(h.Compatibility[:], b[32:64])
	g := &h.Group
	g.Rank = int(le.Uint32(b[68:]))
	rest := b[fixedBytes:]
	if p.parent > 0 {
		g.HasParent = true
		g.Parent = connector.Name{Hash: event.BytesHash(string(rest[:p.parent])), Prefix: event.PrefixHash(le.Uint64(b[72:]))}
	}
	g.LoRA = string(rest[p.parent : p.parent+p.lora])
	g.Blocks = make([]connector.Name, 0, p.blocks)
	err = p.names(b[:p.size], func(prefix uint64, hash []byte) {
		g.Blocks = append(g.Blocks, connector.Name{Hash: event.BytesHash(string(hash)), Prefix: event.PrefixHash(prefix)})
	})
	return h, 0, err
}

// check compares a header with what a reader asked for: a key's value of so many bytes, of engines like this one.
func (p *preamble) check(head []byte, key string, compatibility *[32]byte, bytes int) error {
	if [32]byte(head[32:64]) != *compatibility {
		return ErrIncompatible
	}
	if p.payload != uint64(bytes) {
		return fmt.Errorf("%w: %d bytes there, %d wanted", store.ErrAbsent, p.payload, bytes)
	}
	var last []byte
	if err := p.names(head, func(_ uint64, hash []byte) { last = hash }); err != nil {
		return err
	}
	if !endsInHex(key, last) {
		return fmt.Errorf("%w: it belongs to another key", ErrCorrupt)
	}
	return nil
}

const hexDigits = "0123456789abcdef"

// endsInHex reports whether key ends with ':' and the hexadecimal digits of hash.
func endsInHex(key string, hash []byte) bool {
	at := len(key) - 2*len(hash)
	if at < 1 || key[at-1] != ':' {
		return false
	}
	for i, b := range hash {
		if key[at+2*i] != hexDigits[b>>4] || key[at+2*i+1] != hexDigits[b&15] {
			return false
		}
	}
	return true
}
