package history_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"kvstrata/event"
	"kvstrata/indexer/history"
)

// checkpoint returns a checkpoint of a stream as it is now.
func (s *stream) checkpoint(t testing.TB) []byte {
	t.Helper()
	snap := s.set.Snapshot()
	defer snap.Release()
	cp := &event.Checkpoint{
		Source: s.source, Epoch: s.epoch, Fence: 1, Written: event.UnixTime(s.now), Digest: snap.Digest, Entries: snap.Len, Fullest: snap.Fullest,
	}
	if s.seq > 0 {
		cp.Seq, cp.Ledger = s.seq-1, event.Ledger{Started: true, Last: s.seq - 1}
	}
	var object bytes.Buffer
	if err := event.WriteCheckpoint(&object, cp, snap.Entries()); err != nil {
		t.Fatal(err)
	}
	return object.Bytes()
}

// life starts a new life of a stream's source.
func (s *stream) life() {
	s.epoch++
	s.seq = 0
	s.set.Reset()
}

// lost adds a message of a range that was lost.
func (s *stream) lost(n event.Seq) *event.Message {
	m := s.publish(event.Event{Kind: event.Cleared, Cause: event.ByResync, Group: event.NoGroup, LoRAID: event.NoLoRAID})
	b := &m.Batches[0]
	b.Way, b.Reason, b.Last = event.Lost, "no replay", b.First+n-1
	s.seq = b.Last + 1
	return m
}

// keptOnce fails a test unless the tables hold each row of messages once, and what adds up is the publisher's set.
func keptOnce(t *testing.T, e *engine, s *stream, messages ...*event.Message) {
	t.Helper()
	want := make(map[string][]string)
	for _, m := range messages {
		for i := range m.Batches {
			for table, lines := range tables(m, &m.Batches[i]) {
				want[table] = append(want[table], lines...)
			}
		}
	}
	for table := range tableLines {
		got := tableOf(t, e, table, s.source.Cluster)
		got = slices.DeleteFunc(got, func(l string) bool {
			return !strings.HasPrefix(l, s.source.Tokens()+" ") || table == "ledger" && strings.Contains(l, " life ")
		})
		slices.Sort(want[table])
		if !slices.Equal(want[table], got) {
			t.Errorf("%s holds\n%s\nwant\n%s", table, strings.Join(got, "\n"), strings.Join(want[table], "\n"))
		}
	}
	resident := make(map[string]int64)
	err := newReader(t, e.config()).Resident(t.Context(), s.source, func(b history.Resident) {
		resident[fmt.Sprintf("%016x%v%d", b.Hash, b.Tier, b.Group)] += b.Copies
	})
	if err != nil {
		t.Fatal(err)
	}
	for entry := range s.set.Resident() {
		k := fmt.Sprint(foldHash(entry.Hash), entry.Tier, entry.Group.Index())
		if resident[k] != int64(entry.Copies) {
			t.Errorf("%s has %d copies, want %d", k, resident[k], entry.Copies)
		}
		delete(resident, k)
	}
	if len(resident) > 0 {
		t.Errorf("resident, and should not be: %v", resident)
	}
}

var errTest = errors.New("the test does not let it through")

// failing starts a writer whose inserts go through f.
func failing(t *testing.T, cfg history.Config, f func(history.Insert) error) (w *history.Writer, stop func()) {
	t.Helper()
	w, err := history.NewWriter(cfg, silent(), nil)
	if err != nil {
		t.Fatal(err)
	}
	w.Intercept(f)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- w.Run(ctx) }()
	t.Cleanup(cancel)
	return w, func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
}

