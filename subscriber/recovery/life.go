package recovery

import (
	"fmt"
	"slices"
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

// maxStrange is how many live frames in a row may fit nothing, until they are taken for another life.
const maxStrange = 3

// suspect puts the life in doubt.
func (m *Machine) suspect(now time.Time, why doubt) {
	m.tried, m.tries = now, 0
	if m.doubt == noDoubt || m.doubt == disputed {
		m.doubt, m.since = why, now
	}
}

// elsewhere reports whether another life can be heard without that a frame tells of it: we were away, or not connected.
func (m *Machine) elsewhere() bool { return m.doubt == ourRestart || m.doubt == reconnected }

// unsure reports whether a replay has to prove the life, before what it brings can be of use. As long as the live socket
// has no peer, each may be answered by another life.
func (m *Machine) unsure() bool {
	return m.known && (m.doubt != noDoubt || m.standing.unproved || !m.connected)
}

// settle ends a doubt that no replay could, since the batch to be applied is the next one. That proves too little to
// call the set complete. What was missing before is missing still.
func (m *Machine) settle(next event.Seq) {
	if m.doubt == noDoubt {
		return
	}
	m.doubt = noDoubt
	if m.standing.unproved {
		return
	}
	m.standing.unproved, m.unproven = true, next
	state, reason := m.standing.tell()
	m.do(Action{Kind: Tell, State: state, Reason: reason})
}

// prove ends a doubt by what a replay answered. Whoever else was heard is another publisher, or one that came late.
func (m *Machine) prove(now time.Time) {
	before := len(m.held)
	m.discard(func(f Frame) bool { return f.asks < m.asks && f.Seq <= m.last && !m.sameBatch(f) })
	if len(m.held) < before && !m.behind {
		m.flip(now)
	}
	m.doubt, m.standing.unproved = noDoubt, false
}

// remember appends what is known of a batch to the last ones. While the life is not proved, the newest of those from before
// stays: the proof needs it.
func remember(recents []event.Recent, r event.Recent, pending bool, unproven event.Seq) []event.Recent {
	if len(recents) < event.MaxRecents {
		return append(recents, r)
	}
	drop := 0
	if pending && recents[1].Seq >= unproven {
		drop = 1
	}
	return append(slices.Delete(recents, drop, drop+1), r)
}

// anchor returns the last sequence whose batch is remembered, and of a life not proved the last from before; behind it
// there may be a range that was given up.
func (m *Machine) anchor() event.Seq {
	for _, r := range slices.Backward(m.recents) {
		if !m.standing.unproved || r.Seq < m.unproven {
			return r.Seq
		}
	}
	return m.last
}

// recall returns the payload of a batch, if it is one of the last.
func (m *Machine) recall(seq event.Seq) (payload uint64, found bool) {
	for _, r := range m.recents {
		if r.Seq == seq {
			return r.Payload, true
		}
	}
	return 0, false
}

// sameBatch reports whether a frame is one of the last batches.
func (m *Machine) sameBatch(f Frame) bool {
	payload, found := m.recall(f.Seq)
	return found && payload == f.Payload
}

// forgotten reports whether a frame is of a range that was given up among the last batches.
func (m *Machine) forgotten(f Frame) bool {
	_, found := m.recall(f.Seq)
	return !found && len(m.recents) > 0 && f.Seq > m.recents[0].Seq && f.Seq <= m.last
}

// contradicted takes a live frame at or below last that is not known, where no replay can tell whose it is. A connection keeps
// order, so behind a new one it is another life's. Where the connection stands, what falls back is another publisher, or
// a life behind a proxy, which goes on.
func (m *Machine) contradicted(now time.Time, f Frame, way event.Way) {
	switch {
	case m.elsewhere() && m.connected:
		m.restart(now, f, way)
		return
	case m.elsewhere(): // it was read of the connection that is lost
		m.duplicate(f)
		return
	}
	if m.strange == 0 && m.flip(now) {
		m.duplicate(f)
		return
	}
	if m.strange == 0 || f.Seq > m.stranger {
		m.strange++
	}
	m.stranger = f.Seq
	if m.standing.unproved || m.strange >= maxStrange {
		m.restart(now, f, way)
		return
	}
	m.suspect(now, disputed)
	m.duplicate(f)
}

// restart begins a new life with the live frame that betrayed it. If a replay could tell more, but is silent, the life is in
// doubt until it does.
func (m *Machine) restart(now time.Time, f Frame, way event.Way) {
	m.do(Action{Kind: NewLife, Reason: fmt.Sprintf("sequence %d after %d", f.Seq, m.last)})
	m.forget()
	m.first(f, way)
	if m.cfg.Replay {
		m.suspect(now, reconnected)
	}
}

// proveNewLife begins the life that a replay has shown. What is held back may be of the old one, and more of it may come.
func (m *Machine) proveNewLife(now time.Time, reason string) {
	if m.flip(now) {
		return
	}
	m.do(Action{Kind: NewLife, Reason: reason})
	m.forget()
	m.behind = true
	m.inquire(now)
}

func (m *Machine) forget() {
	m.life++
	m.known, m.doubt, m.recents = false, noDoubt, m.recents[:0]
	m.standing, m.whole, m.unproven = standing{}, 0, 0
	m.reply.running, m.barren, m.rounds, m.probed, m.begun = false, 0, 0, 0, false
	m.behind, m.isHeard, m.strange = false, false, 0
}
