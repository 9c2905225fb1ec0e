package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"kvstrata/event"
	"kvstrata/indexer/history"
	"kvstrata/indexer/history/archive"
	"kvstrata/subscriber"
)

type importCmd struct {
	Data       string `help:"Folder that the history is put into; the embedded engine's." type:"path" placeholder:"FILE.history"`
	ClickHouse string `name:"clickhouse" help:"Put it into this ClickHouse instead, into a database of its own: http://host:8123/bug_17." placeholder:"URL" env:"KVSTRATA_CLICKHOUSE"`
	CHDB       string `name:"chdb" help:"Library of the embedded engine (libchdb.so); make setup installs it." type:"path" placeholder:"FILE" env:"KVSTRATA_CHDB"`
	Append     bool   `help:"Into a history that holds something already. What is there is not told twice: a file whose rows could be is refused."`
	SkipBad    bool   `help:"Pass over lines that can't be read, and count them, instead of giving up."`

	Model           string    `help:"Of a recording: the model that the engine serves."`
	Cluster         string    `help:"Of a recording: the cluster." default:"default"`
	Instance        string    `help:"Of a recording: what the engine is called." placeholder:"worker-ID, or the file's name"`
	Block           uint32    `help:"Of a recording: tokens a block, where its events do not tell (Dynamo's)."`
	Pool            uint64    `help:"Of a recording: blocks of the engine's pool, where its events do not tell."`
	Dialect         string    `help:"Of a recording: the engine's dialect, as in --engine." default:"auto"`
	Began           string    `help:"When a recording without times of its own began, as 2026-11-29T18:00:00Z. Without: its last line is as old as the file." placeholder:"TIME"`
	HashKey         string    `help:"Key of the prefix hashes, as of run." env:"KVSTRATA_HASH_KEY"`
	AllowInvertible bool      `help:"Prefix hashes also of blocks under 16 tokens, as of run." env:"KVSTRATA_ALLOW_INVERTIBLE"`
	Files           []string  `arg:"" name:"file" help:"What kvstrata export wrote (jsonl, parquet; a folder of these), what Dynamo's recorder wrote, or raw frames of an engine; .gz too." type:"path"`
	began           time.Time // of Began
	dialect         subscriber.Dialect
}

// Help shows how it is used.
func (importCmd) Help() string {
	return `Example:

  kvstrata import bug.jsonl.gz
  kvstrata query evictions --data bug.history --since 7d
  kvstrata run --roles history,web --data bug.history

  kvstrata import recorder.jsonl --model meta/Llama-3.1-8B --block 16 --began 2026-11-29T18:00:00Z

A file goes into a history of its own, named after it, unless --data or --clickhouse names another. docs/files.md has the forms.`
}

// Run imports the files one after the other.
func (c *importCmd) Run(a *app) (err error) {
	files, err := c.files()
	if err != nil {
		return err
	}
	if err := c.check(files); err != nil {
		return err
	}
	at, err := c.target(a, files[0].path)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, at.close()) }()
	loader, err := history.NewLoader(a.ctx, at.cfg)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, loader.Close()) }()
	for i := range files {
		if err := files[i].digest(); err != nil {
			return err
		}
		if err := loader.Imported(a.ctx, files[i].sum); err != nil {
			return fmt.Errorf("import %s: %w", files[i].path, err)
		}
	}
	empty, err := loader.Empty(a.ctx)
	if err == nil && empty {
		err = loader.Keep(a.ctx)
	}
	if err != nil {
		return err
	}
	if !empty && !c.Append {
		return usagef("%s holds a history already: name another place, or add to it with --append", c.place())
	}
	if err := c.apart(a.ctx, loader, at, files); err != nil {
		return err
	}
	var whole span
	for i := range files {
		f := &files[i]
		var of span
		if f.form == recordingFile {
			of, err = c.importRecording(a, at.cfg, loader, f)
		} else {
			of, err = c.importRows(a, loader, f)
		}
		if err != nil {
			return fmt.Errorf("import %s: %w", f.path, err)
		}
		whole.add(of.first)
		whole.add(of.last)
	}
	return c.farewell(a, whole)
}

