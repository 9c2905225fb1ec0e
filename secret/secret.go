// Package secret holds what must not be shown: a text that prints as a placeholder, and the reading of small files of such.
package secret

import (
	"fmt"
	"io"
	"log/slog"
	"os"
)

// Text is a token or a password. It prints as a placeholder.
type Text string

const redacted = "[secret]"

// String returns a placeholder.
func (Text) String() string { return redacted }

// GoString returns a placeholder.
func (Text) GoString() string { return redacted }

// LogValue returns a placeholder.
func (Text) LogValue() slog.Value { return slog.StringValue(redacted) }

// maxFile is far more than a file of tokens or keys has, in bytes.
const maxFile = 1 << 20

// ReadFile reads a file of what is named, as "tokens". One that is too large for that is a slip, and not read whole.
func ReadFile(path, what string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, maxFile+1))
	if err != nil {
		return nil, err
	}
	if len(text) > maxFile {
		return nil, fmt.Errorf("%s has more than %d bytes, which no file of %s has", path, maxFile, what)
	}
	return text, nil
}
