package history

import (
	"context"
	"math/bits"
	"time"

	"github.com/ClickHouse/clickhouse-go/v2"
	"github.com/ClickHouse/clickhouse-go/v2/lib/driver"

	"kvstrata/event"
)

// Insert is one insert of a writer, for a test to perform or not.
type Insert struct {
	Table string
	Token string
	Rows  int
	Days  int // on which they were committed
	Send  func() error
}

// Intercept lets a test stand between a writer and ClickHouse. It is called before Run.
func (w *Writer) Intercept(f func(Insert) error) {
	real := w.insert
	w.insert = func(ctx context.Context, conn clickhouse.Conn, d delivery, token string) error {
		days := make(map[int64]bool)
		for _, c := range d.columns() {
			if at, ok := expand(c.values).([]time.Time); ok && c.name == "committed" {
				for _, t := range at {
					days[t.Unix()/86400] = true
				}
			}
		}
		return f(Insert{d.table, token, d.rows, len(days), func() error { return real(ctx, conn, d, token) }})
	}
}

// CommittedRecords returns the place in the stream of records up to which everything is in the tables for good.
func (w *Writer) CommittedRecords() event.Position {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.committed.records
}

// Stopped reports whether Run has ended, or has not begun.
func (w *Writer) Stopped() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.open == nil
}

// Waiting returns how many rows a writer holds that are not inserted.
func (w *Writer) Waiting() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.open == nil {
		return 0
	}
	return w.open.rows()
}

// Bind checks the values of a named query and returns its window.
func Bind(name string, values map[string]string, now time.Time) (since, until time.Time, err error) {
	q, err := QueryNamed(name)
	if err != nil {
		return time.Time{}, time.Time{}, err
	}
	_, w, _, err := q.bind(values, now, DefaultConfig().MaxRowsAnswered)
	return w.since, w.until, err
}

// HashText writes a hash as answers do.
func HashText(n uint64) string { return hashText(n) }

// Probe runs any query as a reader runs its own.
func Probe(ctx context.Context, r *Reader, sql string) error {
	return r.each(ctx, sql, nil, func(driver.Rows) error { return nil })
}

// WriteError answers with an error.
var WriteError = writeError

// Sample bounds the rows that curves are made of.
func (r *Reader) Sample(rows uint64) { r.sample = rows }

// InterceptRollups lets a test stand between what rolls up and ClickHouse. It is called before Run.
func (w *Writer) InterceptRollups(f func(send func() error) error) {
	real := w.exec
	w.exec = func(ctx context.Context, conn clickhouse.Conn, sql string) error {
		return f(func() error { return real(context.WithoutCancel(ctx), conn, sql) }) // it may be sent late
	}
}

// RowsOnly makes a reader count rows.
func (r *Reader) RowsOnly() { r.rowsOnly = true }

// RoundedAge is an age in ms as it is counted in roll-ups.
func RoundedAge(ms int64) int64 {
	digits := bits.Len64(uint64(ms))
	rounded := ms
	if digits > 8 {
		rounded = ms >> (digits - 8) << (digits - 8)
	}
	for _, b := range bands {
		if b.from <= ms {
			rounded = max(rounded, b.from)
		}
	}
	return rounded
}

// AtOnce bounds the block events over which a state's blocks are added up at once.
func (r *Reader) AtOnce(events uint64) { r.atOnce = events }
