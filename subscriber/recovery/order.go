package recovery

import (
	"time"

	"kvstrata/event"
)

// decides reports whether a replay decides what live frames mean: there is an endpoint, and it answers.
func (m *Machine) decides() bool { return m.cfg.Replay && !m.silent }

// accept takes the next frame in order of reception, when no replay holds it back.
func (m *Machine) accept(now time.Time, f Frame, way event.Way) {
	switch {
	case m.known && m.sameBatch(f):
		m.behind = false // this life is heard
		m.hear(f)
		m.duplicate(f)
	case m.behind && !m.decides():
		m.duplicate(f) // whose it is only a replay could tell; it is a gap until then
	case m.behind:
		m.consult(now, f)
	case !m.known && f.Seq > m.cfg.First && m.cfg.Replay && !m.begun:
		// Whatever a replay told before, or did not, the engine has published since.
		m.begun = true
		m.consult(now, f)
	case !m.known:
		m.first(f, way)
	case m.decides() && m.forgotten(f):
		m.duplicate(f) // late, of a range that was given up
	case m.decides() && m.lags(f):
		m.hear(f)
		m.duplicate(f)
	case m.decides() && f.Seq <= m.last:
		m.isHeard = false
		m.suspect(now, disputed)
		m.consult(now, f)
	case m.decides() && (m.doubt != noDoubt || f.Seq > m.last+1):
		m.consult(now, f)
	case f.Seq <= m.last:
		m.contradicted(now, f, way)
	default:
		if f.Seq > m.last+1 {
			m.lose(m.last+1, f.Seq-1, m.mute())
		}
		m.settle(f.Seq)
		m.strange = 0
		m.hear(f)
		m.apply(f, way)
	}
}

// hear notes a live frame of this life.
func (m *Machine) hear(f Frame) { m.isHeard, m.recent = true, f.Seq }

// lags reports whether a live frame comes so late behind a replay that its batch is no longer remembered: the socket goes on with what it
// brought before. Of another life it would fall back.
func (m *Machine) lags(f Frame) bool {
	return m.isHeard && f.Seq > m.recent && len(m.recents) > 0 && f.Seq < m.recents[0].Seq
}

// mute says why no replay closes a gap.
func (m *Machine) mute() string {
	if m.cfg.Replay {
		return "no answer from the replay endpoint"
	}
	return "no replay endpoint"
}

// consult lets a frame wait for what a replay says.
func (m *Machine) consult(now time.Time, f Frame) {
	m.inquire(now)
	m.wait(f)
}

// first takes the first frame known of a life.
func (m *Machine) first(f Frame, way event.Way) {
	m.standing, m.whole = beginning(f.Seq, m.cfg.First), f.Seq
	m.apply(f, way)
}

func (m *Machine) apply(f Frame, way event.Way) {
	m.known, m.last, f.life = true, f.Seq, m.life
	m.recents = remember(m.recents, event.Recent{Seq: f.Seq, Time: f.Time, Payload: f.Payload}, m.standing.unproved, m.unproven)
	m.do(Action{Kind: Apply, Frame: f, Way: way})
}

// hurt makes the source partial: something below a sequence is missing.
func (m *Machine) hurt(whole event.Seq, reason string) {
	m.standing.missing, m.whole = reason, max(m.whole, whole)
}

// lose gives a range up, and with it everything that was known to be resident.
func (m *Machine) lose(first, last event.Seq, reason string) {
	m.do(Action{Kind: Lose, First: first, Last: last, Reason: reason})
	m.known, m.last = true, last
	m.hurt(last+1, hole(first, last, reason))
}
