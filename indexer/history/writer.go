package history

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/zeebo/xxh3"

	"kvstrata/event"
)

// Writer keeps every event of the stream. It is a sink that remembers where it stood: whoever reads the stream asks Resume
// where to go on, and hands over messages in order. It fills one round while another is being inserted; when both are
// full, Apply waits, and the stream is read no further.
//
// Run and the feeding methods run side by side; those of events are one goroutine's, those of records another's. After Run
// has ended it may be called again: it begins where the tables say.
type Writer struct {
	cfg     Config
	log     *slog.Logger
	metrics *writerMetrics

	mu        sync.Mutex
	running   chan struct{} // closed once Run knows where the tables stand; made anew by each Run
	sources   map[event.Source]*sourceState
	open      *round        // is being filled
	spare     *round        // nil while it is being inserted
	taken     chan struct{} // closed, and made anew, when the open round was taken
	full      chan struct{} // holds a token when the open round wants to be taken
	reached   event.Position
	records   recordPlaces
	committed committed
	rolled    rollups
	lineage   *lineage
	life      int64  // when this Run began, in ns: a part of its tokens
	trouble   string // why inserts do not go through; empty = they do
	said      time.Time

	insert insertFunc      // insert, or native's; tests lose its answers
	exec   execFunc        // of what rolls up; tests lose its answers
	native *nativeInserter // nil where a server is used
}

// committed is what is in the tables for good.
type committed struct {
	at      event.Position
	records event.Position
	round   uint64
	marks   map[event.Source]mark
}

// mark is where a source stands: everything up to it is kept, and the digest is that of the resident set there.
type mark struct {
	event.Mark
	digest event.Digest
}

// sourceState is what the writer knows of a source.
type sourceState struct {
	mark   mark
	tokens string
	spread uint64 // a number of its own, spread over 64 bits
	state  event.State
	reason string
	skip   [tables]point // what each table holds beyond the last round that was finished
}

// point is a place in a source's sequence.
type point struct {
	epoch event.Epoch
	seq   event.Seq
	set   bool
}

// covers reports whether a row with that sequence is at or before the point. Rows of one batch are inserted together.
func (p point) covers(epoch event.Epoch, seq event.Seq) bool {
	return p.set && (epoch < p.epoch || epoch == p.epoch && seq <= p.seq)
}

// The tables of a round whose rows are told once, in the order in which they are inserted. A batch's own row is in before
// those that refer to it.
const (
	batchTable = iota
	blockTable
	loadTable
	ledgerTable
	tables
)

var tableNames = [tables]string{batchTable: "batches", blockTable: "block_events", loadTable: "loads", ledgerTable: "ledger"}

// round is what one pass inserts: rows of messages in stream order, all but those of records of one day.
type round struct {
	day       int64 // of the rows, in UTC days
	began     time.Time
	batches   batchRows
	chains    chainRows
	blocks    blockRows
	held      blockRows // of one message, those that the table has: only what they continue is told again
	loads     loadRows
	ledger    ledgerRows
	snapshots []*snapshotRows
	told      []*recordRows // rows of records, a day each
	oldest    time.Time     // committed time of the first row
	marks     map[event.Source]mark
	at        event.Position
	records   event.Position

	// restored are the sources whose batches go no further in this round: they went on from a checkpoint. A table that has
	// rows of a round behind a checkpoint, without the round's place, would look as if it had all before them.
	restored map[event.Source]bool
}

func newRound() *round {
	return &round{marks: make(map[event.Source]mark), restored: make(map[event.Source]bool)}
}

// rows counts the rows of a round, but for those of chains, which are fewer than the blocks'.
func (r *round) rows() int {
	n := r.batches.len() + r.blocks.len() + r.loads.len() + r.ledger.len()
	for _, s := range r.snapshots {
		n += s.len()
	}
	for _, day := range r.told {
		n += day.len()
	}
	return n
}

// dated reports whether the round has rows of its day.
func (r *round) dated() bool {
	return r.batches.len()+r.chains.len()+r.blocks.len()+r.loads.len()+r.ledger.len()+len(r.snapshots) > 0
}

