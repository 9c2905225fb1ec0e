package history

import (
	"slices"
	"strings"
	"time"

	"kvstrata/event"
)

// column is one column of rows to insert.
type column struct {
	name   string
	typ    string // that values are sent as; ClickHouse makes the table's type of it
	values any    // a slice with a value a row, or seconds, micros, days, or words
}

// seconds are moments in whole seconds of Unix time.
type seconds []uint32

// days are one day, given in days since 1970, in so many rows.
type days struct {
	day  uint16
	rows int
}

// micros are moments in microseconds of Unix time: a third of the memory of [time.Time], and nothing for the collector.
type micros []int64

// words are texts that are often the same, by their numbers in a dictionary.
type words struct {
	ids   []uint32
	texts []string
}

// lists are a list a row, one behind the other.
type lists[T any] struct {
	ends   []uint64 // where each list ends
	values []T
}

func (l *lists[T]) reset() { l.ends, l.values = l.ends[:0], l.values[:0] }

// expand returns the lists one by one.
func (l lists[T]) expand() [][]T {
	all := make([][]T, len(l.ends))
	from := uint64(0)
	for i, end := range l.ends {
		all[i], from = l.values[from:end], end
	}
	return all
}

// dictionary numbers texts.
type dictionary struct {
	ids   map[string]uint32
	texts []string
}

func (d *dictionary) id(text string) uint32 {
	id, ok := d.ids[text]
	if !ok {
		if d.ids == nil {
			d.ids = make(map[string]uint32)
		}
		id = uint32(len(d.texts))
		d.ids[text] = id
		d.texts = append(d.texts, text)
	}
	return id
}

// expand returns a column's values as the client library takes them.
func expand(values any) any {
	switch v := values.(type) {
	case seconds:
		all := make([]time.Time, len(v))
		for i, at := range v {
			all[i] = time.Unix(int64(at), 0)
		}
		return all
	case days:
		return slices.Repeat([]time.Time{time.Unix(86400*int64(v.day), 0).UTC()}, v.rows)
	case micros:
		all := make([]time.Time, len(v))
		for i, us := range v {
			all[i] = time.UnixMicro(us)
		}
		return all
	case words:
		all := make([]string, len(v.ids))
		for i, id := range v.ids {
			all[i] = v.texts[id]
		}
		return all
	case lists[uint64]:
		return v.expand()
	case lists[uint32]:
		return v.expand()
	case lists[uint8]:
		return v.expand()
	}
	return values
}

// Types of columns. A LowCardinality one is sent as text, an enumeration as its numbers: the client library looks up each
// value of these by reflection.
const (
	microseconds = "DateTime64(6, 'UTC')"
	wholeSeconds = "DateTime('UTC')"
	date         = "Date"
	text         = "String"
	u8, u32, u64 = "UInt8", "UInt32", "UInt64"
	u8s, u32s    = "Array(UInt8)", "Array(UInt32)"
	u64s         = "Array(UInt64)"
	i8, i32, i64 = "Int8", "Int32", "Int64"
)

const microsecondsFormat = "2006-01-02 15:04:05.000000"

// place is where a row's message stands in the stream.
type place struct {
	committed time.Time
	stream    int64
	seq       uint64
}

// batchRows are rows of batches: what all rows of a batch have in common.
type batchRows struct {
	sources, ways                   dictionary
	committed, received, sourceTime micros
	stream                          []int64
	streamSeq, epoch, seq, last     []uint64
	source, way, blocks             []uint32
	runEv                           lists[uint32]
	runStart, runPrefix             lists[uint64]
	runRoot                         lists[uint8]
}

func (r *batchRows) len() int { return len(r.seq) }

