package event

import (
	"time"

	"google.golang.org/protobuf/encoding/protowire"
)

// Field numbers of Batches in event.proto.
const (
	fNames protowire.Number = 1
	fFirst protowire.Number = 2

	fRuns     protowire.Number = 3
	fSpan     protowire.Number = 4
	fTime     protowire.Number = 5
	fReceived protowire.Number = 6
	fPayload  protowire.Number = 7
	fWay      protowire.Number = 8
	fReason   protowire.Number = 9
	fRank     protowire.Number = 10

	fKind       protowire.Number = 16
	fBlocks     protowire.Number = 17
	fTier       protowire.Number = 18
	fGroup      protowire.Number = 19
	fFlags      protowire.Number = 20
	fSeed       protowire.Number = 21
	fBlockSize  protowire.Number = 22
	fSpec       protowire.Number = 23
	fWindow     protowire.Number = 24
	fLoRA       protowire.Number = 25
	fSession    protowire.Number = 26
	fLocality   protowire.Number = 27
	fOwnership  protowire.Number = 28
	fCause      protowire.Number = 29
	fFromTier   protowire.Number = 30
	fPeer       protowire.Number = 31
	fRequest    protowire.Number = 32
	fBytes      protowire.Number = 33
	fDuration   protowire.Number = 34
	fLoRAID     protowire.Number = 35
	fTokenCount protowire.Number = 36

	fHashes     protowire.Number = 48
	fHashLength protowire.Number = 49
	fPrefix     protowire.Number = 50
	fEffect     protowire.Number = 51
	fCopies     protowire.Number = 52
	fAge        protowire.Number = 53

	fTokens    protowire.Number = 64
	fExtraKeys protowire.Number = 65

	numColumns = 66
)

// Flags of a run.
const (
	flagParent = 1 << iota
	flagEagle
	flagUnrooted
	flagLoRAID
	flagTokens
	flagExtraKeys
)

// Encoder gathers consecutive batches into one payload. It is reused message after message and allocates only while
// its columns grow. Not safe for concurrent use.
type Encoder struct {
	names   dictionary
	columns [numColumns]column // by field number
	hashes  hashColumn
	extra   [][]byte

	batches      int
	blocks       int
	first, next  Seq
	lastTime     Time
	lastReceived Time
	size         int
}

// Batches returns how many batches were appended since the last Encode.
func (e *Encoder) Batches() int { return e.batches }

// Blocks returns how many block operations they hold.
func (e *Encoder) Blocks() int { return e.blocks }

// Range returns the first and last sequence appended.
func (e *Encoder) Range() (first, last Seq) { return e.first, e.next - 1 }

// Size returns about how many bytes the payload has.
func (e *Encoder) Size() int { return e.size }

// Append adds a batch, which the caller may reuse at once. It must begin where the one before it ended.
func (e *Encoder) Append(b *Batch) {
	switch {
	case e.batches == 0:
		e.first = b.First
	case b.First != e.next:
		panic("event: Encoder.Append: batches are not consecutive")
	}
	c := &e.columns
	c[fRuns].varint(uint64(len(b.Events)))
	c[fSpan].varint(uint64(b.Last - b.First))
	c[fTime].zigzag(int64(b.Time - e.lastTime))
	c[fReceived].zigzag(int64(b.Received - e.lastReceived))
	c[fPayload].fixed(b.Payload)
	c[fWay].varint(uint64(b.Way))
	c[fReason].varint(e.names.id(b.Reason))
	c[fRank].zigzag(int64(b.Rank) + 1)
	e.lastTime, e.lastReceived = b.Time, b.Received
	e.batches++
	e.next = b.Last + 1
	e.size += 24
	for i := range b.Events {
		e.run(&b.Events[i])
	}
}