func (r *round) reset() {
	r.batches.reset()
	r.chains.reset()
	r.blocks.reset()
	clear(r.marks)
	clear(r.restored)
	*r = round{batches: r.batches, chains: r.chains, blocks: r.blocks, held: r.held, marks: r.marks, restored: r.restored}
}

// NewWriter returns a writer. Nothing is connected before Run runs.
func NewWriter(cfg Config, log *slog.Logger, reg prometheus.Registerer) (*Writer, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	w := &Writer{
		cfg: cfg, log: log.With("role", "history"), running: make(chan struct{}),
		taken: make(chan struct{}), full: make(chan struct{}, 1), insert: insert, exec: exec, trouble: notRunning,
	}
	a, err := cfg.address()
	if err != nil {
		return nil, err
	}
	if a.socket != "" && a.cluster == "" {
		w.native = newNativeInserter(a.socket, a.database)
		w.insert = w.native.insert
	}
	w.metrics = newWriterMetrics(w, reg)
	return w, nil
}

// Resume returns where the stream goes on, and where each source stood. It waits until Run has read that.
func (w *Writer) Resume(ctx context.Context) (event.Position, map[event.Source]event.Mark, error) {
	if err := w.awaitRunning(ctx); err != nil {
		return event.Position{}, nil, err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	marks := make(map[event.Source]event.Mark)
	for name, s := range w.sources {
		if s.mark.Epoch != 0 || s.mark.Fence != 0 {
			marks[name] = s.mark.Mark
		}
	}
	return w.reached, marks, nil
}

// awaitRunning waits until Run knows where the tables stand.
func (w *Writer) awaitRunning(ctx context.Context) error {
	w.mu.Lock()
	running := w.running
	w.mu.Unlock()
	select {
	case <-running:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Reached says that everything up to a position in the stream was handed over.
func (w *Writer) Reached(at event.Position) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.reached = at
}

// Apply adds consecutive batches of one life and returns the source's digest afterwards. It waits while the open round
// has no room.
func (w *Writer) Apply(ctx context.Context, m *event.Message) (event.Digest, error) {
	at := placeOf(m)
	r, err := w.room(ctx, m.Source, at.committed)
	if err != nil {
		return 0, err
	}
	defer w.mu.Unlock()
	s := w.source(m.Source)
	if m.Epoch != s.mark.Epoch {
		s.mark = mark{Mark: event.Mark{Epoch: m.Epoch}}
		r.life(s, at, m)
	}
	s.mark.Fence = m.Fence
	from, fromBatch := r.blocks.len(), r.batches.len()
	defer func() { // of what was added, whole or not
		w.lineage.follow(&r.held, 0, s.spread, r.day, &r.chains)
		w.lineage.follow(&r.blocks, from, s.spread, r.day, &r.chains)
		r.batches.runs(fromBatch, &r.blocks, from)
		r.held.reset()
	}()
	for i := range m.Batches {
		b := &m.Batches[i]
		if s.mark.Started && b.First != s.mark.Seq+1 {
			return 0, fmt.Errorf("keep batch %d: it does not follow %d", b.First, s.mark.Seq)
		}
		r.add(s, at, m.Epoch, b)
		s.mark.Started, s.mark.Seq = true, b.Last
	}
	r.marks[m.Source] = s.mark
	return s.mark.digest, nil
}

// placeOf returns where a message stands in the stream.
func placeOf(m *event.Message) place {
	return place{committed: stamp(m.Stored), stream: int64(m.Position.Created), seq: m.Position.Sequence}
}

// life appends the row that says that a life begins.
func (r *round) life(s *sourceState, at place, m *event.Message) {
	if len(m.Batches) == 0 || s.skip[ledgerTable].covers(m.Epoch, m.Batches[0].First) {
		return
	}
	first := m.Batches[0].First
	r.ledger.add(at, ledgerRow{source: s.tokens, kind: "life", epoch: m.Epoch, first: first, last: first})
}

// add appends a batch's rows to those tables that do not have them yet, and its effects to the digest. A row's sequence
// is its batch's first; of a range in the ledger, it is the last that tells how far the table goes.
func (r *round) add(s *sourceState, at place, epoch event.Epoch, b *event.Batch) {
	if b.Way == event.Lost || b.Way == event.Dropped {
		if !s.skip[ledgerTable].covers(epoch, b.Last) {
			r.ledger.add(at, ledgerRow{
				source: s.tokens, kind: b.Way.String(), epoch: epoch, first: b.First, last: b.Last, reason: strings.Clone(b.Reason),
			})
		}
	}
	if len(b.Events) > 0 && !s.skip[batchTable].covers(epoch, b.First) {
		r.batches.add(at, s.tokens, epoch, b)
	}
	for i := range b.Events {
		ev := &b.Events[i]
		if s.skip[blockTable].covers(epoch, b.First) {
			r.held.add(at, s.tokens, epoch, b, i)
		} else {
			r.blocks.add(at, s.tokens, epoch, b, i)
		}
		if ev.Kind == event.Loaded && !s.skip[loadTable].covers(epoch, b.First) {
			r.loads.add(at, s.tokens, epoch, b, i)
		}
		switch ev.Kind {
		case event.Cleared:
			s.mark.digest = 0
		case event.Stored, event.Evicted:
			for j := range ev.Blocks {
				if effect := ev.Blocks[j].Effect; effect != 0 {
					s.mark.digest += event.Digest(int64(effect)) * event.Digest(event.Mix64(ev.Blocks[j].Hash, ev.Group, ev.Tier))
				}
			}
		}
	}
}

// room returns the open round, with the writer locked, once it takes rows of a message of that source and time.
func (w *Writer) room(ctx context.Context, source event.Source, committed time.Time) (*round, error) {
	day := committed.Unix() / 86400
	r, err := w.openRound(ctx, func(r *round) bool {
		return !r.restored[source] && r.rows() < w.cfg.MaxRows && (!r.dated() || r.day == day)
	})
	if err == nil && !r.dated() {
		r.begin(day, committed)
	}
	return r, err
}

// openRound returns the open round, with the writer locked, once it fits. One that does not is inserted at once.
func (w *Writer) openRound(ctx context.Context, fits func(*round) bool) (*round, error) {
	for {
		w.mu.Lock()
		if w.open == nil {
			w.mu.Unlock()
			return nil, errors.New("history is not running")
		}
		if fits(w.open) {
			return w.open, nil
		}
		taken := w.taken
		w.mu.Unlock()
		select {
		case w.full <- struct{}{}:
		default:
		}
		select {
		case <-taken:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// begin dates a round without dated rows. It waits since its place first moved, with or without rows.
func (r *round) begin(day int64, oldest time.Time) {
	if r.day = day; r.rows() == 0 {
		r.oldest = oldest
	}
	if r.began.IsZero() {
		r.began = time.Now()
	}
}

func newSourceState(tokens string) *sourceState {
	return &sourceState{tokens: tokens, spread: xxh3.HashString(tokens)}
}

// source returns a source's state, made at its first appearance. The caller holds the lock.
func (w *Writer) source(name event.Source) *sourceState {
	s := w.sources[name]
	if s == nil {
		s = newSourceState(name.Tokens())
		w.sources[name] = s
	}
	return s
}

// Restore takes a checkpoint in place of batches that did not come: its resident set becomes a snapshot, and the ledger
// says so. No event is made up.
func (w *Writer) Restore(ctx context.Context, object io.Reader) (*event.Checkpoint, error) {
	rows := new(snapshotRows)
	now := time.Now()
	var digest event.Digest
	cp, err := event.ReadCheckpoint(object, func(e *event.Entry) {
		if e.Copies > 0 {
			rows.add(e)
			digest += event.Digest(e.Copies) * event.Mix64(e.Hash, e.Group, e.Tier)
		}
	})
	if err != nil {
		return nil, err
	}
	if digest != cp.Digest {
		return nil, fmt.Errorf("read checkpoint of %v: its entries add up to digest %x, and it says %x", cp.Source, digest, cp.Digest)
	}
	rows.of(cp, now)
	r, err := w.room(ctx, cp.Source, now)
	if err != nil {
		return nil, err
	}
	defer w.mu.Unlock()
	s := w.source(cp.Source)
	first := cp.Ledger.First // of what is known only by its outcome
	if s.mark.Started && s.mark.Epoch == cp.Epoch {
		first = s.mark.Seq + 1
	}
	s.mark = mark{
		Mark:   event.Mark{Fence: max(s.mark.Fence, cp.Fence), Epoch: cp.Epoch, Started: cp.Ledger.Started, Seq: cp.Seq},
		digest: cp.Digest,
	}
	if rows.len() > 0 {
		r.snapshots = append(r.snapshots, rows)
	}
	row := ledgerRow{
		source: s.tokens, kind: "resync", epoch: cp.Epoch, first: min(first, cp.Seq), last: cp.Seq, snapshot: cp.Written,
		reason: fmt.Sprintf("history goes on from a checkpoint of %d blocks; what led there is not kept", rows.len()),
	}
	if !cp.Ledger.Started {
		row.snapshot = 0 // nothing has come of this life: the place behind its first sequence is not meant
	}
	r.ledger.add(place{committed: now, stream: int64(w.reached.Created), seq: w.reached.Sequence}, row)
	r.marks[cp.Source] = s.mark
	r.restored[cp.Source] = true
	return cp, nil
}

// Tell keeps the changes of a source's state.
func (w *Writer) Tell(st *event.Status) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.open == nil {
		return
	}
	s := w.source(st.Source)
	if st.Fence > s.mark.Fence {
		s.mark.Fence = st.Fence
		w.open.marks[st.Source] = s.mark
	}
	if st.State == s.state && st.Reason == s.reason {
		return
	}
	s.state, s.reason = st.State, st.Reason
	w.note(ledgerRow{
		source: s.tokens, kind: "state", state: st.State.String(), epoch: st.Epoch, first: st.Seq, last: st.Seq,
		reason: strings.Clone(st.Reason),
	})
}

// Compared notes a digest that was not the stream's.
func (w *Writer) Compared(name event.Source, agreed bool) {
	if agreed {
		w.metrics.digestsAgreed.Inc()
		return
	}
	w.metrics.digestsDiffered.Inc()
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.open == nil {
		return
	}
	s := w.source(name)
	w.note(ledgerRow{
		source: s.tokens, kind: "mismatch", epoch: s.mark.Epoch, first: s.mark.Seq, last: s.mark.Seq,
		reason: "the digest of what history kept is not its publisher's",
	})
}

// Dropped keeps that a source's publisher had no room for a range, the message's one batch.
func (w *Writer) Dropped(m *event.Message) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.open == nil {
		return
	}
	s, b := w.source(m.Source), &m.Batches[0]
	if s.skip[ledgerTable].covers(m.Epoch, b.Last) {
		return // it was held back until its checkpoint came, and is told again
	}
	s.skip[ledgerTable] = point{epoch: m.Epoch, seq: b.Last, set: true}
	w.noteAt(m.Position, ledgerRow{
		source: s.tokens, kind: b.Way.String(), epoch: m.Epoch, first: b.First, last: b.Last, reason: strings.Clone(b.Reason),
	})
}

// note adds a row of our own to the ledger, stamped with our clock. It does not wait for room: these rows are few.
func (w *Writer) note(row ledgerRow) { w.noteAt(w.reached, row) }

// noteAt adds a row about a place in the stream.
func (w *Writer) noteAt(at event.Position, row ledgerRow) {
	now := w.cfg.now()
	r := w.open
	if !r.dated() {
		r.begin(now.Unix()/86400, now)
	}
	if day := now.Unix() / 86400; r.day != day {
		now = time.Unix(r.day*86400+86399, 0) // the round is of one day
	}
	r.ledger.add(place{committed: now, stream: int64(at.Created), seq: at.Sequence}, row)
}

// Seq returns the last sequence of a source that is in the tables for good.
func (w *Writer) Seq(name event.Source) (event.Epoch, event.Seq, bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	m, ok := w.committed.marks[name]
	return m.Epoch, m.Seq, ok && m.Started
}

// Committed returns the stream position up to which everything is in the tables for good.
func (w *Writer) Committed() event.Position {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.committed.at
}

// Trouble says why inserts do not go through; empty when they do.
func (w *Writer) Trouble() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.trouble
}
