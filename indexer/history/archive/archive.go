// Package archive is how rows of history lie in files: as JSON lines, a line a row, and as Parquet, a file a table. It knows no
// table of its own: those are told. Whatever a file holds, reading it takes bounded memory and does not panic.
package archive

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"time"
)

// Kind is what the values of a column are.
type Kind uint8

// The kinds. Times are UTC.
const (
	Unsigned Kind = iota
	Signed
	Hash    // 64 bits, unsigned
	Text    // bytes, mostly UTF-8
	Micros  // microseconds since 1970
	Seconds // seconds since 1970
	Day     // days since 1970
)

// Column is a column of a table.
type Column struct {
	Name string
	Kind Kind
	Bits int // of a number: 8, 16, 32 or 64
}

// Table is a table that files may have rows of.
type Table struct {
	Name    string
	Columns []Column
	Needed  []string // the columns that every row must have; others are 0 or empty where a file lacks them
}

// Cell is one value: the bits of a number, a time or a hash, or a text.
type Cell struct {
	N uint64
	S string
}

// Row is a row of a table: a cell a column, valid until the next one is read.
type Row struct {
	Table *Table
	Cells []Cell
}

// Head says what a file is of: the window whose rows it has, whole seconds.
type Head struct {
	Since, Until time.Time
}

// Version is the version of the forms.
const Version = 1

// Tables are those that a reader takes rows of.
type Tables []*Table

// Named returns a table.
func (t Tables) Named(name string) (*Table, error) {
	if i := slices.IndexFunc(t, func(t *Table) bool { return t.Name == name }); i >= 0 {
		return t[i], nil
	}
	return nil, fmt.Errorf("no table %.64q is known here; was the file written by a newer kvstrata?", name)
}

func (t *Table) column(name string) int {
	return slices.IndexFunc(t.Columns, func(c Column) bool { return c.Name == name })
}

// BadRow is a row that can't be read; what follows it can.
type BadRow struct {
	Line int // in the file, from 1; of Parquet the row
	Err  error
}

func (e *BadRow) Error() string { return fmt.Sprintf("line %d: %v", e.Line, e.Err) }

func (e *BadRow) Unwrap() error { return e.Err }

// ErrCut says that a file ends before its end.
var ErrCut = errors.New("the file was cut off: its end is missing")

// span returns the least and the greatest value that a column of signed, or unsigned, numbers holds.
func (c *Column) span() (least int64, greatest uint64) {
	switch {
	case c.Kind == Signed:
		return math.MinInt64 >> (64 - c.Bits), 1<<(c.Bits-1) - 1
	case c.Kind == Seconds:
		return 0, math.MaxUint32
	case c.Kind == Day:
		return 0, math.MaxUint16
	case c.Kind == Micros:
		return math.MinInt64, math.MaxInt64
	default:
		return 0, math.MaxUint64 >> (64 - c.Bits)
	}
}

// fits reports whether a number can be in a column.
func (c *Column) fits(n uint64, negative bool) bool {
	least, greatest := c.span()
	if negative {
		return int64(n) >= least
	}
	return n <= greatest
}

// signed reports whether the bits of a cell are of a signed number.
func (c *Column) signed() bool { return c.Kind == Signed || c.Kind == Micros }

// at returns the time of a cell of a column of times.
func (c *Column) at(n uint64) time.Time {
	switch c.Kind {
	case Seconds:
		return time.Unix(int64(n), 0).UTC()
	case Day:
		return time.Unix(int64(n)*86400, 0).UTC()
	default:
		return time.UnixMicro(int64(n)).UTC()
	}
}

// layouts of times; microseconds are written whole.
const (
	microLayout  = "2006-01-02T15:04:05.000000Z"
	secondLayout = "2006-01-02T15:04:05Z"
	dayLayout    = "2006-01-02"
)

func (c *Column) layout() string {
	switch c.Kind {
	case Seconds:
		return secondLayout
	case Day:
		return dayLayout
	default:
		return microLayout
	}
}

// parse reads the text of a time, a hash or a 64-bit number.
func (c *Column) parse(text string) (uint64, error) {
	switch c.Kind {
	case Hash:
		if len(text) != 16 {
			return 0, fmt.Errorf("%.32q: want 16 hexadecimal digits", text)
		}
		n, err := strconv.ParseUint(text, 16, 64)
		if err != nil {
			return 0, fmt.Errorf("%.32q: want 16 hexadecimal digits", text)
		}
		return n, nil
	case Micros, Seconds, Day:
		t, err := time.Parse(c.layout(), text)
		if err != nil {
			return 0, fmt.Errorf("%.32q: want a time as %s", text, c.layout())
		}
		n := uint64(t.UnixMicro())
		switch c.Kind {
		case Seconds:
			n = uint64(t.Unix())
		case Day:
			n = uint64(t.Unix() / 86400)
		}
		if !c.fits(n, t.Unix() < 0) {
			return 0, fmt.Errorf("%.32q: the column holds no such time", text)
		}
		return n, nil
	case Signed:
		n, err := strconv.ParseInt(text, 10, c.Bits)
		if err != nil {
			return 0, fmt.Errorf("%.32q: want a number of %d bits", text, c.Bits)
		}
		return uint64(n), nil
	default:
		n, err := strconv.ParseUint(text, 10, c.Bits)
		if err != nil {
			return 0, fmt.Errorf("%.32q: want a number of %d bits that is not negative", text, c.Bits)
		}
		return n, nil
	}
}
