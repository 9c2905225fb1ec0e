package history_test

import (
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"kvstrata/event"
	"kvstrata/indexer/history"
)

// offload is a hand-made fleet: the connector of prefill-0 saves much to a store and loads little of it, that of decode-1 loads from its
// peer, and native-2 offloads by itself, so that nobody tells what it loads.
func offload(t *testing.T) (ask func(name string, more ...string) *history.Answer) {
	t.Helper()
	began := time.Now().UTC().Truncate(24 * time.Hour).Add(-14 * time.Hour)
	all := fleet(began, "prefill-0", "prefill-0", "decode-1", "decode-1", "native-2")
	all[1].source.Origin, all[3].source.Origin = event.Connector, event.Connector
	e := startEngine(t)
	w, _ := startWriter(t, e.config())
	resume(t, w)
	all[0].at(began, 0, run(event.Stored, hashes(1, 40)...))
	all[0].at(began, 1, under(run(event.Stored, 50), 4), under(run(event.Stored, 60), 4)) // two runs continue 1 to 4
	all[1].at(began, 2, on(event.Storage, run(event.Stored, hashes(1, 40)...)))
	load := func(from event.Tier, peer string, hashes ...uint64) event.Event {
		ev := run(event.Loaded, hashes...)
		ev.BlockSize, ev.Tokens = 16, make([]uint32, 16*len(hashes))
		for i := range hashes { // a connector names what it loads
			n, err := strconv.ParseUint(prefixOf(hashes[:i+1]...), 16, 64)
			if err != nil {
				t.Fatal(err)
			}
			ev.Blocks[i].Prefix = event.PrefixHash(n)
		}
		ev.Load = event.Load{From: from, Peer: peer, Request: "r-1", Bytes: 1000 * uint64(len(hashes)), Duration: time.Millisecond}
		return ev
	}
	all[1].at(began, 10, load(event.Storage, "redis://s", 1, 2))
	all[2].at(began, 3, run(event.Stored, 1, 2, 3, 4))
	all[3].at(began, 4, load(event.CPU, "prefill-0", 1, 2, 3, 4), load(event.Storage, "redis://s", 5))
	all[4].at(began, 5, run(event.Stored, 1), on(event.CPU, run(event.Stored, 1)))
	var last *event.Message
	for _, s := range all {
		for _, m := range s.messages {
			last = m
			feed(t, w, m)
		}
	}
	record := func(s *stream, kind event.TransferKind, t event.Transfer) event.Transfer {
		t.Source, t.Kind, t.Ranks = s.source, kind, max(t.Ranks, 1)
		return t
	}
	saved := event.Transfer{Transport: "redis", Peer: "redis://s", From: event.GPU, To: event.Storage, Blocks: 10, Bytes: 10240, Pieces: 10, Duration: 10 * time.Millisecond}
	large := saved
	large.Blocks, large.Bytes, large.Pieces, large.Duration = 40, 102400, 10, 90*time.Millisecond
	slow, posted, tiny := saved, saved, saved
	slow.Duration, posted.Duration, posted.Post = 80*time.Millisecond, 70*time.Millisecond, 60*time.Millisecond
	tiny.Pieces, tiny.Duration, tiny.Request = 100, 60*time.Millisecond, "tiny"
	failed := saved
	failed.Blocks, failed.Bytes, failed.Pieces, failed.Reason, failed.Duration = 6, 0, 0, "no room", 100*time.Millisecond
	other := failed
	other.Reason, other.Blocks, other.Duration = "closed", 1, time.Millisecond
	fetched := event.Transfer{Transport: "tcp", Peer: "prefill-0", From: event.GPU, To: event.GPU, Blocks: 4, Bytes: 4096, Pieces: 1, Duration: time.Millisecond}
	list := []event.Transfer{
		record(all[1], event.TransferSaved, saved), record(all[1], event.TransferSaved, saved), record(all[1], event.TransferSaved, saved),
		record(all[1], event.TransferSaved, saved), record(all[1], event.TransferSaved, saved), record(all[1], event.TransferSaved, large),
		record(all[1], event.TransferSaved, slow), record(all[1], event.TransferSaved, posted), record(all[1], event.TransferSaved, tiny),
		record(all[1], event.TransferFailed, failed), record(all[1], event.TransferFailed, failed), record(all[1], event.TransferFailed, other),
		record(all[1], event.LeaseExpired, event.Transfer{Transport: "tcp", From: event.GPU, Ranks: 2}),
		record(all[3], event.TransferLoaded, fetched),
	}
	place := event.Position{Stream: "KV_RECORDS", Created: 1, Sequence: 1}
	if err := w.Records(t.Context(), place, event.UnixTime(began.Add(20*time.Second)), event.Records{Transfers: list}); err != nil {
		t.Fatal(err)
	}
	committed(t, w, last)
	eventually(t, "records are committed", func() bool { return w.CommittedRecords() == place })
	r := newReader(t, e.config())
	return func(name string, more ...string) *history.Answer {
		values := map[string]string{"since": began.Format(time.RFC3339), "until": began.Add(time.Hour).Format(time.RFC3339)}
		for i := 0; i < len(more); i += 2 {
			values[more[i]] = more[i+1]
		}
		a, err := r.Ask(t.Context(), name, values)
		if err != nil {
			t.Fatal(err)
		}
		return a
	}
}

