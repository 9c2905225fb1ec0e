package recovery

import (
	"fmt"
	"time"

	"kvstrata/event"
)

// purpose is why a replay was asked for.
type purpose uint8

const (
	noReplay    purpose = iota
	fromStart           // everything there is of a life
	closeGap            // the hole after last
	verifyLife          // the last batch, to see that it is still this life's, and what followed it
	probeSilent         // what came after last, since nothing does; live frames do not wait for it
	proveLate           // as verifyLife, when live frames have waited long enough
)

// inquire asks for what live frames have to wait for.
func (m *Machine) inquire(now time.Time) {
	switch {
	case !m.known:
		m.ask(now, fromStart, 0)
	case m.unsure(): // nothing that comes is of use before the life is proved
		m.ask(now, verifyLife, m.anchor())
	default:
		m.ask(now, closeGap, m.last+1)
	}
}

func (m *Machine) ask(now time.Time, why purpose, from event.Seq) {
	m.asked, m.from, m.deadline = why, from, now.Add(m.cfg.ReplayTimeout)
	m.progress, m.hasAhead, m.empty = false, false, true
	m.moment.asks++
	// What is still under way of an earlier reply must not be taken for this one's.
	m.do(Action{Kind: Ask, First: from, Reopen: m.replying})
	m.replying = true
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
		m.moment.proofs++
		m.behind = m.behind || !m.connected // what was heard may be of a life before this one
		m.first(f, way)
	case f.Seq <= m.last && (m.precedes(f) || !m.betrays(f)):
		m.duplicate(f) // it came live since the replay was asked for
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

// ended takes the end of a replay: by its marker, or by silence.
func (m *Machine) ended(now time.Time, silence string) {
	why := m.asked
	m.asked = noReplay
	if m.progress {
		m.barren = 0
	} else {
		m.barren++
	}
	answered := silence == ""
	switch {
	case why == noReplay:
		m.barren = 0
		return
	case (why == verifyLife || why == proveLate) && answered:
		// The engine does not have our last batch: it began anew.
		m.proveNewLife(now, fmt.Sprintf("replay knows nothing of sequence %d", m.from))
		return
	case why == proveLate:
		m.barren = 0
		return
	case !answered && why != probeSilent && m.again():
		m.inquire(now)
		return
	case why == verifyLife:
		// No proof is to be had: the sequence of what comes on this connection must do, and it stays in doubt until then.
		m.tried = now
		m.moment.silences++
		m.discardOld()
	case why == fromStart && !answered && len(m.held) > 0:
		m.begun = true // it would be as silent again
	}
	m.discardForeign(answered)
	// The reply may have been short: routers drop what a slow client does not take.
	hole := m.hasAhead || len(m.held) > 0
	if !m.known || len(m.held) > 0 && m.held[0].Seq <= m.last+1 {
		hole = false // what was held back goes on from here
	}
	if hole && why != verifyLife && m.again() {
		m.inquire(now)
		return
	}
	m.barren, m.rounds = 0, 0
	if !hole {
		return
	}
	if answered {
		silence = "the replay does not reach back so far"
	}
	m.discardFallen()
	m.giveUp(silence)
	if m.hasAhead && (len(m.held) == 0 || m.held[0].Seq > m.last+1) {
		m.inquire(now)
	}
}

// again reports whether what a replay did not bring may be asked for once more, and counts it.
func (m *Machine) again() bool {
	m.rounds++
	return m.barren < m.cfg.Attempts && m.rounds < m.cfg.Rounds
}

// resume returns where to go on asking.
func (m *Machine) resume() event.Seq {
	if !m.known {
		return 0
	}
	return m.last + 1
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
