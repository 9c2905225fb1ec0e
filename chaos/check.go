package main

import (
	"fmt"
	"slices"

	"kvstrata/event"
	"kvstrata/indexer/history"
	"kvstrata/indexer/prefix"
)

// batch is what one batch changed, as its engine wrote it down or as history has it.
type batch struct {
	Seq     uint64
	Time    int64 // µs by the engine's clock
	Stored  int   // blocks
	Evicted int   // blocks
	Cleared int   // resets
}

func (b batch) stamp() stamp { return stamp{seq: b.Seq, time: b.Time} }

// life is one life of an engine, by its own journal: every batch that it can have published, in order, from sequence 0.
type life struct {
	Batches []batch
	Buffer  int // how many of the last batches a replay can bring
}

// window is a time, in µs by the engine's clock, at which a replay was kept from being what it should be.
type window struct{ From, To int64 }

// blockKey is what a resident set counts copies of.
type blockKey struct {
	hash  event.BlockHash
	tier  event.Tier
	group uint32
}

// foldedKey is one of history, whose hashes have 64 bits.
type foldedKey struct {
	hash  uint64
	tier  event.Tier
	group uint32
}

// truth is what is known of an engine without kvstrata.
type truth struct {
	Lives    []life // the last one is the present
	Resident map[blockKey]int
	Dropped  stamps // what the proxy kept back
	Passed   stamps // what it handed on
	Withheld stamps // what it hands on to nobody, neither live nor in a replay
	// Disturbed are times in and around which a batch may be lost that was in the engine's buffer.
	Disturbed []window
	// StreamLost says that the bus lost its store: what was told may have been told again, in another epoch.
	StreamLost bool
}

// indexed is what the index says of it.
type indexed struct {
	Info     prefix.SourceInfo
	Resident map[blockKey]int
}

// kept is what history says of it.
type kept struct {
	Mark     event.Mark
	Batches  map[event.Epoch][]keptBatch
	Spans    map[event.Epoch][]span
	Resident map[foldedKey]int
	Differed int // digests that were not its own
}

// keptBatch is a batch as history's rows add up to it.
type keptBatch struct {
	batch
	Again int // rows that are there a second time
}

// span is a range that history has in its ledger instead of rows.
type span struct {
	First, Last uint64
	Kind        string // lost, dropped or resync
}

// finding is the outcome of one comparison.
type finding struct {
	Wrong []string // what must not be

	Batches   int // that history has and were compared with the journal
	Blocks    int // stored and evicted in them
	Resident  int // blocks compared
	Lost      int // batches that the ledger has as lost
	Double    int // rows, batches and blocks that are counted more than once
	ToldAgain int // batches told again in a new epoch, because the stream was lost
	Tail      int // batches after the last one known of a life that ended
	Differed  int // digests that index or history did not agree with, and that healed
	Partial   bool

	Withheld  int // batches that the proxy kept back at some time
	Recovered int // those of them that came in the end
}

// maxWrong bounds what is told of one comparison.
const maxWrong = 12

func (f *finding) wrong(format string, args ...any) {
	if len(f.Wrong) == maxWrong {
		f.Wrong = append(f.Wrong, "and more")
	}
	if len(f.Wrong) > maxWrong {
		return
	}
	f.Wrong = append(f.Wrong, fmt.Sprintf(format, args...))
}

// compare holds what an engine did against what the index and history say of it, while nothing moves.
func compare(t *truth, x *indexed, h *kept) finding {
	var f finding
	now := t.Lives[len(t.Lives)-1]
	f.place(now, x, h)
	f.trust(now, t, x)
	f.sets(t, x, h)
	f.rows(t, h)
	f.injected(t, h, x)
	f.Differed = int(x.Info.Digest.Differed) + h.Differed
	return f
}

// place checks that both stand where the engine does.
func (f *finding) place(now life, x *indexed, h *kept) {
	info := &x.Info
	last := uint64(len(now.Batches)) - 1
	switch {
	case len(now.Batches) == 0:
		f.wrong("the engine has published nothing in this life")
	case !info.Started || uint64(info.LastSeq) != last:
		f.wrong("the index stands at %d (started: %v), the engine at %d", info.LastSeq, info.Started, last)
	case !h.Mark.Started || h.Mark.Epoch != info.Epoch || h.Mark.Seq != info.LastSeq:
		f.wrong("history stands at %d of epoch %d, the index at %d of epoch %d", h.Mark.Seq, h.Mark.Epoch, info.LastSeq, info.Epoch)
	}
}

