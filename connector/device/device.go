// Package device is the seam between the connector and what KV blocks lie in: host memory, or a GPU's.
//
// Host memory is read and written where it is. Memory that the CPU cannot address goes through pinned host memory, by
// copies that a [Stream] does beside the caller and whose end an [Event] tells. [Host] is the device of this package.
package device

import (
	"context"
	"os"
)

// Span is a contiguous piece of a memory, in bytes.
type Span struct{ Offset, Length int }

// Memory is a region of a device. Whoever allocated it closes it, once nothing refers to it.
type Memory interface {
	// Host returns the memory when the CPU can address it, and nil when it cannot.
	Host() []byte
	// Size is in bytes.
	Size() int
	// File is what another process on this host can map to see the same memory; nil when there is none.
	File() *os.File
	Close() error
}

// Device allocates memory and copies from and to it. It is safe for concurrent use.
type Device interface {
	// Name is as upstream's kv_buffer_device has it: cpu, cuda:0.
	Name() string
	// Alloc returns zeroed memory for blocks.
	Alloc(name string, size int) (Memory, error)
	// Pin returns host memory that the device copies from and to by itself (CUDA: cuMemHostAlloc).
	Pin(name string, size int) (Memory, error)
	// NewStream returns a queue of copies; on CUDA a stream that belongs to one locked thread.
	NewStream() (Stream, error)
}

// Stream does copies in the order in which they are posted, without making the poster wait. One goroutine posts.
//
// Neither the pieces nor the memory may be touched before the copy's event is done; the slice of spans may be reused
// when the call returns.
type Stream interface {
	// Gather copies pieces of a device's memory into pinned memory, one behind the other.
	Gather(dst []byte, src Memory, spans []Span) (Event, error)
	// Scatter copies pinned memory into pieces of a device's memory, in order.
	Scatter(dst Memory, spans []Span, src []byte) (Event, error)
	Close() error
}

// Event is the end of one copy.
type Event interface {
	// Done reports whether the copy has ended, without waiting.
	Done() bool
	// Wait waits for the end, or for ctx, and returns what went wrong. After an error of ctx the copy may still run.
	Wait(ctx context.Context) error
}
