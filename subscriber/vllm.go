package subscriber

import (
	"encoding/binary"
	"math"
	"slices"

	"kvstrata/event"
)

// minEvent is the length of the shortest event of a known class: a BlockRemoved without hashes, as an array.
const minEvent = 15

const maxBlockSize = 1 << 20 // tokens; a larger number is no block size

// leastMillis is the least integer that is Unix time in milliseconds rather than in seconds: of 1973, or of 5138.
const leastMillis = 100_000_000_000

// isMillis reports whether the time that follows is a whole number of milliseconds, which is a Mooncake master's way.
func (r *reader) isMillis() bool {
	if r.peek() == 0xcb { // a float, as everybody else's
		return false
	}
	ahead := *r
	s, n := ahead.next()
	return s == shapeUint && n >= leastMillis
}

// time reads seconds of Unix time, of any width, as a float or an integer; 0 when they are none.
func (r *reader) time() event.Time {
	at := r.at
	s, n := r.next()
	switch s {
	case shapeFloat:
		return event.Seconds(math.Float64frombits(n))
	case shapeUint:
		if n >= leastMillis && n <= math.MaxInt64/1_000_000 { // Mooncake's
			return event.Time(n * 1_000_000)
		}
		return event.Seconds(float64(n))
	case shapeInt:
		return 0
	default:
		r.want(at, "a number", s)
		return 0
	}
}

func (d *Decoder) batch() (at event.Time, rank int32) {
	r := &d.r
	rank = -1
	d.place = place{event: -1, item: -1}
	n := r.array()
	if n < 2 {
		r.fail(0, "a batch of fewer than 2 elements")
		return 0, rank
	}
	d.place.field = batchTime
	d.master = d.cfg.Dialect == DialectMooncake || d.cfg.Dialect == AnyDialect && r.isMillis()
	at = r.time()
	if r.failed {
		return 0, rank
	}
	if at == 0 {
		d.odd("time that is no Unix seconds", "", nil)
	}
	d.place.field = batchEvents
	events := r.array()
	d.events = slices.Grow(d.events, min(events, r.left()/minEvent+1))
	for i := range events {
		if r.failed {
			return 0, rank
		}
		d.place.event = i
		d.event()
	}
	if r.failed {
		return 0, rank
	}
	d.place = place{event: -1, item: -1, field: batchRank}
	d.sight.ranked = d.sight.ranked || n > 2
	if n > 2 && !r.isNil() {
		rank = int32(r.number(math.MaxInt32))
	}
	if r.failed {
		return 0, rank
	}
	d.place.field = noField
	if n > 3 {
		d.odd("batch elements beyond the third", "", nil)
	}
	for i := 3; i < n && !r.failed; i++ {
		r.skip()
	}
	if r.left() > 0 {
		r.fail(r.at, "bytes after the batch")
	}
	return at, rank
}

// event reads one event of either form.
func (d *Decoder) event() {
	d.place.field, d.place.item = noField, -1
	switch tag := d.r.peek(); {
	case tag&0xf0 == 0x90 || tag == 0xdc || tag == 0xdd:
		d.arrayEvent()
	case tag&0xf0 == 0x80 || tag == 0xde || tag == 0xdf:
		if d.master {
			d.mooncakeEvent()
		} else {
			d.mapEvent()
		}
	default:
		at := d.r.at
		s, _ := d.r.next()
		d.r.want(at, "an array or a map", s)
	}
}

func (d *Decoder) arrayEvent() {
	r := &d.r
	start := r.at
	n := r.array() - 1
	if n < 0 {
		r.fail(start, "an event without a tag")
		return
	}
	d.place.field = eventTag
	tag := r.text()
	if r.failed {
		return
	}
	d.place.field = noField
	c := classOf(tag)
	if c == nil {
		d.odd("unknown event", "", tag)
		for range n {
			r.skip()
		}
		return
	}
	if n < c.required {
		r.fail(start, "an event of too few elements")
		return
	}
	ev := d.add(c.kind)
	var seen fieldSet
	for _, f := range c.order[:min(n, len(c.order))] {
		seen |= 1 << f
		if optional.has(f) && r.isNil() {
			continue
		}
		if d.value(ev, f); r.failed {
			return
		}
	}
	d.saw(c, seen, arrayForm)
	d.place.field, d.place.item = noField, -1
	if n > len(c.order) {
		d.odd("elements beyond the last known", c.tag, nil)
		for range n - len(c.order) {
			r.skip()
		}
	}
	d.check(ev)
}

