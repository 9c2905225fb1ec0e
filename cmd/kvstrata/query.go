package main

import (
	"encoding/csv"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"kvstrata/indexer/history"
)

// tableFlags name the ClickHouse that holds history's tables.
type tableFlags struct {
	ClickHouse string `name:"clickhouse" help:"Ask this ClickHouse itself: clickhouse://…, http://… or unix:///path/clickhouse.sock." placeholder:"URL" env:"KVSTRATA_CLICKHOUSE"`
	Cluster    string `name:"clickhouse-cluster" help:"Cluster over which its tables are sharded." placeholder:"NAME" env:"KVSTRATA_CLICKHOUSE_CLUSTER"`
	Data       string `help:"Ask the history in this folder: the engine that a process with this --data embeds, or one of this command's own where none does." type:"path" placeholder:"DIR"`
	CHDB       string `name:"chdb" help:"Library of the embedded engine (libchdb.so); make setup installs it." type:"path" placeholder:"FILE" env:"KVSTRATA_CHDB"`
}

// named reports whether the flags name one.
func (f tableFlags) named() bool { return f.ClickHouse != "" || f.Data != "" }

// config returns how it is reached. Without a name it is a usage error.
func (f tableFlags) config() (history.Config, error) {
	if !f.named() {
		return history.Config{}, usagef("give --data or --clickhouse: it is ClickHouse itself that is asked")
	}
	return historyFlags{ClickHouse: f.ClickHouse, Cluster: f.Cluster}.config(f.Data)
}

// askFlags say whom to ask.
type askFlags struct {
	clientFlags

	Server string `help:"Address of a process with the role history or web." default:"http://127.0.0.1:8080" env:"KVSTRATA_SERVER"`
	tableFlags
}

// open returns a reader of the ClickHouse named by the flags, or nil when the server is to be asked.
func (f askFlags) open(a *app) (*tableReader, error) {
	if !f.named() {
		return nil, nil
	}
	return f.tableFlags.open(a)
}

// get asks the server.
func (f askFlags) get(a *app, path string, values url.Values, answer any) error {
	req, err := http.NewRequestWithContext(a.ctx, http.MethodGet, strings.TrimSuffix(f.Server, "/")+path+"?"+values.Encode(), nil)
	if err != nil {
		return usagef("--server %q: %w", f.Server, err)
	}
	client, err := f.client(a.log, 0)
	if err != nil {
		return err
	}
	resp, err := client.Do(req)
	if err != nil {
		return fmt.Errorf("ask %s: %w; is kvstrata run or demo up there? --data and --clickhouse ask the tables directly", f.Server, err)
	}
	defer resp.Body.Close()
	if resp.StatusCode == http.StatusUnauthorized {
		return errNoToken
	}
	if resp.StatusCode != http.StatusOK {
		var refused struct{ Error string }
		if err := json.NewDecoder(io.LimitReader(resp.Body, 1<<20)).Decode(&refused); err != nil || refused.Error == "" {
			return fmt.Errorf("%s answers %s to %s; does it have the role history or web?", f.Server, resp.Status, path)
		}
		if resp.StatusCode == http.StatusBadRequest || resp.StatusCode == http.StatusNotFound {
			return usagef("%s", refused.Error)
		}
		return errors.New(refused.Error)
	}
	dec := json.NewDecoder(resp.Body)
	dec.UseNumber()
	return dec.Decode(answer)
}

type queryCmd struct {
	askFlags

	Name   string            `arg:"" optional:"" help:"The question; without one, they are listed."`
	Since  string            `help:"A duration back from now, as 15m or 7d, or a time." placeholder:"1h"`
	Until  string            `help:"The end of the window." placeholder:"now"`
	Engine string            `help:"Only this engine (instance)."`
	Model  string            `help:"Only this model."`
	Limit  int               `help:"Rows at most; 0: the question's own bound."`
	Param  map[string]string `help:"Other parameters of the question, as name=value."`
	Format string            `help:"table, json or csv." enum:"table,json,csv" default:"table"`
	SQL    bool              `name:"sql" help:"Print the SQL instead of its answer."`
}

// Help shows how it is used.
func (queryCmd) Help() string {
	return `Example:

  kvstrata query
  kvstrata query evictions --since 15m
  kvstrata query events --since 24h --engine prefill-0 --format csv
  kvstrata query thrash --param within=1m
  kvstrata query compare --since 10m
  kvstrata query lineage --param hash=34dc6330fee229a2`
}

// Run asks, and prints.
func (c *queryCmd) Run(a *app) error {
	if c.Name == "" {
		return listQueries(a.stdout)
	}
	if _, err := history.QueryNamed(c.Name); err != nil {
		return usagef("%w", err)
	}
	values := make(map[string]string)
	for name, value := range c.Param {
		values[name] = value
	}
	for name, value := range map[string]string{"since": c.Since, "until": c.Until, "engine": c.Engine, "model": c.Model} {
		if value != "" {
			values[name] = value
		}
	}
	if c.Limit != 0 {
		values["limit"] = strconv.Itoa(c.Limit)
	}
	if err := history.Check(c.Name, values); err != nil {
		return usagef("%w", err)
	}
	answer, err := c.ask(a, values)
	if err != nil {
		return err
	}
	switch {
	case c.SQL:
		_, err = fmt.Fprintln(a.stdout, answer.SQL)
	case c.Format == "json":
		enc := json.NewEncoder(a.stdout)
		enc.SetIndent("", "  ")
		err = enc.Encode(answer)
	case c.Format == "csv":
		err = printCSV(a.stdout, answer)
	default:
		err = printTable(a.stdout, answer)
	}
	return err
}

