// Package history keeps every block event in ClickHouse, and answers questions about them.
//
// One [Writer] a stream writes; any number of [Reader]s ask. The writer is exact: what the stream holds is in each table
// once, whatever was redelivered or killed in between. A table's rows carry their place in the stream; a round of inserts
// ends with the writer's own place in the table progress, and a start goes on from there.
package history

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"maps"
	"net/url"
	"regexp"
	"strings"
	"time"

	"github.com/ClickHouse/clickhouse-go/v2"
	"github.com/ClickHouse/clickhouse-go/v2/lib/proto"

	"kvstrata/event"
	"kvstrata/indexer/history/embedded"
	"kvstrata/migrations"
)

// Config says which ClickHouse to use, and how the writer batches.
type Config struct {
	// Address is clickhouse://user:password@host:9000/database (native protocol), http://… or https://…, or
	// unix:///path/of/clickhouse.sock for the embedded engine.
	Address string
	// FlushEvery is how long a row waits at most before its round is written; a round of MaxRows rows is written at once.
	// Larger rounds cost ClickHouse less to merge, and us memory: two rounds of some 90 bytes a row, and as much again for
	// the one that is being sent.
	FlushEvery time.Duration
	MaxRows    int
	// RollUpEvery is how long what was told waits at most to be counted by time. Questions that only count read the rows of what waits.
	RollUpEvery time.Duration
	// InsertTimeout is how long ClickHouse may take for one statement of the writer, before that is tried again.
	InsertTimeout time.Duration
	// MaxTime and MaxMemory bound a query of a reader.
	MaxTime   time.Duration
	MaxMemory int64 // bytes
	// MaxRowsAnswered bounds an answer.
	MaxRowsAnswered int
	// Committed, which may be nil, is told each source's place after each round that moved it. It must not wait.
	Committed func(event.Source, event.Mark)
}

// DefaultConfig returns the bounds of a writer and of readers, without an address.
func DefaultConfig() Config {
	return Config{
		FlushEvery: time.Second, MaxRows: 400_000, RollUpEvery: 5 * time.Second, InsertTimeout: time.Minute,
		MaxTime: 20 * time.Second, MaxMemory: 2 << 30, MaxRowsAnswered: 10_000,
	}
}

// Validate returns every problem at once.
func (c Config) Validate() error {
	var errs []error
	if _, err := c.address(); err != nil {
		errs = append(errs, err)
	}
	if c.FlushEvery < time.Millisecond || c.RollUpEvery < time.Millisecond || c.InsertTimeout < time.Millisecond {
		errs = append(errs, errors.New("flush interval, roll-up interval and insert timeout: want 1ms or more"))
	}
	if c.MaxRows < 1 || c.MaxTime <= 0 || c.MaxMemory <= 0 || c.MaxRowsAnswered < 1 {
		errs = append(errs, errors.New("rows of a round, and the bounds of a query: want more than 0"))
	}
	return errors.Join(errs...)
}

// defaultDatabase is where the tables are when the address names no database.
const defaultDatabase = "kvstrata"