func resume(t *testing.T, w *history.Writer) (event.Position, map[event.Source]event.Mark) {
	t.Helper()
	at, marks, err := w.Resume(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return at, marks
}

// stuck starts a writer that inserts no round's place, and waits until it has tried with all rows of the messages in.
func stuck(t *testing.T, e *engine, hand func(w *history.Writer)) {
	t.Helper()
	cfg := e.config()
	cfg.FlushEvery = 200 * time.Millisecond
	tried := make(chan struct{}, 100)
	w, stop := failing(t, cfg, func(i history.Insert) error {
		if i.Table == "progress" {
			select {
			case tried <- struct{}{}:
			default:
			}
			return errTest
		}
		return i.Send()
	})
	resume(t, w)
	hand(w)
	<-tried
	stop()
}

// A range that was lost is one row that stands for many sequences.
func TestLostRangeEndsAnUnfinishedRound(t *testing.T) {
	e := startEngine(t)
	s := newStream("e0")
	s.publish(run(event.Stored, 1, 2))
	s.lost(5)
	stuck(t, e, func(w *history.Writer) { feed(t, w, s.messages...) })
	w, _ := startWriter(t, e.config())
	if at, marks := resume(t, w); at.Sequence != 0 || len(marks) != 0 {
		t.Fatalf("resumes at %v with %v, though no round was finished", at, marks)
	}
	last := s.publish(run(event.Stored, 3))
	feed(t, w, s.messages...)
	committed(t, w, last)
	keptOnce(t, e, s, s.messages...)
}

// The cause of a resync may be gone when the stream is read again: what it left out the first time is then not skipped.
func TestRestoreInAnUnfinishedRound(t *testing.T) {
	e := startEngine(t)
	s := newStream("e0")
	s.publish(run(event.Stored, 1, 2))
	s.publish(run(event.Stored, 3))
	s.publish(run(event.Evicted, 1))
	object := s.checkpoint(t)
	s.publish(run(event.Stored, 4))
	stuck(t, e, func(w *history.Writer) {
		feed(t, w, s.messages[0])
		if _, err := w.Restore(t.Context(), bytes.NewReader(object)); err != nil {
			t.Fatal(err)
		}
		feed(t, w, s.messages[3]) // into a round of its own, which waits for the checkpoint's
	})
	w, _ := startWriter(t, e.config())
	resume(t, w)
	feed(t, w, s.messages...)
	committed(t, w, s.messages[3])
	keptOnce(t, e, s, s.messages...)
}

// A checkpoint before the first batch of a life has no sequence: the batch 0 is behind it.
func TestRestoreAtTheBeginningOfALife(t *testing.T) {
	e := startEngine(t)
	w, _ := startWriter(t, e.config())
	resume(t, w)
	s := newStream("e0")
	if _, err := w.Restore(t.Context(), bytes.NewReader(s.checkpoint(t))); err != nil {
		t.Fatal(err)
	}
	s.publish(run(event.Stored, 1, 2))
	feed(t, w, s.messages...)
	committed(t, w, s.messages[0])
	keptOnce(t, e, s, s.messages...)
}

func TestCheckpointThatDoesNotAddUp(t *testing.T) {
	e := startEngine(t)
	w, _ := startWriter(t, e.config())
	resume(t, w)
	s := newStream("e0")
	s.publish(run(event.Stored, 1))
	snap := s.set.Snapshot()
	defer snap.Release()
	var object bytes.Buffer
	cp := &event.Checkpoint{Source: s.source, Epoch: s.epoch, Digest: snap.Digest + 1, Entries: snap.Len}
	if err := event.WriteCheckpoint(&object, cp, snap.Entries()); err != nil {
		t.Fatal(err)
	}
	if _, err := w.Restore(t.Context(), &object); err == nil || !strings.Contains(err.Error(), "add up") {
		t.Errorf("restored from it: %v", err)
	}
}

// ClickHouse may remember a token and then die before it has the rows: it takes them for known ones when they come again.
func TestSwallowedInsert(t *testing.T) {
	e := startEngine(t)
	n := 0
	w, stop := failing(t, e.config(), func(i history.Insert) error {
		if i.Table != "block_events" {
			return i.Send()
		}
		switch n++; n {
		case 1:
			return errTest // it died with it
		case 2:
			return nil // and took it for one that it has
		}
		return i.Send()
	})
	defer stop()
	resume(t, w)
	s := newStream("e0")
	feed(t, w, s.publish(run(event.Stored, 1, 2, 3)))
	committed(t, w, s.messages[0])
	keptOnce(t, e, s, s.messages...)
	if n != 3 {
		t.Errorf("%d inserts, want 3", n)
	}
}

// The engine's process is killed again and again while rounds are inserted.
func TestKilledEngine(t *testing.T) {
	e := startEngine(t)
	cfg := e.config()
	cfg.MaxRows = 500
	w, err := history.NewWriter(cfg, silent(), nil)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- w.Run(ctx) }()
	defer func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	}()
	resume(t, w)
	s := newStream("e0")
	kills := 3
	if testing.Short() {
		kills = 1
	}
	for k := range kills {
		for i := range 40 {
			n := uint64(k*4000 + i*100)
			var hashes []uint64
			for j := range uint64(50) {
				hashes = append(hashes, n+j)
			}
			feed(t, w, s.publish(run(event.Stored, hashes...)))
			if i == 20 {
				if err := syscall.Kill(e.PID(), syscall.SIGKILL); err != nil {
					t.Fatal(err)
				}
			}
		}
		if err := e.WaitReady(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	committed(t, w, s.messages[len(s.messages)-1])
	keptOnce(t, e, s, s.messages...)
	if trouble := w.Trouble(); trouble != "" {
		t.Errorf("still in trouble: %s", trouble)
	}
}

// An engine that hangs holds up the stream, not memory; and it is told.
func TestStoppedEngine(t *testing.T) {
	e := startEngine(t)
	cfg := e.config()
	cfg.MaxRows, cfg.InsertTimeout = 100, 300*time.Millisecond
	w, _ := startWriter(t, cfg)
	resume(t, w)
	s := newStream("e0")
	for i := range uint64(30) {
		s.publish(run(event.Stored, 20*i, 20*i+1, 20*i+2, 20*i+3, 20*i+4, 20*i+5, 20*i+6, 20*i+7, 20*i+8, 20*i+9))
	}
	pid := e.PID()
	if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = syscall.Kill(pid, syscall.SIGCONT) }()
	taken := 0
	for _, m := range s.messages {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		_, err := w.Apply(ctx, m)
		cancel()
		if err != nil {
			if !errors.Is(err, context.DeadlineExceeded) {
				t.Fatal(err)
			}
			break
		}
		w.Reached(m.Position)
		taken++
	}
	if taken < 10 || taken > 20 {
		t.Errorf("took %d messages of 10 rows, and a round has 100: want one being inserted, and one full", taken)
	}
	if n := w.Waiting(); n > 110 {
		t.Errorf("%d rows wait", n)
	}
	eventually(t, "the trouble is told", func() bool { return w.Trouble() != "" })
	if err := syscall.Kill(pid, syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	feed(t, w, s.messages[taken:]...)
	committed(t, w, s.messages[len(s.messages)-1])
	keptOnce(t, e, s, s.messages...)
	eventually(t, "the trouble is over", func() bool { return w.Trouble() == "" })
}

func TestTwoWriters(t *testing.T) {
	e := startEngine(t)
	s := newStream("e0")
	s.publish(run(event.Stored, 1, 2))
	s.publish(run(event.Stored, 3))
	cfg := e.config()
	first, err := history.NewWriter(cfg, silent(), nil)
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- first.Run(t.Context()) }()
	resume(t, first)
	feed(t, first, s.messages[0])
	committed(t, first, s.messages[0])

	second, _ := startWriter(t, cfg)
	resume(t, second)
	feed(t, second, s.messages[1])
	committed(t, second, s.messages[1])

	feed(t, first, s.messages[1]) // who was thought dead goes on
	if err := <-done; err == nil || !strings.Contains(err.Error(), "another writer") {
		t.Errorf("the first writer ended with %v", err)
	}
	if trouble := first.Trouble(); !strings.Contains(trouble, "another writer") {
		t.Errorf("the first writer's trouble is %q", trouble)
	}
	keptOnce(t, e, s, s.messages...)
}

