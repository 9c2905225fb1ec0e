package history

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/ClickHouse/clickhouse-go/v2"
	"github.com/ClickHouse/clickhouse-go/v2/lib/driver"
	"github.com/ClickHouse/clickhouse-go/v2/lib/proto"

	"kvstrata/event"
)

// Query is a named question.
type Query struct {
	Name   string  `json:"name"`
	Title  string  `json:"title"`
	Help   string  `json:"help"`
	Params []Param `json:"params"`

	sql      string
	tell     func(r *Reader, ctx context.Context, bound clickhouse.Parameters, a *Answer) error // where sql is not all of it
	columns  []Column
	chart    Chart
	notes    []string
	counting counting
	sampled  bool   // it may look at a share of the blocks
	inferred bool   // its answer is what events suggest, not what they say
	weight   string // the column that says how many each of a row's records stands for; empty = they are all
}

// Param is what a question may be asked with.
type Param struct {
	Name    string `json:"name"`
	Kind    string `json:"kind"` // duration, text, number or hash
	Default string `json:"default"`
	Help    string `json:"help"`
}

// Column describes a column of an answer. Kind is time, number, text, hash, seconds, bytes or ratio.
type Column struct {
	Name string `json:"name"`
	Kind string `json:"kind"`
	Unit string `json:"unit,omitempty"`
}

// Chart says how an answer is best drawn.
type Chart struct {
	Kind string   `json:"kind"` // line, bar or none
	X    string   `json:"x,omitempty"`
	Y    []string `json:"y,omitempty"`
}

// Answer is what a question gave. Times are Unix milliseconds, hashes hexadecimal, unknown values null.
type Answer struct {
	Query string `json:"query"`
	Title string `json:"title"`
	Since int64  `json:"since"`
	Until int64  `json:"until"`

	BeforeSince int64 `json:"before_since,omitempty"` // of a comparison
	BeforeUntil int64 `json:"before_until,omitempty"`

	Exactness string   `json:"exactness"` // exact, sampled or inferred
	Notes     []string `json:"notes"`
	Columns   []Column `json:"columns"`
	Rows      [][]any  `json:"rows"`
	Chart     Chart    `json:"chart"`
	Truncated bool     `json:"truncated"`
	Elapsed   float64  `json:"elapsed_ms"`
	SQL       string   `json:"sql,omitempty"`
}

// Errors of questions; what they wrap says what to change.
var (
	ErrUnknownQuery = errors.New("no such query")
	ErrBadParam     = errors.New("parameter")
	ErrTooMuch      = errors.New("the query would take too much")
	ErrUnavailable  = errors.New("ClickHouse does not answer")
)

// QueryNamed returns a named question.
func QueryNamed(name string) (Query, error) {
	var names []string
	for _, q := range queries {
		if q.Name == name {
			return q, nil
		}
		names = append(names, q.Name)
	}
	return Query{}, fmt.Errorf("%w: %q; there are %s", ErrUnknownQuery, name, strings.Join(names, ", "))
}

// Queries lists the named questions.
func Queries() []Query { return queries }

// window is the time that a question is about.
type window struct {
	since, until time.Time
	before       *window // that it is compared with; nil = none
}

// step returns a bucket that cuts the window into some hundred.
func (w window) step() time.Duration {
	steps := []time.Duration{
		time.Second, 2 * time.Second, 5 * time.Second, 10 * time.Second, 30 * time.Second, time.Minute, 5 * time.Minute,
		15 * time.Minute, time.Hour, 6 * time.Hour,
	}
	for _, s := range steps {
		if w.until.Sub(w.since) <= 180*s {
			return s
		}
	}
	return 24 * time.Hour
}

// parseTime reads a duration back from now, as 90m or 7d, or a time: RFC 3339 or Unix milliseconds. What is before 1970
// is 1970: nothing is kept from then.
func parseTime(text string, now time.Time) (time.Time, error) {
	back := func(d time.Duration) (time.Time, error) {
		return time.Unix(0, max(now.Add(-d).UnixNano(), 0)), nil
	}
	if days, ok := strings.CutSuffix(text, "d"); ok {
		if n, err := strconv.ParseFloat(days, 64); err == nil && n >= 0 && n <= 36500 {
			return back(time.Duration(n * 24 * float64(time.Hour)))
		}
	}
	if d, err := time.ParseDuration(text); err == nil && d >= 0 {
		return back(d)
	}
	if t, err := time.Parse(time.RFC3339, text); err == nil {
		return time.Unix(max(t.Unix(), 0), int64(t.Nanosecond())), nil
	}
	if ms, err := strconv.ParseInt(text, 10, 64); err == nil && ms > 1e11 && ms < 1e14 {
		return time.UnixMilli(ms), nil
	}
	return time.Time{}, fmt.Errorf("%q: want a duration as 1h or 7d, a time as 2026-11-29T18:00:00Z, or Unix milliseconds", text)
}

