// Package enginehash computes what engines call their blocks: vLLM's block hashes under each of its algorithms, and
// SGLang's. With it a prompt finds blocks that an engine told without tokens, and a source's hashes can be checked
// against the tokens that it tells.
//
// A [Hasher] makes one block's [Digest] from the digest before it, the tokens and the extra keys ([Key]). A [Recipe] is
// an algorithm with a root, which decides every hash of a source; a [Chain] hashes a prompt by it. A [Verifier] finds the
// recipe of a source from what it tells, and goes on comparing.
//
// What is computed was compared with vLLM 0.11.2, 0.23.0, 0.25.1 and 0.32.0 and SGLang 0.5.13 and 0.5.23
// (docs/engine-hashes.md says what can't be computed). The package is pure: no I/O, no clock, no logger.
package enginehash

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"strings"

	"kvstrata/event"

	"github.com/zeebo/xxh3"
)

// Scheme is how an engine turns a block into a digest, and a digest into the integer that its events carry.
type Scheme uint8

// The schemes, by the names of vLLM's --prefix-caching-hash-algo.
const (
	SHA256     Scheme = 1 + iota // SHA-256 over pickle protocol 5; vLLM's default
	SHA256CBOR                   // SHA-256 over canonical CBOR
	XXHash                       // XXH3-128 over pickle protocol 5
	XXHashCBOR                   // XXH3-128 over canonical CBOR
	SGLang                       // SHA-256 over the digest before and the tokens as u32 LE
)

var schemeNames = [...]string{
	SHA256: "sha256", SHA256CBOR: "sha256_cbor", XXHash: "xxhash", XXHashCBOR: "xxhash_cbor", SGLang: "sglang",
}

// Schemes lists all schemes.
func Schemes() []Scheme { return []Scheme{SHA256, SHA256CBOR, XXHash, XXHashCBOR, SGLang} }

func (s Scheme) String() string {
	if s.known() {
		return schemeNames[s]
	}
	return fmt.Sprintf("Scheme(%d)", uint8(s))
}

func (s Scheme) known() bool { return s > 0 && int(s) < len(schemeNames) }

// MarshalText writes the scheme's name.
func (s Scheme) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// UnmarshalText reads a scheme's name.
func (s *Scheme) UnmarshalText(text []byte) (err error) {
	*s, err = ParseScheme(string(text))
	return err
}

// ParseScheme reads a scheme's name.
func ParseScheme(name string) (Scheme, error) {
	for i := SHA256; i <= SGLang; i++ {
		if schemeNames[i] == name {
			return i, nil
		}
	}
	return 0, fmt.Errorf("hash scheme %q: want one of %s", name, strings.Join(schemeNames[1:], ", "))
}

// isPickled says whether blocks are serialized by pickle; otherwise, but for SGLang, it is CBOR.
func (s Scheme) isPickled() bool { return s == SHA256 || s == XXHash }

// Size returns how many bytes a digest has.
func (s Scheme) Size() int {
	if s == XXHash || s == XXHashCBOR {
		return 16
	}
	return 32
}

// sum hashes a serialized block.
func (s Scheme) sum(data []byte) Digest {
	if s.Size() == 16 {
		d := Digest{n: 16}
		sum := xxh3.Hash128(data).Bytes()
		copy(d.b[:], sum[:])
		return d
	}
	return Digest{b: sha256.Sum256(data), n: 32}
}

// Digest is a block's full hash, which the next block's is made of; events carry 8 bytes of it, or all. The zero value
// is no digest: the parent of SGLang's first block.
type Digest struct {
	b [32]byte
	n uint8
}

// ParseDigest returns the digest of 1 to 32 bytes.
func ParseDigest(b []byte) (Digest, error) {
	if len(b) == 0 || len(b) > 32 {
		return Digest{}, fmt.Errorf("digest of %d bytes: want 1 to 32", len(b))
	}
	d := Digest{n: uint8(len(b))}
	copy(d.b[:], b)
	return d, nil
}

// IsZero reports whether it is no digest.
func (d Digest) IsZero() bool { return d.n == 0 }

// AppendTo appends the digest's bytes.
func (d Digest) AppendTo(dst []byte) []byte { return append(dst, d.b[:d.n]...) }

// String returns the digest in hexadecimal.
func (d Digest) String() string { return hex.EncodeToString(d.b[:d.n]) }

// Int returns the integer by which events name a digest: of vLLM its last 8 bytes, of SGLang its first, big-endian.
// SGLang's are signed; this is their bit pattern.
func (s Scheme) Int(d Digest) uint64 {
	if s == SGLang || d.n < 8 {
		return binary.BigEndian.Uint64(d.b[:8])
	}
	return binary.BigEndian.Uint64(d.b[d.n-8 : d.n])
}

// Name returns what an engine calls the block with a digest when its events carry integers.
func (s Scheme) Name(d Digest) event.BlockHash { return event.IntHash(s.Int(d)) }

// FullName returns what an engine calls it when its events carry whole digests (VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0).
func (d Digest) FullName() event.BlockHash { return event.BytesHash(string(d.b[:d.n])) }

// Is reports whether an engine's hash, an integer or a whole digest, is that of the digest d.
func (s Scheme) Is(h event.BlockHash, d Digest) bool {
	if n, isInt := h.Int(); isInt {
		return n == s.Int(d)
	}
	var room [33]byte
	if h.Len() > 32 {
		return false
	}
	return string(h.AppendTo(room[:0])) == string(d.b[:d.n])
}

// digestOf returns the digest that an engine's hash is, when its events carry whole ones.
func (s Scheme) digestOf(h event.BlockHash) (d Digest, ok bool) {
	if _, isInt := h.Int(); isInt || h.Len() != s.Size() {
		return Digest{}, false
	}
	h.AppendTo(d.b[:0])
	d.n = uint8(s.Size())
	return d, true
}
