package history

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/ClickHouse/clickhouse-go/v2"

	"kvstrata/event"
)

// column is one column of rows to insert: its name and a slice with a value a row.
type column struct {
	name   string
	values any
}

// place is where a row's message stands in the stream.
type place struct {
	committed time.Time
	stream    int64
	seq       uint64
}

// blockRows are rows of block_events, by column.
type blockRows struct {
	committed, received, sourceTime []time.Time
	stream                          []int64
	streamSeq, epoch, seq           []uint64
	source, tier                    []string
	ev, pos, blockSize              []uint32
	op, cause, effect               []int8
	group, copies                   []int32
	hash, engineHash, runParent     []uint64
	named                           []uint8
	age                             []int64
}

func (r *blockRows) len() int { return len(r.hash) }

func (r *blockRows) columns() []column {
	return []column{
		{"committed", r.committed},
		{"received", r.received},
		{"source_time", r.sourceTime},
		{"stream", r.stream},
		{"stream_seq", r.streamSeq},
		{"source", r.source},
		{"epoch", r.epoch},
		{"seq", r.seq},
		{"ev", r.ev},
		{"pos", r.pos},
		{"op", r.op},
		{"cause", r.cause},
		{"tier", r.tier},
		{"kv_group", r.group},
		{"hash", r.hash},
		{"named", r.named},
		{"engine_hash", r.engineHash},
		{"run_parent", r.runParent},
		{"effect", r.effect},
		{"copies", r.copies},
		{"age_us", r.age},
		{"block_size", r.blockSize},
	}
}

func (r *blockRows) reset() {
	*r = blockRows{
		committed: r.committed[:0], received: r.received[:0], sourceTime: r.sourceTime[:0], stream: r.stream[:0],
		streamSeq: r.streamSeq[:0], epoch: r.epoch[:0], seq: r.seq[:0], source: r.source[:0], tier: r.tier[:0],
		ev: r.ev[:0], pos: r.pos[:0], blockSize: r.blockSize[:0], op: r.op[:0], cause: r.cause[:0], effect: r.effect[:0],
		group: r.group[:0], copies: r.copies[:0], hash: r.hash[:0], engineHash: r.engineHash[:0],
		runParent: r.runParent[:0], named: r.named[:0], age: r.age[:0],
	}
}

// add appends the rows of a batch's n-th event: a row a block, or one row for a CLEARED.
func (r *blockRows) add(at place, source string, epoch event.Epoch, b *event.Batch, n int) {
	ev := &b.Events[n]
	blocks := ev.Blocks
	if ev.Kind == event.Cleared {
		blocks = []event.Block{{Copies: -1, Age: -1}}
	}
	received, told := stamp(b.Received), stamp(b.Time)
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
			age = block.Age.Microseconds()
		}
		copies := int32(-1)
		if ev.Kind == event.Evicted {
			copies = block.Copies
		}
		r.committed = append(r.committed, at.committed)
		r.received = append(r.received, received)
		r.sourceTime = append(r.sourceTime, told)
		r.stream = append(r.stream, at.stream)
		r.streamSeq = append(r.streamSeq, at.seq)
		r.source = append(r.source, source)
		r.epoch = append(r.epoch, uint64(epoch))
		r.seq = append(r.seq, uint64(b.First))
		r.ev = append(r.ev, uint32(n))
		r.pos = append(r.pos, uint32(i))
		r.op = append(r.op, int8(ev.Kind))
		r.cause = append(r.cause, int8(ev.Cause))
		r.tier = append(r.tier, string(ev.Tier))
		r.group = append(r.group, int32(ev.Group))
		r.hash = append(r.hash, hash)
		r.named = append(r.named, named)
		r.engineHash = append(r.engineHash, engineHash)
		r.runParent = append(r.runParent, parent)
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
		{"committed", r.committed},
		{"stream", r.stream},
		{"stream_seq", r.streamSeq},
		{"source", r.source},
		{"epoch", r.epoch},
		{"seq", r.seq},
		{"ev", r.ev},
		{"source_time", r.sourceTime},
		{"from_tier", r.fromTier},
		{"tier", r.tier},
		{"peer", r.peer},
		{"request", r.request},
		{"blocks", r.blocks},
		{"bytes", r.bytes},
		{"duration_us", r.duration},
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
		{"committed", r.committed},
		{"stream", r.stream},
		{"stream_seq", r.streamSeq},
		{"source", r.source},
		{"epoch", r.epoch},
		{"seq", r.seq},
		{"last", r.last},
		{"kind", r.kind},
		{"state", r.state},
		{"snapshot", r.snapshot},
		{"reason", r.reason},
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