// bind checks the values that a question is asked with, and returns its parameters and window. Values of other names are
// refused, so that a misspelt filter is not ignored.
func (q *Query) bind(values map[string]string, now time.Time, maxRows int) (clickhouse.Parameters, window, int, error) {
	bad := func(name string, err error) (clickhouse.Parameters, window, int, error) {
		return nil, window{}, 0, fmt.Errorf("%w %s: %w", ErrBadParam, name, err)
	}
	bound := clickhouse.Parameters{}
	w := window{until: now}
	for name := range values {
		if !slices.ContainsFunc(q.Params, func(p Param) bool { return p.Name == name }) {
			return bad(name, fmt.Errorf("%s does not have it; it has %s", q.Name, q.paramNames()))
		}
	}
	limit := maxRows
	lengths := make(map[string]time.Duration)
	for _, p := range q.Params {
		text, given := values[p.Name]
		if !given || text == "" {
			text = p.Default
			given = false
		}
		switch {
		case p.Name == "since" || p.Name == "until":
			at := now
			if text != "" {
				var err error
				if at, err = parseTime(text, now); err != nil {
					return bad(p.Name, err)
				}
			}
			if p.Name == "since" {
				w.since = at
			} else {
				w.until = at
			}
		case p.Name == beforeSince.Name || p.Name == beforeUntil.Name: // windowBefore reads them
		case p.Name == "limit":
			n, err := strconv.Atoi(text)
			if !given {
				n = min(n, maxRows)
			}
			if err != nil || n < 1 || n > maxRows {
				return bad(p.Name, fmt.Errorf("%q: want 1 to %d", text, maxRows))
			}
			limit = n
		case p.Kind == "hash":
			h, err := parseHash(text)
			if err != nil {
				return bad(p.Name, err)
			}
			bound[p.Name] = strconv.FormatUint(h, 10)
		case p.Kind == "number":
			if _, err := strconv.ParseUint(text, 10, 32); err != nil {
				return bad(p.Name, fmt.Errorf("%q: want a number", text))
			}
			bound[p.Name] = text
		case p.Kind == "duration": // a length, in seconds
			d, err := time.ParseDuration(text)
			if err != nil || d < time.Second || d > 24*time.Hour || d%time.Second != 0 {
				return bad(p.Name, fmt.Errorf("%q: want 1s to 24h, in whole seconds", text))
			}
			lengths[p.Name] = d
			bound[p.Name] = strconv.Itoa(int(d / time.Second))
		default:
			if strings.ContainsRune(text, 0) {
				return bad(p.Name, errors.New("holds a zero byte"))
			}
			bound[p.Name] = boundText.Replace(text)
		}
	}
	w.until = earlier(w.until, now.Add(aheadAtMost))
	if !w.since.Before(w.until) {
		return bad("since", fmt.Errorf("%s is not before until %s", w.since.UTC().Format(time.RFC3339), w.until.UTC().Format(time.RFC3339)))
	}
	bound["since"], bound["until"] = strconv.FormatInt(w.since.UnixMicro(), 10), strconv.FormatInt(w.until.UnixMicro(), 10)
	if q.compares() {
		before, err := windowBefore(values, w, now)
		if err != nil {
			return nil, window{}, 0, err
		}
		w.before = &before
	}
	w.bindSeconds(bound, lengths[within.Name])
	bound["step"] = strconv.Itoa(int(w.step().Seconds()))
	bound["limit"] = strconv.Itoa(limit + 1) // one more says that there are more
	return bound, w, limit, nil
}

// bindSeconds binds the first and the last whole second of the window, of the one before, and of all that is read: so much more than
// the window, or both.
func (w window) bindSeconds(bound clickhouse.Parameters, lead time.Duration) {
	bind := func(first, last string, since, until time.Time) {
		up := func(t time.Time) int64 { return (max(t.UnixNano(), 0) + int64(time.Second) - 1) / int64(time.Second) }
		bound[first], bound[last] = strconv.FormatInt(up(since), 10), strconv.FormatInt(up(until)-1, 10)
	}
	bind("first", "last", w.since, w.until)
	if w.before == nil {
		bind("from", "to", w.since.Add(-lead), w.until)
		return
	}
	bind("before_first", "before_last", w.before.since, w.before.until)
	bind("from", "to", earlier(w.since, w.before.since), later(w.until, w.before.until))
}

// aheadAtMost is how far beyond our clock a question may reach: the bus may have another.
const aheadAtMost = 24 * time.Hour

func earlier(a, b time.Time) time.Time {
	if b.Before(a) {
		return b
	}
	return a
}

func later(a, b time.Time) time.Time {
	if b.After(a) {
		return b
	}
	return a
}

