package history

import (
	"context"
	"slices"

	"github.com/ClickHouse/clickhouse-go/v2"

	"kvstrata/indexer/history/archive"
)

// RowsAtOnce bounds how many rows a dump asks for at once, until it is called off.
func RowsAtOnce(n uint64) (off func()) {
	before := slices.Clone(keptTables)
	for i := range keptTables {
		keptTables[i].rows = n
	}
	return func() { keptTables = before }
}

// DumpedColumns returns the columns of a table that files have, as expressions that are alike whether a table has them, or a file.
func DumpedColumns(ctx context.Context, conn clickhouse.Conn, table string) (list []string) {
	l := &Loader{conn: conn}
	layouts, err := readLayouts(ctx, l.query)
	if err != nil {
		panic(err)
	}
	for _, t := range layouts {
		for i := 0; i < len(t.Columns) && t.keptTable.name == table; i++ {
			switch c := t.Columns[i]; c.Kind {
			case archive.Text:
				list = append(list, "toString("+c.Name+")")
			case archive.Micros, archive.Seconds:
				list = append(list, "toUnixTimestamp64Micro(toDateTime64("+c.Name+", 6, 'UTC'))")
			default:
				list = append(list, c.Name)
			}
		}
	}
	return list
}

// ToServer lets a loader insert as it would into a server.
func (l *Loader) ToServer() { l.insert = insert }

// Asks counts the questions by which a dump reads a table.
func (d *Dump) Asks(ctx context.Context, table string) (asks uint64, err error) {
	for _, l := range d.all {
		if l.keptTable.name != table {
			continue
		}
		pieces, err := d.pieces(ctx, l)
		for _, p := range pieces {
			asks += p.shares
		}
		return asks, err
	}
	return 0, nil
}
