package prefix_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"kvstrata/event"
	"kvstrata/indexer/prefix"

	"github.com/prometheus/client_golang/prometheus"
	"pgregory.net/rapid"
)

// A source stores its whole chain with every even sequence and evicts it with every odd one; readers never see a part
// of it, nor a sequence whose state it is not.
func TestReadersSeeWholeMessages(t *testing.T) {
	const length, rounds = 8, 100
	x := prefix.New(prefix.DefaultConfig())
	p := prompt(1, length)
	names := []string{"e0", "e1", "e2"}
	for _, name := range names {
		x.Tell(newPublisher(engine(name), false).status(event.StateLive, ""))
	}
	steady := newPublisher(engine("steady"), false)
	steady.tell(t, x, p.stored(event.GPU, 0, length), p.stored(event.CPU, 0, length))
	x.Tell(steady.status(event.StateLive, ""))
	var readers sync.WaitGroup
	done := make(chan struct{})
	read := func(look func() error) {
		readers.Go(func() {
			for {
				if err := look(); err != nil {
					t.Error(err)
					return
				}
				select {
				case <-done:
					return
				default:
				}
			}
		})
	}
	for _, r := range []*prefix.Request{{Model: "m", Tokens: p.tokens}, {Model: "m", Hashes: p.hashes()}} {
		read(func() error { return checkWhole(x, r, length) })
	}
	for _, r := range []*prefix.Request{{Model: "m", Tokens: p.tokens}, {Model: "m", Hashes: p.hashes()}} {
		reader := x.NewReader()
		read(func() error {
			scores, err := reader.Scores(r)
			isSteady := false
			for _, s := range scores {
				if s.Blocks != length || s.DeviceBlocks != length {
					return fmt.Errorf("%v: %d blocks, %d of them on the device", s.Source, s.Blocks, s.DeviceBlocks)
				}
				isSteady = isSteady || *s.Source == steady.source
			}
			if !isSteady {
				return errors.Join(err, fmt.Errorf("%v is not there: %v", steady.source, scores))
			}
			return err
		})
	}
	read(func() error {
		for _, s := range x.Sources() {
			if n := len(s.Resident); n > 0 && s.Started && s.Resident[0].Blocks != whole(s.LastSeq, length) {
				return fmt.Errorf("%d blocks after sequence %d", s.Resident[0].Blocks, s.LastSeq)
			}
		}
		return nil
	})
	read(func() error {
		n := 0
		for range x.Resident(engine("e0")) {
			n++
		}
		if n%(2*length) != 0 {
			return fmt.Errorf("%d blocks listed", n)
		}
		return nil
	})
	reg := prometheus.NewRegistry()
	reg.MustRegister(x)
	read(func() error { _, err := reg.Gather(); return err })
	feed(t, x, names, p, rounds)
	close(done)
	readers.Wait()
}

// whole is how many blocks of the chain there are after a sequence.
func whole(seq event.Seq, length uint64) uint64 {
	if seq%2 == 0 {
		return length
	}
	return 0
}

func checkWhole(x *prefix.Index, r *prefix.Request, length uint64) error {
	a, err := x.Lookup(r)
	if err != nil {
		return err
	}
	for _, m := range a.Matches {
		if m.BlockSize > 0 && uint64(m.Blocks) != whole(m.Seq, length) {
			return fmt.Errorf("%d blocks after sequence %d", m.Blocks, m.Seq)
		}
	}
	return nil
}

// feed publishes every source's rounds in turn, now and then from a checkpoint or in a new life.
func feed(t *testing.T, x *prefix.Index, names []string, p chain, rounds int) {
	pubs := make([]*publisher, len(names))
	for i, name := range names {
		pubs[i] = newPublisher(engine(name), false)
	}
	for round := range rounds {
		for i, pub := range pubs {
			whole := []event.Event{p.stored(event.CPU, 0, p.len()), p.stored(event.GPU, 0, p.len())}
			if pub.next%2 == 1 {
				whole = []event.Event{p.evicted(event.GPU, 0, p.len()), p.evicted(event.CPU, 0, p.len())}
			}
			m := pub.message(t, whole)
			switch {
			case (round+i)%50 == 49:
				restore(t, x, pub.checkpoint(t))
			case (round+i)%80 == 79:
				apply(t, x, m)
				pub.restart(0)
			default:
				apply(t, x, m)
			}
			x.Tell(pub.status(event.StateLive, ""))
			x.Compared(pub.source, true)
		}
	}
}

// Whatever a message or a checkpoint says, the index refuses it or takes it, and forgets it with the next life.
func TestAnythingAPublisherSays(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		x, now := newIndex()
		source := engine("e1")
		var epoch event.Epoch
		for range rapid.IntRange(1, 8).Draw(t, "lives") {
			epoch++
			if rapid.Bool().Draw(t, "from a checkpoint") {
				_, _ = x.Restore(context.Background(), drawObject(t, source, epoch)) // refused or not
			}
			for seq := range event.Seq(rapid.IntRange(1, 6).Draw(t, "messages")) {
				b := event.Batch{First: seq, Last: seq, Way: event.Live, Rank: -1, Events: drawAnything(t)}
				_, _ = x.Apply(context.Background(), &event.Message{Source: source, Epoch: epoch, Batches: []event.Batch{b}})
			}
		}
		if _, err := x.Apply(context.Background(), &event.Message{Source: source, Epoch: epoch + 1, Batches: []event.Batch{{}}}); err != nil {
			t.Fatal(err)
		}
		now.now = now.now.Add(time.Second)
		for p := range event.PrefixHash(4) {
			a := lookup(t, x, &prefix.Request{Model: "m", Hashes: []event.PrefixHash{p}})
			if len(a.Matches) != 1 || a.Matches[0].Blocks != 0 {
				t.Fatalf("an empty life's answer: %+v", a)
			}
		}
	})
}

