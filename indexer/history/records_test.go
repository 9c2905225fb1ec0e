package history_test

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"kvstrata/event"
	"kvstrata/indexer/history"
)

// recordMessage is one message of the stream of records.
type recordMessage struct {
	at     event.Position
	stored event.Time
	list   event.Records
}

// recordStream makes messages of records, some without any, that cross midnight.
func recordStream(w *world, created event.Time, n int) (made []recordMessage) {
	for i := range n {
		w.now = w.now.Add(time.Duration(w.IntN(1000)) * time.Millisecond)
		m := recordMessage{
			at: event.Position{Stream: "KV_RECORDS", Created: created, Sequence: uint64(i + 1)}, stored: event.UnixTime(w.now),
		}
		source := w.pubs[w.IntN(len(w.pubs))].source
		for range w.IntN(4) {
			m.list.Transfers = append(m.list.Transfers, event.Transfer{
				Source: source, Kind: event.TransferKind(1 + w.IntN(4)), Time: m.stored - event.Time(w.IntN(1e9)),
				Transport: "tcp", Request: "r'\\", Peer: "p", From: event.GPU, To: event.CPU, Blocks: w.Uint32N(100), Ranks: 2, Bytes: w.Uint64N(1e12),
				Pieces: w.Uint64N(1e6), Duration: time.Duration(w.IntN(1e9)), Post: time.Duration(w.IntN(1e6)), Reason: "no lease",
			})
		}
		for range w.IntN(3) {
			m.list.Lookups = append(m.list.Lookups, event.Lookup{
				Source: source, Asker: event.Asker(1 + w.IntN(3)), Time: m.stored - 5, Request: "q'\\", Session: "s", Tenant: "t", OneIn: 1 + w.Uint32N(9),
				BlockSize: 16, Tokens: w.Uint64N(1e6), Prefix: event.PrefixHash(w.Uint64()), Holders: w.Uint32N(9), Longest: w.Uint64N(1e6),
				Shares: []event.Share{{Tier: event.GPU, Tokens: w.Uint64N(1e6)}, {Tier: event.CPU, Tokens: 2}, {Tier: event.Disk, Tokens: 3}, {Tier: event.External, Tokens: 4}, {Tier: "TAPE", Tokens: 5}},
			})
			if w.IntN(2) == 0 {
				m.list.Requests = append(m.list.Requests, event.Request{
					Source: source, Time: m.stored - 6, Request: "q", Session: "s\t", Tenant: "t", Prompt: w.Uint64N(1e6), Output: w.Uint64N(1e6), Cached: 7, External: 8,
					End: event.RequestEnd(1 + w.IntN(4)),
				})
			}
		}
		if w.IntN(5) == 0 {
			m.list.Samples = append(m.list.Samples, event.Sample{
				Source: source, Time: m.stored - 7, Device: "GPU-0", MemoryUsed: w.Uint64(), MemoryTotal: 2, Busy: 3, MemoryBusy: 4, Power: 5, Temperature: 6,
				PCIeReceived: 7, PCIeSent: 8,
			})
		}
		made = append(made, m)
	}
	return made
}

func recordLines(m recordMessage) (lines []string) {
	at := func(table string, source event.Source, i int, told event.Time) string {
		return spaced(table, source.Tokens(), m.at.Created, m.at.Sequence, i, told/1000, m.stored/1000)
	}
	for i, l := range m.list.Lookups {
		lines = append(lines, spaced(at("lookups", l.Source, i, l.Time), l.Asker, l.Request, l.Session, l.Tenant, l.OneIn, l.BlockSize, l.Tokens, uint64(l.Prefix),
			l.Shares[0].Tokens, 2, 3, 9, l.Holders, l.Longest, l.Shares[0].Tokens+14))
	}
	for i, q := range m.list.Requests {
		lines = append(lines, spaced(at("requests", q.Source, i, q.Time), q.Request, q.Session, q.Tenant, q.Prompt, q.Output, q.Cached, q.External, q.End))
	}
	for i, s := range m.list.Samples {
		lines = append(lines, spaced(at("gpu_samples", s.Source, i, s.Time), s.Device, s.MemoryUsed, 2, 3, 4, 5, 6, 7, 8))
	}
	for i, t := range m.list.Transfers {
		lines = append(lines, spaced(at("transfers", t.Source, i, t.Time), t.Kind, t.Transport, t.Request, t.Peer, t.From, t.To, t.Blocks,
			t.Ranks, t.Bytes, t.Pieces, t.Duration.Microseconds(), t.Post.Microseconds(), t.Reason))
	}
	return lines
}