// A round of batches without rows, one after the other, still gets its place.
func TestPlaceMovesWithoutRows(t *testing.T) {
	e := startEngine(t)
	w, _ := startWriter(t, e.config())
	resume(t, w)
	s := newStream("e0")
	feed(t, w, s.publish(run(event.Stored, 1)))
	committed(t, w, s.messages[0])
	before := w.Committed()
	eventually(t, "the place moves", func() bool {
		feed(t, w, s.publish())
		return w.Committed() != before
	})
}

// A range that its publisher dropped never comes as a message; the ledger has it all the same.
func TestDroppedRangeIsInTheLedger(t *testing.T) {
	e := startEngine(t)
	w, _ := startWriter(t, e.config())
	resume(t, w)
	s := newStream("e0")
	feed(t, w, s.publish(run(event.Stored, 1)))
	dropped := &event.Message{
		Source: s.source, Epoch: s.epoch, Position: event.Position{Stream: s.position.Stream, Created: s.position.Created, Sequence: 9},
		Batches: []event.Batch{{First: 5, Last: 9, Way: event.Dropped, Reason: "no room"}},
	}
	w.Dropped(dropped)
	w.Dropped(dropped) // held back, and then told again
	r := newReader(t, e.config())
	var rows [][]any
	eventually(t, "the ledger has it", func() bool {
		a, err := r.Ask(t.Context(), "ledger", map[string]string{"engine": "e0"})
		if err != nil {
			t.Fatal(err)
		}
		rows = slices.DeleteFunc(a.Rows, func(row []any) bool { return row[3] != "dropped" })
		return len(rows) > 0
	})
	if len(rows) != 1 || rows[0][6] != uint64(5) || rows[0][7] != uint64(9) || rows[0][8] != "no room" {
		t.Errorf("%v", rows)
	}
}