// trust checks state, ledger and digest.
func (f *finding) trust(now life, t *truth, x *indexed) {
	info, ledger := &x.Info, &x.Info.Ledger
	switch info.State {
	case event.StateLive:
	case event.StatePartial:
		f.Partial = true
	default:
		f.wrong("its state is %v: %s", info.State, info.Reason)
	}
	switch {
	case !info.Balanced || !ledger.Balanced():
		f.wrong("the ledger does not add up: %+v", *ledger)
	case !ledger.Started || ledger.Last != info.LastSeq:
		f.wrong("the ledger ends at %d, the index at %d", ledger.Last, info.LastSeq)
	}
	if info.Digest.Last != "agreed" {
		f.wrong("the digest: %s (%d agreed, %d differed)", info.Digest.Last, info.Digest.Agreed, info.Digest.Differed)
	}
	unheard := 0
	for _, b := range now.Batches {
		if ledger.Started && event.Seq(b.Seq) >= ledger.First && event.Seq(b.Seq) <= ledger.Last && !t.Passed.has(b.stamp()) {
			unheard++
		}
	}
	if uint64(unheard) > ledger.Lost {
		f.wrong("%d batches never reached a subscriber, and the ledger has %d lost ones", unheard, ledger.Lost)
	}
}

// sets compares the resident sets. A source that is partial may be too short, never too long.
func (f *finding) sets(t *truth, x *indexed, h *kept) {
	folded := make(map[foldedKey]int)
	for k, copies := range x.Resident {
		folded[foldedKey{history.Fold(k.hash), k.tier, k.group}] += copies
	}
	long, short := differences(t.Resident, x.Resident)
	f.Resident = len(t.Resident)
	if long > 0 {
		f.wrong("the index has %d blocks, or copies of blocks, that the engine does not have (%d of the engine's)", long, len(t.Resident))
	}
	if short > 0 && !f.Partial {
		f.wrong("the engine has %d blocks, or copies of blocks, that the index does not have, which says that it is complete", short)
	}
	if long, short := differences(folded, h.Resident); long+short > 0 {
		f.wrong("history has %d blocks that the index does not have, and lacks %d that it has", long, short)
	}
}

// differences counts the entries of which got has more, and fewer, copies than want.
func differences[K comparable](want, got map[K]int) (long, short int) {
	for k, copies := range got {
		if copies > want[k] {
			long++
		}
	}
	for k, copies := range want {
		if got[k] < copies {
			short++
		}
	}
	return long, short
}

