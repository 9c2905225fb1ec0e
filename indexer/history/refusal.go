package history

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/ClickHouse/clickhouse-go/v2/lib/proto"
)

// Errors of questions; what they wrap says what to change.
var (
	ErrUnknownQuery = errors.New("no such query")
	ErrBadParam     = errors.New("parameter")
	ErrTooMuch      = errors.New("the query would take too much")
	ErrUnavailable  = errors.New("ClickHouse does not answer")
)

// Codes of ClickHouse for a query that takes too much time or memory.
const (
	codeTimeout     = 159
	codeTooSlow     = 160
	codeMemoryLimit = 241
	codeTooManyRows = 158
	codeTooManyByte = 307
	codeTooBig      = 396
)

// Codes of ClickHouse when it has no room for a query, and when the tables are not there yet.
const (
	codeTooMany        = 202
	codeUnknownTable   = 60
	codeUnknownDB      = 81
	codeAuthentication = 516
)

// answerError says what an error of ClickHouse means for whoever asked; ctx is what it was asked with.
func answerError(ctx context.Context, err error) error {
	if err == nil {
		return nil
	}
	tooMuch := func(text string) error {
		return fmt.Errorf("%w: narrow the time range, or name an engine (%s)", ErrTooMuch, firstLine(text))
	}
	exception := (*proto.Exception)(nil)
	if errors.As(err, &exception) {
		switch exception.Code {
		case codeTimeout, codeTooSlow, codeMemoryLimit, codeTooManyRows, codeTooManyByte, codeTooBig:
			return tooMuch(exception.Message)
		case codeTooMany:
			return fmt.Errorf("%w: it is busy, ask again later (%s)", ErrUnavailable, firstLine(exception.Message))
		case codeUnknownTable, codeUnknownDB:
			return fmt.Errorf("%w: it holds no history yet; is a history role running? (%s)", ErrUnavailable, firstLine(exception.Message))
		case codeAuthentication:
			return fmt.Errorf("%w to this user: look at user and password of --clickhouse (%s)", ErrUnavailable, firstLine(exception.Message))
		}
		return fmt.Errorf("ClickHouse: %s", firstLine(exception.Message))
	}
	if errors.Is(context.Cause(ctx), context.DeadlineExceeded) {
		return tooMuch("no answer in time")
	}
	for _, word := range []string{"MEMORY_LIMIT_EXCEEDED", "TIMEOUT_EXCEEDED", "TOO_SLOW"} {
		if strings.Contains(err.Error(), word) {
			return tooMuch(err.Error())
		}
	}
	return fmt.Errorf("%w: %s", ErrUnavailable, firstLine(err.Error()))
}

func firstLine(text string) string {
	line, _, _ := strings.Cut(text, "\n")
	if len(line) > 300 {
		line = line[:300] + "…"
	}
	return line
}
