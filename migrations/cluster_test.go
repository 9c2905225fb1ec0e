package migrations_test

import (
	"database/sql"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"kvstrata/indexer/history/embedded/embeddedtest"
	"kvstrata/migrations"
)

var onCluster = migrations.Config{Cluster: "fleet"}

// The variant for a cluster is as it is written down, and each statement of it is one to ClickHouse.
func TestClusterSnapshots(t *testing.T) {
	variants, err := migrations.Clustered("fleet")
	if err != nil {
		t.Fatal(err)
	}
	names, err := fs.Glob(variants, "*.sql")
	if err != nil || len(names) == 0 {
		t.Fatal(names, err)
	}
	db := open(t)
	for _, name := range names {
		got, err := fs.ReadFile(variants, name)
		if err != nil {
			t.Fatal(err)
		}
		golden := filepath.Join("testdata", "cluster", name)
		if *update {
			if err := os.WriteFile(golden, got, 0o644); err != nil {
				t.Fatal(err)
			}
		}
		want, err := os.ReadFile(golden)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(string(want), string(got)); diff != "" {
			t.Error(diff)
		}
		statements := regexp.MustCompile(`(?m)^--.*$`).ReplaceAllString(string(got), "")
		for statement := range strings.SplitSeq(statements, ";\n") {
			if strings.TrimSpace(statement) == "" {
				continue
			}
			var formatted string
			if err := db.QueryRowContext(t.Context(), "SELECT formatQuery(?)", statement).Scan(&formatted); err != nil {
				t.Errorf("%s: %v", statement, err)
			}
			if !strings.Contains(formatted, "ON CLUSTER fleet") {
				t.Errorf("one node alone would run %s", formatted)
			}
		}
	}
}

func TestStatementsWithoutAVariant(t *testing.T) {
	for _, text := range []string{
		"ALTER TABLE batches ADD COLUMN x UInt8;",
		"-- +goose StatementBegin\nCREATE VIEW x AS SELECT 1;\n-- +goose StatementEnd\n",
		"-- +goose StatementBegin\nCREATE TABLE x (a UInt8) ENGINE = Log;\n-- +goose StatementEnd\n",
		"DROP TABLE x;",
	} {
		if _, err := migrations.OnCluster(text, "fleet"); err == nil {
			t.Errorf("%q has a variant", text)
		}
	}
}

// What the statements do, and the store of versions, on one node; the words that only a cluster understands are left out.
func TestClusterOnOneNode(t *testing.T) {
	plain := open(t)
	up(t, plain)
	e := embeddedtest.StartNode(t, quiet())
	db := embeddedtest.OneNode(e.Socket(), "default")
	t.Cleanup(func() { _ = db.Close() })

	steps, err := migrations.Up(t.Context(), db, onCluster)
	if err != nil || len(steps) == 0 {
		t.Fatal(steps, err)
	}
	list, err := migrations.Status(t.Context(), db, "fleet")
	if err != nil || slices.ContainsFunc(list, func(s migrations.Step) bool { return !s.Applied }) {
		t.Errorf("%+v, %v", list, err)
	}
	if again, err := migrations.Up(t.Context(), db, onCluster); err != nil || len(again) > 0 {
		t.Errorf("the second time: %+v, %v", again, err)
	}
	// Each table is what it is elsewhere, and another reads it.
	for _, name := range names(t, plain) {
		want := strings.Replace(definition(t, plain, name), "default."+name, "default."+name+"_local", 1)
		if diff := cmp.Diff(want, definition(t, db, name+"_local")); diff != "" {
			t.Error(diff)
		}
		if reading := definition(t, db, name); !strings.Contains(reading, "Distributed('fleet', 'default', '"+name+"_local', ") {
			t.Error(reading)
		}
	}
	// A version that is forgotten is applied again.
	store := migrations.Versions("fleet")
	newest := list[len(list)-1].Version
	if err := store.Delete(t.Context(), db, newest); err != nil {
		t.Fatal(err)
	}
	if _, err := store.GetMigration(t.Context(), db, newest); !errors.Is(err, migrations.ErrVersionNotFound) {
		t.Errorf("%v, want that it is not there", err)
	}
	if again, err := migrations.Up(t.Context(), db, onCluster); err != nil || len(again) != 1 {
		t.Errorf("%+v, %v", again, err)
	}
	if at, err := store.GetLatestVersion(t.Context(), db); err != nil || at != newest {
		t.Errorf("at %d, %v", at, err)
	}
}

