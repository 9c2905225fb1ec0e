package archive

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/klauspost/compress/zstd"
	"github.com/parquet-go/parquet-go/encoding/thrift"
	"github.com/parquet-go/parquet-go/format"
)

// Bounds of what is read of a Parquet file at a time. A library would take a file's word for what it has to allocate.
const (
	maxFooter = 8 << 20
	maxHeader = 16 << 10 // of a page
	maxPage   = 8 << 20
)

const magic = "PAR1"

// IsParquet reports whether a file begins as Parquet does.
func IsParquet(begin []byte) bool {
	return len(begin) >= len(magic) && string(begin[:len(magic)]) == magic
}

// ParquetReader reads what a ParquetWriter wrote.
type ParquetReader struct {
	file    io.ReaderAt
	table   *Table
	head    Head
	groups  []format.RowGroup
	places  []int // of the file's columns in the table
	columns []pages
	left    int64 // rows of the group
	cells   []Cell
	rows    int
	zstd    *zstd.Decoder
}

// errForeign says that a file is Parquet, and no export.
var errForeign = errors.New("not Parquet as an export of kvstrata is")

func foreign(what string, args ...any) error {
	return fmt.Errorf("%w: "+what, append([]any{errForeign}, args...)...)
}

// NewParquetReader reads a file's end, which says what it holds. The caller closes it.
func NewParquetReader(file io.ReaderAt, size int64, tables Tables) (*ParquetReader, error) {
	meta, err := readFooter(file, size)
	if err != nil {
		return nil, err
	}
	p := &ParquetReader{file: file, groups: meta.RowGroups}
	if p.table, p.head, err = told(meta, tables); err != nil {
		return nil, err
	}
	if err := p.schema(meta.Schema); err != nil {
		return nil, err
	}
	rows := int64(0)
	for i := range p.groups {
		g := &p.groups[i]
		if g.NumRows < 0 || len(g.Columns) != len(p.places) {
			return nil, foreign("row group %d has %d columns and %d rows", i, len(g.Columns), g.NumRows)
		}
		rows += g.NumRows
		for j := range g.Columns {
			m := &g.Columns[j].MetaData
			if m.DataPageOffset < 0 || m.TotalCompressedSize < 0 || m.DataPageOffset > size || m.TotalCompressedSize > size-m.DataPageOffset {
				return nil, foreign("a column lies outside of the file")
			}
			if m.Codec != format.Zstd && m.Codec != format.Uncompressed {
				return nil, foreign("compression %v", m.Codec)
			}
		}
	}
	if rows != meta.NumRows {
		return nil, foreign("%d rows are told, and its groups have %d", meta.NumRows, rows)
	}
	p.cells = make([]Cell, len(p.table.Columns))
	p.zstd, err = zstd.NewReader(nil, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxMemory(maxPage))
	return p, err
}

func readFooter(file io.ReaderAt, size int64) (*format.FileMetaData, error) {
	var tail [8]byte
	if size < int64(len(tail)+len(magic)) {
		return nil, ErrCut
	}
	if _, err := file.ReadAt(tail[:], size-int64(len(tail))); err != nil {
		return nil, err
	}
	if string(tail[4:]) != magic {
		return nil, ErrCut
	}
	n := int64(binary.LittleEndian.Uint32(tail[:]))
	if n > maxFooter || n > size-int64(len(tail)) {
		return nil, foreign("an end of %d bytes", n)
	}
	b := make([]byte, n)
	if _, err := file.ReadAt(b, size-int64(len(tail))-n); err != nil {
		return nil, err
	}
	if used, err := checkThrift(b); err != nil || used != len(b) {
		return nil, foreign("an end that can't be read")
	}
	meta := new(format.FileMetaData)
	if err := thrift.Unmarshal(new(thrift.CompactProtocol), b, meta); err != nil {
		return nil, foreign("%w", err)
	}
	return meta, nil
}

// told returns of what table and window a file says that it is.
func told(meta *format.FileMetaData, tables Tables) (table *Table, head Head, err error) {
	says := make(map[string]string)
	for _, kv := range meta.KeyValueMetadata {
		says[kv.Key] = kv.Value
	}
	switch says[versionKey] {
	case fmt.Sprint(Version):
	case "":
		return nil, head, errForeign
	default:
		return nil, head, fmt.Errorf("the file has version %.16q, and this kvstrata reads %d", says[versionKey], Version)
	}
	if head.Since, err = time.Parse(secondLayout, says[sinceKey]); err == nil {
		head.Until, err = time.Parse(secondLayout, says[untilKey])
	}
	if err == nil {
		table, err = tables.Named(says[tableKey])
	}
	return table, head, err
}

// schema finds the table's columns in the file's.
func (p *ParquetReader) schema(elements []format.SchemaElement) error {
	if len(elements) == 0 {
		return foreign("no columns")
	}
	there := make([]bool, len(p.table.Columns))
	for _, e := range elements[1:] {
		i := p.table.column(e.Name)
		switch {
		case i < 0:
			return fmt.Errorf("table %s has no column %.64q here; was the file written by a newer kvstrata?", p.table.Name, e.Name)
		case there[i] || e.NumChildren.Valid || !e.Type.Valid || e.RepetitionType.Valid && e.RepetitionType.V != format.Required:
			return foreign("column %s is there twice, or nested, or not required", p.table.Columns[i].Name)
		}
		c := &p.table.Columns[i]
		want := format.Int32
		switch {
		case c.Kind == Text:
			want = format.ByteArray
		case c.wide():
			want = format.Int64
		}
		if e.Type.V != want {
			return fmt.Errorf("column %s is of type %v: want %v", c.Name, e.Type.V, want)
		}
		there[i] = true
		p.places = append(p.places, i)
	}
	for _, name := range p.table.Needed {
		if i := p.table.column(name); i >= 0 && !there[i] {
			return fmt.Errorf("column %s is missing", name)
		}
	}
	return nil
}