// snapshotRows are rows of snapshots: the resident entries of one checkpoint.
type snapshotRows struct {
	committed, stored []time.Time
	snapshot          []int64
	epoch, seq        []uint64
	hash, engineHash  []uint64
	source, tier      []string
	group             []int32
	copies            []uint32
	named             []uint8
}

func (r *snapshotRows) len() int { return len(r.hash) }

func (r *snapshotRows) columns() []column {
	return []column{
		{"committed", r.committed},
		{"source", r.source},
		{"epoch", r.epoch},
		{"seq", r.seq},
		{"snapshot", r.snapshot},
		{"hash", r.hash},
		{"named", r.named},
		{"engine_hash", r.engineHash},
		{"tier", r.tier},
		{"kv_group", r.group},
		{"copies", r.copies},
		{"stored", r.stored},
	}
}

func (r *snapshotRows) add(committed time.Time, source string, e *event.Entry) {
	hash, named := uint64(e.Prefix), uint8(1)
	if e.Prefix == 0 {
		hash, named = Fold(e.Hash), 0
	}
	r.committed = append(r.committed, committed)
	r.source = append(r.source, source)
	r.hash = append(r.hash, hash)
	r.named = append(r.named, named)
	r.engineHash = append(r.engineHash, Fold(e.Hash))
	r.tier = append(r.tier, strings.Clone(string(e.Tier)))
	r.group = append(r.group, int32(e.Group))
	r.copies = append(r.copies, e.Copies)
	r.stored = append(r.stored, stamp(e.Stored))
}

// of says of which checkpoint the rows are.
func (r *snapshotRows) of(cp *event.Checkpoint) {
	for range r.hash {
		r.epoch = append(r.epoch, uint64(cp.Epoch))
		r.seq = append(r.seq, uint64(cp.Seq))
		r.snapshot = append(r.snapshot, int64(cp.Written))
	}
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
		{"source", r.source},
		{"round", r.round},
		{"committed", r.committed},
		{"stream_name", r.streamName},
		{"stream", r.stream},
		{"stream_seq", r.streamSeq},
		{"fence", r.fence},
		{"epoch", r.epoch},
		{"started", r.started},
		{"seq", r.seq},
		{"digest", r.digest},
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

// insert sends rows as one block under a token: the same rows sent twice are stored once.
func insert(ctx context.Context, conn clickhouse.Conn, table, token string, columns []column) error {
	ctx = clickhouse.Context(ctx, clickhouse.WithQueryID(queryID(table)), clickhouse.WithSettings(clickhouse.Settings{
		"insert_deduplication_token": token,
	}))
	names := make([]string, len(columns))
	for i, c := range columns {
		names[i] = c.name
	}
	batch, err := conn.PrepareBatch(ctx, "INSERT INTO "+table+" ("+strings.Join(names, ", ")+")")
	if err != nil {
		return fmt.Errorf("begin insert into %s: %w", table, err)
	}
	defer batch.Close()
	for i, c := range columns {
		if err := batch.Column(i).Append(c.values); err != nil {
			return fmt.Errorf("insert into %s: column %s: %w", table, c.name, err)
		}
	}
	if err := batch.Send(); err != nil {
		return fmt.Errorf("insert into %s: %w", table, err)
	}
	return nil
}

// queryID is the fixed id of a table's inserts, by which a new writer ends those of the one before it.
func queryID(table string) string { return queryIDPrefix + table }

const queryIDPrefix = "kvstrata-history-"
