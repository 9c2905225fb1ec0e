package recovery

import (
	"fmt"
	"time"
)

// maxFlips is how often in a row, each within StaleAfter of the one before, another life may show itself while the
// connection stands. An engine that restarts breaks its connection; two that publish under one name do not.
const maxFlips = 3

// flip counts such a falling back, and reports whether it is one too many: two publishers seem to share the name. From
// then on nothing is applied, since what is whose can't be told.
func (m *Machine) flip(now time.Time) bool {
	if m.elsewhere() {
		return false
	}
	if now.Sub(m.flipped) > m.cfg.StaleAfter {
		m.flips = 0
	}
	m.flips++
	m.flipped = now
	if m.flips < maxFlips {
		return false
	}
	m.shared, m.heard = true, m.last
	m.reply.running, m.doubt = false, noDoubt
	for _, h := range m.held {
		m.duplicate(h)
	}
	m.held, m.heldBytes = nil, 0
	m.hurt(m.last+1, fmt.Sprintf("two publishers seem to share this name: %d times sequences fell back and nobody had reconnected; nothing is taken until one is silent", m.flips))
	state, reason := m.standing.tell()
	m.do(Action{Kind: Tell, State: state, Reason: reason})
	return true
}

// overhear takes a live frame while two publishers are heard: of no use, but where its sequence falls back, both still
// speak.
func (m *Machine) overhear(now time.Time, f Frame) {
	m.duplicate(f)
	if f.Seq <= m.heard {
		m.flipped = now
	}
	m.heard = f.Seq
}

// part begins a new life once sequences have not fallen back for a while: one publisher is left. If not, the next falling
// back tells.
func (m *Machine) part(now time.Time) {
	if now.Sub(m.flipped) < m.cfg.StaleAfter {
		return
	}
	m.shared, m.flips, m.flipped = false, maxFlips-1, now
	m.do(Action{Kind: NewLife, Reason: "one publisher is left of two"})
	m.forget()
	if m.cfg.Replay {
		m.behind = true
		m.inquire(now)
	}
}
