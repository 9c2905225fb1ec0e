package subscriber_test

import (
	"context"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"kvstrata/event"
	"kvstrata/event/resident"
	"kvstrata/subscriber"
)

// tape is a stream that writes down what is published to it.
type tape struct {
	subscriber.Stream
	epochs []event.Epoch
	story  []string
	states []string
}

func (s *tape) Publish(_ context.Context, epoch event.Epoch, b *event.Batch, _ event.Digest) {
	life := slices.Index(s.epochs, epoch)
	if life < 0 {
		life = len(s.epochs)
		s.epochs = append(s.epochs, epoch)
	}
	text := fmt.Sprintf("life %d: %d-%d %v", life, b.First, b.Last, b.Way)
	for i := range b.Events {
		ev := &b.Events[i]
		text += " " + ev.Kind.String()
		for _, bl := range ev.Blocks {
			text += fmt.Sprintf(" %s%+d", bl.Hash, bl.Effect)
			if ev.Kind == event.Stored && bl.Prefix == 0 {
				text += "?"
			}
		}
	}
	s.story = append(s.story, text)
}

func (s *tape) Status(st *event.Status) error {
	text := strings.TrimSpace(st.State.String() + " " + st.Reason)
	if len(s.states) == 0 || s.states[len(s.states)-1] != text {
		s.states = append(s.states, text)
	}
	return nil
}

func (*tape) CheckpointDue(time.Time, uint64) bool             { return false }
func (*tape) Checkpoint(*event.Checkpoint, *resident.Snapshot) {}

// heard reads lines.
func heard(t *testing.T, lines ...string) (all []subscriber.Heard) {
	t.Helper()
	for _, line := range lines {
		h, err := subscriber.ReadHeard([]byte(line))
		if err != nil {
			t.Fatalf("%s: %v", line, err)
		}
		all = append(all, h)
	}
	return all
}

// playBack lets a replayer take lines, a second apart.
func playBack(t *testing.T, cfg subscriber.EngineConfig, replays bool, lines ...string) (*tape, *event.Status) {
	t.Helper()
	out := new(tape)
	sub := subscriber.DefaultConfig()
	sub.AllowInvertible = true
	cfg.Source = event.Source{Cluster: "c", Model: "m", Instance: "e", Origin: event.Engine}
	r, err := subscriber.NewReplayer(sub, cfg, replays, out, quiet())
	if err != nil {
		t.Fatal(err)
	}
	at := time.Unix(1_796_000_000, 0)
	for _, h := range heard(t, lines...) {
		at = at.Add(time.Second)
		if err := r.Take(t.Context(), &h, at); err != nil {
			t.Fatal(err)
		}
	}
	st, err := r.End(t.Context(), at)
	if err != nil {
		t.Fatal(err)
	}
	return out, st
}

// frameLine is a raw frame that stores one block.
func frameLine(kind string, seq, block int) string {
	payload := batchOf(keyed{
		"type", "BlockStored", "block_hashes", list(block), "parent_block_hash", nil, "token_ids", list(block, block), "block_size", 2,
	})
	return fmt.Sprintf(`{"kind":%q,"frames":["6b76","%016x","%x"],"received":"2026-11-29T18:00:00Z"}`, kind, seq, payload)
}

const replayEnds = `{"kind":"end","frames":["","ffffffffffffffff",""]}`

