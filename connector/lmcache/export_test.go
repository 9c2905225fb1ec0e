package lmcache

import (
	"bufio"
	"bytes"
	"net"
)

// stream is a connection whose peer has said its piece.
type stream struct {
	net.Conn
	said *bytes.Reader
}

func (s *stream) Read(b []byte) (int, error) { return s.said.Read(b) }

// ReceiveLM and ReceiveRedis read one GET's answer into pieces, as a backend does. They return how much is left of what was
// said.
var (
	ReceiveLM = func(p Protocol, said []byte, content Content, pieces [][]byte) (left int, refused, broken error) {
		r := &remote{protocol: p}
		return receive(r.receive, said, content, pieces)
	}
	ReceiveRedis = func(said []byte, content Content, pieces [][]byte) (left int, refused, broken error) {
		r := &redis{}
		return receive(r.receive, said, content, pieces)
	}
)

func receive(f func(*conn, *chunk) (bool, error, error), said []byte, content Content, pieces [][]byte) (int, error, error) {
	c := &conn{net: &stream{said: bytes.NewReader(said)}}
	c.in = bufio.NewReaderSize(prompt{c}, 4096)
	want := &chunk{key: "k", content: content, pieces: pieces}
	for _, p := range pieces {
		want.bytes += len(p)
	}
	_, refused, broken := f(c, want)
	return c.in.Buffered() + c.net.(*stream).said.Len(), refused, broken
}
