package subscriber

import (
	"strings"

	"kvstrata/event"
)

// words keeps one copy of the strings that come again and again.
type words struct {
	kept          map[string]string
	session, salt string // the last ones: a batch has few, a stream has any number
	spec          string // the last one
	kind          event.SpecKind
}

const (
	maxKept    = 4096 // strings; beyond it each is allocated anew
	maxKeptLen = 256  // bytes of a string that is worth keeping
)

func (w *words) keep(b []byte) string {
	if len(b) == 0 {
		return ""
	}
	if s, ok := w.kept[string(b)]; ok {
		return s
	}
	s := valid(string(b))
	if len(w.kept) < maxKept && len(b) <= maxKeptLen {
		if w.kept == nil {
			w.kept = make(map[string]string)
		}
		w.kept[string(b)] = s
	}
	return s
}

// again returns b as a string: the last one, when it is the same.
func again(last *string, b []byte) string {
	if string(b) != *last {
		*last = string(b)
	}
	return *last
}

// valid returns s as UTF-8, which what leaves the edge has to be.
func valid(s string) string { return strings.ToValidUTF8(s, "\uFFFD") }
