package tcp

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
)

// Every number on the wire is little-endian. A connection begins with a hello and a welcome, each a preamble of 8 bytes and a
// body of at most maxHello; frames follow, each a header of 16 bytes and a body that the kind bounds.
const (
	magic    = 0x5354564b // "KVTS"
	version  = 1
	preamble = 8
	header   = 16

	maxHello   = 1024
	maxName    = 512     // bytes of a request id
	maxEngine  = 255     // bytes of an engine id
	maxParts   = 4096    // of one read
	maxBeats   = 256     // requests of one heartbeat
	maxPayload = 1 << 30 // bytes that one read may answer
	maxText    = 256     // bytes of a refusal's text
	maxMap     = 8 << 20 // bytes of a layout
	maxBody    = 8 + 4 + 2 + maxName + 4*maxParts + maxBeats*(2+maxName)
)

// le is the byte order of the wire.
var le = binary.LittleEndian

// kind says what a frame is.
type kind uint8

const (
	kindProof    kind = 1 + iota // c→s: that the client knows the secret
	kindReady                    // s→c: the handshake's outcome
	kindRead                     // c→s: send parts of a request
	kindData                     // s→c: length, and so many bytes of payload
	kindTrailer                  // s→c: whether the bytes before it count
	kindOpen                     // c→s: wait for a request, and check parts of it
	kindWithdraw                 // c→s: an open on a control connection is not awaited any more
	kindConfirm                  // c→s: does the export still hold from which bytes were copied
	kindDone                     // c→s: the blocks of a request are not needed any more
	kindBeat                     // c→s: the blocks of requests are needed still
	kindAck                      // s→c: answers open, confirm, done, beat
	kindMap                      // s→c: the layout, with the memory's file
)

func (k kind) String() string {
	names := [...]string{
		kindProof: "proof", kindReady: "ready", kindRead: "read", kindData: "data", kindTrailer: "trailer", kindOpen: "open",
		kindWithdraw: "withdraw", kindConfirm: "confirm", kindDone: "done", kindBeat: "beat", kindAck: "ack", kindMap: "map",
	}
	if k >= kindProof && k <= kindMap {
		return names[k]
	}
	return fmt.Sprintf("kind(%d)", uint8(k))
}

// Flags of a read, an open and a trailer.
const (
	flagOrdinal  = 1 << iota // parts are positions in the hold, not physical blocks
	flagChecksum             // the trailer carries, or is to carry, a checksum
)

// status is how the server answers.
type status uint16

const (
	statusOK status = iota
	statusVersion
	statusSecret
	statusEngine
	statusCompatibility
	statusRank
	statusBusy
	statusNotHeld
	statusEnded
	statusForeign
	statusTooLarge
	statusInternal
)

// The reasons for which a peer does not give blocks. Errors of this package wrap them.
var (
	ErrRefused       = errors.New("the peer refused the connection")
	ErrSecret        = fmt.Errorf("%w: secrets differ, or one side has none", ErrRefused)
	ErrEngine        = fmt.Errorf("%w: another engine answers at the address, it may have been restarted", ErrRefused)
	ErrCompatibility = fmt.Errorf("%w: caches are not compatible", ErrRefused)
	ErrRank          = fmt.Errorf("%w: tensor-parallel ranks differ", ErrRefused)
	ErrBusy          = errors.New("the peer has too many connections or waiting reads")
	ErrNotHeld       = errors.New("the peer does not hold the request")
	ErrEnded         = errors.New("the lease ended during the transfer")
	ErrForeign       = errors.New("a part does not belong to the request")
	ErrTooLarge      = errors.New("the read is too large")
	ErrInternal      = errors.New("the peer could not read its memory")
	ErrChecksum      = errors.New("the checksum is wrong: bytes were changed on the way")
	ErrProtocol      = errors.New("the peer does not keep to the protocol")
	ErrStalled       = errors.New("no byte came within stall_timeout")
)

func (s status) err() error {
	switch s {
	case statusOK:
		return nil
	case statusVersion:
		return fmt.Errorf("%w: it speaks another version", ErrRefused)
	case statusSecret:
		return ErrSecret
	case statusEngine:
		return ErrEngine
	case statusCompatibility:
		return ErrCompatibility
	case statusRank:
		return ErrRank
	case statusBusy:
		return ErrBusy
	case statusNotHeld:
		return ErrNotHeld
	case statusEnded:
		return ErrEnded
	case statusForeign:
		return ErrForeign
	case statusTooLarge:
		return ErrTooLarge
	case statusInternal:
		return ErrInternal
	default:
		return fmt.Errorf("%w: status %d", ErrProtocol, uint16(s))
	}
}

// frame is a header.
type frame struct {
	length int
	kind   kind
	flags  uint8
	status status
	tag    uint64
}

func (f frame) append(b []byte) []byte {
	b = binary.LittleEndian.AppendUint32(b, uint32(f.length))
	b = append(b, byte(f.kind), f.flags)
	b = binary.LittleEndian.AppendUint16(b, uint16(f.status))
	return binary.LittleEndian.AppendUint64(b, f.tag)
}

// parseFrame reads a header of 16 bytes. The length is not checked yet: what it may be is the kind's business.
func parseFrame(b []byte) frame {
	return frame{
		length: int(binary.LittleEndian.Uint32(b)), kind: kind(b[4]), flags: b[5], status: status(binary.LittleEndian.Uint16(b[6:])),
		tag: binary.LittleEndian.Uint64(b[8:]),
	}
}

