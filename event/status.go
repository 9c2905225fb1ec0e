package event

// State is how far a source's known resident set can be trusted.
type State uint8

// The states.
const (
	StateLive       State = 1 + iota // complete and current
	StateRecovering                  // a gap, or a restart of ours, is being resolved: answers are the last judged ones
	StatePartial                     // complete from a sequence on: answers may be too short, never too long
	StateStale                       // may be too long: left out of lookups
	StateGone                        // disconnected, or withdrawn: left out of lookups
)

var stateNames = []string{
	StateLive: "live", StateRecovering: "recovering", StatePartial: "partial", StateStale: "stale", StateGone: "gone",
}

func (s State) String() string { return enumString(stateNames, "State", s) }

// MarshalText writes the state's name.
func (s State) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// UnmarshalText reads a state's name.
func (s *State) UnmarshalText(text []byte) (err error) {
	*s, err = parseEnum[State](stateNames, "state", string(text))
	return err
}

// Answers reports whether lookups count a source in this state.
func (s State) Answers() bool { return s == StateLive || s == StateRecovering || s == StatePartial }

// Status is what a source's publisher says of it, in the same stream as its batches and in order with them.
type Status struct {
	Source Source
	Epoch  Epoch
	Fence  Fence
	Seq    Seq // the last sequence published before this message; meaningless unless Ledger.Started
	State  State
	Reason string // why, when not live
	Time   Time   // by the publisher's clock
	Digest Digest // of the resident set after Seq
	Ledger Ledger

	Dialect   string      // what the engine speaks
	Endpoint  string      // where it was heard
	Copies    CopyMode    // whether copies are counted
	PoolSize  uint64      // physical blocks of the pool, 0 = unknown
	Stores    []string    // instances of the shared stores that the source reads from
	Counters  []Counter   // oddities of the stream, by name
	Groups    []GroupInfo // what each cache group was seen to be
	Withdrawn bool        // the source was taken out of service on purpose
	Contract  Contract    // what the stream was seen to be
	PastLives []PastLife  // the newest MaxPastLives that ended, newest last

	// How the engine names its blocks, where that is known: with these a prompt finds blocks that were told without
	// tokens. A scheme of event/enginehash, and a seed as its ParseRecipe reads it.
	HashScheme string
	HashSeed   string
}

// Contract is what a source's stream was seen to be; what breaks it is among the status's counters. It holds no value of any
// event.
type Contract struct {
	Forms  []string     `json:"forms,omitempty"`  // how events are encoded: "array", "map", "json"
	Fields []string     `json:"fields,omitempty"` // what they tell, as "BlockStored.block_hashes"
	Hashes []string     `json:"hashes,omitempty"` // what block hashes are: "uint64", "int64", "bytes32"
	Media  []string     `json:"media,omitempty"`  // where blocks were said to be, in the source's own words
	Check  HashContract `json:"check,omitzero"`
}

// CopyMode says how a source's copies are counted.
type CopyMode uint8

// The modes.
const (
	CopiesCounted CopyMode = 1 + iota // each STORED is a further copy
	CopiesUnknown                     // re-reports and second copies look alike ("full" report mode): a set
)

var copyModeNames = []string{CopiesCounted: "counted", CopiesUnknown: "unknown"}

func (m CopyMode) String() string { return enumString(copyModeNames, "CopyMode", m) }

// MarshalText writes the mode's name.
func (m CopyMode) MarshalText() ([]byte, error) { return []byte(m.String()), nil }

// Counter is one named count.
type Counter struct {
	Name  string `json:"name"`
	Count uint64 `json:"count"`
	// Example describes the first one seen; it holds no token, salt or session.
	Example string `json:"example,omitempty"`
}

// GroupInfo is what a cache group was last seen to be.
type GroupInfo struct {
	Group     Group    `json:"group"`
	BlockSize uint32   `json:"block_size"`
	Spec      SpecKind `json:"spec_kind,omitempty"`
	Window    uint32   `json:"sliding_window,omitempty"`
	Eagle     bool     `json:"eagle,omitempty"`
}
