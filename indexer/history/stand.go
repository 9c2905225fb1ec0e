package history

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/ClickHouse/clickhouse-go/v2"
)

// stand is where a source stood at a moment: its last batch before, and since where what it holds adds up.
type stand struct {
	source         string
	epoch, last    uint64
	sinceSeq       uint64
	sinceEv        int64
	snapshot       int64
	sinceCommitted int64 // in µs
	known          string
	doubtful       bool
}

type stands []stand

// since is when the first of the sets began, in µs; 0 without any.
func (s stands) since() (first int64) {
	for i := range s {
		if first == 0 || s[i].sinceCommitted < first {
			first = s[i].sinceCommitted
		}
	}
	return first
}

// doubtful yields why some sets are not known for sure, and the engines' names, a few of each.
func (s stands) doubtful() map[string][]string {
	why := make(map[string][]string)
	for i := range s {
		if s[i].doubtful {
			why[s[i].known] = append(why[s[i].known], s[i].source)
		}
	}
	for known, names := range why {
		if len(names) > 5 {
			why[known] = append(names[:5:5], fmt.Sprintf("and %d more", len(names)-5))
		}
	}
	return why
}

// bindStands binds what heldAt reads.
func bindStands(all stands, bound clickhouse.Parameters) {
	list := func(name string, of func(*stand) string) {
		texts := make([]string, len(all))
		for i := range all {
			texts[i] = of(&all[i])
		}
		bound[name] = "[" + strings.Join(texts, ",") + "]"
	}
	list("sources", func(s *stand) string { return "'" + s.source + "'" }) // as in a subject: letters, digits and _-%. only
	ids := make([]uint64, len(all))
	for i := range ids {
		ids[i] = uint64(i) + 1
	}
	bound["ids"] = numbers(ids)
	list("epochs", func(s *stand) string { return strconv.FormatUint(s.epoch, 10) })
	list("seqs", func(s *stand) string { return strconv.FormatUint(s.sinceSeq, 10) })
	list("evs", func(s *stand) string { return strconv.FormatInt(s.sinceEv, 10) })
	list("lasts", func(s *stand) string { return strconv.FormatUint(s.last, 10) })
	list("snapshots", func(s *stand) string { return strconv.FormatInt(s.snapshot, 10) })
	list("known", func(s *stand) string { return "'" + s.known + "'" })
	bound["from"] = strconv.FormatInt(max(all.since()/1e6-86400, 0), 10) // the bus's clock may have been set back since
}

// What a source's set is added up from; those of doubtful ones say why it may lack something.
const (
	sinceLife       = "since its life began"
	sinceClear      = "since it was cleared"
	sinceCheckpoint = "from a checkpoint"

	sinceLost      = "only since events were lost"
	sinceLate      = "only since history began"
	sinceForgotten = "only what is still kept"
	sinceHole      = "before a hole in history"
)

// beginning is where a source's set began anew.
type beginning struct {
	source              string
	epoch, first, place uint64 // of a checkpoint: the first sequence that is known by its outcome, and the last
	ev, snapshot        int64
	committed           int64 // in µs
	why                 string
}

// Why a set began anew, as read.
const (
	whyLife       = "life"
	whyCheckpoint = "checkpoint"
	whyClear      = "engine"
)

