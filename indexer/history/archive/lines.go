package archive

import (
	"bufio"
	"errors"
	"io"
)

// MaxLine bounds a line: Dynamo's of a long prompt has many blocks.
const MaxLine = 64 << 20

var errLong = errors.New("a line of more than 64 MiB")

// Lines reads a file line by line, in the memory of its longest line.
type Lines struct {
	in   *bufio.Reader
	line []byte
	n    int
	max  int
}

// NewLines returns a reader of lines.
func NewLines(r io.Reader) *Lines { return &Lines{in: bufio.NewReaderSize(r, 256<<10), max: MaxLine} }

// Number returns the number of the last line.
func (l *Lines) Number() int { return l.n }

// Next returns the next line that is not blank, without its end, valid until the next call; a last one without an end is one too.
// A line that is too long is a [BadRow]: it is passed over.
func (l *Lines) Next() ([]byte, error) {
	for {
		line, err := l.next()
		if err != nil {
			return nil, err
		}
		if len(line) > 0 {
			return line, nil
		}
	}
}

func (l *Lines) next() ([]byte, error) {
	l.line = l.line[:0]
	l.n++
	long := false
	for {
		part, err := l.in.ReadSlice('\n')
		if len(l.line)+len(part) > l.max {
			long, l.line, part = true, l.line[:0], nil
		}
		if !long {
			l.line = append(l.line, part...)
		}
		switch {
		case errors.Is(err, bufio.ErrBufferFull):
			continue
		case err != nil && !errors.Is(err, io.EOF):
			return nil, err
		case err != nil && len(l.line) == 0 && !long:
			l.n--
			return nil, io.EOF
		case long:
			return nil, &BadRow{Line: l.n, Err: errLong}
		}
		return trim(l.line), nil
	}
}

// trim takes white space off both ends.
func trim(b []byte) []byte {
	space := func(c byte) bool { return c == ' ' || c == '\t' || c == '\r' || c == '\n' }
	for len(b) > 0 && space(b[len(b)-1]) {
		b = b[:len(b)-1]
	}
	for len(b) > 0 && space(b[0]) {
		b = b[1:]
	}
	return b
}
