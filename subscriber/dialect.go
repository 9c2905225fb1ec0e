package subscriber

import (
	"fmt"
	"slices"
	"strings"

	"kvstrata/event"
)

// Dialect is what an engine speaks.
type Dialect uint8

// The dialects.
const (
	AnyDialect  Dialect = iota // not told: recognised by what comes
	DialectVLLM                // vLLM's ZmqEventPublisher, arrays and maps
	DialectSGLang
	DialectTensorRT // TensorRT-LLM: its ZeroMQ stream, and the JSON of its event buffer
	DialectMooncake // the master of a Mooncake store
	DialectLMCache  // LMCache's stores, as its engine hands them to vLLM's publisher: never evicted
	DialectDynamo   // Dynamo's router events
)

var dialectNames = []string{
	AnyDialect: "auto", DialectVLLM: "vllm", DialectSGLang: "sglang", DialectTensorRT: "tensorrt-llm", DialectMooncake: "mooncake",
	DialectLMCache: "lmcache", DialectDynamo: "dynamo",
}

func (d Dialect) String() string { return dialectNames[d] }

// Told returns the dialect's name as a status has it: unknown before it was recognised.
func (d Dialect) Told() string {
	if d == AnyDialect {
		return "unknown"
	}
	return d.String()
}

// ParseDialect reads a dialect's name.
func ParseDialect(name string) (Dialect, error) {
	if i := slices.Index(dialectNames, name); i >= 0 {
		return Dialect(i), nil
	}
	return AnyDialect, fmt.Errorf("dialect %q: want one of %s", name, strings.Join(dialectNames, ", "))
}

// sight is what a decoder has seen of a stream: what its contract tells, and what its dialect is recognised by.
type sight struct {
	dialect  Dialect  // of a form that only one has
	forms    uint8    // bits by form
	stored   fieldSet // that STORED events told
	always   fieldSet // that all of them told, since seen
	valued   fieldSet // that one of them gave a value
	removed  fieldSet // that EVICTED events told
	cleared  bool     // a CLEARED came
	named    []string // further fields, of dialects that have other ones
	unsigned bool     // a hash that no int64 holds
	signed   bool     // a negative hash
	small    bool     // a hash that both hold
	lengths  uint64   // bits by length of byte hashes; 63 for longer ones
	media    []string // as they were named
	pairs    bool     // token ids came as pairs
	ranked   bool     // batches have a third element
	any      bool     // a STORED was seen
}

// The forms of events.
const (
	arrayForm = 1 << iota
	mapForm
	jsonForm
)

var formNames = []string{"array", "map", "json"}

// recognise names the dialect that everything seen so far speaks for; AnyDialect while nothing does.
func (s *sight) recognise() Dialect {
	switch {
	case s.dialect != AnyDialect:
		return s.dialect
	case !s.any:
		return AnyDialect
	case s.pairs, s.valued.has(cacheSalt), slices.ContainsFunc(s.media, isSGLangMedium):
		return DialectSGLang
	case s.forms&arrayForm != 0 && s.signed && !s.unsigned && s.ranked: // vLLM's signed hashes are older than ranks
		return DialectSGLang
	case s.forms&arrayForm != 0:
		return DialectVLLM
	case !s.always.has(loraName): // which the others write even when it is nil
		return DialectSGLang
	case s.signed && !s.unsigned:
		return DialectTensorRT
	default:
		return DialectVLLM
	}
}

// isSGLangMedium reports whether only SGLang calls a medium so.
func isSGLangMedium(name string) bool {
	return name == "CPU_PINNED" || name == "DISK" || name == "EXTERNAL"
}

// contract returns what was seen, for people and for the status.
func (s *sight) contract() event.Contract {
	var c event.Contract
	for i, name := range formNames {
		if s.forms>>i&1 != 0 {
			c.Forms = append(c.Forms, name)
		}
	}
	for f, name := range fieldNames {
		if s.stored.has(field(f)) {
			c.Fields = append(c.Fields, storedClass.tag+"."+name)
		}
	}
	for f, name := range fieldNames {
		if s.removed.has(field(f)) {
			c.Fields = append(c.Fields, removedClass.tag+"."+name)
		}
	}
	if s.cleared {
		c.Fields = append(c.Fields, clearedClass.tag)
	}
	c.Fields = append(c.Fields, s.named...)
	switch {
	case s.signed && s.unsigned:
		c.Hashes = append(c.Hashes, "int64", "uint64")
	case s.signed:
		c.Hashes = append(c.Hashes, "int64")
	case s.unsigned || s.small:
		c.Hashes = append(c.Hashes, "uint64")
	}
	for n := range 64 {
		switch {
		case s.lengths>>n&1 == 0:
		case n == 63:
			c.Hashes = append(c.Hashes, "bytes63 or longer")
		default:
			c.Hashes = append(c.Hashes, fmt.Sprintf("bytes%d", n))
		}
	}
	c.Media = slices.Clone(s.media)
	return c
}

// number notes a hash that is an integer.
func (s *sight) number(n uint64, negative bool) {
	switch {
	case negative:
		s.signed = true
	case n>>63 != 0:
		s.unsigned = true
	default:
		s.small = true
	}
}

// bytes notes a hash that is bytes.
func (s *sight) bytes(n int) { s.lengths |= 1 << min(n, 63) }

// maxMedia bounds the media that are told.
const maxMedia = 64

// medium notes the name of a medium.
func (s *sight) medium(name string) {
	if !slices.Contains(s.media, name) && len(s.media) < maxMedia {
		s.media = append(s.media, name)
	}
}

// maxNamed bounds the further fields that are told.
const maxNamed = 64

// name notes a field of a dialect whose fields are not vLLM's.
func (s *sight) name(field string) {
	if len(s.named) < maxNamed && !slices.Contains(s.named, field) {
		s.named = append(s.named, field)
	}
}
