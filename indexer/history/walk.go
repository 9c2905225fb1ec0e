package history

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/ClickHouse/clickhouse-go/v2"

	"kvstrata/event"
)

// Walk says how far each source held a prompt at a moment, and why not further.
type Walk struct {
	Model   string       `json:"model"`
	At      int64        `json:"at"`
	Request string       `json:"request,omitempty"`
	Told    []Told       `json:"told,omitempty"` // of the request
	Summary []string     `json:"summary"`
	Endings []WalkEnding `json:"endings"` // one a source
	Notes   []string     `json:"notes"`
	Elapsed float64      `json:"elapsed_ms"`
}

// nextShown bounds what is told of afterwards.
const nextShown = 3

// walking is one walk in the making.
type walking struct {
	reader   *Reader
	prompt   *Prompt
	at       time.Time
	stands   stands
	cuts     []cut
	held     map[uint64]map[string][]Place // by prefix hash and source, a place a tier
	lines    []StoryLine                   // of the blocks that were missed
	cutShort bool                          // older lines were not read
	step     map[string]int                // blocks that were stored in the same step and tier, by stepKey
}

// Walk explains how far each source held a prompt.
func (r *Reader) Walk(ctx context.Context, p *Prompt) (*Walk, error) {
	began := time.Now()
	if err := p.Validate(); err != nil {
		return nil, err
	}
	out := &Walk{Model: p.Model, Request: p.Request, Summary: []string{}, Endings: []WalkEnding{}, Notes: []string{}}
	w := &walking{reader: r, prompt: p, at: began, held: make(map[uint64]map[string][]Place), step: make(map[string]int)}
	if p.At != "" {
		var err error
		if w.at, err = parseTime(p.At, began); err != nil {
			return nil, err
		}
	}
	if p.Request != "" {
		of, err := w.ofRequest(ctx, out)
		if err != nil {
			return nil, err
		}
		w.prompt = of
	}
	if w.prompt != nil {
		if err := w.walk(ctx, out); err != nil {
			return nil, err
		}
	}
	out.At = w.at.UnixMilli()
	out.Elapsed = float64(time.Since(began).Microseconds()) / 1000
	return out, nil
}

func (w *walking) walk(ctx context.Context, out *Walk) (err error) {
	p := w.prompt
	bound := clickhouse.Parameters{
		"model": boundText.Replace(p.Model), "engine": "", "until": strconv.FormatInt(w.at.UnixMicro(), 10),
	}
	if w.stands, err = w.reader.standsAt(ctx, bound); err != nil {
		return err
	}
	if !slices.ContainsFunc(w.stands, func(s stand) bool { return w.isAsked(s.source) }) {
		out.Summary = append(out.Summary, "History knows no engine of this model and name before that moment.")
		return nil
	}
	sizes := []uint32{p.BlockSize}
	if len(p.Tokens) > 0 && p.BlockSize == 0 {
		if sizes, err = w.reader.blockSizes(ctx); err != nil {
			return err
		}
	}
	if w.cuts, err = p.cuts(event.NewHasher(w.reader.cfg.HashKey), sizes); err != nil {
		return err
	}
	if len(w.cuts) == 0 {
		out.Summary = append(out.Summary, fmt.Sprintf("The prompt fills no block: history knows blocks of %s tokens.", numbersText(sizes)))
		return nil
	}
	if err := w.readHeld(ctx, bound); err != nil {
		return err
	}
	missed := make(map[uint64]bool)
	for i := range w.stands {
		if !w.isAsked(w.stands[i].source) {
			continue
		}
		e, hash := w.ending(&w.stands[i])
		out.Endings = append(out.Endings, e)
		if hash != 0 {
			missed[hash] = true
		}
	}
	if err := w.readStories(ctx, missed); err != nil {
		return err
	}
	for i := range out.Endings {
		if e := &out.Endings[i]; e.Verdict != IsComplete {
			w.explain(e)
		}
	}
	out.Endings = slices.DeleteFunc(out.Endings, func(e WalkEnding) bool { // a connector, or a store, that has to do with none of it
		return e.Blocks == 0 && (e.Verdict == NeverStored || e.Verdict == OnOtherEngine) && !strings.HasSuffix(e.ID, "."+event.Engine.String())
	})
	if err := w.reasons(ctx, out.Endings); err != nil {
		return err
	}
	for i := range out.Endings {
		e := &out.Endings[i]
		e.Inferred = e.Inferred || w.cutShort && e.Verdict != IsComplete
		e.Text = e.sentence()
	}
	slices.SortStableFunc(out.Endings, func(a, b WalkEnding) int { return b.Blocks - a.Blocks })
	for i := range out.Endings {
		out.Summary = append(out.Summary, out.Endings[i].Text)
	}
	out.Notes = append(out.Notes, "engines tell no reason of an eviction: what is said of one is inferred from the same step")
	if len(p.Tokens) > 0 && len(p.variants()) == 1 {
		out.Notes = append(out.Notes, "whether the same tokens were there under another adapter or salt is unknown: history keeps neither; others names some to try")
	}
	if len(p.Tokens) == 0 {
		out.Notes = append(out.Notes, "prefix hashes do not say whether the same tokens were there under another adapter or salt")
	}
	return nil
}