// apart refuses files where somebody else writes: of writers, history has one. A recording has no place beside live events either.
func (c *importCmd) apart(ctx context.Context, loader *history.Loader, at *reached, files []importFile) error {
	if at.shared {
		return usagef("%s is open in another process, which writes there; stop it, or import the file into a history of its own", c.place())
	}
	if !slices.ContainsFunc(files, func(f importFile) bool { return f.form == recordingFile }) {
		return nil
	}
	live, err := loader.Live(ctx)
	if err == nil && live {
		return usagef("%s is the history of a live stream; import the recording into a history of its own", c.place())
	}
	return err
}

// span is from when to when things happened.
type span struct{ first, last time.Time }

func (s *span) add(at time.Time) {
	if at.IsZero() {
		return
	}
	if s.first.IsZero() || at.Before(s.first) {
		s.first = at
	}
	if at.After(s.last) {
		s.last = at
	}
}

// place is where the history goes, for people.
func (c *importCmd) place() string {
	if c.ClickHouse != "" {
		return "the database at --clickhouse"
	}
	return c.Data
}

// farewell says how to ask what was imported.
func (c *importCmd) farewell(a *app, whole span) error {
	where := "--data " + c.Data
	if c.ClickHouse != "" {
		where = "--clickhouse URL"
	}
	if whole.first.IsZero() {
		_, err := fmt.Fprintf(a.stdout, "\nThere was nothing to put into %s.\n", c.place())
		return err
	}
	during := fmt.Sprintf("--since %s --until %s", whole.first.UTC().Format(time.RFC3339), whole.last.Add(time.Second).UTC().Format(time.RFC3339))
	_, err := fmt.Fprintf(a.stdout, "\nThe history is in %s. Ask it, or see it in the dashboard:\n  kvstrata query events %s %s\n  kvstrata run --roles history,web %s\n",
		c.place(), where, during, where)
	return err
}

// target opens the history that files go into.
func (c *importCmd) target(a *app, first string) (*reached, error) {
	flags := tableFlags{ClickHouse: c.ClickHouse, Data: c.Data, CHDB: c.CHDB}
	if !flags.named() {
		name := filepath.Base(first)
		for _, end := range []string{".gz", filepath.Ext(strings.TrimSuffix(name, ".gz"))} {
			name = strings.TrimSuffix(name, end)
		}
		c.Data = name + ".history"
		flags.Data = c.Data
	}
	cfg, err := flags.config()
	if err != nil {
		return nil, err
	}
	r := &reached{cfg: cfg, close: func() error { return nil }}
	if c.ClickHouse != "" {
		r.shared = strings.HasPrefix(c.ClickHouse, "unix:")
		return r, nil
	}
	if r.shared = answers(a.ctx, flags.Data); r.shared {
		return r, nil
	}
	if r.close, err = flags.embed(a); err != nil {
		return nil, err
	}
	return r, nil
}

// files finds out what each file is. A folder stands for the files in it.
func (c *importCmd) files() (all []importFile, err error) {
	for _, path := range c.Files {
		info, err := os.Stat(path)
		if err != nil {
			return nil, usagef("%w", err)
		}
		paths := []string{path}
		if info.IsDir() {
			if paths, err = filepath.Glob(filepath.Join(path, "*.parquet")); err != nil || len(paths) == 0 {
				return nil, usagef("%s: a folder without *.parquet", path)
			}
		}
		for _, p := range paths {
			f, err := recognise(p)
			if err != nil {
				return nil, fmt.Errorf("import %s: %w", p, err)
			}
			all = append(all, f)
		}
	}
	return all, nil
}

// check checks flags against what the files are.
func (c *importCmd) check(files []importFile) (err error) {
	if c.dialect, err = subscriber.ParseDialect(c.Dialect); err != nil {
		return usagef("--dialect: %w", err)
	}
	if c.Began != "" {
		if c.began, err = time.Parse(time.RFC3339, c.Began); err != nil || !plausible(c.began) {
			return usagef("--began %q: want a time as 2026-11-29T18:00:00Z, not before 2000 and not to come", c.Began)
		}
	}
	if c.Model == "" && slices.ContainsFunc(files, func(f importFile) bool { return f.form == recordingFile }) {
		return usagef("--model: a recording does not tell it; name the model as the engine serves it")
	}
	return nil
}

