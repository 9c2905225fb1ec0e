package migrations

import (
	"context"
	"database/sql"
	"fmt"
	"io/fs"
	"regexp"
	"strconv"
)

// Table is a table that forgets: days whole that lie so far back are dropped.
type Table struct {
	Name string
	Days int // unless it is told otherwise
	date string
}

// created are the statements that make a table; keeps is where one says how long the rows stay.
var (
	created = regexp.MustCompile(`(?s)-- \+goose StatementBegin\n(.*?)-- \+goose StatementEnd`)
	keeps   = regexp.MustCompile(`(?m)^TTL ([\w()]+) \+ INTERVAL (\d+) DAY$`)
)

// Tables lists the tables that forget, in the order in which they are made.
func Tables() (list []Table, err error) {
	names, err := fs.Glob(files, "sql/*.sql")
	if err != nil {
		return nil, err
	}
	for _, name := range names {
		text, err := fs.ReadFile(files, name)
		if err != nil {
			return nil, err
		}
		for _, statement := range created.FindAllStringSubmatch(string(text), -1) {
			table, ttl := createTable.FindStringSubmatch(statement[1]), keeps.FindStringSubmatch(statement[1])
			if table == nil || ttl == nil {
				continue
			}
			days, err := strconv.Atoi(ttl[2])
			if err != nil {
				return nil, fmt.Errorf("%s: %w", name, err)
			}
			list = append(list, Table{Name: table[1], Days: days, date: ttl[1]})
		}
	}
	return list, nil
}

// keptDays is how long a table keeps its rows, as ClickHouse writes it down.
var keptDays = regexp.MustCompile(`TTL .* \+ toIntervalDay\((\d+)\)`)

// keep makes each table keep its rows for as many days as it is told to, or as the migrations say.
func keep(ctx context.Context, db *sql.DB, cluster string, days map[string]int) error {
	tables, err := Tables()
	if err != nil {
		return err
	}
	for _, t := range tables {
		want, told := days[t.Name]
		if !told {
			want = t.Days
		}
		name := local(t.Name, cluster)
		var engine string
		if err := db.QueryRowContext(ctx, "SELECT engine_full FROM system.tables WHERE database = currentDatabase() AND name = ?", name).Scan(&engine); err != nil {
			return fmt.Errorf("read how long %s keeps its rows: %w", name, err)
		}
		m := keptDays.FindStringSubmatch(engine)
		if m == nil && !told || m != nil && m[1] == strconv.Itoa(want) {
			continue // one that keeps its rows for ever was made so: an import
		}
		on := ""
		if cluster != "" {
			on = " ON CLUSTER '" + cluster + "'"
		}
		if _, err := db.ExecContext(ctx, fmt.Sprintf("ALTER TABLE %s%s MODIFY TTL %s + INTERVAL %d DAY", name, on, t.date, want)); err != nil {
			return fmt.Errorf("make %s keep its rows for %d days: %w", name, want, err)
		}
	}
	return nil
}
