package main

import (
	"bufio"
	"encoding/binary"
	"fmt"
	"io"
)

// What ZMTP 3 puts on a connection: a greeting of 64 bytes from each side, then frames of flags, length and body.
const (
	greetingSize = 64
	flagMore     = 1
	flagLong     = 2
	flagCommand  = 4
	maxFrame     = 64 << 20
)

// message is what one side of a connection said in one piece, with its bytes as they came.
type message struct {
	raw     []byte
	command bool     // of the protocol itself, as READY and PING
	frames  [][]byte // bodies; parts of raw
}

// readMessage reads the frames of one message.
func readMessage(r *bufio.Reader) (message, error) {
	var m message
	var bounds [][2]int
	for more := true; more; {
		flags, err := r.ReadByte()
		if err != nil {
			return m, err
		}
		m.raw = append(m.raw, flags)
		size := make([]byte, 1)
		if flags&flagLong != 0 {
			size = make([]byte, 8)
		}
		if _, err := io.ReadFull(r, size); err != nil {
			return m, fmt.Errorf("read length of frame: %w", err)
		}
		m.raw = append(m.raw, size...)
		n := uint64(size[0])
		if len(size) == 8 {
			n = binary.BigEndian.Uint64(size)
		}
		if n > maxFrame {
			return m, fmt.Errorf("frame of %d bytes: want up to %d", n, maxFrame)
		}
		from := len(m.raw)
		m.raw = append(m.raw, make([]byte, n)...)
		if _, err := io.ReadFull(r, m.raw[from:]); err != nil {
			return m, fmt.Errorf("read frame: %w", err)
		}
		bounds = append(bounds, [2]int{from, len(m.raw)})
		m.command = m.command || flags&flagCommand != 0
		more = flags&flagMore != 0
	}
	for _, b := range bounds {
		m.frames = append(m.frames, m.raw[b[0]:b[1]])
	}
	return m, nil
}

// batch returns the sequence and payload of a message that has one: the live socket's topic, sequence and payload, and the
// replay socket's with an empty frame before. What ends a replay has none.
func (m *message) batch() (seq uint64, payload []byte, ok bool) {
	n := len(m.frames)
	if m.command || n < 3 || len(m.frames[n-2]) != 8 || len(m.frames[n-1]) == 0 {
		return 0, nil, false
	}
	seq = binary.BigEndian.Uint64(m.frames[n-2])
	return seq, m.frames[n-1], seq != 1<<64-1
}
