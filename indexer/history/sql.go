package history

import (
	"context"

	"github.com/ClickHouse/clickhouse-go/v2/lib/driver"

	"kvstrata/indexer/history/embedded"
)

// Free runs SQL that anybody wrote. It may be used by any number of goroutines.
type Free struct{ reader *Reader }

// NewFree returns a runner of SQL that reads only: on the embedded engine by its pool for that, which refuses before it runs what reaches out of
// the database; elsewhere with readonly=1 and our bounds of time and memory beside those of the user. The caller closes it.
func NewFree(cfg Config) (*Free, error) {
	r, err := newReader(cfg, embedded.Free)
	if err != nil {
		return nil, err
	}
	r.readOnly = 1
	return &Free{r}, nil
}

// Close ends the connections.
func (f *Free) Close() error { return f.reader.Close() }

// Named is a column of an answer to SQL, with ClickHouse's type.
type Named struct{ Name, Type string }

// Run runs one statement. It calls head before the first row, and row for each until that returns an error, which Run then returns.
// A statement that gives no row has no head.
func (f *Free) Run(ctx context.Context, statement string, head func([]Named) error, row func([]any) error) error {
	begun := false
	return f.reader.each(ctx, statement, nil, func(rows driver.Rows) error {
		if !begun {
			begun = true
			columns := make([]Named, 0, len(rows.Columns()))
			for _, t := range rows.ColumnTypes() {
				columns = append(columns, Named{t.Name(), t.DatabaseTypeName()})
			}
			if err := head(columns); err != nil {
				return err
			}
		}
		cells, err := values(rows)
		if err != nil {
			return err
		}
		return row(cells)
	})
}