func (r *batchRows) columns() []column {
	return []column{
		{"committed", microseconds, r.committed},
		{"received", microseconds, r.received},
		{"source_time", microseconds, r.sourceTime},
		{"stream", i64, r.stream},
		{"stream_seq", u64, r.streamSeq},
		{"source", text, words{r.source, r.sources.texts}},
		{"epoch", u64, r.epoch},
		{"seq", u64, r.seq},
		{"last", u64, r.last},
		{"way", text, words{r.way, r.ways.texts}},
		{"blocks", u32, r.blocks},
		{"run_ev", u32s, r.runEv},
		{"run_start", u64s, r.runStart},
		{"run_prefix", u64s, r.runPrefix},
		{"run_root", u8s, r.runRoot},
	}
}

func (r *batchRows) reset() {
	r.runEv.reset()
	r.runStart.reset()
	r.runPrefix.reset()
	r.runRoot.reset()
	*r = batchRows{
		runEv: r.runEv, runStart: r.runStart, runPrefix: r.runPrefix, runRoot: r.runRoot,
		committed: r.committed[:0], received: r.received[:0], sourceTime: r.sourceTime[:0], stream: r.stream[:0], streamSeq: r.streamSeq[:0],
		epoch: r.epoch[:0], seq: r.seq[:0], last: r.last[:0], source: r.source[:0], way: r.way[:0], blocks: r.blocks[:0],
	}
}

func (r *batchRows) add(at place, source string, epoch event.Epoch, b *event.Batch) {
	r.committed = append(r.committed, at.committed.UnixMicro())
	r.received = append(r.received, int64(max(b.Received, 0)/1000))
	r.sourceTime = append(r.sourceTime, int64(max(b.Time, 0)/1000))
	r.stream = append(r.stream, at.stream)
	r.streamSeq = append(r.streamSeq, at.seq)
	r.source = append(r.source, r.sources.id(source))
	r.epoch = append(r.epoch, uint64(epoch))
	r.seq = append(r.seq, uint64(b.First))
	r.last = append(r.last, uint64(b.Last))
	r.way = append(r.way, r.ways.id(b.Way.String()))
	r.blocks = append(r.blocks, uint32(b.Blocks()))
}

// runs tells of which runs of stored blocks the rows of batches are, from one on: those in a message's rows of block_events from one on,
// which are of the same batches, or of more.
func (r *batchRows) runs(from int, blocks *blockRows, fromBlock int) {
	i := fromBlock
	for batch := from; batch < r.len(); batch++ {
		for ; i < blocks.len() && blocks.seq[i] <= r.seq[batch]; i++ {
			if blocks.seq[i] < r.seq[batch] || blocks.pos[i] != 0 || blocks.op[i] != int8(event.Stored) {
				continue
			}
			root := uint8(0)
			if blocks.runParent[i] == 0 {
				root = 1
			}
			r.runEv.values = append(r.runEv.values, blocks.ev[i])
			r.runStart.values = append(r.runStart.values, blocks.hash[i])
			r.runPrefix.values = append(r.runPrefix.values, blocks.runPrefix[i])
			r.runRoot.values = append(r.runRoot.values, root)
		}
		end := uint64(len(r.runEv.values))
		r.runEv.ends, r.runStart.ends = append(r.runEv.ends, end), append(r.runStart.ends, end)
		r.runPrefix.ends, r.runRoot.ends = append(r.runPrefix.ends, end), append(r.runRoot.ends, end)
	}
}

// blockRows are rows of block_events, by column.
type blockRows struct {
	sources, tiers              dictionary
	committed                   seconds
	source, tier                []uint32
	epoch, seq                  []uint64
	ev, pos, blockSize          []uint32
	op, cause, effect           []int8
	group, copies               []int32
	hash, engineHash, runParent []uint64
	runPrefix                   []uint64 // told by the lineage
	named                       []uint8
	age                         []int64
}

func (r *blockRows) len() int { return len(r.hash) }

