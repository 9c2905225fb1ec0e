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

// maxListed bounds how many blocks, or hashes, one event may list.
const maxListed = 1 << 16

// list reads the list of a key into v, unless it is longer than an event's may be.
func (o jsonObject) list(path, key string, v any) error {
	if elements(o[key]) > maxListed {
		return &DecodeError{Path: path + "." + key, Reason: "a list longer than an event's"}
	}
	return o.field(path, key, v)
}

// elements counts the elements of a JSON array, and may count one too many.
func elements(raw []byte) int {
	n, depth, quoted := 1, 0, false
	for i := 0; i < len(raw); i++ {
		switch c := raw[i]; {
		case quoted && c == '\\':
			i++
		case c == '"':
			quoted = !quoted
		case quoted:
		case c == '[' || c == '{':
			depth++
		case c == ']' || c == '}':
			depth--
		case c == ',' && depth == 1:
			n++
		}
	}
	return n
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
type jsonHash struct {
	event.BlockHash
	told     bool
	negative bool
}

var errNoHash = errors.New("neither an integer of 64 bits nor bytes in hexadecimal")

// UnmarshalJSON reads a hash.
func (h *jsonHash) UnmarshalJSON(raw []byte) (err error) {
	h.told = true
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
		n, h.negative = uint64(signed), true
	}
	h.BlockHash = event.IntHash(n)
	return nil
}

// jsonBlocks returns blocks of some hashes, each of which must have been told.
func (d *Decoder) jsonBlocks(path string, hashes ...jsonHash) ([]event.Block, error) {
	blocks := make([]event.Block, len(hashes))
	for i, h := range hashes {
		if !h.told {
			return nil, &DecodeError{Path: path, Reason: "a block without a hash"}
		}
		if n, ok := h.Int(); ok {
			d.sight.number(n, h.negative)
		} else {
			d.sight.bytes(h.Len())
		}
		blocks[i] = event.Block{Hash: h.BlockHash, Copies: -1, Age: -1}
	}
	return blocks, nil
}
