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

// Explain tells the story of a block by its prefix hash or by an engine's hash. since is as in a query; empty = all.
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
	s := &Story{Hash: text, Summary: []string{}, Names: []Name{}, Resident: []Place{}, Events: []StoryLine{}}
	// By prefix hash first: rows lie in its order.
	for _, column := range []string{"hash", "engine_hash"} {
		if s.Events, err = r.storyLines(ctx, column, hash, from); err != nil {
			return nil, err
		}
		if len(s.Events) > 0 {
			break
		}
	}
	s.Found = len(s.Events) > 0
	if s.Truncated = len(s.Events) > maxStory; s.Truncated {
		s.Events = s.Events[len(s.Events)-maxStory:]
	}
	if s.Found {
		clears, err := r.clears(ctx, s.Events)
		if err != nil {
			return nil, err
		}
		s.Events = append(s.Events, clears...)
		sortStory(s.Events)
		s.Names = names(s.Events)
		s.Resident = residentNow(s.Events)
		if s.Parent, err = r.parent(ctx, s.Events); err != nil {
			return nil, err
		}
	}
	s.Summary = summary(s, began)
	s.Elapsed = float64(time.Since(began).Microseconds()) / 1000
	return s, nil
}

func sortStory(lines []StoryLine) {
	slices.SortStableFunc(lines, func(a, b StoryLine) int {
		return cmp.Or(cmp.Compare(a.Time, b.Time), cmp.Compare(a.ID, b.ID), cmp.Compare(a.Epoch, b.Epoch), cmp.Compare(a.Seq, b.Seq),
			cmp.Compare(a.ev, b.ev), cmp.Compare(a.pos, b.pos))
	})
}

// storyLines reads the events and snapshots of a hash in one column, the newest maxStory+1 of them, oldest first.
func (r *Reader) storyLines(ctx context.Context, column string, hash uint64, from time.Time) ([]StoryLine, error) {
	bound := clickhouse.Parameters{
		"hash": strconv.FormatUint(hash, 10), "since": strconv.FormatInt(from.UnixMicro(), 10), "limit": strconv.Itoa(maxStory + 1),
	}
	var lines []StoryLine
	err := r.query(ctx, `SELECT committed, toString(source), instance, toString(op), toString(tier), kv_group, toInt64(effect), copies, age_us,
  epoch, seq, toInt64(ev), toInt64(pos), toString(cause), engine_hash, hash, named, run_parent, model FROM (
  SELECT committed, source, instance, op, tier, kv_group, effect, copies, age_us, epoch, seq, ev, pos, cause, engine_hash, hash, named, run_parent, model
  FROM block_events WHERE `+column+` = {hash:UInt64} AND op != 'CLEARED' AND committed >= fromUnixTimestamp64Micro({since:Int64})
  ORDER BY committed DESC, seq DESC, ev DESC, pos DESC LIMIT {limit:UInt64})`, bound, func(scan func(...any) error) error {
		var l StoryLine
		var at time.Time
		var copies int32
		var age int64
		var named uint8
		if err := scan(&at, &l.ID, &l.Instance, &l.Op, &l.Tier, &l.Group, &l.Effect, &copies, &age, &l.Epoch, &l.Seq, &l.ev, &l.pos,
			&l.Reason, &l.engineHash, &l.hash, &named, &l.parent, &l.model); err != nil {
			return err
		}
		l.Time, l.named = at.UnixMilli(), named != 0
		if copies >= 0 {
			l.Copies = &copies
		}
		if age >= 0 {
			seconds := float64(age) / 1e6
			l.Age = &seconds
		}
		lines = append(lines, l)
		return nil
	})
	if err != nil {
		return nil, err
	}
	err = r.query(ctx, `SELECT s.committed, toString(s.source), toString(s.tier), s.kv_group, s.copies, s.epoch, s.seq, s.engine_hash, s.hash, s.named
FROM snapshots AS s
INNER JOIN (SELECT source, snapshot FROM ledger WHERE kind = 'resync') AS l ON l.source = s.source AND l.snapshot = s.snapshot
WHERE s.`+column+` = {hash:UInt64} AND s.committed >= fromUnixTimestamp64Micro({since:Int64}) LIMIT {limit:UInt64}`, bound, func(scan func(...any) error) error {
		l := StoryLine{Op: "SNAPSHOT", ev: 1 << 32, Reason: "history goes on from a checkpoint"}
		var at time.Time
		var copies uint32
		var named uint8
		if err := scan(&at, &l.ID, &l.Tier, &l.Group, &copies, &l.Epoch, &l.Seq, &l.engineHash, &l.hash, &named); err != nil {
			return err
		}
		held := int32(copies)
		l.Time, l.Copies, l.named = at.UnixMilli(), &held, named != 0
		if err := l.locate(); err != nil {
			return err
		}
		lines = append(lines, l)
		return nil
	})
	sortStory(lines)
	return lines, err
}