// boundText writes a text as ClickHouse reads the value of a parameter.
var boundText = strings.NewReplacer(`\`, `\\`, "\t", `\t`, "\n", `\n`, "\r", `\r`)

func (q *Query) paramNames() string {
	var names []string
	for _, p := range q.Params {
		names = append(names, p.Name)
	}
	return strings.Join(names, ", ")
}

// parseHash reads a hash in hexadecimal into 64 bits, as rows have it.
func parseHash(text string) (uint64, error) {
	h, err := event.ParseBlockHash(text)
	if err != nil {
		return 0, fmt.Errorf("hash %q: want hexadecimal digits, as 34dc6330fee229a2", text)
	}
	return Fold(h), nil
}

// Check checks what a named question is asked with, without asking.
func Check(name string, asked map[string]string) error {
	q, err := QueryNamed(name)
	if err != nil {
		return err
	}
	_, _, _, err = q.bind(asked, time.Now(), DefaultConfig().MaxRowsAnswered)
	return err
}

// CheckExplain checks what a story is asked with, without asking.
func CheckExplain(hash, since string) error {
	if _, err := parseHash(hash); err != nil {
		return fmt.Errorf("%w %w", ErrBadParam, err)
	}
	if since != "" {
		if _, err := parseTime(since, time.Now()); err != nil {
			return fmt.Errorf("%w since: %w", ErrBadParam, err)
		}
	}
	return nil
}

// Ask answers a named question. Its values are bound to the query, never written into it.
func (r *Reader) Ask(ctx context.Context, name string, asked map[string]string) (*Answer, error) {
	q, err := QueryNamed(name)
	if err != nil {
		return nil, err
	}
	bound, w, limit, err := q.bind(asked, time.Now(), r.cfg.MaxRowsAnswered)
	if err != nil {
		return nil, err
	}
	began := time.Now()
	a := &Answer{
		Query: q.Name, Title: q.Title, Since: w.since.UnixMilli(), Until: w.until.UnixMilli(), Exactness: "exact",
		Notes: append([]string{}, q.notes...), Columns: q.columns, Chart: q.chart, Rows: [][]any{},
	}
	if q.sampled {
		share, err := r.share(ctx, bound)
		if err != nil {
			return nil, err
		}
		if share > 1 {
			a.Exactness = "sampled"
			a.Notes = append(a.Notes, fmt.Sprintf("one block in %d was looked at, by its hash, and numbers of blocks and tokens are times %d", share, share))
		}
	}
	if q.counting != notCounting {
		if err := r.bindCounted(ctx, bound, q.counting); err != nil {
			return nil, err
		}
	}
	if q.inferred {
		a.Exactness = "inferred"
	}
	if before := w.before; before != nil {
		a.BeforeSince, a.BeforeUntil = before.since.UnixMilli(), before.until.UnixMilli()
	}
	if q.tell != nil {
		err = q.tell(r, ctx, bound, a)
	} else {
		a.SQL = explained(q.sql, bound)
		err = r.each(ctx, q.sql, bound, func(rows driver.Rows) error {
			row, err := values(rows)
			if err != nil {
				return err
			}
			for i := range row {
				row[i] = cell(row[i], q.columns[i].Kind)
			}
			a.Rows = append(a.Rows, row)
			return nil
		})
	}
	if err != nil {
		return nil, err
	}
	a.weigh(q.weight)
	if a.Truncated = len(a.Rows) > limit; a.Truncated {
		a.Rows = a.Rows[:limit]
	}
	a.Elapsed = float64(time.Since(began).Microseconds()) / 1000
	return a, nil
}

// query runs a query and yields a scan of each row, into pointers of the columns' types.
func (r *Reader) query(ctx context.Context, sql string, bound clickhouse.Parameters, yield func(scan func(...any) error) error) error {
	return r.each(ctx, sql, bound, func(rows driver.Rows) error {
		if err := yield(rows.Scan); err != nil {
			return fmt.Errorf("read answer: %w", err)
		}
		return nil
	})
}

// grace is how much longer than ClickHouse we wait for its word that a query takes too long.
const grace = 5 * time.Second

// each runs a query and yields each row.
func (r *Reader) each(ctx context.Context, sql string, bound clickhouse.Parameters, yield func(driver.Rows) error) error {
	// Without a deadline: the client library would make one the query's bound, in place of ours.
	waiting, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	defer cancel(nil)
	defer context.AfterFunc(ctx, func() { cancel(context.Cause(ctx)) })()
	timer := time.AfterFunc(r.cfg.MaxTime+grace, func() { cancel(context.DeadlineExceeded) })
	defer timer.Stop()
	settings := clickhouse.Settings{"max_execution_time": int(math.Ceil(r.cfg.MaxTime.Seconds()))}
	if !r.embedded { // whose pools have a bound of their own
		settings["max_memory_usage"], settings["readonly"] = r.cfg.MaxMemory, r.readOnly
		if r.cfg.Cluster != "" { // what one part of a question finds is for all shards to compare with
			settings["distributed_product_mode"], settings["prefer_global_in_and_join"] = "global", 1
		}
	}
	rows, err := r.conn.Query(
		clickhouse.Context(waiting, clickhouse.WithParameters(bound), clickhouse.WithSettings(settings)), sql)
	if err != nil {
		return answerError(waiting, err)
	}
	defer rows.Close()
	for rows.Next() {
		if err := yield(rows); err != nil {
			return err
		}
	}
	return answerError(waiting, rows.Err())
}

// values reads a row's values, whatever their types.
func values(rows driver.Rows) ([]any, error) {
	types := rows.ColumnTypes()
	targets := make([]any, len(types))
	for i, t := range types {
		targets[i] = reflect.New(t.ScanType()).Interface()
	}
	if err := rows.Scan(targets...); err != nil {
		return nil, fmt.Errorf("read answer: %w", err)
	}
	for i := range targets {
		targets[i] = reflect.ValueOf(targets[i]).Elem().Interface()
	}
	return targets, nil
}

// Codes of ClickHouse for a query that takes too much time or memory.
const (
	codeTimeout     = 159
	codeTooSlow     = 160
	codeMemoryLimit = 241
	codeTooManyRows = 158
	codeTooManyByte = 307
	codeTooBig      = 396
)

// Codes of ClickHouse when it has no room for a query, and when the tables are not there yet.
const (
	codeTooMany        = 202
	codeUnknownTable   = 60
	codeUnknownDB      = 81
	codeAuthentication = 516
)

// answerError says what an error of ClickHouse means for whoever asked; ctx is what it was asked with.
func answerError(ctx context.Context, err error) error {
	if err == nil {
		return nil
	}
	tooMuch := func(text string) error {
		return fmt.Errorf("%w: narrow the time range, or name an engine (%s)", ErrTooMuch, firstLine(text))
	}
	exception := (*proto.Exception)(nil)
	if errors.As(err, &exception) {
		switch exception.Code {
		case codeTimeout, codeTooSlow, codeMemoryLimit, codeTooManyRows, codeTooManyByte, codeTooBig:
			return tooMuch(exception.Message)
		case codeTooMany:
			return fmt.Errorf("%w: it is busy, ask again later (%s)", ErrUnavailable, firstLine(exception.Message))
		case codeUnknownTable, codeUnknownDB:
			return fmt.Errorf("%w: it holds no history yet; is a history role running? (%s)", ErrUnavailable, firstLine(exception.Message))
		case codeAuthentication:
			return fmt.Errorf("%w to this user: look at user and password of --clickhouse (%s)", ErrUnavailable, firstLine(exception.Message))
		}
		return fmt.Errorf("ClickHouse: %s", firstLine(exception.Message))
	}
	if errors.Is(context.Cause(ctx), context.DeadlineExceeded) {
		return tooMuch("no answer in time")
	}
	for _, word := range []string{"MEMORY_LIMIT_EXCEEDED", "TIMEOUT_EXCEEDED", "TOO_SLOW"} {
		if strings.Contains(err.Error(), word) {
			return tooMuch(err.Error())
		}
	}
	return fmt.Errorf("%w: %s", ErrUnavailable, firstLine(err.Error()))
}

func firstLine(text string) string {
	line, _, _ := strings.Cut(text, "\n")
	if len(line) > 300 {
		line = line[:300] + "…"
	}
	return line
}

// cell returns a value as JSON has it.
func cell(v any, kind string) any {
	switch v := v.(type) {
	case time.Time:
		if v.Unix() == 0 {
			return nil
		}
		return v.UnixMilli()
	case uint64:
		if kind == "hash" {
			return hashText(v)
		}
		return v
	case float64:
		if math.IsNaN(v) || math.IsInf(v, 0) {
			return nil
		}
		return v
	case float32:
		return cell(float64(v), kind)
	default:
		if p := reflect.ValueOf(v); p.Kind() == reflect.Pointer { // of a Nullable
			if p.IsNil() {
				return nil
			}
			return cell(p.Elem().Interface(), kind)
		}
		return v
	}
}

// explained is a query with its parameters in front, to be run by hand.
func explained(sql string, bound clickhouse.Parameters) string {
	var b strings.Builder
	for _, name := range slices.Sorted(maps.Keys(bound)) {
		if strings.Contains(sql, "{"+name+":") {
			fmt.Fprintf(&b, "SET param_%s = '%s';\n", name, strings.NewReplacer(`\`, `\\`, `'`, `\'`).Replace(bound[name]))
		}
	}
	return b.String() + sql
}
