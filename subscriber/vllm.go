package subscriber

import (
	"encoding/binary"
	"fmt"
	"math"
	"slices"
	"strings"

	"kvstrata/event"
)

// VLLM decodes what vLLM's ZmqEventPublisher sends: a msgpack array of time, events and data-parallel rank, each event
// an array (vLLM 0.23 and older) or a map (0.24 and newer); which one is decided event by event.
//
// Events and fields of later versions are skipped and counted, see [VLLM.Oddities]. A payload that is not msgpack, or
// whose known fields have other types than vLLM's, gives a [*DecodeError]. No payload makes a VLLM allocate more than
// a small multiple of its length.
//
// Not safe for concurrent use. What Decode fills in is the decoder's own memory, or a part of the payload: it is valid
// until the next call, and as long as the payload is left alone.
type VLLM struct {
	r     reader
	place place
	text  string // the payload once more, as the one string that all byte hashes share; made when needed

	events []event.Event
	blocks arena[event.Block]
	tokens arena[uint32]
	keys   arena[[]byte]
	words  words
	tally  tally
}

// NewVLLM returns a decoder.
func NewVLLM() *VLLM { return &VLLM{} }

// DecodeError says where a payload is not what its dialect writes.
type DecodeError struct {
	Offset int    // in bytes from the payload's start
	Path   string // of the value, as events[3].token_ids[7]; empty for the payload as a whole
	Reason string // holds shapes and lengths, never values
}

func (e *DecodeError) Error() string {
	if e.Path == "" {
		return fmt.Sprintf("byte %d: %s", e.Offset, e.Reason)
	}
	return fmt.Sprintf("byte %d (%s): %s", e.Offset, e.Path, e.Reason)
}

// place is where the decoder is, for errors and examples.
type place struct {
	event int // −1 outside the events
	field field
	item  int // of the field's value, −1 when it is the value itself
}

func (p place) String() string {
	var path string
	if p.event >= 0 {
		path = fmt.Sprintf("events[%d]", p.event)
		if p.field != noField {
			path += "."
		}
	}
	path += fieldNames[p.field]
	if p.item >= 0 {
		path += fmt.Sprintf("[%d]", p.item)
	}
	return path
}

// minEvent is the length of the shortest event of a known class: a BlockRemoved without hashes, as an array.
const minEvent = 15

const maxBlockSize = 1 << 20 // tokens; a larger number is no block size

// Decode reads a payload into b: its Time, Rank and Events, and nothing else of b. After an error b is as it was.
func (d *VLLM) Decode(payload []byte, b *event.Batch) error {
	d.r = reader{buf: payload}
	d.text = ""
	d.events = d.events[:0]
	d.blocks.reset()
	d.tokens.reset()
	d.keys.reset()
	at, rank := d.batch()
	if d.r.failed {
		return &DecodeError{Offset: d.r.offset, Path: d.place.String(), Reason: d.r.reason}
	}
	b.Time, b.Rank, b.Events = at, rank, d.events
	return nil
}

// Oddities returns what was found in payloads beside what we know, counted by name since the decoder was made: unknown
// events, fields, attention kinds and localities, elements beyond the last known one, fields that stand twice, times
// that are no Unix seconds, and runs whose tokens or keys do not fit their blocks. After 64 names the rest is "other".
func (d *VLLM) Oddities() []event.Counter { return d.tally.list() }

// PeekTime reads only the time of a payload, and allocates nothing.
func PeekTime(payload []byte) (event.Time, error) {
	r := reader{buf: payload}
	if n := r.array(); n == 0 && !r.failed {
		r.fail(0, "a batch of 0 elements")
	}
	path := place{event: -1, item: -1}
	if !r.failed {
		path.field = batchTime
	}
	t := r.time()
	if r.failed {
		return 0, &DecodeError{Offset: r.offset, Path: path.String(), Reason: r.reason}
	}
	return t, nil
}

// time reads seconds of Unix time, of any width, as a float or an integer; 0 when they are none.
func (r *reader) time() event.Time {
	at := r.at
	s, n := r.next()
	switch s {
	case shapeFloat:
		return event.Seconds(math.Float64frombits(n))
	case shapeUint:
		return event.Seconds(float64(n))
	case shapeInt:
		return 0
	default:
		r.want(at, "a number", s)
		return 0
	}
}

