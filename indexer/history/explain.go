package history

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/ClickHouse/clickhouse-go/v2"

	"kvstrata/event"
)

// Story is everything kept of one block.
type Story struct {
	Hash      string      `json:"hash"`
	Found     bool        `json:"found"`
	Summary   []string    `json:"summary"`
	Names     []Name      `json:"names"`
	Resident  []Place     `json:"resident"`
	Parent    *Parent     `json:"parent,omitempty"`
	Events    []StoryLine `json:"events"`
	Truncated bool        `json:"truncated"`
	Elapsed   float64     `json:"elapsed_ms"`
}

// Name is one spelling of a block: the prefix it ends, and what an engine calls it.
type Name struct {
	Prefix     string `json:"prefix,omitempty"`
	EngineHash string `json:"engine_hash"`
	Model      string `json:"model"`
}

// Place is where a block is resident.
type Place struct {
	ID       string `json:"id"`
	Instance string `json:"instance"`
	Tier     string `json:"tier"`
	Copies   int64  `json:"copies"`
	Since    int64  `json:"since"`
}

// Parent is the block before.
type Parent struct {
	Prefix     string `json:"prefix,omitempty"`
	EngineHash string `json:"engine_hash"`
}

// StoryLine is one event of a block's story; op SNAPSHOT stands where history goes on from a checkpoint.
type StoryLine struct {
	Time     int64    `json:"time"`
	ID       string   `json:"id"`
	Instance string   `json:"instance"`
	Op       string   `json:"op"`
	Tier     string   `json:"tier"`
	Group    int32    `json:"group"`
	Effect   int64    `json:"effect"`
	Copies   *int32   `json:"copies"`
	Age      *float64 `json:"age"`
	Epoch    uint64   `json:"epoch"`
	Seq      uint64   `json:"seq"`
	Reason   string   `json:"reason"`

	engineHash, hash, parent uint64
	named                    bool
	ev, pos                  int64
	model                    string
}

// locate names the instance and model of a line's source.
func (l *StoryLine) locate() error {
	source, err := event.ParseSource(l.ID)
	l.Instance, l.model = source.Instance, source.Model
	return err
}

// maxStory bounds the events of a story: the newest.
const maxStory = 5000

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

// Explain tells the story of a block by its prefix hash or by an engine's hash. since is as in a query, and leaves out the
// events before it; empty = all that is kept. Where a block is resident is added up from everything.
func (r *Reader) Explain(ctx context.Context, text, since string) (*Story, error) {
	began := time.Now()
	hash, err := parseHash(text)
	if err != nil {
		return nil, fmt.Errorf("%w hash: %w", ErrBadParam, err)
	}
	from := time.UnixMilli(0)
	if since != "" {
		if from, err = parseTime(since, began); err != nil {
			return nil, fmt.Errorf("%w since: %w", ErrBadParam, err)
		}
	}
	s := &Story{Hash: text, Names: []Name{}, Resident: []Place{}, Events: []StoryLine{}}
	which, err := r.spellings(ctx, hash)
	if err != nil {
		return nil, err
	}
	lines, err := r.storyLines(ctx, which)
	if err != nil {
		return nil, err
	}
	s.Found = len(lines) > 0
	if s.Truncated = len(lines) > maxStory; s.Truncated {
		lines = lines[len(lines)-maxStory:]
	}
	if s.Found {
		if lines, err = r.withClears(ctx, lines); err != nil {
			return nil, err
		}
		s.Names = names(lines)
		lines, s.Resident = addUp(lines)
		if s.Parent, err = r.parent(ctx, lines); err != nil {
			return nil, err
		}
		s.Events = append(s.Events, slices.DeleteFunc(lines, func(l StoryLine) bool { return l.Time < from.UnixMilli() })...)
	}
	s.Summary = summary(s, began)
	s.Elapsed = float64(time.Since(began).Microseconds()) / 1000
	return s, nil
}

// spelling is which rows are of a block: those of an engine's hash, or those of a prefix, and of the engines' hashes that it
// goes by where they were told without a name.
type spelling struct {
	hash     uint64
	engines  map[string]map[uint64]bool // by source, the engines' hashes of a prefix; nil = hash is an engine's
	prefixes []uint64                   // what rows of the engine's hash have as hash
}

