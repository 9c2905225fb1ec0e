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
	// MaxHeld and MaxHeldBytes bound the live frames held back while a replay runs. What comes beyond them is dropped, and is a
	// gap then like any other.
	MaxHeld      int
	MaxHeldBytes int
	// Probes are the times of silence after which the engine is asked for what came after the last batch. While its life
	// is not proved, or its replay endpoint is silent, it is asked at these times whether it speaks or not, and again and
	// again at the last.
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
	Time    event.Time // the engine's, read off the payload; 0 = unreadable. Remembered, but nothing is decided by it.
	Payload uint64     // XXH3-64 of Data
	Data    []byte

	asks int // of a live frame: the replays asked for before it was read
	life int // for which it was applied
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

	standing standing
	whole    event.Seq // what is missing lies below
	unproven event.Seq // while the life is not proved: its first batch that is not
	life     int       // lives begun before this one

	known    bool // last means something
	last     event.Seq
	recents  []event.Recent
	recent   event.Seq // the last live frame that was this life's, if isHeard
	isHeard  bool      // over the connection that stands
	lastLive time.Time // reception, for probes
	probed   int

	connected bool
	links     int       // connections so far
	dropped   time.Time // when the connection was lost

	doubt    doubt
	since    time.Time // of the doubt
	tried    time.Time // when the life was last to be proved
	tries    int       // since it came into doubt
	behind   bool      // live frames of the life before this one may still come
	strange  int       // live frames in a row that fit nothing, each with a higher sequence than the one before
	stranger event.Seq

	reply  reply
	asks   int
	open   bool // the end of the last reply has not come yet
	silent bool // the replay endpoint has not answered as often as it may be asked in a row
	barren int  // replies in a row that brought nothing new
	rounds int  // replies for the hole that is open
	begun  bool // a replay from the start was asked for behind a batch that is known to exist

	held      []Frame // in order of reception
	heldBytes int

	shared  bool // two publishers are heard under this name
	flips   int  // fallings back in a row for which no reconnect accounts
	flipped time.Time
	heard   event.Seq // while shared: the last sequence heard
}

// New returns a machine that has heard nothing yet.
func New(cfg Config) *Machine { return &Machine{cfg: cfg} }

