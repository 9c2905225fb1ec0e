package main

import (
	"encoding/csv"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"text/tabwriter"
	"time"

	"kvstrata/indexer/history"
)

type sqlCmd struct {
	tableFlags

	Format    string `help:"table, json (an object a line) or csv." enum:"table,json,csv" default:"table"`
	Limit     int    `help:"Rows at most; 0: all." default:"1000"`
	Statement string `arg:"" help:"One statement, or - to read it from standard input."`
}

// Help shows how it is used.
func (sqlCmd) Help() string {
	return `Example:

  kvstrata sql --data ./data "SELECT op, count() FROM block_events GROUP BY op"
  kvstrata sql --data ./data --format csv - < question.sql

Nothing can be written, and nothing outside of the database be read. Of a server name a user who may only read:
docs/deploy.md makes one. "kvstrata query NAME --sql" prints a question to begin with.`
}

// errEnough ends an answer that is longer than wanted.
var errEnough = errors.New("enough rows")

// Run asks, and prints.
func (c *sqlCmd) Run(a *app) (err error) {
	if c.Limit < 0 {
		return usagef("--limit %d: want 0 or more", c.Limit)
	}
	statement := c.Statement
	if statement == "-" {
		in, err := io.ReadAll(os.Stdin)
		if err != nil {
			return fmt.Errorf("read statement: %w", err)
		}
		statement = string(in)
	}
	at, err := c.reach(a)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, at.close()) }()
	free, err := history.NewFree(at.cfg)
	if err != nil {
		return err
	}
	defer free.Close()
	p := c.printer(a.stdout)
	rows := 0
	err = free.Run(a.ctx, statement, p.head, func(row []any) error {
		if rows++; c.Limit > 0 && rows > c.Limit {
			return errEnough
		}
		return p.row(row)
	})
	if err != nil && !errors.Is(err, errEnough) {
		return err
	}
	if flushed := p.flush(); flushed != nil {
		return flushed
	}
	if err != nil {
		_, err = fmt.Fprintf(a.stderr, "only the first %d rows; --limit shows more\n", c.Limit)
	}
	return err
}

// rowPrinter prints an answer row by row.
type rowPrinter struct {
	head  func([]history.Named) error
	row   func([]any) error
	flush func() error
}

func (c *sqlCmd) printer(w io.Writer) rowPrinter {
	var names []string
	switch c.Format {
	case "json":
		enc := json.NewEncoder(w)
		return rowPrinter{
			head: func(columns []history.Named) error { names = columnNames(columns); return nil },
			row: func(row []any) error {
				object := make(map[string]any, len(row))
				for i, v := range row {
					object[names[i]] = v
				}
				return enc.Encode(object)
			},
			flush: func() error { return nil },
		}
	case "csv":
		out := csv.NewWriter(w)
		return rowPrinter{
			head:  func(columns []history.Named) error { return out.Write(columnNames(columns)) },
			row:   func(row []any) error { return out.Write(plainRow(row)) },
			flush: func() error { out.Flush(); return out.Error() },
		}
	default:
		t := tabwriter.NewWriter(w, 2, 0, 2, ' ', 0)
		line := func(cells []string) error {
			for i := range cells {
				cells[i] = text(cells[i], "text")
			}
			_, err := fmt.Fprintln(t, strings.Join(cells, "\t"))
			return err
		}
		return rowPrinter{
			head:  func(columns []history.Named) error { return line(columnNames(columns)) },
			row:   func(row []any) error { return line(plainRow(row)) },
			flush: t.Flush,
		}
	}
}

func columnNames(columns []history.Named) []string {
	names := make([]string, 0, len(columns))
	for _, c := range columns {
		names = append(names, c.Name)
	}
	return names
}

// plainRow returns a row's cells as text; times are RFC 3339.
func plainRow(row []any) []string {
	cells := make([]string, 0, len(row))
	for _, v := range row {
		if t, ok := v.(time.Time); ok {
			v = t.UTC().Format(time.RFC3339Nano)
		}
		cells = append(cells, fmt.Sprint(v))
	}
	return cells
}