// spellings asks whether a hash is a prefix's, and what engines call it, or of which prefixes it is an engine's hash.
func (r *Reader) spellings(ctx context.Context, hash uint64) (spelling, error) {
	which := spelling{hash: hash}
	bound := clickhouse.Parameters{"hash": strconv.FormatUint(hash, 10)}
	err := r.query(ctx, `SELECT DISTINCT toString(source), engine_hash FROM (
  SELECT source, engine_hash FROM block_events WHERE hash = {hash:UInt64} AND named = 1
  UNION ALL SELECT source, engine_hash FROM snapshots WHERE hash = {hash:UInt64} AND named = 1) LIMIT 10000`,
		bound, func(scan func(...any) error) error {
			var id string
			var engineHash uint64
			if err := scan(&id, &engineHash); err != nil {
				return err
			}
			if which.engines == nil {
				which.engines = make(map[string]map[uint64]bool)
			}
			if which.engines[id] == nil {
				which.engines[id] = make(map[uint64]bool)
			}
			which.engines[id][engineHash] = true
			return nil
		})
	if err != nil || which.engines != nil {
		return which, err
	}
	err = r.query(ctx, `SELECT DISTINCT hash FROM (
  SELECT hash FROM block_events WHERE engine_hash = {hash:UInt64}
  UNION ALL SELECT hash FROM snapshots WHERE engine_hash = {hash:UInt64}) LIMIT 10000`,
		bound, func(scan func(...any) error) error {
			which.prefixes = append(which.prefixes, 0)
			return scan(&which.prefixes[len(which.prefixes)-1])
		})
	slices.Sort(which.prefixes)
	return which, err
}

// condition returns which rows may be of the block, and the values bound to that.
func (w spelling) condition() (string, clickhouse.Parameters) {
	bound := clickhouse.Parameters{"hash": strconv.FormatUint(w.hash, 10), "limit": strconv.Itoa(maxStory + 1)}
	if w.engines == nil {
		bound["prefixes"] = numbers(w.prefixes)
		return "hash IN {prefixes:Array(UInt64)} AND engine_hash = {hash:UInt64}", bound
	}
	all := map[uint64]bool{}
	for _, hashes := range w.engines {
		maps.Copy(all, hashes)
	}
	bound["engines"] = numbers(slices.Sorted(maps.Keys(all)))
	return "(hash = {hash:UInt64} OR hash IN {engines:Array(UInt64)}) AND (named = 1) = (hash = {hash:UInt64})", bound
}

// numbers writes numbers as ClickHouse reads an array.
func numbers(list []uint64) string {
	texts := make([]string, len(list))
	for i, n := range list {
		texts[i] = strconv.FormatUint(n, 10)
	}
	return "[" + strings.Join(texts, ",") + "]"
}

// has reports whether a line is the block's: another engine may call something else by the same hash.
func (w spelling) has(l *StoryLine) bool {
	return w.engines == nil || l.named || w.engines[l.ID][l.engineHash]
}

// inTime sorts lines for people, and inPlace for adding them up: clocks differ, but a source's sequence does not lie.
func inTime(lines []StoryLine) {
	slices.SortStableFunc(lines, func(a, b StoryLine) int {
		return cmp.Or(cmp.Compare(a.Time, b.Time), cmp.Compare(a.ID, b.ID), a.compare(&b))
	})
}

func inPlace(lines []StoryLine) []StoryLine {
	return slices.SortedStableFunc(slices.Values(lines), func(a, b StoryLine) int {
		return cmp.Or(cmp.Compare(a.ID, b.ID), a.compare(&b))
	})
}

// compare orders two lines of one source.
func (l *StoryLine) compare(m *StoryLine) int {
	return cmp.Or(cmp.Compare(l.Epoch, m.Epoch), cmp.Compare(l.Seq, m.Seq), cmp.Compare(l.ev, m.ev), cmp.Compare(l.pos, m.pos))
}

// Places of lines that are not events, among those of their sequence: a life begins before it, a checkpoint is behind it.
const (
	evLife     = -1
	evClear    = 1 << 32
	evSnapshot = 1<<32 + 1
)

// Reasons of CLEARED lines that are no events.
const (
	newLife  = "a new life began"
	restored = "history went on from a checkpoint"
)

// stamped joins the batches of told rows of block_events, for the moments at which the bus took them; atStamp is such a moment,
// or, when the batch is no longer kept, its second.
const (
	atStamp = "greatest(stamps.committed, toDateTime64(told.committed, 6, 'UTC'))"
	stamped = `ANY LEFT JOIN (SELECT source, epoch, seq, committed FROM batches WHERE (source, epoch, seq) IN (SELECT source, epoch, seq FROM told))
AS stamps USING (source, epoch, seq)`
)

