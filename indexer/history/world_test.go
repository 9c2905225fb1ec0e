package history_test

import (
	"bytes"
	"cmp"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"kvstrata/event"
	"kvstrata/event/resident"
)

// world is a fleet and the bus streams that it wrote: what a writer of history may meet.
type world struct {
	*rand.Rand
	pubs  []*publisher
	lives [][]*item // of the bus stream: each loses what was before it
	now   time.Time
	seq   uint64
	whole bool // nothing is dropped, so that nobody goes on from a checkpoint
}

// item is one message of a bus stream.
type item struct {
	message *event.Message
	status  *event.Status
	at      event.Position
}

// publisher is the publisher of one source.
type publisher struct {
	source event.Source
	bytes  bool // hashes are of 32 bytes
	set    *resident.Set
	epoch  event.Epoch
	fence  event.Fence
	seq    event.Seq
	ledger event.Ledger
	next   uint64 // names blocks
	known  []uint64
	lost   []uint64 // parents that nobody told yet
	store  []checkpoint
	sent   []*event.Message
}

// checkpoint is an object in the store.
type checkpoint struct {
	event.Checkpoint
	object []byte
}

// newWorld makes streams of some items each. The committed times cross midnight.
func newWorld(seed uint64, lives, items int) *world {
	w := &world{Rand: rand.New(rand.NewPCG(seed, 1))}
	w.fill(seed, lives, items)
	return w
}

// newWholeWorld makes one stream of which nothing is dropped.
func newWholeWorld(seed uint64, items int) *world {
	w := &world{Rand: rand.New(rand.NewPCG(seed, 1)), whole: true}
	w.fill(seed, 1, items)
	return w
}

func (w *world) fill(seed uint64, lives, items int) {
	w.now = time.Now().UTC().Truncate(24 * time.Hour).Add(-24*time.Hour - 20*time.Second)
	for i := range 4 {
		w.pubs = append(w.pubs, &publisher{
			source: event.Source{
				Cluster: fmt.Sprint("seed", seed), Model: "m/mo.del", Instance: fmt.Sprint("e", i/2), Rank: uint32(i % 2), Origin: event.Engine,
			},
			bytes: i == 3, set: resident.New(resident.DefaultConfig()), epoch: 100, fence: 1, seq: event.Seq(i % 2),
		})
	}
	created := event.UnixTime(time.Now())
	for range lives {
		created++
		w.seq = 0
		var list []*item
		put := func(i *item) {
			w.seq++
			w.now = w.now.Add(time.Duration(w.IntN(2000)) * time.Millisecond)
			i.at = event.Position{Stream: "KV_EVENTS", Created: created, Sequence: w.seq}
			if i.message != nil {
				m := *i.message
				m.Position, m.Stored = i.at, event.UnixTime(w.now)
				i.message = &m
			}
			list = append(list, i)
		}
		for len(list) < items {
			w.publish(w.pubs[w.IntN(len(w.pubs))], put)
		}
		w.lives = append(w.lives, list)
		for _, p := range w.pubs {
			p.checkpoint(w) // the stream's identity changes
		}
	}
}

