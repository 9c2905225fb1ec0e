package prefix

import (
	"cmp"
	"errors"
	"fmt"
	"math/bits"
	"strconv"
	"strings"

	"kvstrata/event"
)

// Shard is one of the equal parts into which the range of prefix hashes is cut. The zero value is the whole range.
type Shard struct {
	Index uint32 // from 0
	Of    uint32 // parts; 0 = the range is not cut
}

// MaxShards bounds how many parts there are: each is asked at every lookup.
const MaxShards = 1024

// ParseShard reads what String writes: the part and how many there are, as 2/8. The first is 1/8. The
// empty text and 1/1 are the whole range.
func ParseShard(text string) (Shard, error) {
	if text == "" {
		return Shard{}, nil
	}
	part, of, ok := strings.Cut(text, "/")
	i, err1 := strconv.ParseUint(part, 10, 32)
	n, err2 := strconv.ParseUint(of, 10, 32)
	if !ok || errors.Join(err1, err2) != nil || i == 0 || n == 0 {
		return Shard{}, fmt.Errorf("shard %q: want part/parts, as 1/8 for the first of eight", text)
	}
	s := Shard{Index: uint32(i - 1), Of: uint32(n)}
	if err := s.Validate(); err != nil {
		return Shard{}, err
	}
	if s.Of == 1 {
		s = Shard{}
	}
	return s, nil
}

// Validate reports whether there is such a part.
func (s Shard) Validate() error {
	switch {
	case s == Shard{}:
		return nil
	case s.Of == 0 || s.Of > MaxShards:
		return fmt.Errorf("shard %v: want 1 to %d parts", s, MaxShards)
	case s.Index >= s.Of:
		return fmt.Errorf("shard %v: want a part from 1 to %d", s, s.Of)
	}
	return nil
}

// String returns the part and how many there are, counted from 1; the whole range is 1/1.
func (s Shard) String() string {
	return fmt.Sprintf("%d/%d", uint64(s.Index)+1, cmp.Or(s.Of, 1))
}

// MarshalText writes what String returns.
func (s Shard) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// UnmarshalText reads it.
func (s *Shard) UnmarshalText(text []byte) (err error) {
	*s, err = ParseShard(string(text))
	return err
}

// Whole reports whether the part is the whole range.
func (s Shard) Whole() bool { return s.Of <= 1 }

// PartOf returns the part, from 0, that a hash falls into when the range is cut into so many. Prefix hashes are spread evenly,
// and so are their high bits.
func PartOf(p event.PrefixHash, parts uint32) uint32 {
	high, _ := bits.Mul64(uint64(p), uint64(parts))
	return uint32(high)
}

// Holds reports whether a hash falls into the part.
func (s Shard) Holds(p event.PrefixHash) bool { return s.Whole() || PartOf(p, s.Of) == s.Index }
