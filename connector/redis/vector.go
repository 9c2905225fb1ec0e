package redis

import (
	"github.com/zeebo/xxh3"
	"golang.org/x/sys/unix"

	"kvstrata/connector/vectored"
)

// scatter is a place in a list of pieces, and the vectors of what is left of them. The vectors are made once for up to
// vectored.Max pieces and moved along as calls fill them.
type scatter struct {
	pieces [][]byte
	piece  int // the next byte is in this piece,
	at     int // here
	iov    []unix.Iovec
	room   []unix.Iovec // of iov
	tail   bool         // the last vector is not of a piece
}

// start begins a list of pieces.
func (s *scatter) start(pieces [][]byte) {
	s.pieces, s.piece, s.at, s.iov, s.tail = pieces, 0, 0, nil, false
	s.skip()
}

// stop forgets the pieces, so that they are not kept alive.
func (s *scatter) stop() {
	clear(s.room[:cap(s.room)])
	s.pieces, s.iov = nil, nil
}

// skip moves from the end of a piece to the next one that is not empty.
func (s *scatter) skip() {
	for s.piece < len(s.pieces) && s.at == len(s.pieces[s.piece]) {
		s.piece, s.at = s.piece+1, 0
	}
}

// prepare makes vectors of what is left unless there are some, with tail behind the last piece.
func (s *scatter) prepare(tail []byte) {
	if len(s.iov) > 0 && (len(s.iov) > 1 || !s.tail) {
		return
	}
	s.room, s.tail = s.room[:0], false
	at := s.at
	for i := s.piece; i < len(s.pieces) && len(s.room) < vectored.Max-1; i++ {
		if rest := s.pieces[i][at:]; len(rest) > 0 {
			s.room = append(s.room, vectored.Of(rest))
		}
		at = 0
		if i == len(s.pieces)-1 && len(tail) > 0 {
			s.room, s.tail = append(s.room, vectored.Of(tail)), true
		}
	}
	s.iov = s.room
}

// fill copies b into the pieces and moves behind it.
func (s *scatter) fill(b []byte) {
	for len(b) > 0 {
		n := copy(s.pieces[s.piece][s.at:], b)
		b = b[n:]
		s.at += n
		s.skip()
	}
	s.iov = nil
}

// each hashes the next n bytes of the pieces.
func (s *scatter) each(n int, hash *xxh3.Hasher) {
	for i, at := s.piece, s.at; n > 0; i, at = i+1, 0 {
		b := s.pieces[i][at:]
		b = b[:min(len(b), n)]
		_, _ = hash.Write(b)
		n -= len(b)
	}
}

// advance moves n bytes along.
func (s *scatter) advance(n int) {
	s.iov = vectored.Advance(s.iov, n)
	for n > 0 {
		k := min(len(s.pieces[s.piece])-s.at, n)
		n -= k
		s.at += k
		s.skip()
	}
}