// publish makes what a source tells next.
func (w *world) publish(p *publisher, put func(*item)) {
	switch w.IntN(12) {
	case 0: // a new life
		p.epoch += event.Epoch(1 + w.IntN(3))
		p.fence += event.Fence(w.IntN(2))
		p.seq, p.ledger, p.known, p.lost, p.sent = event.Seq(w.IntN(2)), event.Ledger{}, nil, nil, nil
		p.set.Reset()
		if w.IntN(2) == 0 {
			p.checkpoint(w)
		}
		return
	case 1:
		put(&item{status: &event.Status{
			Source: p.source, Epoch: p.epoch, Fence: p.fence, Seq: p.seq, State: event.State(1 + w.IntN(5)), Reason: "because",
		}})
		return
	case 2: // what was not acknowledged is sent again
		for _, m := range p.sent[max(0, len(p.sent)-1-w.IntN(3)):] {
			put(&item{message: m})
		}
		return
	}
	m := &event.Message{Source: p.source, Epoch: p.epoch, Fence: p.fence}
	dropped := false
	for range 1 + w.IntN(3) {
		b := event.Batch{First: p.seq, Last: p.seq, Way: event.Live, Rank: -1}
		b.Time = event.UnixTime(w.now.Add(-time.Duration(w.IntN(1e9))))
		b.Received = b.Time + event.Time(w.IntN(1e6))
		what := w.IntN(20)
		if w.whole && what == 1 {
			what = 4
		}
		switch what {
		case 0, 2, 3: // lost
			b.Last += event.Seq(w.IntN(5))
			b.Way, b.Reason = event.Lost, "no replay"
			b.Events = []event.Event{{Kind: event.Cleared, Cause: event.ByResync, Group: event.NoGroup, LoRAID: event.NoLoRAID}}
			p.set.Judge(&b)
		case 1: // judged, and never sent
			for range 1 + w.IntN(4) {
				gone := event.Batch{First: b.Last, Last: b.Last, Way: event.Live, Time: b.Time, Events: w.events(p)}
				p.set.Judge(&gone)
				b.Last++
			}
			b.Last--
			b.Way, b.Reason = event.Dropped, "no room"
			dropped = true
		default:
			b.Events = w.events(p)
			p.set.Judge(&b)
			for i := range b.Events {
				b.Events[i].Blocks = slices.Clone(b.Events[i].Blocks)
			}
		}
		p.ledger.Count(&b)
		p.ledger.Started = true
		p.seq = b.Last + 1
		m.Batches = append(m.Batches, b)
	}
	m.Digest, m.HasDigest = p.set.Digest(), true
	p.sent = append(p.sent, m)
	put(&item{message: m})
	if dropped || w.IntN(10) == 0 {
		p.checkpoint(w)
	}
}

func (p *publisher) hash(n uint64) event.BlockHash {
	if !p.bytes {
		return event.IntHash(n)
	}
	return event.BytesHash(fmt.Sprintf("%08x-%023d", n, n))
}

// events makes what an engine tells in one batch.
func (w *world) events(p *publisher) []event.Event {
	var list []event.Event
	for range w.IntN(4) {
		ev := event.Event{
			Tier: []event.Tier{event.GPU, event.GPU, event.CPU}[w.IntN(3)], Group: event.Group(w.IntN(3) - 1), LoRAID: event.NoLoRAID,
		}
		some := func(list []uint64) {
			for range 1 + w.IntN(4) {
				ev.Blocks = append(ev.Blocks, event.Block{Hash: p.hash(list[w.IntN(len(list))]), Copies: -1, Age: -1})
			}
		}
		switch kind := w.IntN(10); {
		case kind == 0:
			ev = event.Event{Kind: event.Cleared, Cause: event.ByEngine, Group: event.NoGroup, LoRAID: event.NoLoRAID}
		case kind < 4 && len(p.known) > 0:
			ev.Kind = event.Evicted
			some(p.known)
		case kind == 4 && len(p.known) > 0:
			ev.Kind = event.Loaded
			some(p.known)
			ev.Load = event.Load{From: event.CPU, Peer: "p\\'", Request: "r", Bytes: w.Uint64N(1e9), Duration: time.Duration(w.IntN(1e9))}
		default:
			w.stored(p, &ev)
		}
		list = append(list, ev)
	}
	return list
}

