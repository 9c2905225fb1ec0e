package archive

import (
	"bufio"
	"bytes"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"time"
	"unicode/utf8"
)

// The first and the last line of a file; each between them is a row, with its table.
type (
	headLine struct {
		Version int    `json:"kvstrata_history"`
		Since   string `json:"since"`
		Until   string `json:"until"`
	}
	endLine struct {
		End map[string]uint64 `json:"kvstrata_end"` // rows by table
	}
)

// IsHead reports whether a line begins an archive.
func IsHead(line []byte) bool {
	var head struct {
		Version json.RawMessage `json:"kvstrata_history"`
	}
	return json.Unmarshal(line, &head) == nil && head.Version != nil
}

// LineWriter writes rows as JSON lines. Hashes are 16 hexadecimal digits and other numbers of 64 bits decimal ones, in quotes: numbers
// of JSON lose bits beyond 53 in many readers.
type LineWriter struct {
	w    *bufio.Writer
	buf  []byte
	rows map[string]uint64
}

// NewLineWriter begins a file.
func NewLineWriter(w io.Writer, head Head) (*LineWriter, error) {
	l := &LineWriter{w: bufio.NewWriterSize(w, 256<<10), rows: make(map[string]uint64)}
	return l, l.object(headLine{Version, head.Since.UTC().Format(secondLayout), head.Until.UTC().Format(secondLayout)})
}

func (l *LineWriter) object(v any) error {
	line, err := json.Marshal(v)
	if err != nil {
		return err
	}
	_, err = l.w.Write(append(line, '\n'))
	return err
}

// Write adds a row.
func (l *LineWriter) Write(row Row) error {
	l.rows[row.Table.Name]++
	b := appendJSONText(append(l.buf[:0], `{"table":`...), row.Table.Name)
	for i := range row.Table.Columns {
		c := &row.Table.Columns[i]
		b = append(append(append(b, `,"`...), c.Name...), `":`...)
		b = c.appendJSON(b, row.Cells[i])
	}
	l.buf = append(b, "}\n"...)
	_, err := l.w.Write(l.buf)
	return err
}

// Close writes the end. It does not close what was written to.
func (l *LineWriter) Close() error { return errors.Join(l.object(endLine{l.rows}), l.w.Flush()) }

func (c *Column) appendJSON(b []byte, cell Cell) []byte {
	switch c.Kind {
	case Text:
		return appendJSONText(b, cell.S)
	case Hash:
		return append(fmt.Appendf(append(b, '"'), "%016x", cell.N), '"')
	case Micros, Seconds, Day:
		return append(c.at(cell.N).AppendFormat(append(b, '"'), c.layout()), '"')
	}
	if c.Bits == 64 {
		b = append(b, '"')
	}
	if c.Kind == Signed {
		b = strconv.AppendInt(b, int64(cell.N), 10)
	} else {
		b = strconv.AppendUint(b, cell.N, 10)
	}
	if c.Bits == 64 {
		return append(b, '"')
	}
	return b
}

// appendJSONText appends a text; one that is no UTF-8 as an object with its bytes.
func appendJSONText(b []byte, text string) []byte {
	plain := true
	for i := range len(text) {
		if c := text[i]; c < ' ' || c == '"' || c == '\\' || c >= 0x7f {
			plain = false
			break
		}
	}
	switch {
	case plain:
		return append(append(append(b, '"'), text...), '"')
	case utf8.ValidString(text):
		quoted, err := json.Marshal(text)
		if err != nil {
			panic(err) // a string always can be
		}
		return append(b, quoted...)
	default:
		return append(hex.AppendEncode(append(b, `{"hex":"`...), []byte(text)), `"}`...)
	}
}

// LineReader reads what a LineWriter wrote.
type LineReader struct {
	lines  *Lines
	tables Tables
	head   Head
	cells  []Cell
	seen   []bool // of the columns
	rows   map[string]uint64
	bad    uint64
}

// NewLineReader reads the first line.
func NewLineReader(r io.Reader, tables Tables) (*LineReader, error) {
	l := &LineReader{lines: NewLines(r), tables: tables, rows: make(map[string]uint64)}
	line, err := l.lines.Next()
	if err != nil {
		return nil, fmt.Errorf("read the first line: %w", err)
	}
	var head headLine
	if err := json.Unmarshal(line, &head); err != nil || head.Version == 0 {
		return nil, errors.New("the first line is not that of an export")
	}
	if head.Version != Version {
		return nil, fmt.Errorf("the file has version %d, and this kvstrata reads %d", head.Version, Version)
	}
	if l.head.Since, err = time.Parse(secondLayout, head.Since); err == nil {
		l.head.Until, err = time.Parse(secondLayout, head.Until)
	}
	if err != nil {
		return nil, fmt.Errorf("the first line's window: %w", err)
	}
	return l, nil
}

