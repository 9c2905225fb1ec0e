package prefix_test

import (
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"kvstrata/event"
	"kvstrata/indexer/prefix"
)

// copyKey is what an engine calls a block, and where it lies.
type copyKey struct {
	hash uint64
	tier event.Tier
}

// tide is an index whose sources grow and shrink by whole prompts, and what they hold by a naive count.
type tide struct {
	t      testing.TB
	index  *prefix.Index
	rnd    *rand.Rand
	seqs   []event.Seq
	held   []map[int]map[copyKey]uint32 // by source and prompt: copies
	chains [][]event.PrefixHash
}

const tideBlocks = 48 // of a prompt

func newTide(t testing.TB, sources, prompts int, maxBytes int64, seed uint64) *tide {
	cfg := prefix.DefaultConfig()
	cfg.MaxBytes = maxBytes
	w := &tide{t: t, index: prefix.New(cfg), rnd: rand.New(rand.NewPCG(seed, 1)), seqs: make([]event.Seq, sources)}
	for i := range sources {
		w.held = append(w.held, make(map[int]map[copyKey]uint32))
		w.index.Tell(&event.Status{Source: w.source(i), Epoch: 1, State: event.StateLive})
	}
	for range prompts {
		chain, p := make([]event.PrefixHash, tideBlocks), event.PrefixHash(0)
		for j := range chain {
			p = event.Chain(p, w.rnd.Uint64())
			chain[j] = p
		}
		w.chains = append(w.chains, chain)
	}
	return w
}

func (w *tide) source(i int) event.Source { return engine(fmt.Sprintf("e%d", i)) }

// hash is what a source calls a block of a prompt; every other block has two names.
func (w *tide) hash(source, prompt, block, name int) uint64 {
	return event.LocalHash([]uint32{uint32(source), uint32(prompt), uint32(block), uint32(name)}, 0)
}

func (w *tide) apply(source int, ev event.Event) {
	w.t.Helper()
	ev.BlockSize = 16
	b := event.Batch{First: w.seqs[source], Last: w.seqs[source], Way: event.Live, Rank: -1, Events: []event.Event{ev}}
	w.seqs[source]++
	m := &event.Message{Source: w.source(source), Epoch: 1, Batches: []event.Batch{b}}
	if _, err := w.index.Apply(context.Background(), m); err != nil {
		w.t.Fatal(err)
	}
	if w.seqs[source]%16 == 0 {
		sound(w.t, w.index)
	}
}

// tier is where a block goes, or goes from.
func (w *tide) tier() event.Tier {
	if w.rnd.IntN(4) == 0 {
		return event.CPU
	}
	return event.GPU
}

// store stores a prompt's first blocks, under one of two names.
func (w *tide) store(source, prompt int) {
	name, n := w.rnd.IntN(2), 1+w.rnd.IntN(tideBlocks)
	ev := event.Event{Kind: event.Stored, Tier: w.tier(), Group: event.NoGroup}
	at := w.held[source][prompt]
	if at == nil {
		at = make(map[copyKey]uint32)
		w.held[source][prompt] = at
	}
	for j := range n {
		h := w.hash(source, prompt, j, name*(j%2))
		at[copyKey{h, ev.Tier}]++
		ev.Blocks = append(ev.Blocks, event.Block{Hash: event.IntHash(h), Prefix: w.chains[prompt][j], Effect: +1})
	}
	w.apply(source, ev)
}

// evict takes all copies of some blocks of a prompt out of a tier, or of all out of both.
func (w *tide) evict(source, prompt int, all bool) {
	at := w.held[source][prompt]
	tiers := []event.Tier{w.tier()}
	if all {
		tiers = []event.Tier{event.CPU, event.GPU}
	}
	for _, tier := range tiers {
		ev := event.Event{Kind: event.Evicted, Tier: tier, Group: event.NoGroup}
		for j := range tideBlocks {
			for name := range 1 + j%2 {
				k := copyKey{w.hash(source, prompt, j, name), tier}
				if !all && w.rnd.IntN(3) == 0 {
					continue
				}
				for range at[k] {
					ev.Blocks = append(ev.Blocks, event.Block{Hash: event.IntHash(k.hash), Prefix: w.chains[prompt][j], Effect: -1})
				}
				delete(at, k)
			}
		}
		w.apply(source, ev)
	}
	if len(at) == 0 {
		delete(w.held[source], prompt)
	}
}

