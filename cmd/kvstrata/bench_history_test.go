package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"kvstrata/event"
)

// smallTrace writes a trace of conversations that share beginnings, and returns its folder.
func smallTrace(t *testing.T) string {
	t.Helper()
	file, err := os.Create(filepath.Join(t.TempDir(), replayTrace))
	if err != nil {
		t.Fatal(err)
	}
	for i := range 60 {
		ids := []int{i % 3, 3 + i%6}
		for j := range i % 40 {
			ids = append(ids, 9+40*(i%6)+j)
		}
		line, err := json.Marshal(map[string]any{"timestamp": 100 * i, "input_length": 512 * len(ids), "output_length": 1, "hash_ids": ids})
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintln(file, string(line))
	}
	if err := file.Close(); err != nil {
		t.Fatal(err)
	}
	return filepath.Dir(file.Name())
}

// What a replay tells is what pools of that size do: it stores what is not there, evicts what is, and never holds more.
func TestReplayTellsWhatPoolsDo(t *testing.T) {
	const engines, pool = 3, 200
	began := time.Unix(1_790_000_000, 0)
	work, err := newReplay(smallTrace(t), engines, pool, 100_000, true, began)
	if err != nil {
		t.Fatal(err)
	}
	type held struct {
		stored event.Time
		name   event.BlockHash
	}
	resident := make(map[event.Source]map[event.PrefixHash]held)
	next := make(map[event.Source]event.Seq)
	var last *event.Message
	rows, evicted, fullest := uint64(0), 0, 0
	for work.copies < 4 {
		m := work.message()
		if last != nil && (m.Position.Sequence != last.Position.Sequence+1 || m.Stored <= last.Stored) {
			t.Fatalf("message %v at %v behind %v at %v", m.Position, m.Stored, last.Position, last.Stored)
		}
		last = m
		blocks := resident[m.Source]
		if blocks == nil {
			blocks = make(map[event.PrefixHash]held)
			resident[m.Source] = blocks
		}
		b := &m.Batches[0]
		if b.First != next[m.Source] || b.Time > b.Received || b.Received > m.Stored {
			t.Fatalf("batch %d of %v, want %d; told %v, received %v, stored %v", b.First, m.Source, next[m.Source], b.Time, b.Received, m.Stored)
		}
		next[m.Source]++
		for _, ev := range b.Events {
			for _, block := range ev.Blocks {
				rows++
				at, there := blocks[block.Prefix]
				switch {
				case ev.Kind == event.Stored && (there || block.Effect != 1):
					t.Fatalf("%v stores %v, effect %d, held already: %v", m.Source, block.Prefix, block.Effect, there)
				case ev.Kind == event.Stored:
					blocks[block.Prefix] = held{b.Time, block.Hash}
				case !there || block.Effect != -1 || at.name != block.Hash || block.Age != time.Duration(b.Time-at.stored).Truncate(time.Microsecond):
					t.Fatalf("%v evicts %+v, and holds %+v (%v)", m.Source, block, at, there)
				default:
					delete(blocks, block.Prefix)
					evicted++
				}
			}
		}
		fullest = max(fullest, len(blocks))
	}
	if fullest != pool || evicted == 0 || work.events != rows {
		t.Errorf("at most %d blocks of %d, %d evicted; %d rows and %d events", fullest, pool, evicted, rows, work.events)
	}
	took := time.Duration(last.Stored) - time.Duration(began.UnixNano())
	if want := time.Duration(float64(rows) / 100_000 * float64(time.Hour)); took < want-time.Second || took > want+time.Minute {
		t.Errorf("%d events took %v, want %v", rows, took, want)
	}
}

func TestBenchHistory(t *testing.T) {
	o := command(t, "bench", "history", "--traces", smallTrace(t), "--events", "30000", "--prepared", "10000", "--engines", "3", "--pool", "200",
		"--rounds", "1", "--explains", "20", "--format", "json", "--log-level", "error")
	var r result
	if err := json.Unmarshal([]byte(o.stdout), &r); err != nil || o.code != exitOK {
		t.Fatalf("%v\n%+v", err, o)
	}
	for _, name := range []string{
		"rows_per_s", "bytes_per_row", "bytes_per_event", "query_p95_ms", "query_events_p95_ms", "explain_p95_ms",
		"explain_by_engine_hash_p95_ms", "clickhouse_peak_rss_mb",
	} {
		if r.Figures[name].Value <= 0 {
			t.Errorf("%s is %v", name, r.Figures[name])
		}
	}
}

// What is published is committed, all of it, before the figure is made.
func TestBenchHistoryOverTheBus(t *testing.T) {
	o := command(t, "bench", "history", "--bus", "--traces", smallTrace(t), "--prepared", "20000", "--engines", "3", "--pool", "200",
		"--format", "json", "--log-level", "error")
	var r result
	if err := json.Unmarshal([]byte(o.stdout), &r); err != nil || o.code != exitOK {
		t.Fatalf("%v\n%+v", err, o)
	}
	if r.Figures["bus_events_per_s"].Value <= 0 || !strings.HasPrefix(r.Workload, "20") {
		t.Errorf("%+v", r)
	}
}
