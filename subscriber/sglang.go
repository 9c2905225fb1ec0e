package subscriber

import (
	"math"

	"kvstrata/event"
)

// SGLang sends what vLLM does, with fields of its own: maps since September 2026, arrays before, of which some end with a map
// of the fields that came later. Hashes are signed. Under EAGLE each "token" is a pair of a token and the one after it.

// tokenPairs reads n pairs [t, u], each of which begins with the token that the one before ended with: n+1 tokens, of which a
// block of s pairs covers s+1.
func (d *Decoder) tokenPairs(ev *event.Event, n int) {
	r := &d.r
	ev.Tokens = d.tokens.take(n+1, r.left()+1)
	ev.Eagle = true
	d.sight.pairs = true
	for i := range n {
		d.place.item = i
		start := r.at
		if r.array() != 2 {
			r.fail(start, "want a pair of tokens")
		}
		first, second := uint32(r.number(math.MaxUint32)), uint32(r.number(math.MaxUint32))
		if !r.failed && i > 0 && ev.Tokens[i] != first {
			r.fail(start, "a pair that does not go on where the one before ended")
		}
		if r.failed {
			return
		}
		ev.Tokens[i], ev.Tokens[i+1] = first, second
	}
	d.place.item = -1
}

// trailingMap reads the map in which SGLang's arrays carry later fields, where vLLM's have the adapter's name.
func (d *Decoder) trailingMap(ev *event.Event) {
	r := &d.r
	d.sight.dialect = DialectSGLang
	for range r.fields() {
		d.place.field = noField
		key := r.text()
		if r.failed {
			return
		}
		switch f := fieldOf(key); f {
		case loraName, cacheSalt, sessionID, medium, extraKeys:
			d.sight.stored |= 1 << f
			d.value(ev, f)
		default:
			d.odd("unknown field", storedClass.tag, key)
			r.skip()
		}
	}
}