func (c *queryCmd) ask(a *app, values map[string]string) (*history.Answer, error) {
	reader, err := c.open(a)
	if err != nil {
		return nil, err
	}
	if reader != nil {
		defer reader.Close()
		answer, err := reader.Ask(a.ctx, c.Name, values)
		if errors.Is(err, history.ErrBadParam) {
			return nil, usagef("%w", err)
		}
		return answer, err
	}
	query := url.Values{"sql": {"1"}}
	for name, value := range values {
		query.Set(name, value)
	}
	answer := new(history.Answer)
	return answer, c.get(a, "/v1/query/"+c.Name, query, answer)
}

func listQueries(w io.Writer) error {
	t := tabwriter.NewWriter(w, 2, 0, 2, ' ', 0)
	for _, q := range history.Queries() {
		fmt.Fprintf(t, "%s\t%s\n", q.Name, q.Help)
	}
	return t.Flush()
}

// printTable prints an answer for people.
func printTable(w io.Writer, a *history.Answer) error {
	fmt.Fprintf(w, "%s, %s to %s, %s\n\n", a.Title, clock(a.Since), clock(a.Until), a.Exactness)
	if a.BeforeUntil != 0 {
		fmt.Fprintf(w, "before: %s to %s\n\n", clock(a.BeforeSince), clock(a.BeforeUntil))
	}
	t := tabwriter.NewWriter(w, 2, 0, 2, ' ', 0)
	var head []string
	for _, c := range a.Columns {
		name := strings.ToUpper(c.Name)
		if c.Unit != "" && !strings.EqualFold(c.Unit, c.Name) {
			name += " [" + c.Unit + "]"
		}
		head = append(head, name)
	}
	fmt.Fprintln(t, strings.Join(head, "\t"))
	for _, row := range a.Rows {
		var cells []string
		for i, v := range row {
			cells = append(cells, text(v, a.Columns[i].Kind))
		}
		fmt.Fprintln(t, strings.Join(cells, "\t"))
	}
	if err := t.Flush(); err != nil {
		return err
	}
	if len(a.Rows) == 0 {
		fmt.Fprintln(w, "nothing in this window")
	}
	if a.Truncated {
		fmt.Fprintf(w, "\nonly the first %d rows; --limit shows more\n", len(a.Rows))
	}
	for _, note := range a.Notes {
		fmt.Fprintf(w, "\nNote: %s.", note)
	}
	_, err := fmt.Fprintf(w, "\n%d rows in %.0f ms\n", len(a.Rows), a.Elapsed)
	return err
}

// clock is a time for people, in their zone.
func clock(ms int64) string { return time.UnixMilli(ms).Format("2006-01-02 15:04:05") }

// text is one cell for people.
func text(v any, kind string) string {
	if v == nil {
		return "–"
	}
	plain := fmt.Sprint(v)
	number, err := strconv.ParseFloat(plain, 64)
	switch {
	case kind == "time" && err == nil:
		return clock(int64(number))
	case kind == "seconds" && err == nil:
		return strconv.FormatFloat(number, 'g', 4, 64)
	case kind == "ratio" && err == nil:
		return fmt.Sprintf("%.1f %%", 100*number)
	case kind == "bytes" && err == nil:
		return byteSize(number)
	}
	return strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f {
			return '\uFFFD' // an engine's name must not move the cursor
		}
		return r
	}, plain)
}

func byteSize(n float64) string {
	for _, unit := range []string{"B", "KiB", "MiB", "GiB", "TiB"} {
		if n < 1024 || unit == "TiB" {
			return strconv.FormatFloat(n, 'f', map[bool]int{true: 0, false: 1}[unit == "B"], 64) + " " + unit
		}
		n /= 1024
	}
	return ""
}

// printCSV prints an answer for programs: times as RFC 3339, numbers as they are.
func printCSV(w io.Writer, a *history.Answer) error {
	out := csv.NewWriter(w)
	row := make([]string, len(a.Columns))
	for i, c := range a.Columns {
		row[i] = c.Name
	}
	if err := out.Write(row); err != nil {
		return err
	}
	for _, cells := range a.Rows {
		for i, v := range cells {
			row[i] = ""
			if v != nil {
				row[i] = fmt.Sprint(v)
			}
			if ms, err := strconv.ParseInt(row[i], 10, 64); err == nil && a.Columns[i].Kind == "time" {
				row[i] = time.UnixMilli(ms).UTC().Format(time.RFC3339Nano)
			}
		}
		if err := out.Write(row); err != nil {
			return err
		}
	}
	out.Flush()
	return out.Error()
}
