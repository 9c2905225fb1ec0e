//go:build engine

package interop_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"os/exec"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"kvstrata/event"
	"kvstrata/indexer/prefix"
	"kvstrata/sim"
	"kvstrata/subscriber"
)

// engineRelease is a whole vLLM with PyTorch, in a venv of its own.
var engineRelease = version{name: "engine", number: "0.32.0"}

// engineSize is how many tokens a block of the engine has: the least that vLLM's attention on the CPU takes.
const engineSize = 32

// llm is a whole vLLM engine, stepped by engine.py. What it published is known by its sequences only.
type llm struct {
	*vllm
	options args
	groups  []cacheGroup
	asked   int
	lookups []lookup // that nobody has looked at yet
}

// cacheGroup is one of an engine's KV cache groups.
type cacheGroup struct {
	Kind      string
	Window    int
	BlockSize int `json:"block_size"`
}

// lookup is one search of vLLM's prefix cache.
type lookup struct {
	ID     string
	Tokens []uint32
	Salt   string
	Cached int       // tokens found
	Seq    event.Seq // of the batch that was being gathered
	Events int       // gathered so far
}

// finished is a request that vLLM answered.
type finished struct {
	ID          string
	Cached      int // prompt tokens that vLLM says it did not compute
	Output      []uint32
	Preemptions int
}

// llmAnswer is what engine.py says to a command.
type llmAnswer struct {
	OK             bool
	Error, Version string
	Endpoint       string
	ReplayEndpoint string `json:"replay_endpoint"`
	Asynchronous   bool
	Groups         []cacheGroup
	Finished       []finished
	Lookups        []lookup
	Published      int
	Pending        int // events that wait for the next step
	Busy, Done     bool
	Cached         []struct {
		Group  uint32
		Hash   json.Number
		Copies int
	}
}

// startLLM starts an engine of a small pool; options are those of engine.py's open.
func startLLM(t *testing.T, options args) *llm {
	t.Helper()
	engineRelease.need(t)
	e := &llm{
		vllm:    &vllm{version: engineRelease},
		options: args{"num_gpu_blocks_override": 40, "max_model_len": 1024, "max_num_seqs": 8},
	}
	for name, value := range options {
		e.options[name] = value
	}
	e.boot(t)
	return e
}

// boot starts the engine's process, on other ports than before: starting takes long enough for somebody else to take those.
func (e *llm) boot(t *testing.T) {
	t.Helper()
	e.python, e.story = e.start(t, "engine.py"), nil
	e.patience = 4 * time.Minute // much is imported, and the machine may be busy
	a := e.command("open", e.options)
	if a.Version != e.number {
		t.Fatalf("the venv holds vLLM %s, want %s", a.Version, e.number)
	}
	if a.Asynchronous {
		t.Error("the engine schedules asynchronously, which these tests do not expect of a CPU")
	}
	e.endpoint, e.replay, e.groups = a.Endpoint, a.ReplayEndpoint, a.Groups
}

func (e *llm) command(op string, arguments args) llmAnswer {
	e.t.Helper()
	command := args{"op": op}
	for name, value := range arguments {
		command[name] = value
	}
	e.write(command)
	var a llmAnswer
	e.read(&a)
	if !a.OK {
		e.t.Fatalf("engine.py: %s: %s", op, a.Error)
	}
	for len(e.story) < a.Published {
		e.story = append(e.story, told{seq: event.Seq(len(e.story))})
	}
	e.lookups = append(e.lookups, a.Lookups...)
	return a
}

// request is a prompt, and how many tokens are wanted behind it.
type request struct {
	tokens []uint32
	n      int
	salt   string
	report string // kv_cache_report_mode
	random bool   // tokens, rather than the likeliest ones
}

// add queues a request, and returns its name.
func (e *llm) add(q request) string {
	e.t.Helper()
	e.asked++
	id := fmt.Sprint("request ", e.asked)
	a := args{"id": id, "tokens": q.tokens, "n": q.n}
	if q.salt != "" {
		a["salt"] = q.salt
	}
	if q.report != "" {
		a["report"] = q.report
	}
	if q.random {
		a["random"] = true
	}
	e.command("add", a)
	return id
}

// steps lets the engine make n steps; drain as many as there is work for.
func (e *llm) steps(n int) llmAnswer { e.t.Helper(); return e.command("step", args{"n": n}) }
func (e *llm) drain() llmAnswer      { e.t.Helper(); return e.command("step", nil) }

// serve answers one request alone.
func (e *llm) serve(q request) finished {
	e.t.Helper()
	id := e.add(q)
	a := e.drain()
	if len(a.Finished) != 1 || a.Finished[0].ID != id || a.Pending > 0 {
		e.t.Fatalf("vLLM answers %+v to %s", a, id)
	}
	return a.Finished[0]
}

