package enginehash

import (
	"encoding/binary"
	"math"
)

// Major types of CBOR (RFC 8949), and its null.
const (
	cborUint   = 0 << 5
	cborNegate = 1 << 5
	cborBytes  = 2 << 5
	cborText   = 3 << 5
	cborArray  = 4 << 5
	cborNull   = 0xf6
)

// appendCBOR appends a block as canonical CBOR: [parent, [tokens…], extra keys or null].
func appendCBOR(dst []byte, parent Digest, tokens []uint32, keys []Key, form Form) []byte {
	dst = appendCBORHead(dst, cborArray, 3)
	dst = appendCBORHead(dst, cborBytes, uint64(parent.n))
	dst = append(dst, parent.b[:parent.n]...)
	dst = appendCBORHead(dst, cborArray, uint64(len(tokens)))
	for _, t := range tokens {
		dst = appendCBORHead(dst, cborUint, uint64(t))
	}
	if len(keys) == 0 {
		return append(dst, cborNull)
	}
	dst = appendCBORHead(dst, cborArray, uint64(len(keys)))
	for i := range keys {
		dst = appendCBORKey(dst, &keys[i], form)
	}
	return dst
}

func appendCBORKey(dst []byte, k *Key, form Form) []byte {
	if n := k.width(form); n > 0 {
		dst = appendCBORHead(dst, cborArray, uint64(n))
	}
	if form == Tagged {
		dst = appendCBORText(dst, tagNames[k.tag()])
	}
	if k.Kind == KeyEmbeds {
		dst = appendCBORHead(dst, cborBytes, uint64(len(k.Text)))
		return append(dst, k.Text...)
	}
	dst = appendCBORText(dst, k.Text)
	switch {
	case k.Kind == KeyLoRA && form == Tagged:
		dst = appendCBORText(dst, k.Path)
	case k.Kind == KeyItem && k.Offset < 0:
		dst = appendCBORHead(dst, cborNegate, uint64(-1-k.Offset))
	case k.Kind == KeyItem:
		dst = appendCBORHead(dst, cborUint, uint64(k.Offset))
	}
	return dst
}

func appendCBORText(dst []byte, s string) []byte {
	return append(appendCBORHead(dst, cborText, uint64(len(s))), s...)
}

// appendCBORHead appends a type with its argument in the fewest bytes.
func appendCBORHead(dst []byte, major byte, n uint64) []byte {
	switch {
	case n < 24:
		return append(dst, major|byte(n))
	case n <= math.MaxUint8:
		return append(dst, major|24, byte(n))
	case n <= math.MaxUint16:
		return append(dst, major|25, byte(n>>8), byte(n))
	case n <= math.MaxUint32:
		return binary.BigEndian.AppendUint32(append(dst, major|26), uint32(n))
	default:
		return binary.BigEndian.AppendUint64(append(dst, major|27), n)
	}
}
