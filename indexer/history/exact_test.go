package history_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"kvstrata/event"
	"kvstrata/indexer/history"
)

// reading is a consumer of a world's streams that feeds a writer, and remembers what it handed over.
type reading struct {
	*world
	t     *testing.T
	e     *engine
	life  int // of the bus stream
	cuts  []int
	at    map[event.Source]*standing
	steps map[event.Source][]step

	mu     sync.Mutex // of what the writer's goroutine uses
	faults int
	fake   string // the insert under that token only seems to be performed when it comes again
}

// standing is a consumer's watermark of one source.
type standing struct {
	fence event.Fence
	point point
}

var errLostAnswer = errors.New("the answer was lost")

// writer starts a writer with other bounds, some of whose inserts fail. kill ends it.
func (r *reading) writer() (w *history.Writer, kill context.CancelFunc, ended <-chan struct{}) {
	cfg := r.e.config()
	cfg.MaxRows = 1 + r.IntN(20)*r.IntN(20)
	cfg.FlushEvery = time.Duration(1+r.IntN(20)) * time.Millisecond
	w, err := history.NewWriter(cfg, silent(), nil)
	if err != nil {
		r.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	w.Intercept(func(i history.Insert) error {
		if i.Days > 1 && i.Table != "progress" {
			r.t.Errorf("an insert into %s is of %d days", i.Table, i.Days)
		}
		r.mu.Lock()
		fault := r.IntN(25)
		if fault < 8 && r.faults == 0 {
			fault = 8
		}
		if fault < 8 {
			r.faults--
		}
		fake := r.fake == i.Token
		r.fake = ""
		r.mu.Unlock()
		if fake {
			return nil
		}
		switch fault {
		case 0, 1: // killed before it
			cancel()
			return context.Canceled
		case 2, 3: // killed behind it
			err := i.Send()
			cancel()
			return errors.Join(err, context.Canceled)
		case 4, 5:
			return errLostAnswer
		case 6:
			return errors.Join(i.Send(), errLostAnswer)
		case 7:
			r.mu.Lock()
			defer r.mu.Unlock()
			if r.e.cluster == "" || i.Table == "progress" { // replicas keep a token with its rows
				r.fake = i.Token
			}
			return errLostAnswer
		}
		return i.Send()
	})
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := w.Run(ctx); err != nil {
			r.t.Error(err)
		}
	}()
	return w, cancel, done
}

// random numbers are drawn by the writer's goroutine, too.
func (r *reading) draw(n int) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.IntN(n)
}

// read feeds writers, each until it is killed, until one has committed all.
func (r *reading) read() {
	for !r.session() {
	}
}

// session is the life of one writer. It reports whether all is committed.
func (r *reading) session() bool {
	r.mu.Lock()
	w, kill, ended := r.writer()
	r.mu.Unlock()
	defer func() { kill(); <-ended }()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	go func() { <-ended; cancel() }() // nobody waits for a writer that is gone
	for {
		items, ok := r.resume(ctx, w)
		if !ok {
			return false
		}
		for n, i := range items {
			if r.draw(150) == 0 {
				kill()
			}
			if r.draw(100) == 0 {
				break // the consumer begins anew, the writer stays
			}
			if !r.take(ctx, w, i) {
				return false
			}
			w.Reached(i.at)
			if n == len(items)-1 || len(items) == 0 {
				return r.finish(w, i)
			}
		}
		if len(items) == 0 {
			return r.finish(w, nil)
		}
	}
}

// resume begins where the writer stands, and returns what there is still to read of the bus stream.
func (r *reading) resume(ctx context.Context, w *history.Writer) ([]*item, bool) {
	at, marks, err := w.Resume(ctx)
	if err != nil {
		return nil, false
	}
	r.at = make(map[event.Source]*standing)
	for source, m := range marks {
		r.at[source] = &standing{m.Fence, pointOf(m)}
	}
	for source, steps := range r.steps { // what was handed over and is not kept comes again
		stands := point{}
		if s := r.at[source]; s != nil {
			stands = s.point
		}
		r.steps[source] = slices.DeleteFunc(steps, func(s step) bool { return s.to.compare(stands) > 0 })
	}
	items := r.lives[r.life]
	if r.life < len(r.lives)-1 {
		items = items[:r.cuts[r.life]]
	}
	if n := len(items); n > 0 && items[0].at.SameStream(at) {
		items = items[min(int(at.Sequence), n):]
	}
	return items, true
}

