package lmcache

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"strings"
	"unicode/utf8"
)

// MaxKey is the room for a key in a request, in bytes.
const MaxKey = 150

// Command is what a request asks for (lmcache/v1/protocol.py, ClientCommand).
type Command int32

// The commands. A PUT has no reply; LMCache's server does not answer a LIST at all.
const (
	Put Command = 1 + iota
	Get
	Exist
	List
	Health
)

var commandNames = []string{Put: "PUT", Get: "GET", Exist: "EXIST", List: "LIST", Health: "HEALTH"}

func (c Command) String() string {
	if c >= Put && c <= Health {
		return commandNames[c]
	}
	return fmt.Sprintf("Command(%d)", int32(c))
}

// Code is a reply's outcome (ServerReturnCode).
type Code int32

// The codes.
const (
	Success Code = 200
	Fail    Code = 400
)

func (c Code) String() string {
	switch c {
	case Success:
		return "SUCCESS"
	case Fail:
		return "FAIL"
	default:
		return fmt.Sprintf("Code(%d)", int32(c))
	}
}

// Protocol is a version of the frames. Nothing on the wire tells it: both sides are configured alike.
type Protocol uint8

// The versions.
const (
	V0 Protocol = iota // 2024: command, length, key; code, length
	V1                 // since 2025: also format, element type, shape and location
)

// ParseProtocol reads v0 or v1.
func ParseProtocol(text string) (Protocol, error) {
	switch text {
	case "v0":
		return V0, nil
	case "v1":
		return V1, nil
	default:
		return 0, fmt.Errorf("protocol %q: want v0 or v1", text)
	}
}

func (p Protocol) String() string { return fmt.Sprintf("v%d", uint8(p)) }

// RequestBytes returns the length of a request, without the value that follows a PUT.
func (p Protocol) RequestBytes() int {
	if p == V0 {
		return 2*4 + MaxKey
	}
	return 9*4 + MaxKey
}

// ReplyBytes returns the length of a reply, without the value that follows a GET's.
func (p Protocol) ReplyBytes() int {
	if p == V0 {
		return 2 * 4
	}
	return 9 * 4
}

// Content says what a value's bytes mean. Version 0 does not carry it.
type Content struct {
	Format Format
	DType  DType
	Shape  [4]int32 // what has fewer dimensions ends with zeros
}

// noContent is what LMCache's client and server write where no value is meant.
var noContent = Content{Format: KV2LTD, DType: Float16}

// Request is a client's frame.
type Request struct {
	Command  Command
	Length   int // bytes that follow, of a PUT
	Content  Content
	Location int32 // of LMCache's own peers: 0 none, 1 LocalCPUBackend, 2 LocalDiskBackend
	Key      string
}

// Reply is a server's frame.
type Reply struct {
	Code     Code
	Length   int // bytes that follow, of a GET's
	Content  Content
	Location int32
}

var (
	errKeyLong = fmt.Errorf("key of more than %d bytes", MaxKey)
	errFrame   = errors.New("not a frame of this protocol")
)

// checkKey wants a key that fits and that the other side reads as it is: LMCache strips white space around it.
func checkKey(key string) error {
	switch {
	case key == "" || strings.TrimSpace(key) != key || !utf8.ValidString(key):
		return fmt.Errorf("key %q: want text without space around it", key)
	case len(key) > MaxKey:
		return fmt.Errorf("key %q: %w", key, errKeyLong)
	}
	return nil
}

