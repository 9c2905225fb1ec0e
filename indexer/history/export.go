package history

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"strconv"
	"time"

	"github.com/ClickHouse/clickhouse-go/v2"

	"kvstrata/event"
)

// exported is what an export can be asked for.
var exported = Query{Name: "export", Params: []Param{
	since, until, model, engine,
	{"blocks", "number", "1000", "Blocks whose time of residence is shown: a sample, by hash."},
	{"limit", "number", "200000", "Runs, loads, transfers and rows of the ledger at most, each."},
}}

// MaxExported bounds the rows of each kind in an export.
const MaxExported = 1_000_000

// CheckExport checks what an export is asked for, without asking.
func CheckExport(asked map[string]string) error {
	_, _, _, err := exported.bind(asked, time.Now(), MaxExported)
	return err
}

// Export writes a window as Trace Events in JSON
// (https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU), which Perfetto opens: a process a source, with tracks of
// what it stored, evicted, loaded and moved, its copies by tier, and how long a sample of its blocks was resident. Times are when the
// subscriber received a batch; those of single blocks are whole seconds.
func (r *Reader) Export(ctx context.Context, w io.Writer, asked map[string]string) error {
	bound, win, limit, err := exported.bind(asked, time.Now(), MaxExported)
	if err != nil {
		return err
	}
	bound["limit"] = strconv.Itoa(limit)
	out := &trace{w: bufio.NewWriter(w), window: win, processes: make(map[string]int)}
	out.begin()
	for _, part := range []func(context.Context, clickhouse.Parameters, *trace) error{
		r.exportRuns, r.exportCopies, r.exportLoads, r.exportTransfers, r.exportLedger, r.exportBlocks,
	} {
		if err := part(ctx, bound, out); err != nil {
			return err
		}
	}
	return out.end()
}

// Tracks of a source.
const (
	storedTrack = 1 + iota
	evictedTrack
	loadTrack
	transferTrack
	ledgerTrack
)

var trackNames = []string{storedTrack: "stored", evictedTrack: "evicted", loadTrack: "loads", transferTrack: "transfers", ledgerTrack: "ledger"}

// traceEvent is one Trace Event; times are in microseconds.
type traceEvent struct {
	Name  string         `json:"name"`
	Phase string         `json:"ph"`
	Cat   string         `json:"cat,omitempty"`
	ID    string         `json:"id,omitempty"`
	Time  int64          `json:"ts"`
	For   *int64         `json:"dur,omitempty"`
	Pid   int            `json:"pid"`
	Tid   int            `json:"tid"`
	Scope string         `json:"s,omitempty"`
	Args  map[string]any `json:"args,omitempty"`
}

// trace is an export that is being written. The first error stays.
type trace struct {
	w         *bufio.Writer
	window    window
	processes map[string]int // by source
	written   int
	err       error
}

func (t *trace) begin() { t.text(`{"displayTimeUnit":"ms","traceEvents":[`) }

func (t *trace) end() error {
	t.text("\n]}\n")
	if err := t.w.Flush(); t.err == nil {
		t.err = err
	}
	return t.err
}

func (t *trace) text(s string) {
	if t.err == nil {
		_, t.err = t.w.WriteString(s)
	}
}

func (t *trace) add(e *traceEvent) error {
	line, err := json.Marshal(e)
	if err != nil {
		return err
	}
	if t.written++; t.written > 1 {
		t.text(",")
	}
	t.text("\n")
	t.text(string(line))
	return t.err
}

// process returns the number of a source's process, told at its first appearance.
func (t *trace) process(source string) (int, error) {
	if pid := t.processes[source]; pid != 0 {
		return pid, nil
	}
	pid := len(t.processes) + 1
	t.processes[source] = pid
	name := source
	if s, err := event.ParseSource(source); err == nil {
		name = s.String()
	}
	err := t.add(&traceEvent{Name: "process_name", Phase: "M", Pid: pid, Args: map[string]any{"name": name}})
	for tid := storedTrack; tid <= ledgerTrack && err == nil; tid++ {
		err = t.add(&traceEvent{Name: "thread_name", Phase: "M", Pid: pid, Tid: tid, Args: map[string]any{"name": trackNames[tid]}})
	}
	return pid, err
}

