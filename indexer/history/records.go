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

// Records keeps the records of one message of the stream of records, all of one source, which the stream took at a time, and says that all up to it
// was handed over. Messages are handed over in order; one that was handed over before is passed over. It waits while the open round has no room.
func (w *Writer) Records(ctx context.Context, at event.Position, stored event.Time, list event.Records) error {
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
	w.records.leaveOut(at, &list)
	if list.Len() == 0 {
		return nil
	}
	committed := stamp(stored)
	if r.rows() == 0 {
		r.oldest = committed
	}
	day := committed.Unix() / 86400
	if n := len(r.told); n == 0 || r.told[n-1].day != day {
		r.told = append(r.told, &recordRows{day: day})
	}
	r.told[len(r.told)-1].add(place{committed: committed, stream: int64(at.Created), seq: at.Sequence}, &list)
	return nil
}

// The tables of records.
const (
	transferTable = iota
	lookupTable
	requestTable
	sampleTable
	recordTables
)

var recordTableNames = [recordTables]string{transferTable: "transfers", lookupTable: "lookups", requestTable: "requests", sampleTable: "gpu_samples"}

// recordPlaces are places in the stream of records.
type recordPlaces struct {
	reached event.Position // everything up to it was handed over
	skip    recordSkips
}

// recordSkips are, of each table and by source and a stream's creation, up to which sequence it has everything.
type recordSkips [recordTables]map[recordPlace]uint64

type recordPlace struct {
	source string
	stream event.Time
}

// leaveOut drops what the tables have.
func (p *recordPlaces) leaveOut(at event.Position, list *event.Records) {
	has := func(table int, source *event.Source) bool {
		return len(p.skip[table]) > 0 && at.Sequence <= p.skip[table][recordPlace{source.Tokens(), at.Created}]
	}
	if len(list.Transfers) > 0 && has(transferTable, &list.Transfers[0].Source) {
		list.Transfers = nil
	}
	if len(list.Lookups) > 0 && has(lookupTable, &list.Lookups[0].Source) {
		list.Lookups = nil
	}
	if len(list.Requests) > 0 && has(requestTable, &list.Requests[0].Source) {
		list.Requests = nil
	}
	if len(list.Samples) > 0 && has(sampleTable, &list.Samples[0].Source) {
		list.Samples = nil
	}
}

// recordRows are rows of records, of one day.
type recordRows struct {
	day       int64
	transfers transferRows
	lookups   lookupRows
	requests  requestRows
	samples   gpuRows
}

// add appends a row for each record of a message.
func (r *recordRows) add(at place, list *event.Records) {
	for i := range list.Transfers {
		r.transfers.add(at, i, &list.Transfers[i])
	}
	for i := range list.Lookups {
		r.lookups.add(at, i, &list.Lookups[i])
	}
	for i := range list.Requests {
		r.requests.add(at, i, &list.Requests[i])
	}
	for i := range list.Samples {
		r.samples.add(at, i, &list.Samples[i])
	}
}

func (r *recordRows) len() int {
	return r.transfers.len() + r.lookups.len() + r.requests.len() + r.samples.len()
}

// deliveries returns what is inserted of them.
func (r *recordRows) deliveries() []delivery {
	return []delivery{
		{table: recordTableNames[transferTable], rows: r.transfers.len(), columns: r.transfers.columns},
		{table: recordTableNames[lookupTable], rows: r.lookups.len(), columns: r.lookups.columns},
		{table: recordTableNames[requestTable], rows: r.requests.len(), columns: r.requests.columns},
		{table: recordTableNames[sampleTable], rows: r.samples.len(), columns: r.samples.columns},
	}
}

// recordHeads are what rows of all records begin with.
type recordHeads struct {
	committed, sourceTime []time.Time
	stream                []int64
	streamSeq             []uint64
	rec                   []uint32
	source                []string
}

func (r *recordHeads) len() int { return len(r.rec) }

func (r *recordHeads) columns() []column {
	return []column{
		{"committed", microseconds, r.committed},
		{"source_time", microseconds, r.sourceTime},
		{"stream", i64, r.stream},
		{"stream_seq", u64, r.streamSeq},
		{"rec", u32, r.rec},
		{"source", text, r.source},
	}
}

// add begins the row of a message's record number n.
func (r *recordHeads) add(at place, n int, source *event.Source, told event.Time) {
	r.committed = append(r.committed, at.committed)
	r.sourceTime = append(r.sourceTime, stamp(told))
	r.stream = append(r.stream, at.stream)
	r.streamSeq = append(r.streamSeq, at.seq)
	r.rec = append(r.rec, uint32(n))
	r.source = append(r.source, source.Tokens())
}

// recordsName is the source of the row of progress that has the place in the stream of records.
const recordsName = "records"

// readRecordsBeyond reads how far each table of records goes beyond the last finished round, source by source. Its messages are inserted
// in the order of their stream.
func (s *standing) readRecordsBeyond(ctx context.Context, conn clickhouse.Conn) error {
	ctx = clickhouse.Context(ctx, clickhouse.WithParameters(clickhouse.Parameters{
		"stream": fmt.Sprint(int64(s.committed.records.Created)), "after": fmt.Sprint(s.committed.records.Sequence),
	}))
	for i, table := range recordTableNames {
		far, err := readRecordsOf(ctx, conn, table)
		if err != nil {
			return fmt.Errorf("read how far %s goes: %w", table, err)
		}
		s.skipRecords[i] = far
	}
	return nil
}

func readRecordsOf(ctx context.Context, conn clickhouse.Conn, table string) (map[recordPlace]uint64, error) {
	rows, err := conn.Query(ctx, `SELECT toString(source), stream, max(stream_seq) FROM `+table+`
WHERE stream > {stream:Int64} OR stream = {stream:Int64} AND stream_seq > {after:UInt64} GROUP BY source, stream`)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	beyond := make(map[recordPlace]uint64)
	for rows.Next() {
		var source string
		var stream int64
		var far uint64
		if err := rows.Scan(&source, &stream, &far); err != nil {
			return nil, err
		}
		beyond[recordPlace{source, event.Time(stream)}] = far
	}
	return beyond, rows.Err()
}