// reusable is the exact rule by which vLLM reuses what it holds: whole blocks from the first on, but never the whole
// prompt, since its last token must be computed to have an answer.
func reusable(held, promptTokens int) int {
	return min(held, (promptTokens-1)/engineSize) * engineSize
}

// ask asks our index how many blocks of a prompt the engine holds.
func (r *rig) ask(e *llm, q request) int {
	r.t.Helper()
	answer, err := r.sink.index.Lookup(&prefix.Request{Model: model, Tokens: q.tokens, Salt: q.salt})
	if err != nil {
		r.t.Fatal(err)
	}
	for _, m := range answer.Matches {
		if m.Source == e.source() {
			if m.Blocks != m.DeviceBlocks || m.Blocks > 0 && m.BlockSize != engineSize {
				r.t.Errorf("the index matches %+v", m)
			}
			return m.Blocks
		}
	}
	r.t.Fatalf("the index answers without the engine: %+v", answer)
	return 0
}

// compare holds our index against vLLM's own table of cached blocks, hash by hash and copy by copy.
func (r *rig) compare(e *llm) {
	r.t.Helper()
	if diff := cmp.Diff(e.table(), copiesIn(r, e)); diff != "" {
		r.t.Errorf("the index, against vLLM's block pool: -want +got\n%s", diff)
	}
}

// follow waits until the index has all that the engine published.
func (r *rig) follow(e *llm) {
	r.t.Helper()
	eventually(r.t, fmt.Sprintf("the index is at %d", e.last()), func() error {
		if _, seq, started := r.sink.index.Seq(e.source()); !started || seq != e.last() {
			return fmt.Errorf("it is at %d", seq)
		}
		return nil
	})
}

// table is what vLLM's block pool has cached: copies by group and hash.
func (e *llm) table() map[string]int {
	e.t.Helper()
	table := make(map[string]int)
	for _, c := range e.command("dump", nil).Cached {
		table[fmt.Sprintf("group %d, %s", c.Group, c.Hash)] = c.Copies
	}
	return table
}

func copiesIn(r *rig, e *llm) map[string]int {
	table := make(map[string]int)
	for at, h := range residentIn(r.sink.index, e.vllm) {
		n, isInt := at.hash.Int()
		if !isInt || at.tier != event.GPU {
			r.t.Errorf("the index has %+v", at)
		}
		table[fmt.Sprintf("group %d, %d", at.group, n)] = h.Copies
	}
	return table
}

// traffic makes up conversations that share beginnings.
type traffic struct {
	rand    *rand.Rand
	systems [][]uint32
	talks   [][]uint32
	past    []request
}

// saltOf is the salt of every fourth conversation.
func saltOf(talk int) string {
	if talk%4 == 3 {
		return "tenant-a"
	}
	return ""
}

func newTraffic(seed uint64) *traffic {
	f := &traffic{rand: rand.New(rand.NewPCG(seed, 2)), talks: make([][]uint32, 10)}
	for _, n := range []int{3 * engineSize, 100, 40} {
		f.systems = append(f.systems, f.words(n))
	}
	return f
}

func (f *traffic) words(n int) []uint32 {
	words := make([]uint32, n)
	for i := range words {
		words[i] = 3 + f.rand.Uint32N(1000)
	}
	return words
}

// next is the next request, and the conversation that its answer belongs to; −1: none, it was asked before.
func (f *traffic) next() (request, int) {
	if f.rand.IntN(4) == 0 && len(f.past) > 0 {
		q := f.past[f.rand.IntN(len(f.past))]
		q.n = 1 + f.rand.IntN(4)
		if f.rand.IntN(2) == 0 && len(q.tokens) > engineSize { // ends with a block
			q.tokens = q.tokens[:len(q.tokens)/engineSize*engineSize]
		}
		return q, -1
	}
	talk := f.rand.IntN(len(f.talks))
	if t := f.talks[talk]; len(t) == 0 || len(t) > 700 {
		f.talks[talk] = f.systems[f.rand.IntN(len(f.systems))]
	}
	q := request{
		tokens: slices.Concat(f.talks[talk], f.words(1+f.rand.IntN(90))), n: 1 + f.rand.IntN(50), salt: saltOf(talk),
	}
	f.past = append(f.past, q)
	f.past = f.past[max(0, len(f.past)-12):]
	return q, talk
}

// answered goes on with a conversation.
func (f *traffic) answered(talk int, q request, output []uint32) {
	if talk >= 0 {
		f.talks[talk] = slices.Concat(q.tokens, output)
	}
}

