package history

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"kvstrata/event"
)

// Prompt is a prompt whose cached prefix is to be explained, or a request that a connector told of. It is given as tokens, as the prefix hashes
// of its blocks from the first one on, or as a request's name.
type Prompt struct {
	Model   string `json:"model"`
	Engine  string `json:"engine,omitempty"` // only this instance
	LoRA    string `json:"lora_name,omitempty"`
	Salt    string `json:"cache_salt,omitempty"`
	Request string `json:"request,omitempty"` // as loads and transfers name it

	Tokens    []uint32           `json:"token_ids,omitempty"`
	BlockSize uint32             `json:"block_size,omitempty"` // in tokens; 0 = each that history knows
	Eagle     bool               `json:"eagle,omitempty"`      // blocks cover one token more
	Hashes    []event.PrefixHash `json:"prefix_hashes,omitempty"`

	Tier   string    `json:"tier,omitempty"`   // count blocks in this tier only
	At     string    `json:"at,omitempty"`     // a time, or a duration back from now; empty = now
	Others []Variant `json:"others,omitempty"` // under which the same tokens may be there: rows tell neither adapter nor salt
}

// Variant is what decides a block's content beside its tokens.
type Variant struct {
	LoRA string `json:"lora_name,omitempty"`
	Salt string `json:"cache_salt,omitempty"`
}

// Bounds of a prompt.
const (
	maxPromptTokens = 1 << 20
	maxPromptHashes = 1 << 17 // over all block sizes and variants
	maxOthers       = 8
)

// Validate reports every problem at once.
func (p *Prompt) Validate() error {
	var errs []error
	bad := func(name, format string, args ...any) {
		errs = append(errs, fmt.Errorf("%w %s: %s", ErrBadParam, name, fmt.Sprintf(format, args...)))
	}
	given := 0
	for _, has := range []bool{len(p.Tokens) > 0, len(p.Hashes) > 0, p.Request != ""} {
		if has {
			given++
		}
	}
	if given != 1 {
		bad("token_ids, prefix_hashes, request", "give one of them")
	}
	if p.Model == "" && p.Request == "" {
		bad("model", "missing")
	}
	if len(p.Tokens) > maxPromptTokens || len(p.Hashes) > maxPromptHashes {
		bad("token_ids, prefix_hashes", "%d of them; want %d tokens, or %d hashes, at most", max(len(p.Tokens), len(p.Hashes)), maxPromptTokens, maxPromptHashes)
	}
	if len(p.Tokens) == 0 && (p.LoRA != "" || p.Salt != "" || len(p.Others) > 0 || p.Eagle || p.BlockSize != 0) {
		bad("lora_name, cache_salt, others, eagle, block_size", "go with token_ids")
	}
	if p.BlockSize > 1<<16 {
		bad("block_size", "%d: want 65536 at most", p.BlockSize)
	}
	if len(p.Others) > maxOthers {
		bad("others", "%d of them; want %d at most", len(p.Others), maxOthers)
	}
	for _, text := range []string{p.Model, p.Engine, p.Request, p.Tier} {
		if strings.ContainsRune(text, 0) {
			bad("model, engine, request, tier", "one holds a zero byte")
			break
		}
	}
	if p.At != "" {
		if _, err := parseTime(p.At, time.Now()); err != nil {
			bad("at", "%v", err)
		}
	}
	return errors.Join(errs...)
}

// variants are the prompt's own, and those that the same tokens may be there under.
func (p *Prompt) variants() []Variant {
	own := Variant{p.LoRA, p.Salt}
	all := []Variant{own}
	if own != (Variant{}) {
		all = append(all, Variant{})
	}
	for _, v := range p.Others {
		if v != own && (v != Variant{} || own == (Variant{})) {
			all = append(all, v)
		}
	}
	return all
}

// cut is a prompt in blocks of one size.
type cut struct {
	size   uint32 // 0 = not known: the prompt was given as hashes
	hashes []event.PrefixHash
	others [][]event.PrefixHash // of its other variants
}

// cuts hashes a prompt as the index does, in blocks of each size.
func (p *Prompt) cuts(hasher event.Hasher, sizes []uint32) ([]cut, error) {
	if len(p.Hashes) > 0 {
		return []cut{{hashes: p.Hashes}}, nil
	}
	var all []cut
	sum := 0
	for _, size := range sizes {
		c := cut{size: size}
		for i, v := range p.variants() {
			list := event.Prefixes(nil, p.Tokens, int(size), hasher.Seed(v.LoRA, v.Salt), p.Eagle)
			if sum += len(list); sum > maxPromptHashes {
				return nil, fmt.Errorf("%w token_ids: more than %d blocks, over all block sizes and variants; give block_size, or a shorter prompt",
					ErrBadParam, maxPromptHashes)
			}
			if i == 0 {
				c.hashes = list
			} else {
				c.others = append(c.others, list)
			}
		}
		if len(c.hashes) > 0 {
			all = append(all, c)
		}
	}
	return all, nil
}
