package enginehash

import (
	"encoding/binary"
	"errors"
)

// Why a block has no digest that could be computed.
var (
	ErrKeys    = errors.New("extra keys of a kind that can't be hashed")
	ErrTooLong = errors.New("block is too long to be one frame of pickle")
)

// Hasher computes digests under one scheme and one form of extra keys. It keeps its buffer, so one goroutine uses it.
type Hasher struct {
	// SameObject says that equal identifiers of multimodal items in one block are one Python object, which pickle writes
	// once. It depends on how the request came to vLLM's engine core; over its usual road they are two.
	SameObject bool
	// Pairs says that each token is hashed together with the one behind it, as SGLang does under EAGLE: a block is given
	// one token more than it has. Other schemes have no such blocks.
	Pairs bool

	scheme Scheme
	form   Form
	buf    []byte
}

// NewHasher returns a hasher.
func NewHasher(s Scheme, f Form) *Hasher { return &Hasher{scheme: s, form: f} }

// Block returns the digest of a block: of the digest before it (of a first block the [Recipe]'s root), its tokens and its
// extra keys, in the engine's order. SGLang takes no extra keys.
func (h *Hasher) Block(parent Digest, tokens []uint32, keys []Key) (Digest, error) {
	if h.scheme == SGLang {
		return h.sglang(parent, tokens, keys)
	}
	if len(keys) > 0 && h.form == Tagged {
		for i := range keys {
			if keys[i].Kind == KeyIdentifier {
				return Digest{}, ErrKeys
			}
		}
	}
	if !h.scheme.isPickled() {
		h.buf = appendCBOR(h.buf[:0], parent, tokens, keys, h.form)
		return h.scheme.sum(h.buf), nil
	}
	p := pickle{same: h.SameObject}
	p.begin(h.buf[:0])
	p.bytes(parent.b[:parent.n])
	p.tokens(tokens)
	p.keys(keys, h.form)
	p.buf = append(p.buf, opTuple3, opMemoize)
	h.buf = p.end()
	if len(h.buf)-frameStart > maxFrame {
		return Digest{}, ErrTooLong
	}
	return h.scheme.sum(h.buf), nil
}

func (h *Hasher) sglang(parent Digest, tokens []uint32, keys []Key) (Digest, error) {
	if len(keys) > 0 {
		return Digest{}, ErrKeys
	}
	h.buf = parent.AppendTo(h.buf[:0])
	for i, t := range tokens {
		h.buf = binary.LittleEndian.AppendUint32(h.buf, t)
		if h.Pairs && i > 0 && i < len(tokens)-1 { // the second of a pair, and the first of the next
			h.buf = binary.LittleEndian.AppendUint32(h.buf, t)
		}
	}
	return h.scheme.sum(h.buf), nil
}
