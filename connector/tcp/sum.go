package tcp

import (
	"encoding/binary"

	"github.com/zeebo/xxh3"
)

// segment is how many bytes of payload are hashed at a time. Both ends count them from the payload's first byte, so that the
// sum does not depend on how blocks lie in memory; a piece of a block is nearly always a multiple, and is then hashed where it
// is, at twice the speed of a hash that is fed in portions.
const segment = 16 << 10

// sum is the checksum of a payload: XXH3-64 over the XXH3-64, as 8 bytes each, of its segments; the last one may be shorter.
type sum struct {
	open int // bytes of the segment that is not complete
	part xxh3.Hasher
	all  xxh3.Hasher
	word [8]byte
}

func (s *sum) reset() {
	s.open = 0
	s.part.Reset()
	s.all.Reset()
}

func (s *sum) write(p []byte) {
	for len(p) > 0 {
		if s.open == 0 && len(p) >= segment {
			s.add(xxh3.Hash(p[:segment]))
			p = p[segment:]
			continue
		}
		n := min(segment-s.open, len(p))
		_, _ = s.part.Write(p[:n])
		s.open += n
		p = p[n:]
		if s.open == segment {
			s.close()
		}
	}
}

func (s *sum) close() {
	s.add(s.part.Sum64())
	s.part.Reset()
	s.open = 0
}

func (s *sum) add(hash uint64) {
	binary.LittleEndian.PutUint64(s.word[:], hash)
	_, _ = s.all.Write(s.word[:])
}

// sum64 ends the payload.
func (s *sum) sum64() uint64 {
	if s.open > 0 {
		s.close()
	}
	return s.all.Sum64()
}
