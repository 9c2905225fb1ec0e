package history_test

import (
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"kvstrata/event"
	"kvstrata/indexer/history"
)

// lru is an engine's memory, the newest block first; it tells what it stores and evicts.
type lru struct {
	size int
	held []uint64
}

// request runs a prompt and returns what an engine tells of it.
func (c *lru) request(prompt []uint64) (told []event.Event, stored int) {
	hits := 0
	for hits < len(prompt) && slices.Contains(c.held, prompt[hits]) {
		hits++
	}
	for _, h := range slices.Backward(prompt) {
		c.held = slices.DeleteFunc(c.held, func(held uint64) bool { return held == h })
		c.held = slices.Insert(c.held, 0, h)
	}
	for len(c.held) > c.size {
		told = append(told, run(event.Evicted, c.held[len(c.held)-1]))
		c.held = c.held[:len(c.held)-1]
	}
	if hits < len(prompt) {
		ev := run(event.Stored, prompt[hits:]...)
		if hits > 0 {
			ev = under(ev, prompt[hits-1])
		}
		told = append(told, ev)
	}
	return told, len(prompt) - hits
}

// prompts are walks along a tree of blocks.
func prompts(seed uint64, n int) (list [][]uint64) {
	r := rand.New(rand.NewPCG(seed, 1))
	for range n {
		node := uint64(1)
		var prompt []uint64
		for range 4 + r.IntN(12) {
			node = node*5 + 1 + uint64(math.Sqrt(float64(r.IntN(16))))
			prompt = append(prompt, node)
		}
		list = append(list, prompt)
	}
	return list
}

// answered finds the rows of a cache, by size.
func answered(a *history.Answer, engine any, cache string) map[string][]any {
	rows := make(map[string][]any)
	for _, row := range a.Rows {
		if row[1] == engine && row[4] == cache {
			rows[row[5].(string)] = row
		}
	}
	return rows
}