// of adds an event of a source.
func (t *trace) of(source string, e *traceEvent) error {
	pid, err := t.process(source)
	if err != nil {
		return err
	}
	e.Pid = pid
	return t.add(e)
}

// exportRuns tells what was stored and evicted, an instant a run.
func (r *Reader) exportRuns(ctx context.Context, bound clickhouse.Parameters, t *trace) error {
	return r.query(ctx, `SELECT toString(source), op, tier, n, changed, first, toUnixTimestamp64Micro(received) AS at
FROM (
  SELECT source, epoch, seq, ev, toString(op) AS op, toString(any(tier)) AS tier, count() AS n, sum(effect) AS changed, min(hash) AS first
  FROM block_events
  WHERE op IN ('STORED', 'EVICTED', 'CLEARED') AND `+inSeconds+`
  GROUP BY source, epoch, seq, ev, op) AS runs
INNER JOIN (SELECT source, epoch, seq, any(received) AS received FROM batches
  WHERE committed >= fromUnixTimestamp64Micro({since:Int64}) - INTERVAL 1 SECOND AND committed < fromUnixTimestamp64Micro({until:Int64}) + INTERVAL 1 SECOND
  GROUP BY source, epoch, seq) AS told USING (source, epoch, seq)
ORDER BY at, source, seq, ev LIMIT {limit:UInt64}`, bound, func(scan func(...any) error) error {
		var source, op, tier string
		var n, hash uint64
		var changed, at int64
		if err := scan(&source, &op, &tier, &n, &changed, &hash, &at); err != nil {
			return err
		}
		track := map[string]int{"STORED": storedTrack, "EVICTED": evictedTrack, "CLEARED": evictedTrack}[op]
		e := &traceEvent{Name: fmt.Sprintf("%s %d", op, n), Phase: "i", Cat: tier, Time: at, Tid: track, Scope: "t"}
		if op == "CLEARED" {
			e.Name = op
		} else {
			e.Args = map[string]any{"blocks": n, "copies": changed, "tier": tier, "least_hash": hashText(hash)}
		}
		return t.of(source, e)
	})
}

// exportCopies tells how many copies each tier gained since the window began, second by second.
func (r *Reader) exportCopies(ctx context.Context, bound clickhouse.Parameters, t *trace) error {
	copies := make(map[string]map[string]any) // by source and tier
	return r.query(ctx, `SELECT toString(source), toString(tier) AS tier, toInt64(toUnixTimestamp(committed)) AS at, sum(toInt64(effect)) AS changed
FROM block_events WHERE effect != 0 AND `+inSeconds+`
GROUP BY source, tier, committed ORDER BY committed, source, tier LIMIT {limit:UInt64}`, bound, func(scan func(...any) error) error {
		var source, tier string
		var at, changed int64
		if err := scan(&source, &tier, &at, &changed); err != nil {
			return err
		}
		of := copies[source]
		if of == nil {
			of = make(map[string]any)
			copies[source] = of
		}
		before, _ := of[tier].(int64)
		of[tier] = before + changed
		return t.of(source, &traceEvent{Name: "copies gained", Phase: "C", Time: at * 1e6, Args: of})
	})
}

// exportLoads tells what LOADED events say.
func (r *Reader) exportLoads(ctx context.Context, bound clickhouse.Parameters, t *trace) error {
	return r.query(ctx, `SELECT toString(source), toUnixTimestamp64Micro(committed) AS at, duration_us, toString(from_tier), toString(tier), toString(peer),
  request, blocks, bytes
FROM loads WHERE `+inWindow+` ORDER BY at, source, seq, ev LIMIT {limit:UInt64}`, bound, func(scan func(...any) error) error {
		var source, from, to, peer, request string
		var at int64
		var took, size uint64
		var blocks uint32
		if err := scan(&source, &at, &took, &from, &to, &peer, &request, &blocks, &size); err != nil {
			return err
		}
		took64 := int64(took)
		return t.of(source, &traceEvent{
			Name: fmt.Sprintf("%d blocks %s → %s", blocks, from, to), Phase: "X", Time: at - took64, For: &took64, Tid: loadTrack,
			Args: map[string]any{"bytes": size, "peer": peer, "request": request},
		})
	})
}

