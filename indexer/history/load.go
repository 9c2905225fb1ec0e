package history

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/ClickHouse/clickhouse-go/v2"

	"kvstrata/event"
	"kvstrata/indexer/history/archive"
	"kvstrata/indexer/history/embedded"
)

// Loader puts what files hold into the tables. It says in the table progress which files are in: a file is imported once.
//
// Not safe for concurrent use.
type Loader struct {
	conn   clickhouse.Conn
	native *nativeInserter
	insert insertFunc
	all    []*layout
	open   map[*archive.Table]*loadedRows
	token  string
	blocks int // inserted
}

// NewLoader brings the database to the present schema, and reads it. The caller closes the loader.
func NewLoader(ctx context.Context, cfg Config) (*Loader, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	if _, err := Migrate(ctx, cfg); err != nil {
		return nil, err
	}
	conn, err := cfg.open(embedded.Writer)
	if err != nil {
		return nil, err
	}
	l := &Loader{conn: conn, insert: insert, open: make(map[*archive.Table]*loadedRows)}
	if a, err := cfg.address(); err == nil && a.socket != "" {
		l.native = newNativeInserter(a.socket, a.database)
		l.insert = l.native.insert
	}
	if l.all, err = readLayouts(ctx, l.query); err != nil {
		return nil, errors.Join(err, l.Close())
	}
	return l, nil
}

// Close ends the connections.
func (l *Loader) Close() error {
	if l.native != nil {
		l.native.close()
	}
	return l.conn.Close()
}

func (l *Loader) query(ctx context.Context, sql string, bound clickhouse.Parameters, yield func(scan func(...any) error) error) error {
	rows, err := l.conn.Query(clickhouse.Context(ctx, clickhouse.WithParameters(bound)), sql)
	if err != nil {
		return answerError(ctx, err)
	}
	defer rows.Close()
	for rows.Next() {
		if err := yield(rows.Scan); err != nil {
			return err
		}
	}
	return answerError(ctx, rows.Err())
}

func (l *Loader) exec(ctx context.Context, sql string, bound clickhouse.Parameters) error {
	return answerError(ctx, l.conn.Exec(clickhouse.Context(ctx, clickhouse.WithParameters(bound)), sql))
}

func (l *Loader) count(ctx context.Context, sql string, bound clickhouse.Parameters) (n uint64, err error) {
	err = l.query(ctx, sql, bound, func(scan func(...any) error) error { return scan(&n) })
	return n, err
}

// Tables returns the tables that rows may be of.
func (l *Loader) Tables() (all archive.Tables) {
	for _, t := range l.all {
		all = append(all, &t.Table)
	}
	return all
}

func (l *Loader) layout(table *archive.Table) *layout {
	return l.all[slices.IndexFunc(l.all, func(t *layout) bool { return &t.Table == table })]
}

// Empty reports whether the database holds nothing: no row, and nobody has written to it.
func (l *Loader) Empty(ctx context.Context) (bool, error) {
	for _, name := range append(KeptTables(), "progress") {
		if n, err := l.count(ctx, "SELECT count() FROM (SELECT 1 FROM "+name+" LIMIT 1)", nil); n > 0 || err != nil {
			return false, err
		}
	}
	return true, nil
}

// Live reports whether a stream of live events has been written into the database.
func (l *Loader) Live(ctx context.Context) (bool, error) {
	n, err := l.count(ctx, "SELECT count() FROM progress FINAL WHERE source = '' AND stream_name NOT IN ('', '"+ImportStream+"')", nil)
	return n > 0, err
}

// ImportStream names the stream of rows that came of no bus.
const ImportStream = "import"

// Keep takes the tables' time limits off: what is imported may be older than live history is kept.
func (l *Loader) Keep(ctx context.Context) error {
	var limited []string
	err := l.query(ctx, `SELECT name FROM system.tables WHERE database = currentDatabase() AND position(create_table_query, ' TTL ') > 0`, nil,
		func(scan func(...any) error) error {
			var name string
			err := scan(&name)
			limited = append(limited, name)
			return err
		})
	for i := 0; i < len(limited) && err == nil; i++ {
		err = l.exec(ctx, "ALTER TABLE `"+limited[i]+"` REMOVE TTL", nil)
	}
	return err
}

