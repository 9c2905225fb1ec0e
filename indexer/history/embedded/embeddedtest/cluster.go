package embeddedtest

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"log/slog"
	"os"
	"path/filepath"
	"regexp"
	"testing"

	"github.com/ClickHouse/clickhouse-go/v2"

	"kvstrata/indexer/history/embedded"
)

// Cluster is the cluster that an engine of StartNode is the only node of.
const Cluster = "fleet"

// node is the configuration of that node. With a port that is its own, which it does not open, it takes itself for the shard's replica.
const node = `<clickhouse>
<tcp_port>9000</tcp_port>
<remote_servers><fleet><shard><replica><host>127.0.0.1</host><port>9000</port></replica></shard></fleet></remote_servers>
</clickhouse>`

// StartNode starts the engine as Start does, as the only node of a cluster.
func StartNode(t testing.TB, log *slog.Logger) *embedded.Engine {
	t.Helper()
	file := filepath.Join(t.TempDir(), "node.xml")
	if err := os.WriteFile(file, []byte(node), 0o600); err != nil {
		t.Fatal(err)
	}
	return start(t, log, "--config-file="+file, "--distributed_foreground_insert=1",
		"--distributed_product_mode=global", "--prefer_global_in_and_join=1") // what is asked of a server is set with each question
}

// OneNode opens a database of the node at a socket, the statements for which lose what only several understand: that others are told, where
// replicas meet, and quorums. It proves what statements do, and nothing of several nodes. The caller closes it.
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
	told     = regexp.MustCompile(` ON CLUSTER '[^']+'`)
	replicas = regexp.MustCompile(`Replicated(\w*MergeTree)\('[^']+', '[^']+'(?:, )?`)
	window   = regexp.MustCompile(`\breplicated_deduplication_window`)
	quorum   = regexp.MustCompile(` SETTINGS (insert_quorum|select_sequential_consistency)[^V]*`)
)

// alone returns a statement as a single node understands it.
func alone(query string) string {
	query = told.ReplaceAllString(query, "")
	query = replicas.ReplaceAllString(query, "$1(")
	query = window.ReplaceAllString(query, "non_$0")
	return quorum.ReplaceAllString(query, " ")
}
