package prefix_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"kvstrata/event"
	"kvstrata/event/resident"
	"kvstrata/indexer/prefix"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

// layouts are the cache groups that engines have.
var layouts = [][]chain{
	{{size: 16, group: event.NoGroup}},
	{{size: 4, group: event.NoGroup}},
	{{size: 4, group: event.NoGroup, eagle: true}},
	{{size: 16, group: 0, spec: event.SpecFull}, {size: 16, group: 1, spec: event.SpecSlidingWindow, behind: 33}},
	{{size: 16, group: 0, spec: event.SpecFull}, {size: 16, group: 1, spec: event.SpecSlidingWindow}},
	{{size: 4, group: 0, spec: event.SpecFull}, {size: 4, group: 1, spec: event.SpecSlidingWindowMLA, behind: 8}, {size: 4, group: 2, spec: event.SpecMamba}},
	{{size: 16, group: 0, spec: event.SpecFull}, {size: 4, group: 1, spec: event.SpecSlidingWindow, behind: 10}},
	{{size: 16, group: 0, spec: event.SpecFull}, {size: 16, group: 1, spec: event.SpecMLA}},
	{{size: 16, group: 0, spec: event.SpecFull}, {size: 4, group: 2, spec: event.SpecFull}},
	{{size: 4, group: 0, spec: event.SpecSinkFull, eagle: true}, {size: 4, group: 1, spec: event.SpecFull}},
	{{size: 16, group: 3, spec: event.SpecMamba}},
}

// prompts share the first two blocks of 16, or nothing.
var prompts = [][]uint32{
	text(1, 64), append(text(1, 32), text(500, 32)...), text(900, 64),
}

// author publishes a source, and keeps what it told.
type author struct {
	*publisher
	groups  []chain
	long    bool
	forgets bool // names of blocks that are gone
	truth   *life
	gap     bool   // what this life told did not all reach the index
	saved   []save // its checkpoints
}

// save is a checkpoint, and what it says.
type save struct {
	object []byte
	cp     *event.Checkpoint
	life   *life
}

func drawSource(t *rapid.T, instance string, origin event.Origin) event.Source {
	return event.Source{
		Cluster: rapid.SampledFrom([]string{"c", "c", "d"}).Draw(t, "cluster"), Model: rapid.SampledFrom([]string{"m", "m", "n"}).Draw(t, "model"),
		Instance: instance, Origin: origin,
	}
}

// drawAuthors draws engines, connectors of some of them, and stores.
func drawAuthors(t *rapid.T) (all []*author) {
	for i := range rapid.IntRange(1, 3).Draw(t, "engines") {
		source := drawSource(t, fmt.Sprintf("e%d", i), event.Engine)
		all = append(all, drawAuthor(t, source))
		if rapid.Bool().Draw(t, "with a connector") {
			source.Origin = event.Connector
			all = append(all, drawAuthor(t, source))
		}
	}
	for i := range rapid.IntRange(0, 2).Draw(t, "stores") {
		all = append(all, drawAuthor(t, drawSource(t, fmt.Sprintf("s%d", i), event.Store)))
	}
	return all
}

func drawAuthor(t *rapid.T, source event.Source) *author {
	asSet := rapid.Bool().Draw(t, "as a set")
	a := &author{
		publisher: newPublisher(source, asSet), groups: rapid.SampledFrom(layouts).Draw(t, "layout"),
		long: rapid.Bool().Draw(t, "long hashes"), truth: newLife(1, asSet),
	}
	a.next = event.Seq(rapid.Uint64Range(0, 1).Draw(t, "first"))
	// Which names windows take over depends on when the judge forgot: here it does not.
	hybrid := len(a.groups) > 1 && slices.ContainsFunc(a.groups, func(c chain) bool { return !c.spec.HoldsPrefix() })
	if a.forgets = rapid.IntRange(0, 2).Draw(t, "forgets") == 0 && !hybrid; a.forgets {
		a.judge = resident.New(resident.Config{MaxNames: 1, MaxOrphans: 4, AsSet: asSet})
	}
	return a
}

// shown returns what consumers should know. Which names a forgetful judge still has is its own affair, as long as they
// are the right ones, and all consumers have the same.
func (a *author) shown(t *rapid.T) *life {
	l := a.truth.clone()
	if !a.forgets {
		return l
	}
	clear(l.names)
	for e := range a.judge.Resident() {
		b := block{e.Hash, e.Group.Index()}
		if n := a.truth.names[b]; e.Prefix == n.hash && e.Prefix != 0 {
			l.names[b] = n
		} else if e.Prefix != 0 {
			t.Fatalf("the judge names block %v %v, which is %v", e.Hash, e.Prefix, n.hash)
		}
	}
	return l
}

