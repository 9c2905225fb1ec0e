package recovery

import (
	"fmt"
	"slices"
	"time"

	"kvstrata/event"
)

// purpose is why a replay was asked for.
type purpose uint8

const (
	noReplay    purpose = iota
	fromStart           // everything there is of a life
	closeGap            // the hole after last
	verifyLife          // the last batch, to see that it is still this life's
	probeSilent         // what came after last, since nothing does
)

func (m *Machine) ask(now time.Time, why purpose, from event.Seq) {
	m.asked, m.from, m.deadline = why, from, now.Add(m.cfg.ReplayTimeout)
	m.progress, m.hasAhead = false, false
	// What is still under way of an earlier reply must not be taken for this one's.
	m.do(Action{Kind: Ask, First: from, Reopen: m.replying})
	m.replying = true
}

// verify takes the first frame of a replay from our last batch: it proves the life, or another one.
func (m *Machine) verify(now time.Time, f Frame) {
	switch {
	case m.sameBatch(f):
		m.doubt, m.barren = noDoubt, 0
		m.duplicate(f)
		m.asked, m.from, m.progress = closeGap, m.last+1, true // what follows closes whatever gap there is
	case f.Seq > m.anchor() && m.later(f) && !slices.ContainsFunc(m.held, m.betrays):
		m.settle() // the engine's buffer has moved on: sequence and time must do
		m.asked, m.from = closeGap, m.last+1
		m.replayed(now, f)
	default:
		m.proveNewLife(now, fmt.Sprintf("replay answers sequence %d with another batch", f.Seq))
		m.duplicate(f)
	}
}

// discardOld drops what was held back before the last reconnect.
func (m *Machine) discardOld() {
	m.held = slices.DeleteFunc(m.held, func(f Frame) bool {
		if f.link == m.link {
			return false
		}
		m.heldBytes -= len(f.Data)
		m.duplicate(f)
		return true
	})
}

// proveNewLife begins the life that a replay has shown; what was held back of the old one is of no use.
func (m *Machine) proveNewLife(now time.Time, reason string) {
	m.discardOld()
	m.do(Action{Kind: NewLife, Reason: reason})
	m.forget()
	m.ask(now, fromStart, 0)
}

// replayed takes a frame of a replay from the start, into a gap, or into silence.
func (m *Machine) replayed(now time.Time, f Frame) {
	way := event.Recovered
	if m.asked == probeSilent {
		way = event.Asked
	}
	switch {
	case !m.known:
		m.discardOld() // of an earlier life, or in this replay
		m.progress = true
		m.first(f, way)
	case f.Seq <= m.last && (m.sameBatch(f) || !m.anotherLife(f)):
		m.duplicate(f)
	case f.Seq <= m.last:
		m.proveNewLife(now, fmt.Sprintf("replay answers sequence %d with another batch", f.Seq))
		m.duplicate(f)
	case f.Seq == m.last+1:
		m.progress = true
		m.next(f, way)
	default:
		if !m.hasAhead {
			m.ahead, m.hasAhead = f.Seq, true
		}
		m.duplicate(f) // of no use until the hole before it is closed; asked for again then
	}
}

// next applies the frame after last, preferring the copy that was received live.
func (m *Machine) next(f Frame, way event.Way) {
	for i, h := range m.held {
		if h.Seq == f.Seq && h.Payload == f.Payload {
			m.heldBytes -= len(h.Data)
			m.held = slices.Delete(m.held, i, i+1)
			m.duplicate(f)
			m.apply(h, event.Held)
			return
		}
	}
	m.apply(f, way)
}

// ended takes the end of a replay: by its marker, or by silence.
func (m *Machine) ended(now time.Time, silence string) {
	why := m.asked
	m.asked = noReplay
	if m.progress {
		m.barren = 0
	} else if why != noReplay {
		m.barren++
	}
	switch why {
	case noReplay:
		return
	case verifyLife:
		m.unverified(now, silence)
		return
	case fromStart, closeGap, probeSilent:
		if silence != "" && m.barren < m.cfg.Attempts && (why != probeSilent) {
			m.ask(now, why, m.resume(why))
			return
		}
	}
	if why == fromStart && silence != "" && len(m.held) > 0 {
		m.begun = true // it would be as silent again
	}
	// The reply may have been short: routers drop what a slow client does not take.
	hole := m.hasAhead || len(m.held) > 0
	if !m.known || len(m.held) > 0 && m.held[0].Seq <= m.last+1 {
		hole = false // what was held back goes on from here
	}
	if hole && m.barren < m.cfg.Attempts {
		m.ask(now, closeGap, m.last+1)
		return
	}
	if silence == "" {
		silence = "the replay does not reach back so far"
	}
	m.barren = 0
	if !hole {
		return
	}
	m.giveUp(silence)
	if m.hasAhead {
		m.ask(now, closeGap, m.last+1)
	}
}

// resume returns where to go on asking.
func (m *Machine) resume(why purpose) event.Seq {
	if why == fromStart && !m.known {
		return 0
	}
	return m.last + 1
}

// unverified takes the end of a replay that brought no word of our last batch.
func (m *Machine) unverified(now time.Time, silence string) {
	if silence != "" {
		if m.barren < m.cfg.Attempts {
			m.ask(now, verifyLife, m.anchor())
			return
		}
		// No proof is to be had: sequence and time of what comes on this connection must do, and it stays in doubt until
		// then.
		m.barren = 0
		m.discardOld()
		return
	}
	// The engine answered, and does not have our last batch: it began anew.
	m.proveNewLife(now, fmt.Sprintf("replay knows nothing of sequence %d", m.anchor()))
}

// giveUp loses the hole after last, up to the next batch that there is: the first one held, or one that the last reply
// had beyond the hole.
func (m *Machine) giveUp(reason string) {
	next, found := m.ahead, m.hasAhead
	if len(m.held) > 0 && m.held[0].Seq > m.last && (!found || m.held[0].Seq < next) {
		next, found = m.held[0].Seq, true
	}
	if !found || !m.known || next <= m.last+1 {
		return
	}
	m.lose(m.last+1, next-1, reason)
}
