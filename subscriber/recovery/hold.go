package recovery

import (
	"slices"
	"time"

	"kvstrata/event"
)

// holding reports whether live frames wait for the replay that runs.
func (m *Machine) holding() bool {
	return m.asked == fromStart || m.asked == closeGap || m.asked == verifyLife
}

// drain takes held frames in order of reception, until one must wait for a replay. A single frame that need not wait is
// taken by the way given.
func (m *Machine) drain(now time.Time, way event.Way) {
	if len(m.held) > 1 {
		way = event.Held
	}
	for len(m.held) > 0 {
		if m.overfull() {
			m.asked = noReplay
			m.moment.silences++ // there was no time to answer
			m.discardOld()
			m.discardFallen()
			m.giveUp("held back too much while the replay ran")
		}
		if len(m.held) == 0 {
			break
		}
		if m.holding() {
			return
		}
		f := m.held[0]
		m.held = m.held[1:]
		m.heldBytes -= len(f.Data)
		m.accept(now, f, way)
	}
	m.held = nil
}

func (m *Machine) overfull() bool {
	return len(m.held) > m.cfg.MaxHeld || m.heldBytes > m.cfg.MaxHeldBytes
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

// discardOld drops what was held back before the last reconnect.
func (m *Machine) discardOld() {
	m.discard(func(f Frame) bool { return f.came.links != m.moment.links })
}

// discardForeign drops what a replay that has ended shows not to be of this life: whatever is older than it, and, if the
// engine had nothing to answer at all, whatever came before it was asked.
func (m *Machine) discardForeign(answered bool) {
	before := len(m.held)
	m.discard(func(f Frame) bool {
		return m.predates(f) || m.behind && answered && m.empty && f.came.asks < m.moment.asks
	})
	if len(m.held) < before {
		m.begun = false
	}
}

// discardFallen drops, of what was held back behind a new life, what is older, and everything before the last falling back:
// a connection keeps order, so it is of the life before.
func (m *Machine) discardFallen() {
	if !m.behind {
		return
	}
	m.discard(m.predates)
	for i := len(m.held) - 1; i > 0; i-- {
		if m.held[i].Seq < m.held[i-1].Seq {
			m.discardFirst(i)
			return
		}
	}
}

// discardFirst drops the first n of what was held back.
func (m *Machine) discardFirst(n int) {
	for _, f := range m.held[:n] {
		m.heldBytes -= len(f.Data)
		m.duplicate(f)
	}
	m.held = m.held[n:]
}

// next applies the frame after last that a replay brought, preferring the copy that was received live.
func (m *Machine) next(f Frame, way event.Way) {
	for i, h := range m.held {
		if h.Seq == f.Seq && h.Payload == f.Payload {
			m.heldBytes -= len(h.Data)
			m.held = slices.Delete(m.held, i, i+1)
			if m.behind { // this life is heard: what came before it is of another
				m.behind = false
				m.discardFirst(i)
			}
			m.duplicate(f)
			m.apply(h, event.Held)
			return
		}
	}
	m.apply(f, way)
}