func (d *Decoder) mapEvent() {
	r := &d.r
	start := r.at
	n := r.fields()
	tag := d.tag(n)
	if r.failed {
		return
	}
	c := classOf(tag)
	if c == nil {
		d.odd("unknown event", "", tag)
		for range 2 * n {
			r.skip()
		}
		return
	}
	ev := d.add(c.kind)
	var seen fieldSet
	for range n {
		d.place.field, d.place.item = noField, -1
		key := r.text()
		if r.failed {
			return
		}
		switch f := fieldOf(key); {
		case f == eventTag:
			r.skip()
		case !c.fields.has(f):
			d.odd("unknown field", c.tag, key)
			r.skip()
		case seen.has(f): // the first one counts
			d.odd("repeated field", c.tag, key)
			r.skip()
		default:
			seen |= 1 << f
			d.value(ev, f)
		}
		if r.failed {
			return
		}
	}
	for _, f := range c.order[:c.required] {
		if !seen.has(f) {
			d.place.field, d.place.item = f, -1
			r.fail(start, "missing")
			return
		}
	}
	d.place.field, d.place.item = noField, -1
	d.saw(c, seen, mapForm)
	d.check(ev)
}

// saw notes which fields an event told.
func (d *Decoder) saw(c *class, seen fieldSet, form uint8) {
	s := &d.sight
	s.forms |= form
	switch c.kind {
	case event.Stored:
		if !s.any {
			s.any, s.always = true, seen
		}
		s.stored |= seen
		s.always &= seen
	case event.Evicted:
		s.removed |= seen
	case event.Cleared:
		s.cleared = true
	}
}

// tag finds the type among the n keys that follow, and stays before the first of them. vLLM writes it first.
func (d *Decoder) tag(n int) []byte {
	r := &d.r
	start := r.at
	for range n {
		key := r.text()
		if r.failed {
			return nil
		}
		if string(key) == "type" {
			d.place.field = eventTag
			tag := r.text()
			if !r.failed {
				d.place.field = noField
				r.at = start
			}
			return tag
		}
		r.skip()
	}
	r.fail(start, "an event without a type")
	return nil
}

// add appends an event to the batch.
func (d *Decoder) add(kind event.Kind) *event.Event {
	d.events = slices.Grow(d.events, 1)[:len(d.events)+1]
	ev := &d.events[len(d.events)-1]
	*ev = event.Event{}
	ev.Kind, ev.Group, ev.LoRAID = kind, event.NoGroup, event.NoLoRAID
	if kind == event.Cleared {
		ev.Cause = event.ByEngine
	} else {
		ev.Tier = event.GPU
	}
	return ev
}

// value reads the value of a field into an event.
func (d *Decoder) value(ev *event.Event, f field) {
	r := &d.r
	d.place.field, d.place.item = f, -1
	switch f {
	case blockHashes:
		d.hashes(ev)
		return
	case tokenIDs:
		d.tokenIDs(ev)
		return
	case blockSize:
		ev.BlockSize = uint32(r.number(maxBlockSize))
		return
	}
	if r.isNil() {
		return
	}
	d.sight.valued |= 1 << f
	switch f {
	case parentHash:
		ev.Parent, ev.HasParent = d.hash(), true
	case loraID:
		ev.LoRAID = r.signed()
	case medium:
		ev.Tier = d.tier(r.text())
	case loraName:
		if r.peek()&0xf0 == 0x80 {
			d.trailingMap(ev)
			return
		}
		ev.LoRA = d.words.keep(r.text())
	case extraKeys:
		d.extraKeys(ev)
	case groupIndex:
		ev.Group = event.Group(r.number(math.MaxInt32))
	case specKind:
		ev.Spec = d.spec(r.text())
	case slidingWindow:
		ev.Window = uint32(r.number(math.MaxUint32))
	case locality:
		ev.Locality = d.locality(r.text())
	case ownership:
		ev.Ownership = d.words.keep(r.text())
	case sessionID:
		ev.Session = valid(again(&d.words.session, r.text()))
	case cacheSalt:
		ev.Salt = again(&d.words.salt, r.text())
	}
}

// tokenIDs reads a run's tokens: integers, or SGLang's pairs of them.
func (d *Decoder) tokenIDs(ev *event.Event) {
	r := &d.r
	n := r.array()
	if n > 0 && r.peek() == 0x92 {
		d.tokenPairs(ev, n)
		return
	}
	start := r.at
	ev.Tokens = d.tokens.take(n, r.left())
	if done := r.tokens(ev.Tokens); done < n {
		if d.textAmongTokens(start, n) {
			ev.Tokens = nil
			return
		}
		d.place.item = done
	}
}

// textAmongTokens passes over n tokens one of which is text: TensorRT-LLM has some where an image stands, and then the run has no
// tokens that a prompt could be looked up by. It reports false, and leaves the failure, where something else is wrong.
func (d *Decoder) textAmongTokens(start, n int) bool {
	r := &d.r
	ahead := reader{buf: r.buf, at: r.offset}
	if s, _ := ahead.next(); s != shapeStr {
		return false
	}
	ahead = reader{buf: r.buf, at: start}
	for range n {
		ahead.skip()
	}
	if ahead.failed {
		return false
	}
	*r = ahead
	d.odd("tokens that are text", "", nil)
	return true
}

