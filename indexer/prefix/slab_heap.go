//go:build !linux || race

package prefix

import "unsafe"

// grow allocates a slab on the heap, where the race detector sees what is done to it.
func (s *slabs) grow(bytes int) []byte {
	words := make([][8]uint64, bytes/64)
	b := unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(words))), bytes)
	s.mapped = append(s.mapped, b)
	return b
}

func (s *slabs) giveBack([]byte) {}

func (s *slabs) unmap() { s.mapped = nil }