func (r *blockRows) columns() []column {
	return []column{
		{"committed", wholeSeconds, r.committed},
		{"source", text, words{r.source, r.sources.texts}},
		{"epoch", u64, r.epoch},
		{"seq", u64, r.seq},
		{"ev", u32, r.ev},
		{"pos", u32, r.pos},
		{"op", i8, r.op},
		{"cause", i8, r.cause},
		{"tier", text, words{r.tier, r.tiers.texts}},
		{"kv_group", i32, r.group},
		{"hash", u64, r.hash},
		{"named", u8, r.named},
		{"engine_hash", u64, r.engineHash},
		{"run_parent", u64, r.runParent},
		{"run_prefix", u64, r.runPrefix},
		{"effect", i8, r.effect},
		{"copies", i32, r.copies},
		{"age_ms", i64, r.age},
		{"block_size", u32, r.blockSize},
	}
}

func (r *blockRows) reset() {
	*r = blockRows{
		committed: r.committed[:0], source: r.source[:0], tier: r.tier[:0], epoch: r.epoch[:0], seq: r.seq[:0],
		ev: r.ev[:0], pos: r.pos[:0], blockSize: r.blockSize[:0], op: r.op[:0], cause: r.cause[:0], effect: r.effect[:0],
		group: r.group[:0], copies: r.copies[:0], hash: r.hash[:0], engineHash: r.engineHash[:0],
		runParent: r.runParent[:0], runPrefix: r.runPrefix[:0], named: r.named[:0], age: r.age[:0],
	}
}

// add appends the rows of a batch's n-th event: a row a block, or one row for a CLEARED.
func (r *blockRows) add(at place, source string, epoch event.Epoch, b *event.Batch, n int) {
	ev := &b.Events[n]
	blocks := ev.Blocks
	if ev.Kind == event.Cleared {
		blocks = []event.Block{{Copies: -1, Age: -1}}
	}
	committed := uint32(at.committed.Unix())
	from, tier := r.sources.id(source), r.tiers.id(string(ev.Tier))
	for i := range blocks {
		block := &blocks[i]
		engineHash := Fold(block.Hash)
		hash, named := uint64(block.Prefix), uint8(1)
		if block.Prefix == 0 || ev.Unrooted {
			hash, named = engineHash, 0
		}
		parent := uint64(0)
		if i == 0 && ev.HasParent {
			parent = Fold(ev.Parent)
		}
		age := int64(-1)
		if ev.Kind == event.Evicted && block.Age >= 0 {
			age = block.Age.Milliseconds()
		}
		copies := int32(-1)
		if ev.Kind == event.Evicted {
			copies = block.Copies
		}
		r.committed = append(r.committed, committed)
		r.source = append(r.source, from)
		r.epoch = append(r.epoch, uint64(epoch))
		r.seq = append(r.seq, uint64(b.First))
		r.ev = append(r.ev, uint32(n))
		r.pos = append(r.pos, uint32(i))
		r.op = append(r.op, int8(ev.Kind))
		r.cause = append(r.cause, int8(ev.Cause))
		r.tier = append(r.tier, tier)
		r.group = append(r.group, int32(ev.Group))
		r.hash = append(r.hash, hash)
		r.named = append(r.named, named)
		r.engineHash = append(r.engineHash, engineHash)
		r.runParent = append(r.runParent, parent)
		r.runPrefix = append(r.runPrefix, 0)
		r.effect = append(r.effect, block.Effect)
		r.copies = append(r.copies, copies)
		r.age = append(r.age, age)
		r.blockSize = append(r.blockSize, ev.BlockSize)
	}
}

// Fold returns a hash in 64 bits: integers and 8-byte hashes as they are, of longer ones the first 8 bytes, shorter ones
// filled up with zeros.
func Fold(h event.BlockHash) uint64 {
	if n, ok := h.Int(); ok {
		return n
	}
	var room [32]byte
	b := h.AppendTo(room[:0])
	n := uint64(0)
	for i := range 8 {
		n <<= 8
		if i < len(b) {
			n |= uint64(b[i])
		}
	}
	return n
}

// stamp returns a time for a column; unknown ones are 1970.
func stamp(t event.Time) time.Time { return time.Unix(0, int64(max(t, 0))) }

