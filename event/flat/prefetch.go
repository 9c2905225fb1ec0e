//go:build amd64 || arm64

package flat

import "unsafe"

// Prefetch loads the cache lines that some addresses lie in, one after the other and nothing between them, so that as many misses overlap as
// the processor can have. Its own prefetch instructions are no help where the misses are this many: they are dropped.
//
//go:noescape
func Prefetch(lines []unsafe.Pointer)