// standsAt finds where the sources that are asked about stood at {until}.
func (r *Reader) standsAt(ctx context.Context, bound clickhouse.Parameters) (stands, error) {
	far := make(map[string]*stand)
	reach := func(source string, epoch, last uint64) {
		s := far[source]
		if s == nil {
			s = &stand{source: source}
			far[source] = s
		}
		if epoch > s.epoch || epoch == s.epoch && last >= s.last {
			s.epoch, s.last = epoch, last
		}
	}
	oldest := int64(0) // of all that is kept
	err := r.query(ctx, `SELECT toUnixTimestamp64Micro(min(committed)) FROM batches`, nil, func(scan func(...any) error) error { return scan(&oldest) })
	if err != nil {
		return nil, err
	}
	// Most sources told something in the last hour; only the others are looked for in all that is kept.
	const farthest = `SELECT toString(source), epoch, max(last) FROM batches
WHERE committed < fromUnixTimestamp64Micro({until:Int64}) AND ` + ofSources
	for _, more := range []string{
		` AND committed >= fromUnixTimestamp64Micro({until:Int64}) - INTERVAL 1 HOUR`, ` AND source IN (
  SELECT source FROM progress WHERE source NOT IN ('', '` + recordsName + `')) AND NOT has({seen:Array(String)}, source)`,
	} {
		bound["seen"] = quoted(slices.Sorted(maps.Keys(far)))
		err := r.query(ctx, farthest+more+` GROUP BY source, epoch`, bound, func(scan func(...any) error) error {
			var source string
			var epoch, last uint64
			if err := scan(&source, &epoch, &last); err != nil {
				return err
			}
			reach(source, epoch, last)
			return nil
		})
		if err != nil {
			return nil, err
		}
	}
	var begun []beginning
	err = r.query(ctx, `SELECT toString(source), epoch, seq AS first, seq, toInt64(ev), toInt64(0), 1000000 * toInt64(toUnixTimestamp(committed)), toString(cause), toUInt8(0)
FROM block_events WHERE hash = 0 AND op = 'CLEARED' AND committed < fromUnixTimestamp64Micro({until:Int64}) AND `+ofSources+`
UNION ALL SELECT DISTINCT toString(source), epoch, seq AS first, if(kind = 'life', seq, last), if(kind = 'life' OR snapshot = 0, -1, 4294967296), snapshot,
  toUnixTimestamp64Micro(committed), if(kind = 'life', '`+whyLife+`', '`+whyCheckpoint+`'),
  committed < fromUnixTimestamp64Micro({until:Int64}) OR snapshot != 0 AND snapshot < 1000 * {until:Int64}
FROM ledger WHERE kind IN ('life', 'resync') AND `+ofSources, bound, func(scan func(...any) error) error {
		var b beginning
		var before uint8
		if err := scan(&b.source, &b.epoch, &b.first, &b.place, &b.ev, &b.snapshot, &b.committed, &b.why, &before); err != nil {
			return err
		}
		if before != 0 {
			reach(b.source, b.epoch, b.place)
		}
		begun = append(begun, b)
		return nil
	})
	if err != nil {
		return nil, err
	}
	of := make(map[string][]beginning)
	for _, b := range begun {
		of[b.source] = append(of[b.source], b)
	}
	var all stands
	for _, s := range far {
		s.begin(of[s.source], oldest)
		all = append(all, *s)
	}
	slices.SortFunc(all, func(a, b stand) int { return strings.Compare(a.source, b.source) })
	return all, nil
}

// begin finds the last of the beginnings that a source had passed where it stood.
func (s *stand) begin(list []beginning, oldest int64) {
	s.sinceSeq, s.sinceEv, s.sinceCommitted, s.known, s.doubtful = 0, -1, oldest, sinceLate, true
	at := beginning{}
	for _, b := range list {
		if b.epoch == s.epoch && b.place <= s.last && (b.place > at.place || b.place == at.place && b.ev >= at.ev || at.why == "") {
			at = b
		}
	}
	if at.why != "" {
		s.sinceSeq, s.sinceEv, s.snapshot, s.sinceCommitted, s.doubtful = at.place, at.ev, at.snapshot, at.committed, false
		switch {
		case at.why == whyCheckpoint:
			s.known = sinceCheckpoint
			s.sinceCommitted = min(at.committed, at.snapshot/1000) // history may have taken it long after it was written, and then what followed
		case at.why == whyClear:
			s.known = sinceClear
		case at.why == whyLife && at.first <= 1: // publishers begin with 0 or 1
			s.known = sinceLife
		case at.why == whyLife:
			s.doubtful = true
		default:
			s.known, s.doubtful = sinceLost, true
		}
		const day = 86400 * 1e6
		if at.why != whyCheckpoint && at.committed/day < oldest/day {
			s.known, s.doubtful = sinceForgotten, true
		}
	}
	if s.inHole(list) {
		s.known, s.doubtful = sinceHole, true
	}
}

// inHole reports whether history goes on from a checkpoint next: what happened between is not kept.
func (s *stand) inHole(list []beginning) bool {
	for _, b := range list {
		if b.why != whyCheckpoint || b.snapshot == 0 || b.epoch < s.epoch || b.epoch == s.epoch && (b.place <= s.last || b.first > s.last+1) {
			continue
		}
		if b.epoch == s.epoch || !slices.ContainsFunc(list, func(l beginning) bool {
			return l.why == whyLife && l.epoch > s.epoch && l.epoch <= b.epoch
		}) {
			return true
		}
	}
	return false
}
