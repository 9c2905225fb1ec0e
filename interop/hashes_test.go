package interop_test

import (
	"encoding/hex"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"kvstrata/event"
	"kvstrata/event/enginehash"
	"kvstrata/indexer/prefix"
)

// hashRequest is a request as hash_blocks.py takes it.
type hashRequest struct {
	Algo      string   `json:"algo"`
	Seed      string   `json:"seed"`
	BlockSize int      `json:"block_size"`
	Tokens    []uint32 `json:"tokens"`
	LoRA      string   `json:"lora,omitempty"`
	Salt      string   `json:"salt,omitempty"`
	Embeds    []string `json:"embeds,omitempty"`
	Items     [][3]any `json:"items,omitempty"` // identifier, offset, length
}

// hashAnswer is what vLLM makes of one.
type hashAnswer struct {
	Digests []string
	Ints    []uint64
	Keys    []string
}

// hash has vLLM hash a request.
func (p *python) hash(r *hashRequest) (a hashAnswer) {
	p.t.Helper()
	p.write(r)
	p.read(&a)
	return a
}

// drawText returns a text of a length and of letters that differ in how they are written, or that vLLM uses itself.
func drawText(rng *rand.Rand) string {
	switch rng.IntN(6) {
	case 0:
		return ""
	case 1:
		return string([]rune("aé€😀")[rng.IntN(4)])
	case 2:
		return []string{"mm", "lora", "cache_salt", "prompt_embeds"}[rng.IntN(4)]
	case 3:
		return strings.Repeat("é", 120+rng.IntN(16)) // around 255 bytes
	default:
		return fmt.Sprintf("item-%d", rng.IntN(3))
	}
}

func drawTokens(rng *rand.Rand, n int) []uint32 {
	tokens := make([]uint32, n)
	for i := range tokens {
		tokens[i] = rng.Uint32() >> rng.IntN(32)
	}
	return tokens
}

func drawHashRequest(rng *rand.Rand, algo string) *hashRequest {
	r := &hashRequest{Algo: algo, Seed: []string{"0", "random", "4294967295"}[rng.IntN(3)], BlockSize: []int{1, 2, 3, 4, 16, 64}[rng.IntN(6)]}
	r.Tokens = drawTokens(rng, r.BlockSize*rng.IntN(5)+rng.IntN(r.BlockSize))
	if rng.IntN(3) == 0 {
		r.LoRA = drawText(rng)
	}
	if rng.IntN(3) == 0 {
		r.Salt = drawText(rng)
	}
	if rng.IntN(4) == 0 {
		for range len(r.Tokens) / r.BlockSize {
			r.Embeds = append(r.Embeds, fmt.Sprintf("%064x", rng.Uint64()))
		}
	}
	for offset := rng.IntN(20); offset < len(r.Tokens) && rng.IntN(4) > 0; offset += rng.IntN(8) {
		length := 1 + rng.IntN(40)
		r.Items = append(r.Items, [3]any{drawText(rng), offset, length})
		offset += length
	}
	return r
}

// TestHashesOfRandomRequests has vLLM hash requests and hashes them again, from the tokens and extra keys that its events
// would carry.
func TestHashesOfRandomRequests(t *testing.T) {
	eachVersion(t, func(t *testing.T, v version) {
		seed := rand.Uint64()
		rng := rand.New(rand.NewPCG(seed, 0))
		p := v.start(t, "hash_blocks.py")
		blocks, keyed := 0, 0
		for _, algo := range []string{"sha256", "sha256_cbor", "xxhash", "xxhash_cbor"} {
			for range 150 {
				r := drawHashRequest(rng, algo)
				a := p.hash(r)
				blocks += len(a.Digests)
				keyed += compareHashes(t, v, r, &a)
				if t.Failed() {
					t.Fatalf("seed %d: %+v", seed, r)
				}
			}
		}
		if blocks < 500 || keyed < 100 {
			t.Errorf("only %d blocks, %d of them with extra keys", blocks, keyed)
		}
	})
}