// cells writes rows from one column on.
func cells(a *history.Answer, from int) (lines []string) {
	for _, row := range a.Rows {
		texts := make([]string, 0, len(row))
		for i, v := range row[from:] {
			text := spaced(v)
			if f, ok := v.(float64); ok {
				text = strconv.FormatFloat(f, 'g', 4, 64)
			}
			if a.Columns[from+i].Kind == "time" {
				text = "time"
			}
			texts = append(texts, text)
		}
		lines = append(lines, strings.Join(texts, " | "))
	}
	return lines
}

func TestTransferQuestions(t *testing.T) {
	ask := offload(t)
	want := []string{
		"prefill-0 | redis://s | redis | GPU | STORAGE | 9 | 120 | 184320 | 0.01 | 0.0892 | 0.09 | 5.266e+05 | 180 | 1024 | 3 | 13 | 133 | 0.09774 | 0 | no room",
		"decode-1 | prefill-0 | tcp | GPU | GPU | 1 | 4 | 4096 | 0.001 | 0.001 | 0.001 | 4.096e+06 | 1 | 4096 | 0 | 0 | 4 | 0 | 0 | ",
		"prefill-0 |  | tcp | GPU |  | 0 | 0 | 0 | <nil> | <nil> | <nil> | <nil> | 0 | <nil> | 0 | 0 | 0 | <nil> | 2 | ",
	}
	if diff := cmp.Diff(want, cells(ask("transfers"), 1)); diff != "" {
		t.Error(diff)
	}
	if got := cells(ask("transfers", "engine", "decode-1"), 1); len(got) != 1 || got[0] != want[1] {
		t.Error(got)
	}
	a := ask("transfers-slowest", "limit", "6")
	var causes []string
	for _, row := range a.Rows {
		causes = append(causes, spaced(row[7], row[12], row[15], row[16]))
	}
	want = []string{
		"failed 0.1 0.01 it failed: no room",
		"failed 0.1 0.01 it failed: no room",
		"saved 0.09 0.01 it carried more",
		"saved 0.08 0.01 the link was slower: others of its pair carried as much in less time",
		"saved 0.07 0.01 posting it took most of the time",
		"saved 0.06 0.01 its descriptors were smaller",
	}
	if diff := cmp.Diff(want, causes); diff != "" || a.Exactness != "inferred" || !a.Truncated {
		t.Error(a.Exactness, a.Truncated, diff)
	}
	if got := ask("transfers-slowest", "engine", "decode-1").Rows[0][16]; got != "the pair has too few to compare with" {
		t.Error(got)
	}
	a = ask("transfers-slowest")
	if last := a.Rows[len(a.Rows)-3][16]; last != "nothing: others of its pair take as long" || len(a.Rows) != 13 {
		t.Error(last, len(a.Rows))
	}
}

func TestTiers(t *testing.T) {
	a := offload(t)("tiers")
	want := []string{
		"decode-1 | CPU | 0 | 0 | <nil> | 4 | 64 | 4000 | <nil> | 5 | 0.8",
		"decode-1 | STORAGE | 0 | 0 | <nil> | 1 | 16 | 1000 | <nil> | 5 | 0.2",
		"decode-1 | GPU | 4 | 64 | <nil> | 0 | 0 | 0 | 0 | 5 | 0",
		"native-2 | CPU | 1 | 16 | <nil> | <nil> | <nil> | <nil> | <nil> | <nil> | <nil>",
		"native-2 | GPU | 1 | 16 | <nil> | <nil> | <nil> | <nil> | <nil> | <nil> | <nil>",
		"prefill-0 | STORAGE | 40 | 640 | 184320 | 2 | 32 | 2000 | 0.05 | 2 | 1",
		"prefill-0 | GPU | 42 | 672 | <nil> | 0 | 0 | 0 | 0 | 2 | 0",
	}
	if diff := cmp.Diff(want, cells(a, 1)); diff != "" {
		t.Error(diff)
	}
	want = []string{
		"native-2 stored 1 block, 16 tokens to CPU in 1 h; whether that pays can't be told: no connector of it tells loads",
		"offload to STORAGE does not pay on prefill-0: stored 180.0 KiB (40 blocks, 640 tokens), loaded 2.0 KiB (2 blocks, 32 tokens) in 1 h (5.0 % of the blocks)",
	}
	if diff := cmp.Diff(want, a.Notes[len(a.Notes)-2:]); diff != "" {
		t.Error(diff)
	}
}

func TestHotPrefixes(t *testing.T) {
	want := []string{prefixOf(1, 2, 3, 4) + " | 2 | 1 | time | 3 | 1 | 4 | 64"} // loaded once, behind three others
	if diff := cmp.Diff(want, cells(offload(t)("hot-prefixes"), 1)); diff != "" {
		t.Error(diff)
	}
}