func (w *world) stored(p *publisher, ev *event.Event) {
	ev.Kind, ev.BlockSize, ev.Spec = event.Stored, 4, event.SpecFull
	n := 1 + w.IntN(4)
	fresh := func() uint64 { p.next++; return p.next }
	var run []uint64
	switch w.IntN(5) {
	case 0, 1:
	case 2: // its parent was not told yet
		parent := fresh()
		p.lost = append(p.lost, parent)
		ev.HasParent, ev.Parent = true, p.hash(parent)
	case 3: // the parent of earlier ones
		if len(p.lost) > 0 {
			run = append(run, p.lost[0])
			p.lost = p.lost[1:]
		}
	case 4:
		if len(p.known) > 0 {
			ev.HasParent, ev.Parent = true, p.hash(p.known[w.IntN(len(p.known))])
		}
	}
	for len(run) < n {
		if len(p.known) > 0 && w.IntN(3) == 0 {
			run = append(run, p.known[w.IntN(len(p.known))]) // a second copy, or anew
		} else {
			run = append(run, fresh())
		}
	}
	for _, h := range run {
		ev.Blocks = append(ev.Blocks, event.Block{Hash: p.hash(h), Copies: -1, Age: -1})
		for range 4 {
			ev.Tokens = append(ev.Tokens, uint32(h))
		}
	}
	p.known = append(p.known, run...)
	if w.IntN(8) == 0 {
		ev.Tokens = nil // nothing to hash
	}
}

// checkpoint puts the source's state into the store.
func (p *publisher) checkpoint(w *world) {
	snap := p.set.Snapshot()
	defer snap.Release()
	cp := checkpoint{Checkpoint: event.Checkpoint{
		Source: p.source, Epoch: p.epoch, Fence: p.fence, State: event.StateLive, Written: event.UnixTime(w.now) + event.Time(len(p.store)),
		Digest: snap.Digest, Ledger: p.ledger.Clone(), Entries: snap.Len, Fullest: snap.Fullest, Groups: snap.Groups,
	}}
	if p.ledger.Started {
		cp.Seq = p.seq - 1
	}
	var object bytes.Buffer
	if err := event.WriteCheckpoint(&object, &cp.Checkpoint, snap.Entries()); err != nil {
		panic(err)
	}
	cp.object = object.Bytes()
	p.store = append(p.store, cp)
}

// point is a place in a source's story; the zero value is before everything.
type point struct {
	epoch event.Epoch
	next  event.Seq // 0 = nothing of this life
}

func (p point) compare(q point) int {
	return cmp.Or(cmp.Compare(p.epoch, q.epoch), cmp.Compare(p.next, q.next))
}

func pointOf(m event.Mark) point {
	if !m.Started {
		return point{epoch: m.Epoch}
	}
	return point{m.Epoch, m.Seq + 1}
}

// step is one thing that was handed to the writer: a batch, or a checkpoint behind a jump.
type step struct {
	from, to point
	batch    *event.Batch
	m        *event.Message
}

// foldHash is a hash as rows have it.
func foldHash(h event.BlockHash) string { return (h.String() + strings.Repeat("0", 16))[:16] }

// The naive model of the tables: a line a row.
func blockLines(m *event.Message, b *event.Batch) (lines []string) {
	for i := range b.Events {
		ev := &b.Events[i]
		line := func(pos int, hash, named, engineHash, parent string, effect int8, copies int32, age int64) {
			lines = append(lines, spaced(
				m.Source.Tokens(), m.Epoch, b.First, i, pos, ev.Kind, ev.Cause, ev.Tier, ev.Group, hash, named, engineHash, parent, effect, copies, age,
				ev.BlockSize, m.Stored/1e9))
		}
		if ev.Kind == event.Cleared {
			line(0, foldHash(event.BlockHash{}), "0", foldHash(event.BlockHash{}), foldHash(event.BlockHash{}), 0, -1, -1)
		}
		for j, bl := range ev.Blocks {
			hash, named, parent, copies, age := foldHash(bl.Hash), "0", foldHash(event.BlockHash{}), int32(-1), int64(-1)
			if bl.Prefix != 0 && !ev.Unrooted {
				hash, named = fmt.Sprintf("%016x", uint64(bl.Prefix)), "1"
			}
			if j == 0 && ev.HasParent {
				parent = foldHash(ev.Parent)
			}
			if ev.Kind == event.Evicted {
				copies = bl.Copies
				if bl.Age >= 0 {
					age = bl.Age.Milliseconds()
				}
			}
			line(j, hash, named, foldHash(bl.Hash), parent, bl.Effect, copies, age)
		}
	}
	return lines
}