// plausible reports whether something may have happened at a time.
func plausible(at time.Time) bool {
	return at.Year() >= 2000 && at.Before(time.Now().Add(24*time.Hour))
}

// badLines counts lines that are passed over, and keeps the first few.
type badLines struct {
	skip  bool
	count int
	first []error
}

// shownBad is how many of them are told.
const shownBad = 5

// take takes what is wrong with a line, and returns it where that ends the import.
func (b *badLines) take(err error) error {
	if !b.skip {
		return fmt.Errorf("%w; nothing was imported of it. --skip-bad passes over such lines", err)
	}
	if b.count++; len(b.first) < shownBad {
		b.first = append(b.first, err)
	}
	return nil
}

func (b *badLines) print(w io.Writer) {
	if b.count == 0 {
		return
	}
	fmt.Fprintf(w, "  %d lines passed over\n", b.count)
	for _, err := range b.first {
		fmt.Fprintf(w, "    %v\n", err)
	}
}

// eachRow hands over the rows that the tables can take.
func (c *importCmd) eachRow(loader *history.Loader, f *importFile, bad *badLines, yield func(archive.Row) error) (contents *history.Contents, err error) {
	r, done, err := f.rows(loader.Tables())
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, done()) }()
	contents = history.NewContents()
	for n := 1; ; n++ {
		row, err := r.Next()
		if errors.Is(err, io.EOF) {
			return contents, nil
		}
		if err == nil {
			if wrong := loader.Check(contents, row); wrong != nil {
				err = &archive.BadRow{Line: n, Err: wrong}
				if l, ok := r.(*archive.LineReader); ok {
					err = &archive.BadRow{Line: l.Line(), Err: wrong}
				}
			}
		}
		if errors.As(err, new(*archive.BadRow)) {
			if err := bad.take(err); err != nil {
				return nil, err
			}
			continue
		}
		if err == nil {
			err = yield(row)
		}
		if err != nil {
			return nil, err
		}
	}
}

// importRows imports a file of rows: it is read once to see that all of it can be, and once more.
func (c *importCmd) importRows(a *app, loader *history.Loader, f *importFile) (of span, err error) {
	bad := &badLines{skip: c.SkipBad}
	contents, err := c.eachRow(loader, f, bad, func(archive.Row) error { return a.ctx.Err() })
	if err != nil {
		return of, err
	}
	table, err := loader.Overlaps(a.ctx, contents)
	if err != nil {
		return of, err
	}
	if table != "" {
		return of, usagef("%s has rows of the same sources and the same time in %s: they could be told twice; import into a history of its own", c.place(), table)
	}
	if err := loader.Begin(a.ctx, f.sum); err != nil {
		return of, err
	}
	_, err = c.eachRow(loader, f, &badLines{skip: c.SkipBad}, func(row archive.Row) error { return loader.Add(a.ctx, row) })
	if err == nil {
		err = loader.Finish(a.ctx, f.sum)
	}
	if err != nil {
		return of, err
	}
	fmt.Fprintf(a.stdout, "%s: an export\n", f.path)
	for _, name := range history.KeptTables() {
		if n := contents.Rows[name]; n > 0 {
			fmt.Fprintf(a.stdout, "  %-12s %d rows\n", name, n)
			if name != "chains" {
				of.add(contents.First[name])
				of.add(contents.Last[name])
			}
		}
	}
	bad.print(a.stdout)
	return of, nil
}

// sourceOf returns the source of a recording's line.
func (c *importCmd) sourceOf(f *importFile, h *subscriber.Heard) event.Source {
	s := event.Source{Cluster: c.Cluster, Model: c.Model, Instance: c.Instance, Rank: h.Rank, Origin: event.Engine}
	switch {
	case s.Instance != "":
	case h.Form == subscriber.DynamoForm:
		s.Instance = "worker-" + h.Worker
	default:
		s.Instance = filepath.Base(f.path)
	}
	if c.dialect == subscriber.DialectMooncake {
		s.Origin = event.Store
	}
	return s
}
