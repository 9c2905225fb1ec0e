package main

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"kvstrata/event"
	"kvstrata/indexer/history"
	"kvstrata/indexer/prefix"
)

// world is an engine's second life of five batches, of which the proxy lost one, and what honest index and history say of it.
type world struct {
	truth   *truth
	indexed *indexed
	kept    *kept
}

const (
	firstEpoch event.Epoch = 100
	epoch      event.Epoch = 200
)

func newWorld() *world {
	w := &world{
		truth: &truth{Resident: make(map[blockKey]int), Dropped: make(stamps), Passed: make(stamps), Withheld: make(stamps)},
		indexed: &indexed{
			Info: prefix.SourceInfo{
				State: event.StatePartial, Epoch: epoch, Started: true, LastSeq: 4, Balanced: true,
				Ledger: event.Ledger{Started: true, Last: 4, Live: 3, Recovered: 1, Lost: 1, Holes: []event.Hole{{First: 2, Last: 2}}},
				Digest: prefix.DigestInfo{Agreed: 3, Last: "agreed"},
			},
			Resident: make(map[blockKey]int),
		},
		kept: &kept{
			Mark:     event.Mark{Epoch: epoch, Started: true, Seq: 4},
			Batches:  make(map[event.Epoch][]keptBatch),
			Spans:    map[event.Epoch][]span{epoch: {{First: 2, Last: 2, Kind: "lost"}}},
			Resident: make(map[foldedKey]int),
		},
	}
	for number, e := range []event.Epoch{firstEpoch, epoch} {
		l := life{Buffer: 100}
		for seq := range uint64(5) {
			b := batch{Seq: seq, Time: int64(1+number)*1_000_000 + int64(seq)*20_000, Stored: 2, Evicted: int(seq % 2)}
			l.Batches = append(l.Batches, b)
			switch {
			case number == 1 && seq == 2:
				w.truth.Dropped.add(b.stamp())
				w.truth.Withheld.add(b.stamp())
				continue
			case number == 1 && seq == 3: // a replay brought it
				w.truth.Dropped.add(b.stamp())
			case number == 0 && seq == 4: // the life ended before anybody heard it
				continue
			}
			w.truth.Passed.add(b.stamp())
			b.Time++ // as it is rounded on its way
			w.kept.Batches[e] = append(w.kept.Batches[e], keptBatch{batch: b})
		}
		w.truth.Lives = append(w.truth.Lives, l)
	}
	for n := range uint64(6) {
		w.truth.Resident[key(n)] = 1
		if n >= 4 { // what came before the hole is not known any more
			w.indexed.Resident[key(n)] = 1
			w.kept.Resident[folded(n)] = 1
		}
	}
	return w
}

func key(n uint64) blockKey { return blockKey{hash: event.IntHash(n), tier: event.GPU} }

func folded(n uint64) foldedKey {
	return foldedKey{hash: history.Fold(event.IntHash(n)), tier: event.GPU}
}

// complete makes the world one in which nothing was lost.
func (w *world) complete() {
	info := &w.indexed.Info
	info.State, info.Ledger = event.StateLive, event.Ledger{Started: true, Last: 4, Live: 4, Recovered: 1}
	b := w.truth.Lives[1].Batches[2]
	w.truth.Passed.add(b.stamp())
	w.kept.Batches[epoch] = append(w.kept.Batches[epoch], keptBatch{batch: b})
	w.kept.Spans = nil
	for n := range uint64(6) {
		w.indexed.Resident[key(n)], w.kept.Resident[folded(n)] = 1, 1
	}
}

