package migrations_test

import (
	"context"
	"database/sql"
	"flag"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/ClickHouse/clickhouse-go/v2"
	"github.com/google/go-cmp/cmp"

	"kvstrata/indexer/history/embedded"
	"kvstrata/indexer/history/embedded/embeddedtest"
	"kvstrata/migrations"
)

var update = flag.Bool("update", false, "write the golden file anew")

func TestMain(m *testing.M) { embeddedtest.Main(m) }

// open starts the real engine and returns its default database.
func open(t *testing.T) *sql.DB {
	t.Helper()
	e := embeddedtest.Start(t, quiet())
	db := clickhouse.OpenDB(embedded.Dial(e.Socket(), embedded.Writer))
	t.Cleanup(func() { _ = db.Close() })
	return db
}

// tables returns what was made, as the engine tells it.
func tables(t *testing.T, db *sql.DB) string {
	t.Helper()
	rows, err := db.QueryContext(t.Context(), `SELECT create_table_query FROM system.tables
WHERE database = currentDatabase() AND name != 'goose_db_version' ORDER BY name`)
	if err != nil {
		t.Fatal(err)
	}
	defer rows.Close()
	var b strings.Builder
	for rows.Next() {
		var statement string
		if err := rows.Scan(&statement); err != nil {
			t.Fatal(err)
		}
		// A line a column, for people who compare.
		statement = strings.NewReplacer(", `", ",\n  `", ", INDEX", ",\n  INDEX", " (`", "\n  (`", ") ENGINE", ")\nENGINE").Replace(statement)
		b.WriteString(statement + "\n\n")
	}
	if err := rows.Err(); err != nil {
		t.Fatal(err)
	}
	return b.String()
}

func up(t *testing.T, db *sql.DB) []migrations.Step {
	t.Helper()
	steps, err := migrations.Up(t.Context(), db, migrations.Config{})
	if err != nil {
		t.Fatal(err)
	}
	return steps
}

func status(t *testing.T, db *sql.DB) []migrations.Step {
	t.Helper()
	steps, err := migrations.Status(t.Context(), db, "")
	if err != nil {
		t.Fatal(err)
	}
	return steps
}

func TestUp(t *testing.T) {
	golden, err := filepath.Abs("testdata/tables.sql")
	if err != nil {
		t.Fatal(err)
	}
	db := open(t)
	for _, s := range status(t, db) {
		if s.Applied || s.Version == 0 || s.File == "" {
			t.Errorf("before: %+v", s)
		}
	}
	steps := up(t, db)
	if len(steps) == 0 || !steps[0].Applied || filepath.Base(steps[0].File) != "00001_history.sql" {
		t.Errorf("applied %+v", steps)
	}
	if diff := cmp.Diff(steps, status(t, db)); diff != "" {
		t.Error(diff)
	}
	got := tables(t, db)
	if *update {
		if err := os.MkdirAll(filepath.Dir(golden), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(golden, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), got); diff != "" {
		t.Error(diff)
	}
	if again := up(t, db); len(again) != 0 {
		t.Errorf("the second time %+v was applied", again)
	}
	if diff := cmp.Diff(got, tables(t, db)); diff != "" {
		t.Error(diff)
	}
}

// A migration that was interrupted is applied again, whatever of it was there.
func TestInterrupted(t *testing.T) {
	whole := open(t)
	up(t, whole)
	want := tables(t, whole)
	for _, missing := range []string{"progress", "ledger", "block_events"} {
		if _, err := whole.ExecContext(t.Context(), "DROP TABLE "+missing+" SYNC"); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := whole.ExecContext(t.Context(), "ALTER TABLE goose_db_version DELETE WHERE version_id >= 1 SETTINGS mutations_sync = 1"); err != nil {
		t.Fatal(err)
	}
	if steps := status(t, whole); steps[0].Applied {
		t.Fatalf("still applied: %+v", steps)
	}
	if steps := up(t, whole); len(steps) == 0 {
		t.Error("nothing was applied")
	}
	if diff := cmp.Diff(want, tables(t, whole)); diff != "" {
		t.Error(diff)
	}
}

// An interruption in the middle is told, and the next Up goes on.
func TestCancelled(t *testing.T) {
	db := open(t)
	for timeout := time.Millisecond; ; timeout *= 2 {
		ctx, cancel := context.WithTimeout(t.Context(), timeout)
		_, err := migrations.Up(ctx, db, migrations.Config{})
		cancel()
		if err == nil {
			break
		}
		if !strings.Contains(err.Error(), "migrat") {
			t.Error(err)
		}
	}
	for _, s := range status(t, db) {
		if !s.Applied {
			t.Errorf("waits: %+v", s)
		}
	}
}

func quiet() *slog.Logger { return slog.New(slog.DiscardHandler) }