func TestReplayer(t *testing.T) {
	batch := func(life, seq int, way string, block int) string {
		return fmt.Sprintf("life %d: %d-%d %s STORED %s+1", life, seq, seq, way, event.IntHash(uint64(block)))
	}
	for name, tt := range map[string]struct {
		lines   []string
		replays bool
		want    []string
		state   event.State
	}{
		"in order": {
			lines: []string{frameLine("live", 0, 10), frameLine("live", 1, 11)},
			want:  []string{batch(0, 0, "live", 10), batch(0, 1, "live", 11)}, state: event.StateLive,
		},
		"from the middle, and one told twice": {
			lines: []string{frameLine("live", 5, 15), frameLine("live", 5, 15), frameLine("live", 6, 16)},
			want:  []string{batch(0, 5, "live", 15), batch(0, 6, "live", 16)}, state: event.StatePartial,
		},
		"a gap": {
			lines: []string{frameLine("live", 0, 10), frameLine("live", 3, 13)},
			want:  []string{batch(0, 0, "live", 10), "life 0: 1-2 lost CLEARED", batch(0, 3, "live", 13)}, state: event.StatePartial,
		},
		"a gap that a replay closed": {
			lines: []string{
				frameLine("live", 0, 10), frameLine("live", 3, 13), frameLine("live", 4, 14), frameLine("replay", 0, 10), frameLine("replay", 1, 11),
				frameLine("replay", 2, 12), frameLine("replay", 3, 13), replayEnds, frameLine("live", 5, 15),
			}, replays: true,
			want: []string{
				batch(0, 0, "live", 10), batch(0, 1, "recovered", 11), batch(0, 2, "recovered", 12), batch(0, 3, "held", 13), batch(0, 4, "held", 14),
				batch(0, 5, "live", 15),
			}, state: event.StateLive,
		},
		"a gap that no replay closed": {
			lines: []string{frameLine("live", 0, 10), replayEnds, frameLine("live", 3, 13)}, replays: true,
			want: []string{batch(0, 0, "live", 10), "life 0: 1-2 lost CLEARED", batch(0, 3, "held", 13)}, state: event.StatePartial,
		},
		"a restart": {
			lines: []string{frameLine("live", 0, 10), frameLine("live", 1, 11), frameLine("live", 0, 20), frameLine("live", 1, 21)},
			want:  []string{batch(0, 0, "live", 10), batch(0, 1, "live", 11), batch(1, 0, "live", 20), batch(1, 1, "live", 21)}, state: event.StateLive,
		},
		"a restart behind a new connection": {
			lines: []string{
				frameLine("live", 0, 10), frameLine("live", 5, 15), `{"kind":"disconnected"}`, `{"kind":"connected"}`, frameLine("live", 3, 23),
				frameLine("live", 4, 24),
			},
			want: []string{
				batch(0, 0, "live", 10), "life 0: 1-4 lost CLEARED", batch(0, 5, "live", 15), batch(1, 3, "live", 23), batch(1, 4, "live", 24),
			}, state: event.StatePartial,
		},
	} {
		t.Run(name, func(t *testing.T) {
			out, st := playBack(t, subscriber.EngineConfig{}, tt.replays, tt.lines...)
			if diff := cmp.Diff(tt.want, out.story); diff != "" {
				t.Error(diff)
			}
			if st.State != tt.state || out.states[len(out.states)-1] != strings.TrimSpace(st.State.String()+" "+st.Reason) {
				t.Errorf("%v %s, told %v", st.State, st.Reason, out.states)
			}
		})
	}
}

// What SGLang's publisher sends and answers, from 2025 on, is played back as it was: nothing twice, nothing lost.
func TestReplayerReadsFramesOfSGLang(t *testing.T) {
	text, err := os.ReadFile("testdata/sglang/frames.json")
	if err != nil {
		t.Fatal(err)
	}
	var all []json.RawMessage
	if err := json.Unmarshal(text, &all); err != nil {
		t.Fatal(err)
	}
	byVersion := make(map[string][]string)
	for _, line := range all {
		var of struct{ Version string }
		if err := json.Unmarshal(line, &of); err != nil {
			t.Fatal(err)
		}
		byVersion[of.Version] = append(byVersion[of.Version], string(line))
	}
	for version, lines := range byVersion {
		_, st := playBack(t, subscriber.EngineConfig{}, true, lines...)
		if strings.Contains(lines[0], "91c002") { // made of nothing but a nil where events are
			if l := st.Ledger; l.Malformed != 3 || l.Lost != 3 || l.Duplicates != 2 {
				t.Errorf("%s: %+v", version, l)
			}
			continue
		}
		if l := st.Ledger; l.Live != 3 || l.Lost != 0 || l.Malformed != 0 || l.Duplicates != 2 || st.State != event.StateLive {
			t.Errorf("%s: %+v, %v %s", version, l, st.State, st.Reason)
		}
	}
}