// imported is the source under which progress tells of a file that was imported, by its digest.
func imported(sum string) string {
	return event.Source{Cluster: "kvstrata", Model: "import", Instance: sum, Origin: event.Store}.Tokens()
}

// importedBegin begins those.
const importedBegin = "kvstrata.import."

// Errors of imports.
var (
	ErrImported    = errors.New("the file has been imported into this database before: nothing was done")
	ErrInterrupted = errors.New("an import into this database did not come to its end, and it holds a part of a file: remove the database, and import anew")
)

// Imported says whether a file may be imported: ErrImported when it is in, ErrInterrupted when any has come in in part.
func (l *Loader) Imported(ctx context.Context, sum string) error {
	var found error
	err := l.query(ctx, "SELECT source, started FROM progress FINAL WHERE startsWith(source, '"+importedBegin+"') ORDER BY started", nil,
		func(scan func(...any) error) error {
			var source string
			var done uint8
			if err := scan(&source, &done); err != nil {
				return err
			}
			switch {
			case done == 0:
				found = ErrInterrupted
			case source == imported(sum) && found == nil:
				found = ErrImported
			}
			return nil
		})
	return errors.Join(err, found)
}

// Begin notes that a file is being imported.
func (l *Loader) Begin(ctx context.Context, sum string) error {
	l.token, l.blocks = sum, 0
	return l.mark(ctx, sum, 0)
}

// Finish inserts what is left, enters sources that nobody has written of, and notes that the file is in.
func (l *Loader) Finish(ctx context.Context, sum string) error {
	for table := range l.open {
		if err := l.flush(ctx, table); err != nil {
			return err
		}
	}
	// Questions find sources in progress. A writer that goes on there begins with a place in no stream.
	err := l.exec(ctx, `INSERT INTO progress (source, round, committed, stream_name, stream, stream_seq, fence, epoch, started, seq, digest)
SELECT source, 0, max(at), '', 0, 0, 0, max(far).1, max(far).1 > 0, max(far).2, 0 FROM (
  SELECT toString(source) AS source, max((epoch, last)) AS far, max(committed) AS at FROM batches GROUP BY source
  UNION ALL SELECT toString(source), max((epoch, last)), max(committed) FROM ledger GROUP BY source
  UNION ALL SELECT toString(source), max((epoch, seq)), toDateTime64(max(committed), 6, 'UTC') FROM block_events GROUP BY source
  UNION ALL SELECT toString(source), max((epoch, seq)), max(committed) FROM loads GROUP BY source
  UNION ALL SELECT toString(source), (toUInt64(0), toUInt64(0)), max(committed) FROM transfers GROUP BY source)
GROUP BY source HAVING source NOT IN (SELECT source FROM progress)`, nil)
	if err == nil {
		err = l.exec(ctx, `INSERT INTO progress (source, round, committed, stream_name, stream, stream_seq, fence, epoch, started, seq, digest)
SELECT '', 0, now64(6), '`+ImportStream+`', 0, 0, 0, 0, 0, 0, 0 WHERE (SELECT count() FROM progress WHERE source = '') = 0`, nil)
	}
	if err == nil { // what was counted by time lacks the rows: rows are read, until a writer has counted all again
		err = l.exec(ctx, `INSERT INTO progress (source, round, committed, stream_name, stream, stream_seq, fence, epoch, started, seq, digest)
SELECT '`+rollupsName+`', max(round) + 1, now64(6), '', 0, 0, 0, 0, 0, 0, 0 FROM progress WHERE source = '`+rollupsName+`' HAVING count() > 0`, nil)
	}
	if err != nil {
		return fmt.Errorf("enter what was imported: %w", err)
	}
	return l.mark(ctx, sum, 1)
}

func (l *Loader) mark(ctx context.Context, sum string, done int) error {
	err := l.exec(ctx, `INSERT INTO progress (source, round, committed, stream_name, stream, stream_seq, fence, epoch, started, seq, digest)
SELECT {source:String}, {done:UInt8} + 1, now64(6), '', 0, 0, 0, 0, {done:UInt8}, 0, 0`,
		clickhouse.Parameters{"source": imported(sum), "done": strconv.Itoa(done)})
	if err != nil {
		return fmt.Errorf("note the import: %w", err)
	}
	return nil
}