// Head returns what the file says of itself.
func (p *ParquetReader) Head() Head { return p.head }

// Close gives up what the reader holds.
func (p *ParquetReader) Close() { p.zstd.Close() }

// Next returns the next row, and io.EOF behind the last.
func (p *ParquetReader) Next() (Row, error) {
	for p.left == 0 {
		if err := p.finished(); err != nil {
			return Row{}, err
		}
		if len(p.groups) == 0 {
			return Row{}, io.EOF
		}
		g := &p.groups[0]
		p.groups, p.left, p.columns = p.groups[1:], g.NumRows, p.columns[:0]
		for i := range g.Columns {
			m := &g.Columns[i].MetaData
			p.columns = append(p.columns, pages{
				file: p.file, at: m.DataPageOffset, end: m.DataPageOffset + m.TotalCompressedSize, zstd: p.zstd, packed: m.Codec == format.Zstd,
			})
		}
	}
	p.left--
	p.rows++
	for i, place := range p.places {
		c := &p.table.Columns[place]
		cell, err := p.columns[i].next(c)
		if err != nil {
			return Row{}, fmt.Errorf("row %d, column %s: %w", p.rows, c.Name, err)
		}
		p.cells[place] = cell
	}
	return Row{p.table, p.cells}, nil
}

// finished checks that a group's columns have no more values than it has rows.
func (p *ParquetReader) finished() error {
	for i := range p.columns {
		if c := &p.columns[i]; c.values > 0 || len(c.page) > 0 {
			return foreign("column %s has more values than there are rows", p.table.Columns[p.places[i]].Name)
		}
	}
	return nil
}

// pages are the pages of one column of a row group, one at a time.
type pages struct {
	file    io.ReaderAt
	at, end int64
	zstd    *zstd.Decoder
	packed  bool
	header  []byte
	raw     []byte
	decoded []byte
	page    []byte // what is left of it
	values  int32
}

func (p *pages) next(c *Column) (Cell, error) {
	for p.values == 0 {
		if len(p.page) > 0 {
			return Cell{}, foreign("a page has more bytes than values")
		}
		if p.at >= p.end {
			return Cell{}, foreign("fewer values than rows")
		}
		if err := p.load(); err != nil {
			return Cell{}, err
		}
	}
	p.values--
	take := func(n uint64) ([]byte, error) {
		if n > uint64(len(p.page)) {
			return nil, foreign("a page has fewer bytes than values")
		}
		b := p.page[:n]
		p.page = p.page[n:]
		return b, nil
	}
	if c.wide() {
		b, err := take(8)
		if err != nil {
			return Cell{}, err
		}
		return c.cell(binary.LittleEndian.Uint64(b))
	}
	b, err := take(4)
	if err != nil {
		return Cell{}, err
	}
	n := binary.LittleEndian.Uint32(b)
	if c.Kind != Text {
		return c.cell(uint64(n))
	}
	b, err = take(uint64(n))
	return Cell{S: string(b)}, err
}

// load reads the next page.
func (p *pages) load() error {
	if p.header == nil {
		p.header = make([]byte, maxHeader)
	}
	n, err := p.file.ReadAt(p.header[:min(maxHeader, p.end-p.at)], p.at)
	if err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	used, err := checkThrift(p.header[:n])
	if err != nil {
		return foreign("a page's head can't be read")
	}
	var h format.PageHeader
	if err := thrift.Unmarshal(new(thrift.CompactProtocol), p.header[:used], &h); err != nil {
		return foreign("a page's head: %w", err)
	}
	p.at += int64(used)
	packed, whole := int64(h.CompressedPageSize), int64(h.UncompressedPageSize)
	if packed < 0 || packed > maxPage || whole < 0 || whole > maxPage || packed > p.end-p.at {
		return foreign("a page of %d bytes, %d unpacked", packed, whole)
	}
	v2 := &h.DataPageHeaderV2.V
	switch {
	case h.Type != format.DataPageV2 || !h.DataPageHeaderV2.Valid || v2.Encoding != format.Plain:
		return foreign("a page that is not plain")
	case v2.DefinitionLevelsByteLength != 0 || v2.RepetitionLevelsByteLength != 0 || v2.NumNulls != 0 || v2.NumValues < 0:
		return foreign("values are missing, or nested")
	}
	if int64(cap(p.raw)) < packed {
		p.raw = make([]byte, packed)
	}
	p.raw = p.raw[:packed]
	if _, err := p.file.ReadAt(p.raw, p.at); err != nil {
		return err
	}
	p.at += packed
	p.values, p.page = v2.NumValues, p.raw
	if p.packed && (!v2.IsCompressed.Valid || v2.IsCompressed.V) {
		if p.decoded, err = p.zstd.DecodeAll(p.raw, p.decoded[:0]); err != nil {
			return foreign("a page can't be unpacked: %w", err)
		}
		p.page = p.decoded
	}
	if int64(len(p.page)) != whole {
		return foreign("a page of %d bytes, and %d are told", len(p.page), whole)
	}
	return nil
}
