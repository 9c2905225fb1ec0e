package recovery

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"kvstrata/event"
)

// doubt is why the engine heard now might not be the one known from before.
type doubt uint8

const (
	noDoubt     doubt = iota
	ourRestart        // we were away
	reconnected       // the connection was lost for a while
	disputed          // a live frame has another content than the one known under its sequence
)

// unproved is the reason of a source whose doubt no replay could end: what came next had the next sequence, so it is taken
// for the same life. Another life that has reached exactly that sequence can't be told from it without replay.
const unproved = "same life by sequence only: no replay proved it"

// movedOn is the reason when none can any more.
const movedOn = "same life by sequence only: the replay no longer has what would prove it"

// maxStrange is how many live frames in a row may fit neither what is known nor a later life, until they are taken for one.
const maxStrange = 3

// suspect puts the life in doubt.
func (m *Machine) suspect(now time.Time, why doubt) {
	m.tried, m.tries = now, 0
	if m.doubt == noDoubt {
		m.doubt, m.since = why, now
	}
}

// unsure reports whether a replay has to prove the life, before what it brings can be of use. As long as the live socket has no peer,
// each may be answered by another life.
func (m *Machine) unsure() bool {
	return m.known && (m.doubt != noDoubt || m.pending() || !m.connected)
}

// pending reports whether the source goes on without its life being proved.
func (m *Machine) pending() bool { return isUnproved(m.reason) }

func isUnproved(reason string) bool { return strings.HasPrefix(reason, unproved) }

// settle ends a doubt that no replay could, since the batch to be applied is the next one. That proves too little to
// call the set complete. What was missing before is missing still.
func (m *Machine) settle(next event.Seq) {
	if m.doubt == noDoubt {
		return
	}
	m.doubt = noDoubt
	if m.pending() || strings.HasPrefix(m.reason, movedOn) {
		return
	}
	reason := unproved
	if m.reason != "" {
		reason += "; " + m.reason
	}
	m.hurt(next, reason)
	m.do(Action{Kind: Tell, State: m.state, Reason: m.reason})
}

// prove ends a doubt by what a replay answered.
func (m *Machine) prove() {
	m.doubt, m.barren = noDoubt, 0
	m.moment.proofs++
	if !m.pending() {
		return
	}
	m.reason = strings.TrimPrefix(strings.TrimPrefix(m.reason, unproved), "; ")
	if m.reason == "" {
		m.state = event.StateLive
	}
}

// unprovable ends a doubt for good: the engine no longer has what would prove its life.
func (m *Machine) unprovable() {
	m.moment.silences++
	m.settle(m.last + 1)
	if m.pending() {
		m.reason = movedOn + strings.TrimPrefix(m.reason, unproved)
	}
}

// remember appends what is known of a batch to the last ones. While the life is not proved, the newest of those from before,
// below whole, stays: the proof needs it.
func remember(recents []event.Recent, r event.Recent, pending bool, whole event.Seq) []event.Recent {
	if len(recents) < event.MaxRecents {
		return append(recents, r)
	}
	drop := 0
	if pending && recents[1].Seq >= whole {
		drop = 1
	}
	return append(slices.Delete(recents, drop, drop+1), r)
}

// anchor returns the last sequence whose batch is remembered, and of a life not proved the last from before; behind it
// there may be a range that was given up.
func (m *Machine) anchor() event.Seq {
	for _, r := range slices.Backward(m.recents) {
		if !m.pending() || r.Seq < m.whole {
			return r.Seq
		}
	}
	return m.last
}

// later reports whether a frame is later than the last one by the engine's clock; unknown times count as later.
func (m *Machine) later(f Frame) bool {
	if len(m.recents) == 0 || f.Time == 0 {
		return true
	}
	return f.Time > m.recents[len(m.recents)-1].Time
}

// predates reports whether a live frame is older than this life: one of the life before, which lay in the socket when a
// replay showed that there is another. Once a live frame of this life has come, none can.
func (m *Machine) predates(f Frame) bool {
	return m.behind && f.Time != 0 && f.Time < m.began
}

// sameBatch reports whether a frame is one of the last batches.
func (m *Machine) sameBatch(f Frame) bool {
	for _, r := range m.recents {
		if r.Seq == f.Seq {
			return r.Payload == f.Payload
		}
	}
	return false
}

// anotherLife reports whether a frame at or below last is of another, later life: a remembered sequence with other content
// that is not older, or one too old to be remembered that carries a later time. What an earlier life left behind is
// older; of ranges that were given up nothing is known. But clocks may be set back: where another life is likely and no
// replay can tell, other content is enough.
func (m *Machine) anotherLife(f Frame) bool {
	blind := !m.cfg.Replay && (m.doubt == ourRestart || m.doubt == reconnected)
	for _, r := range m.recents {
		if r.Seq == f.Seq {
			return r.Payload != f.Payload && (f.Time >= r.Time || f.Time == 0 || blind)
		}
	}
	return m.precedes(f) && (m.later(f) || blind && len(m.recents) == event.MaxRecents)
}

// isKnown reports whether a frame's sequence is one of the last batches', whatever its content.
func (m *Machine) isKnown(f Frame) bool {
	return slices.ContainsFunc(m.recents, func(r event.Recent) bool { return r.Seq == f.Seq })
}