var databaseName = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]{0,63}$`)

// address is a parsed Config.Address.
type address struct {
	socket   string // of the embedded engine; empty for a server
	server   *clickhouse.Options
	database string
}

func (c Config) address() (address, error) {
	bad := func(err error) (address, error) {
		return address{}, fmt.Errorf("--clickhouse %q: %w; want clickhouse://host:9000, http://host:8123 or unix:///path", redact(c.Address), err)
	}
	u, err := url.Parse(c.Address)
	if err != nil {
		return bad(errors.New("not a URL"))
	}
	if u.Scheme == "unix" {
		if u.Path == "" || u.Host != "" {
			return bad(errors.New("want three slashes and a path"))
		}
		return address{socket: u.Path, database: defaultDatabase}, nil
	}
	values := u.Query()
	switch {
	case u.Host == "":
		return bad(errors.New("no host"))
	case u.Scheme == "https" && !values.Has("secure"):
		values.Set("secure", "true") // the client library wants it said twice
		u.RawQuery = values.Encode()
	case u.Scheme != "clickhouse" && u.Scheme != "http" && u.Scheme != "https":
		return bad(errors.New("no such scheme"))
	}
	options, err := clickhouse.ParseDSN(u.String())
	if err != nil {
		return bad(err)
	}
	a := address{server: options, database: defaultDatabase}
	if name := options.Auth.Database; name != "" && name != "default" {
		a.database = name
	}
	if !databaseName.MatchString(a.database) {
		return bad(fmt.Errorf("database %q: want letters, digits and _", a.database))
	}
	if options.Compression == nil {
		options.Compression = &clickhouse.Compression{Method: clickhouse.CompressionLZ4}
	}
	return a, nil
}

// redact returns an address without its password, wherever it stands.
func redact(text string) string {
	u, err := url.Parse(text)
	if err != nil {
		return "(an address that is no URL)"
	}
	values := u.Query()
	for name := range values {
		if strings.Contains(strings.ToLower(name), "pass") {
			values.Set(name, "xxxxx")
		}
	}
	u.RawQuery = values.Encode()
	return u.Redacted()
}

// options returns what a connection to the database needs.
func (a address) options(pool embedded.Pool, database string) *clickhouse.Options {
	var o *clickhouse.Options
	if a.socket != "" {
		o = embedded.Dial(a.socket, pool)
	} else {
		copied := *a.server
		o = &copied
	}
	if a.socket == "" && (pool == embedded.Writer || pool == embedded.Aside) {
		// A round's block is stored as it is, and before it is acknowledged.
		o.Settings = maps.Clone(o.Settings)
		if o.Settings == nil {
			o.Settings = make(clickhouse.Settings)
		}
		o.Settings["async_insert"], o.Settings["insert_deduplicate"] = 0, 1
	}
	o.Auth.Database = database
	return o
}

// open connects to the database.
func (c Config) open(pool embedded.Pool) (clickhouse.Conn, error) {
	a, err := c.address()
	if err != nil {
		return nil, err
	}
	return clickhouse.Open(a.options(pool, a.database))
}

// Migrate makes the database if need be, and brings it to the present schema.
func Migrate(ctx context.Context, cfg Config) ([]migrations.Step, error) {
	a, err := cfg.address()
	if err != nil {
		return nil, err
	}
	root, err := clickhouse.Open(a.options(embedded.Writer, "default"))
	if err != nil {
		return nil, fmt.Errorf("connect to ClickHouse at %s: %w", redact(cfg.Address), err)
	}
	defer root.Close()
	var there uint64 // whoever may write in a database need not be allowed to make one
	if err := root.QueryRow(ctx, "SELECT count() FROM system.databases WHERE name = '"+a.database+"'").Scan(&there); err != nil {
		return nil, fmt.Errorf("look for database %s at %s: %w", a.database, redact(cfg.Address), err)
	}
	if there == 0 {
		if err := root.Exec(ctx, "CREATE DATABASE IF NOT EXISTS "+a.database); err != nil {
			return nil, fmt.Errorf("make database %s at %s: %w", a.database, redact(cfg.Address), err)
		}
	}
	db := clickhouse.OpenDB(a.options(embedded.Writer, a.database))
	defer db.Close()
	return migrations.Up(ctx, db)
}

// Status lists the migrations, applied or not.
func Status(ctx context.Context, cfg Config) ([]migrations.Step, error) {
	a, err := cfg.address()
	if err != nil {
		return nil, err
	}
	var db *sql.DB = clickhouse.OpenDB(a.options(embedded.Writer, a.database))
	defer db.Close()
	steps, err := migrations.Status(ctx, db)
	var exception *proto.Exception
	if errors.As(err, &exception) && (exception.Code == codeUnknownDB || exception.Code == codeUnknownTable) {
		err = fmt.Errorf("%w: %w", ErrNoTables, err)
	}
	return steps, err
}

// ErrNoTables says that nothing was migrated yet.
var ErrNoTables = errors.New("no tables yet")