// The comparison is content with what is honest, and says what is wrong of everything else.
func TestCompare(t *testing.T) {
	for _, tt := range []struct {
		name  string
		spoil func(*world)
		want  string // empty: nothing is wrong
	}{
		{"a loss that is told", func(*world) {}, ""},
		{"nothing lost", (*world).complete, ""},
		{"a block is withheld by the index, which says that it is complete", func(w *world) {
			w.complete()
			delete(w.indexed.Resident, key(3))
			delete(w.kept.Resident, folded(3))
		}, "the engine has 1 blocks, or copies of blocks, that the index does not have"},
		{"a block is withheld by history", func(w *world) { delete(w.kept.Resident, folded(5)) }, "lacks 1 that it has"},
		{"a block is invented by the index", func(w *world) {
			w.indexed.Resident[key(9)], w.kept.Resident[folded(9)] = 1, 1
		}, "the index has 1 blocks, or copies of blocks, that the engine does not have"},
		{"a copy too many", func(w *world) {
			w.indexed.Resident[key(5)], w.kept.Resident[folded(5)] = 2, 2
		}, "the index has 1 blocks"},
		{"a block is invented by history", func(w *world) { w.kept.Resident[folded(9)] = 1 }, "history has 1 blocks that the index does not have"},
		{"a batch is withheld by history", func(w *world) {
			w.kept.Batches[epoch] = append(w.kept.Batches[epoch][:1], w.kept.Batches[epoch][2:]...)
		}, "history lacks 1 batches of epoch 200, and its ledger does not say so: 1 is one"},
		{"history stops before the end", func(w *world) {
			w.kept.Batches[epoch] = w.kept.Batches[epoch][:2]
			w.kept.Mark.Seq = 1
		}, "history stands at 1"},
		{"history's ledger does not have the loss", func(w *world) { w.kept.Spans = nil }, "batch 2 was kept from every subscriber"},
		{"the index's ledger does not have the loss", func(w *world) {
			w.indexed.Info.Ledger.Lost, w.indexed.Info.Ledger.Live = 0, 4
		}, "1 batches never reached a subscriber, and the ledger has 0 lost ones"},
		{"the ledger does not add up", func(w *world) { w.indexed.Info.Ledger.Live++ }, "the ledger does not add up"},
		{"a loss without a reason", func(w *world) { clear(w.truth.Withheld) }, "1 batches of epoch 200 are lost that a replay could have brought"},
		{"a loss of what the engine no longer kept", func(w *world) {
			clear(w.truth.Withheld)
			w.truth.Lives[1].Buffer = 2
		}, ""},
		{"a loss while the replay was silent", func(w *world) {
			clear(w.truth.Withheld)
			at := w.truth.Lives[1].Batches[2].Time
			w.truth.Disturbed = []window{{From: at - 10, To: at + 10}}
		}, ""},
		{"a row twice", func(w *world) { w.kept.Batches[epoch][0].Again = 1 }, "history has 1 rows of batch 0, epoch 200, twice"},
		{"a block twice", func(w *world) { w.kept.Batches[epoch][0].Stored++ }, "history has batch 0 of epoch 200 as"},
		{"a block of a batch is missing", func(w *world) { w.kept.Batches[epoch][0].Stored-- }, "history has batch 0 of epoch 200 as"},
		{"a batch in two epochs", func(w *world) { w.kept.Batches[300] = w.kept.Batches[firstEpoch][:1] }, "in two epochs"},
		{"a batch told again after the stream was lost", func(w *world) {
			w.truth.StreamLost = true
			w.kept.Batches[300] = w.kept.Batches[firstEpoch][:1]
		}, ""},
		{"an epoch of two lives", func(w *world) {
			w.kept.Batches[firstEpoch] = append(w.kept.Batches[firstEpoch][:3], w.kept.Batches[epoch][2])
		}, "epoch 100 has batches of the engine's lives 1 and 2"},
		{"a batch that nobody heard", func(w *world) {
			w.kept.Batches[firstEpoch] = append(w.kept.Batches[firstEpoch], keptBatch{batch: w.truth.Lives[0].Batches[4]})
		}, "which never reached a subscriber"},
		{"a batch of no life", func(w *world) { w.kept.Batches[epoch][0].Time += 10_000 }, "that the engine never published"},
		{"the index is behind", func(w *world) { w.indexed.Info.LastSeq = 3 }, "the index stands at 3"},
		{"another epoch in history", func(w *world) { w.kept.Mark.Epoch = 300 }, "history stands at 4 of epoch 300"},
		{"a state in doubt", func(w *world) { w.indexed.Info.State = event.StateRecovering }, "its state is recovering"},
		{"digests differ", func(w *world) { w.indexed.Info.Digest.Last = "differed" }, "the digest: differed"},
		{"digests were never compared", func(w *world) { w.indexed.Info.Digest = prefix.DigestInfo{Last: "not compared yet"} }, "the digest: not compared yet"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := newWorld()
			tt.spoil(w)
			f := compare(w.truth, w.indexed, w.kept)
			switch said := strings.Join(f.Wrong, "\n"); {
			case tt.want == "" && said != "":
				t.Errorf("it is wrong that %s", said)
			case !strings.Contains(said, tt.want):
				t.Errorf("it does not say %q, but: %s", tt.want, said)
			}
		})
	}
}

func TestCompareCounts(t *testing.T) {
	w := newWorld()
	want := finding{Batches: 8, Blocks: 8*2 + 4, Resident: 6, Lost: 1, Tail: 1, Partial: true, Withheld: 2, Recovered: 1}
	if diff := cmp.Diff(want, compare(w.truth, w.indexed, w.kept)); diff != "" {
		t.Error(diff)
	}
}