// TestEngineReuse serves hundreds of requests, one after the other, from a pool that must evict. Before each our index is
// asked; vLLM must report the very number of cached tokens that follows from the answer.
func TestEngineReuse(t *testing.T) {
	t.Parallel()
	e, r := startLLM(t, nil), newRig(t)
	r.subscribe(quiet(), e.engineFlag(e.endpoint, e.replay))
	r.awaitReason("connected, but no event yet")
	f := newTraffic(1)
	const requests = 400
	var none, part, whole, salted, tokens int
	for i := range requests {
		q, talk := f.next()
		held := r.ask(e, q)
		want := reusable(held, len(q.tokens))
		got := e.serve(q)
		if got.Cached != want {
			t.Fatalf("request %d of %d tokens, salt %q: the index holds %d blocks, so %d tokens are reusable; vLLM reused %d",
				i, len(q.tokens), q.salt, held, want, got.Cached)
		}
		switch {
		case held == 0:
			none++
		case held*engineSize == len(q.tokens):
			whole++ // of which vLLM computes the last block again
		default:
			part++
		}
		if q.salt != "" && held > 0 {
			salted++
			if plain := (request{tokens: q.tokens}); r.ask(e, plain) >= held && held > 3 {
				t.Errorf("request %d: without its salt the index answers no less", i)
			}
		}
		tokens += want
		f.answered(talk, q, got.Output)
		r.follow(e)
		if i%20 == 0 {
			r.compare(e)
		}
	}
	r.compare(e)
	st := r.settle(e.vllm, event.StateLive)
	stored, evicted := r.checkEvents(e, st.Epoch)
	t.Logf("%d requests: %d found nothing, %d a part, %d all of their prompt, %d with a salt; %d tokens reused; %d batches, %d blocks stored, %d evicted",
		requests, none, part, whole, salted, tokens, len(e.story), stored, evicted)
	for what, n := range map[string]int{"nothing": none, "a part": part, "the whole prompt": whole, "a salted one": salted, "evictions": evicted} {
		if n < 10 {
			t.Errorf("only %d times: %s", n, what)
		}
	}
	r.verifyLedger(e.vllm, r.sink.batches(st.Epoch), st)
	r.verifyStream(e.vllm, st.Epoch)
	if len(st.Counters) > 0 {
		t.Errorf("a real engine's stream is odd: %+v", st.Counters)
	}
}

// checkEvents holds each event of a life against what vLLM's engine, of one group with full attention, is known to send.
func (r *rig) checkEvents(e *llm, epoch event.Epoch) (stored, evicted int) {
	r.t.Helper()
	for _, b := range r.sink.batches(epoch) {
		if b.First != b.Last || b.Rank != 0 || len(b.Events) == 0 {
			r.t.Errorf("batch %d to %d: rank %d, %d events", b.First, b.Last, b.Rank, len(b.Events))
		}
		for _, ev := range b.Events {
			for _, bl := range ev.Blocks {
				if bl.Prefix == 0 {
					r.t.Errorf("batch %d: %v has a block without a name", b.First, ev.Kind)
				}
			}
			switch ev.Kind {
			case event.Stored:
				stored += len(ev.Blocks)
				if ev.Tier != event.GPU || ev.Group != 0 || ev.Spec != event.SpecFull || ev.Window != 0 || ev.BlockSize != engineSize ||
					ev.LoRA != "" || ev.LoRAID != event.NoLoRAID || ev.Unrooted || len(ev.Blocks) == 0 || ev.Session != "" ||
					ev.Locality != event.LocalityUnknown || ev.Ownership != "" {
					r.t.Errorf("batch %d: %+v", b.First, ev)
				}
			case event.Evicted: // each block by itself
				evicted++
				if ev.Tier != event.GPU || ev.Group != 0 || len(ev.Blocks) != 1 || ev.Blocks[0].Effect != -1 {
					r.t.Errorf("batch %d: %+v", b.First, ev)
				}
			}
		}
	}
	return stored, evicted
}

// follower knows which prefixes are resident after a part of the stream.
type follower struct {
	batches []event.Batch
	seq     event.Seq
	events  int
	copies  map[event.PrefixHash]int
}

// goTo follows the stream until so many events of a batch have happened.
func (f *follower) goTo(seq event.Seq, events int) {
	for f.seq < seq || f.seq == seq && f.events < events {
		b := &f.batches[f.seq]
		if f.events == len(b.Events) {
			f.seq, f.events = f.seq+1, 0
			continue
		}
		ev := &b.Events[f.events]
		f.events++
		if ev.Kind == event.Cleared {
			clear(f.copies)
		}
		for _, bl := range ev.Blocks {
			f.copies[bl.Prefix] += int(bl.Effect)
		}
	}
}