// readBody reads what follows a header into buf, which grows to at most limit bytes.
func readBody(r io.Reader, f frame, limit int, buf []byte) ([]byte, error) {
	if f.length > limit {
		return buf, fmt.Errorf("%w: %v of %d bytes, at most %d are allowed", ErrProtocol, f.kind, f.length, limit)
	}
	if cap(buf) < f.length {
		buf = make([]byte, f.length)
	}
	buf = buf[:f.length]
	_, err := io.ReadFull(r, buf)
	return buf, err
}

// request is the body of a read or an open.
type request struct {
	wait  uint32 // ms
	name  []byte // within the frame's body
	parts []int
}

// append writes header and body.
func (q *request) append(b []byte, k kind, flags uint8, tag uint64, name string) []byte {
	b = frame{length: 12 + len(name) + 4*len(q.parts), kind: k, flags: flags, tag: tag}.append(b)
	b = binary.LittleEndian.AppendUint32(b, q.wait)
	b = binary.LittleEndian.AppendUint16(b, uint16(len(name)))
	b = append(b, 0, 0)
	b = binary.LittleEndian.AppendUint32(b, uint32(len(q.parts)))
	b = append(b, name...)
	for _, p := range q.parts {
		b = binary.LittleEndian.AppendUint32(b, uint32(p))
	}
	return b
}

// parse reads a body; parts are appended to what q has room for.
func (q *request) parse(b []byte) error {
	if len(b) < 12 {
		return fmt.Errorf("%w: read of %d bytes", ErrProtocol, len(b))
	}
	q.wait = binary.LittleEndian.Uint32(b)
	name, count := int(binary.LittleEndian.Uint16(b[4:])), int(binary.LittleEndian.Uint32(b[8:]))
	if name < 1 || name > maxName || count > maxParts || len(b) != 12+name+4*count {
		return fmt.Errorf("%w: read of %d parts, a name of %d bytes, in %d bytes", ErrProtocol, count, name, len(b))
	}
	q.name, b = b[12:12+name], b[12+name:]
	q.parts = q.parts[:0]
	for ; len(b) > 0; b = b[4:] {
		q.parts = append(q.parts, int(binary.LittleEndian.Uint32(b)))
	}
	return nil
}

// appendBeat writes a heartbeat of at most maxBeats requests.
func appendBeat(b []byte, tag uint64, names []string) []byte {
	length := 2
	for _, n := range names {
		length += 2 + len(n)
	}
	b = frame{length: length, kind: kindBeat, tag: tag}.append(b)
	b = binary.LittleEndian.AppendUint16(b, uint16(len(names)))
	for _, n := range names {
		b = append(binary.LittleEndian.AppendUint16(b, uint16(len(n))), n...)
	}
	return b
}

// parseBeat reads its body.
func parseBeat(b []byte) ([]string, error) {
	if len(b) < 2 {
		return nil, fmt.Errorf("%w: heartbeat of %d bytes", ErrProtocol, len(b))
	}
	count := int(binary.LittleEndian.Uint16(b))
	b = b[2:]
	if count > maxBeats || 2*count > len(b) {
		return nil, fmt.Errorf("%w: heartbeat of %d requests in %d bytes", ErrProtocol, count, len(b))
	}
	names := make([]string, 0, count)
	for range count {
		if len(b) < 2 {
			return nil, fmt.Errorf("%w: heartbeat is cut off", ErrProtocol)
		}
		n := int(binary.LittleEndian.Uint16(b))
		if n < 1 || n > maxName || n > len(b)-2 {
			return nil, fmt.Errorf("%w: heartbeat of a name of %d bytes", ErrProtocol, n)
		}
		names = append(names, string(b[2:2+n]))
		b = b[2+n:]
	}
	if len(b) > 0 {
		return nil, fmt.Errorf("%w: %d bytes behind a heartbeat", ErrProtocol, len(b))
	}
	return names, nil
}

// appendAck writes an ack; an open's carries the export's generation and, when positions were asked for, physical blocks.
func appendAck(b []byte, tag uint64, s status, generation uint64, parts []int) []byte {
	b = frame{length: 12 + 4*len(parts), kind: kindAck, status: s, tag: tag}.append(b)
	b = binary.LittleEndian.AppendUint64(b, generation)
	b = binary.LittleEndian.AppendUint32(b, uint32(len(parts)))
	for _, p := range parts {
		b = binary.LittleEndian.AppendUint32(b, uint32(p))
	}
	return b
}

// parseAck reads its body, and appends the blocks to parts.
func parseAck(b []byte, parts []int) (generation uint64, _ []int, err error) {
	if len(b) < 12 {
		return 0, parts, fmt.Errorf("%w: ack of %d bytes", ErrProtocol, len(b))
	}
	count := int(binary.LittleEndian.Uint32(b[8:]))
	if count > maxParts || len(b) != 12+4*count {
		return 0, parts, fmt.Errorf("%w: ack of %d parts in %d bytes", ErrProtocol, count, len(b))
	}
	generation, b = binary.LittleEndian.Uint64(b), b[12:]
	for ; len(b) > 0; b = b[4:] {
		parts = append(parts, int(binary.LittleEndian.Uint32(b)))
	}
	return generation, parts, nil
}