// Known returns those of some sources that the database has been told of.
func (l *Loader) Known(ctx context.Context, sources []event.Source) (known []event.Source, err error) {
	for _, s := range sources {
		n, err := l.count(ctx, "SELECT count() FROM progress WHERE source = {source:String}", clickhouse.Parameters{"source": s.Tokens()})
		if err != nil {
			return nil, err
		}
		if n > 0 {
			known = append(known, s)
		}
	}
	return known, nil
}

// Contents is what a file of rows holds, or several together.
type Contents struct {
	Rows         map[string]uint64 // by table
	First, Last  map[string]time.Time
	sources      map[string]bool
	days         map[int64]bool
	spellingSeen string // of the last source that was right
}

// NewContents returns those of no file.
func NewContents() *Contents {
	return &Contents{
		Rows: make(map[string]uint64), First: make(map[string]time.Time), Last: make(map[string]time.Time), sources: make(map[string]bool),
		days: make(map[int64]bool),
	}
}

// Bounds of what a file may hold: each day is a partition, and each source is a row of progress.
const (
	maxSources = 10_000
	maxDays    = 1_000
)

// earliest is before anything that an engine of this kind could have told.
var earliest = time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC)

// Check looks at a row, fills in lists that it lacks, and counts it: whether the tables could take it, and what reads them could read it.
func (l *Loader) Check(c *Contents, row archive.Row) error {
	t := l.layout(row.Table)
	for i, values := range t.enums {
		if _, ok := values[row.Cells[i].S]; !ok {
			return fmt.Errorf("column %s: no such word: %.32q", t.Columns[i].Name, row.Cells[i].S)
		}
	}
	for i, bits := range t.lists {
		if text := row.Cells[i].S; text == "" {
			row.Cells[i].S = "[]" // a file that has no such column
		} else if err := checkList(text, bits); err != nil {
			return fmt.Errorf("column %s: %w", t.Columns[i].Name, err)
		}
	}
	if t.source {
		if text := row.Cells[t.place("source")].S; text != c.spellingSeen {
			s, err := event.ParseSource(text)
			if err != nil || s.Tokens() != text || strings.HasPrefix(text, importedBegin) {
				return fmt.Errorf("column source: %.64q: want cluster.model.instance.rank.origin", text)
			}
			c.sources[text], c.spellingSeen = true, text
			if len(c.sources) > maxSources {
				return fmt.Errorf("more than %d sources", maxSources)
			}
		}
	}
	at := t.at(row)
	if at.Before(earliest) || at.After(time.Now().Add(aheadAtMost)) {
		return fmt.Errorf("column %s: %s is before the year 2000, or to come", t.keptTable.time, at.Format(time.RFC3339))
	}
	name := t.keptTable.name
	c.days[at.Unix()/86400] = true
	if len(c.days) > maxDays {
		return fmt.Errorf("rows of more than %d days", maxDays)
	}
	if first, ok := c.First[name]; !ok || at.Before(first) {
		c.First[name] = at
	}
	if at.After(c.Last[name]) {
		c.Last[name] = at
	}
	c.Rows[name]++
	return nil
}

// at returns the time of a row.
func (l *layout) at(row archive.Row) time.Time {
	i := l.place(l.keptTable.time)
	n := int64(row.Cells[i].N)
	switch l.Columns[i].Kind {
	case archive.Seconds:
		return time.Unix(n, 0).UTC()
	case archive.Day:
		return time.Unix(n*86400, 0).UTC()
	default:
		return time.UnixMicro(n).UTC()
	}
}

// Overlaps names the first table that has rows of the same sources and the same time: imported beside them, they could be told twice.
// Rows of chains add up with themselves.
func (l *Loader) Overlaps(ctx context.Context, c *Contents) (table string, err error) {
	var sources []string
	for s := range c.sources {
		sources = append(sources, s)
	}
	for _, t := range l.all {
		name := t.keptTable.name
		if !t.source || c.Rows[name] == 0 {
			continue
		}
		n, err := l.count(ctx, `SELECT count() FROM (SELECT 1 FROM `+name+` WHERE `+t.during()+`
  AND has(splitByChar(' ', {sources:String}), toString(source)) LIMIT 1)`, clickhouse.Parameters{
			"from": strconv.FormatInt(c.First[name].Unix(), 10), "to": strconv.FormatInt(c.Last[name].Unix()+1, 10), "sources": strings.Join(sources, " "),
		})
		if n > 0 || err != nil {
			return name, err
		}
	}
	return "", nil
}

