package history

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/ClickHouse/clickhouse-go/v2"
	"golang.org/x/sync/errgroup"
)

// storyOf reads the events and snapshots of a block by its prefix hash, or else by an engine's hash, oldest first; what took every block of
// its sources away; and the block before.
func (r *Reader) storyOf(ctx context.Context, hash uint64) (lines []StoryLine, truncated bool, parent *Parent, err error) {
	bound := clickhouse.Parameters{"hash": strconv.FormatUint(hash, 10)}
	lines, err = r.storyLines(ctx, `hash = {hash:UInt64} AND named = 1`, bound)
	isPrefix := len(lines) > 0
	if err == nil && !isPrefix {
		lines, err = r.storyLines(ctx, `engine_hash = {hash:UInt64}`, bound)
	}
	if err != nil || len(lines) == 0 {
		return nil, false, nil, err
	}
	inTime(lines)
	var unnamed, clears []StoryLine
	all, background := errgroup.WithContext(ctx)
	if isPrefix {
		all.Go(func() (err error) {
			unnamed, err = r.unnamed(background, lines)
			return err
		})
	}
	all.Go(func() (err error) {
		clears, err = r.clears(background, lines)
		return err
	})
	all.Go(func() (err error) {
		parent, err = r.parent(background, lines)
		return err
	})
	var at stamps
	all.Go(func() (err error) {
		at, err = r.stamps(background, lines)
		return err
	})
	if err := all.Wait(); err != nil {
		return nil, false, nil, err
	}
	more, err := r.stamps(ctx, append(slices.Clone(unnamed), clears...))
	if err != nil {
		return nil, false, nil, err
	}
	at.apply(lines)
	more.apply(unnamed)
	more.apply(clears)
	lines = append(lines, unnamed...)
	inTime(lines)
	if truncated = len(lines) > maxStory; truncated {
		lines = lines[len(lines)-maxStory:]
	}
	lines = append(lines, after(clears, lines)...)
	inTime(lines)
	return lines, truncated, parent, nil
}

// unnamed reads the rows of the engines' hashes that a prefix goes by, where they were told without a name.
func (r *Reader) unnamed(ctx context.Context, named []StoryLine) ([]StoryLine, error) {
	type spelling struct {
		id         string
		engineHash uint64
	}
	of := make(map[spelling]bool)
	called := make(map[uint64]bool)
	for _, l := range named {
		of[spelling{l.ID, l.engineHash}], called[l.engineHash] = true, true
	}
	lines, err := r.storyLines(ctx, `hash IN {engines:Array(UInt64)} AND named = 0`,
		clickhouse.Parameters{"engines": numbers(slices.Sorted(maps.Keys(called)))})
	return slices.DeleteFunc(lines, func(l StoryLine) bool { // another engine may call something else by the same hash
		return !of[spelling{l.ID, l.engineHash}]
	}), err
}

// storyLines reads the events and snapshots that a condition names, the newest maxStory+1 of each, at the seconds of their rows.
func (r *Reader) storyLines(ctx context.Context, where string, bound clickhouse.Parameters) (lines []StoryLine, err error) {
	bound = maps.Clone(bound)
	bound["limit"] = strconv.Itoa(maxStory + 1)
	var snapshots []StoryLine
	both, background := errgroup.WithContext(ctx)
	both.Go(func() (err error) {
		lines, err = r.eventLines(background, where, bound)
		return err
	})
	both.Go(func() (err error) {
		snapshots, err = r.snapshotLines(background, where, bound)
		return err
	})
	err = both.Wait()
	return append(lines, snapshots...), err
}

func (r *Reader) eventLines(ctx context.Context, where string, bound clickhouse.Parameters) (lines []StoryLine, err error) {
	err = r.query(ctx, `SELECT committed, toString(source), toString(op), toString(tier), kv_group, toInt64(effect), copies, age_ms,
  epoch, seq, toInt64(ev), toInt64(pos), engine_hash, hash, named, run_parent, run_prefix
FROM block_events WHERE `+where+` AND op != 'CLEARED'
ORDER BY committed DESC, source, epoch DESC, seq DESC, ev DESC, pos DESC LIMIT {limit:UInt64}`, bound, func(scan func(...any) error) error {
		var l StoryLine
		var copies int32
		var age int64
		var named uint8
		if err := scan(&l.committed, &l.ID, &l.Op, &l.Tier, &l.Group, &l.Effect, &copies, &age, &l.Epoch, &l.Seq, &l.ev, &l.pos,
			&l.engineHash, &l.hash, &named, &l.parent, &l.parentPrefix); err != nil {
			return err
		}
		if copies >= 0 {
			l.Copies = &copies
		}
		if age >= 0 {
			seconds := float64(age) / 1e3
			l.Age = &seconds
		}
		l.Time, l.named = l.committed.UnixMilli(), named != 0
		lines = append(lines, l)
		return lines[len(lines)-1].locate()
	})
	return lines, err
}