// clears reads what took every block of the sources of a story away: CLEARED, checkpoints, and the beginnings of lives.
func (r *Reader) clears(ctx context.Context, story []StoryLine) ([]StoryLine, error) {
	ids := make(map[string]bool)
	for _, l := range story {
		ids[l.ID] = true
	}
	quoted := make([]string, 0, len(ids))
	for id := range ids {
		quoted = append(quoted, "'"+id+"'") // subject tokens: letters, digits and _-%. only
	}
	slices.Sort(quoted)
	bound := clickhouse.Parameters{
		"sources": "[" + strings.Join(quoted, ",") + "]",
		"since":   strconv.FormatInt(time.UnixMilli(story[0].Time).UnixMicro(), 10),
	}
	var lines []StoryLine
	err := r.query(ctx, `SELECT committed, toString(source), op, epoch, seq, ev, reason FROM (
  SELECT committed, source, 'CLEARED' AS op, epoch, seq, toInt64(ev) AS ev, toString(cause) AS reason FROM block_events
    WHERE hash = 0 AND op = 'CLEARED' AND has({sources:Array(String)}, source) AND committed >= fromUnixTimestamp64Micro({since:Int64})
  UNION ALL SELECT committed, source, 'CLEARED' AS op, epoch, seq, toInt64(4294967295) AS ev, 'history went on from a checkpoint' AS reason FROM ledger
    WHERE kind = 'resync' AND has({sources:Array(String)}, source) AND committed >= fromUnixTimestamp64Micro({since:Int64})
  UNION ALL SELECT min(committed), source, 'CLEARED' AS op, epoch, toUInt64(0), toInt64(-1) AS ev, 'a new life began' AS reason FROM block_events
    WHERE has({sources:Array(String)}, source) AND committed >= fromUnixTimestamp64Micro({since:Int64}) GROUP BY source, epoch)`,
		bound, func(scan func(...any) error) error {
			var l StoryLine
			var at time.Time
			if err := scan(&at, &l.ID, &l.Op, &l.Epoch, &l.Seq, &l.ev, &l.Reason); err != nil {
				return err
			}
			l.Time = at.UnixMilli()
			if err := l.locate(); err != nil {
				return err
			}
			lines = append(lines, l)
			return nil
		})
	if err != nil {
		return nil, err
	}
	// The life that the story begins in cleared nothing of it.
	first := make(map[string]uint64)
	for _, l := range story {
		if e, ok := first[l.ID]; !ok || l.Epoch < e {
			first[l.ID] = l.Epoch
		}
	}
	return slices.DeleteFunc(lines, func(l StoryLine) bool { return l.ev == -1 && l.Epoch <= first[l.ID] }), nil
}

func names(story []StoryLine) []Name {
	seen := make(map[Name]bool)
	for _, l := range story {
		if l.engineHash == 0 && l.hash == 0 {
			continue
		}
		n := Name{EngineHash: fmt.Sprintf("%016x", l.engineHash), Model: l.model}
		if l.named {
			n.Prefix = fmt.Sprintf("%016x", l.hash)
		}
		seen[n] = true
	}
	return slices.SortedFunc(maps.Keys(seen), func(a, b Name) int {
		return cmp.Or(cmp.Compare(a.Model, b.Model), cmp.Compare(a.Prefix, b.Prefix), cmp.Compare(a.EngineHash, b.EngineHash))
	})
}

// residentNow adds a story up.
func residentNow(story []StoryLine) []Place {
	type key struct {
		id, tier   string
		engineHash uint64
		group      int32
	}
	places := make(map[key]*Place)
	for _, l := range story {
		if l.Op == "CLEARED" {
			maps.DeleteFunc(places, func(k key, _ *Place) bool { return k.id == l.ID })
			continue
		}
		k := key{l.ID, l.Tier, l.engineHash, l.Group}
		effect := l.Effect
		if l.Op == "SNAPSHOT" {
			effect = int64(*l.Copies)
			delete(places, k)
		}
		if effect == 0 {
			continue
		}
		p := places[k]
		if p == nil {
			p = &Place{ID: l.ID, Instance: l.Instance, Tier: l.Tier, Since: l.Time}
			places[k] = p
		}
		if p.Copies += effect; p.Copies == 0 {
			delete(places, k)
		}
	}
	now := make([]Place, 0, len(places))
	for _, p := range places {
		now = append(now, *p)
	}
	slices.SortFunc(now, func(a, b Place) int {
		return cmp.Or(cmp.Compare(a.Instance, b.Instance), cmp.Compare(a.ID, b.ID), cmp.Compare(a.Tier, b.Tier))
	})
	return now
}

