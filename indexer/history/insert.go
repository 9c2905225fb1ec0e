package history

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/ClickHouse/clickhouse-go/v2"
)

// insertFunc is insert, or a test's in its place.
type insertFunc func(ctx context.Context, conn clickhouse.Conn, d delivery, token string) error

// execFunc is exec, or a test's in its place.
type execFunc func(ctx context.Context, conn clickhouse.Conn, sql string) error

func exec(ctx context.Context, conn clickhouse.Conn, sql string) error { return conn.Exec(ctx, sql) }

// insert sends rows as one block under a token: the same rows sent twice are stored once.
func insert(ctx context.Context, conn clickhouse.Conn, d delivery, token string) error {
	columns := d.columns()
	names := make([]string, len(columns))
	types := make([]clickhouse.ColumnNameAndType, len(columns)) // only over HTTP, where they save a question
	for i, c := range columns {
		names[i], types[i] = c.name, clickhouse.ColumnNameAndType{Name: c.name, Type: c.typ}
	}
	ctx = clickhouse.Context(ctx, clickhouse.WithQueryID(d.queryID), clickhouse.WithColumnNamesAndTypes(types),
		clickhouse.WithSettings(clickhouse.Settings{"insert_deduplication_token": token}))
	batch, err := conn.PrepareBatch(ctx, "INSERT INTO "+d.table+" ("+strings.Join(names, ", ")+")")
	if err != nil {
		return fmt.Errorf("begin insert into %s: %w", d.table, err)
	}
	defer batch.Close()
	for i, c := range columns {
		if err := batch.Column(i).Append(expand(c.values)); err != nil {
			return fmt.Errorf("insert into %s: column %s: %w", d.table, c.name, err)
		}
	}
	if err := d.clear(); err != nil {
		return err
	}
	if err := batch.Send(); err != nil {
		return fmt.Errorf("insert into %s: %w", d.table, err)
	}
	return nil
}

// queryIDPrefix begins the ids of all inserts, by which a new writer ends those of the one before it.
const queryIDPrefix = "kvstrata-history-"

// keys are the columns that tell a delivery's last row from all other rows.
var keys = map[string]bool{
	"committed": true, "stream": true, "stream_seq": true, "source": true, "epoch": true, "seq": true, "ev": true, "pos": true, "rec": true,
	"last": true, "snapshot": true, "hash": true, "engine_hash": true, "kv_group": true, "round": true,
}

// condition returns what tells a delivery's last row from others, and the values bound to it.
func (d *delivery) condition() (string, clickhouse.Parameters) {
	bound := clickhouse.Parameters{}
	var where []string
	for _, c := range d.columns() {
		if !keys[c.name] {
			continue
		}
		last := ""
		switch v := c.values.(type) {
		case seconds:
			last = time.Unix(int64(v[len(v)-1]), 0).UTC().Format(time.DateTime)
		case micros:
			last = time.UnixMicro(v[len(v)-1]).UTC().Format(microsecondsFormat)
		case words:
			last = v.texts[v.ids[len(v.ids)-1]] // a source's tokens: nothing to escape
		case []time.Time:
			last = v[len(v)-1].UTC().Format(microsecondsFormat)
		case []string:
			last = v[len(v)-1]
		case []int64:
			last = strconv.FormatInt(v[len(v)-1], 10)
		case []int32:
			last = strconv.FormatInt(int64(v[len(v)-1]), 10)
		case []uint32:
			last = strconv.FormatUint(uint64(v[len(v)-1]), 10)
		case []uint64:
			last = strconv.FormatUint(v[len(v)-1], 10)
		default:
			panic("history: no such key: " + c.name)
		}
		bound[c.name] = last
		where = append(where, fmt.Sprintf("%s = {%s:%s}", c.name, c.name, c.typ))
	}
	return strings.Join(where, " AND "), bound
}