func (r *Reader) snapshotLines(ctx context.Context, where string, bound clickhouse.Parameters) (lines []StoryLine, err error) {
	err = r.query(ctx, `SELECT DISTINCT committed, toString(source), toString(tier), kv_group, copies, epoch, seq, engine_hash, hash, named
FROM snapshots WHERE `+where+` AND (source, snapshot) IN (SELECT source, snapshot FROM ledger WHERE kind = 'resync')
ORDER BY committed DESC LIMIT {limit:UInt64}`, bound, func(scan func(...any) error) error {
		l := StoryLine{Op: "SNAPSHOT", ev: evSnapshot, Reason: "history goes on from a checkpoint"}
		var copies uint32
		var named uint8
		if err := scan(&l.committed, &l.ID, &l.Tier, &l.Group, &copies, &l.Epoch, &l.Seq, &l.engineHash, &l.hash, &named); err != nil {
			return err
		}
		held := int32(min(copies, 1<<31-1))
		l.Copies, l.Time, l.named = &held, l.committed.UnixMilli(), named != 0
		lines = append(lines, l)
		return lines[len(lines)-1].locate()
	})
	return lines, err
}

// numbers writes numbers as ClickHouse reads an array.
func numbers(list []uint64) string {
	texts := make([]string, len(list))
	for i, n := range list {
		texts[i] = strconv.FormatUint(n, 10)
	}
	return "[" + strings.Join(texts, ",") + "]"
}

// quoted writes names of sources as ClickHouse reads an array: they have letters, digits and _-%. only, as in a subject.
func quoted(ids []string) string {
	if len(ids) == 0 {
		return "[]"
	}
	return "['" + strings.Join(ids, "','") + "']"
}

// clears reads what took every block of a story's sources away: CLEARED, checkpoints, and the beginnings of lives.
func (r *Reader) clears(ctx context.Context, story []StoryLine) (lines []StoryLine, err error) {
	sources := make(map[string]bool)
	for _, l := range story {
		sources[l.ID] = true
	}
	bound := clickhouse.Parameters{"sources": quoted(slices.Sorted(maps.Keys(sources)))}
	err = r.query(ctx, `SELECT toDateTime64(committed, 6, 'UTC'), toString(source), epoch, seq, toInt64(ev), toString(cause) FROM block_events
  WHERE hash = 0 AND op = 'CLEARED' AND has({sources:Array(String)}, source)
UNION ALL SELECT DISTINCT committed, toString(source), epoch, last, if(kind = 'life' OR snapshot = 0, `+fmt.Sprint(evLife)+`, `+fmt.Sprint(evClear)+`),
    if(kind = 'life', '`+newLife+`', '`+restored+`') FROM ledger
  WHERE kind IN ('life', 'resync') AND has({sources:Array(String)}, source)`,
		bound, func(scan func(...any) error) error {
			l := StoryLine{Op: "CLEARED"}
			if err := scan(&l.committed, &l.ID, &l.Epoch, &l.Seq, &l.ev, &l.Reason); err != nil {
				return err
			}
			l.Time = l.committed.UnixMilli()
			lines = append(lines, l)
			return lines[len(lines)-1].locate()
		})
	return lines, err
}

// after returns the clears that come after a story's first line of their source: others took nothing of it away.
func after(clears, story []StoryLine) []StoryLine {
	first := make(map[string]StoryLine)
	for _, l := range inPlace(story) {
		if _, ok := first[l.ID]; !ok {
			first[l.ID] = l
		}
	}
	return slices.DeleteFunc(clears, func(l StoryLine) bool {
		begin, ok := first[l.ID]
		return !ok || l.compare(&begin) < 0
	})
}

// stamps are the moments at which the bus took batches, in ms.
type stamps map[batchName]int64

// batchName names a batch.
type batchName struct {
	source     string
	epoch, seq uint64
}

