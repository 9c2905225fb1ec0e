package lmcache

import (
	"errors"
	"fmt"
	"strconv"
	"strings"

	"kvstrata/event"
)

// Key names a chunk of one worker (lmcache/utils.py, CacheEngineKey of 0.5): model@world_size@worker_id@hash@dtype, the
// hash in hexadecimal without leading zeros, and behind it @tag%value for each tag.
type Key struct {
	Model  string
	World  int // workers that share a model's heads; 1 when all hold the same (MLA)
	Worker int
	Hash   event.BlockHash
	Signed bool // the hash is one of Python's own, which may be negative and are written with a sign
	DType  DType
	Layer  int // of a key that names one layer, when HasLayer
	Tags   []Tag

	HasLayer bool
}

// Tag is one of LMCache's lmcache.tag.NAME of a request.
type Tag struct{ Name, Value string }

// Append appends the key's text.
func (k *Key) Append(dst []byte) []byte {
	dst = append(dst, k.Model...)
	dst = append(dst, '@')
	dst = strconv.AppendInt(dst, int64(k.World), 10)
	dst = append(dst, '@')
	dst = strconv.AppendInt(dst, int64(k.Worker), 10)
	dst = append(dst, '@')
	switch n, ok := k.Hash.Int(); {
	case !ok: // LMCache writes bytes as they are
		dst = append(dst, k.Hash.String()...)
	case k.Signed:
		dst = strconv.AppendInt(dst, int64(n), 16)
	default:
		dst = strconv.AppendUint(dst, n, 16)
	}
	dst = append(dst, '@')
	dst = append(dst, k.DType.String()...)
	if k.HasLayer {
		dst = append(dst, '@')
		dst = strconv.AppendInt(dst, int64(k.Layer), 10)
	}
	for _, t := range k.Tags {
		dst = append(dst, '@')
		dst = append(dst, t.Name...)
		dst = append(dst, '%')
		dst = append(dst, t.Value...)
	}
	return dst
}

// String returns the key's text.
func (k *Key) String() string { return string(k.Append(nil)) }

var errKey = errors.New("want model@world_size@worker_id@hash@dtype")

// ParseKey reads a key's text. A hash of more than 16 digits is one of bytes.
func ParseKey(text string) (Key, error) {
	var k Key
	parts := strings.Split(text, "@")
	bad := func() (Key, error) { return Key{}, fmt.Errorf("key %q: %w", text, errKey) }
	if len(parts) < 5 || parts[0] == "" {
		return bad()
	}
	k.Model = parts[0]
	for i, n := range []*int{&k.World, &k.Worker} {
		v, err := strconv.ParseUint(parts[1+i], 10, 31)
		if err != nil {
			return bad()
		}
		*n = int(v)
	}
	if err := k.parseHash(parts[3]); err != nil {
		return bad()
	}
	for d := Float16; d.Valid(); d++ { // Half is Float16 by another number
		if d.String() == parts[4] {
			k.DType = d
		}
	}
	if k.DType == NoDType {
		return bad()
	}
	rest := parts[5:]
	if len(rest) > 0 {
		if n, err := strconv.ParseUint(rest[0], 10, 31); err == nil {
			k.Layer, k.HasLayer, rest = int(n), true, rest[1:]
		}
	}
	for _, part := range rest {
		name, value, ok := strings.Cut(part, "%")
		if !ok {
			return bad()
		}
		k.Tags = append(k.Tags, Tag{name, value})
	}
	return k, nil
}

func (k *Key) parseHash(text string) error {
	if strings.HasPrefix(text, "-") {
		n, err := strconv.ParseInt(text, 16, 64)
		k.Hash, k.Signed = event.IntHash(uint64(n)), true
		return err
	}
	if len(text) <= 16 {
		n, err := strconv.ParseUint(text, 16, 64)
		k.Hash = event.IntHash(n)
		return err
	}
	var err error
	k.Hash, err = event.ParseBlockHash(text)
	return err
}
