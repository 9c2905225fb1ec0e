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

	"kvstrata/indexer/history/archive"
)

// dumped is what a dump can be asked for.
var dumped = Query{Name: "export", Params: []Param{since, until, model, engine}}

// CheckDump checks what a dump is asked for, without asking.
func CheckDump(asked map[string]string, tables []string) error {
	if _, _, _, err := dumped.bind(asked, time.Now(), 1); err != nil {
		return err
	}
	return CheckTables(tables)
}

// Dump is the rows of a window, as they are in the tables.
type Dump struct {
	r     *Reader
	bound clickhouse.Parameters
	head  archive.Head
	all   []*layout
}

// Dump returns the rows of a window of whole seconds, which is the window asked for and what its seconds have beyond; no tables = all.
func (r *Reader) Dump(ctx context.Context, asked map[string]string, tables []string) (*Dump, error) {
	if err := CheckTables(tables); err != nil {
		return nil, err
	}
	bound, w, _, err := dumped.bind(asked, time.Now(), 1)
	if err != nil {
		return nil, err
	}
	d := &Dump{r: r, bound: bound, head: archive.Head{
		Since: w.since.Truncate(time.Second).UTC(), Until: w.until.Add(time.Second - 1).Truncate(time.Second).UTC(),
	}}
	if d.all, err = readLayouts(ctx, r.query); err != nil {
		return nil, err
	}
	if len(d.all) == 0 {
		return nil, fmt.Errorf("%w: it holds no history yet; is a history role running?", ErrUnavailable)
	}
	d.all = slices.DeleteFunc(d.all, func(l *layout) bool { return len(tables) > 0 && !slices.Contains(tables, l.keptTable.name) })
	return d, nil
}

// Head returns the window.
func (d *Dump) Head() archive.Head { return d.head }

// Tables returns the tables, in order.
func (d *Dump) Tables() (all archive.Tables) {
	for _, l := range d.all {
		all = append(all, &l.Table)
	}
	return all
}

// piece is what is asked for at once: whole seconds (days, of chains) in the window, and of one second with many rows a share.
type piece struct {
	from, to int64 // seconds, the end left out
	shares   uint64
}

// Rows hands over a table's rows in their order: second by second, and within a second by the table's key. Where a second has more than are asked
// for at once, they come in shares.
func (d *Dump) Rows(ctx context.Context, table *archive.Table, yield func(archive.Row) error) error {
	i := slices.IndexFunc(d.all, func(l *layout) bool { return &l.Table == table })
	if i < 0 {
		return errors.New("the dump has no such table")
	}
	l := d.all[i]
	pieces, err := d.pieces(ctx, l)
	if err != nil {
		return err
	}
	sql, row := l.query(), newScan(&l.Table)
	for _, p := range pieces {
		for share := range p.shares {
			bound := d.within(p)
			bound["share"] = strconv.FormatUint(share, 10)
			err := d.r.query(ctx, sql, bound, func(scan func(...any) error) error {
				if err := scan(row.targets...); err != nil {
					return err
				}
				return yield(row.row())
			})
			if err != nil {
				return fmt.Errorf("export %s: %w", l.keptTable.name, err)
			}
		}
	}
	return nil
}

// within binds a piece.
func (d *Dump) within(p piece) clickhouse.Parameters {
	return clickhouse.Parameters{
		"from": strconv.FormatInt(p.from, 10), "to": strconv.FormatInt(p.to, 10), "shares": strconv.FormatUint(p.shares, 10),
		"model": d.bound["model"], "engine": d.bound["engine"],
	}
}

// during is the condition of whole seconds, the end left out. A bound is of its column's own type: compared with a time in whole seconds,
// one in microseconds is lost where the engine skips by its index.
func (l *layout) during() string {
	at := l.keptTable.time
	bound := "toDateTime({%s:Int64}, 'UTC')"
	switch l.Columns[l.place(at)].Kind {
	case archive.Micros:
		bound = "fromUnixTimestamp64Micro({%s:Int64} * 1000000)"
	case archive.Day:
		bound = "toDate(" + bound + ")"
	}
	return at + " >= " + fmt.Sprintf(bound, "from") + " AND " + at + " < " + fmt.Sprintf(bound, "to")
}