func batchLines(m *event.Message, b *event.Batch) []string {
	if len(b.Events) == 0 {
		return nil
	}
	return []string{spaced(m.Source.Tokens(), m.Epoch, b.First, b.Last, b.Way, b.Blocks(), m.Position.Created, m.Position.Sequence,
		m.Stored/1000, b.Received/1000, b.Time/1000)}
}

func loadLines(m *event.Message, b *event.Batch) (lines []string) {
	for i := range b.Events {
		if ev := &b.Events[i]; ev.Kind == event.Loaded {
			lines = append(lines, spaced(m.Source.Tokens(), m.Epoch, b.First, i, ev.Load.From, ev.Tier, ev.Load.Peer, ev.Load.Request,
				len(ev.Blocks), ev.Load.Bytes, ev.Load.Duration.Microseconds(), m.Position.Created, m.Position.Sequence, m.Stored/1000))
		}
	}
	return lines
}

func lostLines(m *event.Message, b *event.Batch) []string {
	if b.Way != event.Lost {
		return nil
	}
	return []string{spaced(m.Source.Tokens(), m.Epoch, b.First, b.Last, b.Way, b.Reason, m.Position.Created, m.Position.Sequence, m.Stored/1000)}
}

func lifeLine(m *event.Message, first event.Seq) string {
	return spaced(m.Source.Tokens(), m.Epoch, first, first, "life", "", m.Position.Created, m.Position.Sequence, m.Stored/1000)
}

// The tables themselves, as lines of the same form.
var tableLines = map[string]string{
	"block_events": `SELECT concat(source, ' ', epoch, ' ', seq, ' ', ev, ' ', pos, ' ', op, ' ', cause, ' ', tier, ' ', kv_group, ' ', leftPad(lower(hex(hash)), 16, '0'), ' ',
  named, ' ', leftPad(lower(hex(engine_hash)), 16, '0'), ' ', leftPad(lower(hex(run_parent)), 16, '0'), ' ', effect, ' ', copies, ' ', age_ms, ' ', block_size, ' ',
  toUnixTimestamp(committed)) FROM block_events`,
	"batches": `SELECT concat(source, ' ', epoch, ' ', seq, ' ', last, ' ', way, ' ', blocks, ' ', stream, ' ', stream_seq, ' ',
  toUnixTimestamp64Micro(committed), ' ', toUnixTimestamp64Micro(received), ' ', toUnixTimestamp64Micro(source_time)) FROM batches`,
	"loads": `SELECT concat(source, ' ', epoch, ' ', seq, ' ', ev, ' ', from_tier, ' ', tier, ' ', peer, ' ', request, ' ', blocks, ' ', bytes, ' ', duration_us, ' ',
  stream, ' ', stream_seq, ' ', toUnixTimestamp64Micro(committed)) FROM loads`,
	"ledger": `SELECT concat(source, ' ', epoch, ' ', seq, ' ', last, ' ', kind, ' ', reason, ' ', stream, ' ', stream_seq, ' ',
  toUnixTimestamp64Micro(committed)) FROM (SELECT * FROM ledger WHERE kind IN ('lost', 'dropped', 'life'))`,
}

// spaced makes a line of values, as the tables' are made.
func spaced(parts ...any) string {
	texts := make([]string, len(parts))
	for i, p := range parts {
		texts[i] = fmt.Sprint(p)
	}
	return strings.Join(texts, " ")
}

func tableOf(t testing.TB, e *engine, table, cluster string) []string {
	t.Helper()
	rows, err := connect(t, e.config()).Query(t.Context(), tableLines[table]+" WHERE startsWith(source, '"+cluster+".')")
	if err != nil {
		t.Fatal(err)
	}
	defer rows.Close()
	var lines []string
	for rows.Next() {
		var line string
		if err := rows.Scan(&line); err != nil {
			t.Fatal(err)
		}
		lines = append(lines, line)
	}
	if err := rows.Err(); err != nil {
		t.Fatal(err)
	}
	slices.Sort(lines)
	return lines
}