// storyLines reads the events and snapshots of a block, the newest maxStory+1 of them, oldest first.
func (r *Reader) storyLines(ctx context.Context, which spelling) ([]StoryLine, error) {
	where, bound := which.condition()
	var lines []StoryLine
	add := func(l StoryLine, at time.Time, named uint8) error {
		l.Time, l.named = at.UnixMilli(), named != 0
		if !which.has(&l) {
			return nil
		}
		lines = append(lines, l)
		return lines[len(lines)-1].locate()
	}
	err := r.query(ctx, `WITH told AS (SELECT * FROM block_events WHERE `+where+` AND op != 'CLEARED'
  ORDER BY committed DESC, source, epoch DESC, seq DESC, ev DESC, pos DESC LIMIT {limit:UInt64})
SELECT `+atStamp+`, toString(source), toString(op), toString(tier), kv_group, toInt64(effect), copies, age_ms,
  epoch, seq, toInt64(ev), toInt64(pos), engine_hash, hash, named, run_parent
FROM told `+stamped, bound, func(scan func(...any) error) error {
		var l StoryLine
		var at time.Time
		var copies int32
		var age int64
		var named uint8
		if err := scan(&at, &l.ID, &l.Op, &l.Tier, &l.Group, &l.Effect, &copies, &age, &l.Epoch, &l.Seq, &l.ev, &l.pos,
			&l.engineHash, &l.hash, &named, &l.parent); err != nil {
			return err
		}
		if copies >= 0 {
			l.Copies = &copies
		}
		if age >= 0 {
			seconds := float64(age) / 1e3
			l.Age = &seconds
		}
		return add(l, at, named)
	})
	if err != nil {
		return nil, err
	}
	err = r.query(ctx, `SELECT DISTINCT committed, toString(source), toString(tier), kv_group, copies, epoch, seq, engine_hash, hash, named
FROM snapshots WHERE `+where+` AND (source, snapshot) IN (SELECT source, snapshot FROM ledger WHERE kind = 'resync')
ORDER BY committed DESC LIMIT {limit:UInt64}`, bound, func(scan func(...any) error) error {
		l := StoryLine{Op: "SNAPSHOT", ev: evSnapshot, Reason: "history goes on from a checkpoint"}
		var at time.Time
		var copies uint32
		var named uint8
		if err := scan(&at, &l.ID, &l.Tier, &l.Group, &copies, &l.Epoch, &l.Seq, &l.engineHash, &l.hash, &named); err != nil {
			return err
		}
		held := int32(min(copies, 1<<31-1))
		l.Copies = &held
		return add(l, at, named)
	})
	inTime(lines)
	return lines, err
}

// withClears adds to a story what took every block of its sources away: CLEARED, checkpoints, and the beginnings of lives.
func (r *Reader) withClears(ctx context.Context, story []StoryLine) ([]StoryLine, error) {
	first := make(map[string]StoryLine) // of each source
	for _, l := range inPlace(story) {
		if _, ok := first[l.ID]; !ok {
			first[l.ID] = l
		}
	}
	quoted := make([]string, 0, len(first))
	epoch := story[0].Epoch
	for id, l := range first {
		quoted = append(quoted, "'"+id+"'") // as in a subject: letters, digits and _-%. only
		epoch = min(epoch, l.Epoch)
	}
	slices.Sort(quoted)
	bound := clickhouse.Parameters{"sources": "[" + strings.Join(quoted, ",") + "]", "epoch": strconv.FormatUint(epoch, 10)}
	err := r.query(ctx, `WITH told AS (SELECT * FROM block_events
  WHERE hash = 0 AND op = 'CLEARED' AND has({sources:Array(String)}, source) AND epoch >= {epoch:UInt64})
SELECT `+atStamp+`, toString(source), epoch, seq, toInt64(ev), toString(cause) FROM told `+stamped+`
UNION ALL SELECT DISTINCT committed, toString(source), epoch, last, if(kind = 'life' OR snapshot = 0, `+fmt.Sprint(evLife)+`, `+fmt.Sprint(evClear)+`),
    if(kind = 'life', '`+newLife+`', '`+restored+`') FROM ledger
  WHERE kind IN ('life', 'resync') AND has({sources:Array(String)}, source) AND epoch >= {epoch:UInt64}`,
		bound, func(scan func(...any) error) error {
			l := StoryLine{Op: "CLEARED"}
			var at time.Time
			if err := scan(&at, &l.ID, &l.Epoch, &l.Seq, &l.ev, &l.Reason); err != nil {
				return err
			}
			l.Time = at.UnixMilli()
			begin := first[l.ID]
			if l.compare(&begin) < 0 {
				return nil // it took nothing of this story away
			}
			story = append(story, l)
			return story[len(story)-1].locate()
		})
	inTime(story)
	return story, err
}

