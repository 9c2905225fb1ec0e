package enginehash

import (
	"encoding/binary"
	"math"
	"math/bits"
	"unicode/utf8"
)

// Opcodes of pickle's protocol 5 (Python's pickletools describes them).
const (
	opProto     = 0x80
	opFrame     = 0x95
	opMemoize   = 0x94
	opMark      = '('
	opNone      = 'N'
	opInt1      = 'K'
	opInt2      = 'M'
	opInt4      = 'J'
	opLong1     = 0x8a
	opText1     = 0x8c
	opText4     = 'X'
	opBytes1    = 'C'
	opBytes4    = 'B'
	opGet1      = 'h'
	opGet4      = 'j'
	opTuple0    = ')'
	opTuple1    = 0x85
	opTuple2    = 0x86
	opTuple3    = 0x87
	opTuple     = 't'
	opStop      = '.'
	frameStart  = 11      // protocol, and a frame's opcode and length
	maxFrame    = 1 << 16 // Python begins another frame behind it
	noMemo      = -1
	maxNotes    = 16 // texts of one block that are looked for again
	latin1Limit = 0x100
)

// pickle writes what pickle.dumps(object, 5) yields. Each text, byte string and tuple gets a number in the order of
// writing, and an object met twice is written as its number: objects, not values, so that equal texts are written
// twice unless they are one object.
type pickle struct {
	buf  []byte
	memo int // numbers given
	same bool

	tags  [len(tagNames)]int // number + 1 of each tag, which are constants in vLLM's code
	notes [maxNotes]note
	noted int
}

// note is a text that is one object wherever it stands, or taken to be.
type note struct {
	text string
	memo int
}

func (p *pickle) begin(dst []byte) {
	p.buf = append(dst, opProto, 5, opFrame, 0, 0, 0, 0, 0, 0, 0, 0)
}

// end returns what was written.
func (p *pickle) end() []byte {
	p.buf = append(p.buf, opStop)
	binary.LittleEndian.PutUint64(p.buf[frameStart-8:], uint64(len(p.buf)-frameStart))
	return p.buf
}

// memoize numbers the object just written.
func (p *pickle) memoize() int {
	p.buf = append(p.buf, opMemoize)
	p.memo++
	return p.memo - 1
}

func (p *pickle) again(memo int) {
	if memo <= math.MaxUint8 {
		p.buf = append(p.buf, opGet1, byte(memo))
		return
	}
	p.buf = binary.LittleEndian.AppendUint32(append(p.buf, opGet4), uint32(memo))
}

func (p *pickle) bytes(b []byte) {
	if len(b) <= math.MaxUint8 {
		p.buf = append(p.buf, opBytes1, byte(len(b)))
	} else {
		p.buf = binary.LittleEndian.AppendUint32(append(p.buf, opBytes4), uint32(len(b)))
	}
	p.buf = append(p.buf, b...)
	p.memoize()
}

func (p *pickle) text(s string) int {
	if len(s) <= math.MaxUint8 {
		p.buf = append(p.buf, opText1, byte(len(s)))
	} else {
		p.buf = binary.LittleEndian.AppendUint32(append(p.buf, opText4), uint32(len(s)))
	}
	p.buf = append(p.buf, s...)
	return p.memoize()
}

// object writes a text that a request brought. CPython has one object for each text of at most one Latin-1 letter; others
// are one object only where the caller says so.
func (p *pickle) object(s string, isShared bool) {
	if !isShared && !isSingleton(s) {
		p.text(s)
		return
	}
	for i := range p.noted {
		if p.notes[i].text == s {
			p.again(p.notes[i].memo)
			return
		}
	}
	memo := p.text(s)
	if p.noted < maxNotes {
		p.notes[p.noted] = note{s, memo}
		p.noted++
	}
}

func isSingleton(s string) bool {
	r, size := utf8.DecodeRuneInString(s)
	return s == "" || size == len(s) && r < latin1Limit
}

func (p *pickle) tag(t tag) {
	if memo := p.tags[t]; memo > 0 {
		p.again(memo - 1)
		return
	}
	p.tags[t] = p.text(tagNames[t]) + 1
}

func (p *pickle) int(n int64) {
	switch {
	case n >= 0 && n <= math.MaxUint8:
		p.buf = append(p.buf, opInt1, byte(n))
	case n >= 0 && n <= math.MaxUint16:
		p.buf = append(p.buf, opInt2, byte(n), byte(n>>8))
	case n >= math.MinInt32 && n <= math.MaxInt32:
		p.buf = append(p.buf, opInt4, byte(n), byte(n>>8), byte(n>>16), byte(n>>24))
	default: // the fewest bytes of two's complement that hold the sign
		size := bits.Len64(uint64(n^n>>63))/8 + 1
		p.buf = append(p.buf, opLong1, byte(size))
		for range size {
			p.buf = append(p.buf, byte(n))
			n >>= 8
		}
	}
}

func (p *pickle) tokens(tokens []uint32) {
	p.open(len(tokens))
	buf := p.buf
	for _, t := range tokens {
		switch {
		case t <= math.MaxUint8:
			buf = append(buf, opInt1, byte(t))
		case t <= math.MaxUint16:
			buf = append(buf, opInt2, byte(t), byte(t>>8))
		case t <= math.MaxInt32:
			buf = append(buf, opInt4, byte(t), byte(t>>8), byte(t>>16), byte(t>>24))
		default:
			buf = append(buf, opLong1, 5, byte(t), byte(t>>8), byte(t>>16), byte(t>>24), 0)
		}
	}
	p.buf = buf
	p.close(len(tokens))
}

// open begins a tuple of n items, and close ends it.
func (p *pickle) open(n int) {
	if n > 3 {
		p.buf = append(p.buf, opMark)
	}
}

func (p *pickle) close(n int) {
	switch n {
	case 0:
		p.buf = append(p.buf, opTuple0) // one object everywhere, without a number
		return
	case 1:
		p.buf = append(p.buf, opTuple1)
	case 2:
		p.buf = append(p.buf, opTuple2)
	case 3:
		p.buf = append(p.buf, opTuple3)
	default:
		p.buf = append(p.buf, opTuple)
	}
	p.memoize()
}

func (p *pickle) keys(keys []Key, form Form) {
	if len(keys) == 0 {
		p.buf = append(p.buf, opNone)
		return
	}
	p.open(len(keys))
	for i := range keys {
		p.key(&keys[i], form)
	}
	p.close(len(keys))
}

func (p *pickle) key(k *Key, form Form) {
	n := k.width(form)
	if n > 0 {
		p.open(n)
	}
	if form == Tagged {
		p.tag(k.tag())
	}
	switch k.Kind {
	case KeyEmbeds:
		p.bytes([]byte(k.Text))
	case KeyItem:
		p.object(k.Text, p.same)
		p.int(k.Offset)
	case KeyLoRA:
		p.object(k.Text, false)
		if form == Tagged {
			p.object(k.Path, false)
		}
	default:
		p.object(k.Text, p.same && form == Plain) // what counts as a salt there may be an identifier
	}
	if n > 0 {
		p.close(n)
	}
}
