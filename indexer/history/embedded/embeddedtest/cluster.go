package embeddedtest

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"regexp"

	"github.com/ClickHouse/clickhouse-go/v2"

	"kvstrata/indexer/history/embedded"
)

// OneNode opens a database of the engine at a socket, the statements for which lose what only a cluster understands: who is told, where replicas
// meet, and quorums; a Distributed table becomes one that reads the single shard's. It proves what statements do, and nothing of a
// cluster. The caller closes it.
func OneNode(socket, database string) *sql.DB {
	o := embedded.Dial(socket, embedded.Writer)
	o.Auth.Database = database
	return sql.OpenDB(oneNode{clickhouse.Connector(o)})
}

type oneNode struct{ driver.Connector }

func (n oneNode) Connect(ctx context.Context) (driver.Conn, error) {
	conn, err := n.Connector.Connect(ctx)
	return oneNodeConn{conn}, err
}

type oneNodeConn struct{ driver.Conn }

func (c oneNodeConn) ExecContext(ctx context.Context, query string, args []driver.NamedValue) (driver.Result, error) {
	return c.Conn.(driver.ExecerContext).ExecContext(ctx, alone(query), args)
}

func (c oneNodeConn) QueryContext(ctx context.Context, query string, args []driver.NamedValue) (driver.Rows, error) {
	return c.Conn.(driver.QueryerContext).QueryContext(ctx, alone(query), args)
}

func (c oneNodeConn) CheckNamedValue(v *driver.NamedValue) error {
	if checker, ok := c.Conn.(driver.NamedValueChecker); ok {
		return checker.CheckNamedValue(v)
	}
	return driver.ErrSkip
}

var (
	told        = regexp.MustCompile(` ON CLUSTER '[^']+'`)
	replicas    = regexp.MustCompile(`Replicated(\w*MergeTree)\('[^']+', '[^']+'(?:, )?`)
	distributed = regexp.MustCompile(`Distributed\('[^']+', currentDatabase\(\), '(\w+)'\)`)
	window      = regexp.MustCompile(`\breplicated_deduplication_window`)
	quorum      = regexp.MustCompile(` SETTINGS (insert_quorum|select_sequential_consistency)[^V]*`)
)

// alone returns a statement as a single node understands it.
func alone(query string) string {
	query = told.ReplaceAllString(query, "")
	query = replicas.ReplaceAllString(query, "$1(")
	query = distributed.ReplaceAllString(query, "Merge(currentDatabase(), '^$1$$')")
	query = window.ReplaceAllString(query, "non_$0")
	return quorum.ReplaceAllString(query, " ")
}