// What Dynamo's recorder wrote, of two lives of a worker.
func TestReplayerReadsDynamo(t *testing.T) {
	cfg := subscriber.EngineConfig{Dialect: subscriber.DialectDynamo, BlockSize: 16, AsSet: true}
	out, st := playBack(t, cfg, false, dynamoLine(t, 7, 0, 0, 1, 2), dynamoLine(t, 7, 1, 0, 3, 3), dynamoLine(t, 7, 0, 0, 1, 1))
	hash := func(n int) string { return event.IntHash(uint64(n)).String() }
	want := []string{
		"life 0: 0-0 live STORED " + hash(1) + "+1 " + hash(2) + "+1", "life 0: 1-1 live STORED " + hash(3) + "+1", "life 1: 0-0 live STORED " + hash(1) + "+1",
	}
	if diff := cmp.Diff(want, out.story); diff != "" {
		t.Error(diff)
	}
	if st.State != event.StateLive || len(st.PastLives) != 1 {
		t.Errorf("%v %s, %d past lives", st.State, st.Reason, len(st.PastLives))
	}
}

func TestReadHeard(t *testing.T) {
	payload := hex.EncodeToString(batchOf(stored()))
	seq := "0000000000000007"
	for _, tt := range []struct{ line, want string }{
		{`{"frames":["","` + seq + `","` + payload + `"]}`, ""},
		{`{"frames":["","` + seq + `","` + payload + `"],"kind":"live","version":"1"}`, ""},
		{`{"frames":["","","` + seq + `","` + payload + `"],"kind":"replay"}`, ""},
		{`{"kind":"connected"}`, ""},
		{`{"event_id":3,"data":{"type":"created"}}`, ""},
		{``, "not a JSON object"},
		{`[]`, "not a JSON object"},
		{`{"frames":["","` + seq, "not a JSON object"},
		{`{}`, "no line of a recording"},
		{`{"event_id":3}`, "no line of a recording"},
		{`{"event_id":-3,"data":{}}`, "not a JSON object"},
		{`{"frames":["` + seq + `","` + payload + `"]}`, "2 frames"},
		{`{"frames":["","` + seq + `","xyz"]}`, "frame: "},
		{`{"frames":["","07","` + payload + `"]}`, "a sequence of 1 bytes"},
		{`{"frames":["","` + seq + `","` + payload + `"],"kind":"dead"}`, "kind"},
		{`{"frames":["","` + seq + `","` + payload + `"],"received":"now"}`, "received"},
		{`{"timestamp":1,"event":{"event":{}}}`, "no event of a worker"},
		{`{"timestamp":-1,"event":{"worker_id":7,"event":{"event_id":1}}}`, "not a JSON object"},
		{`{"timestamp":99999999999999,"event":{"worker_id":7,"event":{"event_id":1}}}`, "timestamp"},
	} {
		_, err := subscriber.ReadHeard([]byte(tt.line))
		if (err == nil) != (tt.want == "") || err != nil && !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %v, want %q", tt.line, err, tt.want)
		}
	}
}

// FuzzReadHeard checks that no line of a recording panics, nor what is made of it.
func FuzzReadHeard(f *testing.F) {
	f.Add([]byte(`{"timestamp":1,"event":{"worker_id":7,"event":{"event_id":1,"data":{"removed":{"block_hashes":[1]}},"dp_rank":0}}}`))
	f.Add([]byte(`{"frames":["","0000000000000007","` + hex.EncodeToString(batchOf(stored())) + `"],"kind":"live"}`))
	f.Add([]byte(`{"event_id":3,"data":{"type":"created","num_blocks_per_cache_level":[1,2]}}`))
	f.Fuzz(func(t *testing.T, line []byte) {
		h, err := subscriber.ReadHeard(line)
		if err != nil {
			return
		}
		r, err := subscriber.NewReplayer(subscriber.DefaultConfig(), subscriber.EngineConfig{}, true, new(tape), quiet())
		if err == nil {
			err = r.Take(t.Context(), &h, time.Unix(1_796_000_000, 0))
		}
		if err == nil {
			_, err = r.End(t.Context(), time.Unix(1_796_000_000, 0))
		}
		if err != nil {
			t.Error(err)
		}
	})
}
