package embedded

import (
	"fmt"
	"regexp"
	"strconv"
)

// Codes of ClickHouse that this package itself answers with.
const (
	codeBadArguments   = 36
	codeUnknownSetting = 115
	codeSyntaxError    = 62
	codeMemory         = 241
	codeTimeout        = 159
	codeReadOnly       = 164
	codeTooBig         = 396 // TOO_MANY_ROWS_OR_BYTES
	codeTooManyBytes   = 307
	codeTooMany        = 202 // TOO_MANY_SIMULTANEOUS_QUERIES
	codeCancelled      = 394 // QUERY_WAS_CANCELLED
	codeUnknown        = 1002
)

var codePattern = regexp.MustCompile(`Code: (\d+)\.`)

// exception is an error as ClickHouse tells it: a code, and a text that bears the code.
type exception struct {
	code int
	text string
}

func (e *exception) Error() string { return e.text }

// newException reads the engine's own text.
func newException(text string) *exception {
	e := &exception{code: codeUnknown, text: text}
	if m := codePattern.FindStringSubmatch(text); m != nil {
		if code, err := strconv.Atoi(m[1]); err == nil && code > 0 {
			e.code = code
		}
	} else {
		e.text = fmt.Sprintf("Code: %d. DB::Exception: %s", e.code, text)
	}
	return e
}

// refuse makes an exception of our own in ClickHouse's words, so that clients decode it like any other.
func refuse(code int, name, format string, args ...any) *exception {
	return &exception{code: code, text: fmt.Sprintf("Code: %d. DB::Exception: %s. (%s)", code, fmt.Sprintf(format, args...), name)}
}
