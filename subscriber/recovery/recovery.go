// Package recovery turns what an engine's sockets deliver into one ordered story: it checks sequences, asks for replays,
// holds live frames back while a replay runs, tells a restart from a late message, and gives up ranges that can't be
// had. The machine is pure: no clock, no I/O. Time and input come as arguments; what is to be done comes out as
// [Action] values, in order. testdata/scenarios/*.txt are its scenarios.
package recovery

import (
	"fmt"
	"time"

	"kvstrata/event"
)

// Config bounds the machine.
type Config struct {
	// Replay says whether the engine can be asked for past batches.
	Replay bool
	// First is the sequence that a life begins with: 0, but 1 for Mooncake.
	First event.Seq
	// ReplayTimeout is how long a replay may be silent.
	ReplayTimeout time.Duration
	// Attempts is how often in a row a replay may bring nothing new before what is missing is given up, and Rounds how
	// often in all one hole is asked for: behind one that never closes may be another publisher.
	Attempts int
	Rounds   int
	// MaxHeld and MaxHeldBytes bound the live frames held back while a replay runs; beyond them the hole is given up.
	MaxHeld      int
	MaxHeldBytes int
	// Probes are the times of silence after which the engine is asked for what came after the last batch. While its life
	// is not proved it is asked at these times whether it speaks or not, and again and again at the last.
	Probes []time.Duration
	// GoneAfter is how long an engine may be disconnected before it counts as gone; StaleAfter how long a life may stay
	// unconfirmed.
	GoneAfter  time.Duration
	StaleAfter time.Duration
}

// DefaultConfig returns the bounds of an engine with a replay socket.
func DefaultConfig() Config {
	return Config{
		Replay: true, ReplayTimeout: 5 * time.Second, Attempts: 3, Rounds: 256, MaxHeld: 20_000, MaxHeldBytes: 256 << 20,
		Probes:    []time.Duration{time.Second, 5 * time.Second, 30 * time.Second},
		GoneAfter: time.Minute, StaleAfter: time.Minute,
	}
}

// Frame is one batch as it came, undecoded.
type Frame struct {
	Seq     event.Seq
	Time    event.Time // the engine's, read off the payload; 0 = unreadable
	Payload uint64     // XXH3-64 of Data
	Data    []byte

	came moment // of a live frame
}

// moment tells what came before a live frame.
type moment struct {
	links    int // connections
	asks     int // replays asked for
	proofs   int // replays that showed the life known to be the engine's
	silences int // replays that were to show it, and did not in time
}

// ActionKind says what is to be done.
type ActionKind uint8

// The actions.
const (
	Apply     ActionKind = 1 + iota // decode, judge and publish Frame, which came by Way
	Lose                            // tell the range First…Last as lost, for Reason
	NewLife                         // begin a new epoch: forget everything known of the source
	Ask                             // send a replay request from First, on a fresh socket if Reopen
	Duplicate                       // count a reception of no use
	Tell                            // tell State and Reason before what follows, which rests on it
)

// Action is one thing to be done.
type Action struct {
	Kind        ActionKind
	Frame       Frame
	Way         event.Way
	First, Last event.Seq
	State       event.State
	Reason      string
	Reopen      bool
}

// Prior is what a checkpoint and the stream's tail say of the source before this run of ours.
type Prior struct {
	Started bool // a batch of this life is known
	Last    event.Seq
	Recents []event.Recent
	State   event.State // as last told
	Reason  string
}

// Machine recovers one source. One goroutine owns it.
type Machine struct {
	cfg     Config
	actions []Action
	moment  moment

	state  event.State // of the data; Disconnected and unconfirmed lives are told over it
	reason string
	whole  event.Seq // of a partial source: what is missing or unproved lies below

	known    bool // last means something
	last     event.Seq
	recents  []event.Recent
	lastLive time.Time // reception, for probes
	probed   int

	doubt     doubt
	since     time.Time // of the doubt
	tried     time.Time // when the life was last to be proved
	tries     int       // since it came into doubt
	behind    bool      // live frames of the life before this one may still come
	began     event.Time
	strange   int // live frames in a row that fit nothing, each with a higher sequence than the one before
	stranger  event.Seq
	connected bool
	heardOn   int       // the connection on which the last live frame was applied
	dropped   time.Time // when the connection was lost

	asked    purpose
	from     event.Seq // of the replay asked for
	deadline time.Time
	replying bool      // its end has not come yet
	empty    bool      // the running replay brought nothing yet
	progress bool      // it brought something new
	barren   int       // replays in a row that did not
	rounds   int       // replays for the hole that is open
	ahead    event.Seq // the lowest sequence of the running replay beyond the hole
	hasAhead bool
	begun    bool // a replay from the start was asked for behind a batch that is known to exist

	held      []Frame // in order of reception
	heldBytes int

	shared  bool // two publishers are heard under this name
	flips   int  // fallings back in a row for which no reconnect accounts
	flipped time.Time
	refuted int       // the proof that a flip was counted for
	heard   event.Seq // while shared: the last sequence heard
}