// hashes reads a run's block hashes. Most are integers of 64 bits, which the loop reads itself.
func (d *Decoder) hashes(ev *event.Event) {
	r := &d.r
	n := r.array()
	ev.Blocks = d.blocks.take(n, r.left())
	var all uint64
	for i := range ev.Blocks {
		bl := &ev.Blocks[i]
		bl.Prefix, bl.Effect, bl.Copies, bl.Age = 0, 0, -1, -1
		if at := r.at; len(r.buf)-at >= 9 && r.buf[at] == 0xcf {
			n := binary.BigEndian.Uint64(r.buf[at+1:])
			r.at += 9
			all |= n
			bl.Hash = event.IntHash(n)
		} else if bl.Hash = d.hash(); r.failed {
			d.place.item = i
			return
		}
	}
	if all != 0 {
		d.sight.number(all, false)
	}
}

// hash reads a block hash: an integer of either sign, or bytes, which some writers send as a string.
func (d *Decoder) hash() event.BlockHash {
	r := &d.r
	at := r.at
	s, n := r.next()
	switch s {
	case shapeUint, shapeInt:
		d.sight.number(n, s == shapeInt)
		return event.IntHash(n)
	case shapeBin, shapeStr:
		if n == 0 {
			r.fail(at, "a hash of 0 bytes")
			return event.BlockHash{}
		}
		start := r.at
		if r.take(at, n); r.failed {
			return event.BlockHash{}
		}
		if d.text == "" {
			d.text = string(r.buf)
		}
		d.sight.bytes(int(n))
		return event.BytesHash(d.text[start:r.at])
	default:
		r.want(at, "an integer or bytes", s)
		return event.BlockHash{}
	}
}

// extraKeys keeps each block's extra keys as they stand in the payload.
func (d *Decoder) extraKeys(ev *event.Event) {
	r := &d.r
	n := r.array()
	if ev.ExtraKeys = d.keys.take(n, r.left()); n == 0 {
		ev.ExtraKeys = [][]byte{} // told, and empty
	}
	for i := range ev.ExtraKeys {
		if r.isNil() {
			ev.ExtraKeys[i] = nil
			continue
		}
		raw := r.skip()
		if r.failed {
			d.place.item = i
			return
		}
		ev.ExtraKeys[i] = raw[:len(raw):len(raw)]
	}
}

// maxTier bounds the bytes of a medium's name.
const maxTier = 1024

// tier returns the tier that a medium names. An empty name is none.
func (d *Decoder) tier(name []byte) event.Tier {
	var t event.Tier
	if len(name) > maxTier {
		d.r.fail(d.r.at, "a medium of more than 1,024 bytes")
		return event.GPU
	}
	switch string(name) {
	case "", "GPU":
		t = event.GPU
	case "CPU":
		t = event.CPU
	case "STORAGE":
		t = event.Storage
	default:
		t = event.Tier(d.words.keep(name))
	}
	d.sight.medium(string(t))
	return t
}

// specs are the attention kinds by vLLM's names.
var specs = func() map[string]event.SpecKind {
	m := map[string]event.SpecKind{"": event.SpecUnknown}
	for k := event.SpecFull; k < event.SpecOther; k++ {
		m[k.String()] = k
	}
	return m
}()

func (d *Decoder) spec(name []byte) event.SpecKind {
	if string(name) == d.words.spec { // the last one's, most often
		return d.words.kind
	}
	k, ok := specs[string(name)]
	if !ok && !d.r.failed {
		d.odd("unknown attention kind", "", name)
		return event.SpecOther
	}
	d.words.spec, d.words.kind = k.String(), k
	return k
}

func (d *Decoder) locality(name []byte) event.Locality {
	switch string(name) {
	case "":
		return event.LocalityUnknown
	case "LOCAL":
		return event.Local
	case "REMOTE":
		return event.Remote
	default:
		d.odd("unknown locality", "", name)
		return event.LocalityOther
	}
}

// check counts a run whose extra keys do not fit its blocks. Whether its tokens do, the judge sees.
func (d *Decoder) check(ev *event.Event) {
	if ev.Kind == event.Stored && (ev.Tier == lmcacheMedium || d.cfg.Dialect == DialectLMCache) {
		d.lmcache(ev)
	}
	if len(ev.ExtraKeys) > 0 && len(ev.ExtraKeys) != len(ev.Blocks) {
		d.odd("extra keys that do not match their blocks", "", nil)
	}
}