func (e *Encoder) run(ev *Event) {
	c := &e.columns
	var flags uint64
	if ev.HasParent {
		flags |= flagParent
		e.hashes.add(ev.Parent)
	}
	if ev.Eagle {
		flags |= flagEagle
	}
	if ev.Unrooted {
		flags |= flagUnrooted
	}
	if ev.LoRAID != NoLoRAID {
		flags |= flagLoRAID
		c[fLoRAID].zigzag(ev.LoRAID)
	}
	if len(ev.Tokens) > 0 {
		flags |= flagTokens
		c[fTokenCount].varint(uint64(len(ev.Tokens)))
		for _, t := range ev.Tokens {
			c[fTokens].varint(uint64(t))
		}
		e.size += 3 * len(ev.Tokens)
	}
	if len(ev.ExtraKeys) > 0 {
		flags |= flagExtraKeys
		for i := range ev.Blocks {
			var key []byte
			if i < len(ev.ExtraKeys) {
				key = ev.ExtraKeys[i]
			}
			e.extra = append(e.extra, append([]byte(nil), key...))
			e.size += 3 + len(key)
		}
	}
	c[fKind].varint(uint64(ev.Kind))
	c[fBlocks].varint(uint64(len(ev.Blocks)))
	c[fTier].varint(e.names.id(string(ev.Tier)))
	c[fGroup].varint(uint64(ev.Group + 1))
	c[fFlags].varint(flags)
	c[fSeed].fixed(ev.Seed)
	c[fBlockSize].varint(uint64(ev.BlockSize))
	c[fSpec].varint(uint64(ev.Spec))
	c[fWindow].varint(uint64(ev.Window))
	c[fLoRA].varint(e.names.id(ev.LoRA))
	c[fSession].varint(e.names.id(ev.Session))
	c[fLocality].varint(uint64(ev.Locality))
	c[fOwnership].varint(e.names.id(ev.Ownership))
	c[fCause].varint(uint64(ev.Cause))
	c[fFromTier].varint(e.names.id(string(ev.Load.From)))
	c[fPeer].varint(e.names.id(ev.Load.Peer))
	c[fRequest].varint(e.names.id(ev.Load.Request))
	c[fBytes].varint(ev.Load.Bytes)
	c[fDuration].varint(uint64(ev.Load.Duration))
	e.size += 24
	for i := range ev.Blocks {
		bl := &ev.Blocks[i]
		e.hashes.add(bl.Hash)
		c[fPrefix].fixed(uint64(bl.Prefix))
		c[fEffect].zigzag(int64(bl.Effect))
		c[fCopies].varint(uint64(bl.Copies + 1))
		c[fAge].varint(uint64(bl.Age + 1))
		e.size += 14 + bl.Hash.Len()
	}
	e.blocks += len(ev.Blocks)
}

// Encode appends the payload to dst and empties the encoder.
func (e *Encoder) Encode(dst []byte) []byte {
	dst = e.names.appendTo(dst, fNames)
	if e.first != 0 {
		dst = protowire.AppendTag(dst, fFirst, protowire.VarintType)
		dst = protowire.AppendVarint(dst, uint64(e.first))
	}
	for num := fRuns; num < fHashes; num++ {
		c := &e.columns[num]
		if num == fRuns || num == fKind || num == fLoRAID || num == fTokenCount {
			dst = c.appendAlways(dst, num)
		} else {
			dst = c.appendTo(dst, num)
		}
	}
	dst = e.hashes.appendTo(dst, fHashes, fHashLength)
	for num := fPrefix; num <= fAge; num++ {
		dst = e.columns[num].appendTo(dst, num)
	}
	dst = e.columns[fTokens].appendAlways(dst, fTokens)
	for _, key := range e.extra {
		dst = protowire.AppendTag(dst, fExtraKeys, protowire.BytesType)
		dst = protowire.AppendBytes(dst, key)
	}
	e.reset()
	return dst
}

func (e *Encoder) reset() {
	for i := range e.columns {
		e.columns[i].reset()
	}
	e.names.reset()
	e.hashes.reset()
	e.extra = e.extra[:0]
	e.batches, e.blocks, e.size = 0, 0, 0
	e.first, e.next, e.lastTime, e.lastReceived = 0, 0, 0, 0
}

// Decoder reads payloads. What Decode returns is valid until its next call. Not safe for concurrent use.
type Decoder struct {
	intern  interner
	names   []string
	columns [numColumns]cursor
	hashes  hashCursor
	extra   [][]byte

	batches []Batch
	events  []Event
	blocks  []Block
	tokens  []uint32
}