// parent finds the block before, from the newest STORED that tells it.
func (r *Reader) parent(ctx context.Context, story []StoryLine) (*Parent, error) {
	for _, l := range slices.Backward(story) {
		if l.Op != "STORED" || l.pos == 0 && l.parent == 0 {
			continue
		}
		where := "engine_hash = {parent:UInt64} AND op = 'STORED'"
		bound := clickhouse.Parameters{
			"source": l.ID, "epoch": strconv.FormatUint(l.Epoch, 10), "seq": strconv.FormatUint(l.Seq, 10),
			"ev": strconv.FormatInt(l.ev, 10), "pos": strconv.FormatInt(l.pos-1, 10), "parent": strconv.FormatUint(l.parent, 10),
			"at": strconv.FormatInt(l.Time, 10),
		}
		if l.pos > 0 {
			where = "seq = {seq:UInt64} AND ev = {ev:UInt32} AND pos = {pos:UInt32} AND committed >= fromUnixTimestamp64Milli({at:Int64})" +
				" AND committed < fromUnixTimestamp64Milli({at:Int64}) + INTERVAL 1 SECOND"
		}
		var p *Parent
		err := r.query(ctx, `SELECT engine_hash, hash, named FROM block_events
WHERE source = {source:String} AND epoch = {epoch:UInt64} AND `+where+` LIMIT 1`, bound, func(scan func(...any) error) error {
			var engineHash, hash uint64
			var named uint8
			if err := scan(&engineHash, &hash, &named); err != nil {
				return err
			}
			p = &Parent{EngineHash: fmt.Sprintf("%016x", engineHash)}
			if named != 0 {
				p.Prefix = fmt.Sprintf("%016x", hash)
			}
			return nil
		})
		if p == nil && l.parent != 0 {
			p = &Parent{EngineHash: fmt.Sprintf("%016x", l.parent)}
		}
		return p, err
	}
	return nil, nil
}

// summary tells a story in sentences.
func summary(s *Story, now time.Time) []string {
	if !s.Found {
		return []string{"Never seen: no event that is kept names this hash. It was never stored, or before what history keeps."}
	}
	ago := func(ms int64) string { return now.Sub(time.UnixMilli(ms)).Round(time.Second).String() + " ago" }
	var out []string
	counts := make(map[string]int)
	engines := make(map[string]bool)
	var stored, evicted *StoryLine
	var firstStored int64
	for i := range s.Events {
		l := &s.Events[i]
		if l.Op == "STORED" && l.Effect > 0 {
			if stored == nil {
				firstStored = l.Time
			}
			counts["stored"]++
			engines[l.Instance] = true
			stored = l
		}
		if l.Op == "EVICTED" && l.Effect < 0 {
			counts["evicted"]++
			evicted = l
		}
		if l.Op == "LOADED" {
			counts["loaded"]++
		}
	}
	if stored != nil {
		out = append(out, fmt.Sprintf("Stored %s on %s, first %s, last %s on %s (%s).", times(counts["stored"]),
			plural(len(engines), "engine"), ago(firstStored), ago(stored.Time), stored.Instance, stored.Tier))
	}
	if counts["loaded"] > 0 {
		out = append(out, fmt.Sprintf("Loaded %s.", times(counts["loaded"])))
	}
	if evicted != nil {
		text := fmt.Sprintf("Evicted %s, last %s from %s (%s)", times(counts["evicted"]), ago(evicted.Time), evicted.Instance, evicted.Tier)
		if evicted.Age != nil {
			text += fmt.Sprintf(" after %s", time.Duration(*evicted.Age*float64(time.Second)).Round(time.Millisecond))
		}
		out = append(out, text+"; the engine tells no reason.")
	} else {
		out = append(out, "Never evicted in what is kept.")
	}
	if len(s.Resident) == 0 {
		out = append(out, "Resident nowhere now.")
	} else {
		var where []string
		for _, p := range s.Resident {
			where = append(where, fmt.Sprintf("%s (%s, %s)", p.Instance, p.Tier, plural(int(p.Copies), "copy")))
		}
		out = append(out, "Resident now on "+strings.Join(where, ", ")+".")
	}
	if s.Truncated {
		out = append(out, fmt.Sprintf("Only the newest %d events are shown, and counted here.", maxStory))
	}
	return out
}

func times(n int) string {
	if n == 1 {
		return "once"
	}
	return strconv.Itoa(n) + " times"
}

func plural(n int, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	if base, ok := strings.CutSuffix(noun, "y"); ok {
		return fmt.Sprintf("%d %sies", n, base)
	}
	return fmt.Sprintf("%d %ss", n, noun)
}

func sortedKeys(m map[string]string) []string { return slices.Sorted(maps.Keys(m)) }
