package lmcache

import (
	"encoding/binary"
	"fmt"
	"math"
)

// The keys of LMCache's Redis layout are a chunk's key and one of these (redis_connector.py). The bytes are written before
// the metadata, which is what presence goes by.
const (
	MetadataSuffix = "metadata"
	BytesSuffix    = "kv_bytes"
)

// Metadata is what LMCache's Redis layout keeps beside a chunk's bytes (lmcache/v1/protocol.py, RemoteMetadata): its
// length, and of each group of layers the element type and shape.
type Metadata struct {
	Length int
	Format Format
	Groups []MetadataGroup
}

// MetadataGroup is a group of layers that are alike.
type MetadataGroup struct {
	DType DType
	Shape [4]int32
}

// maxGroups bounds what is decoded. Models have a handful.
const maxGroups = 64

// Append appends the encoding: 8 bytes, and 20 a group.
func (m *Metadata) Append(dst []byte) ([]byte, error) {
	if m.Length < 0 || m.Length > math.MaxInt32 || len(m.Groups) < 1 || len(m.Groups) > maxGroups {
		return dst, fmt.Errorf("metadata of %d bytes in %d groups: want 31 bits, and 1 to %d", m.Length, len(m.Groups), maxGroups)
	}
	dst = binary.LittleEndian.AppendUint32(dst, uint32(m.Length))
	dst = binary.LittleEndian.AppendUint32(dst, uint32(m.Format))
	for i := range m.Groups {
		dst = binary.LittleEndian.AppendUint32(dst, uint32(m.Groups[i].DType))
		dst = appendShape(dst, m.Groups[i].Shape)
	}
	return dst, nil
}

// ParseMetadata reads what [Metadata.Append] writes.
func ParseMetadata(b []byte) (Metadata, error) {
	var m Metadata
	if len(b) < 28 || (len(b)-8)%20 != 0 || len(b) > 8+20*maxGroups {
		return m, fmt.Errorf("metadata of %d bytes: want 8 and 20 a group, of 1 to %d", len(b), maxGroups)
	}
	n := ints(b)
	length := n.next()
	m.Length, m.Format = int(length), Format(n.next())
	if length < 0 || !m.Format.Valid() {
		return m, fmt.Errorf("metadata of %d bytes in format %d: LMCache knows no such", length, int32(m.Format))
	}
	for len(n) > 0 {
		g := MetadataGroup{DType: DType(n.next()), Shape: n.shape()}
		if c := (Content{Format: m.Format, DType: g.DType, Shape: g.Shape}); !c.valid() {
			return m, fmt.Errorf("metadata of element type %d and shape %v: LMCache knows no such", int32(g.DType), g.Shape)
		}
		m.Groups = append(m.Groups, g)
	}
	return m, nil
}
