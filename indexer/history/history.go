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
	"slices"
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
	// Cluster is the name of a cluster in the servers' configuration: tables are then sharded by source, and replicated, over it. Empty: one
	// server.
	Cluster string
	// Keep is how many days tables keep their rows, of those where it is not as the migrations say.
	Keep map[string]int
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
	// HashKey is the subscriber's key of prefix hashes, for prompts that are to be explained; empty for the public scheme.
	HashKey string
	// Committed, which may be nil, is told each source's place after each round that moved it. It must not wait.
	Committed func(event.Source, event.Mark)
	// Clock stamps the rows of the ledger that are the writer's own; nil is the time. An import's is the file's.
	Clock func() time.Time
}

// DefaultConfig returns the bounds of a writer and of readers, without an address.
func DefaultConfig() Config {
	return Config{
		FlushEvery: time.Second, MaxRows: 400_000, RollUpEvery: 5 * time.Second, InsertTimeout: time.Minute,
		MaxTime: 20 * time.Second, MaxMemory: 2 << 30, MaxRowsAnswered: 10_000,
	}
}

// now returns the time by the clock.
func (c *Config) now() time.Time {
	if c.Clock != nil {
		return c.Clock()
	}
	return time.Now()
}

// Validate returns every problem at once.
func (c Config) Validate() error {
	var errs []error
	if _, err := c.address(); err != nil {
		errs = append(errs, err)
	}
	if c.Cluster != "" && !clusterName.MatchString(c.Cluster) {
		errs = append(errs, fmt.Errorf("--clickhouse-cluster %q: want letters, digits, _ and -", c.Cluster))
	}
	errs = append(errs, c.validateKeep()...)
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

var clusterName = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_-]{0,63}$`)

// validateKeep reports tables that are none, and times that are too short or too long.
func (c Config) validateKeep() (errs []error) {
	tables, err := migrations.Tables()
	if err != nil {
		return []error{err}
	}
	var names []string
	for _, t := range tables {
		names = append(names, t.Name)
	}
	for _, name := range slices.Sorted(maps.Keys(c.Keep)) {
		if !slices.Contains(names, name) {
			errs = append(errs, fmt.Errorf("--retention %s: no such table; there are %s", name, strings.Join(names, ", ")))
		}
		if days := c.Keep[name]; days < 1 || days > 3650 {
			errs = append(errs, fmt.Errorf("--retention %s=%dd: want 1d to 3650d", name, days))
		}
	}
	return errs
}

var databaseName = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]{0,63}$`)

// address is a parsed Config.Address.
type address struct {
	socket   string // of the embedded engine; empty for a server
	server   *clickhouse.Options
	database string
	cluster  string
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
		return address{socket: u.Path, database: defaultDatabase, cluster: c.Cluster}, nil
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
	a.cluster = c.Cluster
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
		o.Settings = maps.Clone(o.Settings)
		if o.Settings == nil {
			o.Settings = make(clickhouse.Settings)
		}
		// A round's block is stored as it is, and before it is acknowledged.
		o.Settings["async_insert"], o.Settings["insert_deduplicate"] = 0, 1
		if a.cluster != "" {
			// That goes for each shard's part of it. What is acknowledged outlives a node, and is seen on whichever is asked next; what is computed of
			// all shards is not computed by each.
			o.Settings["distributed_foreground_insert"], o.Settings["parallel_distributed_insert_select"] = 1, 0
			o.Settings["insert_quorum"], o.Settings["insert_quorum_parallel"], o.Settings["select_sequential_consistency"] = "auto", 0, 1
		}
	}
	o.Auth.Database = database
	return o
}

// onCluster is what statements that all nodes are to run say.
func (a address) onCluster() string {
	if a.cluster == "" {
		return ""
	}
	return " ON CLUSTER '" + a.cluster + "'"
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
	if err := a.provide(ctx, root); err != nil {
		return nil, fmt.Errorf("prepare database %s at %s: %w", a.database, redact(cfg.Address), hinted(err))
	}
	db := clickhouse.OpenDB(a.options(embedded.Writer, a.database))
	defer db.Close()
	steps, err := migrations.Up(ctx, db, migrations.Config{Cluster: cfg.Cluster, Keep: cfg.Keep})
	if err != nil {
		return steps, fmt.Errorf("database %s at %s: %w", a.database, redact(cfg.Address), hinted(err))
	}
	return steps, nil
}

// provide makes sure that there is a database, in a ClickHouse that is new enough.
func (a address) provide(ctx context.Context, root clickhouse.Conn) error {
	if err := checkVersion(ctx, root); err != nil {
		return err
	}
	var there uint64 // whoever may write in a database need not be allowed to make one
	err := root.QueryRow(ctx, "SELECT count() FROM system.databases WHERE name = '"+a.database+"'").Scan(&there)
	if err != nil || there > 0 {
		return err
	}
	return root.Exec(ctx, "CREATE DATABASE IF NOT EXISTS "+a.database+a.onCluster())
}

// Status lists the migrations, applied or not.
func Status(ctx context.Context, cfg Config) ([]migrations.Step, error) {
	a, err := cfg.address()
	if err != nil {
		return nil, err
	}
	var db *sql.DB = clickhouse.OpenDB(a.options(embedded.Writer, a.database))
	defer db.Close()
	steps, err := migrations.Status(ctx, db, cfg.Cluster)
	var exception *proto.Exception
	if errors.As(err, &exception) && (exception.Code == codeUnknownDB || exception.Code == codeUnknownTable) {
		err = fmt.Errorf("%w: %w", ErrNoTables, err)
	}
	return steps, err
}

// ErrNoTables says that nothing was migrated yet.
var ErrNoTables = errors.New("no tables yet")
