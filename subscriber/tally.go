package subscriber

import (
	"slices"

	"kvstrata/event"
)

// oddity names something in a stream that we did not expect: what it is, of which kind of event, and the word that the
// stream used for it.
type oddity struct{ what, of, word string }

func (o oddity) String() string {
	name := o.what
	if o.of != "" {
		name += " " + o.of
	}
	switch {
	case o.word == "":
	case o.of != "":
		name += "." + o.word
	default:
		name += " " + o.word
	}
	return name
}

const (
	maxOddities = 64 // names that a tally tells apart; later ones are counted together
	maxWord     = 48 // bytes of a stream's own word that are kept
)

// otherOddities is the name under which those are counted that came after maxOddities.
const otherOddities = "other"

// tally counts oddities by name, in the order of their first appearance. Counting again what was seen before allocates
// nothing. Not safe for concurrent use.
type tally struct {
	index    map[oddity]int
	counters []event.Counter
}

// add counts one oddity. The word comes from the stream: it is cut and made printable. The example is made only of the
// first one; it must hold no token, salt or session.
func (t *tally) add(what, of string, word []byte, example func() string) {
	word = printable(word[:min(len(word), maxWord)])
	i, ok := t.index[oddity{what, of, string(word)}]
	if ok {
		t.counters[i].Count++
		return
	}
	if t.index == nil {
		t.index = make(map[oddity]int)
	}
	o := oddity{what, of, string(word)}
	name := o.String()
	if len(t.index) >= maxOddities {
		o, name = oddity{what: otherOddities}, otherOddities
		if i, ok := t.index[o]; ok {
			t.counters[i].Count++
			return
		}
	}
	t.index[o] = len(t.counters)
	t.counters = append(t.counters, event.Counter{Name: name, Count: 1, Example: example()})
}

// list returns a copy of the counts.
func (t *tally) list() []event.Counter { return slices.Clone(t.counters) }

// printable returns a word with everything but printable ASCII replaced.
func printable(word []byte) []byte {
	odd := func(c byte) bool { return c < 0x20 || c > 0x7e }
	if !slices.ContainsFunc(word, odd) {
		return word
	}
	word = slices.Clone(word)
	for i, c := range word {
		if odd(c) {
			word[i] = '?'
		}
	}
	return word
}
