package history

import (
	"context"
	"fmt"
	"maps"
	"math"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/ClickHouse/clickhouse-go/v2"
	"github.com/ClickHouse/clickhouse-go/v2/lib/driver"
)

// Answer is what a question gave. Times are Unix milliseconds, hashes hexadecimal, unknown values null.
type Answer struct {
	Query string `json:"query"`
	Title string `json:"title"`
	Since int64  `json:"since"`
	Until int64  `json:"until"`

	BeforeSince int64 `json:"before_since,omitempty"` // of a comparison
	BeforeUntil int64 `json:"before_until,omitempty"`

	Exactness string   `json:"exactness"` // exact, sampled or inferred
	Notes     []string `json:"notes"`
	Columns   []Column `json:"columns"`
	Rows      [][]any  `json:"rows"`
	Chart     Chart    `json:"chart"`
	Truncated bool     `json:"truncated"`
	Elapsed   float64  `json:"elapsed_ms"`
	SQL       string   `json:"sql,omitempty"`
}

// sampledOf says of an answer that it looked at one block in so many.
func (a *Answer) sampledOf(share uint64) {
	if share > 1 {
		a.Exactness = "sampled"
		a.Notes = append(a.Notes, fmt.Sprintf("one block in %d was looked at, by its hash, and numbers of blocks and tokens are times %d", share, share))
	}
}

// rows runs a query whose columns are an answer's, and adds its rows.
func (r *Reader) rows(ctx context.Context, sql string, bound clickhouse.Parameters, a *Answer) error {
	return r.each(ctx, sql, bound, func(rows driver.Rows) error {
		row, err := values(rows)
		if err != nil {
			return err
		}
		for i := range row {
			row[i] = cell(row[i], a.Columns[i].Kind)
		}
		a.Rows = append(a.Rows, row)
		return nil
	})
}

// values reads a row's values, whatever their types.
func values(rows driver.Rows) ([]any, error) {
	types := rows.ColumnTypes()
	targets := make([]any, len(types))
	for i, t := range types {
		targets[i] = reflect.New(t.ScanType()).Interface()
	}
	if err := rows.Scan(targets...); err != nil {
		return nil, fmt.Errorf("read answer: %w", err)
	}
	for i := range targets {
		targets[i] = reflect.ValueOf(targets[i]).Elem().Interface()
	}
	return targets, nil
}

// cell returns a value as JSON has it.
func cell(v any, kind string) any {
	switch v := v.(type) {
	case time.Time:
		if v.Unix() == 0 {
			return nil
		}
		return v.UnixMilli()
	case uint64:
		if kind == "hash" {
			return hashText(v)
		}
		return v
	case float64:
		if math.IsNaN(v) || math.IsInf(v, 0) {
			return nil
		}
		return v
	case float32:
		return cell(float64(v), kind)
	default:
		if p := reflect.ValueOf(v); p.Kind() == reflect.Pointer { // of a Nullable
			if p.IsNil() {
				return nil
			}
			return cell(p.Elem().Interface(), kind)
		}
		return v
	}
}

// explained is a query with its parameters in front, to be run by hand.
func explained(sql string, bound clickhouse.Parameters) string {
	var b strings.Builder
	for _, name := range slices.Sorted(maps.Keys(bound)) {
		if strings.Contains(sql, "{"+name+":") {
			fmt.Fprintf(&b, "SET param_%s = '%s';\n", name, strings.NewReplacer(`\`, `\\`, `'`, `\'`).Replace(bound[name]))
		}
	}
	return b.String() + sql
}