// Head returns what the file says of itself.
func (l *LineReader) Head() Head { return l.head }

// Line returns the number of the last line.
func (l *LineReader) Line() int { return l.lines.Number() }

// Next returns the next row, io.EOF behind the last, and ErrCut where a file ends without having said so. Behind a [BadRow] it may be called
// again.
func (l *LineReader) Next() (Row, error) {
	line, err := l.lines.Next()
	switch {
	case errors.Is(err, io.EOF):
		return Row{}, ErrCut
	case errors.As(err, new(*BadRow)):
		l.bad++
		return Row{}, err
	case err != nil:
		return Row{}, fmt.Errorf("line %d: %w", l.lines.Number()+1, err)
	}
	row, ok := l.fast(line)
	if ok {
		l.rows[row.Table.Name]++
		return row, nil
	}
	row, err = l.row(line)
	if err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, errEnd) {
		l.bad++
		return Row{}, &BadRow{Line: l.lines.Number(), Err: err}
	}
	return row, err
}

func (l *LineReader) row(line []byte) (Row, error) {
	var fields map[string]json.RawMessage
	if err := json.Unmarshal(line, &fields); err != nil {
		return Row{}, fmt.Errorf("not a JSON object: %w", err)
	}
	if end, ok := fields["kvstrata_end"]; ok {
		return Row{}, l.end(end)
	}
	var name string
	if err := json.Unmarshal(fields["table"], &name); err != nil {
		return Row{}, errors.New("no table is named")
	}
	table, err := l.tables.Named(name)
	if err != nil {
		return Row{}, err
	}
	delete(fields, "table")
	l.cells = append(l.cells[:0], make([]Cell, len(table.Columns))...)
	for i := range table.Columns {
		c := &table.Columns[i]
		raw, ok := fields[c.Name]
		if !ok {
			if slices.Contains(table.Needed, c.Name) {
				return Row{}, fmt.Errorf("column %s is missing", c.Name)
			}
			continue
		}
		delete(fields, c.Name)
		if l.cells[i], err = c.readJSON(raw); err != nil {
			return Row{}, fmt.Errorf("column %s: %w", c.Name, err)
		}
	}
	for name := range fields {
		return Row{}, fmt.Errorf("table %s has no column %.64q here; was the file written by a newer kvstrata?", table.Name, name)
	}
	l.rows[table.Name]++
	return Row{table, l.cells}, nil
}

// errEnd says that what a file says at its end does not hold.
var errEnd = errors.New("the end of the file")

// end compares what the last line says with what came, as far as all of it could be read.
func (l *LineReader) end(raw json.RawMessage) error {
	var want map[string]uint64
	if err := json.Unmarshal(raw, &want); err != nil {
		return fmt.Errorf("%w: %w", errEnd, err)
	}
	if l.bad == 0 && !maps.Equal(want, l.rows) {
		return fmt.Errorf("%w tells of %v rows, and %v came: lines are missing", errEnd, want, l.rows)
	}
	if _, err := l.lines.Next(); !errors.Is(err, io.EOF) {
		return fmt.Errorf("%w is followed by something", errEnd)
	}
	return io.EOF
}

func (c *Column) readJSON(raw json.RawMessage) (Cell, error) {
	raw = bytes.TrimSpace(raw)
	if c.Kind == Text && len(raw) > 0 && raw[0] == '{' {
		var coded struct{ Hex *string }
		if err := json.Unmarshal(raw, &coded); err != nil || coded.Hex == nil {
			return Cell{}, errors.New(`want a text, or {"hex": its bytes}`)
		}
		text, err := hex.DecodeString(*coded.Hex)
		return Cell{S: string(text)}, err
	}
	if c.Kind == Text || c.Kind > Signed || c.Bits == 64 {
		var text string
		if len(raw) == 0 || raw[0] != '"' || json.Unmarshal(raw, &text) != nil {
			return Cell{}, fmt.Errorf("%.32s: want a text", raw)
		}
		if c.Kind == Text {
			return Cell{S: text}, nil
		}
		n, err := c.parse(text)
		return Cell{N: n}, err
	}
	n, err := c.parse(string(raw))
	return Cell{N: n}, err
}
