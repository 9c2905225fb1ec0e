package history

import (
	"context"
	"encoding/binary"
	"fmt"
	"time"

	"github.com/ClickHouse/clickhouse-go/v2"

	"kvstrata/indexer/history/embedded"
)

// nativeInserter inserts into the embedded engine: it writes the columns as one block in ClickHouse's Native format, into
// memory that it keeps. One goroutine uses it for rows that add up, and one for the others.
type nativeInserter struct {
	database    string
	told, added nativeLane
}

// nativeLane is one insert after the other.
type nativeLane struct {
	to    *embedded.Inserter
	block []byte
}

func newNativeInserter(socket, database string) *nativeInserter {
	return &nativeInserter{
		database: database, told: nativeLane{to: embedded.NewInserter(socket, embedded.Writer)},
		added: nativeLane{to: embedded.NewInserter(socket, embedded.Aside)},
	}
}

func (n *nativeInserter) insert(ctx context.Context, _ clickhouse.Conn, d delivery, token string) error {
	lane := &n.told
	if d.adds {
		lane = &n.added
	}
	columns := d.columns()
	names := make([]string, len(columns))
	for i, c := range columns {
		names[i] = c.name
	}
	lane.block = appendNative(lane.block[:0], columns, d.rows)
	if err := d.clear(); err != nil {
		return err
	}
	if err := lane.to.Insert(ctx, n.database, d.table, names, token, d.queryID, lane.block); err != nil {
		return fmt.Errorf("insert into %s: %w", d.table, err)
	}
	return nil
}

func (n *nativeInserter) close() {
	n.told.to.Close()
	n.added.to.Close()
}

// appendNative appends columns as one block in ClickHouse's Native format
// (https://clickhouse.com/docs/interfaces/formats/Native): the numbers of columns and rows, and for each column its name, its
// type and its values, little-endian, texts behind their lengths, or as places in a dictionary.
func appendNative(b []byte, columns []column, rows int) []byte {
	b = binary.AppendUvarint(b, uint64(len(columns)))
	b = binary.AppendUvarint(b, uint64(rows))
	for _, c := range columns {
		b = appendText(b, c.name)
		if v, ok := c.values.(words); ok {
			b = v.appendNative(appendText(b, "LowCardinality("+c.typ+")"))
			continue
		}
		b = appendText(b, c.typ)
		switch v := c.values.(type) {
		case seconds:
			b = appendFixed(b, v, 4, binary.LittleEndian.AppendUint32)
		case days:
			for range v.rows {
				b = binary.LittleEndian.AppendUint16(b, v.day)
			}
		case micros:
			b = appendFixed(b, v, 8, func(b []byte, us int64) []byte { return binary.LittleEndian.AppendUint64(b, uint64(us)) })
		case []time.Time:
			b = appendFixed(b, v, 8, func(b []byte, t time.Time) []byte { return binary.LittleEndian.AppendUint64(b, uint64(t.UnixMicro())) })
		case []string:
			for _, text := range v {
				b = appendText(b, text)
			}
		case lists[uint64]:
			b = appendFixed(appendFixed(b, v.ends, 8, binary.LittleEndian.AppendUint64), v.values, 8, binary.LittleEndian.AppendUint64)
		case lists[uint32]:
			b = appendFixed(appendFixed(b, v.ends, 8, binary.LittleEndian.AppendUint64), v.values, 4, binary.LittleEndian.AppendUint32)
		case lists[uint8]:
			b = append(appendFixed(b, v.ends, 8, binary.LittleEndian.AppendUint64), v.values...)
		case []uint64:
			b = appendFixed(b, v, 8, binary.LittleEndian.AppendUint64)
		case []int64:
			b = appendFixed(b, v, 8, func(b []byte, n int64) []byte { return binary.LittleEndian.AppendUint64(b, uint64(n)) })
		case []uint32:
			b = appendFixed(b, v, 4, binary.LittleEndian.AppendUint32)
		case []int32:
			b = appendFixed(b, v, 4, func(b []byte, n int32) []byte { return binary.LittleEndian.AppendUint32(b, uint32(n)) })
		case []uint8:
			b = append(b, v...)
		case []int8:
			b = appendFixed(b, v, 1, func(b []byte, n int8) []byte { return append(b, uint8(n)) })
		default:
			panic(fmt.Sprintf("history: column %s has values of type %T", c.name, v))
		}
	}
	return b
}

// Parts of a LowCardinality column: its version, and of the kind of its indexes, that they are of 32 bits into a dictionary of
// its own, which comes with it.
const (
	cardinalityVersion = 1
	cardinalityKind    = 2 | 1<<9 | 1<<10
)

// appendNative appends the dictionary and the values' places in it.
func (w words) appendNative(b []byte) []byte {
	b = binary.LittleEndian.AppendUint64(b, cardinalityVersion)
	b = binary.LittleEndian.AppendUint64(b, cardinalityKind)
	b = binary.LittleEndian.AppendUint64(b, uint64(len(w.texts)))
	for _, t := range w.texts {
		b = appendText(b, t)
	}
	b = binary.LittleEndian.AppendUint64(b, uint64(len(w.ids)))
	return appendFixed(b, w.ids, 4, binary.LittleEndian.AppendUint32)
}

func appendText(b []byte, text string) []byte {
	return append(binary.AppendUvarint(b, uint64(len(text))), text...)
}

// appendFixed appends values of so many bytes each; the memory grows once.
func appendFixed[T any](b []byte, values []T, size int, one func([]byte, T) []byte) []byte {
	if need := len(b) + size*len(values); need > cap(b) {
		b = append(make([]byte, 0, max(need, 2*cap(b))), b...)
	}
	for _, v := range values {
		b = one(b, v)
	}
	return b
}
