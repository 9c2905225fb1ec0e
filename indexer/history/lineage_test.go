package history_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"kvstrata/event"
	"kvstrata/indexer/history"
)

// chainsOf returns the rows of chains as lines, by what they are keyed with.
func chainsOf(t testing.TB, e *engine) map[string]string {
	t.Helper()
	rows, err := connect(t, e.config()).Query(t.Context(), `SELECT concat(toString(day), ' ', leftPad(lower(hex(hash)), 16, '0'), ' ', named),
  concat(leftPad(lower(hex(max(parent))), 16, '0'), ' ', max(depth), ' ', max(block_size), ' ', toUnixTimestamp(min(first_seen)))
FROM chains GROUP BY day, hash, named`)
	if err != nil {
		t.Fatal(err)
	}
	defer rows.Close()
	lines := make(map[string]string)
	for rows.Next() {
		var key, line string
		if err := rows.Scan(&key, &line); err != nil {
			t.Fatal(err)
		}
		lines[key] = line
	}
	if err := rows.Err(); err != nil {
		t.Fatal(err)
	}
	return lines
}

func chainKey(m *event.Message, hash, named string) string {
	return fmt.Sprint(time.Unix(int64(m.Stored/1e9), 0).UTC().Format(time.DateOnly), " ", hash, " ", named)
}

// A chain's rows say what is before each block, across runs, messages and days; who begins anew in the middle tells no
// depth rather than a wrong one, and takes none back.
func TestChains(t *testing.T) {
	e := startEngine(t)
	s := newStream("e0")
	s.now = time.Now().UTC().Truncate(24 * time.Hour).Add(-3 * time.Second)
	s.publish(run(event.Stored, 1, 2, 3))
	s.publish(under(run(event.Stored, 4, 5), 3))
	s.publish(under(run(event.Stored, 6), 5), under(run(event.Stored, 7), 5))
	s.publish(under(run(event.Stored, 8), 7)) // on the next day
	s.publish(run(event.Evicted, 4), under(run(event.Stored, 4), 3))
	unnamed := run(event.Stored, 20, 21)
	unnamed.Tokens = nil
	s.publish(under(unnamed, 19))
	restarted := len(s.messages)
	s.publish(under(run(event.Stored, 9), 8), run(event.Stored, 1, 10))
	s.publish(run(event.Evicted, 8), under(run(event.Stored, 8), 7))

	w, stop := startWriter(t, e.config())
	resume(t, w)
	feed(t, w, s.messages[:restarted]...)
	committed(t, w, s.messages[restarted-1])
	stop()
	w, _ = startWriter(t, e.config())
	resume(t, w)
	feed(t, w, s.messages[restarted:]...)
	committed(t, w, s.messages[len(s.messages)-1])

	prefixes := make(map[uint64]string) // by engine hash
	for _, m := range s.messages {
		for _, ev := range m.Batches[0].Events {
			for _, b := range ev.Blocks {
				n, _ := b.Hash.Int()
				if prefixes[n] = "0000000000000000"; b.Prefix != 0 {
					prefixes[n] = history.HashText(uint64(b.Prefix))
				}
			}
		}
	}
	want := make(map[string]string)
	tell := func(message int, hash uint64, parent string, depth int) {
		m := s.messages[message]
		want[chainKey(m, prefixes[hash], "1")] = fmt.Sprint(parent, " ", depth, " 16 ", m.Stored/1e9)
	}
	none := history.HashText(0)
	tell(0, 1, none, 1)
	tell(0, 2, prefixes[1], 2)
	tell(0, 3, prefixes[2], 3)
	tell(1, 4, prefixes[3], 4)
	tell(1, 5, prefixes[4], 5)
	tell(2, 6, prefixes[5], 6)
	tell(2, 7, prefixes[5], 6)
	tell(3, 8, prefixes[7], 7) // once: told again, and then by one that does not know 7
	tell(4, 4, prefixes[3], 4) // told on another day
	tell(6, 9, none, 0)        // 8 was told to the writer before
	tell(6, 1, none, 1)
	tell(6, 10, prefixes[1], 2)
	m := s.messages[5]
	want[chainKey(m, history.HashText(20), "0")] = fmt.Sprint(history.HashText(19), " 0 16 ", m.Stored/1e9)
	want[chainKey(m, history.HashText(21), "0")] = fmt.Sprint(history.HashText(20), " 0 16 ", m.Stored/1e9)
	if diff := cmp.Diff(want, chainsOf(t, e)); diff != "" {
		t.Error(diff)
	}

	story, err := newReader(t, e.config()).Explain(t.Context(), prefixes[9], "")
	if err != nil || story.Parent == nil || *story.Parent != (history.Parent{Prefix: prefixes[8], EngineHash: history.HashText(8)}) {
		t.Errorf("the parent of 9 is %+v, want 8: %v", story.Parent, err)
	}
}

