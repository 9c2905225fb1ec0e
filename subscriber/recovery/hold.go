package recovery

import (
	"slices"
	"time"

	"kvstrata/event"
)

// holding reports whether live frames wait for the replay that runs.
func (m *Machine) holding() bool { return m.reply.running && m.reply.holds }

// hold takes a live frame in. What does not fit is dropped; a later frame shows the gap.
func (m *Machine) hold(f Frame) {
	f.asks = m.asks
	if len(m.held) >= m.cfg.MaxHeld || len(m.held) > 0 && m.heldBytes+len(f.Data) > m.cfg.MaxHeldBytes {
		m.duplicate(f)
		return
	}
	m.held = append(m.held, f)
	m.heldBytes += len(f.Data)
}

// drain takes held frames in order of reception, until one must wait for a replay. A single frame that need not wait is
// taken by the way given.
func (m *Machine) drain(now time.Time, way event.Way) {
	if len(m.held) > 1 {
		way = event.Held
	}
	for len(m.held) > 0 && !m.holding() {
		f := m.held[0]
		m.held = m.held[1:]
		m.heldBytes -= len(f.Data)
		m.accept(now, f, way)
	}
	if len(m.held) == 0 {
		m.held = nil
	}
}

// wait puts a frame back: it is the next to be taken once the replay has ended.
func (m *Machine) wait(f Frame) {
	m.held = append([]Frame{f}, m.held...)
	m.heldBytes += len(f.Data)
}

// discard drops what was held back and is of no use.
func (m *Machine) discard(useless func(Frame) bool) {
	m.held = slices.DeleteFunc(m.held, func(f Frame) bool {
		if !useless(f) {
			return false
		}
		m.heldBytes -= len(f.Data)
		m.duplicate(f)
		return true
	})
}

// heardFrom ends the time in which frames of an earlier life may come: this one's begin with the i-th held.
func (m *Machine) heardFrom(i int) {
	m.behind = false
	for _, f := range m.held[:i] {
		m.heldBytes -= len(f.Data)
		m.duplicate(f)
	}
	m.held = m.held[i:]
}

// sift drops, of what may be of an earlier life, what came before the first frame held that a replay had too, or, where there is
// none, what the replay asked for since did not have.
func (m *Machine) sift() {
	if !m.behind {
		return
	}
	if i := slices.IndexFunc(m.held, m.sameBatch); i >= 0 {
		m.heardFrom(i)
		return
	}
	m.discard(func(f Frame) bool { return f.asks < m.asks })
}

// next applies the frame after last that a replay brought, preferring the copy that was received live.
func (m *Machine) next(f Frame, way event.Way) {
	i := slices.IndexFunc(m.held, func(h Frame) bool { return h.Seq == f.Seq && h.Payload == f.Payload })
	if i < 0 {
		m.apply(f, way)
		return
	}
	if m.behind {
		m.heardFrom(i)
		i = 0
	}
	h := m.held[i]
	m.heldBytes -= len(h.Data)
	m.held = slices.Delete(m.held, i, i+1)
	m.duplicate(f)
	m.hear(h)
	m.apply(h, event.Held)
}