func TestMessagesOfTwoDays(t *testing.T) {
	e := startEngine(t)
	w, _ := failing(t, e.config(), func(i history.Insert) error {
		if i.Days > 1 {
			t.Errorf("an insert into %s is of %d days", i.Table, i.Days)
		}
		return i.Send()
	})
	resume(t, w)
	s := newStream("e0")
	s.now = time.Now().UTC().Truncate(24 * time.Hour).Add(-2 * time.Second)
	for i := range uint64(4) {
		s.publish(run(event.Stored, i))
	}
	feed(t, w, s.messages...)
	committed(t, w, s.messages[3])
	keptOnce(t, e, s, s.messages...)
	var days uint64
	if err := connect(t, e.config()).QueryRow(t.Context(), "SELECT uniqExact(partition) FROM system.parts WHERE table = 'block_events' AND active").Scan(&days); err != nil {
		t.Fatal(err)
	}
	if days != 2 {
		t.Errorf("rows are in %d partitions, want 2", days)
	}
}

// A huge checkpoint is inserted in pieces.
func TestHugeCheckpoint(t *testing.T) {
	e := startEngine(t)
	w, _ := startWriter(t, e.config())
	resume(t, w)
	s := newStream("e0")
	for i := range uint64(600) {
		var hashes []uint64
		for j := range uint64(1000) {
			hashes = append(hashes, i*1000+j)
		}
		ev := run(event.Stored, hashes...)
		ev.Tokens = nil
		s.publish(ev)
	}
	if _, err := w.Restore(t.Context(), bytes.NewReader(s.checkpoint(t))); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the checkpoint is kept", func() bool {
		_, seq, ok := w.Seq(s.source)
		return ok && seq == s.seq-1
	})
	keptOnce(t, e, s)
}

// An insert may lie in the socket of an engine that hangs when its writer gives up, and be performed when the next one
// has begun: that one reads behind it.
func TestInsertOutlivesItsWriter(t *testing.T) {
	e := startEngine(t)
	s := newStream("e0")
	pid := e.PID()
	for i := range uint64(8) {
		hanging := make(chan struct{})
		w, stop := failing(t, e.config(), func(i history.Insert) error {
			if i.Table != "block_events" {
				return i.Send()
			}
			if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
				t.Error(err)
			}
			sent := make(chan error, 1)
			go func() { sent <- i.Send() }()
			<-time.After(20 * time.Millisecond) // until it is in the socket, wherever that is seen
			close(hanging)
			return <-sent
		})
		resume(t, w)
		n := len(s.messages)
		s.publish(run(event.Stored, 2*i, 2*i+1))
		feed(t, w, s.messages[n])
		<-hanging
		stop()
		next, stopNext := startWriter(t, e.config())
		if err := syscall.Kill(pid, syscall.SIGCONT); err != nil {
			t.Fatal(err)
		}
		if _, marks := resume(t, next); !marks[s.source].Started && n > 0 || marks[s.source].Started && marks[s.source].Seq != event.Seq(n-1) {
			t.Fatalf("resumes at %+v, want behind %d", marks, n)
		}
		feed(t, next, s.messages[n])
		committed(t, next, s.messages[n])
		stopNext()
	}
	keptOnce(t, e, s, s.messages...)
}