func names(story []StoryLine) []Name {
	seen := make(map[Name]bool)
	for _, l := range story {
		if l.Op == "CLEARED" {
			continue
		}
		n := Name{EngineHash: fmt.Sprintf("%016x", l.engineHash), Model: l.model}
		if l.named {
			n.Prefix = fmt.Sprintf("%016x", l.hash)
		}
		seen[n] = true
	}
	for n := range seen { // told without a name first, and named later
		if n.Prefix != "" {
			delete(seen, Name{EngineHash: n.EngineHash, Model: n.Model})
		}
	}
	return slices.SortedFunc(maps.Keys(seen), func(a, b Name) int {
		return cmp.Or(cmp.Compare(a.Model, b.Model), cmp.Compare(a.Prefix, b.Prefix), cmp.Compare(a.EngineHash, b.EngineHash))
	})
}

// addUp returns where a block is now, and its story without those CLEARED that took nothing of it away.
func addUp(story []StoryLine) ([]StoryLine, []Place) {
	type key struct {
		id, tier   string
		engineHash uint64
		group      int32
	}
	places := make(map[key]*Place)
	last := make(map[string]uint64) // life, by source
	kept := make([]StoryLine, 0, len(story))
	for _, l := range inPlace(story) {
		before := len(places)
		if l.Op == "CLEARED" || l.Epoch != last[l.ID] {
			maps.DeleteFunc(places, func(k key, _ *Place) bool { return k.id == l.ID })
		}
		last[l.ID] = l.Epoch
		if l.Op != "CLEARED" || len(places) < before {
			kept = append(kept, l)
		}
		if l.Op == "CLEARED" || l.Op != "SNAPSHOT" && l.Effect == 0 {
			continue
		}
		k := key{l.ID, l.Tier, l.engineHash, max(l.Group, 0)} // no group is group 0
		p := places[k]
		if p == nil {
			p = &Place{ID: l.ID, Instance: l.Instance, Tier: l.Tier, Since: l.Time}
			places[k] = p
		}
		if l.Copies != nil { // what is left says more than a story whose beginning is not kept
			p.Copies = int64(*l.Copies)
		} else {
			p.Copies += l.Effect
		}
		if p.Copies <= 0 {
			delete(places, k)
		}
	}
	inTime(kept)
	now := make([]Place, 0, len(places))
	for _, p := range places {
		now = append(now, *p)
	}
	slices.SortFunc(now, func(a, b Place) int {
		return cmp.Or(cmp.Compare(a.Instance, b.Instance), cmp.Compare(a.ID, b.ID), cmp.Compare(a.Tier, b.Tier))
	})
	return kept, now
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

// parentOf finds what a block was stored behind: chains knows it by the kind of name that the block has itself, the first block of a
// run by its engine's hash, and block_events the other name.
func (r *Reader) parentOf(ctx context.Context, l *StoryLine) (*Parent, error) {
	prefix, engineHash := uint64(0), l.parent
	one := func(into *uint64, sql string, bound clickhouse.Parameters) error {
		return r.query(ctx, sql, bound, func(scan func(...any) error) error { return scan(into) })
	}
	named := "0"
	before := &engineHash
	if l.named {
		named, before = "1", &prefix
	}
	if l.named || l.pos > 0 {
		err := one(before, `SELECT max(parent) FROM chains WHERE hash = {hash:UInt64} AND named = {named:UInt8}`,
			clickhouse.Parameters{"hash": strconv.FormatUint(l.hash, 10), "named": named})
		if err != nil {
			return nil, err
		}
	}
	const newest = ` AND named = 1 AND op = 'STORED' AND source = {source:String} ORDER BY committed DESC, epoch DESC, seq DESC LIMIT 1`
	bound := clickhouse.Parameters{"source": l.ID, "prefix": strconv.FormatUint(prefix, 10), "engine": strconv.FormatUint(engineHash, 10)}
	var err error
	switch {
	case prefix == 0 && engineHash == 0:
		return nil, nil
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
