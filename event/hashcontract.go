package event

// HashVerdict says whether a source's block hashes can be computed from tokens.
type HashVerdict uint8

// The verdicts.
const (
	HashesUnknown  HashVerdict = 1 + iota // nothing was told yet that could be compared
	HashesVerified                        // every block compared has the hash that was computed
	HashesDiffer                          // some have not, or no known scheme explains any
)

var hashVerdictNames = []string{HashesUnknown: "unknown", HashesVerified: "verified", HashesDiffer: "differs"}

func (v HashVerdict) String() string { return enumString(hashVerdictNames, "HashVerdict", v) }

// MarshalText writes the verdict's name.
func (v HashVerdict) MarshalText() ([]byte, error) { return []byte(v.String()), nil }

// UnmarshalText reads a verdict's name.
func (v *HashVerdict) UnmarshalText(text []byte) (err error) {
	*v, err = parseEnum[HashVerdict](hashVerdictNames, "hash verdict", string(text))
	return err
}

// HashContract is what is known of how a source names its blocks. It holds no token, salt or configured seed.
type HashContract struct {
	Verdict  HashVerdict `json:"verdict"`
	Scheme   string      `json:"scheme,omitempty"`     // as event/enginehash names it; empty while unknown
	Seed     string      `json:"seed,omitempty"`       // which one: default, 0, "random", configured, or unknown
	Keys     string      `json:"extra_keys,omitempty"` // how they enter the hash: plain or tagged; empty while none were compared
	Verified uint64      `json:"verified"`             // blocks whose hash is the computed one
	Differ   uint64      `json:"differ"`               // blocks whose hash is not
	Skipped  uint64      `json:"skipped"`              // blocks that were not compared: see Reason, or beyond the budget
	Reason   string      `json:"reason,omitempty"`     // what differs, or why blocks were skipped that no budget would allow
}