// New returns a machine that has heard nothing yet.
func New(cfg Config) *Machine {
	return &Machine{cfg: cfg, state: event.StateRecovering, reason: "not heard yet"}
}

// Start begins the session: with what is known from before, or, prior nil, from nothing.
func (m *Machine) Start(now time.Time, prior *Prior) []Action {
	m.begin()
	m.lastLive, m.dropped = now, now
	if prior != nil && prior.Started {
		m.known, m.last = true, prior.Last
		m.recents = append(m.recents[:0], prior.Recents...)
		m.state, m.reason, m.whole = prior.State, prior.Reason, prior.Last+1
		if m.pending() && len(m.recents) > 0 {
			m.whole = m.recents[0].Seq + 1 // remember keeps one from before
		}
		m.suspect(now, ourRestart)
	}
	if m.cfg.Replay {
		m.inquire(now)
	}
	return m.actions
}

// State returns how far the source can be trusted at a moment, and why it is not live.
func (m *Machine) State(now time.Time) (event.State, string) {
	switch {
	case !m.connected && now.Sub(m.dropped) >= m.cfg.GoneAfter:
		return event.StateGone, "disconnected"
	case m.shared:
		return event.StateStale, m.reason
	case m.doubt == reconnected && !m.connected && m.known:
		return m.state, m.reason // as it was when the connection broke
	case m.doubt != noDoubt && m.known && now.Sub(m.since) >= m.cfg.StaleAfter:
		return event.StateStale, "not confirmed to be the engine known before"
	case m.doubt != noDoubt && m.known:
		return event.StateRecovering, "waiting for the engine to confirm that it is the same"
	case !m.connected && !m.known:
		return event.StateRecovering, "not connected yet"
	case m.asked == noReplay && !m.known:
		return event.StateRecovering, "connected, but no event yet"
	case m.asked == closeGap || m.asked == fromStart && m.known:
		return event.StateRecovering, fmt.Sprintf("replay from %d", m.from)
	default:
		return m.state, m.reason
	}
}

// Data returns how complete what was applied is, whatever is going on: live or partial, or recovering before anything
// was.
func (m *Machine) Data() (event.State, string) { return m.state, m.reason }

// Last returns the highest sequence applied or given up in this life.
func (m *Machine) Last() (event.Seq, bool) { return m.last, m.known }

// Recents returns the last batches of this life, oldest first.
func (m *Machine) Recents() []event.Recent { return m.recents }

// IsConnected reports whether the live socket has a peer.
func (m *Machine) IsConnected() bool { return m.connected }

// Cleared tells the machine that batch seq reset the engine's cache: what was missing is no longer resident.
func (m *Machine) Cleared(seq event.Seq) {
	if m.state == event.StatePartial && seq >= m.whole {
		m.state, m.reason = event.StateLive, ""
	}
}

// Filled tells the machine that with batch seq the copies known fill the engine's whole pool: nothing can be missing.
func (m *Machine) Filled(seq event.Seq) { m.Cleared(seq) }

// Malformed tells the machine that batch seq could not be decoded: what it changed is unknown.
func (m *Machine) Malformed(seq event.Seq, reason string) { m.hurt(seq+1, reason) }

// Live takes a frame of the live socket.
func (m *Machine) Live(now time.Time, f Frame) []Action {
	m.begin()
	m.lastLive, m.probed = now, 0
	if m.shared {
		m.overhear(now, f)
		return m.actions
	}
	if m.behind && m.sameBatch(f) { // this life is heard: what came before it is of another
		m.behind = false
		m.discardFirst(len(m.held))
	}
	f.came = m.moment
	m.held = append(m.held, f)
	m.heldBytes += len(f.Data)
	m.drain(now, event.Live)
	return m.actions
}

// Replayed takes a frame of a replay.
func (m *Machine) Replayed(now time.Time, f Frame) []Action {
	m.begin()
	asked, last, known := m.asked, m.last, m.known
	m.empty = false
	switch m.asked {
	case noReplay:
		m.duplicate(f)
	case verifyLife, proveLate:
		m.verify(now, f)
	default:
		m.replayed(now, f)
	}
	if m.asked != asked || m.last != last || m.known != known { // a reply of nothing new must not go on for ever
		m.deadline = now.Add(m.cfg.ReplayTimeout)
	}
	m.drain(now, event.Held)
	return m.actions
}

// ReplayEnd takes the end marker of a replay.
func (m *Machine) ReplayEnd(now time.Time) []Action {
	m.begin()
	m.replying = false
	m.ended(now, "")
	m.drain(now, event.Held)
	return m.actions
}