// recordColumns are what a line of each table tells beside its place.
var recordColumns = map[string]string{
	"transfers": "kind, transport, request, peer, from_tier, to_tier, blocks, ranks, bytes, pieces, duration_us, post_us, reason",
	"lookups": "asker, request, session, tenant, one_in, block_size, tokens, prefix, gpu_tokens, cpu_tokens, disk_tokens, external_tokens, holders, " +
		"longest, matched",
	"requests":    "request, session, tenant, prompt, output, cached, external, ended",
	"gpu_samples": "device, memory_used, memory_total, busy, memory_busy, power_mw, temperature, pcie_received, pcie_sent",
}

func recordsOf(t *testing.T, e *engine) (lines []string) {
	t.Helper()
	var selects []string
	for table, columns := range recordColumns {
		selects = append(selects, "SELECT concatWithSeparator(' ', '"+table+"', source, stream, stream_seq, rec, toUnixTimestamp64Micro(source_time), "+
			"toUnixTimestamp64Micro(committed), "+columns+") FROM "+table)
	}
	rows, err := connect(t, e.config()).Query(t.Context(), strings.Join(selects, " UNION ALL "))
	if err != nil {
		t.Fatal(err)
	}
	defer rows.Close()
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

// Whatever is killed, lost or delivered again, beside events: each record is kept once.
func TestRecordsAreKeptOnce(t *testing.T) {
	e := startEngine(t)
	seed := uint64(time.Now().UnixNano())
	if *oneSeed != 0 {
		seed = *oneSeed
	}
	w := newWorld(seed, 1, 60)
	r := &reading{world: w, t: t, e: e, steps: make(map[event.Source][]step), faults: 20}
	r.cuts = []int{len(w.lives[0])}
	events := slices.DeleteFunc(slices.Clone(w.lives[0]), func(i *item) bool { return i.message == nil })
	messages := recordStream(w, 1_000, 80)
	messages = append(messages, recordStream(w, 2_000, 60)...) // NATS lost its store in between
	for done := false; !done; {
		done = r.keepRecords(messages, events)
	}
	var want []string
	for _, m := range messages {
		want = append(want, recordLines(m)...)
	}
	slices.Sort(want)
	if diff := cmp.Diff(want, recordsOf(t, e)); diff != "" {
		t.Errorf("%s\nagain with -history.seed=%d", diff, seed)
	}
}

// keepRecords is the life of one writer, to which records are handed beside events. It reports whether all records are committed.
func (r *reading) keepRecords(messages []recordMessage, events []*item) bool {
	r.mu.Lock()
	w, kill, ended := r.writer()
	r.mu.Unlock()
	defer func() { kill(); <-ended }()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	go func() { <-ended; cancel() }()
	return r.handOver(ctx, w, kill, messages, events)
}

func (r *reading) handOver(ctx context.Context, w *history.Writer, kill func(), messages []recordMessage, events []*item) bool {
	at, err := w.ResumeRecords(ctx)
	if err != nil {
		return false
	}
	begin := 0
	for i, m := range messages {
		if m.at == at {
			begin = i + 1
		}
	}
	for i, m := range messages[begin:] {
		if r.draw(150) == 0 {
			kill()
		}
		if r.draw(10) == 0 && i > 0 && messages[begin+i-1].at.SameStream(m.at) { // delivered again
			before := messages[begin+i-1]
			if w.Records(ctx, before.at, before.stored, before.list) != nil {
				return false
			}
		}
		if w.Records(ctx, m.at, m.stored, m.list) != nil {
			return false
		}
		if r.draw(4) == 0 { // rows of another day, and none of records
			if _, err := w.Apply(ctx, freshLife(events[r.draw(len(events))].message, uint64(begin+i))); err != nil {
				return false
			}
		}
	}
	last := messages[len(messages)-1].at
	for deadline := time.Now().Add(patience); w.CommittedRecords() != last; <-time.After(time.Millisecond) {
		if w.Stopped() {
			return false
		}
		if time.Now().After(deadline) {
			r.t.Fatalf("not committed: %s", w.Trouble())
		}
	}
	return true
}

// freshLife returns a message as one of a later life, so that any may come next.
func freshLife(m *event.Message, n uint64) *event.Message {
	copied := *m
	copied.Epoch += event.Epoch(1_000 + n)
	return &copied
}