// What the tables foretell is what larger engines store.
func TestCapacity(t *testing.T) {
	const size = 100
	e := startEngine(t)
	w, stop := startWriter(t, e.config())
	resume(t, w)
	var streams []*stream
	var lists [][][]uint64
	stored := 0
	for i, name := range []string{"e0", "e1"} {
		s, memory := newStream(name), lru{size: size}
		s.now = s.now.Add(-2 * time.Hour).Add(time.Duration(i) * time.Millisecond)
		s.position.Sequence = uint64(i) * 10_000
		list := prompts(uint64(i), 800)
		for _, p := range list {
			told, n := memory.request(p)
			if stored += n; len(told) > 0 {
				s.publish(told...)
			}
		}
		streams, lists = append(streams, s), append(lists, list)
	}
	for _, s := range streams {
		feed(t, w, s.messages...)
		committed(t, w, s.messages[len(s.messages)-1])
	}
	stop()
	r := newReader(t, e.config())
	exact, err := r.Ask(t.Context(), "capacity", map[string]string{"since": "7d", "block_bytes": "1000"})
	if err != nil {
		t.Fatal(err)
	}
	if exact.Exactness != "exact" || !strings.Contains(exact.SQL, "SET param_hash = '18446744073709551615'") {
		t.Errorf("%s: %s", exact.Exactness, exact.SQL)
	}
	for i, name := range []string{"e0", "e1"} {
		rows := answered(exact, name, "memory")
		for label, blocks := range map[string]int{"×1": size, "×1.25": 125, "×1.5": 150, "×2": 200, "×4": 400, "without end": 100_000} {
			base, larger, want, all := lru{size: size}, lru{size: blocks}, 0, 0
			for _, p := range lists[i] {
				_, a := base.request(p)
				_, b := larger.request(p)
				want, all = want+a-b, all+a
			}
			row := []any{
				"m/model", name, uint32(0), "GPU", "memory", label, uint64(blocks), uint64(16 * blocks), uint64(1000 * blocks),
				uint64(want), uint64(all), float64(want) / float64(all), uint64(16 * want), uint64(16 * all),
			}
			if label == "without end" {
				row[6], row[7], row[8] = nil, nil, nil
			}
			if diff := cmp.Diff(row, rows[label]); diff != "" || want == 0 && blocks > size {
				t.Errorf("%s %s: (-want +got):\n%s", name, label, diff)
			}
		}
		if less := rows["×0.75"]; less[6] != uint64(75) || less[9] != nil || less[11] != nil {
			t.Errorf("less memory: %v", less)
		}
		if knee, most := rows["knee"], rows["99 % of all"]; knee[6].(uint64) <= size || most[6].(uint64) < knee[6].(uint64) ||
			float64(most[9].(uint64)) < 0.99*float64(rows["without end"][9].(uint64)) {
			t.Errorf("knee %v, 99 %% %v", knee, most)
		}
	}
	pooled := answered(exact, nil, "store")
	all, distinct := uint64(stored), make(map[uint64]bool)
	for _, list := range lists {
		for _, p := range list {
			for _, h := range p {
				distinct[h] = true
			}
		}
	}
	if row := pooled["without end"]; row[10] != all || row[9] != all-uint64(len(distinct)) {
		t.Errorf("a store without end: %v, want %d of %d", row, all-uint64(len(distinct)), all)
	}
	if row := pooled["×0.75"]; row[6] != uint64(150) || row[9].(uint64) == 0 || row[9].(uint64) > pooled["×1"][9].(uint64) {
		t.Errorf("a smaller store: %v", row)
	}

	// A sample counts what was stored in full, and comes near.
	r.Sample(4_000)
	sampled, err := r.Ask(t.Context(), "capacity", map[string]string{"since": "7d", "blocks": "100"})
	if err != nil {
		t.Fatal(err)
	}
	note := sampled.Notes[len(sampled.Notes)-1]
	if sampled.Exactness != "sampled" || !strings.HasPrefix(note, "sampled by hash: curves are of one of 8 blocks") {
		t.Errorf("%s: %s", sampled.Exactness, note)
	}
	t.Log(note)
	for _, cache := range []string{"memory", "store"} {
		for _, name := range []any{"e0", "e1", nil} {
			want, got := answered(exact, name, cache), answered(sampled, name, cache)
			for label, row := range want {
				if row[9] == nil || strings.Contains(label, "knee") || strings.Contains(label, "%") {
					continue
				}
				if g := got[label]; g[10] != row[10] || g[13] != row[13] || math.Abs(g[11].(float64)-row[11].(float64)) > 0.1 {
					t.Errorf("%v %s %s: %v, exactly %v", name, cache, label, g, row)
				}
			}
		}
	}
	if a, err := r.Ask(t.Context(), "capacity", map[string]string{"since": "7d", "engine": "e1", "limit": "3"}); err != nil || len(a.Rows) != 3 || !a.Truncated {
		t.Errorf("%v %v", a, err)
	}
}

// Nothing outlives a reset or a life: what left before it would not have been kept by more memory.
func TestCapacityForgets(t *testing.T) {
	for name, forget := range map[string]func(*stream){
		"a reset": func(s *stream) {
			s.publish(event.Event{Kind: event.Cleared, Cause: event.ByEngine, Group: event.NoGroup, LoRAID: event.NoLoRAID})
		},
		"a life":  (*stream).life,
		"nothing": func(*stream) {},
	} {
		t.Run(name, func(t *testing.T) {
			e := startEngine(t)
			w, stop := startWriter(t, e.config())
			resume(t, w)
			s := newStream("e0")
			s.publish(run(event.Stored, 1, 2))
			s.publish(run(event.Stored, 3, 4), run(event.Evicted, 2))
			s.publish(run(event.Stored, 3)) // a second copy
			s.publish(run(event.Evicted, 3))
			forget(s)
			s.publish(run(event.Stored, 1))
			s.publish(under(run(event.Stored, 2), 1))
			s.publish(run(event.Evicted, 2))
			s.publish(run(event.Stored, 5))
			feed(t, w, s.messages...)
			committed(t, w, s.messages[len(s.messages)-1])
			stop()
			a, err := newReader(t, e.config()).Ask(t.Context(), "capacity", map[string]string{"since": "1h"})
			if err != nil {
				t.Fatal(err)
			}
			want, resident := uint64(0), uint64(2) // 1 and 5
			if name == "nothing" {
				want, resident = 1, 5 // twice 1, 3, 4 and 5
			}
			rows := answered(a, "e0", "memory")
			if row := rows["without end"]; row[9] != want || row[10] != uint64(8) || rows["×1"][6] != resident {
				t.Errorf("%v, and resident %v; want %d of 8, and %d", row, rows["×1"], want, resident)
			}
		})
	}
}