func (d *VLLM) batch() (at event.Time, rank int32) {
	r := &d.r
	rank = -1
	d.place = place{event: -1, item: -1}
	n := r.array()
	if n < 2 {
		r.fail(0, "a batch of fewer than 2 elements")
		return 0, rank
	}
	d.place.field = batchTime
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
func (d *VLLM) event() {
	d.place.field, d.place.item = noField, -1
	switch tag := d.r.peek(); {
	case tag&0xf0 == 0x90 || tag == 0xdc || tag == 0xdd:
		d.arrayEvent()
	case tag&0xf0 == 0x80 || tag == 0xde || tag == 0xdf:
		d.mapEvent()
	default:
		at := d.r.at
		s, _ := d.r.next()
		d.r.want(at, "an array or a map", s)
	}
}

func (d *VLLM) arrayEvent() {
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
	for _, f := range c.order[:min(n, len(c.order))] {
		if d.value(ev, f); r.failed {
			return
		}
	}
	d.place.field, d.place.item = noField, -1
	if n > len(c.order) {
		d.odd("elements beyond the last known", c.tag, nil)
		for range n - len(c.order) {
			r.skip()
		}
	}
	d.check(ev)
}

func (d *VLLM) mapEvent() {
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
	d.check(ev)
}

// tag finds the type among the n keys that follow, and stays before the first of them. vLLM writes it first.
func (d *VLLM) tag(n int) []byte {
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
func (d *VLLM) add(kind event.Kind) *event.Event {
	d.events = append(d.events, event.Event{Kind: kind, Group: event.NoGroup, LoRAID: event.NoLoRAID})
	ev := &d.events[len(d.events)-1]
	if kind == event.Cleared {
		ev.Cause = event.ByEngine
	} else {
		ev.Tier = event.GPU
	}
	return ev
}

// value reads the value of a field into an event.
func (d *VLLM) value(ev *event.Event, f field) {
	r := &d.r
	d.place.field, d.place.item = f, -1
	switch f {
	case blockHashes:
		d.hashes(ev)
		return
	case tokenIDs:
		n := r.array()
		ev.Tokens = d.tokens.take(n, r.left())
		if done := r.tokens(ev.Tokens); done < n {
			d.place.item = done
		}
		return
	case blockSize:
		ev.BlockSize = uint32(r.number(maxBlockSize))
		return
	}
	if r.isNil() {
		return
	}
	switch f {
	case parentHash:
		ev.Parent, ev.HasParent = d.hash(), true
	case loraID:
		ev.LoRAID = r.signed()
	case medium:
		ev.Tier = d.tier(r.text())
	case loraName:
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

// hashes reads a run's block hashes. Most are integers of 64 bits, which the loop reads itself.
func (d *VLLM) hashes(ev *event.Event) {
	r := &d.r
	n := r.array()
	ev.Blocks = d.blocks.take(n, r.left())
	for i := range ev.Blocks {
		h, ok := r.wideHash()
		if !ok {
			if h = d.hash(); r.failed {
				d.place.item = i
				return
			}
		}
		ev.Blocks[i] = event.Block{Hash: h, Copies: -1, Age: -1}
	}
}

// wideHash reads a hash that is an integer of 64 bits, if there is one.
func (r *reader) wideHash() (event.BlockHash, bool) {
	if r.left() < 9 || r.buf[r.at] != 0xcf {
		return event.BlockHash{}, false
	}
	n := binary.BigEndian.Uint64(r.buf[r.at+1:])
	r.at += 9
	return event.IntHash(n), true
}

// hash reads a block hash: an integer of either sign, or bytes, which some writers send as a string.
func (d *VLLM) hash() event.BlockHash {
	r := &d.r
	at := r.at
	s, n := r.next()
	switch s {
	case shapeUint, shapeInt:
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
		return event.BytesHash(d.text[start:r.at])
	default:
		r.want(at, "an integer or bytes", s)
		return event.BlockHash{}
	}
}

// extraKeys keeps each block's extra keys as they stand in the payload.
func (d *VLLM) extraKeys(ev *event.Event) {
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

// tier returns the tier that a medium names. An empty name is none.
func (d *VLLM) tier(name []byte) event.Tier {
	switch string(name) {
	case "", "GPU":
		return event.GPU
	case "CPU":
		return event.CPU
	case "STORAGE":
		return event.Storage
	default:
		return event.Tier(d.words.keep(name))
	}
}

// specs are the attention kinds by vLLM's names.
var specs = func() map[string]event.SpecKind {
	m := map[string]event.SpecKind{"": event.SpecUnknown}
	for k := event.SpecFull; k < event.SpecOther; k++ {
		m[k.String()] = k
	}
	return m
}()

func (d *VLLM) spec(name []byte) event.SpecKind {
	k, ok := specs[string(name)]
	if !ok && !d.r.failed {
		d.odd("unknown attention kind", "", name)
		return event.SpecOther
	}
	return k
}

func (d *VLLM) locality(name []byte) event.Locality {
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
func (d *VLLM) check(ev *event.Event) {
	if len(ev.ExtraKeys) > 0 && len(ev.ExtraKeys) != len(ev.Blocks) {
		d.odd("extra keys that do not match their blocks", "", nil)
	}
}

// odd counts something unexpected at the decoder's place.
func (d *VLLM) odd(what, of string, word []byte) {
	d.tally.add(what, of, word, func() string {
		return strings.TrimLeft(fmt.Sprintf("%v at byte %d of %d", d.place, d.r.at, len(d.r.buf)), " ")
	})
}