func drawAnything(t *rapid.T) []event.Event {
	var events []event.Event
	for range rapid.IntRange(0, 4).Draw(t, "events") {
		ev := event.Event{
			Kind:      rapid.SampledFrom([]event.Kind{event.Stored, event.Stored, event.Evicted, event.Loaded, event.Cleared}).Draw(t, "kind"),
			Tier:      rapid.SampledFrom([]event.Tier{event.GPU, event.CPU, ""}).Draw(t, "tier"),
			Group:     event.Group(rapid.IntRange(-1, 1).Draw(t, "group")),
			BlockSize: uint32(rapid.SampledFrom([]int{0, 4, 16}).Draw(t, "block size")), Eagle: rapid.Bool().Draw(t, "eagle"),
			Unrooted: rapid.Bool().Draw(t, "unrooted"), HasParent: rapid.Bool().Draw(t, "has a parent"),
		}
		for range rapid.IntRange(0, 3).Draw(t, "blocks") {
			ev.Blocks = append(ev.Blocks, event.Block{
				Hash:   event.IntHash(rapid.Uint64Range(0, 3).Draw(t, "hash")),
				Prefix: event.PrefixHash(rapid.Uint64Range(0, 3).Draw(t, "prefix")),
				Effect: rapid.Int8Range(-2, 2).Draw(t, "effect"),
			})
		}
		events = append(events, ev)
	}
	return events
}

// drawObject draws a checkpoint of entries that fit their digest, if nothing else.
func drawObject(t *rapid.T, source event.Source, epoch event.Epoch) *bytes.Buffer {
	cp := &event.Checkpoint{Source: source, Epoch: epoch, Entries: rapid.Uint64Range(0, 4).Draw(t, "entries")}
	var entries []event.Entry
	for range cp.Entries {
		n := rapid.Uint64Range(0, 3).Draw(t, "hash")
		e := event.Entry{
			Hash: event.IntHash(n), Group: event.NoGroup, BlockSize: []uint32{0, 4, 16, 16}[n], Eagle: n == 2,
			Tier:   rapid.SampledFrom([]event.Tier{event.GPU, event.CPU}).Draw(t, "tier"),
			Copies: rapid.Uint32Range(0, 3).Draw(t, "copies"), Prefix: event.PrefixHash(rapid.Uint64Range(0, 3).Draw(t, "prefix")),
		}
		cp.Digest += event.Digest(e.Copies) * event.Mix64(e.Hash, e.Group, e.Tier)
		entries = append(entries, e)
	}
	var object bytes.Buffer
	err := event.WriteCheckpoint(&object, cp, func(yield func(*event.Entry) bool) {
		for i := range entries {
			if !yield(&entries[i]) {
				return
			}
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	return &object
}

// Checkpoints of several sources are read side by side, beside the stream of another and beside readers, who see each whole.
func TestRestoresSideBySide(t *testing.T) {
	const length, sources, rounds = 40, 4, 30
	x := prefix.New(prefix.DefaultConfig())
	p := prompt(1, length)
	var restores, readers sync.WaitGroup
	done := make(chan struct{})
	for i := range sources {
		pub := newPublisher(engine(fmt.Sprintf("r%d", i)), false)
		pub.message(t, []event.Event{p.stored(event.GPU, 0, length)})
		object := pub.checkpoint(t).Bytes()
		x.Tell(pub.status(event.StateLive, ""))
		restores.Go(func() {
			for range rounds {
				if _, err := x.Restore(t.Context(), bytes.NewReader(object)); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	for range 2 {
		readers.Go(func() {
			r := x.NewReader()
			for {
				scores, err := r.Scores(&prefix.Request{Model: "m", Hashes: p.hashes()})
				if err != nil {
					t.Error(err)
					return
				}
				for _, s := range scores {
					if s.Blocks != length {
						t.Errorf("%v has %d blocks of %d", s.Source, s.Blocks, length)
						return
					}
				}
				select {
				case <-done:
					return
				default:
				}
			}
		})
	}
	writer := newPublisher(engine("w"), false)
	for range rounds {
		writer.tell(t, x, p.stored(event.GPU, 0, length))
		writer.tell(t, x, p.evicted(event.GPU, 0, length))
		x.Tell(writer.status(event.StateLive, ""))
	}
	restores.Wait()
	close(done)
	readers.Wait()
	if scores, err := x.NewReader().Scores(&prefix.Request{Model: "m", Hashes: p.hashes()}); err != nil || len(scores) != sources {
		t.Errorf("%d sources, want %d; %v", len(scores), sources, err)
	}
}
