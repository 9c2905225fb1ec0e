package main

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"kvstrata/event"
	"kvstrata/indexer/history"
)

// What is behind is told from the stream and from where history last stood, also while ClickHouse does not answer.
func TestWatchTellsWhatWaits(t *testing.T) {
	now := time.Unix(1000, 0)
	stream := func(sequence uint64) event.Position {
		return event.Position{Stream: "KV_EVENTS", Created: 7, Sequence: sequence}
	}
	var w historyWatch
	for _, step := range []struct {
		name       string
		after      time.Duration
		kept, end  uint64
		first      uint64
		want       historyDetail
		otherState bool // the stream was made anew
	}{
		{"nothing was ever kept", 0, 0, 5, 1, historyDetail{BehindMessages: 5}, false},
		{"and is not for long", 30 * time.Second, 0, 9, 1, historyDetail{BehindMessages: 9, LagSeconds: 30}, false},
		{"it gets on", 31 * time.Second, 4, 9, 1, historyDetail{BehindMessages: 5}, false},
		{"all is kept", 32 * time.Second, 9, 9, 1, historyDetail{}, false},
		{"after an idle hour one message is no hour late", time.Hour, 9, 10, 1, historyDetail{BehindMessages: 1}, false},
		{"ClickHouse is away, and more comes", time.Hour + time.Minute, 9, 70, 1, historyDetail{BehindMessages: 61, LagSeconds: 60}, false},
		{"the stream forgets some of it", time.Hour + 2*time.Minute, 9, 90, 40, historyDetail{BehindMessages: 81, LagSeconds: 120, LostMessages: 30}, false},
		{"another stream", time.Hour + 3*time.Minute, 9, 3, 1, historyDetail{BehindMessages: 3}, true},
	} {
		w.last = history.Standing{At: stream(step.kept)}
		end := stream(step.end)
		if step.otherState {
			end.Created = 8
		}
		if diff := cmp.Diff(&step.want, w.detail(end, step.first, now.Add(step.after))); diff != "" {
			t.Errorf("%s: %s", step.name, diff)
		}
	}
}
