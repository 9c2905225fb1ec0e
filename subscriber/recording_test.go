package subscriber_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"kvstrata/event"
	"kvstrata/subscriber"
)

// recorder7 is a recording of worker 7 that grows.
type recorder7 struct {
	t    *testing.T
	path string
}

func newRecorder7(t *testing.T) *recorder7 {
	return &recorder7{t, filepath.Join(t.TempDir(), "recording.jsonl")}
}

func (r *recorder7) write(text string) {
	r.t.Helper()
	f, err := os.OpenFile(r.path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err == nil {
		_, err = f.WriteString(text)
	}
	if err == nil {
		err = f.Close()
	}
	if err != nil {
		r.t.Fatal(err)
	}
}

// store writes events first … last, of a block each that no other life of the worker told in the same line.
func (r *recorder7) store(life, first, last int) {
	r.t.Helper()
	var text strings.Builder
	for id := first; id <= last; id++ {
		block := 1 + id%32 + 32*(life%2)
		text.WriteString(strings.Replace(dynamoLine(r.t, 7, id, 0, block, block), `"timestamp":`, fmt.Sprintf(`"timestamp":%d`, life), 1))
	}
	r.write(text.String())
}

func (r *recorder7) config() subscriber.EngineConfig {
	r.t.Helper()
	engines, err := subscriber.ParseEngine("dynamo+file://" + r.path + ",model=m,cluster=c,instance=dyn,block=16,worker=7")
	if err != nil {
		r.t.Fatal(err)
	}
	return engines[0]
}

// A restart of ours finds the recording's life as it was, goes on behind what it knows, and counts nothing twice. Only another
// life of the worker begins an epoch.
func TestRestartOverARecording(t *testing.T) {
	for name, tt := range map[string]struct {
		before, away func(*recorder7)
		last, end    event.Seq // of the life, before and after
		received     uint64    // in it, after
		newLife      bool
	}{
		"10 lines": {
			before: func(r *recorder7) { r.store(1, 0, 9) }, away: func(*recorder7) {}, last: 9, end: 9, received: 10,
		},
		"10 lines and more since": {
			before: func(r *recorder7) { r.store(1, 0, 9) }, away: func(r *recorder7) { r.store(1, 10, 14) }, last: 9, end: 14, received: 15,
		},
		"200 lines": {
			before: func(r *recorder7) { r.store(1, 0, 199) }, away: func(*recorder7) {}, last: 199, end: 199, received: 200,
		},
		"700 lines and more since": {
			before: func(r *recorder7) { r.store(1, 0, 699) }, away: func(r *recorder7) { r.store(1, 700, 999) }, last: 699, end: 999, received: 1000,
		},
		"in the second life": {
			before: func(r *recorder7) { r.store(1, 0, 199); r.store(2, 0, 99) }, away: func(r *recorder7) { r.store(2, 100, 119) },
			last: 99, end: 119, received: 120,
		},
		"a shorter life since": {
			before: func(r *recorder7) { r.store(1, 0, 199) }, away: func(r *recorder7) { r.store(1, 200, 210); r.store(2, 0, 4) },
			last: 199, end: 4, received: 5, newLife: true,
		},
		"a longer life since": {
			before: func(r *recorder7) { r.store(1, 0, 9) }, away: func(r *recorder7) { r.store(2, 0, 299) },
			last: 9, end: 299, received: 300, newLife: true,
		},
		"another file since": {
			before: func(r *recorder7) { r.store(1, 0, 49) },
			away: func(r *recorder7) {
				if err := os.Remove(r.path); err != nil {
					r.t.Fatal(err)
				}
				r.store(2, 0, 19)
			},
			last: 49, end: 19, received: 20, newLife: true,
		},
	} {
		t.Run(name, func(t *testing.T) {
			r, rec := newRoad(t), newRecorder7(t)
			tt.before(rec)
			stop := r.subscribe(rec.config())
			before := r.await("dyn", tt.last, event.StateLive)
			stop()
			tt.away(rec)
			r.subscribe(rec.config())
			eventually(t, "a state after the restart", func() bool { return r.info("dyn").Fence > before.Fence })
			after := r.await("dyn", tt.end, event.StateLive)
			l := after.Ledger
			if got := after.Epoch != before.Epoch; got != tt.newLife {
				t.Errorf("another epoch: %v", got)
			}
			// What proves a life is received again, and counted as such.
			if l.Receptions()-l.Duplicates != tt.received || l.Lost > 0 {
				t.Errorf("ledger %+v, want %d received once", l, tt.received)
			}
			rec.store(9, int(tt.end)+1, int(tt.end)+1)
			if r.await("dyn", tt.end+1, event.StateLive).Epoch != after.Epoch {
				t.Error("what was written after that is of another life")
			}
		})
	}
}

// However much a file has of others, and however long its lines are, a poll comes to its end.
func TestPollsOfARecordingAreBounded(t *testing.T) {
	open := func(text string) func() (frames, bytes int, err error) {
		t.Helper()
		rec := newRecorder7(t)
		rec.write(text)
		poll, closeFile, err := subscriber.OpenRecording(rec.config())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(closeFile)
		return poll
	}
	const others = 5000
	poll := open(strings.Repeat(dynamoLine(t, 8, 0, 0, 1, 1), others) + dynamoLine(t, 7, 0, 0, 1, 1))
	polls := 0
	for frames := 0; frames == 0; polls++ {
		var err error
		if frames, _, err = poll(); err != nil || polls > others {
			t.Fatalf("poll %d: %v", polls, err)
		}
	}
	if polls < others/1000 {
		t.Errorf("%d lines in %d polls", others, polls)
	}
	long := strings.Replace(dynamoLine(t, 7, 0, 0, 1, 1), `"timestamp"`, `"pad":"`+strings.Repeat("x", 1<<20)+`","timestamp"`, 1)
	poll = open(strings.Repeat(long, 40))
	for total := 0; total < 40; {
		frames, bytes, err := poll()
		if err != nil || bytes > 10<<20 {
			t.Fatalf("%d bytes at once, %v", bytes, err)
		}
		total += frames
	}
}