// compareHashes hashes a request's blocks and returns how many had extra keys.
func compareHashes(t *testing.T, v version, r *hashRequest, a *hashAnswer) (keyed int) {
	t.Helper()
	recipe, err := enginehash.ParseRecipe(r.Algo, r.Seed)
	if err != nil {
		t.Fatal(err)
	}
	form := enginehash.Plain
	if v.name == "new" {
		form = enginehash.Tagged
	}
	if want := len(r.Tokens) / r.BlockSize; len(a.Digests) != want {
		t.Fatalf("%d blocks, want %d", len(a.Digests), want)
	}
	h := enginehash.NewHasher(recipe.Scheme, form)
	chain, hasChain := recipe.Chain(form, r.Tokens, r.BlockSize, r.LoRA, r.Salt)
	parent := recipe.Root
	for i := range a.Digests {
		var keys []enginehash.Key
		if i < len(a.Keys) {
			msgpack, err := hex.DecodeString(a.Keys[i])
			if err != nil {
				t.Fatal(err)
			}
			if keys, err = enginehash.DecodeKeys(nil, msgpack, r.LoRA, i == 0); err != nil {
				t.Fatal(err)
			}
		}
		for j := range keys {
			if keys[j].Kind == enginehash.KeyLoRA && form == enginehash.Tagged {
				keys[j].Path = "/loras/" + r.LoRA // as hash_blocks.py has it; events do not tell it
			}
		}
		if len(keys) > 0 {
			keyed++
		}
		d, err := h.Block(parent, r.Tokens[i*r.BlockSize:(i+1)*r.BlockSize], keys)
		if err != nil {
			t.Fatal(err)
		}
		if d.String() != a.Digests[i] || recipe.Scheme.Int(d) != a.Ints[i] {
			t.Errorf("block %d: %v, want %s; keys %+v", i, d, a.Digests[i], keys)
			return keyed
		}
		if hasChain && len(r.Items) == 0 && len(r.Embeds) == 0 {
			if next, more := chain.Next(); !more || next != d {
				t.Errorf("block %d of the chain: %v, want %v", i, next, d)
			}
		}
		parent = d
	}
	return keyed
}

// TestPromptsFindBlocksWithoutTokens: vLLM hashes a prompt and publishes its first blocks with tokens, and the others as its
// offloading connector does, without. The scheme is found from the first, and a lookup by tokens finds all.
func TestPromptsFindBlocksWithoutTokens(t *testing.T) {
	eachVersion(t, func(t *testing.T, v version) {
		for _, algo := range []string{"sha256", "xxhash_cbor"} {
			t.Run(algo, func(t *testing.T) {
				t.Parallel()
				tokens := prompt(3, 6*16)
				a := v.start(t, "hash_blocks.py").hash(&hashRequest{Algo: algo, Seed: "0", BlockSize: 16, Tokens: tokens})
				e := startVLLM(t, v, args{})
				r := newRig(t)
				r.listen(quiet(), e)
				e.publish(stored(run{tokens: tokens[:32]}, ints(a.Ints[:2]...)...), offloaded(event.CPU, ints(a.Ints[2:5]...)...))
				eventually(t, "the prompt's blocks", func() error {
					answer, err := r.sink.index.Lookup(&prefix.Request{Model: model, Tokens: tokens})
					if err != nil {
						return err
					}
					if m := answer.Matches[0]; m.Blocks != 5 || m.DeviceBlocks != 2 || m.MatchedBy != "engine_hash" {
						return fmt.Errorf("got %+v", m)
					}
					return nil
				})
				if st := r.sink.status(); st.HashScheme != algo || st.HashSeed != "0" {
					t.Errorf("status: scheme %q, seed %q", st.HashScheme, st.HashSeed)
				}
			})
		}
	})
}
