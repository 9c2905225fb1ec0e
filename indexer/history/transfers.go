package history

import (
	"context"
	"fmt"
	"time"

	"github.com/ClickHouse/clickhouse-go/v2"

	"kvstrata/event"
)

// ResumeRecords returns behind which place the stream of records goes on. It waits until Run has read that.
func (w *Writer) ResumeRecords(ctx context.Context) (event.Position, error) {
	if err := w.awaitRunning(ctx); err != nil {
		return event.Position{}, err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.records.reached, nil
}

// Transfers keeps the records of one message of the stream of records, which the stream took at a time, and says that all up to it
// was handed over. Messages are handed over in order; one that was handed over before is passed over. It waits while the open round has no room.
func (w *Writer) Transfers(ctx context.Context, at event.Position, stored event.Time, list []event.Transfer) error {
	r, err := w.openRound(ctx, func(r *round) bool { return r.rows() < w.cfg.MaxRows })
	if err != nil {
		return err
	}
	defer w.mu.Unlock()
	if w.records.reached.SameStream(at) && at.Sequence <= w.records.reached.Sequence {
		return nil // delivered again
	}
	w.records.reached = at
	if r.began.IsZero() {
		r.began = time.Now()
	}
	if len(list) == 0 || at.Sequence <= w.records.skip[at.Created] {
		return nil
	}
	committed := stamp(stored)
	if r.rows() == 0 {
		r.oldest = committed
	}
	day := committed.Unix() / 86400
	if n := len(r.transfers); n == 0 || r.transfers[n-1].day != day {
		r.transfers = append(r.transfers, &transferRows{day: day})
	}
	r.transfers[len(r.transfers)-1].add(place{committed: committed, stream: int64(at.Created), seq: at.Sequence}, list)
	return nil
}

// recordPlaces are places in the stream of records.
type recordPlaces struct {
	reached event.Position        // everything up to it was handed over
	skip    map[event.Time]uint64 // by a stream's creation, up to which sequence the table has everything
}

// transferRows are rows of transfers, of one day.
type transferRows struct {
	day                                                              int64
	committed, sourceTime                                            []time.Time
	stream                                                           []int64
	streamSeq, bytes, pieces, duration, post                         []uint64
	rec, blocks, ranks                                               []uint32
	source, kind, transport, peer, fromTier, toTier, request, reason []string
}

func (r *transferRows) len() int { return len(r.rec) }

func (r *transferRows) columns() []column {
	return []column{
		{"committed", microseconds, r.committed},
		{"source_time", microseconds, r.sourceTime},
		{"stream", i64, r.stream},
		{"stream_seq", u64, r.streamSeq},
		{"rec", u32, r.rec},
		{"source", text, r.source},
		{"kind", text, r.kind},
		{"transport", text, r.transport},
		{"peer", text, r.peer},
		{"from_tier", text, r.fromTier},
		{"to_tier", text, r.toTier},
		{"request", text, r.request},
		{"blocks", u32, r.blocks},
		{"ranks", u32, r.ranks},
		{"bytes", u64, r.bytes},
		{"pieces", u64, r.pieces},
		{"duration_us", u64, r.duration},
		{"post_us", u64, r.post},
		{"reason", text, r.reason},
	}
}

// add appends a row for each record of a message.
func (r *transferRows) add(at place, list []event.Transfer) {
	for i := range list {
		t := &list[i]
		r.committed = append(r.committed, at.committed)
		r.sourceTime = append(r.sourceTime, stamp(t.Time))
		r.stream = append(r.stream, at.stream)
		r.streamSeq = append(r.streamSeq, at.seq)
		r.rec = append(r.rec, uint32(i))
		r.source = append(r.source, t.Source.Tokens())
		r.kind = append(r.kind, t.Kind.String())
		r.transport = append(r.transport, t.Transport)
		r.peer = append(r.peer, t.Peer)
		r.fromTier = append(r.fromTier, string(t.From))
		r.toTier = append(r.toTier, string(t.To))
		r.request = append(r.request, t.Request)
		r.blocks = append(r.blocks, t.Blocks)
		r.ranks = append(r.ranks, t.Ranks)
		r.bytes = append(r.bytes, t.Bytes)
		r.pieces = append(r.pieces, t.Pieces)
		r.duration = append(r.duration, uint64(max(t.Duration, 0).Microseconds()))
		r.post = append(r.post, uint64(max(t.Post, 0).Microseconds()))
		r.reason = append(r.reason, t.Reason)
	}
}

// recordsName is the source of the row of progress that has the place in the stream of records.
const recordsName = "records"

// readRecordsBeyond reads how far transfers goes beyond the last finished round. Its messages are inserted in the order of their
// stream.
func (s *standing) readRecordsBeyond(ctx context.Context, conn clickhouse.Conn) error {
	ctx = clickhouse.Context(ctx, clickhouse.WithParameters(clickhouse.Parameters{
		"stream": fmt.Sprint(int64(s.committed.records.Created)), "after": fmt.Sprint(s.committed.records.Sequence),
	}))
	rows, err := conn.Query(ctx, `SELECT stream, max(stream_seq) FROM transfers
WHERE stream > {stream:Int64} OR stream = {stream:Int64} AND stream_seq > {after:UInt64} GROUP BY stream`)
	if err != nil {
		return fmt.Errorf("read how far transfers goes: %w", err)
	}
	defer rows.Close()
	for rows.Next() {
		var stream int64
		var far uint64
		if err := rows.Scan(&stream, &far); err != nil {
			return fmt.Errorf("read how far transfers goes: %w", err)
		}
		s.skipRecords[event.Time(stream)] = far
	}
	return rows.Err()
}
