package history_test

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"kvstrata/indexer/history"
)

// Free SQL reads what the tables have, and reaches nothing else.
func TestFreeSQL(t *testing.T) {
	e := startEngine(t)
	cfg := e.config()
	_, stop := startWriter(t, cfg)
	eventually(t, "tables", func() bool {
		standing, err := newReader(t, cfg).Standing(t.Context())
		return err == nil && standing.Rows == 0
	})
	stop()
	free, err := history.NewFree(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = free.Close() })
	run := func(statement string) (columns []history.Named, rows [][]any, err error) {
		err = free.Run(t.Context(), statement, func(c []history.Named) error { columns = c; return nil },
			func(row []any) error { rows = append(rows, row); return nil })
		return columns, rows, err
	}
	columns, rows, err := run("SELECT number AS n, toString(number) AS text FROM numbers(3)")
	if err != nil || len(columns) != 2 || columns[1] != (history.Named{Name: "text", Type: "String"}) || len(rows) != 3 || rows[2][1] != "2" {
		t.Fatalf("%+v %v %v", columns, rows, err)
	}
	if _, rows, err = run("SELECT count() FROM block_events"); err != nil || len(rows) != 1 || rows[0][0] != uint64(0) {
		t.Fatalf("%v %v", rows, err)
	}
	enough := errors.New("enough")
	if err := free.Run(t.Context(), "SELECT number FROM numbers(1000000)", func([]history.Named) error { return nil },
		func([]any) error { return enough }); !errors.Is(err, enough) {
		t.Errorf("stopped with %v", err)
	}
	out := filepath.Join(t.TempDir(), "out")
	for _, statement := range []string{
		"SELECT 1 INTO OUTFILE '" + out + "'", "SELECT * FROM file('/etc/passwd', 'LineAsString')", "SELECT file('/etc/passwd')",
		"SELECT * FROM url('http://127.0.0.1:1/', 'LineAsString')", "INSERT INTO progress (source) VALUES ('x')", "DROP TABLE block_events",
		"SELECT 1 SETTINGS max_memory_usage = 0, readonly = 0", "SELECT 1; SELECT 2", "SELECT FROM FROM",
	} {
		if _, rows, err := run(statement); err == nil || !strings.Contains(err.Error(), "ClickHouse") {
			t.Errorf("%s: %v, %v", statement, rows, err)
		}
	}
	if _, err := os.Stat(out); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a file was written: %v", err)
	}
}