// drawRun draws a run of blocks of some prompt.
func (a *author) drawRun(t *rapid.T) (c chain, from, to int) {
	c = rapid.SampledFrom(a.groups).Draw(t, "group")
	c.tokens, c.long = rapid.SampledFrom(prompts).Draw(t, "prompt"), a.long
	c.lora = rapid.SampledFrom([]string{"", "", "", "adapter"}).Draw(t, "lora")
	c.salt = rapid.SampledFrom([]string{"", "", "", "salt"}).Draw(t, "salt")
	c.alias = rapid.SampledFrom([]int{0, 0, 0, 1}).Draw(t, "alias")
	if rapid.Bool().Draw(t, "inner") {
		from = rapid.IntRange(0, c.len()-1).Draw(t, "from")
	}
	to = c.len()
	if rapid.Bool().Draw(t, "cut") {
		to = rapid.IntRange(from+1, c.len()).Draw(t, "to")
	}
	return c, from, to
}

func (a *author) drawEvents(t *rapid.T) []event.Event {
	var events []event.Event
	for range rapid.IntRange(0, 3).Draw(t, "events") {
		c, from, to := a.drawRun(t)
		tier := rapid.SampledFrom([]event.Tier{event.GPU, event.GPU, event.GPU, event.CPU, event.Storage, "TAPE", "ATTIC"}).Draw(t, "tier")
		switch op := rapid.IntRange(0, 24).Draw(t, "operation"); {
		case op < 12:
			events = append(events, c.stored(tier, from, to))
		case op < 21:
			events = append(events, c.evicted(tier, from, to))
		case op < 24:
			events = append(events, c.offloaded(tier, from, to))
		default:
			events = append(events, cleared(event.ByEngine))
		}
	}
	return events
}

// draw draws the next message, and enters it in the truth.
func (a *author) draw(t *rapid.T) *event.Message {
	if rapid.IntRange(0, 19).Draw(t, "lost") == 0 {
		n := rapid.IntRange(1, 3).Draw(t, "how many")
		a.truth.batch(a.next+event.Seq(n-1), []event.Event{cleared(event.ByResync)})
		return a.lose(t, n)
	}
	var batches [][]event.Event
	for i := range rapid.IntRange(1, 3).Draw(t, "batches") {
		batches = append(batches, a.drawEvents(t))
		a.truth.batch(a.next+event.Seq(i), batches[i])
	}
	return a.message(t, batches...)
}

func (a *author) begin(first event.Seq) {
	a.restart(first)
	a.truth, a.gap = newLife(a.epoch, a.truth.asSet), false
}

// world is an index, what it should know, and who tells it.
type world struct {
	authors []*author
	clock   *clock
	index   *prefix.Index
	reader  *prefix.Reader
	oracle  *oracle
}

func (w *world) boot() {
	w.oracle = &oracle{now: w.clock.now}
	cfg := prefix.DefaultConfig()
	cfg.Clock = w.clock.Now
	w.index = prefix.New(cfg)
	w.reader = w.index.NewReader()
}

// apply gives the index the next message; one behind a gap must be refused.
func (w *world) apply(t *rapid.T, a *author) {
	k := w.oracle.source(a.source)
	if a.gap && (k.life.epoch != a.epoch || !k.life.started) {
		w.restore(t, a) // its consumer would not hand on what follows
		return
	}
	m := a.draw(t)
	digest, err := w.index.Apply(context.Background(), m)
	if a.gap {
		if err == nil {
			t.Fatal("a message behind a gap was applied")
		}
		k.doubt = err.Error()
		return
	}
	if err != nil {
		t.Fatalf("apply: %v", err)
	}
	if digest != m.Digest {
		t.Fatalf("digest %x, want %x", digest, m.Digest)
	}
	w.oracle.apply(a.source, a.shown(t), a.fence)
	if rapid.Bool().Draw(t, "compared") {
		w.index.Compared(a.source, true)
		k.doubt = ""
	}
}

