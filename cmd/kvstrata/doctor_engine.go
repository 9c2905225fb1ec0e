package main

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"time"

	"kvstrata/event"
	"kvstrata/subscriber"
)

// heard is an engine with what was heard of it.
type heard struct {
	cfg    subscriber.EngineConfig
	report *subscriber.Report
	err    error
}

// hearEngines hears all engines at once, for a while.
func hearEngines(ctx context.Context, engines []subscriber.EngineConfig, hashKey string, during time.Duration) []heard {
	cfg := subscriber.DefaultConfig()
	cfg.AllowInvertible, cfg.HashKey = true, hashKey // nothing leaves this process
	ctx, cancel := context.WithTimeout(ctx, during)
	defer cancel()
	all := make([]heard, len(engines))
	var wait sync.WaitGroup
	for i, e := range engines {
		all[i].cfg = e
		if all[i].pulled() {
			continue
		}
		wait.Go(func() { all[i].report, all[i].err = subscriber.Probe(ctx, cfg, e) })
	}
	wait.Wait()
	return all
}

// pulled reports whether hearing an engine would take its events away from whoever subscribes.
func (h *heard) pulled() bool { return strings.HasPrefix(h.cfg.Endpoint, "http") }

// findings returns what is wrong with an engine, as sentences that say what to do.
func (h *heard) findings(during time.Duration) []string {
	if h.err != nil {
		return []string{h.err.Error()}
	}
	if h.report == nil {
		return nil
	}
	r, st := h.report, &h.report.Status
	sockets := strings.HasPrefix(h.cfg.Endpoint, "tcp://")
	var all []string
	say := func(format string, args ...any) { all = append(all, fmt.Sprintf(format, args...)) }
	violations := make(map[string]event.Counter)
	for _, c := range st.Counters {
		violations[c.Name] = c
	}
	switch {
	case r.Refused != "":
		say("%s: %s", h.cfg.Endpoint, r.Refused)
		return all
	case !r.Connected && sockets:
		say("%s: no ZeroMQ publisher answers; is the engine up, started with KV events enabled, and bound (an endpoint like "+
			"tcp://*:5557) rather than connecting (tcp://0.0.0.0:5557 connects)?", h.cfg.Endpoint)
		return all
	case !r.Connected:
		say("%s does not answer; is it the address that the engine's server has for its events?", h.cfg.Endpoint)
		return all
	case !st.Ledger.Started && r.Live > 0 && st.Ledger.Malformed == 0:
		say("messages come, and none was taken: %s", st.Reason)
	case !st.Ledger.Started && violations["stray_messages"].Count > 0:
		say("what comes is not an engine's: %s; is this its event port?", violations["stray_messages"].Example)
	case !st.Ledger.Started:
		say("connected, but no event came within %v, and none is kept for replay: are events enabled (vLLM: --kv-events-config "+
			`'{"enable_kv_cache_events":true,"publisher":"zmq",…}'; SGLang: --kv-events-config '{"publisher":"zmq",…}'; TensorRT-LLM: `+
			"event_buffer_max_size in kv_cache_config), is prefix caching on, and has the engine served a prompt of a block or more?", during)
	}
	if topic := h.cfg.Topic; topic != "" && len(r.Topics) > 0 &&
		!slices.ContainsFunc(r.Topics, func(t string) bool { return strings.HasPrefix(t, topic) }) {
		say("topic=%s hears nothing: this engine publishes on %q", topic, r.Topics)
	}
	if h.cfg.Replay != "" && !r.Replays {
		say("%s: the replay socket does not answer; set the engine's replay_endpoint, as tcp://*:5558", h.cfg.Replay)
	}
	if c := violations["rank_differs"]; c.Count > 0 {
		say("%s: rank r of an engine publishes on its port + r; give the port of rank 0 and ranks=N, or rank=", c.Example)
	}
	if st.Ledger.Malformed > 0 {
		say("%d of %d batches can't be decoded (%s): does it speak another dialect? dialect= forces one", st.Ledger.Malformed,
			st.Ledger.Receptions(), lastReason(&st.Ledger))
	}
	if r.HasBehind && (r.Behind > time.Second || r.Behind < -100*time.Millisecond) {
		side := "behind"
		if r.Behind < 0 {
			side = "ahead of"
		}
		say("the engine's clock is %v %s this machine's: ages and times in history are off by as much; run NTP on both", r.Behind.Abs().Round(time.Millisecond), side)
	}
	if c := violations["more_copies_than_pool"]; c.Count > 0 {
		say("%s", c.Example)
	}
	if st.Contract.Check.Verdict == event.HashesDiffer && st.Contract.Check.Scheme != "" {
		say("block hashes are not what its tokens give: %s", st.Contract.Check.Reason)
	}
	return all
}