// Decode reads a payload of kind `ev`. It allocates no more than a small multiple of the payload's size, and returns a
// *WireError for one that is not as described.
func (d *Decoder) Decode(payload []byte) ([]Batch, error) {
	first, err := d.split(payload)
	if err != nil {
		return nil, err
	}
	c := &d.columns
	numBatches, numRuns := c[fRuns].rows(), c[fKind].rows()
	d.batches = grow(d.batches, numBatches)
	d.events = grow(d.events, numRuns)
	numBlocks, err := d.countBlocks()
	if err != nil {
		return nil, err
	}
	d.blocks = grow(d.blocks, numBlocks)
	d.tokens = grow(d.tokens, c[fTokens].rows())

	events, blocks, tokens := d.events, d.blocks, d.tokens
	next, lastTime, lastReceived := first, Time(0), Time(0)
	for i := range d.batches {
		b := &d.batches[i]
		runs := c[fRuns].varint()
		if runs > uint64(len(events)) {
			return nil, &WireError{Field: "runs", Reason: "more runs than kinds"}
		}
		lastTime += Time(c[fTime].zigzag())
		lastReceived += Time(c[fReceived].zigzag())
		*b = Batch{
			First: next, Last: next + Seq(c[fSpan].varint()), Way: Way(c[fWay].varint()),
			Time: lastTime, Received: lastReceived, Payload: c[fPayload].fixed(),
			Reason: d.name(fReason), Rank: int32(c[fRank].zigzag()) - 1,
			Events: events[:runs:runs],
		}
		if b.Last < b.First || b.Last+1 < b.Last {
			return nil, &WireError{Field: "span", Reason: "sequence overflows"}
		}
		next, events = b.Last+1, events[runs:]
		for j := range b.Events {
			if blocks, tokens, err = d.run(&b.Events[j], blocks, tokens); err != nil {
				return nil, err
			}
		}
	}
	return d.batches, d.finish(len(events))
}

// split finds the columns of a payload.
func (d *Decoder) split(payload []byte) (first Seq, err error) {
	if d.intern == nil {
		d.intern = make(interner)
	}
	d.names = d.names[:0]
	d.extra = d.extra[:0]
	clear(d.columns[:])
	d.hashes = hashCursor{}
	err = fields(payload, func(num protowire.Number, typ protowire.Type, b []byte, v uint64) error {
		switch {
		case num == fFirst && typ == protowire.VarintType:
			first = Seq(v)
		case typ != protowire.BytesType:
			// A field of a later version.
		case num == fNames:
			d.names = append(d.names, d.intern.string(b))
		case num == fExtraKeys:
			d.extra = append(d.extra, b)
		case num == fHashes || num == fHashLength:
			if num == fHashes && d.hashes.bytes != nil || num == fHashLength && d.hashes.long.present {
				return &WireError{Field: "hashes", Reason: "a column stands twice"}
			}
			if num == fHashes {
				d.hashes.bytes = b
				break
			}
			d.hashes.long = cursor{buf: b, present: true}
		case num > fFirst && num < numColumns:
			if d.columns[num].present {
				return &WireError{Field: "message", Reason: "a column stands twice"}
			}
			d.columns[num] = cursor{buf: b, present: true}
		}
		return nil
	})
	return first, err
}

// countBlocks adds up the blocks column, which may not promise more blocks than there are hashes.
func (d *Decoder) countBlocks() (int, error) {
	c := d.columns[fBlocks]
	total := 0
	for len(c.buf) > 0 {
		n := c.varint()
		if n > uint64(len(d.hashes.bytes)) || c.bad {
			return 0, &WireError{Field: "blocks", Reason: "more blocks than hashes"}
		}
		if total += int(n); total > len(d.hashes.bytes) {
			return 0, &WireError{Field: "blocks", Reason: "more blocks than hashes"}
		}
	}
	return total, nil
}