// checkChains compares chains with what was handed over: a row for each name and day, with a parent that was told, or none.
func (r *reading) checkChains() {
	parents := make(map[string][]string)
	first := make(map[string]event.Time)
	names := make(map[string]map[event.BlockHash]string)
	ever := make(map[string]bool) // all names of a source's blocks, by what it calls them
	for source, steps := range r.steps {
		names[source.Tokens()] = make(map[event.BlockHash]string)
		for _, s := range steps {
			for _, ev := range s.events() {
				if ev.Kind != event.Stored {
					continue
				}
				before, beforeNamed := event.BlockHash{}, false
				if ev.HasParent {
					before = ev.Parent
				}
				for i, b := range ev.Blocks {
					hash, named, parent := foldHash(b.Hash), "0", foldHash(before)
					if b.Prefix != 0 && !ev.Unrooted {
						hash, named, parent = history.HashText(uint64(b.Prefix)), "1", names[source.Tokens()][before]
					}
					if named == "1" && i > 0 && !beforeNamed || parent == "" {
						parent = history.HashText(0)
					}
					key := chainKey(s.m, hash, named)
					parents[key] = append(parents[key], parent)
					if at, ok := first[key]; !ok || s.m.Stored < at {
						first[key] = s.m.Stored
					}
					if named == "1" {
						names[source.Tokens()][b.Hash] = hash
						ever[spaced(source.Tokens(), foldHash(b.Hash), hash)] = true
					}
					before, beforeNamed = b.Hash, named == "1"
				}
			}
		}
	}
	rows, err := connect(r.t, r.e.config()).Query(r.t.Context(), `SELECT concat(source, ' ', leftPad(lower(hex(run_parent)), 16, '0'), ' ',
  leftPad(lower(hex(run_prefix)), 16, '0')) FROM block_events WHERE run_prefix != 0 AND startsWith(source, '`+r.pubs[0].source.Cluster+`.')`)
	if err != nil {
		r.t.Fatal(err)
	}
	defer rows.Close()
	for rows.Next() {
		var line string
		if err := rows.Scan(&line); err != nil {
			r.t.Fatal(err)
		}
		if !ever[line] {
			r.t.Errorf("a run's parent has the name %s, which nobody told", line)
		}
	}
	if err := rows.Err(); err != nil {
		r.t.Fatal(err)
	}
	got := chainsOf(r.t, r.e)
	for key, line := range got {
		var parent string
		var depth, size, seen int64
		if _, err := fmt.Sscan(line, &parent, &depth, &size, &seen); err != nil {
			r.t.Fatal(err)
		}
		if len(parents[key]) == 0 {
			r.t.Errorf("chains has %s: %s, which nobody told", key, line)
			continue
		}
		if !slices.Contains(parents[key], parent) && parent != history.HashText(0) || seen != int64(first[key]/1e9) || size != 4 {
			r.t.Errorf("chains has %s: %s, want a parent of %v, seen at %d", key, line, parents[key], first[key]/1e9)
		}
		delete(parents, key)
	}
	for key := range parents {
		r.t.Errorf("chains lacks %s", key)
	}
}

// forgetChains empties chains.
func forgetChains(t testing.TB, e *engine) {
	t.Helper()
	if _, err := history.Migrate(t.Context(), e.config()); err != nil {
		t.Fatal(err)
	}
	if err := connect(t, e.config()).Exec(t.Context(), "TRUNCATE TABLE "+e.table("chains")); err != nil {
		t.Fatal(err)
	}
}
