package history

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/ClickHouse/clickhouse-go/v2"
)

// Query is a named question.
type Query struct {
	Name   string  `json:"name"`
	Title  string  `json:"title"`
	Help   string  `json:"help"`
	Params []Param `json:"params"`

	sql      string
	tell     func(r *Reader, ctx context.Context, bound clickhouse.Parameters, a *Answer) error // where sql is not all of it
	choices  map[string][]string                                                                // of parameters that take only these
	columns  []Column
	chart    Chart
	notes    []string
	counting counting
	remarks  func(*Answer) []string // what its rows say in sentences; nil = nothing
	sampled  bool                   // it may look at a share of the blocks
	peeks    bool                   // it looks at a share of them for what is the same in all
	inferred bool                   // its answer is what events suggest, not what they say
	weight   string                 // the column that says how many each of a row's records stands for; empty = they are all
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

// QueryNamed returns a named question.
func QueryNamed(name string) (Query, error) {
	var names []string
	for _, q := range queries {
		if q.Name == name {
			return q, nil
		}
		names = append(names, q.Name)
	}
	return Query{}, fmt.Errorf("%w %q; %sthere are %s", ErrUnknownQuery, name, suggestion(name, names), strings.Join(names, ", "))
}

// Queries lists the named questions.
func Queries() []Query { return queries }

// Check checks what a named question is asked with, without asking.
func Check(name string, asked map[string]string) error {
	q, err := QueryNamed(name)
	if err != nil {
		return err
	}
	_, _, _, err = q.bind(asked, time.Now(), DefaultConfig().MaxRowsAnswered)
	return err
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
		a.sampledOf(share)
	}
	if q.peeks {
		if _, err := r.share(ctx, bound); err != nil {
			return nil, err
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
		err = r.rows(ctx, q.sql, bound, a)
	}
	if err != nil {
		return nil, err
	}
	a.weigh(q.weight)
	if a.Truncated = len(a.Rows) > limit; a.Truncated {
		a.Rows = a.Rows[:limit]
	}
	if q.remarks != nil {
		a.Notes = append(a.Notes, q.remarks(a)...)
	}
	a.Elapsed = float64(time.Since(began).Microseconds()) / 1000
	return a, nil
}