// loadRows are rows of loads.
type loadRows struct {
	committed, sourceTime                  []time.Time
	stream                                 []int64
	streamSeq, epoch, seq, bytes, duration []uint64
	source, fromTier, tier, peer, request  []string
	ev, blocks                             []uint32
}

func (r *loadRows) len() int { return len(r.seq) }

func (r *loadRows) columns() []column {
	return []column{
		{"committed", microseconds, r.committed},
		{"stream", i64, r.stream},
		{"stream_seq", u64, r.streamSeq},
		{"source", text, r.source},
		{"epoch", u64, r.epoch},
		{"seq", u64, r.seq},
		{"ev", u32, r.ev},
		{"source_time", microseconds, r.sourceTime},
		{"from_tier", text, r.fromTier},
		{"tier", text, r.tier},
		{"peer", text, r.peer},
		{"request", text, r.request},
		{"blocks", u32, r.blocks},
		{"bytes", u64, r.bytes},
		{"duration_us", u64, r.duration},
	}
}

// add appends the row of a batch's n-th event, a LOADED.
func (r *loadRows) add(at place, source string, epoch event.Epoch, b *event.Batch, n int) {
	ev := &b.Events[n]
	r.committed = append(r.committed, at.committed)
	r.stream = append(r.stream, at.stream)
	r.streamSeq = append(r.streamSeq, at.seq)
	r.source = append(r.source, source)
	r.epoch = append(r.epoch, uint64(epoch))
	r.seq = append(r.seq, uint64(b.First))
	r.ev = append(r.ev, uint32(n))
	r.sourceTime = append(r.sourceTime, stamp(b.Time))
	r.fromTier = append(r.fromTier, string(ev.Load.From))
	r.tier = append(r.tier, string(ev.Tier))
	r.peer = append(r.peer, strings.Clone(ev.Load.Peer))
	r.request = append(r.request, strings.Clone(ev.Load.Request))
	r.blocks = append(r.blocks, uint32(len(ev.Blocks)))
	r.bytes = append(r.bytes, ev.Load.Bytes)
	r.duration = append(r.duration, uint64(max(ev.Load.Duration, 0).Microseconds()))
}

// ledgerRow is one row of ledger.
type ledgerRow struct {
	source, kind, state, reason string
	epoch                       event.Epoch
	first, last                 event.Seq
	snapshot                    event.Time
}

// ledgerRows are rows of ledger.
type ledgerRows struct {
	committed                   []time.Time
	stream, snapshot            []int64
	streamSeq, epoch, seq, last []uint64
	source, kind, state, reason []string
}

func (r *ledgerRows) len() int { return len(r.seq) }

func (r *ledgerRows) columns() []column {
	return []column{
		{"committed", microseconds, r.committed},
		{"stream", i64, r.stream},
		{"stream_seq", u64, r.streamSeq},
		{"source", text, r.source},
		{"epoch", u64, r.epoch},
		{"seq", u64, r.seq},
		{"last", u64, r.last},
		{"kind", text, r.kind},
		{"state", text, r.state},
		{"snapshot", i64, r.snapshot},
		{"reason", text, r.reason},
	}
}

func (r *ledgerRows) add(at place, row ledgerRow) {
	r.committed = append(r.committed, at.committed)
	r.stream = append(r.stream, at.stream)
	r.streamSeq = append(r.streamSeq, at.seq)
	r.source = append(r.source, row.source)
	r.epoch = append(r.epoch, uint64(row.epoch))
	r.seq = append(r.seq, uint64(row.first))
	r.last = append(r.last, uint64(row.last))
	r.kind = append(r.kind, row.kind)
	r.state = append(r.state, row.state)
	r.snapshot = append(r.snapshot, int64(row.snapshot))
	r.reason = append(r.reason, row.reason)
}

// snapshotChunk is how many rows of a snapshot are inserted at once: a checkpoint may hold many millions of blocks.
const snapshotChunk = 250_000