// held counts the blocks of a prompt that are resident.
func (f *follower) held(tokens []uint32, salt string) (n int) {
	for _, p := range event.Prefixes(nil, tokens, engineSize, event.Hasher{}.Seed("", salt), false) {
		if f.copies[p] == 0 {
			break
		}
		n++
	}
	return n
}

// TestEngineCrowd lets requests run beside each other in a pool too small for them, so that some are preempted, and with
// long prompts computed in chunks. Each
// search of vLLM's prefix cache must find what the stream says was there at that moment, in the middle of a batch too.
func TestEngineCrowd(t *testing.T) {
	t.Parallel()
	e, r := startLLM(t, args{"num_gpu_blocks_override": 48, "max_num_batched_tokens": 128}), newRig(t)
	r.subscribe(quiet(), e.engineFlag(e.endpoint, e.replay))
	r.awaitReason("connected, but no event yet")
	f := newTraffic(2)
	talks, prompts := make(map[string]int), make(map[string]request)
	var done []finished
	for len(done) < 300 {
		if len(prompts)-len(done) < 12 {
			for range 1 + f.rand.IntN(3) {
				q, talk := f.next()
				q.n += 30
				id := e.add(q)
				prompts[id], talks[id] = q, talk
			}
		}
		for _, g := range e.steps(1 + f.rand.IntN(20)).Finished {
			f.answered(talks[g.ID], prompts[g.ID], g.Output)
			done = append(done, g)
		}
	}
	done = append(done, e.drain().Finished...)
	st := r.settle(e.vllm, event.StateLive)
	r.compare(e)
	r.checkEvents(e, st.Epoch)

	batches := r.sink.batches(st.Epoch)
	before := &follower{batches: batches, copies: make(map[event.PrefixHash]int)}
	now := &follower{batches: batches, copies: make(map[event.PrefixHash]int)}
	found := make(map[string][]int)
	var within, more, less int
	for i, l := range e.lookups {
		before.goTo(l.Seq, 0)
		now.goTo(l.Seq, l.Events)
		held := now.held(l.Tokens, l.Salt)
		if want := reusable(held, len(l.Tokens)); l.Cached != want {
			t.Fatalf("search %d, of %s, after %d events of batch %d: %d blocks are held, so %d tokens are reusable; vLLM found %d",
				i, l.ID, l.Events, l.Seq, held, want, l.Cached)
		}
		found[l.ID] = append(found[l.ID], l.Cached)
		if l.Events > 0 {
			within++
		}
		more += btoi(held > before.held(l.Tokens, l.Salt))
		less += btoi(held < before.held(l.Tokens, l.Salt))
	}
	preemptions := 0
	for _, g := range done {
		preemptions += g.Preemptions
		if !slices.Contains(found[g.ID], g.Cached) {
			t.Errorf("%s: vLLM reports %d cached tokens, and searched and found %v", g.ID, g.Cached, found[g.ID])
		}
	}
	t.Logf("%d requests, %d preemptions, %d searches, of which %d within a batch: %d found more than was held before it, %d less",
		len(done), preemptions, len(e.lookups), within, more, less)
	if preemptions < 10 || more == 0 || less == 0 {
		t.Error("that is too little to prove anything")
	}
	r.verifyLedger(e.vllm, batches, st)
	r.verifyStream(e.vllm, st.Epoch)
	if len(st.Counters) > 0 {
		t.Errorf("a real engine's stream is odd: %+v", st.Counters)
	}
}

func btoi(b bool) int {
	if b {
		return 1
	}
	return 0
}

// saga is what a stream says, block by block: blocks are numbered as they come up, so that two engines can be compared
// that call them differently.
type saga struct {
	numbers map[event.BlockHash]int
	lines   []string
}

func (g *saga) number(h event.BlockHash) int {
	if g.numbers == nil {
		g.numbers = make(map[event.BlockHash]int)
	}
	if _, ok := g.numbers[h]; !ok {
		g.numbers[h.Clone()] = len(g.numbers)
	}
	return g.numbers[h]
}

// add tells a batch: a line for each STORED, and one for each block of an EVICTED.
func (g *saga) add(b *event.Batch) {
	for _, ev := range b.Events {
		line := fmt.Sprintf("%v of %d", ev.Kind, ev.BlockSize)
		if ev.HasParent {
			line += fmt.Sprintf(" behind %d", g.number(ev.Parent))
		}
		for _, bl := range ev.Blocks {
			line += fmt.Sprint(" ", g.number(bl.Hash))
			if ev.Kind == event.Evicted {
				g.lines = append(g.lines, line)
				line = fmt.Sprintf("%v of %d", ev.Kind, ev.BlockSize)
			}
		}
		if ev.Kind != event.Evicted {
			g.lines = append(g.lines, line)
		}
	}
	g.lines = append(g.lines, "batch")
}