// restore gives the index a checkpoint written now.
func (w *world) restore(t *rapid.T, a *author) {
	snap := a.judge.Snapshot()
	cp := &event.Checkpoint{
		State:  rapid.SampledFrom([]event.State{event.StateLive, event.StatePartial, event.StateStale, event.StateGone}).Draw(t, "saved state"),
		Reason: "saved", Digest: snap.Digest, Entries: snap.Len, Fullest: snap.Fullest,
	}
	s := save{object: a.object(t, cp, snap).Bytes(), cp: cp, life: a.shown(t)}
	a.saved = append(a.saved, s)
	w.load(t, a, s)
}

func (w *world) load(t *rapid.T, a *author, s save) {
	restore(t, w.index, bytes.NewBuffer(s.object))
	w.oracle.restore(s.cp, s.life)
	a.gap = a.truth.started && (s.life.epoch != a.epoch || !s.life.started || s.life.seq != a.truth.seq)
	if !a.gap && s.life.epoch == a.epoch {
		a.truth.taken = maps.Clone(w.oracle.source(a.source).life.taken)
	}
}

func (w *world) tell(t *rapid.T, a *author) {
	st := a.status(rapid.SampledFrom([]event.State{
		event.StateLive, event.StateLive, event.StateLive, event.StateRecovering, event.StatePartial, event.StateStale, event.StateGone,
	}).Draw(t, "state"), "said")
	if a.source.Origin == event.Connector {
		st.Stores = rapid.SliceOfN(rapid.SampledFrom([]string{"s0", "s0", "s1", "s9"}), 0, 3).Draw(t, "named stores")
	}
	w.index.Tell(st)
	w.oracle.tell(st)
}

// step does one thing that can happen to an index.
func (w *world) step(t *rapid.T) {
	a := rapid.SampledFrom(w.authors).Draw(t, "source")
	switch what := rapid.IntRange(0, 29).Draw(t, "what"); {
	case what < 18:
		w.apply(t, a)
	case what < 19: // a message is missed
		a.draw(t)
		a.gap = true
	case what < 20:
		w.restore(t, a)
	case what < 21 && len(a.saved) > 0:
		w.load(t, a, rapid.SampledFrom(a.saved).Draw(t, "checkpoint"))
	case what < 22:
		a.begin(event.Seq(rapid.Uint64Range(0, 1).Draw(t, "first")))
	case what < 23: // a new life, told of before its first batch
		a.begin(0)
		w.tell(t, a)
	case what < 26:
		w.tell(t, a)
	case what < 27: // another subscriber takes the source over
		a.fence++
		w.tell(t, a)
	case what < 28:
		w.clock.now = w.clock.now.Add(time.Duration(rapid.IntRange(1, 45).Draw(t, "seconds")) * time.Second)
		w.oracle.now = w.clock.now
	case what < 29:
		w.index.Compared(a.source, false)
		w.oracle.source(a.source).doubt = "the digest differs from its publisher's"
	default: // the index restarts
		w.boot()
		for _, a := range rapid.Permutation(w.authors).Draw(t, "order") {
			w.restore(t, a)
		}
	}
}