// where is the condition of a piece.
func (l *layout) where() string {
	if l.source {
		return l.during() + " AND " + ofSources
	}
	return l.during()
}

func (l *layout) from() string {
	if l.final {
		return l.keptTable.name + " FINAL"
	}
	return l.keptTable.name
}

// pieces cuts the window.
func (d *Dump) pieces(ctx context.Context, l *layout) (all []piece, err error) {
	whole := piece{from: d.head.Since.Unix(), to: d.head.Until.Unix(), shares: 1}
	unit := int64(1)
	if l.keptTable.time == "day" {
		unit = 86400
		whole.from -= whole.from % unit
		whole.to += (unit - whole.to%unit) % unit
	}
	sum := uint64(0)
	err = d.r.query(ctx, `SELECT toInt64(toUnixTimestamp(toDateTime(`+l.keptTable.time+`, 'UTC'))) AS at, count() FROM `+l.keptTable.name+`
WHERE `+l.where()+` GROUP BY at ORDER BY at`, d.within(whole), func(scan func(...any) error) error {
		var at int64
		var rows uint64
		if err := scan(&at, &rows); err != nil {
			return err
		}
		if last := len(all) - 1; last >= 0 && sum+rows <= l.rows {
			all[last].to = at + unit
			sum += rows
			return nil
		}
		all = append(all, piece{from: at, to: at + unit, shares: 1 + rows/(l.rows+1)})
		sum = rows
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("export %s: %w", l.keptTable.name, err)
	}
	return all, nil
}

// query is the question for a share of a piece.
func (l *layout) query() string {
	var columns []string
	order := slices.Clone(l.order)
	for i := range l.Columns {
		c := &l.Columns[i]
		columns = append(columns, asNumber(c))
		if !slices.Contains(order, c.Name) {
			order = append(order, c.Name)
		}
	}
	return "SELECT " + strings.Join(columns, ", ") + "\nFROM " + l.from() + "\nWHERE " + l.where() +
		" AND ({shares:UInt64} = 1 OR " + l.spread + " % {shares:UInt64} = {share:UInt64})\nORDER BY " + strings.Join(order, ", ")
}

// asNumber reads a column as a scan takes it: as a text, or as a number of 64 bits.
func asNumber(c *archive.Column) string {
	switch c.Kind {
	case archive.Text:
		return "toString(" + c.Name + ")"
	case archive.Signed:
		return "toInt64(" + c.Name + ")"
	case archive.Micros:
		return "toUnixTimestamp64Micro(" + c.Name + ")"
	case archive.Seconds:
		return "toUInt64(toUnixTimestamp(" + c.Name + "))"
	case archive.Day:
		return "toUInt64(toUInt16(" + c.Name + "))"
	default:
		return "toUInt64(" + c.Name + ")"
	}
}

// scan is where a row is read to.
type scan struct {
	table    *archive.Table
	targets  []any
	signed   []int64
	unsigned []uint64
	texts    []string
	cells    []archive.Cell
}

func newScan(table *archive.Table) *scan {
	n := len(table.Columns)
	s := &scan{
		table: table, targets: make([]any, n), signed: make([]int64, n), unsigned: make([]uint64, n), texts: make([]string, n), cells: make([]archive.Cell, n),
	}
	for i := range table.Columns {
		switch table.Columns[i].Kind {
		case archive.Text:
			s.targets[i] = &s.texts[i]
		case archive.Signed, archive.Micros:
			s.targets[i] = &s.signed[i]
		default:
			s.targets[i] = &s.unsigned[i]
		}
	}
	return s
}

func (s *scan) row() archive.Row {
	for i := range s.cells {
		s.cells[i] = archive.Cell{N: s.unsigned[i], S: s.texts[i]}
		if s.signed[i] != 0 {
			s.cells[i].N = uint64(s.signed[i])
		}
	}
	return archive.Row{Table: s.table, Cells: s.cells}
}
