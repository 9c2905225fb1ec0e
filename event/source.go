package event

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
)

// Origin says who tells a source's story.
type Origin uint8

// The origins.
const (
	Engine    Origin = 1 + iota // an inference engine's own event stream
	Connector                   // our connector, about blocks that no engine reports
	Store                       // the elected watcher of a shared store
)

var originNames = []string{Engine: "engine", Connector: "connector", Store: "store"}

func (o Origin) String() string { return enumString(originNames, "Origin", o) }

// MarshalText writes the origin's name.
func (o Origin) MarshalText() ([]byte, error) { return []byte(o.String()), nil }

// UnmarshalText reads an origin's name.
func (o *Origin) UnmarshalText(text []byte) (err error) {
	*o, err = parseEnum[Origin](originNames, "origin", string(text))
	return err
}

// Source is who publishes: one data-parallel rank of one engine, one connector, or one shared store.
type Source struct {
	Cluster  string `json:"cluster"`
	Model    string `json:"model"`
	Instance string `json:"instance"`
	Rank     uint32 `json:"dp_rank"`
	Origin   Origin `json:"origin"`
}

// Tokens returns the source as five dot-separated tokens, as they stand in a subject and in object names:
// cluster.model.instance.rank.origin. Bytes outside A–Z, a–z, 0–9, '_' and '-' are written %XX; an empty name is '%'.
func (s Source) Tokens() string {
	var b strings.Builder
	b.Grow(len(s.Cluster) + len(s.Model) + len(s.Instance) + 24)
	for _, name := range []string{s.Cluster, s.Model, s.Instance} {
		writeToken(&b, name)
		b.WriteByte('.')
	}
	b.WriteString(strconv.FormatUint(uint64(s.Rank), 10))
	b.WriteByte('.')
	b.WriteString(s.Origin.String())
	return b.String()
}

// String returns the source for people: model@instance, with cluster, rank and origin where they are not the usual.
func (s Source) String() string {
	text := s.Model + "@" + s.Instance
	if s.Cluster != "" && s.Cluster != DefaultCluster {
		text = s.Cluster + "/" + text
	}
	if s.Rank != 0 {
		text += "#" + strconv.FormatUint(uint64(s.Rank), 10)
	}
	if s.Origin != Engine {
		text += " (" + s.Origin.String() + ")"
	}
	return text
}

// DefaultCluster is the cluster of a source whose configuration names none.
const DefaultCluster = "default"

// ParseSource reads what [Source.Tokens] wrote.
func ParseSource(tokens string) (Source, error) {
	parts := strings.Split(tokens, ".")
	if len(parts) != 5 {
		return Source{}, fmt.Errorf("source %q: want cluster.model.instance.rank.origin", tokens)
	}
	var s Source
	for i, name := range []*string{&s.Cluster, &s.Model, &s.Instance} {
		text, err := parseToken(parts[i])
		if err != nil {
			return Source{}, fmt.Errorf("source %q: %w", tokens, err)
		}
		*name = text
	}
	rank, err := strconv.ParseUint(parts[3], 10, 32)
	if err != nil || strconv.FormatUint(rank, 10) != parts[3] { // one source has one spelling

		return Source{}, fmt.Errorf("source %q: rank %q: want a number", tokens, parts[3])
	}
	s.Rank = uint32(rank)
	if err := s.Origin.UnmarshalText([]byte(parts[4])); err != nil {
		return Source{}, fmt.Errorf("source %q: %w", tokens, err)
	}
	return s, nil
}

const hexDigits = "0123456789ABCDEF"

func writeToken(b *strings.Builder, name string) {
	if name == "" {
		b.WriteByte('%')
	}
	for i := range len(name) {
		c := name[i]
		if c >= 'A' && c <= 'Z' || c >= 'a' && c <= 'z' || c >= '0' && c <= '9' || c == '_' || c == '-' {
			b.WriteByte(c)
		} else {
			b.WriteByte('%')
			b.WriteByte(hexDigits[c>>4])
			b.WriteByte(hexDigits[c&15])
		}
	}
}

var errToken = errors.New("not an encoded name")

func parseToken(token string) (string, error) {
	if token == "%" {
		return "", nil
	}
	var b strings.Builder
	for i := 0; i < len(token); i++ {
		if token[i] != '%' {
			b.WriteByte(token[i])
			continue
		}
		if i+2 >= len(token) {
			return "", errToken
		}
		c, err := strconv.ParseUint(token[i+1:i+3], 16, 8)
		if err != nil {
			return "", errToken
		}
		b.WriteByte(byte(c))
		i += 2
	}
	// Only what writeToken gives is a token, so that one name has one token.
	var again strings.Builder
	writeToken(&again, b.String())
	if again.String() != token {
		return "", errToken
	}
	return b.String(), nil
}
