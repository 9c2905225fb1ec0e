package enginehash

import (
	"fmt"
	"strconv"
)

// Form is how extra keys enter vLLM's hash.
type Form uint8

// The forms.
const (
	Plain  Form = 1 + iota // as events tell them: until vLLM 0.30
	Tagged                 // each in a tuple with its kind before it, an adapter with its path: since vLLM 0.31
)

var formNames = [...]string{Plain: "plain", Tagged: "tagged"}

func (f Form) String() string {
	if f > 0 && int(f) < len(formNames) {
		return formNames[f]
	}
	return "Form(" + strconv.Itoa(int(f)) + ")"
}

// KeyKind is what an extra key tells of a block.
type KeyKind uint8

// The kinds, in vLLM's order.
const (
	KeyLoRA       KeyKind = 1 + iota // adapter name
	KeyItem                          // multimodal item: its identifier, and where it begins relative to the block
	KeyIdentifier                    // multimodal item of releases before vLLM 0.18 or so: its identifier alone
	KeySalt                          // cache salt, of first blocks only
	KeyEmbeds                        // SHA-256 of the block's prompt embeddings
)

// Key is one extra key of a block: what beside its tokens decides its content.
type Key struct {
	Kind   KeyKind
	Text   string // name, identifier, salt; of KeyEmbeds the digest's bytes
	Path   string // of an adapter, where the form is Tagged; events do not tell it
	Offset int64  // of a KeyItem: negative when it began in an earlier block
}

// tag is a word by which the tagged form tells kinds apart.
type tag uint8

const (
	tagLoRA tag = iota
	tagItem
	tagSalt
	tagEmbeds
)

var tagNames = [...]string{tagLoRA: "lora", tagItem: "mm", tagSalt: "cache_salt", tagEmbeds: "prompt_embeds"}

func (k *Key) tag() tag {
	switch k.Kind {
	case KeyLoRA:
		return tagLoRA
	case KeySalt:
		return tagSalt
	case KeyEmbeds:
		return tagEmbeds
	default:
		return tagItem
	}
}

// width returns how many values the tuple has that a key is, and 0 for a key that is no tuple.
func (k *Key) width(form Form) int {
	switch {
	case form == Tagged && (k.Kind == KeyLoRA || k.Kind == KeyItem):
		return 3
	case form == Tagged || k.Kind == KeyItem:
		return 2
	default:
		return 0
	}
}

// maxKeys bounds the extra keys of one block; vLLM sends a handful.
const maxKeys = 1024

// DecodeKeys appends to dst the extra keys of one block as events carry them (nil, or a msgpack array), plain or tagged.
// lora is the event's adapter name, and root says that the block has no parent: plain keys do not tell adapters,
// identifiers and salts apart. The first text is the adapter's name if it is equal; of a root the last one counts as the
// salt; any other is an identifier. The plain hash is the same whichever it is.
func DecodeKeys(dst []Key, msgpack []byte, lora string, root bool) ([]Key, error) {
	if len(msgpack) == 0 {
		return dst, nil
	}
	first, salt := len(dst), -1
	r := reader{b: msgpack}
	if r.isNil() {
		return dst, r.end()
	}
	n := r.array()
	if n > maxKeys {
		return dst[:first], fmt.Errorf("decode extra keys: %w: %d of them", ErrKeys, n)
	}
	for i := 0; i < n && r.err == nil; i++ {
		k := r.key()
		if k.Kind == KeyIdentifier {
			switch {
			case i == 0 && lora != "" && k.Text == lora:
				k.Kind = KeyLoRA
			case root:
				salt = len(dst)
			}
		}
		dst = append(dst, k)
	}
	if err := r.end(); err != nil {
		return dst[:first], fmt.Errorf("decode extra keys: %w", err)
	}
	if salt >= 0 {
		dst[salt].Kind = KeySalt
	}
	return dst, nil
}

// key reads one extra key.
func (r *reader) key() Key {
	switch r.kind() {
	case kindText:
		return Key{Kind: KeyIdentifier, Text: r.text()}
	case kindBytes:
		return Key{Kind: KeyEmbeds, Text: r.bytes()}
	case kindArray:
		return r.tuple()
	default:
		r.fail(ErrKeys)
		return Key{}
	}
}

// tuple reads (identifier, offset), or a tagged key.
func (r *reader) tuple() Key {
	n := r.array()
	if n < 2 || n > 3 || r.kind() != kindText {
		r.fail(ErrKeys)
		return Key{}
	}
	word := r.text()
	if n == 2 {
		switch kind := r.kind(); {
		case kind == kindInt:
			return Key{Kind: KeyItem, Text: word, Offset: r.int()}
		case kind == kindText && word == tagNames[tagSalt]:
			return Key{Kind: KeySalt, Text: r.text()}
		case kind == kindBytes && word == tagNames[tagEmbeds]:
			return Key{Kind: KeyEmbeds, Text: r.bytes()}
		}
		r.fail(ErrKeys)
		return Key{}
	}
	if r.kind() != kindText {
		r.fail(ErrKeys)
		return Key{}
	}
	text := r.text()
	switch kind := r.kind(); {
	case word == tagNames[tagItem] && kind == kindInt:
		return Key{Kind: KeyItem, Text: text, Offset: r.int()}
	case word == tagNames[tagLoRA] && kind == kindText:
		return Key{Kind: KeyLoRA, Text: text, Path: r.text()}
	}
	r.fail(ErrKeys)
	return Key{}
}