// blockSizes are those of blocks that are kept.
func (r *Reader) blockSizes(ctx context.Context) (sizes []uint32, err error) {
	err = r.query(ctx, `SELECT DISTINCT block_size FROM chains WHERE block_size > 0 ORDER BY block_size LIMIT 16`, nil, func(scan func(...any) error) error {
		sizes = append(sizes, 0)
		return scan(&sizes[len(sizes)-1])
	})
	return sizes, err
}

func numbersText(list []uint32) string {
	texts := make([]string, len(list))
	for i, n := range list {
		texts[i] = strconv.FormatUint(uint64(n), 10)
	}
	if len(texts) == 0 {
		return "no known number of"
	}
	return strings.Join(texts, ", ")
}

// isAsked reports whether a source is one that is asked about; of the others only what they held is told.
func (w *walking) isAsked(source string) bool {
	if w.prompt.Engine == "" {
		return true
	}
	name, err := event.ParseSource(source)
	return err == nil && name.Instance == w.prompt.Engine
}

// ofPrompt are the rows of a prompt's blocks, and of those that were told without their names first.
const ofPrompt = `hash IN {either:Array(UInt64)} AND (named = 1) = (hash IN {hashes:Array(UInt64)})`

// namedLater are the engines' hashes of the prompt's blocks that may have been told without their names first: what named them has no effect.
const namedLater = `SELECT DISTINCT engine_hash FROM block_events
WHERE hash IN {hashes:Array(UInt64)} AND named = 1 AND op = 'STORED' AND effect = 0`

// readHeld reads which of the prompt's blocks the sources held.
func (w *walking) readHeld(ctx context.Context, bound clickhouse.Parameters) error {
	var all []uint64
	for _, c := range w.cuts {
		for _, list := range append([][]event.PrefixHash{c.hashes}, c.others...) {
			for _, h := range list {
				all = append(all, uint64(h))
			}
		}
	}
	slices.Sort(all)
	all = slices.Compact(all)
	bound["hashes"] = numbers(all)
	either := slices.Clip(all)
	if err := w.reader.query(ctx, namedLater, bound, func(scan func(...any) error) error {
		either = append(either, 0)
		return scan(&either[len(either)-1])
	}); err != nil {
		return err
	}
	bound["either"] = numbers(either)
	bindStands(w.stands, bound)
	return w.reader.query(ctx, heldWhere(ofPrompt, `op != 'CLEARED'`)+`SELECT id, toString(tier), prefix, toInt64(sum(copies)), max(stored) FROM held
WHERE prefix != 0 GROUP BY id, tier, prefix`, bound, func(scan func(...any) error) error {
		var id uint32
		var tier string
		var prefix uint64
		var copies int64
		var stored time.Time
		if err := scan(&id, &tier, &prefix, &copies, &stored); err != nil {
			return err
		}
		p := Place{ID: w.stands[id-1].source, Tier: tier, Copies: copies, Since: max(stored.UnixMilli(), 0)}
		source, err := event.ParseSource(p.ID)
		if err != nil {
			return err
		}
		p.Instance = source.Instance
		if w.held[prefix] == nil {
			w.held[prefix] = make(map[string][]Place)
		}
		w.held[prefix][p.ID] = append(w.held[prefix][p.ID], p)
		return nil
	})
}