func lastReason(l *event.Ledger) string {
	if len(l.Holes) == 0 {
		return "the first it sent"
	}
	return l.Holes[len(l.Holes)-1].Reason
}

// remarks returns what is well enough to work, and could be better.
func (h *heard) remarks() []string {
	var all []string
	if h.pulled() {
		all = append(all, "not heard: an event buffer forgets what it has handed out, and the subscriber would miss it; see /v1/sources")
	}
	if h.report != nil && h.report.Status.State == event.StateStale && h.report.Status.Reason != "" {
		all = append(all, "stale, so that lookups leave it out: "+h.report.Status.Reason)
	}
	if h.cfg.Replay == "" && strings.HasPrefix(h.cfg.Endpoint, "tcp://") && h.cfg.Dialect != subscriber.DialectMooncake {
		all = append(all, "no replay= given: a gap can't be closed, and every restart of ours leaves the source partial")
	}
	return all
}

// compare returns where engines of one model name the same blocks differently.
func compareNames(all []heard) []string {
	var said []string
	for i := range all {
		for j := range all[:i] {
			a, b := &all[j], &all[i]
			if a.report == nil || b.report == nil || a.cfg.Source.Model != b.cfg.Source.Model {
				continue
			}
			if common, differ := a.report.NamesDiffer(b.report); differ > 0 {
				said = append(said, fmt.Sprintf("%v and %v name %d of %d common blocks differently: another hash seed (PYTHONHASHSEED) or "+
					"algorithm. kvstrata has names of its own and does not mind; connectors that look blocks up by the engine's hash find "+
					"nothing of each other", a.cfg.Source, b.cfg.Source, differ, common))
			}
		}
	}
	return said
}

// printContract prints what an engine's stream was seen to be.
func printContract(w io.Writer, st *event.Status) {
	line := func(what, format string, args ...any) {
		if text := fmt.Sprintf(format, args...); text != "" {
			fmt.Fprintf(w, "         %-9s %s\n", what, text)
		}
	}
	c := &st.Contract
	line("dialect", "%s, %s; hashes %s; media %s", st.Dialect, orNone(c.Forms), orNone(c.Hashes), orNone(c.Media))
	for _, g := range st.Groups {
		text := fmt.Sprintf("%d: %d tokens a block", g.Group.Index(), g.BlockSize)
		if g.Spec != event.SpecUnknown {
			text += ", " + g.Spec.String()
		}
		if g.Window > 0 {
			text += fmt.Sprintf(" of %d", g.Window)
		}
		if g.Eagle {
			text += ", EAGLE"
		}
		line("group", "%s", text)
	}
	line("fields", "%s", byClass(c.Fields))
	switch check := &c.Check; {
	case check.Scheme != "":
		line("hashes", "%s: %s, seed %s: %d blocks as computed, %d not, %d not compared %s", check.Verdict, check.Scheme, check.Seed,
			check.Verified, check.Differ, check.Skipped, check.Reason)
	case check.Reason != "":
		line("hashes", "%s: %s", check.Verdict, check.Reason)
	}
	l := &st.Ledger
	if l.Started {
		line("ledger", "%d to %d: %d live, %d recovered, %d held, %d asked, %d lost; %d duplicates, %d malformed", l.First, l.Last, l.Live,
			l.Recovered, l.Held, l.Asked, l.Lost, l.Duplicates, l.Malformed)
	}
	for _, h := range l.Holes {
		line("lost", "%d to %d: %s", h.First, h.Last, h.Reason)
	}
	for _, v := range st.Counters {
		line("odd", "%s, %d times; the first: %s", v.Name, v.Count, v.Example)
	}
}

func orNone(words []string) string {
	if len(words) == 0 {
		return "none seen"
	}
	return strings.Join(words, " ")
}

// byClass writes fields as "BlockStored: a b; BlockRemoved: c".
func byClass(fields []string) string {
	var b strings.Builder
	last := ""
	for _, f := range fields {
		class, name, ok := strings.Cut(f, ".")
		switch {
		case !ok:
			fmt.Fprintf(&b, "; %s", class)
		case class != last:
			fmt.Fprintf(&b, "; %s: %s", class, name)
		default:
			b.WriteString(" " + name)
		}
		last = class
	}
	return strings.TrimPrefix(b.String(), "; ")
}