// finish ends the reading of a bus stream: either it is lost, or all must be committed.
func (r *reading) finish(w *history.Writer, last *item) bool {
	if r.life < len(r.lives)-1 {
		r.life++ // with a new stream, the consumer and the writer may both go on or both begin anew
		return false
	}
	if last == nil {
		return true
	}
	for deadline := time.Now().Add(patience); w.Committed() != last.at; <-time.After(time.Millisecond) {
		if w.Stopped() {
			return false
		}
		if time.Now().After(deadline) {
			r.t.Fatalf("not committed: %s", w.Trouble())
		}
	}
	return true
}

// take handles a message as a consumer does. It reports whether the writer took it.
func (r *reading) take(ctx context.Context, w *history.Writer, i *item) bool {
	if i.status != nil {
		s := r.standing(i.status.Source)
		if i.status.Fence >= s.fence {
			s.fence = i.status.Fence
			w.Tell(i.status)
		}
		return true
	}
	m := *i.message
	s := r.standing(m.Source)
	last := m.Batches[len(m.Batches)-1].Last
	if m.Fence < s.fence || m.Epoch < s.point.epoch || m.Epoch == s.point.epoch && last < s.point.next {
		return true
	}
	s.fence = m.Fence
	if m.Epoch > s.point.epoch {
		s.point = point{epoch: m.Epoch}
	}
	m.Batches = slices.DeleteFunc(slices.Clone(m.Batches), func(b event.Batch) bool { return b.Last < s.point.next })
	begun := s.point.next > 0 && len(r.steps[m.Source]) > 0
	hole := begun && m.Batches[0].First > s.point.next ||
		!begun && r.life > 0 || // the stream may no longer hold the beginning of its life
		slices.ContainsFunc(m.Batches, func(b event.Batch) bool { return b.Way == event.Dropped })
	if hole {
		if !r.restore(ctx, w, m.Source, point{m.Epoch, last + 1}) {
			return false
		}
		return r.take(ctx, w, i)
	}
	digest, err := w.Apply(ctx, &m)
	if err != nil {
		return false
	}
	if digest != m.Digest {
		r.t.Errorf("digest of %v after %d is %x, want %x", m.Source, last, digest, m.Digest)
	}
	w.Compared(m.Source, digest == m.Digest)
	from := s.point
	for i := range m.Batches {
		to := point{m.Epoch, m.Batches[i].Last + 1}
		r.steps[m.Source] = append(r.steps[m.Source], step{from, to, &m.Batches[i], &m})
		from = to
	}
	s.point = from
	return true
}

func (r *reading) standing(source event.Source) *standing {
	s := r.at[source]
	if s == nil {
		s = new(standing)
		r.at[source] = s
	}
	return s
}

// restore takes a source's first checkpoint at or behind a point, or a later one.
func (r *reading) restore(ctx context.Context, w *history.Writer, source event.Source, least point) bool {
	for _, p := range r.pubs {
		if p.source != source {
			continue
		}
		for n, cp := range p.store {
			to := point{epoch: cp.Epoch}
			if cp.Ledger.Started {
				to.next = cp.Seq + 1
			}
			if to.compare(least) < 0 || n < len(p.store)-1 && r.draw(4) == 0 {
				continue
			}
			s := r.standing(source)
			if _, err := w.Restore(ctx, bytes.NewReader(cp.object)); err != nil {
				if !errors.Is(err, ctx.Err()) && !w.Stopped() {
					r.t.Error(err)
				}
				return false
			}
			s.fence = max(s.fence, cp.Fence)
			r.steps[source] = append(r.steps[source], step{from: s.point, to: to})
			s.point = to
			return true
		}
	}
	r.t.Fatalf("no checkpoint of %v behind %v", source, least)
	return false
}

// check compares the tables with what was handed over.
func (r *reading) check() {
	t := r.t
	cluster := r.pubs[0].source.Cluster
	want := make(map[string][]string)
	real := make(map[string]bool) // rows of whatever was sent
	for _, items := range r.lives {
		for _, i := range items {
			for n := range i.batches() {
				for table, lines := range tables(i.message, &i.message.Batches[n]) {
					for _, l := range lines {
						real[table+l] = true
					}
				}
				real["ledger"+lifeLine(i.message, i.message.Batches[n].First)] = true
			}
		}
	}
	for _, steps := range r.steps {
		at := point{}
		for _, s := range steps {
			if s.from != at && (s.from.next > 0 || s.from.compare(at) < 0) {
				t.Fatalf("the test lost its place: %v is not behind %v", s, at)
			}
			if s.batch != nil {
				for table, lines := range tables(s.m, s.batch) {
					want[table] = append(want[table], lines...)
				}
				if at.epoch != s.to.epoch {
					want["ledger"] = append(want["ledger"], lifeLine(s.m, s.batch.First))
				}
			}
			at = s.to
		}
	}
	for table := range tableLines {
		slices.Sort(want[table])
		got := tableOf(t, r.e, table, cluster)
		if twice := len(got) - len(slices.Compact(slices.Clone(got))); twice > 0 {
			t.Errorf("%s holds %d rows twice", table, twice)
		}
		// Where a stream was lost, what was inserted of it last may be there though nothing says that it was all.
		if len(r.lives) > 1 {
			got = slices.DeleteFunc(got, func(l string) bool {
				_, wanted := slices.BinarySearch(want[table], l)
				return !wanted && real[table+l]
			})
		}
		if diff := cmp.Diff(want[table], got); diff != "" {
			t.Errorf("%s: %s", table, diff)
		}
	}
	if len(r.lives) == 1 {
		r.checkChains()
	}
	r.checkReader()
}