// has reports whether a source held a block where it counts.
func (w *walking) has(source string, hash event.PrefixHash) bool {
	return slices.ContainsFunc(w.held[uint64(hash)][source], func(p Place) bool { return w.prompt.Tier == "" || p.Tier == w.prompt.Tier })
}

// ending finds the first block that a source did not hold, in blocks of the size of which it held most.
func (w *walking) ending(s *stand) (e WalkEnding, missed uint64) {
	e = WalkEnding{stand: s, ID: s.source, Inferred: s.doubtful, Elsewhere: []Place{}, Next: []StoryLine{}}
	if source, err := event.ParseSource(s.source); err == nil {
		e.Instance = source.Instance
	}
	most := -1
	for i := range w.cuts {
		c := &w.cuts[i]
		n := 0
		for n < len(c.hashes) && w.has(s.source, c.hashes[n]) {
			n++
		}
		if n <= most {
			continue
		}
		most = n
		e.Blocks, e.Of, e.BlockSize = n, len(c.hashes), c.size
		if e.Verdict, e.Prefix, missed = IsComplete, "", 0; n < len(c.hashes) {
			e.Verdict, e.Prefix, missed = NeverStored, c.hashes[n].String(), uint64(c.hashes[n])
		}
	}
	return e, missed
}

// readStories reads what happened to the blocks that were missed.
func (w *walking) readStories(ctx context.Context, missed map[uint64]bool) error {
	if len(missed) == 0 {
		return nil
	}
	list := make([]uint64, 0, len(missed))
	for h := range missed {
		list = append(list, h)
	}
	slices.Sort(list)
	lines, err := w.reader.storyLines(ctx, `hash IN {hashes:Array(UInt64)} AND named = 1`, clickhouse.Parameters{"hashes": numbers(list)})
	if err != nil || len(lines) == 0 {
		return err
	}
	w.cutShort = len(lines) > maxStory
	clears, err := w.reader.clears(ctx, lines)
	if err != nil {
		return err
	}
	w.lines = append(lines, clears...)
	at, err := w.reader.stamps(ctx, w.lines)
	if err != nil {
		return err
	}
	at.apply(w.lines)
	w.lines = inPlace(w.lines)
	return nil
}

// isBefore reports whether a line is one of those after which a source stood.
func (s *stand) isBefore(l *StoryLine) bool {
	return l.Epoch < s.epoch || l.Epoch == s.epoch && l.Seq <= s.last
}