// Start begins the session: with what is known from before, or, prior nil, from nothing.
func (m *Machine) Start(now time.Time, prior *Prior) []Action {
	m.begin()
	m.lastLive, m.dropped = now, now
	if prior != nil && prior.Started {
		m.known, m.last = true, prior.Last
		m.recents = append(m.recents[:0], prior.Recents...)
		m.standing, m.whole = standingOf(prior.State, prior.Reason), prior.Last+1
		if m.standing.unproved && len(m.recents) > 0 {
			m.unproven = m.recents[0].Seq + 1 // remember keeps one from before
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
		return event.StateStale, m.standing.missing
	case m.doubt == reconnected && !m.connected && m.known:
		return m.Data() // as it was when the connection broke
	case m.doubt != noDoubt && m.known && now.Sub(m.since) >= m.cfg.StaleAfter:
		return event.StateStale, "not confirmed to be the engine known before"
	case m.doubt != noDoubt && m.known:
		return event.StateRecovering, "waiting for the engine to confirm that it is the same"
	case !m.connected && !m.known:
		return event.StateRecovering, "not connected yet"
	case !m.reply.running && !m.known:
		return event.StateRecovering, "connected, but no event yet"
	case m.holding() && m.known:
		return event.StateRecovering, fmt.Sprintf("replay from %d", m.reply.from)
	default:
		return m.Data()
	}
}

// Data returns how complete what was applied is, whatever is going on: live or partial, or recovering before anything
// was.
func (m *Machine) Data() (event.State, string) {
	if !m.known {
		return event.StateRecovering, "not heard yet"
	}
	return m.standing.tell()
}

// Last returns the highest sequence applied or given up in this life.
func (m *Machine) Last() (event.Seq, bool) { return m.last, m.known }

// Recents returns the last batches of this life, oldest first.
func (m *Machine) Recents() []event.Recent { return m.recents }

// IsConnected reports whether the live socket has a peer.
func (m *Machine) IsConnected() bool { return m.connected }

// Cleared tells the machine that a frame it had applied reset the engine's cache: what was missing is no longer resident. Where no
// replay can ever prove the life, nothing that rests on it is resident either. The machine may be further by then.
func (m *Machine) Cleared(f Frame) {
	m.Filled(f)
	if f.life == m.life && !m.cfg.Replay && f.Seq >= m.unproven {
		m.standing.unproved = false
	}
}

// Filled tells the machine that with a frame it had applied the copies known fill the engine's whole pool: nothing can be
// missing. Whose they are is as unproved as before.
func (m *Machine) Filled(f Frame) {
	if f.life == m.life && f.Seq >= m.whole {
		m.standing.missing = ""
	}
}

// Malformed tells the machine that a frame it had applied could not be decoded: what it changed is unknown.
func (m *Machine) Malformed(f Frame, reason string) {
	if f.life == m.life {
		m.hurt(f.Seq+1, reason)
	}
}

// Live takes a frame of the live socket.
func (m *Machine) Live(now time.Time, f Frame) []Action {
	m.begin()
	m.lastLive, m.probed = now, 0
	if m.shared {
		m.overhear(now, f)
		return m.actions
	}
	m.hold(f)
	m.drain(now, event.Live)
	return m.actions
}

// Replayed takes a frame of a replay.
func (m *Machine) Replayed(now time.Time, f Frame) []Action {
	m.begin()
	if !m.reply.running {
		m.duplicate(f)
		return m.actions
	}
	m.replayed(now, f)
	m.drain(now, event.Held)
	return m.actions
}

// ReplayEnd takes the end marker of a replay.
func (m *Machine) ReplayEnd(now time.Time) []Action {
	m.begin()
	m.open = false
	if m.reply.running {
		m.silent = false
		m.ended(now, "")
	}
	m.drain(now, event.Held)
	return m.actions
}

// Connected tells that the live socket has a peer (again). Behind a new connection may be another life than the one known,
// whose sequence may already have passed ours, and a reply under way is the old one's.
func (m *Machine) Connected(now time.Time) []Action {
	m.begin()
	if m.connected {
		return m.actions
	}
	m.connected, m.isHeard = true, false
	m.links++
	if m.shared {
		return m.actions
	}
	if m.known {
		m.suspect(now, reconnected)
		if m.doubt == reconnected && m.since.Equal(m.dropped) { // from now on it can be confirmed
			m.since = now
		}
	}
	if m.cfg.Replay && (m.known || m.links > 1) {
		m.silent = false
		m.behind = m.behind || !m.known
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
		if m.reply.running { // another life could answer
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
	case m.reply.running && now.After(m.reply.deadline):
		m.ended(now, "no answer from the replay endpoint")
	case m.reply.running || !m.cfg.Replay || !m.connected || len(m.cfg.Probes) == 0:
	case m.unsure() || m.silent:
		if now.Sub(m.tried) >= m.cfg.Probes[min(m.tries, len(m.cfg.Probes)-1)] {
			m.tried, m.tries = now, m.tries+1
			m.ask(now, !m.known)
		}
	case m.probed < len(m.cfg.Probes) && now.Sub(m.lastLive) >= m.cfg.Probes[m.probed]:
		m.probed++
		m.ask(now, !m.known)
	}
	m.drain(now, event.Held)
	return m.actions
}

func (m *Machine) begin() { m.actions = m.actions[:0] }

func (m *Machine) do(a Action) { m.actions = append(m.actions, a) }

func (m *Machine) duplicate(f Frame) { m.do(Action{Kind: Duplicate, Frame: f}) }