// rows compares history's rows, batch by batch, with the journals of all lives: each row is of a batch that was published, no
// batch is there twice or in part, and what is not there is in the ledger.
func (f *finding) rows(t *truth, h *kept) {
	told := make(map[[2]int]event.Epoch) // by life and sequence
	lost := make(map[[2]int]struct{})
	known := make(map[int]int) // batches from 0 on, by life
	for _, epoch := range epochs(h) {
		of := -1
		there := make(map[uint64]bool)
		first, last := ^uint64(0), uint64(0)
		for _, b := range h.Batches[epoch] {
			first, last = min(first, b.Seq), max(last, b.Seq)
			there[b.Seq] = true
			if b.Again > 0 {
				f.Double += b.Again
				f.wrong("history has %d rows of batch %d, epoch %d, twice", b.Again, b.Seq, epoch)
			}
			number, ok := t.find(b.stamp())
			if !ok {
				f.wrong("history has a batch %d of epoch %d, at %d µs, that the engine never published", b.Seq, epoch, b.Time)
				continue
			}
			if of >= 0 && of != number {
				f.wrong("epoch %d has batches of the engine's lives %d and %d", epoch, of+1, number+1)
			}
			of = number
			want := t.Lives[number].Batches[b.Seq]
			want.Time = b.Time
			if b.batch != want {
				f.Double += max(b.Stored-want.Stored, 0) + max(b.Evicted-want.Evicted, 0)
				f.wrong("history has batch %d of epoch %d as %+v, the engine published %+v", b.Seq, epoch, b.batch, want)
			}
			if !t.Passed.has(b.stamp()) {
				f.wrong("history has batch %d of epoch %d, which never reached a subscriber", b.Seq, epoch)
			}
			f.Batches++
			f.Blocks += b.Stored + b.Evicted
			switch _, again := told[[2]int{number, int(b.Seq)}]; {
			case again && t.StreamLost:
				f.ToldAgain++
			case again:
				f.Double++
				f.wrong("history has batch %d of the engine's life %d in two epochs", b.Seq, number+1)
			}
			told[[2]int{number, int(b.Seq)}] = epoch
		}
		if epoch == h.Mark.Epoch {
			last = max(last, uint64(h.Mark.Seq))
		}
		f.holes(h, epoch, there, first, last)
		needless := 0
		for _, s := range h.Spans[epoch] {
			for seq := s.First; s.Kind == "lost" && seq <= s.Last; seq++ {
				lost[[2]int{of, int(seq)}] = struct{}{}
				if of >= 0 && t.couldBeHad(t.Lives[of], seq) {
					needless++
				}
			}
		}
		if needless > 0 {
			f.wrong("%d batches of epoch %d are lost that a replay could have brought", needless, epoch)
		}
		if of >= 0 {
			known[of] = max(known[of], int(last)+1)
		}
	}
	f.Lost = len(lost)
	for number, l := range t.Lives[:len(t.Lives)-1] {
		f.Tail += max(len(l.Batches)-known[number], 0)
	}
}

// holes checks that what an epoch lacks between its first and its last batch is in the ledger.
func (f *finding) holes(h *kept, epoch event.Epoch, there map[uint64]bool, first, last uint64) {
	missing, example := 0, uint64(0)
	for seq := first; seq <= last && first != ^uint64(0); seq++ {
		if there[seq] {
			continue
		}
		covered := slices.ContainsFunc(h.Spans[epoch], func(s span) bool { return s.First <= seq && seq <= s.Last })
		if !covered {
			missing, example = missing+1, seq
		}
	}
	if missing > 0 {
		f.wrong("history lacks %d batches of epoch %d, and its ledger does not say so: %d is one", missing, epoch, example)
	}
}

func epochs(h *kept) (all []event.Epoch) {
	for e := range h.Batches {
		all = append(all, e)
	}
	slices.Sort(all)
	return all
}

// couldBeHad reports whether a replay could bring a batch of a life all the time.
func (t *truth) couldBeHad(l life, seq uint64) bool {
	if seq >= uint64(len(l.Batches)) || int(seq) < len(l.Batches)-l.Buffer {
		return false
	}
	b := l.Batches[seq]
	return !t.Withheld.has(b.stamp()) && !slices.ContainsFunc(t.Disturbed, func(w window) bool { return w.From <= b.Time && b.Time <= w.To })
}

// find returns the life that a batch is of.
func (t *truth) find(b stamp) (life int, ok bool) {
	for i, l := range t.Lives {
		if b.seq < uint64(len(l.Batches)) {
			if d := l.Batches[b.seq].Time - b.time; -sameTime < d && d < sameTime {
				return i, true
			}
		}
	}
	return 0, false
}

// injected counts what the proxy kept back, and checks that what never came is in the ledger of the present life.
func (f *finding) injected(t *truth, h *kept, x *indexed) {
	lost := func(seq uint64) bool {
		return slices.ContainsFunc(h.Spans[x.Info.Epoch], func(s span) bool { return s.First <= seq && seq <= s.Last })
	}
	for number, l := range t.Lives {
		for _, b := range l.Batches {
			if !t.Dropped.has(b.stamp()) {
				continue
			}
			f.Withheld++
			if t.Passed.has(b.stamp()) {
				f.Recovered++
				continue
			}
			within := x.Info.Ledger.Started && event.Seq(b.Seq) >= x.Info.Ledger.First && event.Seq(b.Seq) <= x.Info.Ledger.Last
			if number == len(t.Lives)-1 && within && !lost(b.Seq) {
				f.wrong("batch %d was kept from every subscriber, and history's ledger does not have it", b.Seq)
			}
		}
	}
}