func (d *Decoder) run(ev *Event, blocks []Block, tokens []uint32) ([]Block, []uint32, error) {
	c := &d.columns
	flags := c[fFlags].varint()
	n := c[fBlocks].varint()
	if n > uint64(len(blocks)) {
		return nil, nil, &WireError{Field: "blocks", Reason: "rows do not add up"}
	}
	*ev = Event{
		Kind: Kind(c[fKind].varint()), Blocks: blocks[:n:n],
		Tier: Tier(d.name(fTier)), Group: Group(c[fGroup].varint()) - 1,
		HasParent: flags&flagParent != 0, Eagle: flags&flagEagle != 0, Unrooted: flags&flagUnrooted != 0,
		Seed: c[fSeed].fixed(), BlockSize: uint32(c[fBlockSize].varint()),
		Spec: SpecKind(c[fSpec].varint()), Window: uint32(c[fWindow].varint()),
		LoRA: d.name(fLoRA), LoRAID: NoLoRAID, Session: d.name(fSession),
		Locality: Locality(c[fLocality].varint()), Ownership: d.name(fOwnership),
		Cause: ClearCause(c[fCause].varint()),
		Load: Load{
			From: Tier(d.name(fFromTier)), Peer: d.name(fPeer), Request: d.name(fRequest),
			Bytes: c[fBytes].varint(), Duration: time.Duration(c[fDuration].varint()),
		},
	}
	if ev.Kind < Stored || ev.Kind > Cleared {
		return nil, nil, &WireError{Field: "kind", Reason: "unknown kind"}
	}
	if flags&flagLoRAID != 0 {
		ev.LoRAID = c[fLoRAID].zigzag()
	}
	if flags&flagTokens != 0 {
		count := c[fTokenCount].varint()
		if count > uint64(len(tokens)) {
			return nil, nil, &WireError{Field: "token_count", Reason: "more tokens than there are"}
		}
		ev.Tokens, tokens = tokens[:count:count], tokens[count:]
		for i := range ev.Tokens {
			ev.Tokens[i] = uint32(c[fTokens].varint())
		}
	}
	if flags&flagExtraKeys != 0 {
		if n > uint64(len(d.extra)) {
			return nil, nil, &WireError{Field: "extra_keys", Reason: "fewer keys than blocks"}
		}
		ev.ExtraKeys, d.extra = d.extra[:n:n], d.extra[n:]
	}
	if ev.HasParent {
		ev.Parent = d.hashes.next()
	}
	for i := range ev.Blocks {
		bl := &ev.Blocks[i]
		bl.Hash, bl.Prefix, bl.Effect = d.hashes.next(), PrefixHash(c[fPrefix].fixed()), int8(c[fEffect].zigzag())
		bl.Copies, bl.Age = int32(c[fCopies].varint())-1, time.Duration(c[fAge].varint())-1
	}
	return blocks[n:], tokens, nil
}

func (d *Decoder) name(num protowire.Number) string {
	c := &d.columns[num]
	i := c.varint()
	if i == 0 {
		return ""
	}
	if i > uint64(len(d.names)) {
		c.bad = true
		return ""
	}
	return d.names[i-1]
}

// finish reports the first column that has more or fewer rows than the message.
func (d *Decoder) finish(runsLeft int) error {
	if runsLeft > 0 {
		return &WireError{Field: "kind", Reason: "more kinds than runs"}
	}
	if !d.hashes.done() {
		return &WireError{Field: "hashes", Reason: "rows do not add up"}
	}
	if len(d.extra) > 0 {
		return &WireError{Field: "extra_keys", Reason: "more keys than blocks"}
	}
	for num := range d.columns {
		if c := &d.columns[num]; !c.done() && columnNames[num] != "" {
			return &WireError{Field: columnNames[num], Reason: "rows do not add up"}
		}
	}
	return nil
}

// columnNames are the names of the columns in event.proto.
var columnNames = [numColumns]string{
	fRuns: "runs", fSpan: "span", fTime: "time", fReceived: "received", fPayload: "payload_xxh3", fWay: "way",
	fReason: "reason", fRank: "rank", fKind: "kind", fBlocks: "blocks", fTier: "tier", fGroup: "group",
	fFlags: "flags", fSeed: "seed", fBlockSize: "block_size", fSpec: "spec_kind", fWindow: "window", fLoRA: "lora",
	fSession: "session", fLocality: "locality", fOwnership: "ownership", fCause: "cause", fFromTier: "from_tier",
	fPeer: "peer", fRequest: "request", fBytes: "bytes", fDuration: "duration", fLoRAID: "lora_id",
	fTokenCount: "token_count", fPrefix: "prefix", fEffect: "effect", fCopies: "copies", fAge: "age",
	fTokens: "tokens",
}

// grow returns s with length n, reusing its memory when that is enough.
func grow[T any](s []T, n int) []T {
	if cap(s) < n {
		return make([]T, n)
	}
	return s[:n]
}
