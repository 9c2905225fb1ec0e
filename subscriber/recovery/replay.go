package recovery

import (
	"fmt"
	"time"

	"kvstrata/event"
)

// reply is what is known of the replay asked for last.
type reply struct {
	running  bool
	holds    bool // live frames wait for it
	from     event.Seq
	deadline time.Time
	empty    bool      // it brought nothing yet
	moved    bool      // it begins beyond what could prove the life
	progress bool      // it brought something new
	ahead    event.Seq // its lowest sequence beyond the hole
	hasAhead bool
}

// inquire asks for what live frames have to wait for.
func (m *Machine) inquire(now time.Time) { m.ask(now, true) }

// ask asks the engine for everything from the last batch on: its answer shows first whether the life is still the same. What was
// given up at the end can't show that; where it must be shown, the last batch remembered can.
func (m *Machine) ask(now time.Time, holds bool) {
	m.reply = reply{running: true, holds: holds, deadline: now.Add(m.cfg.ReplayTimeout), empty: true}
	switch {
	case m.unsure():
		m.reply.from = m.anchor()
	case m.known:
		m.reply.from = m.last
	}
	m.asks++
	// What is still under way of an earlier reply must not be taken for this one's.
	m.do(Action{Kind: Ask, First: m.reply.from, Reopen: m.open})
	m.open = true
}

// replayed takes a frame of the running replay.
func (m *Machine) replayed(now time.Time, f Frame) {
	initial := m.reply.empty
	m.reply.empty = false
	if m.silent { // it answers again: from now on it decides
		m.silent, m.reply.holds = false, true
	}
	way := event.Recovered
	if !m.reply.holds {
		way = event.Asked
	}
	switch payload, remembered := m.recall(f.Seq); {
	case !m.known:
		m.behind = m.behind || !m.connected
		m.first(f, way)
		m.extend(now)
	case remembered && payload != f.Payload:
		m.proveNewLife(now, fmt.Sprintf("replay answers sequence %d with another batch", f.Seq))
		m.duplicate(f)
	case initial && m.unsure() && remembered && f.Seq == m.reply.from:
		m.prove(now)
		m.duplicate(f)
		m.reply.deadline = now.Add(m.cfg.ReplayTimeout)
	case initial && m.unsure() && f.Seq <= m.last+1:
		m.proveNewLife(now, "the replay no longer has what would prove the life known")
		m.duplicate(f)
	case f.Seq == m.last+1:
		m.next(f, way)
		m.extend(now)
	case f.Seq <= m.last:
		m.duplicate(f)
	default:
		m.reply.moved = m.reply.moved || initial && m.unsure()
		if !m.reply.hasAhead {
			m.reply.ahead, m.reply.hasAhead = f.Seq, true
		}
		m.duplicate(f) // of no use until the hole before it is closed; asked for again then
	}
}

// extend gives a reply that brought something new more time; one of nothing new must not go on for ever.
func (m *Machine) extend(now time.Time) {
	m.reply.progress, m.reply.deadline = true, now.Add(m.cfg.ReplayTimeout)
}

// ended takes the end of the running replay: by its marker, or by silence.
func (m *Machine) ended(now time.Time, silence string) {
	r := m.reply
	m.reply.running = false
	if m.barren++; r.progress {
		m.barren = 0
	}
	if silence != "" {
		m.unanswered(now, r)
		return
	}
	if r.empty && m.unsure() {
		m.proveNewLife(now, fmt.Sprintf("replay knows nothing of sequence %d", r.from))
		return
	}
	m.sift()
	// The reply may have been short: routers drop what a slow client does not take.
	if !m.hasHole(r) {
		m.barren, m.rounds = 0, 0
		return
	}
	if m.again() {
		m.inquire(now)
		return
	}
	m.barren, m.rounds = 0, 0
	m.giveUp(now, r, "the replay does not reach back so far")
}

// unanswered takes the silence of a replay. If there was one too often, what is heard must do: it can't prove a life.
func (m *Machine) unanswered(now time.Time, r reply) {
	if m.silent || !r.holds {
		m.barren = 0
		return
	}
	if m.again() {
		m.inquire(now)
		return
	}
	m.barren, m.rounds = 0, 0
	m.silent, m.tried, m.tries = true, now, 0
	if len(m.held) > 0 {
		m.begun = true // it would be as silent again
	}
	if m.behind && m.known {
		m.suspect(now, reconnected)
	}
}

// hasHole reports whether the reply, or what is held back, has something beyond what is missing.
func (m *Machine) hasHole(r reply) bool {
	switch {
	case !m.known:
		return false
	case r.moved:
		return true
	case len(m.held) > 0 && !m.behind:
		return m.held[0].Seq > m.last+1
	default:
		return r.hasAhead && r.ahead > m.last+1
	}
}

// again reports whether what a replay did not bring may be asked for once more, and counts it.
func (m *Machine) again() bool {
	m.rounds++
	return m.barren < m.cfg.Attempts && m.rounds < m.cfg.Rounds
}

// giveUp loses the hole after last, up to the next batch that there is: the first one held, or one that the last reply
// had beyond the hole. Where the life was in doubt only the reply counts; what it has is of the engine, and nothing is left that
// was not.
func (m *Machine) giveUp(now time.Time, r reply, reason string) {
	next := r.ahead
	if !r.moved && !m.behind && len(m.held) > 0 && (!r.hasAhead || m.held[0].Seq < next) {
		next = m.held[0].Seq
	}
	m.lose(m.last+1, next-1, reason)
	if r.moved {
		m.doubt, m.standing.unproved, m.behind = noDoubt, false, true
	}
	if r.hasAhead && len(m.held) == 0 { // nothing else would ask for it
		m.inquire(now)
	}
}
