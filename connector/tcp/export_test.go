package tcp

import (
	"net"
	"os"
	"time"

	"kvstrata/connector/device"
)

// Serve serves a connection as if a peer had made it.
func (e *Endpoint) Serve(conn net.Conn) { e.start(conn, e.serve) }

// ServeNow does so by the caller's goroutine.
func (e *Endpoint) ServeNow(conn net.Conn) { e.serve(conn) }

// LimitReadWait bounds how long reads wait for a request.
func (e *Endpoint) LimitReadWait(d time.Duration) { e.readWait = d }

// Greeted returns what a peer without a secret sends in a handshake: as the client, and as the server.
func Greeted(e *Endpoint) (client, server []byte) {
	hello := e.greeting()
	hello.purpose = purposeData
	client = hello.append(nil)
	client = append(frame{length: 32, kind: kindProof}.append(client), make([]byte, 32)...)
	own := e.greeting()
	server = append(own.append(nil), make([]byte, 32)...)
	server = frame{length: 2 + 32, kind: kindReady}.append(server)
	return client, append(server, make([]byte, 2+32)...)
}

// ReadFrame and OpenFrame return a client's frames.
func ReadFrame(name string, tag uint64, parts ...int) []byte {
	q := request{parts: parts}
	return q.append(nil, kindRead, flagChecksum, tag, name)
}

// OpenFrame returns an open.
func OpenFrame(name string, tag uint64, parts ...int) []byte {
	q := request{parts: parts}
	return q.append(nil, kindOpen, flagOrdinal, tag, name)
}

// BeatFrame returns a heartbeat.
func BeatFrame(tag uint64, names ...string) []byte { return appendBeat(nil, tag, names) }

// DoneFrame returns a done.
func DoneFrame(tag uint64, name string) []byte {
	return append(frame{length: len(name), kind: kindDone, tag: tag}.append(nil), name...)
}

// ConfirmFrame returns a confirm.
func ConfirmFrame(tag, generation uint64, name string) []byte {
	b := frame{length: 8 + len(name), kind: kindConfirm, tag: tag}.append(nil)
	return append(le.AppendUint64(b, generation), name...)
}

// DataFrames returns a server's answer to a read.
func DataFrames(tag uint64, payload []byte) []byte {
	var s sum
	s.reset()
	s.write(payload)
	b := append(frame{length: len(payload), kind: kindData, tag: tag}.append(nil), payload...)
	b = frame{length: 8, kind: kindTrailer, flags: flagChecksum, tag: tag}.append(b)
	return le.AppendUint64(b, s.sum64())
}

// IsConfirm reports whether a client's write is a confirm.
func IsConfirm(b []byte) bool { return len(b) >= header && kind(b[4]) == kindConfirm }

// ParseLayout parses a peer's layout.
func (e *Endpoint) ParseLayout(body []byte, size int64) error {
	_, _, err := e.parseLayout(body, size)
	return err
}

// Sum returns the checksum of a payload that is written in pieces.
func Sum(pieces ...[]byte) uint64 {
	var s sum
	s.reset()
	for _, p := range pieces {
		s.write(p)
	}
	return s.sum64()
}

// MapFile maps a peer's file.
func (e *Endpoint) MapFile(file *os.File, layout []byte) error {
	m, err := e.mapFile(file, layout)
	if err == nil {
		m.close()
	}
	return err
}

// CopyAll copies a peer's memory.
func CopyAll(to, mem []byte) error {
	return copySpans([][]byte{to}, mem, []device.Span{{Length: len(mem)}})
}

// ErrFault is of memory without pages.
var ErrFault = errFault