// A database of a later program is left alone.
func TestNewerSchema(t *testing.T) {
	db := open(t)
	up(t, db)
	if _, err := db.ExecContext(t.Context(), "INSERT INTO goose_db_version (version_id, is_applied) VALUES (900, 1)"); err != nil {
		t.Fatal(err)
	}
	_, err := migrations.Up(t.Context(), db, migrations.Config{})
	if !errors.Is(err, migrations.ErrNewer) || !strings.Contains(err.Error(), "at version 900") {
		t.Errorf("%v", err)
	}
}

func TestRetention(t *testing.T) {
	db := open(t)
	up(t, db)
	defaults, err := migrations.Tables()
	if err != nil {
		t.Fatal(err)
	}
	var forgetting, expiring []string
	for _, table := range defaults {
		forgetting = append(forgetting, table.Name)
	}
	for _, name := range names(t, db) {
		if strings.Contains(definition(t, db, name), " TTL ") {
			expiring = append(expiring, name)
		}
	}
	slices.Sort(forgetting)
	if diff := cmp.Diff(expiring, forgetting); diff != "" {
		t.Fatalf("tables that forget: %s", diff)
	}
	before := tables(t, db)
	if _, err := migrations.Up(t.Context(), db, migrations.Config{Keep: map[string]int{"block_events": 3, "chains": 4000}}); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{
		"block_events": "TTL toDate(committed) + toIntervalDay(3) SETTINGS", "chains": "TTL day + toIntervalDay(4000) SETTINGS",
		"ledger": "TTL toDate(committed) + toIntervalDay(90) SETTINGS",
	} {
		if got := definition(t, db, name); !strings.Contains(got, want) {
			t.Errorf("%s: …%s, want %s", name, got[len(got)-200:], want)
		}
	}
	// Rows of days that lie further back go.
	for _, back := range []string{"2", "5"} {
		if _, err := db.ExecContext(t.Context(), "INSERT INTO block_events (committed, hash) SELECT now() - INTERVAL "+back+" DAY, 1"); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := db.ExecContext(t.Context(), "OPTIMIZE TABLE block_events FINAL"); err != nil {
		t.Fatal(err)
	}
	var left uint64
	if err := db.QueryRowContext(t.Context(), "SELECT count() FROM block_events").Scan(&left); err != nil || left != 1 {
		t.Errorf("%d rows are left, %v", left, err)
	}
	// Without the flags it is as it was.
	up(t, db)
	if diff := cmp.Diff(before, tables(t, db)); diff != "" {
		t.Error(diff)
	}
}

// names lists the tables of a database, but the store of versions.
func names(t *testing.T, db *sql.DB) (list []string) {
	t.Helper()
	rows, err := db.QueryContext(t.Context(), "SELECT name FROM system.tables WHERE database = currentDatabase() AND name != 'goose_db_version' ORDER BY name")
	if err != nil {
		t.Fatal(err)
	}
	defer rows.Close()
	for rows.Next() {
		var name string
		if err := rows.Scan(&name); err != nil {
			t.Fatal(err)
		}
		list = append(list, name)
	}
	return list
}

func definition(t *testing.T, db *sql.DB, name string) (statement string) {
	t.Helper()
	err := db.QueryRowContext(t.Context(), "SELECT create_table_query FROM system.tables WHERE database = currentDatabase() AND name = ?", name).Scan(&statement)
	if err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	return statement
}
