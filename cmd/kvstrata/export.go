package main

import (
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"kvstrata/indexer/history"
	"kvstrata/indexer/history/archive"
)

type exportCmd struct {
	tableFlags

	Since  string   `help:"A duration back from now, as 15m or 7d, or a time." default:"10m"`
	Until  string   `help:"The end of the window." placeholder:"now"`
	Engine string   `help:"Only this engine (instance)."`
	Model  string   `help:"Only this model."`
	Format string   `help:"perfetto: Trace Events in JSON, which ui.perfetto.dev opens. jsonl: every row, a JSON object a line. parquet: every row, a file a table." enum:"perfetto,jsonl,parquet" default:"perfetto"`
	Table  []string `help:"Only these tables, of jsonl and parquet: batches, block_events, chains, loads, transfers, lookups, requests, gpu_samples, ledger, snapshots." placeholder:"TABLE"`
	Blocks int      `help:"Blocks whose time of residence perfetto shows: a sample, by hash." default:"1000"`
	Limit  int      `help:"Runs, loads, transfers and rows of the ledger at most, each, of perfetto." default:"200000"`
	Output string   `short:"o" help:"The file to write; -: standard output. jsonl into a name with .gz is compressed; parquet of several tables makes a folder." default:"-" placeholder:"FILE"`
	Force  bool     `help:"Write over a file that is there."`
}

// Help shows how it is used.
func (exportCmd) Help() string {
	return `Example:

  kvstrata export --data ./data --since 5m -o window.json
  kvstrata export --data ./data --since 1h --format jsonl -o bug.jsonl.gz
  kvstrata export --data ./data --since 1d --format parquet --table block_events -o events.parquet

Open the first in ui.perfetto.dev, which keeps it in the browser. "kvstrata import" reads the others.`
}

// Run writes the window.
func (c *exportCmd) Run(a *app) (err error) {
	asked := map[string]string{"since": c.Since}
	for name, value := range map[string]string{"until": c.Until, "engine": c.Engine, "model": c.Model} {
		if value != "" {
			asked[name] = value
		}
	}
	if err := c.checkWindow(asked); err != nil {
		return usagef("%w", err)
	}
	if err := c.checkOutput(); err != nil {
		return err
	}
	reader, err := c.open(a)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, reader.Close()) }()
	if c.Format == "perfetto" {
		return c.write(a, c.Output, func(w io.Writer) error { return reader.Export(a.ctx, w, asked) })
	}
	dump, err := reader.Dump(a.ctx, asked, c.Table)
	if err != nil {
		return err
	}
	if c.Format == "jsonl" {
		return c.write(a, c.Output, func(w io.Writer) error { return dumpLines(a.ctx, dump, w) })
	}
	return c.parquet(a, dump)
}

// checkWindow checks what is asked for, and adds what only perfetto has.
func (c *exportCmd) checkWindow(asked map[string]string) error {
	if c.Format == "perfetto" {
		if len(c.Table) > 0 {
			return errors.New("--table: goes with --format jsonl and parquet")
		}
		asked["blocks"], asked["limit"] = strconv.Itoa(c.Blocks), strconv.Itoa(c.Limit)
		return history.CheckExport(asked)
	}
	return history.CheckDump(asked, c.Table)
}

// folder reports whether the output is a folder.
func (c *exportCmd) folder() bool { return c.Format == "parquet" && len(c.Table) != 1 }

func (c *exportCmd) checkOutput() error {
	if c.Output == "-" {
		if c.folder() {
			return usagef("--output: parquet of several tables makes a folder; name one with -o, or one table with --table")
		}
		return nil
	}
	if _, err := os.Lstat(c.Output); err == nil && !c.Force {
		return usagef("--output %s: it is there already; name another, or write over it with --force", c.Output)
	}
	return nil
}

// write writes one file, or nothing: it has its name only when it is whole.
func (c *exportCmd) write(a *app, name string, fill func(io.Writer) error) error {
	if name == "-" {
		return fill(a.stdout)
	}
	out, err := os.CreateTemp(filepath.Dir(name), "."+filepath.Base(name)+".*")
	if err != nil {
		return fmt.Errorf("write the export: %w", err)
	}
	var w io.Writer = out
	var packed *gzip.Writer
	if strings.HasSuffix(name, ".gz") && c.Format == "jsonl" {
		packed = gzip.NewWriter(out)
		w = packed
	}
	err = fill(w)
	if packed != nil {
		err = errors.Join(err, packed.Close())
	}
	err = errors.Join(err, out.Chmod(0o644), out.Close())
	if err == nil {
		err = os.Rename(out.Name(), name)
	}
	if err != nil {
		return errors.Join(fmt.Errorf("write %s: %w", name, err), os.Remove(out.Name()))
	}
	return nil
}

// dumpLines writes all rows as JSON lines.
func dumpLines(ctx context.Context, dump *history.Dump, w io.Writer) error {
	lines, err := archive.NewLineWriter(w, dump.Head())
	if err != nil {
		return err
	}
	for _, table := range dump.Tables() {
		if err := dump.Rows(ctx, table, lines.Write); err != nil {
			return err
		}
	}
	return lines.Close()
}

// parquet writes a file a table.
func (c *exportCmd) parquet(a *app, dump *history.Dump) error {
	if c.folder() {
		if err := os.MkdirAll(c.Output, 0o755); err != nil {
			return fmt.Errorf("make the folder of the export: %w", err)
		}
	}
	for _, table := range dump.Tables() {
		name := c.Output
		if c.folder() {
			name = filepath.Join(c.Output, table.Name+".parquet")
		}
		err := c.write(a, name, func(w io.Writer) error {
			out := archive.NewParquetWriter(w, table, dump.Head())
			return errors.Join(dump.Rows(a.ctx, table, out.Write), out.Close())
		})
		if err != nil {
			return err
		}
	}
	return nil
}
