package subscriber

import (
	"bytes"
	"encoding/json"
	"errors"
	"slices"
	"strconv"
	"strings"

	"kvstrata/event"
)

// jsonObject is an object of a JSON dialect, its values unread.
type jsonObject map[string]json.RawMessage

// object reads an object, and counts and forgets keys that are not among the known ones. path is where it stands.
func (d *Decoder) object(raw []byte, path string, known ...string) (jsonObject, error) {
	var o jsonObject
	if err := json.Unmarshal(raw, &o); err != nil {
		return nil, jsonError(path, err)
	}
	for key := range o {
		if slices.Contains(known, key) {
			d.sight.name(strings.TrimPrefix(path+"."+key, "."))
			continue
		}
		d.odd("unknown field", path, []byte(key))
		delete(o, key)
	}
	return o, nil
}

// field reads the value of a key into v; where there is none, or null, v stays as it is.
func (o jsonObject) field(path, key string, v any) error {
	raw, ok := o[key]
	if !ok || string(raw) == "null" {
		return nil
	}
	if err := json.Unmarshal(raw, v); err != nil {
		return jsonError(path+"."+key, err)
	}
	return nil
}

// value is a key, and what its value is read into.
type value struct {
	key  string
	into any
}

// fields reads several keys, as field does, up to the first that can't be read.
func (o jsonObject) fields(path string, values ...value) error {
	for _, v := range values {
		if err := o.field(path, v.key, v.into); err != nil {
			return err
		}
	}
	return nil
}

// jsonError tells where JSON is not as it should be, by shape and never by value.
func jsonError(path string, err error) error {
	var syntax *json.SyntaxError
	var typ *json.UnmarshalTypeError
	switch {
	case errors.As(err, &syntax):
		return &DecodeError{Path: path, Offset: int(syntax.Offset), Reason: "no JSON"}
	case errors.As(err, &typ):
		return &DecodeError{Path: path, Offset: int(typ.Offset), Reason: "another type than its dialect's"}
	default:
		return &DecodeError{Path: path, Reason: "another type than its dialect's"}
	}
}

// jsonHash is a block hash in JSON: an integer of either sign, or bytes in hexadecimal, in quotes.
type jsonHash struct{ event.BlockHash }

var errNoHash = errors.New("neither an integer of 64 bits nor bytes in hexadecimal")

// UnmarshalJSON reads a hash.
func (h *jsonHash) UnmarshalJSON(raw []byte) (err error) {
	if text, quoted := bytes.CutPrefix(raw, []byte{'"'}); quoted {
		if h.BlockHash, err = event.ParseBlockHash(string(bytes.TrimSuffix(text, []byte{'"'}))); err != nil {
			return errNoHash // without the value
		}
		return nil
	}
	n, err := strconv.ParseUint(string(raw), 10, 64)
	if err != nil {
		signed, err := strconv.ParseInt(string(raw), 10, 64)
		if err != nil {
			return errNoHash
		}
		n = uint64(signed)
	}
	h.BlockHash = event.IntHash(n)
	return nil
}

// jsonBlocks returns blocks of some hashes.
func (d *Decoder) jsonBlocks(hashes []jsonHash) []event.Block {
	blocks := make([]event.Block, len(hashes))
	for i, h := range hashes {
		if n, ok := h.Int(); ok {
			d.sight.number(n, false)
		} else {
			d.sight.bytes(h.Len())
		}
		blocks[i] = event.Block{Hash: h.BlockHash, Copies: -1, Age: -1}
	}
	return blocks
}
