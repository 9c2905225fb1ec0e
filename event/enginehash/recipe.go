package enginehash

import (
	"encoding/hex"
	"fmt"
	"strings"
)

// DefaultSeed is what vLLM (since its #51875) derives the root from under sha256 and sha256_cbor when PYTHONHASHSEED is
// not set. Before, and under xxhash and xxhash_cbor to this day, the root is random then.
const DefaultSeed = "vllm-none-hash"

// rawRoot introduces a root that is given in hexadecimal. No PYTHONHASHSEED begins so: Python takes numbers and "random".
const rawRoot = "root:"

// sglangSalt stands before the cache salt that SGLang's root is made of.
const sglangSalt = "sglang-cache-salt-v1\x00"

// Root returns vLLM's root hash, the parent of first blocks (its NONE_HASH), for a seed as PYTHONHASHSEED has it. SGLang
// has none, and no seed.
func (s Scheme) Root(seed string) Digest {
	switch {
	case s == SGLang:
		return Digest{}
	case s.isPickled():
		p := pickle{}
		p.begin(nil)
		p.text(seed)
		return s.sum(p.end())
	default:
		return s.sum(appendCBORText(nil, seed))
	}
}

// SaltedRoot returns SGLang's root under a cache salt (since its #30827).
func SaltedRoot(salt string) Digest { return SGLang.sum(append([]byte(sglangSalt), salt...)) }

// Recipe is all that decides a source's block hashes beside what is in the blocks. The zero value is no recipe.
type Recipe struct {
	Scheme Scheme
	Root   Digest // the parent of first blocks
}

// ParseRecipe returns the recipe of a scheme's name and a seed: what PYTHONHASHSEED is, or "root:" and a root's bytes in
// hexadecimal. An empty seed is [DefaultSeed] under sha256 and sha256_cbor, and wrong under the xxhash pair, whose root is
// random then; SGLang takes none.
func ParseRecipe(scheme, seed string) (Recipe, error) {
	s, err := ParseScheme(scheme)
	if err != nil {
		return Recipe{}, err
	}
	if s == SGLang {
		if seed != "" {
			return Recipe{}, fmt.Errorf("hash seed: %v has none, leave it out", s)
		}
		return Recipe{Scheme: s}, nil
	}
	if text, isRaw := strings.CutPrefix(seed, rawRoot); isRaw {
		raw, err := hex.DecodeString(text)
		if err != nil {
			return Recipe{}, fmt.Errorf("hash seed: what follows %q is no hexadecimal", rawRoot)
		}
		root, err := ParseDigest(raw)
		if err != nil {
			return Recipe{}, fmt.Errorf("hash seed: %w", err)
		}
		return Recipe{s, root}, nil
	}
	if seed == "" {
		if s.Size() == 16 {
			return Recipe{}, fmt.Errorf("hash seed: vLLM's root under %v is random unless PYTHONHASHSEED is set; give that", s)
		}
		seed = DefaultSeed
	}
	return Recipe{s, s.Root(seed)}, nil
}

// start returns the parent of a first block, and whether the salt went into it.
func (r Recipe) start(salt string) (root Digest, salted bool) {
	if r.Scheme == SGLang && salt != "" {
		return SaltedRoot(salt), true
	}
	return r.Root, false
}

// Chain hashes a prompt of text block by block, as far as it is asked.
type Chain struct {
	hasher *Hasher
	tokens []uint32
	size   int
	window int // tokens that a block's hash is made of
	parent Digest
	first  []Key // the first block's
	rest   []Key // every other's
	begun  bool
}

// Chain returns the chain of a prompt, and false where its hashes can't be known: of an adapter whose path is hashed too
// ([Tagged]), or whose number is (SGLang).
func (r Recipe) Chain(form Form, tokens []uint32, size int, lora, salt string) (*Chain, bool) {
	if !r.Scheme.known() || size <= 0 || lora != "" && (form == Tagged || r.Scheme == SGLang) {
		return nil, false
	}
	c := &Chain{hasher: NewHasher(r.Scheme, form), tokens: tokens, size: size, window: size}
	if lora != "" {
		c.rest = []Key{{Kind: KeyLoRA, Text: lora}}
	}
	var salted bool
	c.parent, salted = r.start(salt)
	c.first = c.rest
	if salt != "" && !salted {
		c.first = append(c.first[:len(c.first):len(c.first)], Key{Kind: KeySalt, Text: salt})
	}
	return c, true
}

// Pairs makes it a chain of blocks under EAGLE ([Hasher]), and reports whether the scheme has them. It comes before Next.
func (c *Chain) Pairs() bool {
	if c.hasher.scheme != SGLang {
		return false
	}
	c.hasher.Pairs, c.window = true, c.size+1
	return true
}

// Next returns the digest of the next full block, and false behind the last one.
func (c *Chain) Next() (Digest, bool) {
	if len(c.tokens) < c.window {
		return Digest{}, false
	}
	keys := c.rest
	if !c.begun {
		keys, c.begun = c.first, true
	}
	d, err := c.hasher.Block(c.parent, c.tokens[:c.window], keys)
	if err != nil {
		c.tokens = nil
		return Digest{}, false
	}
	c.tokens, c.parent = c.tokens[c.size:], d
	return d, true
}