// snapshotRows are rows of snapshots: the resident entries of one checkpoint. They are only told from others once the
// ledger names their snapshot, so that they need not be inserted at once.
type snapshotRows struct {
	source     string
	committed  time.Time
	snapshot   event.Time
	epoch      event.Epoch
	seq        event.Seq
	hash       []uint64
	engineHash []uint64
	stored     []event.Time
	tier       []string
	group      []int32
	copies     []uint32
	named      []uint8
}

func (r *snapshotRows) len() int { return len(r.hash) }

// columns returns the columns of the rows from one to before another.
func (r *snapshotRows) columns(from, to int) []column {
	n := to - from
	stored := make([]time.Time, n)
	for i, at := range r.stored[from:to] {
		stored[i] = stamp(at)
	}
	return []column{
		{"committed", microseconds, slices.Repeat([]time.Time{r.committed}, n)},
		{"source", text, slices.Repeat([]string{r.source}, n)},
		{"epoch", u64, slices.Repeat([]uint64{uint64(r.epoch)}, n)},
		{"seq", u64, slices.Repeat([]uint64{uint64(r.seq)}, n)},
		{"snapshot", i64, slices.Repeat([]int64{int64(r.snapshot)}, n)},
		{"hash", u64, r.hash[from:to]},
		{"named", u8, r.named[from:to]},
		{"engine_hash", u64, r.engineHash[from:to]},
		{"tier", text, r.tier[from:to]},
		{"kv_group", i32, r.group[from:to]},
		{"copies", u32, r.copies[from:to]},
		{"stored", microseconds, stored},
	}
}

func (r *snapshotRows) add(e *event.Entry) {
	hash, named := uint64(e.Prefix), uint8(1)
	if e.Prefix == 0 {
		hash, named = Fold(e.Hash), 0
	}
	r.hash = append(r.hash, hash)
	r.named = append(r.named, named)
	r.engineHash = append(r.engineHash, Fold(e.Hash))
	r.tier = append(r.tier, string(e.Tier)) // the reader of a checkpoint makes each name once
	r.group = append(r.group, int32(e.Group))
	r.copies = append(r.copies, e.Copies)
	r.stored = append(r.stored, e.Stored)
}

// of says of which checkpoint the rows are, and when it was taken.
func (r *snapshotRows) of(cp *event.Checkpoint, now time.Time) {
	r.source, r.committed = cp.Source.Tokens(), now
	r.snapshot, r.epoch, r.seq = cp.Written, cp.Epoch, cp.Seq
}

// progressRows are rows of progress.
type progressRows struct {
	source, streamName                          []string
	round, streamSeq, fence, epoch, seq, digest []uint64
	committed                                   []time.Time
	stream                                      []int64
	started                                     []uint8
}

func (r *progressRows) columns() []column {
	return []column{
		{"source", text, r.source},
		{"round", u64, r.round},
		{"committed", microseconds, r.committed},
		{"stream_name", text, r.streamName},
		{"stream", i64, r.stream},
		{"stream_seq", u64, r.streamSeq},
		{"fence", u64, r.fence},
		{"epoch", u64, r.epoch},
		{"started", u8, r.started},
		{"seq", u64, r.seq},
		{"digest", u64, r.digest},
	}
}

func (r *progressRows) add(source string, round uint64, committed time.Time, at event.Position, m mark) {
	started := uint8(0)
	if m.Started {
		started = 1
	}
	r.source = append(r.source, source)
	r.round = append(r.round, round)
	r.committed = append(r.committed, committed)
	r.streamName = append(r.streamName, at.Stream)
	r.stream = append(r.stream, int64(at.Created))
	r.streamSeq = append(r.streamSeq, at.Sequence)
	r.fence = append(r.fence, uint64(m.Fence))
	r.epoch = append(r.epoch, uint64(m.Epoch))
	r.started = append(r.started, started)
	r.seq = append(r.seq, uint64(m.Seq))
	r.digest = append(r.digest, uint64(m.digest))
}