// turn stores with a likelihood, and evicts otherwise.
func (w *tide) turn(steps int, storing float64) {
	for range steps {
		source, prompt := w.rnd.IntN(len(w.held)), w.rnd.IntN(len(w.chains))
		if w.rnd.Float64() < storing {
			w.store(source, prompt)
		} else {
			w.evict(source, prompt, w.rnd.IntN(4) > 0)
		}
	}
}

// holds is how much of a prompt a source holds.
func (w *tide) holds(source, prompt int) (n uint32) {
	at := w.held[source][prompt]
	for ; n < tideBlocks; n++ {
		held := false
		for name := range 1 + n%2 {
			h := w.hash(source, prompt, int(n), int(name))
			held = held || at[copyKey{h, event.GPU}] > 0 || at[copyKey{h, event.CPU}] > 0
		}
		if !held {
			break
		}
	}
	return n
}

// check compares everything; where blocks were left out, answers may be shorter.
func (w *tide) check(exact bool) {
	sound(w.t, w.index)
	w.t.Helper()
	r := w.index.NewReader()
	for prompt := range w.chains {
		scores, err := r.Scores(&prefix.Request{Model: "m", Hashes: w.chains[prompt]})
		if err != nil {
			w.t.Fatal(err)
		}
		got := make(map[string]uint32)
		for _, s := range scores {
			got[s.Source.Instance] = s.Blocks
		}
		for source := range w.held {
			n, want := got[w.source(source).Instance], w.holds(source, prompt)
			if n > want || exact && n != want {
				w.t.Fatalf("prompt %d in source %d: %d blocks, want %d", prompt, source, n, want)
			}
		}
	}
	for source := range w.held {
		copies, seen := make(map[copyKey]uint32), 0
		for prompt := range w.held[source] {
			for h, n := range w.held[source][prompt] {
				copies[h] = n
			}
		}
		for e := range w.index.Resident(w.source(source)) {
			n, _ := e.Hash.Int()
			if want := copies[copyKey{n, e.Tier}]; e.Copies != want && (exact || e.Copies > want) || e.Prefix == 0 {
				w.t.Fatalf("source %d: block %v (%v) has %d copies in %s, want %d", source, e.Hash, e.Prefix, e.Copies, e.Tier, want)
			}
			seen++
		}
		if exact && seen != len(copies) {
			w.t.Fatalf("source %d: %d blocks, want %d", source, seen, len(copies))
		}
	}
}

// What shrinks gives its memory back, and stays exact while its blocks move.
func TestCompaction(t *testing.T) {
	for seed := range uint64(3) {
		w := newTide(t, 3, 400, 0, seed)
		w.turn(4000, 0.9)
		w.check(true)
		full := w.index.Bytes()
		w.turn(3000, 0.1)
		w.check(true)
		for range 3000 {
			w.index.Tell(&event.Status{Source: w.source(0), Epoch: 1, State: event.StateLive}) // time goes on
		}
		w.check(true)
		if left := w.index.Bytes(); left.Used() > full.Used()*2/3 {
			t.Errorf("seed %d: %+v when full, %+v with few blocks left", seed, full, left)
		}
		w.turn(2000, 0.6)
		w.check(true)
	}
}

// Beyond the bound blocks are left out, answers get shorter and never too long, and all is exact again when what was left out is evicted.
func TestBoundOfMemory(t *testing.T) {
	const bound = 400 << 10
	w := newTide(t, 3, 500, bound, 7)
	w.turn(6000, 0.9)
	w.check(false)
	if b := w.index.Bytes(); b.Used() > bound*5/4 {
		t.Errorf("%+v, bound %d", b, bound)
	}
	infos := w.index.Sources()
	if infos[0].State != event.StatePartial || infos[0].LeftOut == 0 {
		t.Errorf("a source with blocks left out is %s (%s), left out %d", infos[0].State, infos[0].Reason, infos[0].LeftOut)
	}
	for source := range w.held {
		for prompt := range w.chains {
			w.evict(source, prompt, true)
		}
	}
	if infos := w.index.Sources(); infos[0].State != event.StateLive || infos[0].LeftOut != 0 {
		t.Errorf("an empty source is %s (%s), left out %d", infos[0].State, infos[0].Reason, infos[0].LeftOut)
	}
	w.turn(100, 1)
	w.check(true)
}

