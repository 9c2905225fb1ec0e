package event

import "fmt"

// Kind says what an event tells.
type Kind uint8

// The kinds of events.
const (
	Stored  Kind = 1 + iota // blocks entered a tier: BlockStored
	Evicted                 // blocks left a tier: BlockRemoved
	Loaded                  // a transfer put blocks in place; no engine sends it, our connector does
	Cleared                 // every block of the source left every tier: AllBlocksCleared, or a resync
)

// Way says how a batch reached the stream.
type Way uint8

// The ways of a batch. In sequences, last − first + 1 = Live + Recovered + Held + Asked + Lost.
const (
	Live      Way = 1 + iota // from the live socket, in order
	Recovered                // from a replay that closed a gap, or that told the start of a life
	Held                     // from the live socket, held back until a replay had answered
	Asked                    // from a replay asked for because the engine was silent
	Lost                     // never came, or could not be decoded
	Dropped                  // its publisher had no room for it
)

// ClearCause says why a resident set was cleared.
type ClearCause uint8

// The causes of a CLEARED.
const (
	ByEngine ClearCause = 1 + iota // the engine reset its prefix cache
	ByResync                       // a hole could not be filled: what is resident is no longer known
)

// SpecKind is the kind of attention that a KV cache group serves (vLLM's kv_cache_spec_kind).
type SpecKind uint8

// The kinds of attention. Only full, MLA and sink groups hold whole prefixes.
const (
	SpecUnknown SpecKind = iota // not told: engines without groups, taken as full attention
	SpecFull
	SpecMLA
	SpecSlidingWindow
	SpecSlidingWindowMLA
	SpecMamba
	SpecChunkedLocal
	SpecSinkFull
	SpecEncoderOnly
	SpecCrossAttention
	SpecOther // told, but not one of these
)

// HoldsPrefix reports whether a group of this kind keeps every block of a prefix, so that its blocks can be matched.
func (k SpecKind) HoldsPrefix() bool {
	switch k {
	case SpecUnknown, SpecFull, SpecMLA, SpecSinkFull:
		return true
	default:
		return false
	}
}

// Locality is where blocks are, relative to the publisher (vLLM's locality).
type Locality uint8

// The localities.
const (
	LocalityUnknown Locality = iota // not told: local
	Local
	Remote
	LocalityOther // told, but neither of these: counted as remote
)

// Here reports whether blocks of this locality are the publisher's own.
func (l Locality) Here() bool { return l == LocalityUnknown || l == Local }

var (
	kindNames     = []string{Stored: "STORED", Evicted: "EVICTED", Loaded: "LOADED", Cleared: "CLEARED"}
	wayNames      = []string{Live: "live", Recovered: "recovered", Held: "held", Asked: "asked", Lost: "lost", Dropped: "dropped"}
	causeNames    = []string{ByEngine: "engine", ByResync: "resync"}
	localityNames = []string{LocalityUnknown: "", Local: "LOCAL", Remote: "REMOTE", LocalityOther: "OTHER"}
	specNames     = []string{
		SpecUnknown: "", SpecFull: "full_attention", SpecMLA: "mla_attention", SpecSlidingWindow: "sliding_window",
		SpecSlidingWindowMLA: "sliding_window_mla", SpecMamba: "mamba", SpecChunkedLocal: "chunked_local_attention",
		SpecSinkFull: "sink_full_attention", SpecEncoderOnly: "encoder_only_attention",
		SpecCrossAttention: "cross_attention", SpecOther: "other",
	}
)

// enumString names v by names, or tells its type and number when it has none.
func enumString[E ~uint8](names []string, typ string, v E) string {
	if int(v) < len(names) && (v == 0 || names[v] != "") {
		return names[v]
	}
	return fmt.Sprintf("%s(%d)", typ, v)
}

// parseEnum finds the value that text names.
func parseEnum[E ~uint8](names []string, typ, text string) (E, error) {
	for i, name := range names {
		if name == text && (i > 0 || text == "") {
			return E(i), nil
		}
	}
	return 0, fmt.Errorf("%s %q: unknown", typ, text)
}

func (k Kind) String() string       { return enumString(kindNames, "Kind", k) }
func (w Way) String() string        { return enumString(wayNames, "Way", w) }
func (c ClearCause) String() string { return enumString(causeNames, "ClearCause", c) }
func (k SpecKind) String() string   { return enumString(specNames, "SpecKind", k) }
func (l Locality) String() string   { return enumString(localityNames, "Locality", l) }

// MarshalText writes the kind's name.
func (k Kind) MarshalText() ([]byte, error) { return []byte(k.String()), nil }

// UnmarshalText reads a kind's name.
func (k *Kind) UnmarshalText(text []byte) (err error) {
	*k, err = parseEnum[Kind](kindNames, "event kind", string(text))
	return err
}

// MarshalText writes the way's name.
func (w Way) MarshalText() ([]byte, error) { return []byte(w.String()), nil }

// UnmarshalText reads a way's name.
func (w *Way) UnmarshalText(text []byte) (err error) {
	*w, err = parseEnum[Way](wayNames, "way", string(text))
	return err
}

// MarshalText writes the cause's name.
func (c ClearCause) MarshalText() ([]byte, error) { return []byte(c.String()), nil }

// UnmarshalText reads a cause's name.
func (c *ClearCause) UnmarshalText(text []byte) (err error) {
	*c, err = parseEnum[ClearCause](causeNames, "clear cause", string(text))
	return err
}

// MarshalText writes the kind's upstream name.
func (k SpecKind) MarshalText() ([]byte, error) { return []byte(k.String()), nil }

// UnmarshalText reads an upstream name; one that is not known gives SpecOther.
func (k *SpecKind) UnmarshalText(text []byte) error {
	v, err := parseEnum[SpecKind](specNames, "spec kind", string(text))
	if err != nil {
		v = SpecOther
	}
	*k = v
	return nil
}

// MarshalText writes the locality's upstream name.
func (l Locality) MarshalText() ([]byte, error) { return []byte(l.String()), nil }

// UnmarshalText reads an upstream name; one that is not known gives LocalityOther.
func (l *Locality) UnmarshalText(text []byte) error {
	v, err := parseEnum[Locality](localityNames, "locality", string(text))
	if err != nil {
		v = LocalityOther
	}
	*l = v
	return nil
}
