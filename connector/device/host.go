package device

import (
	"context"
	"fmt"
)

// Host is the CPU's memory.
type Host struct{}

var (
	_ Device = Host{}
	_ Memory = (*Arena)(nil)
)

// Name returns cpu.
func (Host) Name() string { return "cpu" }

// Alloc returns an arena.
func (Host) Alloc(name string, size int) (Memory, error) { return newMemory(name, size) }

// Pin returns an arena: the CPU needs no pinning.
func (Host) Pin(name string, size int) (Memory, error) { return newMemory(name, size) }

// newMemory keeps a nil arena from becoming a memory that is not nil.
func newMemory(name string, size int) (Memory, error) {
	a, err := NewArena(name, size)
	if err != nil {
		return nil, err
	}
	return a, nil
}

// NewStream returns a stream whose copies are done when the call that posts them returns.
func (Host) NewStream() (Stream, error) { return hostStream{}, nil }

type hostStream struct{}

func (hostStream) Gather(dst []byte, src Memory, spans []Span) (Event, error) {
	mem := src.Host()
	for _, s := range spans {
		if n := copy(dst, mem[s.Offset:s.Offset+s.Length]); n != s.Length {
			return nil, fmt.Errorf("gather: %d bytes do not fit into the %d that are left", s.Length, len(dst))
		}
		dst = dst[s.Length:]
	}
	return done{}, nil
}

func (hostStream) Scatter(dst Memory, spans []Span, src []byte) (Event, error) {
	mem := dst.Host()
	for _, s := range spans {
		if n := copy(mem[s.Offset:s.Offset+s.Length], src); n != s.Length {
			return nil, fmt.Errorf("scatter: %d bytes wanted, %d are left", s.Length, len(src))
		}
		src = src[s.Length:]
	}
	return done{}, nil
}

func (hostStream) Close() error { return nil }

// done is the event of a copy that has ended.
type done struct{}

func (done) Done() bool                 { return true }
func (done) Wait(context.Context) error { return nil }