// The blocks that are asked for stay.
func TestBoundKeepsWhatIsUsed(t *testing.T) {
	w := newTide(t, 1, 2000, 300<<10, 9)
	r := w.index.NewReader()
	w.store(0, 0)
	want := w.holds(0, 0)
	for prompt := 1; prompt < 2000; prompt++ {
		w.store(0, prompt)
		scores, err := r.Scores(&prefix.Request{Model: "m", Hashes: w.chains[0]})
		if err != nil || len(scores) != 1 || scores[0].Blocks != want {
			t.Fatalf("after %d prompts: %+v, %v; want %d blocks", prompt, scores, err, want)
		}
	}
}

// Readers see states that existed while blocks move, are left out and swept: a prompt that is stored and never evicted stays whole.
func TestReadersWhileBlocksMove(t *testing.T) {
	w := newTide(t, 2, 300, 0, 11)
	w.store(0, 0)
	want := w.holds(0, 0)
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	defer cancel()
	done := make(chan error, 2)
	for range cap(done) {
		go func() {
			r := w.index.NewReader()
			for ctx.Err() == nil {
				scores, err := r.Scores(&prefix.Request{Model: "m", Hashes: w.chains[0]})
				if err != nil || len(scores) != 1 || scores[0].Blocks != want {
					done <- fmt.Errorf("%+v, %w; want %d blocks", scores, err, want)
					cancel()
					return
				}
			}
			done <- nil
		}()
	}
	for n := 0; ctx.Err() == nil; n++ {
		for range 50 {
			if source, prompt := w.rnd.IntN(2), 1+w.rnd.IntN(299); w.rnd.IntN(100) < []int{95, 5}[n/40%2] {
				w.store(source, prompt)
			} else {
				w.evict(source, prompt, true)
			}
		}
		if n%100 == 99 { // the other source begins anew
			w.apply(1, event.Event{Kind: event.Cleared})
			clear(w.held[1])
		}
	}
	for range cap(done) {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
	w.check(true)
}

// While chunks are left, checkpoints are read: what is not shown yet knows numbers, too.
func TestCompactionBesideRestores(t *testing.T) {
	w := newTide(t, 3, 400, 0, 13)
	pub := newPublisher(engine("r"), false)
	text := prompt(1, 3000)
	pub.message(t, []event.Event{text.stored(event.GPU, 0, text.len())})
	object := pub.checkpoint(t).Bytes()
	w.index.Tell(pub.status(event.StateLive, ""))
	for round := range 6 {
		w.turn(700, 0.9)
		halting := &haltingReader{data: object, between: func() { w.turn(12, []float64{0.1, 0.9}[round%2]) }}
		if _, err := w.index.Restore(t.Context(), halting); err != nil {
			t.Fatal(err)
		}
		w.turn(900, 0.1)
	}
	w.check(true)
	a := lookup(t, w.index, &prefix.Request{Model: "m", Tokens: text.tokens})
	if i := slices.IndexFunc(a.Matches, func(m prefix.Match) bool { return m.Source == pub.source }); i < 0 || a.Matches[i].Blocks != text.len() {
		t.Errorf("the source that was read again and again: %+v", a.Matches)
	}
}

// haltingReader gives little at a time, and something happens in between.
type haltingReader struct {
	data    []byte
	between func()
}

func (r *haltingReader) Read(b []byte) (int, error) {
	if len(r.data) == 0 {
		return 0, io.EOF
	}
	r.between()
	n := copy(b[:min(len(b), 1000)], r.data)
	r.data = r.data[n:]
	return n, nil
}
