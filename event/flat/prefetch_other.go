//go:build !amd64 && !arm64

package flat

import "unsafe"

// Prefetch loads the cache lines that some addresses lie in, on processors for which it is written. Here it does nothing.
func Prefetch([]unsafe.Pointer) {}