// Publish makes a saga of a simulated engine.
func (g *saga) Publish(b *event.Batch) error { g.add(b); return nil }

// TestEngineSimulated runs our simulated engine beside vLLM, request by request and step by step: both must tell the same,
// event by event, in the same order and the same batches.
func TestEngineSimulated(t *testing.T) {
	t.Parallel()
	for name, budget := range map[string]int{"whole prompts": 4096, "prompts in chunks": 128} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			simulateBeside(t, budget)
		})
	}
}

// simulateBeside runs both engines, with so many tokens a step.
func simulateBeside(t *testing.T, budget int) {
	t.Helper()
	const blocks = 48
	e, r := startLLM(t, args{"num_gpu_blocks_override": blocks, "max_num_batched_tokens": budget}), newRig(t)
	r.subscribe(quiet(), e.engineFlag(e.endpoint, e.replay))
	r.awaitReason("connected, but no event yet")
	simulated := new(saga)
	cfg := sim.DefaultEngineConfig()
	cfg.PoolBlocks, cfg.BlockSize, cfg.MaxRunning, cfg.TokensPerStep = blocks, engineSize, 8, budget
	twin, err := sim.NewEngine(cfg, simulated)
	if err != nil {
		t.Fatal(err)
	}
	f := newTraffic(6)
	preemptions := uint64(0)
	for i := range 500 {
		crowd := 1
		if i >= 250 {
			crowd = f.rand.IntN(3)
		}
		for range crowd {
			q, talk := f.next()
			q.random = true // what both generate differs, and is never a part of a prompt
			f.answered(talk, q, nil)
			id := e.add(q)
			if err := twin.Submit(sim.Request{ID: id, Prompt: q.tokens, Output: q.n, Salt: q.salt}); err != nil {
				t.Fatal(err)
			}
		}
		steps := 1 + f.rand.IntN(10)
		if i < 250 || i == 499 {
			steps = 100_000
		}
		for _, g := range e.steps(steps).Finished {
			preemptions += uint64(g.Preemptions)
		}
		for ; steps > 0 && twin.Busy(); steps-- {
			if _, err := twin.Step(event.Time(i)); err != nil {
				t.Fatal(err)
			}
		}
	}
	st := r.settle(e.vllm, event.StateLive)
	real := new(saga)
	batches := r.sink.batches(st.Epoch)
	for i := range batches {
		real.add(&batches[i])
	}
	if diff := cmp.Diff(real.lines, simulated.lines); diff != "" {
		t.Errorf("what vLLM tells, and our simulated engine: -vLLM +ours\n%s", diff)
	}
	ours := twin.Stats()
	t.Logf("%d requests: %d events of vLLM in %d batches, %d blocks stored, %d evicted; %d preemptions, of ours %d",
		e.asked, len(real.lines)-len(batches), len(batches), ours.BlocksStored, ours.BlocksEvicted, preemptions, ours.Preempted)
	if preemptions == 0 || preemptions != ours.Preempted {
		t.Error("want as many preemptions of ours, and more than none")
	}
}

// TestEngineReset resets vLLM's prefix cache: refused, while requests run, and while the engine is idle. vLLM tells of it
// with the next step only, so until then nobody can know.
func TestEngineReset(t *testing.T) {
	t.Parallel()
	e, r := startLLM(t, nil), newRig(t)
	r.subscribe(quiet(), e.engineFlag(e.endpoint, e.replay))
	r.awaitReason("connected, but no event yet")
	long := request{tokens: prompt(1, 10*engineSize), n: 60}
	for i := range long.tokens {
		long.tokens[i] %= 1000
	}
	e.serve(long)
	r.settle(e.vllm, event.StateLive)
	r.compare(e)

	e.add(long)
	e.steps(3)
	before := len(e.story)
	if a := e.command("reset", nil); a.Done || a.Pending > 0 || a.Published > before {
		t.Errorf("a reset beside a running request: %+v", a)
	}
	if a := e.command("reset", args{"running": true}); !a.Done || a.Pending != 1 || a.Published > before {
		t.Errorf("a reset that preempts: %+v", a)
	}
	e.drain()
	r.settle(e.vllm, event.StateLive)
	r.compare(e)

	before = len(e.story)
	if a := e.command("reset", nil); !a.Done || a.Pending != 1 || a.Published > before {
		t.Errorf("a reset of an idle engine: %+v", a)
	}
	if n := len(e.table()); n > 0 {
		t.Errorf("vLLM holds %d blocks after a reset", n)
	}
	if a := e.drain(); a.Published > before {
		t.Errorf("an idle engine tells of its reset by itself: %+v; then docs/interop.md is wrong", a)
	}
	if held := r.ask(e, long); held == 0 {
		t.Error("the index knows of a reset that nobody told")
	}
	other := request{tokens: long.tokens[5*engineSize:], n: 1}
	if got := e.serve(other); got.Cached != 0 {
		t.Errorf("vLLM reused %d tokens after a reset", got.Cached)
	}
	st := r.settle(e.vllm, event.StateLive)
	r.compare(e)
	if held := r.ask(e, long); held != 0 {
		t.Errorf("the index holds %d blocks from before a reset", held)
	}
	batches := r.sink.batches(st.Epoch)
	if first := batches[before].Events[0]; first.Kind != event.Cleared || first.Cause != event.ByEngine {
		t.Errorf("batch %d begins with %+v, want the reset", before, first)
	}
}