// precedes reports whether a frame's sequence lies before those of the last batches: forgotten, or never heard.
func (m *Machine) precedes(f Frame) bool { return len(m.recents) > 0 && f.Seq < m.recents[0].Seq }

// betrays reports whether a frame can't be of the life known.
func (m *Machine) betrays(f Frame) bool {
	return f.Seq <= m.last && !m.sameBatch(f) && m.anotherLife(f)
}

// betraysSince reports whether a live frame that came since this life was last shown can't be of it.
func (m *Machine) betraysSince(f Frame) bool {
	return f.came.proofs == m.moment.proofs && m.betrays(f)
}

// verify takes the first frame of a replay from our last batch: it proves the life, or another one.
func (m *Machine) verify(now time.Time, f Frame) {
	holding := m.holding()
	switch {
	case m.sameBatch(f) && !(m.pending() && f.Seq >= m.whole):
		m.prove()
		m.duplicate(f)
		m.goOn(holding) // what follows closes whatever gap there is
		m.progress = true
	case len(m.recents) == 0, f.Seq > m.from && !slices.ContainsFunc(m.held, m.betraysSince):
		// Nothing is left to compare with: here, or there, since the engine's buffer has moved on.
		m.unprovable()
		m.goOn(holding)
		m.replayed(now, f)
	default:
		m.proveNewLife(now, fmt.Sprintf("replay answers sequence %d with another batch", f.Seq))
		m.duplicate(f)
	}
}

// goOn takes the rest of a reply that began with the proof of the life.
func (m *Machine) goOn(holding bool) {
	m.asked, m.from = probeSilent, m.last+1
	if holding {
		m.asked = closeGap
	}
}

// dispute takes a live frame at or below last that is not known, of an engine that can be asked: another life, what an
// earlier one left behind, or another publisher. The engine is asked first, and only if it is silent the frame's word counts.
func (m *Machine) dispute(now time.Time, f Frame, way event.Way) {
	m.estrange(f)
	switch {
	case !m.isKnown(f) && !m.precedes(f) && !m.isPresent(f) && m.strange < maxStrange: // late, of a range that was given up
		m.duplicate(f)
	case f.came.proofs < m.moment.proofs:
		m.duplicate(f)
		if m.refuted != m.moment.proofs && !m.behind {
			m.refuted = m.moment.proofs
			m.flip(now)
		}
	case f.came.silences == m.moment.silences:
		m.suspect(now, disputed)
		m.inquire(now)
		m.wait(f)
	case m.anotherLife(f):
		m.restart(now, f, way)
	default:
		m.duplicate(f)
	}
}

// restart begins a new life with the live frame that betrayed it.
func (m *Machine) restart(now time.Time, f Frame, way event.Way) {
	if m.flip(now) {
		m.duplicate(f)
		return
	}
	m.do(Action{Kind: NewLife, Reason: fmt.Sprintf("sequence %d after %d", f.Seq, m.last)})
	m.forget()
	if m.cfg.Replay {
		m.begun, m.behind = true, true // the replay may show yet another one
		m.inquire(now)
		m.wait(f)
		return
	}
	lives := m.moment.links - m.heardOn
	m.first(f, way)
	if lives > 1 { // one that came and went may have left it behind
		m.suspect(now, reconnected)
	}
}

// proveNewLife begins the life that a replay has shown; what was held back of the old one is of no use.
func (m *Machine) proveNewLife(now time.Time, reason string) {
	if m.flip(now) {
		return
	}
	m.discardOld()
	m.do(Action{Kind: NewLife, Reason: reason})
	m.forget()
	m.behind = true
	m.inquire(now)
}

func (m *Machine) forget() {
	m.known, m.doubt, m.recents = false, noDoubt, m.recents[:0]
	m.state, m.reason, m.whole = event.StateRecovering, "new life", 0
	m.asked, m.barren, m.rounds, m.probed, m.begun = noReplay, 0, 0, 0, false
	m.behind, m.strange = false, 0
}

// estrange counts live frames that fit nothing, each with a higher sequence than the one before.
func (m *Machine) estrange(f Frame) {
	if m.strange == 0 || f.Seq > m.stranger {
		m.strange++
	}
	m.stranger = f.Seq
}

// isPresent reports whether a frame that fits nothing was published while this life was, so that nobody left it behind.
func (m *Machine) isPresent(f Frame) bool {
	return m.isKnown(f) && f.Time >= m.recents[0].Time || m.later(f)
}

// contradicted takes a live frame that is neither known nor, by its time, of a later life, where no replay can tell: it came
// late, or is of a later life whose clock was set back, or of another publisher. What an engine begins with, or what goes on,
// is no late frame.
func (m *Machine) contradicted(now time.Time, f Frame, way event.Way) {
	m.estrange(f)
	switch {
	case f.Seq == m.cfg.First && m.last >= f.Seq+maxStrange, m.strange >= maxStrange:
		m.restart(now, f, way)
		return
	case m.isPresent(f) && m.flip(now):
	case m.isKnown(f), m.precedes(f):
		m.suspect(now, disputed)
	}
	m.duplicate(f)
}
