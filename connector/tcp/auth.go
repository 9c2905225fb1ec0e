package tcp

import (
	"bytes"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"io"
)

// purpose is what a connection is for.
type purpose uint8

const (
	purposeData    purpose = 1 + iota // reads, one after the other
	purposeControl                    // heartbeats, done, waiting for requests, in any order
	purposeMap                        // of a local socket: the memory's file
)

// greeting is a hello, or a welcome.
type greeting struct {
	purpose    purpose // of a hello
	status     status  // of a welcome
	rank       int
	ranks      int
	blockBytes uint64
	hash       [sha256.Size]byte
	nonce      [32]byte
	engine     string
	expected   string // of a hello: the engine that is meant; empty = any
	text       []byte // what was sent but the proof, as it goes into proofs
}

const greetingFixed = 2 + 2 + 4 + 4 + 8 + sha256.Size + 32

// append writes preamble and body, with a fresh nonce. A welcome's proof follows it.
func (g *greeting) append(b []byte) []byte {
	_, _ = rand.Read(g.nonce[:]) // never fails
	at := len(b)
	b = binary.LittleEndian.AppendUint32(b, magic)
	b = binary.LittleEndian.AppendUint16(b, version)
	b = binary.LittleEndian.AppendUint16(b, uint16(greetingFixed+2+len(g.engine)+len(g.expected)))
	b = append(b, byte(g.purpose), 0)
	b = binary.LittleEndian.AppendUint16(b, uint16(g.status))
	b = binary.LittleEndian.AppendUint32(b, uint32(g.rank))
	b = binary.LittleEndian.AppendUint32(b, uint32(g.ranks))
	b = binary.LittleEndian.AppendUint64(b, g.blockBytes)
	b = append(append(b, g.hash[:]...), g.nonce[:]...)
	b = append(append(b, byte(len(g.engine))), g.engine...)
	b = append(append(b, byte(len(g.expected))), g.expected...)
	g.text = bytes.Clone(b[at:])
	return b
}

// readGreeting reads a hello or a welcome: no more than maxHello bytes, whoever sends them.
func readGreeting(r io.Reader) (*greeting, error) {
	text := make([]byte, preamble, preamble+maxHello)
	if _, err := io.ReadFull(r, text); err != nil {
		return nil, err
	}
	length := int(binary.LittleEndian.Uint16(text[6:]))
	switch got := binary.LittleEndian.Uint16(text[4:]); {
	case binary.LittleEndian.Uint32(text) != magic:
		return nil, fmt.Errorf("%w: it begins with %x", ErrProtocol, text[:4])
	case got != version:
		return nil, fmt.Errorf("%w: it speaks version %d, this end %d", ErrRefused, got, version)
	case length < greetingFixed+2 || length > maxHello:
		return nil, fmt.Errorf("%w: greeting of %d bytes", ErrProtocol, length)
	}
	text = text[:preamble+length]
	if _, err := io.ReadFull(r, text[preamble:]); err != nil {
		return nil, err
	}
	b := text[preamble:]
	g := &greeting{
		purpose: purpose(b[0]), status: status(binary.LittleEndian.Uint16(b[2:])), rank: int(binary.LittleEndian.Uint32(b[4:])),
		ranks: int(binary.LittleEndian.Uint32(b[8:])), blockBytes: binary.LittleEndian.Uint64(b[12:]), text: text,
	}
	b = b[20:]
	copy(g.hash[:], b)
	copy(g.nonce[:], b[sha256.Size:])
	b = b[sha256.Size+32:]
	for _, s := range []*string{&g.engine, &g.expected} {
		if len(b) < 1 || len(b) < 1+int(b[0]) {
			return nil, fmt.Errorf("%w: greeting is cut off", ErrProtocol)
		}
		*s, b = string(b[1:1+b[0]]), b[1+b[0]:]
	}
	if len(b) > 0 {
		return nil, fmt.Errorf("%w: %d bytes behind a greeting", ErrProtocol, len(b))
	}
	return g, nil
}

// proof is a side's proof that it knows the secret: it covers all that both said before, with both nonces, and which side
// it is, so that it can be neither replayed nor sent back. Without a secret it is zeros.
func proof(secret []byte, side string, hello, welcome *greeting) (p [sha256.Size]byte) {
	if len(secret) == 0 {
		return p
	}
	mac := hmac.New(sha256.New, secret)
	mac.Write([]byte("kvstrata tcp 1 " + side))
	mac.Write(hello.text)
	mac.Write(welcome.text)
	copy(p[:], mac.Sum(nil))
	return p
}

// proved compares in constant time.
func proved(want, got [sha256.Size]byte) bool { return hmac.Equal(want[:], got[:]) }

// agree says whether two ends may exchange blocks; own is this end's.
func agree(own, peer *greeting, kv bool) (status, error) {
	switch {
	case own.hash != peer.hash || own.blockBytes != peer.blockBytes:
		return statusCompatibility, fmt.Errorf("%w: this end has %x (%d bytes a block), the peer %x (%d bytes a block): model, element type, "+
			"block size and the order of the layout's axes must be the same",
			ErrCompatibility, own.hash[:4], own.blockBytes, peer.hash[:4], peer.blockBytes)
	case kv && (own.rank != peer.rank || own.ranks != peer.ranks):
		return statusRank, fmt.Errorf("%w: this end is %d of %d, the peer %d of %d", ErrRank, own.rank, own.ranks, peer.rank, peer.ranks)
	}
	return statusOK, nil
}
