package redis

import (
	"bufio"
	"fmt"
	"io"
)

// pushReader reads the messages of a subscription in RESP3: arrays and pushes of bulk strings, numbers and nulls. What a
// server could send to exhaust memory is bounded.
type pushReader struct {
	in   *bufio.Reader
	text []byte
}

func newPushReader(src io.Reader) *pushReader {
	return &pushReader{in: bufio.NewReaderSize(src, 64<<10)}
}

const (
	maxPushItems = 64
	maxPushText  = 64 << 10
)

// next reads one message as the texts of its parts; a null is an empty one. A status or number is a message of one part.
// The parts are valid until the next call.
func (p *pushReader) next(parts [][]byte) ([][]byte, error) {
	p.text = p.text[:0]
	return p.read(parts[:0], 0)
}

func (p *pushReader) read(parts [][]byte, depth int) ([][]byte, error) {
	line, err := p.in.ReadSlice('\n')
	if err != nil {
		return parts, err
	}
	if len(line) < 3 || line[len(line)-2] != '\r' {
		return parts, fmt.Errorf("%w: a line without its end", errProtocol)
	}
	line = line[:len(line)-2]
	switch line[0] {
	case '+', ':', '#', ',':
		return p.add(parts, line[1:]), nil
	case '-':
		return parts, serverError(line[1:])
	case '_':
		return p.add(parts, nil), nil
	case '$':
		n, err := number(line)
		switch {
		case err != nil:
			return parts, err
		case n == -1:
			return p.add(parts, nil), nil
		case n < 0 || n > maxPushText:
			return parts, fmt.Errorf("%w: a bulk string of %d bytes in a message", errProtocol, n)
		}
		bulk := make([]byte, n+2)
		if _, err := io.ReadFull(p.in, bulk); err != nil {
			return parts, unexpected(err)
		}
		return append(parts, bulk[:n]), nil
	case '*', '>', '%', '~':
		n, err := number(line)
		if line[0] == '%' {
			n *= 2
		}
		if err != nil {
			return parts, err
		}
		if n == -1 {
			return p.add(parts, nil), nil
		}
		if n < 0 || n > maxPushItems || depth > 3 || len(parts) > maxPushItems {
			return parts, fmt.Errorf("%w: a message of %d parts", errProtocol, n)
		}
		for range n {
			if parts, err = p.read(parts, depth+1); err != nil {
				return parts, unexpected(err)
			}
		}
		return parts, nil
	default:
		return parts, fmt.Errorf("%w: a message of type %q", errProtocol, line[0])
	}
}

// add copies a text: the reader's buffer is filled anew.
func (p *pushReader) add(parts [][]byte, text []byte) [][]byte {
	at := len(p.text)
	p.text = append(p.text, text...)
	return append(parts, p.text[at:len(p.text):len(p.text)])
}