// TestEngineLives kills and restarts the engine, and our subscriber: what is known is always of the present life, and all
// of it. A subscriber that comes late knows the same.
func TestEngineLives(t *testing.T) {
	t.Parallel()
	e, r := startLLM(t, nil), newRig(t)
	live, replay := newLink(t, e.endpoint, 0), newLink(t, e.replay, 0)
	stop := r.subscribe(subscriber.DefaultConfig(), e.engineFlag(live.endpoint(), replay.endpoint()))
	f := newTraffic(3)
	serve := func(n int) (last request) {
		for range n {
			q, talk := f.next()
			f.answered(talk, q, e.serve(q).Output)
			last = q
		}
		return last
	}
	last := serve(40)
	first := r.settle(e.vllm, event.StateLive)
	r.compare(e)
	if r.ask(e, last) == 0 {
		t.Error("the index holds nothing of the last prompt")
	}

	e.kill()
	live.sever()
	replay.sever()
	e.boot(t)
	replay.mend(e.replay)
	live.mend(e.endpoint)
	// It has nothing to tell yet, and nothing to answer from: that must be enough.
	eventually(t, "the old life's blocks are gone, and the source is back", func() error {
		answer, err := r.sink.index.Lookup(&prefix.Request{Model: model, Tokens: last.tokens, Salt: last.salt})
		if err != nil {
			return err
		}
		if len(answer.Matches) != 1 || answer.Matches[0].Blocks > 0 {
			return fmt.Errorf("%+v", answer)
		}
		return nil
	})
	t.Logf("restarted, before any request: %v, %q, epoch %d after %d", r.sink.status().State, r.sink.status().Reason, r.sink.status().Epoch, first.Epoch)
	if got := e.serve(last); got.Cached != 0 {
		t.Errorf("a new engine reuses %d tokens", got.Cached)
	}
	serve(10)
	second := r.settle(e.vllm, event.StateLive)
	r.compare(e)
	if second.Epoch <= first.Epoch {
		t.Errorf("epoch %d after %d", second.Epoch, first.Epoch)
	}

	late := newRig(t)
	late.subscribe(quiet(), e.engineFlag(e.endpoint, e.replay))
	st := late.settle(e.vllm, event.StateLive)
	late.compare(e)
	if st.Ledger.Recovered != uint64(len(e.story)) || st.Ledger.Lost > 0 {
		t.Errorf("a late subscriber's ledger: %+v, want all %d by replay", st.Ledger, len(e.story))
	}

	stop()
	process := r.process(e.vllm)
	serve(10)
	r.settle(e.vllm, event.StateLive)
	_ = process.end(os.Kill)
	serve(30)
	process = r.process(e.vllm)
	r.settle(e.vllm, event.StateLive)
	serve(10)
	st = r.settle(e.vllm, event.StateLive)
	r.compare(e)
	if st.Epoch != second.Epoch || st.Ledger.Lost > 0 {
		t.Errorf("after our own restarts: epoch %d, want %d; ledger %+v", st.Epoch, second.Epoch, st.Ledger)
	}
	if err := process.end(syscall.SIGTERM); err != nil {
		t.Errorf("kvstrata run, told to stop: %v", err)
	}
	r.verifyStream(e.vllm, st.Epoch)
	late.settle(e.vllm, event.StateLive)
	late.compare(e)
}

