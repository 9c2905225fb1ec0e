package carry

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"kvstrata/connector/device"
	"kvstrata/connector/encoder"
)

// memory is what an engine registered. What the CPU cannot address goes through pinned memory: of the size of one item, for
// as long as it moves, or, where peers read it until it is dropped, a mirror that has every item at its own place.
type memory struct {
	caches encoder.Caches
	host   []byte // nil = the CPU cannot address it
	mirror device.Memory

	mu   sync.Mutex
	idle []*staging // as many as ever were in use at a time
}

// staging is a stream with pinned memory of its own.
type staging struct {
	stream device.Stream
	pinned device.Memory // nil before it is needed
}

// window is the bytes of one span in host memory. One goroutine uses it, and releases it once.
type window struct {
	bytes  []byte
	span   device.Span
	memory *memory
	staged *staging
}

// newMemory takes what was registered. A mirror takes buffer bytes at most.
func newMemory(c encoder.Caches, mirrored bool, buffer float64) (*memory, error) {
	if c.Device == nil || c.Memory == nil {
		return nil, errors.New("register encoder cache: no device, or no memory")
	}
	m := &memory{caches: c, host: c.Memory.Host()}
	if m.host != nil || !mirrored {
		return m, nil
	}
	size := c.Memory.Size()
	if float64(size) > buffer {
		return nil, fmt.Errorf("register encoder cache of %d bytes on %s: peers read it from a copy in host memory; set ec_buffer_size, which is %.0f, to as much", size, c.Device.Name(), buffer)
	}
	var err error
	if m.mirror, err = c.Device.Pin("encoder mirror", size); err != nil {
		return nil, fmt.Errorf("pin %d bytes for %s: %w", size, c.Device.Name(), err)
	}
	return m, nil
}

// check wants a span that lies within, and has the item's size.
func (m *memory) check(i encoder.Item, s device.Span) error {
	if s.Length != i.Bytes {
		return fmt.Errorf("item %s of %d bytes in a span of %d", i.Hash, i.Bytes, s.Length)
	}
	if size := m.caches.Memory.Size(); s.Offset < 0 || s.Offset > size-s.Length {
		return fmt.Errorf("item %s of %d bytes at %d: the encoder cache has %d", i.Hash, i.Bytes, s.Offset, size)
	}
	return nil
}

// gather returns the bytes of a span that was checked. It waits for a copy from the device, whatever ends meanwhile: none may
// be left behind that still runs.
func (m *memory) gather(s device.Span) (*window, error) {
	w, err := m.open(s, m.mirror != nil)
	if err != nil || w.staged == nil {
		return w, err
	}
	copied, err := w.staged.stream.Gather(w.bytes, m.caches.Memory, []device.Span{s})
	if err == nil {
		err = copied.Wait(context.Background())
	}
	if err != nil {
		return nil, fmt.Errorf("gather %d bytes from %s: %w", s.Length, m.caches.Device.Name(), err) // the stream is left alone
	}
	return w, nil
}

// scatter returns where the bytes of a span are to be put.
func (m *memory) scatter(s device.Span) (*window, error) { return m.open(s, false) }

func (m *memory) open(s device.Span, mirrored bool) (*window, error) {
	w := &window{span: s, memory: m}
	if m.host != nil {
		w.bytes = m.host[s.Offset : s.Offset+s.Length : s.Offset+s.Length]
		return w, nil
	}
	staged, err := m.take()
	if err != nil {
		return nil, err
	}
	if w.staged = staged; mirrored {
		w.bytes = m.mirror.Host()[s.Offset : s.Offset+s.Length : s.Offset+s.Length]
		return w, nil
	}
	if staged.pinned == nil || staged.pinned.Size() < s.Length {
		err := error(nil)
		if staged.pinned != nil {
			err = staged.pinned.Close()
		}
		if staged.pinned = nil; err == nil {
			staged.pinned, err = m.caches.Device.Pin("encoder staging", s.Length)
		}
		if err != nil {
			staged.pinned = nil
			w.release()
			return nil, fmt.Errorf("pin %d bytes for %s: %w", s.Length, m.caches.Device.Name(), err)
		}
	}
	w.bytes = staged.pinned.Host()[:s.Length]
	return w, nil
}

func (m *memory) take() (*staging, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if n := len(m.idle); n > 0 {
		s := m.idle[n-1]
		m.idle = m.idle[:n-1]
		return s, nil
	}
	stream, err := m.caches.Device.NewStream()
	if err != nil {
		return nil, fmt.Errorf("make stream on %s: %w", m.caches.Device.Name(), err)
	}
	return &staging{stream: stream}, nil
}

// commit puts the bytes in place, and returns when they are.
func (w *window) commit() error {
	if w.staged == nil {
		return nil
	}
	copied, err := w.staged.stream.Scatter(w.memory.caches.Memory, []device.Span{w.span}, w.bytes)
	if err == nil {
		err = copied.Wait(context.Background())
	}
	if err != nil {
		w.staged = nil // its copy may still run: it is left alone
		return fmt.Errorf("scatter %d bytes to %s: %w", w.span.Length, w.memory.caches.Device.Name(), err)
	}
	return nil
}

func (w *window) release() {
	if w.staged == nil {
		return
	}
	w.memory.mu.Lock()
	defer w.memory.mu.Unlock()
	w.memory.idle = append(w.memory.idle, w.staged)
	w.staged = nil
}

// close frees what staging took. No window may be open, and nobody may read the mirror.
func (m *memory) close() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	var errs []error
	for _, s := range m.idle {
		errs = append(errs, s.stream.Close())
		if s.pinned != nil {
			errs = append(errs, s.pinned.Close())
		}
	}
	m.idle = nil
	if m.mirror != nil {
		errs = append(errs, m.mirror.Close())
	}
	return errors.Join(errs...)
}