// explain says why a block was not there, and what happened to it afterwards.
func (w *walking) explain(e *WalkEnding) {
	s := e.stand
	hash, err := strconv.ParseUint(e.Prefix, 16, 64)
	if err != nil {
		return
	}
	removed := (*StoryLine)(nil)
	copies := make(map[string]int64) // by tier and group
	for i := range w.lines {
		l := &w.lines[i]
		if l.ID != s.source || l.Op != "CLEARED" && l.hash != hash {
			continue
		}
		if !s.isBefore(l) {
			if l.Op != "CLEARED" && len(e.Next) < nextShown && (l.Effect != 0 || l.Op == "LOADED") {
				e.Next = append(e.Next, *l)
			}
			continue
		}
		place := fmt.Sprint(l.Tier, " ", max(l.Group, 0))
		switch l.Op {
		case "CLEARED":
			if len(copies) > 0 {
				clear(copies)
				removed = l
			}
		case "SNAPSHOT":
			copies[place] = int64(*l.Copies)
		case "STORED", "EVICTED":
			copies[place] += l.Effect
			if copies[place] <= 0 {
				delete(copies, place)
			}
			if l.Effect < 0 && len(copies) == 0 {
				removed = l
			}
		}
	}
	for id, places := range w.held[hash] {
		if id != s.source {
			e.Elsewhere = append(e.Elsewhere, places...)
		}
	}
	slices.SortFunc(e.Elsewhere, func(a, b Place) int { return strings.Compare(a.ID+" "+a.Tier, b.ID+" "+b.Tier) })
	own := w.held[hash][s.source]
	switch {
	case len(own) > 0:
		e.Verdict = InOtherTier
		for _, p := range own {
			e.Tiers = append(e.Tiers, p.Tier)
		}
		slices.Sort(e.Tiers)
	case removed != nil && removed.Op == "CLEARED":
		e.Verdict, e.Time, e.Reason = WasReset, removed.Time, resets[removed.Reason]
	case removed != nil:
		e.Verdict, e.Time, e.Tiers, e.Age = WasEvicted, removed.Time, []string{removed.Tier}, removed.Age
		w.step[stepKey(removed.ID, removed.Epoch, removed.Seq, removed.Tier)] = 0
		e.evicted = removed
	default:
		e.Variant = w.under(s, e)
		switch {
		case e.Variant != nil:
			e.Verdict = UnderOther
		case len(e.Elsewhere) > 0:
			e.Verdict = OnOtherEngine
		}
	}
}

// under returns the variant of the prompt under which a source held the tokens of the block that was missed.
func (w *walking) under(s *stand, e *WalkEnding) *Variant {
	others := w.prompt.variants()[1:]
	for _, c := range w.cuts {
		if c.size != e.BlockSize {
			continue
		}
		for i, list := range c.others {
			if e.Blocks < len(list) && w.has(s.source, list[e.Blocks]) {
				return &others[i]
			}
		}
	}
	return nil
}

func stepKey(source string, epoch, seq uint64, tier string) string {
	return fmt.Sprint(source, " ", epoch, " ", seq, " ", tier)
}

// reasons infers why blocks were evicted, from what the same step stored in the same tier.
func (w *walking) reasons(ctx context.Context, endings []WalkEnding) error {
	if len(w.step) == 0 {
		return nil
	}
	var places, seconds []string
	for i := range endings {
		if l := endings[i].evicted; l != nil {
			places = append(places, fmt.Sprintf("('%s',%d,%d)", l.ID, l.Epoch, l.Seq))
			seconds = append(seconds, strconv.FormatInt(l.committed.Unix(), 10))
		}
	}
	err := w.reader.query(ctx, `SELECT toString(source), epoch, seq, toString(tier), count() FROM block_events
WHERE has({seconds:Array(UInt32)}, toUnixTimestamp(committed)) AND committed >= toDateTime(arrayMin({seconds:Array(UInt32)}), 'UTC')
  AND committed <= toDateTime(arrayMax({seconds:Array(UInt32)}), 'UTC') AND op = 'STORED' AND effect > 0
  AND (source, epoch, seq) IN {places:Array(Tuple(String, UInt64, UInt64))}
GROUP BY source, epoch, seq, tier`, clickhouse.Parameters{
		"places": "[" + strings.Join(places, ",") + "]", "seconds": "[" + strings.Join(seconds, ",") + "]",
	}, func(scan func(...any) error) error {
		var source, tier string
		var epoch, seq, n uint64
		if err := scan(&source, &epoch, &seq, &tier, &n); err != nil {
			return err
		}
		w.step[stepKey(source, epoch, seq, tier)] = int(n)
		return nil
	})
	for i := range endings {
		e := &endings[i]
		if e.evicted == nil {
			continue
		}
		switch n := w.step[stepKey(e.evicted.ID, e.evicted.Epoch, e.evicted.Seq, e.evicted.Tier)]; {
		case n > 0:
			e.Reason = "to make room, by what it seems: the same step stored " + plural(n, "block") + " there"
		default:
			e.Reason = "the engine tells no reason, and the same step stored nothing there"
		}
	}
	return err
}
