//go:build linux && !race

package prefix

import (
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"
)

// grow maps a slab. A whole one is a huge page, where the system has any: a random access then misses one cache, not two.
func (s *slabs) grow(bytes int) []byte {
	room := bytes
	if bytes == maxSlab {
		room *= 2 // for the alignment
	}
	b, err := unix.Mmap(-1, 0, room, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		panic(fmt.Sprintf("prefix: map %d bytes of memory: %v", room, err))
	}
	s.mapped = append(s.mapped, b)
	if bytes != maxSlab {
		return b
	}
	skip := -int(uintptr(unsafe.Pointer(unsafe.SliceData(b)))) & (maxSlab - 1)
	b = b[skip : skip+maxSlab]
	_ = unix.Madvise(b, unix.MADV_HUGEPAGE) // without them it is slower, and right
	return b
}

// giveBack returns the pages that lie within zeroed memory to the system, until they are written again.
func (s *slabs) giveBack(b []byte) {
	const page = 4096
	start := -int(uintptr(unsafe.Pointer(unsafe.SliceData(b)))) & (page - 1)
	if end := start + (len(b)-start)&^(page-1); end > start {
		_ = unix.Madvise(b[start:end], unix.MADV_DONTNEED) // else they stay
	}
}

func (s *slabs) unmap() {
	for _, b := range s.mapped {
		_ = unix.Munmap(b) // what cannot be unmapped stays until the process ends
	}
}
