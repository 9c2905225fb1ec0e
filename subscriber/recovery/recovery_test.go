package recovery_test

import (
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"

	"kvstrata/event"
	"kvstrata/subscriber/recovery"
)

// TestScenarios runs testdata/scenarios/*.txt: a command a line of input, the actions and the state it leads to as output. Frames
// are written seq, or seq'life for another life of the engine; time passes by `tick`. Rewrite with -rewrite.
func TestScenarios(t *testing.T) {
	datadriven.Walk(t, "testdata/scenarios", func(t *testing.T, path string) {
		var s *scenario
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			if d.Cmd == "new" {
				s = newScenario(t, d)
				return ""
			}
			var out strings.Builder
			for line := range strings.Lines(d.Input) {
				if fields := strings.Fields(line); len(fields) > 0 {
					s.step(&out, fields)
				}
			}
			return out.String()
		})
	})
}

type scenario struct {
	t   *testing.T
	cfg recovery.Config
	m   *recovery.Machine
	now time.Time

	applied map[event.Seq]recovery.Frame
}

// named returns the last frame applied under a sequence.
func (s *scenario) named(seq string) recovery.Frame {
	n, err := strconv.ParseUint(seq, 10, 64)
	f, found := s.applied[event.Seq(n)]
	if err != nil || !found {
		s.t.Fatalf("%q was not applied", seq)
	}
	return f
}

func newScenario(t *testing.T, d *datadriven.TestData) *scenario {
	cfg := recovery.DefaultConfig()
	if d.HasArg("no-replay") {
		cfg.Replay = false
	}
	d.MaybeScanArgs(t, "held", &cfg.MaxHeld)
	d.MaybeScanArgs(t, "rounds", &cfg.Rounds)
	var first uint64
	d.MaybeScanArgs(t, "first", &first)
	cfg.First = event.Seq(first)
	return &scenario{t: t, cfg: cfg, now: time.Unix(1000, 0), applied: make(map[event.Seq]recovery.Frame)}
}

// frame makes the batch seq of a life: same text, same content. A later life has later times, if it is not said how much
// the engine's clock was set: 7@-30s.
func frame(t *testing.T, text string) recovery.Frame {
	text, set, _ := strings.Cut(text, "@")
	number, life, _ := strings.Cut(text, "'")
	seq, err := strconv.ParseUint(number, 10, 64)
	if err != nil {
		t.Fatalf("frame %q: %v", text, err)
	}
	var off time.Duration
	if set != "" {
		if off, err = time.ParseDuration(set); err != nil {
			t.Fatalf("frame %q: %v", text, err)
		}
	}
	era := uint64(len(life)) // '', 'a, 'bb …
	return recovery.Frame{
		Seq: event.Seq(seq), Time: event.Time(1e18 + era*1e15 + seq*1e9 + uint64(off)), Payload: seq*31 + era*1_000_003 + uint64(off) + 7,
		Data: make([]byte, 100),
	}
}

func (s *scenario) step(out *strings.Builder, fields []string) {
	var actions []recovery.Action
	record := func(a []recovery.Action) { actions = append(actions, a...) }
	switch fields[0] {
	case "start":
		s.m = recovery.New(s.cfg) // whatever was known before is the prior
		record(s.m.Start(s.now, s.prior(fields[1:])))
	case "live":
		for _, f := range fields[1:] {
			record(s.m.Live(s.now, frame(s.t, f)))
		}
	case "replay":
		for _, f := range fields[1:] {
			record(s.m.Replayed(s.now, frame(s.t, f)))
		}
	case "end":
		record(s.m.ReplayEnd(s.now))
	case "tick":
		d, err := time.ParseDuration(fields[1])
		if err != nil {
			s.t.Fatal(err)
		}
		s.now = s.now.Add(d)
		record(s.m.Tick(s.now))
	case "connected":
		record(s.m.Connected(s.now))
	case "disconnected":
		record(s.m.Disconnected(s.now))
	case "cleared":
		s.m.Cleared(s.named(fields[1]))
	case "filled":
		s.m.Filled(s.named(fields[1]))
	case "malformed":
		s.m.Malformed(s.named(fields[1]), "malformed batch")
	default:
		s.t.Fatalf("unknown command %q", fields[0])
	}
	for _, a := range actions {
		if a.Kind == recovery.Apply {
			s.applied[a.Frame.Seq] = a.Frame
		}
		fmt.Fprintln(out, describe(a))
	}
	state, reason := s.m.State(s.now)
	if reason != "" {
		reason = " (" + reason + ")"
	}
	fmt.Fprintf(out, "%s: %v%s\n", strings.Join(fields, " "), state, reason)
}