// AppendRequest appends a request's frame.
func (p Protocol) AppendRequest(dst []byte, r *Request) ([]byte, error) {
	if err := checkKey(r.Key); err != nil {
		return dst, err
	}
	if r.Length < 0 || r.Length > math.MaxInt32 {
		return dst, fmt.Errorf("%v %s: %d bytes: the frame has 31 bits for the length", r.Command, r.Key, r.Length)
	}
	le := binary.LittleEndian
	dst = le.AppendUint32(dst, uint32(r.Command))
	dst = le.AppendUint32(dst, uint32(r.Length))
	if p != V0 {
		dst = le.AppendUint32(dst, uint32(r.Content.Format))
		dst = le.AppendUint32(dst, uint32(r.Content.DType))
		dst = le.AppendUint32(dst, uint32(r.Location))
		dst = appendShape(dst, r.Content.Shape)
	}
	dst = append(dst, r.Key...)
	for range MaxKey - len(r.Key) {
		dst = append(dst, ' ')
	}
	return dst, nil
}

// ParseRequest reads a frame. It wants what LMCache's server wants: numbers that it knows, and a length that is none
// below 0.
func (p Protocol) ParseRequest(b []byte) (Request, error) {
	var r Request
	if len(b) != p.RequestBytes() {
		return r, fmt.Errorf("request of %d bytes: %w", len(b), errFrame)
	}
	n := ints(b)
	r.Command = Command(n.next())
	length := n.next()
	if p == V0 {
		r.Content = noContent
	} else {
		r.Content.Format, r.Content.DType = Format(n.next()), DType(n.next())
		r.Location = n.next()
		r.Content.Shape = n.shape()
	}
	if r.Command < Put || r.Command > Health || length < 0 || !r.Content.valid() || r.Location < 0 || r.Location > 2 {
		return r, fmt.Errorf("request %d, %d bytes, format %d, element type %d, location %d: %w", int32(r.Command), length, int32(r.Content.Format), int32(r.Content.DType), r.Location, errFrame)
	}
	r.Length = int(length)
	r.Key = strings.TrimSpace(string(n))
	return r, checkKey(r.Key)
}

// AppendReply appends a reply's frame.
func (p Protocol) AppendReply(dst []byte, r *Reply) []byte {
	le := binary.LittleEndian
	dst = le.AppendUint32(dst, uint32(r.Code))
	dst = le.AppendUint32(dst, uint32(r.Length))
	if p == V0 {
		return dst
	}
	dst = le.AppendUint32(dst, uint32(r.Content.Format))
	dst = le.AppendUint32(dst, uint32(r.Content.DType))
	dst = appendShape(dst, r.Content.Shape)
	return le.AppendUint32(dst, uint32(r.Location)) // in a request it stands before the shape
}

// ParseReply reads a frame. What a server says of the content is taken as it is: whoever wanted a value compares.
func (p Protocol) ParseReply(b []byte) (Reply, error) {
	var r Reply
	if len(b) != p.ReplyBytes() {
		return r, fmt.Errorf("reply of %d bytes: %w", len(b), errFrame)
	}
	n := ints(b)
	r.Code = Code(n.next())
	length := n.next()
	if r.Code != Success && r.Code != Fail || length < 0 {
		return r, fmt.Errorf("reply %d, %d bytes: %w", int32(r.Code), length, errFrame)
	}
	r.Length = int(length)
	if p != V0 {
		r.Content.Format, r.Content.DType = Format(n.next()), DType(n.next())
		r.Content.Shape = n.shape()
		r.Location = n.next()
	}
	return r, nil
}

// valid reports whether LMCache knows the numbers.
func (c *Content) valid() bool {
	for _, n := range c.Shape {
		if n < 0 {
			return false
		}
	}
	return c.Format.Valid() && c.DType.Valid()
}

// ints are the int32s of a frame, little-endian as LMCache's hosts are.
type ints []byte

func (n *ints) next() int32 {
	v := int32(binary.LittleEndian.Uint32(*n))
	*n = (*n)[4:]
	return v
}

func (n *ints) shape() (s [4]int32) {
	for i := range s {
		s[i] = n.next()
	}
	return s
}

func appendShape(dst []byte, shape [4]int32) []byte {
	for _, n := range shape {
		dst = binary.LittleEndian.AppendUint32(dst, uint32(n))
	}
	return dst
}
