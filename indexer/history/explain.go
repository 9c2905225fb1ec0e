package history

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

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
	parentPrefix             uint64    // of parent, where the row tells it
	committed                time.Time // as the row has it
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
	lines, truncated, parent, err := r.storyOf(ctx, hash)
	if err != nil {
		return nil, err
	}
	if s.Found, s.Truncated, s.Parent = len(lines) > 0, truncated, parent; s.Found {
		s.Names = names(lines)
		lines, s.Resident = addUp(lines)
		s.Events = append(s.Events, slices.DeleteFunc(lines, func(l StoryLine) bool { return l.Time < from.UnixMilli() })...)
	}
	s.Summary = summary(s, began)
	s.Elapsed = float64(time.Since(began).Microseconds()) / 1000
	return s, nil
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
