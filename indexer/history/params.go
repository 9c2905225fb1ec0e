package history

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"kvstrata/event"

	"github.com/ClickHouse/clickhouse-go/v2"
)

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
			names := q.paramNames()
			return bad(name, fmt.Errorf("%s does not have it; %sit has %s", q.Name, suggestion(name, names), strings.Join(names, ", ")))
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
		case p.Name == "at":
			w.since, w.until = time.Unix(0, 0), now
			if text != "" {
				var err error
				if w.until, err = parseTime(text, now); err != nil {
					return bad(p.Name, err)
				}
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
			if choices := q.choices[p.Name]; len(choices) > 0 && !slices.Contains(choices, text) {
				return bad(p.Name, fmt.Errorf("%q: %swant %s", text, suggestion(text, choices), strings.Join(choices, ", ")))
			}
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

func (q *Query) paramNames() (names []string) {
	for _, p := range q.Params {
		names = append(names, p.Name)
	}
	return names
}

// parseHash reads a hash in hexadecimal into 64 bits, as rows have it.
func parseHash(text string) (uint64, error) {
	h, err := event.ParseBlockHash(text)
	if err != nil {
		return 0, fmt.Errorf("hash %q: want hexadecimal digits, as 34dc6330fee229a2", text)
	}
	return Fold(h), nil
}
