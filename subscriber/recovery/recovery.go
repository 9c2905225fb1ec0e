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
	// ReplayTimeout is how long a replay may be silent.
	ReplayTimeout time.Duration
	// Attempts is how often in a row a replay may bring nothing new before what is missing is given up.
	Attempts int
	// MaxHeld and MaxHeldBytes bound the live frames held back while a replay runs; beyond them the hole is given up.
	MaxHeld      int
	MaxHeldBytes int
	// Probes are the times of silence after which the engine is asked for what came after the last batch.
	Probes []time.Duration
	// GoneAfter is how long an engine may be disconnected before it counts as gone; StaleAfter how long a restart of ours
	// may stay unconfirmed.
	GoneAfter  time.Duration
	StaleAfter time.Duration
}

// DefaultConfig returns the bounds of an engine with a replay socket.
func DefaultConfig() Config {
	return Config{
		Replay: true, ReplayTimeout: 5 * time.Second, Attempts: 3, MaxHeld: 20_000, MaxHeldBytes: 256 << 20,
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

	link int // the connection that a live frame came on
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
)

// Action is one thing to be done.
type Action struct {
	Kind        ActionKind
	Frame       Frame
	Way         event.Way
	First, Last event.Seq
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

// doubt is why the engine heard now might not be the one known from before.
type doubt uint8

const (
	noDoubt     doubt = iota
	ourRestart        // we were away
	reconnected       // the connection was lost for a while
)

// Machine recovers one source. One goroutine owns it.
type Machine struct {
	cfg     Config
	actions []Action

	state  event.State // of the data; Disconnected and unconfirmed lives are told over it
	reason string

	known    bool // last means something
	last     event.Seq
	recents  []event.Recent
	lastLive time.Time // reception, for probes
	probed   int

	doubt     doubt
	since     time.Time // of the doubt
	connected bool
	link      int       // connections so far
	dropped   time.Time // when the connection was lost

	asked    purpose
	from     event.Seq // of the replay asked for
	deadline time.Time
	replying bool      // its end has not come yet
	progress bool      // the running replay brought something new
	barren   int       // replays in a row that did not
	ahead    event.Seq // the lowest sequence of the running replay beyond the hole
	hasAhead bool
	begun    bool // a replay from the start was asked for behind a batch that is known to exist

	held      []Frame // in order of reception
	heldBytes int
}

// New returns a machine that has heard nothing yet.
func New(cfg Config) *Machine {
	return &Machine{cfg: cfg, state: event.StateRecovering, reason: "not heard yet"}
}

// Start begins the session: with what is known from before, or, prior nil, from nothing.
func (m *Machine) Start(now time.Time, prior *Prior) []Action {
	m.begin()
	m.lastLive, m.dropped, m.since = now, now, now
	if prior != nil && prior.Started {
		m.known, m.last = true, prior.Last
		m.recents = append(m.recents[:0], prior.Recents...)
		m.state, m.reason = prior.State, prior.Reason
		m.doubt = ourRestart
	}
	switch {
	case !m.cfg.Replay:
	case m.known:
		m.ask(now, verifyLife, m.anchor())
	default:
		m.ask(now, fromStart, 0)
	}
	return m.actions
}

// State returns how far the source can be trusted at a moment, and why it is not live.
func (m *Machine) State(now time.Time) (event.State, string) {
	switch {
	case !m.connected && now.Sub(m.dropped) >= m.cfg.GoneAfter:
		return event.StateGone, "disconnected"
	case m.doubt != noDoubt && now.Sub(m.since) >= m.cfg.StaleAfter:
		return event.StateStale, "not confirmed to be the engine known before"
	case m.doubt != noDoubt:
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

// Cleared tells the machine that the engine reset its cache: what was missing is no longer resident.
func (m *Machine) Cleared() {
	if m.state == event.StatePartial {
		m.state, m.reason = event.StateLive, ""
	}
}

// Filled tells the machine that the copies known fill the engine's whole pool: nothing can be missing.
func (m *Machine) Filled() { m.Cleared() }

// Malformed tells the machine that an applied frame could not be decoded: what it changed is unknown.
func (m *Machine) Malformed(reason string) { m.state, m.reason = event.StatePartial, reason }

// Live takes a frame of the live socket.
func (m *Machine) Live(now time.Time, f Frame) []Action {
	m.begin()
	m.lastLive, m.probed = now, 0
	f.link = m.link
	m.held = append(m.held, f)
	m.heldBytes += len(f.Data)
	m.drain(now, event.Live)
	return m.actions
}

// Replayed takes a frame of a replay.
func (m *Machine) Replayed(now time.Time, f Frame) []Action {
	m.begin()
	m.deadline = now.Add(m.cfg.ReplayTimeout)
	switch m.asked {
	case noReplay:
		m.duplicate(f)
	case verifyLife:
		m.verify(now, f)
	default:
		m.replayed(now, f)
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
	m.link++
	switch {
	case m.known:
		// Behind a new connection may be another life than the one known, whose sequence may already have passed ours.
		// Until that is settled, what was held back before belongs to the old one, and a reply under way to nobody.
		if m.doubt == noDoubt {
			m.doubt, m.since = reconnected, now
		}
		if m.cfg.Replay {
			m.ask(now, verifyLife, m.anchor())
		}
	case m.cfg.Replay && m.link > 1:
		m.discardOld() // whose they are can't be told; the replay has them
		m.ask(now, fromStart, 0)
	}
	return m.actions
}

// Disconnected tells that the live socket lost its peer.
func (m *Machine) Disconnected(now time.Time) []Action {
	m.begin()
	if m.connected {
		m.connected, m.dropped = false, now
	}
	return m.actions
}

// Tick lets time pass: replays run out, and a silent engine is asked.
func (m *Machine) Tick(now time.Time) []Action {
	m.begin()
	switch {
	case m.asked != noReplay && now.After(m.deadline):
		m.ended(now, "no answer from the replay endpoint")
	case m.asked == noReplay && m.cfg.Replay && m.connected && m.probed < len(m.cfg.Probes) &&
		now.Sub(m.lastLive) >= m.cfg.Probes[m.probed]:
		m.probed++
		switch {
		case m.known && m.doubt != noDoubt: // nothing that comes is of use before the life is proved
			m.ask(now, verifyLife, m.anchor())
		case m.known:
			m.ask(now, probeSilent, m.last+1)
		default:
			m.ask(now, probeSilent, 0)
		}
	}
	m.drain(now, event.Held)
	return m.actions
}

func (m *Machine) begin() { m.actions = m.actions[:0] }

func (m *Machine) do(a Action) { m.actions = append(m.actions, a) }

func (m *Machine) duplicate(f Frame) { m.do(Action{Kind: Duplicate, Frame: f}) }

// holding reports whether live frames wait for the replay that runs.
func (m *Machine) holding() bool { return m.asked != noReplay && m.asked != probeSilent }

// drain takes held frames in order of reception, until one must wait for a replay. A single frame that need not wait is
// taken by the way given.
func (m *Machine) drain(now time.Time, way event.Way) {
	if len(m.held) > 1 {
		way = event.Held
	}
	for len(m.held) > 0 {
		if m.overfull() {
			m.asked = noReplay
			m.discardOld()
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

// accept takes the next frame in order of reception, when no replay holds it back.
func (m *Machine) accept(now time.Time, f Frame, way event.Way) {
	switch {
	case !m.known && f.Seq > 0 && m.cfg.Replay && !m.begun:
		// Whatever a replay told before, the engine has published since.
		m.begun = true
		m.ask(now, fromStart, 0)
		m.wait(f)
	case !m.known:
		m.first(f, way)
	case f.Seq > m.last && m.doubt != noDoubt && !m.later(f):
		m.restart(now, f, way)
	case f.Seq == m.last+1:
		m.settle()
		m.apply(f, way)
	case f.Seq > m.last:
		m.gap(now, f, way)
	case m.sameBatch(f) || !m.anotherLife(f):
		m.duplicate(f)
	default:
		m.restart(now, f, way)
	}
}

// first takes the first frame known of a life.
func (m *Machine) first(f Frame, way event.Way) {
	m.state, m.reason = Beginning(f.Seq)
	m.apply(f, way)
}

// Beginning returns how complete a life is whose first known batch has a sequence.
func Beginning(first event.Seq) (event.State, string) {
	if first > 0 {
		return event.StatePartial, fmt.Sprintf("first heard at sequence %d", first)
	}
	return event.StateLive, ""
}

func (m *Machine) apply(f Frame, way event.Way) {
	m.known, m.last = true, f.Seq
	if len(m.recents) == event.MaxRecents {
		m.recents = append(m.recents[:0], m.recents[1:]...)
	}
	m.recents = append(m.recents, event.Recent{Seq: f.Seq, Time: f.Time, Payload: f.Payload})
	m.do(Action{Kind: Apply, Frame: f, Way: way})
}

// settle ends a doubt that no replay could: sequence and time are ahead, so it is taken for the same life. That proves
// too little to call the set complete, but for a reconnect to an engine that has no replay.
func (m *Machine) settle() {
	if m.doubt == ourRestart || m.doubt == reconnected && m.cfg.Replay {
		m.state, m.reason = event.StatePartial, "same life by sequence and time only: no replay proved it"
	}
	m.doubt = noDoubt
}

// anchor returns the last sequence whose batch is remembered; behind it there may be a range that was given up.
func (m *Machine) anchor() event.Seq {
	if len(m.recents) == 0 {
		return m.last
	}
	return m.recents[len(m.recents)-1].Seq
}

// later reports whether a frame is later than the last one by the engine's clock; unknown times count as later.
func (m *Machine) later(f Frame) bool {
	if len(m.recents) == 0 || f.Time == 0 {
		return true
	}
	return f.Time > m.recents[len(m.recents)-1].Time
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
// older, and of a range that was given up at the end nothing is known.
func (m *Machine) anotherLife(f Frame) bool {
	if f.Seq > m.anchor() {
		return false
	}
	for _, r := range m.recents {
		if r.Seq == f.Seq {
			return r.Payload != f.Payload && (f.Time >= r.Time || f.Time == 0)
		}
	}
	return m.later(f)
}

// betrays reports whether a frame received since the last reconnect can't be of the life known.
func (m *Machine) betrays(f Frame) bool {
	return f.Seq <= m.last && !m.sameBatch(f) && m.anotherLife(f)
}

func (m *Machine) gap(now time.Time, f Frame, way event.Way) {
	m.settle()
	if !m.cfg.Replay {
		m.lose(m.last+1, f.Seq-1, "no replay endpoint")
		m.apply(f, way)
		return
	}
	m.ask(now, closeGap, m.last+1)
	m.wait(f)
}

func (m *Machine) lose(first, last event.Seq, reason string) {
	m.do(Action{Kind: Lose, First: first, Last: last, Reason: reason})
	m.known, m.last = true, last
	m.state, m.reason = event.StatePartial, fmt.Sprintf("lost %d to %d: %s", first, last, reason)
}

// restart begins a new life with the frame that betrayed it.
func (m *Machine) restart(now time.Time, f Frame, way event.Way) {
	m.do(Action{Kind: NewLife, Reason: fmt.Sprintf("sequence %d after %d", f.Seq, m.last)})
	m.forget()
	if m.cfg.Replay {
		m.begun = true
		m.ask(now, fromStart, 0)
		m.wait(f)
		return
	}
	m.first(f, way)
}

func (m *Machine) forget() {
	m.known, m.doubt, m.recents = false, noDoubt, m.recents[:0]
	m.state, m.reason = event.StateRecovering, "new life"
	m.asked, m.barren, m.probed, m.begun = noReplay, 0, 0, false
}