func (s *scenario) prior(fields []string) *recovery.Prior {
	if len(fields) == 0 {
		return nil
	}
	p := &recovery.Prior{Started: true, State: event.StateLive}
	for _, text := range fields {
		if text == "unproved" {
			p.State, p.Reason = event.StatePartial, "same life by sequence only: no replay proved it"
			continue
		}
		f := frame(s.t, text)
		p.Last = f.Seq
		p.Recents = append(p.Recents, event.Recent{Seq: f.Seq, Time: f.Time, Payload: f.Payload})
	}
	return p
}

func describe(a recovery.Action) string {
	switch a.Kind {
	case recovery.Apply:
		return fmt.Sprintf("  apply %d %v", a.Frame.Seq, a.Way)
	case recovery.Lose:
		return fmt.Sprintf("  lose %d-%d: %s", a.First, a.Last, a.Reason)
	case recovery.NewLife:
		return "  new life: " + a.Reason
	case recovery.Ask:
		if a.Reopen {
			return fmt.Sprintf("  ask from %d on a fresh socket", a.First)
		}
		return fmt.Sprintf("  ask from %d", a.First)
	case recovery.Tell:
		return fmt.Sprintf("  tell %v: %s", a.State, a.Reason)
	case recovery.Duplicate:
		return fmt.Sprintf("  duplicate %d", a.Frame.Seq)
	default:
		return "  ?"
	}
}

// What proves a life is remembered however much comes until the engine answers.
func TestProofOutlivesWhatIsRemembered(t *testing.T) {
	cfg := recovery.DefaultConfig()
	m, now := recovery.New(cfg), time.Unix(1000, 0)
	known := frame(t, "41")
	m.Start(now, &recovery.Prior{
		Started: true, Last: 41, State: event.StateLive, Recents: []event.Recent{{Seq: 41, Time: known.Time, Payload: known.Payload}},
	})
	m.Connected(now)
	for range cfg.Attempts {
		now = now.Add(6 * time.Second)
		m.Tick(now)
	}
	for seq := 42; seq < 42+2*event.MaxRecents; seq++ {
		m.Live(now, frame(t, strconv.Itoa(seq)))
	}
	if last, _ := m.Last(); last != 41+2*event.MaxRecents || len(m.Recents()) != event.MaxRecents {
		t.Fatalf("at %d with %d batches", last, len(m.Recents()))
	}
	actions := m.Tick(now.Add(time.Second))
	if len(actions) != 1 || actions[0].Kind != recovery.Ask || actions[0].First != 41 {
		t.Fatalf("asks %+v, want from 41", actions)
	}
	m.Replayed(now, known)
	if state, reason := m.Data(); state != event.StateLive {
		t.Errorf("%v (%s) once it is proved", state, reason)
	}
}

// A live socket may lag so far behind a replay that nothing of its batches is remembered. That is no other publisher.
func TestLiveFramesFarBehindAReplay(t *testing.T) {
	const last = 3 * event.MaxRecents
	m, now := recovery.New(recovery.DefaultConfig()), time.Unix(1000, 0)
	m.Start(now, nil)
	m.Connected(now)
	m.Replayed(now, frame(t, "0"))
	m.ReplayEnd(now)
	m.Live(now, frame(t, "10")) // the queue before it overflowed
	for seq := 1; seq <= last; seq++ {
		m.Replayed(now, frame(t, strconv.Itoa(seq)))
	}
	m.ReplayEnd(now)
	for seq := 11; seq <= last+1; seq++ {
		actions := m.Live(now, frame(t, strconv.Itoa(seq)))
		want := recovery.Duplicate
		if seq > last {
			want = recovery.Apply
		}
		if len(actions) != 1 || actions[0].Kind != want {
			t.Fatalf("live %d: %+v", seq, actions)
		}
	}
	if state, reason := m.State(now); state != event.StateLive {
		t.Errorf("%v (%s)", state, reason)
	}
	if actions := m.Live(now, frame(t, "5'a")); len(actions) != 1 || actions[0].Kind != recovery.Ask {
		t.Errorf("another life falls back: %+v", actions)
	}
	for seq := 6; seq < 9; seq++ {
		m.Live(now, frame(t, strconv.Itoa(seq)+"'a"))
	}
	m.Replayed(now, frame(t, strconv.Itoa(last+1)))
	if state, reason := m.State(now); state == event.StateLive {
		t.Errorf("live (%s) beside another publisher", reason)
	}
}
