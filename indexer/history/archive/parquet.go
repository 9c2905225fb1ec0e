package archive

import (
	"cmp"
	"fmt"
	"io"
	"slices"

	"github.com/parquet-go/parquet-go"
)

// Names of what a file says of itself beside its columns.
const (
	versionKey = "kvstrata.history"
	tableKey   = "kvstrata.table"
	sinceKey   = "kvstrata.since"
	untilKey   = "kvstrata.until"
)

// rowsInGroup bounds what a writer holds before it is written out.
const rowsInGroup = 500_000

// ParquetWriter writes the rows of one table as Parquet: every column plain and required, its pages compressed with zstd. Hashes and other
// numbers keep their 64 bits, times are microseconds.
type ParquetWriter struct {
	table *Table
	out   *parquet.GenericWriter[any]
	row   parquet.Row
}

// NewParquetWriter begins a file of a table.
func NewParquetWriter(w io.Writer, table *Table, head Head) *ParquetWriter {
	root := ordered{Group: make(parquet.Group), table: table}
	for i := range table.Columns {
		root.Group[table.Columns[i].Name] = parquet.Encoded(table.Columns[i].node(), &parquet.Plain)
	}
	out := parquet.NewGenericWriter[any](w, parquet.NewSchema(table.Name, root),
		parquet.Compression(&parquet.Zstd), parquet.MaxRowsPerRowGroup(rowsInGroup), parquet.PageBufferSize(256<<10), parquet.DataPageStatistics(false),
		parquet.CreatedBy("kvstrata", fmt.Sprint(Version), ""), parquet.KeyValueMetadata(versionKey, fmt.Sprint(Version)),
		parquet.KeyValueMetadata(tableKey, table.Name), parquet.KeyValueMetadata(sinceKey, head.Since.UTC().Format(secondLayout)),
		parquet.KeyValueMetadata(untilKey, head.Until.UTC().Format(secondLayout)))
	return &ParquetWriter{table: table, out: out}
}

// Write adds a row.
func (p *ParquetWriter) Write(row Row) error {
	p.row = p.row[:0]
	for i := range p.table.Columns {
		p.row = append(p.row, p.table.Columns[i].value(row.Cells[i]).Level(0, 0, i))
	}
	_, err := p.out.WriteRows([]parquet.Row{p.row})
	return err
}

// Close writes the end. It does not close what was written to.
func (p *ParquetWriter) Close() error { return p.out.Close() }

// ordered is a group whose columns come in the table's order.
type ordered struct {
	parquet.Group
	table *Table
}

// Fields returns the columns.
func (o ordered) Fields() []parquet.Field {
	fields := o.Group.Fields()
	slices.SortFunc(fields, func(a, b parquet.Field) int { return cmp.Compare(o.table.column(a.Name()), o.table.column(b.Name())) })
	return fields
}

func (c *Column) node() parquet.Node {
	switch c.Kind {
	case Text:
		return parquet.String()
	case Hash:
		return parquet.Uint(64)
	case Signed:
		return parquet.Int(c.Bits)
	case Micros, Seconds:
		return parquet.Timestamp(parquet.Microsecond)
	case Day:
		return parquet.Date()
	default:
		return parquet.Uint(c.Bits)
	}
}

// wide reports whether a column's numbers take 64 bits in a file, not 32.
func (c *Column) wide() bool {
	return c.Kind == Hash || c.Kind == Micros || c.Kind == Seconds || c.Kind <= Signed && c.Bits == 64
}

const microsInSecond = 1_000_000

func (c *Column) value(cell Cell) parquet.Value {
	switch {
	case c.Kind == Text:
		return parquet.ByteArrayValue([]byte(cell.S))
	case c.Kind == Seconds:
		return parquet.Int64Value(int64(cell.N) * microsInSecond)
	case c.wide():
		return parquet.Int64Value(int64(cell.N))
	default:
		return parquet.Int32Value(int32(cell.N))
	}
}

// cell turns the number of a file into a cell.
func (c *Column) cell(bits uint64) (Cell, error) {
	if !c.wide() && c.Kind == Signed {
		bits = uint64(int64(int32(bits)))
	}
	negative := c.signed() && int64(bits) < 0
	if c.Kind == Seconds {
		if int64(bits) < 0 || bits%microsInSecond != 0 {
			return Cell{}, fmt.Errorf("%d: want a time in whole seconds", int64(bits))
		}
		bits /= microsInSecond
	}
	if !c.fits(bits, negative) {
		return Cell{}, fmt.Errorf("%d: the column holds no such value", int64(bits))
	}
	return Cell{N: bits}, nil
}