func (w *world) check(t *rapid.T) {
	t.Helper()
	sound(t, w.index)
	for _, r := range drawRequests(t) {
		got, err := w.index.Lookup(r)
		if !w.oracle.serves(r.Model) {
			if !errors.Is(err, prefix.ErrUnknownModel) {
				t.Fatalf("lookup of an unknown model: %v", err)
			}
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		if want := w.oracle.answer(r); !reflect.DeepEqual(want, got) {
			t.Fatalf("answer to %+v:\n%s", r, cmp.Diff(want, got))
		}
		w.checkScores(t, r, got)
	}
	infos := w.index.Sources()
	if !slices.IsSortedFunc(infos, func(a, b prefix.SourceInfo) int { return strings.Compare(a.Source.Tokens(), b.Source.Tokens()) }) ||
		len(infos) != len(w.oracle.sources) {
		t.Fatalf("sources are not listed in order, or not all: %v", infos)
	}
	for i := range infos {
		w.checkSource(t, &infos[i])
	}
}

// checkScores compares a Reader's answer with Lookup's.
func (w *world) checkScores(t *rapid.T, r *prefix.Request, a *prefix.Answer) {
	t.Helper()
	scores, err := w.reader.Scores(r)
	if err != nil {
		t.Fatal(err)
	}
	got, want := make(map[event.Source][3]int), make(map[event.Source][3]int)
	for _, s := range scores {
		got[*s.Source] = [3]int{int(s.BlockSize), int(s.Blocks), int(s.DeviceBlocks)}
	}
	for _, m := range a.Matches {
		if m.Blocks > 0 {
			want[m.Source] = [3]int{int(m.BlockSize), m.Blocks, m.DeviceBlocks}
		}
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Fatalf("scores of %+v:\n%s", r, diff)
	}
}

func (w *world) checkSource(t *rapid.T, info *prefix.SourceInfo) {
	t.Helper()
	k := w.oracle.source(info.Source)
	want := prefix.SourceInfo{Source: k.source, Epoch: k.life.epoch, LastSeq: k.life.seq, Started: k.life.started}
	want.Fence = max(k.fence, k.told.Fence)
	want.State, want.Reason = k.state(w.oracle.now)
	if k.dead() {
		want.Epoch, want.LastSeq, want.Started = k.told.Epoch, 0, false
	}
	if l := k.told.Ledger; k.told.Epoch == want.Epoch && l.Started {
		switch {
		case !want.Started:
			want.Behind = uint64(l.Last - l.First + 1)
		case l.Last > want.LastSeq:
			want.Behind = uint64(l.Last - want.LastSeq)
		}
	}
	got := prefix.SourceInfo{
		Source: info.Source, Epoch: info.Epoch, Fence: info.Fence, LastSeq: info.LastSeq, Started: info.Started, State: info.State,
		Reason: info.Reason, Behind: info.Behind,
	}
	if !reflect.DeepEqual(want, got) {
		t.Fatalf("source:\n%s", cmp.Diff(want, got))
	}
	listed := make(map[string]uint32)
	for e := range w.index.Resident(k.source) {
		listed[row(e.Hash, e.Group.Index(), e.Tier, e.Prefix)] = e.Copies
	}
	if resident := k.resident(); !reflect.DeepEqual(resident, listed) {
		t.Fatalf("resident blocks of %v:\n%s", k.source, cmp.Diff(resident, listed))
	}
	if k.dead() {
		if len(info.Resident)+len(info.Groups) > 0 {
			t.Fatalf("%v shows a dead life's blocks: %v %v", k.source, info.Resident, info.Groups)
		}
		return
	}
	tiers := make(map[event.Tier]prefix.TierInfo)
	for at, copies := range k.life.copies {
		n := tiers[at.tier]
		tiers[at.tier] = prefix.TierInfo{Tier: at.tier, Blocks: n.Blocks + 1, Copies: n.Copies + uint64(copies)}
	}
	for _, n := range info.Resident {
		if tiers[n.Tier] != n && n.Copies > 0 {
			t.Fatalf("%v in %s: got %+v, want %+v", k.source, n.Tier, n, tiers[n.Tier])
		}
		delete(tiers, n.Tier)
	}
	if len(tiers) > 0 {
		t.Fatalf("%v does not show %v", k.source, tiers)
	}
}

// drawRequests draws every prompt up to some length, under every seed, by tokens and by one way of cutting.
func drawRequests(t *rapid.T) []*prefix.Request {
	length := rapid.IntRange(0, 64).Draw(t, "length")
	model := rapid.SampledFrom([]string{"m", "m", "m", "n"}).Draw(t, "model asked for")
	cluster := rapid.SampledFrom([]string{"", "", "", "c"}).Draw(t, "cluster asked for")
	cut := rapid.SampledFrom([]chain{{size: 16}, {size: 4}, {size: 4, eagle: true}}).Draw(t, "cut")
	cut.tokens = rapid.SampledFrom(prompts).Draw(t, "prompt asked for")
	skip := rapid.IntRange(0, 1).Draw(t, "skip")
	named := uint32(rapid.SampledFrom([]int{0, 4, 16}).Draw(t, "block size"))
	var all []*prefix.Request
	for _, lora := range []string{"", "adapter"} {
		for _, salt := range []string{"", "salt"} {
			for _, tokens := range prompts {
				all = append(all, &prefix.Request{Model: model, Cluster: cluster, LoRA: lora, Salt: salt, Tokens: tokens[:length]},
					&prefix.Request{Model: model, Cluster: cluster, LoRA: lora, Salt: salt, Tokens: tokens})
			}
			cut.lora, cut.salt = lora, salt
			all = append(all, &prefix.Request{Model: model, Hashes: cut.hashes()[skip:], BlockSize: named, Anywhere: skip > 0})
		}
	}
	return all
}

// TestModel gives an index random judged streams of several sources and compares, after every message, each answer with
// the oracle's.
func TestModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := &world{clock: &clock{began}}
		w.boot()
		w.authors = drawAuthors(t)
		for range rapid.IntRange(1, 40).Draw(t, "steps") {
			w.step(t)
			w.check(t)
		}
	})
}