// TestEngineFullReports serves requests whose reused blocks are told again (kv_cache_report_mode). Counted as a set, our
// index must never promise what vLLM does not have.
func TestEngineFullReports(t *testing.T) {
	t.Parallel()
	e, r := startLLM(t, nil), newRig(t)
	r.subscribe(quiet(), e.engineFlag(e.endpoint, e.replay)+",report=full")
	r.awaitReason("connected, but no event yet")
	f := newTraffic(4)
	var exact, fewer, reused int
	for i := range 300 {
		q, talk := f.next()
		q.report = "full"
		want := reusable(r.ask(e, q), len(q.tokens))
		got := e.serve(q)
		switch {
		case got.Cached == want:
			exact++
		case got.Cached > want:
			fewer++
		default:
			t.Fatalf("request %d: the index promises %d tokens, vLLM reused %d", i, want, got.Cached)
		}
		reused += btoi(got.Cached > 0)
		f.answered(talk, q, got.Output)
		r.follow(e)
	}
	t.Logf("%d requests, %d reused something; the index knew exactly %d times, and promised too little %d times", 300, reused, exact, fewer)
	if reused < 50 || exact < 200 {
		t.Error("that is too little")
	}

	// A request that waits is told again at each step.
	filler := request{tokens: f.words(20 * engineSize), n: 200}
	e.add(filler)
	e.steps(1)
	waiting := request{tokens: slices.Concat(filler.tokens, f.words(5*engineSize)), n: 100, report: "full"}
	big := request{tokens: f.words(12 * engineSize), n: 100}
	e.add(big)
	e.steps(1)
	e.add(waiting)
	before := len(e.story)
	a := e.steps(50)
	told := 0
	r.settle(e.vllm, event.StateLive)
	for _, b := range r.sink.batches(r.sink.status().Epoch)[before:] {
		for _, ev := range b.Events {
			told += btoi(ev.Kind == event.Stored && !ev.HasParent && len(ev.Blocks) >= 20)
		}
	}
	t.Logf("while a request waited for 50 steps (%d batches, busy: %v), its reused blocks were told %d times", a.Published-before, a.Busy, told)
	if told < 10 {
		t.Error("want them told at each step; docs/interop.md says so")
	}
}

// TestEngineTwoGroups runs a model with full and with sliding-window attention. What our index answers is what vLLM reuses, and what
// follows from the blocks of both groups as the index lists them.
func TestEngineTwoGroups(t *testing.T) {
	t.Parallel()
	e, r := startLLM(t, args{"model": "hybrid", "num_gpu_blocks_override": 80}), newRig(t)
	want := []cacheGroup{{"sliding_window", 64, engineSize}, {"full_attention", 0, engineSize}}
	if diff := cmp.Diff(want, e.groups); diff != "" {
		t.Fatalf("cache groups: -want +got\n%s", diff)
	}
	r.subscribe(quiet(), e.engineFlag(e.endpoint, e.replay))
	r.awaitReason("connected, but no event yet")
	f := newTraffic(5)
	var exact, fewer int
	for i := range 300 {
		q, talk := f.next()
		bound, want := r.windowed(e, q)
		// The last token is always computed, so that the prefix to go on from ends before it.
		told := r.ask(e, request{tokens: q.tokens[:len(q.tokens)-1], salt: q.salt}) * engineSize
		got := e.serve(q)
		switch {
		case told != want:
			t.Fatalf("request %d: the index promises %d tokens; %d follow from the blocks that it lists", i, told, want)
		case got.Cached != want:
			t.Fatalf("request %d: %d tokens are reusable within the window, %d without it; vLLM reused %d", i, want, bound, got.Cached)
		case got.Cached == bound:
			exact++
		case got.Cached < bound:
			fewer++
		}
		f.answered(talk, q, got.Output)
		r.follow(e)
		if i%20 == 0 {
			r.compare(e)
		}
	}
	st := r.settle(e.vllm, event.StateLive)
	r.compare(e)
	t.Logf("%d requests: vLLM reused what the full group holds %d times, and less because of the window %d times; the index was exact; counters %v", 300, exact, fewer, st.Counters)
	groups := slices.SortedFunc(slices.Values(st.Groups), func(a, b event.GroupInfo) int { return int(a.Group) - int(b.Group) })
	if len(groups) != 2 || groups[0].Spec != event.SpecSlidingWindow || groups[0].Window != 64 || groups[1].Spec != event.SpecFull {
		t.Errorf("groups told: %+v", groups)
	}
}

