package history

import (
	"context"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/ClickHouse/clickhouse-go/v2"

	"kvstrata/indexer/history/archive"
)

// keptTable is a table whose rows go into files and come from there.
type keptTable struct {
	name   string
	time   string   // the column by which rows are of a window, a day a partition
	order  []string // in which rows lie in a file; columns that are not named follow
	spread string   // the column by which the rows of one second are divided
	source bool     // rows are of a source
	final  bool     // parts have to be added up
	rows   uint64   // asked for at once: an answer is bounded in bytes
}

// keptTables are in the order in which a file has them. What the writer itself stands on, progress, is not among them.
var keptTables = []keptTable{
	{name: "batches", time: "committed", order: []string{"committed", "source", "epoch", "seq"}, spread: "seq", source: true, rows: 100_000},
	{name: "block_events", time: "committed", order: []string{"committed", "source", "epoch", "seq", "ev", "pos"}, spread: "hash", source: true, rows: 200_000},
	{name: "chains", time: "day", order: []string{"day", "hash", "named"}, spread: "hash", final: true, rows: 200_000},
	{name: "loads", time: "committed", order: []string{"committed", "source", "epoch", "seq", "ev"}, spread: "seq", source: true, rows: 50_000},
	{name: "transfers", time: "committed", order: []string{"committed", "source", "stream_seq", "rec"}, spread: "stream_seq", source: true, rows: 50_000},
	{name: "lookups", time: "committed", order: []string{"committed", "source", "stream_seq", "rec"}, spread: "stream_seq", source: true, rows: 50_000},
	{name: "requests", time: "committed", order: []string{"committed", "source", "stream_seq", "rec"}, spread: "stream_seq", source: true, rows: 50_000},
	{name: "gpu_samples", time: "committed", order: []string{"committed", "source", "stream_seq", "rec"}, spread: "stream_seq", source: true, rows: 50_000},
	{name: "ledger", time: "committed", order: []string{"committed", "source", "epoch", "seq", "kind"}, spread: "seq", source: true, rows: 50_000},
	{name: "snapshots", time: "committed", order: []string{"committed", "source", "snapshot", "hash"}, spread: "hash", source: true, rows: 100_000},
}

// KeptTables are the names of the tables that files may have rows of.
func KeptTables() []string {
	var names []string
	for i := range keptTables {
		names = append(names, keptTables[i].name)
	}
	return names
}

// CheckTables checks names of tables; none = all.
func CheckTables(names []string) error {
	for _, name := range names {
		if !slices.Contains(KeptTables(), name) {
			return fmt.Errorf("table %.64q: %sthere are %s", name, suggestion(name, KeptTables()), strings.Join(KeptTables(), ", "))
		}
	}
	return nil
}

// layout is a table as the database has it.
type layout struct {
	keptTable
	archive.Table
	enums map[int]map[string]int8 // by column
	lists map[int]int             // of columns that are lists of unsigned numbers, how many bits those have; a file has a list as a text
}

// hashColumns are those of 64 bits that people write in hexadecimal.
var hashColumns = []string{"hash", "engine_hash", "run_parent", "run_prefix", "parent", "prefix"}

// queryRows runs a query and yields a scan of each row.
type queryRows func(ctx context.Context, sql string, bound clickhouse.Parameters, yield func(scan func(...any) error) error) error

// readLayouts asks the database for the tables that files may have. One that is not there is left out.
func readLayouts(ctx context.Context, query queryRows) ([]*layout, error) {
	all := make([]*layout, 0, len(keptTables))
	for _, kept := range keptTables {
		l := &layout{keptTable: kept, Table: archive.Table{Name: kept.name, Needed: kept.order}}
		l.enums, l.lists = make(map[int]map[string]int8), make(map[int]int)
		err := query(ctx, `SELECT name, type FROM system.columns
WHERE database = currentDatabase() AND table = {table:String} AND default_kind NOT IN ('ALIAS', 'MATERIALIZED') ORDER BY position`,
			clickhouse.Parameters{"table": kept.name}, func(scan func(...any) error) error {
				var name, typ string
				if err := scan(&name, &typ); err != nil {
					return err
				}
				return l.add(name, typ)
			})
		if err != nil {
			return nil, fmt.Errorf("read the columns of %s: %w", kept.name, err)
		}
		if len(l.Columns) > 0 {
			all = append(all, l)
		}
	}
	return all, nil
}

var (
	wrapped    = regexp.MustCompile(`^(?:LowCardinality\(|SimpleAggregateFunction\(\w+, )(.+)\)$`)
	numberType = regexp.MustCompile(`^(U?)Int(8|32|64)$`)
	listType   = regexp.MustCompile(`^Array\(UInt(8|32|64)\)$`)
	listText   = regexp.MustCompile(`^\[(?:\d{1,20}(?:,\d{1,20})*)?\]$`)
	enumName   = regexp.MustCompile(`'((?:[^'\\]|\\.)*)' = (-?\d+)`)
)

func (l *layout) add(name, typ string) error {
	for m := wrapped.FindStringSubmatch(typ); m != nil; m = wrapped.FindStringSubmatch(typ) {
		typ = m[1]
	}
	c := archive.Column{Name: name}
	number, list := numberType.FindStringSubmatch(typ), listType.FindStringSubmatch(typ)
	switch {
	case typ == "String":
		c.Kind = archive.Text
	case strings.HasPrefix(typ, "Enum8("):
		c.Kind = archive.Text
		values := make(map[string]int8)
		for _, m := range enumName.FindAllStringSubmatch(typ, -1) {
			n, err := strconv.ParseInt(m[2], 10, 8)
			if err != nil {
				return err
			}
			values[m[1]] = int8(n)
		}
		l.enums[len(l.Columns)] = values
	case list != nil:
		c.Kind = archive.Text
		l.lists[len(l.Columns)], _ = strconv.Atoi(list[1])
	case number != nil:
		c.Kind = map[string]archive.Kind{"U": archive.Unsigned, "": archive.Signed}[number[1]]
		c.Bits, _ = strconv.Atoi(number[2])
		if c.Kind == archive.Unsigned && c.Bits == 64 && slices.Contains(hashColumns, name) {
			c.Kind = archive.Hash
		}
	case strings.HasPrefix(typ, "DateTime64(6"):
		c.Kind, c.Bits = archive.Micros, 64
	case strings.HasPrefix(typ, "DateTime64("):
		return fmt.Errorf("column %s is %s, which no file has", name, typ)
	case strings.HasPrefix(typ, "DateTime"):
		c.Kind, c.Bits = archive.Seconds, 32
	case typ == "Date":
		c.Kind, c.Bits = archive.Day, 16
	default:
		return fmt.Errorf("column %s is %s, which no file has", name, typ)
	}
	l.Columns = append(l.Columns, c)
	return nil
}

// checkList checks the text of a list, as ClickHouse writes it.
func checkList(text string, bits int) error {
	if !listText.MatchString(text) {
		return fmt.Errorf("%.32q: want a list of numbers, as [1,2]", text)
	}
	for n := range strings.SplitSeq(strings.Trim(text, "[]"), ",") {
		if _, err := strconv.ParseUint(n, 10, bits); err != nil && text != "[]" {
			return fmt.Errorf("%.32q: want numbers of %d bits", n, bits)
		}
	}
	return nil
}

// place returns where a column is.
func (l *layout) place(name string) int {
	return slices.IndexFunc(l.Columns, func(c archive.Column) bool { return c.Name == name })
}