// stamps reads those of events.
func (r *Reader) stamps(ctx context.Context, lines []StoryLine) (stamps, error) {
	at := make(stamps)
	var texts []string
	for i := range lines {
		l := &lines[i]
		name := batchName{l.ID, l.Epoch, l.Seq}
		if _, ok := at[name]; ok || !l.isEvent() {
			continue
		}
		at[name] = 0
		texts = append(texts, fmt.Sprintf("('%s',%d,%d)", l.ID, l.Epoch, l.Seq))
	}
	if len(texts) == 0 {
		return at, nil
	}
	err := r.query(ctx, `SELECT toString(source), epoch, seq, committed FROM batches
WHERE (source, epoch, seq) IN {places:Array(Tuple(String, UInt64, UInt64))}`,
		clickhouse.Parameters{"places": "[" + strings.Join(texts, ",") + "]"}, func(scan func(...any) error) error {
			var name batchName
			var committed time.Time
			err := scan(&name.source, &name.epoch, &name.seq, &committed)
			at[name] = committed.UnixMilli()
			return err
		})
	return at, err
}

// isEvent reports whether a line is of a batch; the times of the others are whole as they are.
func (l *StoryLine) isEvent() bool { return l.ev >= 0 && l.ev < evClear }

// apply gives events their moments. Those whose batches are no longer kept stay at their seconds.
func (s stamps) apply(lines []StoryLine) {
	for i := range lines {
		if l := &lines[i]; l.isEvent() {
			l.Time = max(l.Time, s[batchName{l.ID, l.Epoch, l.Seq}])
		}
	}
}

// parent finds the block before, of the newest STORED that has one.
func (r *Reader) parent(ctx context.Context, story []StoryLine) (*Parent, error) {
	for _, l := range slices.Backward(story) {
		if l.Op == "STORED" && (l.pos > 0 || l.parent != 0) {
			return r.parentOf(ctx, &l)
		}
	}
	return nil, nil
}

// parentOf finds what a block was stored behind. The first block of a run tells it; of others, chains knows it by the kind of name that the
// block has itself, and block_events the other name, which stands in the same hour if the block is of the same run.
func (r *Reader) parentOf(ctx context.Context, l *StoryLine) (*Parent, error) {
	prefix, engineHash := l.parentPrefix, l.parent
	one := func(into *uint64, sql string, bound clickhouse.Parameters) error {
		return r.query(ctx, sql, bound, func(scan func(...any) error) error { return scan(into) })
	}
	bound := clickhouse.Parameters{
		"hash": strconv.FormatUint(l.hash, 10), "source": l.ID, "seq": strconv.FormatUint(l.Seq, 10), "at": strconv.FormatInt(l.committed.Unix(), 10),
	}
	const chained = `SELECT max(parent) FROM chains WHERE hash = {hash:UInt64} AND named = `
	const told = ` AND named = 1 AND op = 'STORED' AND source = {source:String}`
	const newest = told + ` ORDER BY committed DESC, epoch DESC, seq DESC LIMIT 1`
	var err error
	switch {
	case l.named && l.pos > 0:
		err = r.query(ctx, `SELECT hash, engine_hash FROM block_events
WHERE hash IN (`+chained+`1) AND committed = toDateTime({at:Int64}, 'UTC') AND seq = {seq:UInt64}`+told+` LIMIT 1`, bound,
			func(scan func(...any) error) error { return scan(&prefix, &engineHash) })
		if err == nil && prefix == 0 {
			err = one(&prefix, chained+`1`, bound)
		}
	case l.named && prefix == 0:
		err = one(&prefix, chained+`1`, bound)
	case !l.named && l.pos > 0:
		err = one(&engineHash, chained+`0`, bound)
	}
	if err != nil || prefix == 0 && engineHash == 0 {
		return nil, err
	}
	bound["prefix"], bound["engine"] = strconv.FormatUint(prefix, 10), strconv.FormatUint(engineHash, 10)
	switch {
	case prefix == 0:
		err = one(&prefix, `SELECT hash FROM block_events WHERE engine_hash = {engine:UInt64}`+newest, bound)
	case engineHash == 0:
		err = one(&engineHash, `SELECT engine_hash FROM block_events WHERE hash = {prefix:UInt64}`+newest, bound)
	}
	p := &Parent{EngineHash: fmt.Sprintf("%016x", engineHash)}
	if prefix != 0 {
		p.Prefix = fmt.Sprintf("%016x", prefix)
	}
	return p, err
}
