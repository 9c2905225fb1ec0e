package main

import (
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"
)

// arena is memory outside Go's heap for what is prepared before a run and stays until the process ends: so the collector
// does not pay for input that in real life comes piece by piece. What lies in it may point only into arenas and to what the
// program holds elsewhere.
type arena struct {
	chunk []byte
	used  int
}

const arenaChunk = 64 << 20

// take returns n zeroed values.
func take[T any](a *arena, n int) []T {
	if n == 0 {
		return nil
	}
	var zero T
	size := n * int(unsafe.Sizeof(zero))
	a.used = (a.used + 7) &^ 7
	if a.used+size > len(a.chunk) {
		chunk, err := unix.Mmap(-1, 0, max(arenaChunk, size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
		if err != nil {
			panic(fmt.Sprintf("map %d bytes for prepared work: %v", max(arenaChunk, size), err))
		}
		a.chunk, a.used = chunk, 0
	}
	p := unsafe.Slice((*T)(unsafe.Pointer(&a.chunk[a.used])), n)
	a.used += size
	return p
}