// Connected tells that the live socket has a peer (again).
func (m *Machine) Connected(now time.Time) []Action {
	m.begin()
	if m.connected {
		return m.actions
	}
	m.connected = true
	m.moment.links++
	switch {
	case m.shared:
	case m.known || !m.cfg.Replay && m.moment.links > 1:
		// Behind a new connection may be another life than the one known, whose sequence may already have passed ours.
		// Until that is settled, what was held back before belongs to the old one, and a reply under way to nobody.
		m.suspect(now, reconnected)
		if m.doubt == reconnected && m.since.Equal(m.dropped) { // from now on it can be confirmed
			m.since = now
		}
		if m.cfg.Replay {
			m.inquire(now)
		}
	case m.cfg.Replay && m.moment.links > 1:
		m.discardOld() // whose they are can't be told; the replay has them
		m.behind = true
		m.inquire(now)
	}
	return m.actions
}

// Disconnected tells that the live socket lost its peer.
func (m *Machine) Disconnected(now time.Time) []Action {
	m.begin()
	if !m.connected {
		return m.actions
	}
	m.connected, m.dropped = false, now
	if m.known && !m.shared {
		m.suspect(now, reconnected)
		if m.asked != noReplay { // another life could answer
			m.inquire(now)
		}
	}
	return m.actions
}

// Tick lets time pass: replays run out, an engine that is silent or unproved is asked, and two publishers may have become
// one again.
func (m *Machine) Tick(now time.Time) []Action {
	m.begin()
	switch {
	case m.shared:
		m.part(now)
	case m.asked != noReplay && now.After(m.deadline):
		m.ended(now, "no answer from the replay endpoint")
	case m.asked != noReplay || !m.cfg.Replay || !m.connected:
	case m.unsure():
		if now.Sub(m.tried) >= m.cfg.Probes[min(m.tries, len(m.cfg.Probes)-1)] {
			m.tried, m.tries = now, m.tries+1
			m.ask(now, proveLate, m.anchor())
		}
	case m.probed < len(m.cfg.Probes) && now.Sub(m.lastLive) >= m.cfg.Probes[m.probed]:
		m.probed++
		m.ask(now, probeSilent, m.resume())
	}
	m.drain(now, event.Held)
	return m.actions
}

func (m *Machine) begin() { m.actions = m.actions[:0] }

func (m *Machine) do(a Action) { m.actions = append(m.actions, a) }

func (m *Machine) duplicate(f Frame) { m.do(Action{Kind: Duplicate, Frame: f}) }

// accept takes the next frame in order of reception, when no replay holds it back.
func (m *Machine) accept(now time.Time, f Frame, way event.Way) {
	switch {
	case !m.known && f.Seq > m.cfg.First && m.cfg.Replay && !m.begun:
		// Whatever a replay told before, the engine has published since.
		m.begun = true
		m.inquire(now)
		m.wait(f)
	case !m.known:
		m.first(f, way)
		if m.behind && f.Seq > m.cfg.First { // what comes next may be of another life
			m.suspect(now, reconnected)
		}
	case f.Seq > m.last && m.cfg.Replay && (f.Seq > m.last+1 || m.predates(f)):
		m.inquire(now)
		m.wait(f)
	case f.Seq > m.last+1:
		m.lose(m.last+1, f.Seq-1, "no replay endpoint")
		m.accept(now, f, way)
	case f.Seq == m.last+1:
		m.settle(f.Seq)
		m.behind, m.strange = false, 0
		m.apply(f, way)
	case m.sameBatch(f) || m.predates(f):
		m.duplicate(f)
	case m.cfg.Replay:
		m.dispute(now, f, way)
	case m.anotherLife(f):
		m.restart(now, f, way)
	default:
		m.contradicted(now, f, way)
	}
}

// first takes the first frame known of a life.
func (m *Machine) first(f Frame, way event.Way) {
	m.state, m.reason = Beginning(f.Seq, m.cfg.First)
	m.whole, m.began = f.Seq, f.Time
	m.apply(f, way)
}

// Beginning returns how complete a life is whose first known batch has a sequence; it begins with another.
func Beginning(known, first event.Seq) (event.State, string) {
	if known > first {
		return event.StatePartial, fmt.Sprintf("first heard at sequence %d", known)
	}
	return event.StateLive, ""
}

func (m *Machine) apply(f Frame, way event.Way) {
	m.known, m.last = true, f.Seq
	if f.came.links > 0 {
		m.heardOn = m.moment.links
	}
	m.recents = remember(m.recents, event.Recent{Seq: f.Seq, Time: f.Time, Payload: f.Payload}, m.pending(), m.whole)
	m.do(Action{Kind: Apply, Frame: f, Way: way})
}

// hurt makes the source partial: something below a sequence is missing, or not proved.
func (m *Machine) hurt(whole event.Seq, reason string) {
	m.state, m.reason, m.whole = event.StatePartial, reason, max(m.whole, whole)
}

// lose gives a range up, and with it everything that was known to be resident.
func (m *Machine) lose(first, last event.Seq, reason string) {
	m.do(Action{Kind: Lose, First: first, Last: last, Reason: reason})
	m.known, m.last = true, last
	m.hurt(last+1, Hole(first, last, reason))
}

// Hole returns the reason of a source that lost a range.
func Hole(first, last event.Seq, reason string) string {
	return fmt.Sprintf("lost %d to %d: %s", first, last, reason)
}