// loadedRows are rows of a table and day that wait to be inserted, by column.
type loadedRows struct {
	day     int64
	rows    int
	numbers [][]uint64
	texts   [][]string
	bytes   int // of texts
}

// Bounds of what is inserted at once.
const (
	maxLoadedRows  = 100_000
	maxLoadedBytes = 32 << 20
)

// Add takes a row that was checked.
func (l *Loader) Add(ctx context.Context, row archive.Row) error {
	t := l.layout(row.Table)
	open := l.open[row.Table]
	day := t.at(row).Unix() / 86400
	if open != nil && open.rows > 0 && (open.day != day || open.rows >= maxLoadedRows || open.bytes >= maxLoadedBytes) {
		if err := l.flush(ctx, row.Table); err != nil {
			return err
		}
	}
	if open == nil {
		open = &loadedRows{numbers: make([][]uint64, len(t.Columns)), texts: make([][]string, len(t.Columns))}
		l.open[row.Table] = open
	}
	open.day = day
	open.rows++
	for i := range t.Columns {
		if t.Columns[i].Kind == archive.Text {
			open.texts[i] = append(open.texts[i], row.Cells[i].S)
			open.bytes += len(row.Cells[i].S)
		} else {
			open.numbers[i] = append(open.numbers[i], row.Cells[i].N)
		}
	}
	return nil
}

func (l *Loader) flush(ctx context.Context, table *archive.Table) error {
	open, t := l.open[table], l.layout(table)
	if open.rows == 0 {
		return nil
	}
	l.blocks++
	token := fmt.Sprintf("import:%s:%d", l.token, l.blocks)
	err := l.insert(ctx, l.conn, delivery{
		table: t.keptTable.name, rows: open.rows, columns: func() []column { return t.filled(open) }, queryID: "kvstrata-import-" + token,
		clear: func() error { return nil },
	}, token)
	if err != nil {
		return err
	}
	open.rows, open.bytes = 0, 0
	for i := range t.Columns {
		open.numbers[i], open.texts[i] = open.numbers[i][:0], open.texts[i][:0]
	}
	return nil
}

// filled returns the rows' columns as they are inserted.
func (l *layout) filled(rows *loadedRows) []column {
	all := make([]column, len(l.Columns))
	for i := range l.Columns {
		c := &l.Columns[i]
		all[i] = column{name: c.Name}
		typ, values := &all[i].typ, &all[i].values
		numbers, texts := rows.numbers[i], rows.texts[i]
		switch {
		case l.enums[i] != nil:
			words := make([]int8, len(texts))
			for j, text := range texts {
				words[j] = l.enums[i][text]
			}
			*typ, *values = i8, words
		case c.Kind == archive.Text:
			*typ, *values = text, texts
		case c.Kind == archive.Micros:
			*typ, *values = microseconds, micros(as[int64](numbers))
		case c.Kind == archive.Seconds:
			*typ, *values = wholeSeconds, seconds(as[uint32](numbers))
		case c.Kind == archive.Day: // a table's rows are of one day at a time
			*typ, *values = date, days{uint16(rows.day), rows.rows}
		case c.Kind == archive.Signed && c.Bits == 64:
			*typ, *values = i64, as[int64](numbers)
		case c.Kind == archive.Signed && c.Bits == 32:
			*typ, *values = i32, as[int32](numbers)
		case c.Kind == archive.Signed:
			*typ, *values = i8, as[int8](numbers)
		case c.Bits == 64:
			*typ, *values = u64, numbers
		case c.Bits == 32:
			*typ, *values = u32, as[uint32](numbers)
		default:
			*typ, *values = u8, as[uint8](numbers)
		}
	}
	return all
}

func as[T int8 | uint8 | int32 | uint32 | int64](numbers []uint64) []T {
	list := make([]T, len(numbers))
	for i, n := range numbers {
		list[i] = T(n)
	}
	return list
}