// TestEngineServer runs vLLM as people do: its HTTP server with the engine as a process of its own, configured by
// --kv-events-config, and asked for completions. The numbers are those of its answers.
func TestEngineServer(t *testing.T) {
	t.Parallel()
	engineRelease.need(t)
	port := freePorts(t, 3)
	command := exec.Command(engineRelease.interpreter(), "engine.py", "--serve", fmt.Sprint(port), "--num-gpu-blocks-override", "40", "--max-model-len", "1024")
	said := &tail{most: 60}
	command.Stdout, command.Stderr = said, said
	command.Env = append(os.Environ(), "TMPDIR="+t.TempDir()) // where the model is
	command.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := command.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- command.Wait() }()
	t.Cleanup(func() {
		_ = command.Process.Signal(syscall.SIGTERM) // on which it ends its engine
		select {
		case <-ended:
		case <-time.After(patience):
			_ = syscall.Kill(-command.Process.Pid, syscall.SIGKILL)
			<-ended
		}
		if t.Failed() {
			t.Logf("vLLM's server said:\n%s", said)
		}
	})
	url := fmt.Sprintf("http://127.0.0.1:%d", port)
	client := &http.Client{Timeout: patience}
	defer client.CloseIdleConnections()
	tick := time.NewTicker(200 * time.Millisecond)
	defer tick.Stop()
	for deadline := time.Now().Add(5 * time.Minute); ; <-tick.C {
		resp, err := client.Get(url + "/health")
		if err == nil {
			_ = resp.Body.Close()
			if resp.StatusCode == http.StatusOK {
				break
			}
		}
		if time.Now().After(deadline) {
			t.Fatalf("vLLM's server is not there: %v", err)
		}
	}

	e, r := &llm{vllm: &vllm{version: engineRelease}}, newRig(t)
	r.subscribe(quiet(), e.engineFlag(fmt.Sprintf("tcp://127.0.0.1:%d", port+1), fmt.Sprintf("tcp://127.0.0.1:%d", port+2)))
	r.awaitReason("connected, but no event yet")
	f := newTraffic(7)
	reused := 0
	for i := range 150 {
		q, talk := f.next()
		// The last token that is computed fills a block: the STORED of it is the last event of the request.
		q.n = 1 + (engineSize-len(q.tokens)%engineSize)%engineSize
		want := reusable(r.ask(e, q), len(q.tokens))
		cached, output := complete(t, client, url, q)
		if cached != want {
			t.Fatalf("request %d of %d tokens, salt %q: %d tokens are reusable, vLLM reused %d", i, len(q.tokens), q.salt, want, cached)
		}
		reused += btoi(cached > 0)
		f.answered(talk, q, output)
		whole := request{tokens: slices.Concat(q.tokens, output), salt: q.salt}
		eventually(t, "the request's last block is told", func() error {
			if held := r.ask(e, whole); held != (len(whole.tokens)-1)/engineSize {
				return fmt.Errorf("%d blocks of %d tokens are held", held, len(whole.tokens))
			}
			return nil
		})
	}
	st := r.sink.status()
	_, evicted := r.checkEvents(e, st.Epoch)
	t.Logf("150 requests, %d reused something; %d blocks evicted", reused, evicted)
	if reused < 50 || evicted < 50 || len(st.Counters) > 0 {
		t.Errorf("%d reused, %d evicted, counters %+v", reused, evicted, st.Counters)
	}
}

// complete asks vLLM's server for a completion; it returns what it says of cached tokens, and the tokens generated.
func complete(t *testing.T, client *http.Client, url string, q request) (cached int, output []uint32) {
	t.Helper()
	body := args{
		"model": "tiny", "prompt": q.tokens, "max_tokens": q.n, "temperature": 0, "ignore_eos": true, "detokenize": false,
		"return_token_ids": true,
	}
	if q.salt != "" {
		body["cache_salt"] = q.salt
	}
	text, err := json.Marshal(body)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := client.Post(url+"/v1/completions", "application/json", bytes.NewReader(text))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	var a struct {
		Choices []struct {
			Tokens []uint32 `json:"token_ids"`
		}
		Usage struct {
			Details struct {
				Cached int `json:"cached_tokens"`
			} `json:"prompt_tokens_details"`
		}
	}
	text, err = io.ReadAll(resp.Body)
	if err == nil {
		err = json.Unmarshal(text, &a)
	}
	if err != nil || len(a.Choices) != 1 || len(a.Choices[0].Tokens) != q.n {
		t.Fatalf("vLLM answers %v: %s (%v)", resp.Status, text, err)
	}
	return a.Usage.Details.Cached, a.Choices[0].Tokens
}

// windowed returns how much of a prompt the full group could serve, and how much the group of the sliding window allows of that: it
// must hold the blocks that the next token sees, those of the 63 tokens before it.
func (r *rig) windowed(e *llm, q request) (bound, want int) {
	r.t.Helper()
	hashes := make(map[event.PrefixHash]event.BlockHash) // of the full group
	window := make(map[event.BlockHash]bool)
	for at, h := range residentIn(r.sink.index, e.vllm) {
		if at.group == 0 {
			window[at.hash] = true
		} else {
			hashes[h.Prefix] = at.hash
		}
	}
	prefixes := event.Prefixes(nil, q.tokens, engineSize, event.Hasher{}.Seed("", q.salt), false)
	held := 0
	for held < len(prefixes) && hashes[prefixes[held]] != (event.BlockHash{}) {
		held++
	}
	bound = reusable(held, len(q.tokens))
	for n := bound / engineSize; n > 0; n-- {
		if window[hashes[prefixes[n-1]]] && (n == 1 || window[hashes[prefixes[n-2]]]) {
			return bound, n * engineSize
		}
	}
	return bound, 0
}
