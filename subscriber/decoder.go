package subscriber

import (
	"bytes"
	"fmt"
	"strings"

	"kvstrata/event"
)

// Decoder reads the payloads of one source, in whatever dialect it speaks: one file a dialect says how.
//
// Events and fields that we do not know are skipped and counted, see [Decoder.Oddities]. A payload that is neither msgpack nor
// JSON, or whose known fields have other types than their dialect's, gives a [*DecodeError]. No payload makes a Decoder
// allocate more than a small multiple of its length.
//
// Not safe for concurrent use. What Decode fills in is the decoder's own memory, or a part of the payload: it is valid
// until the next call, and as long as the payload is left alone.
type Decoder struct {
	cfg   DecoderConfig
	r     reader
	place place
	text  string // the payload once more, as the one string that all byte hashes share; made when needed

	events []event.Event
	blocks arena[event.Block]
	tokens arena[uint32]
	keys   arena[[]byte]
	words  words
	tally  tally
	sight  sight
	millis bool   // the batch tells its time in ms, as a Mooncake master does
	pool   uint64 // blocks on the device, where the dialect tells
}

// DecoderConfig says what is known of a source beforehand.
type DecoderConfig struct {
	Dialect   Dialect // AnyDialect: to be recognised
	BlockSize uint32  // tokens a block, for dialects that do not tell; 0 = unknown
}

// NewDecoder returns a decoder that has seen nothing yet.
func NewDecoder(cfg DecoderConfig) *Decoder { return &Decoder{cfg: cfg} }

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

// Decode reads a payload into b: its Time, Rank and Events, and nothing else of b. After an error b is as it was.
func (d *Decoder) Decode(payload []byte, b *event.Batch) error {
	d.r = reader{buf: payload}
	d.text = ""
	d.events = d.events[:0]
	d.blocks.reset()
	d.tokens.reset()
	d.keys.reset()
	at, rank, err := d.read(payload)
	if err != nil {
		return err
	}
	if d.r.failed {
		return &DecodeError{Offset: d.r.offset, Path: d.place.String(), Reason: d.r.reason}
	}
	b.Time, b.Rank, b.Events = at, rank, d.events
	return nil
}

// read reads a payload of any dialect. Of JSON, TensorRT-LLM's says the type of its data.
func (d *Decoder) read(payload []byte) (at event.Time, rank int32, err error) {
	if d.r.peek() != '{' { // which begins no msgpack that anybody sends: a bare number
		at, rank = d.batch()
		return at, rank, nil
	}
	dialect, read := DialectTensorRT, d.tensorRT
	switch {
	case !bytes.Contains(payload, []byte(`"data"`)):
		return 0, -1, &DecodeError{Reason: "JSON of no dialect that we know"}
	case !bytes.Contains(payload, []byte(`"type"`)) || bytes.Contains(payload, []byte(`"worker_id"`)):
		dialect, read = DialectDynamo, d.dynamo
	}
	if rank, err = read(payload); err == nil {
		d.sight.dialect, d.sight.forms = dialect, d.sight.forms|jsonForm
	}
	return 0, rank, err
}

// Dialect returns what the source speaks: as configured, or as recognised so far.
func (d *Decoder) Dialect() Dialect {
	if d.cfg.Dialect != AnyDialect {
		return d.cfg.Dialect
	}
	return d.sight.recognise()
}

// Contract returns what was seen of the stream.
func (d *Decoder) Contract() event.Contract { return d.sight.contract() }

// Pool returns how many blocks the engine said that it has on the device; 0 = it did not say.
func (d *Decoder) Pool() uint64 { return d.pool }

// Oddities returns what was found in payloads beside what we know, counted by name since the decoder was made: unknown
// events, fields, attention kinds and localities, elements beyond the last known one, fields that stand twice, times
// that are no Unix seconds, and runs whose tokens or keys do not fit their blocks. After 64 names the rest is "other".
func (d *Decoder) Oddities() []event.Counter { return d.tally.list() }

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

// odd counts something unexpected at the decoder's place.
func (d *Decoder) odd(what, of string, word []byte) {
	d.tally.add(what, of, word, func() string {
		return strings.TrimLeft(fmt.Sprintf("%v at byte %d of %d", d.place, d.r.at, len(d.r.buf)), " ")
	})
}