func (i *item) batches() []event.Batch {
	if i.message == nil {
		return nil
	}
	return i.message.Batches
}

func tables(m *event.Message, b *event.Batch) map[string][]string {
	return map[string][]string{"batches": batchLines(m, b), "block_events": blockLines(m, b), "loads": loadLines(m, b), "ledger": lostLines(m, b)}
}

// checkReader compares what a reader adds up.
func (r *reading) checkReader() {
	t := r.t
	reader := newReader(t, r.e.config())
	for _, p := range r.pubs {
		want, got := make(map[string]int64), make(map[string]int64)
		var totals history.Totals
		if steps := r.steps[p.source]; len(steps) > 0 && steps[len(steps)-1].to == (point{p.epoch, p.seq}) {
			for entry := range p.set.Resident() {
				want[fmt.Sprint(foldHash(entry.Hash), entry.Tier, entry.Group.Index())] += int64(entry.Copies)
			}
		} else if len(steps) > 0 {
			continue // a life without batches came last
		}
		err := reader.Resident(t.Context(), p.source, func(b history.Resident) {
			got[fmt.Sprintf("%016x%v%d", b.Hash, b.Tier, b.Group.Index())] += b.Copies
		})
		if diff := cmp.Diff(want, got); diff != "" || err != nil {
			t.Errorf("resident of %v: %s %v", p.source, diff, err)
		}
		for _, s := range r.steps[p.source] {
			for _, ev := range s.events() {
				if ev.Kind == event.Cleared {
					totals.Cleared++
				}
				for _, b := range ev.Blocks {
					switch {
					case ev.Kind == event.Stored && b.Effect > 0:
						totals.Stored++
					case ev.Kind == event.Evicted && b.Effect < 0:
						totals.Evicted++
					case ev.Kind == event.Loaded:
						totals.Loaded++
					}
				}
			}
		}
		kept, err := reader.Totals(t.Context(), p.source)
		if len(r.lives) == 1 && (kept != totals || err != nil) {
			t.Errorf("totals of %v are %+v, want %+v: %v", p.source, kept, totals, err)
		}
	}
}

func (s step) events() []event.Event {
	if s.batch == nil {
		return nil
	}
	return s.batch.Events
}

// Whatever is killed, lost, sent again or restored: each table holds each event once, and what a reader adds up is what
// the publishers have.
func TestExactness(t *testing.T) {
	budget := 20 * time.Second
	if testing.Short() {
		budget = 8 * time.Second
	}
	exactness(t, startEngine(t), budget)
}

// On a cluster rows go into other tables than those that are read.
func TestExactnessOnAClustersTables(t *testing.T) { exactness(t, startClusterEngine(t), 4*time.Second) }

func exactness(t *testing.T, e *engine, budget time.Duration) {
	seed := uint64(time.Now().UnixNano())
	if *oneSeed != 0 {
		seed, budget = *oneSeed, 0
	}
	n := 0
	for deadline := time.Now().Add(budget); n == 0 || time.Now().Before(deadline) && !t.Failed(); n++ {
		lives := 1 + n%3
		if *oneSeed != 0 {
			lives = *oneLives
		}
		w := newWorld(seed, lives, 60)
		r := &reading{world: w, t: t, e: e, steps: make(map[event.Source][]step), faults: 20}
		for _, items := range w.lives {
			r.cuts = append(r.cuts, len(items)-w.IntN(len(items)/2))
		}
		forgetChains(t, e) // worlds tell of the same prefixes
		r.read()
		r.check()
		if t.Failed() {
			t.Logf("again with -history.seed=%d -history.lives=%d", seed, len(w.lives))
		}
		seed++
	}
	t.Logf("%d worlds", n)
}