// exportTransfers tells what connectors recorded.
func (r *Reader) exportTransfers(ctx context.Context, bound clickhouse.Parameters, t *trace) error {
	return r.query(ctx, `SELECT toString(source), toUnixTimestamp64Micro(committed) AS at, duration_us, toString(kind), toString(transport), toString(peer),
  toString(from_tier), toString(to_tier), request, blocks, bytes, reason
FROM transfers WHERE `+inWindow+` ORDER BY at, source, stream_seq, rec LIMIT {limit:UInt64}`, bound, func(scan func(...any) error) error {
		var source, kind, transport, peer, from, to, request, reason string
		var at int64
		var took, size uint64
		var blocks uint32
		if err := scan(&source, &at, &took, &kind, &transport, &peer, &from, &to, &request, &blocks, &size, &reason); err != nil {
			return err
		}
		took64 := int64(took)
		return t.of(source, &traceEvent{
			Name: kind + " over " + transport, Phase: "X", Cat: kind, Time: at - took64, For: &took64, Tid: transferTrack,
			Args: map[string]any{"blocks": blocks, "bytes": size, "peer": peer, "from": from, "to": to, "request": request, "reason": reason},
		})
	})
}

// exportLedger tells lives, losses, resyncs and states.
func (r *Reader) exportLedger(ctx context.Context, bound clickhouse.Parameters, t *trace) error {
	return r.query(ctx, `SELECT toString(source), toUnixTimestamp64Micro(committed) AS at, toString(kind), toString(state), epoch, seq, last, reason
FROM ledger WHERE `+inWindow+` ORDER BY at, source, seq LIMIT {limit:UInt64}`, bound, func(scan func(...any) error) error {
		var source, kind, state, reason string
		var at int64
		var epoch, seq, last uint64
		if err := scan(&source, &at, &kind, &state, &epoch, &seq, &last, &reason); err != nil {
			return err
		}
		name := kind
		if state != "" {
			name += " " + state
		}
		return t.of(source, &traceEvent{
			Name: name, Phase: "i", Cat: "ledger", Time: at, Tid: ledgerTrack, Scope: "p",
			Args: map[string]any{"epoch": epoch, "first": seq, "last": last, "reason": reason},
		})
	})
}

// residence is one block of a source in a tier.
type residence struct {
	source, tier string
	hash         uint64
}

func hashText(h uint64) string { return fmt.Sprintf("%016x", h) }

// exportBlocks tells how long the blocks with the least hashes were resident. What was there before the window begins with it, and what stays
// ends with it.
func (r *Reader) exportBlocks(ctx context.Context, bound clickhouse.Parameters, t *trace) error {
	copies := make(map[residence]int64)
	var order []residence
	tell := func(k residence, phase string, at int64) error {
		return t.of(k.source, &traceEvent{
			Name: hashText(k.hash), Phase: phase, Cat: "resident in " + k.tier, ID: fmt.Sprintf("%s-%016x-%s", k.source, k.hash, k.tier), Time: at,
		})
	}
	err := r.query(ctx, `SELECT toString(source), toString(tier) AS tier, hash, toInt64(effect), toInt64(copies), toInt64(toUnixTimestamp(committed)) AS at
FROM block_events
WHERE effect != 0 AND `+inSeconds+` AND hash IN (
  SELECT hash FROM block_events WHERE effect != 0 AND `+inSeconds+` GROUP BY hash ORDER BY hash LIMIT {blocks:UInt64})
ORDER BY at, source, seq, ev, pos LIMIT {limit:UInt64}`, bound, func(scan func(...any) error) error {
		var k residence
		var effect, left, at int64
		if err := scan(&k.source, &k.tier, &k.hash, &effect, &left, &at); err != nil {
			return err
		}
		n, known := copies[k]
		if !known {
			order = append(order, k)
		}
		if !known && effect < 0 { // it was there
			if err := tell(k, "b", t.window.since.UnixMicro()); err != nil {
				return err
			}
			n = max(left, 0) + 1
		}
		now := max(n+effect, 0)
		if effect < 0 && left == 0 {
			now = 0
		}
		copies[k] = now
		switch {
		case n == 0 && now > 0:
			return tell(k, "b", at*1e6)
		case n > 0 && now == 0:
			return tell(k, "e", at*1e6)
		}
		return nil
	})
	for i := 0; i < len(order) && err == nil; i++ {
		if copies[order[i]] > 0 {
			err = tell(order[i], "e", t.window.until.UnixMicro())
		}
	}
	return err
}
