package interop_test

import (
	"encoding/hex"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/zeebo/xxh3"

	"kvstrata/event"
	"kvstrata/porttest"
)

// vllm is vLLM's own publisher, stepped by publish.py, and the story that it told.
type vllm struct {
	version
	*python
	endpoint, replay string              // where it is reached
	fields           map[string][]string // that its event classes have
	rank             int32
	story            []told // of the present life, by sequence
	clock            float64
}

// told is one batch of a story.
type told struct {
	seq     event.Seq
	time    event.Time // 0 = vLLM's own, not known here
	payload uint64     // 0 = not known here
	events  []event.Event
	hole    bool // vLLM could not encode it: nobody ever sees it
}

// answer is what publish.py says to a command.
type answer struct {
	OK             bool
	Error          string
	Version        string
	Fields         map[string][]string
	Endpoint       string
	ReplayEndpoint string `json:"replay_endpoint"`
	First, Last    event.Seq
	Lacking        []string
	Batches        []struct {
		Seq event.Seq
		Hex string
	}
}

// args are the arguments of a command.
type args map[string]any

// startVLLM opens a publisher on free ports; options are those of vLLM's constructor.
func startVLLM(t *testing.T, v version, options args) *vllm {
	t.Helper()
	e := &vllm{version: v, python: v.start(t, "publish.py")}
	all := args{"endpoint": "tcp://*:0", "replay_endpoint": "tcp://*:0"}
	for name, value := range options {
		all[name] = value
	}
	if rank, ok := all["dp_rank"].(int); ok {
		e.rank = int32(rank)
	}
	e.opened(e.call("open", all))
	return e
}

func (e *vllm) opened(a answer) {
	e.t.Helper()
	if a.Version != e.number {
		e.t.Fatalf("the venv holds vLLM %s, want %s", a.Version, e.number)
	}
	e.endpoint, e.replay, e.fields, e.story = a.Endpoint, a.ReplayEndpoint, a.Fields, nil
}

func (e *vllm) call(op string, arguments args) answer {
	e.t.Helper()
	command := args{"op": op}
	for name, value := range arguments {
		command[name] = value
	}
	e.write(command)
	var a answer
	e.read(&a)
	if !a.OK {
		e.t.Fatalf("publish.py: %s: %s", op, a.Error)
	}
	if len(a.Lacking) > 0 {
		e.t.Fatalf("vLLM %s lacks %v", e.number, a.Lacking)
	}
	return a
}

// await waits until a subscriber has connected.
func (e *vllm) await() { e.t.Helper(); e.call("wait", args{"timeout": patience.Seconds()}) }

// publish sends one batch; drop puts it into the replay buffer only.
func (e *vllm) publish(events ...event.Event) { e.t.Helper(); e.step("publish", events) }
func (e *vllm) drop(events ...event.Event)    { e.t.Helper(); e.step("drop", events) }

func (e *vllm) step(op string, events []event.Event) {
	e.t.Helper()
	// Each batch has a later time than the one before, and one that a double holds exactly.
	e.clock = max(e.clock+1./1024, math.Ceil(float64(time.Now().UnixMilli())*1.024)/1024)
	docs := []any{}
	own := make([]event.Event, len(events))
	for i := range events {
		own[i] = without(events[i], e.fields)
		docs = append(docs, docOf(own[i], e.fields))
	}
	a := e.call(op, args{"events": docs, "ts": e.clock})
	e.tell(a, event.Seconds(e.clock), func(event.Seq) []event.Event { return own })
}

// fill publishes n batches with vLLM's own clock, each of a block that no other has, padded by so many bytes.
func (e *vllm) fill(n, pad int) {
	e.t.Helper()
	e.tell(e.call("publish", args{"n": n, "pad": pad}), 0, func(seq event.Seq) []event.Event {
		tokens := make([]uint32, 16)
		for i := range tokens {
			tokens[i] = uint32(seq) + uint32(i)
		}
		r := run{tokens: tokens, lora: strings.Repeat("x", pad)}
		return []event.Event{stored(r, event.IntHash(1_000_000+uint64(seq)))}
	})
}

func (e *vllm) tell(a answer, at event.Time, events func(event.Seq) []event.Event) {
	e.t.Helper()
	if int(a.First) != len(e.story) {
		e.t.Fatalf("vLLM numbers its batch %d, want %d", a.First, len(e.story))
	}
	for seq := a.First; seq <= a.Last; seq++ {
		e.story = append(e.story, told{seq: seq, time: at, events: events(seq)})
	}
	for _, b := range a.Batches {
		payload, err := hex.DecodeString(b.Hex)
		if err != nil {
			e.t.Fatal(err)
		}
		e.story[b.Seq].payload = xxh3.Hash(payload)
	}
}

// hole publishes a batch that vLLM cannot encode.
func (e *vllm) hole() {
	e.t.Helper()
	a := e.call("hole", nil)
	e.story = append(e.story, told{seq: a.First, hole: true})
}

// restart shuts the publisher down and opens another on the same ports.
func (e *vllm) restart() { e.t.Helper(); e.opened(e.call("restart", nil)) }

// last returns the newest sequence.
func (e *vllm) last() event.Seq { return event.Seq(len(e.story) - 1) }

// engineFlag names the engine as --engine has it, reached at the given addresses.
func (e *vllm) engineFlag(endpoint, replay string) string {
	flag := fmt.Sprintf("zmq+%s,model=%s,instance=%s,rank=%d", endpoint, model, e.name, e.rank)
	if replay != "" {
		flag += ",replay=" + replay
	}
	return flag
}

// freePorts finds n consecutive ports that nobody listens on, and returns the first.
func freePorts(t *testing.T, n int) int {
	t.Helper()
	port, err := porttest.Run(n)
	if err != nil {
		t.Fatal(err)
	}
	return port
}

// run is what a STORED of some blocks of a prompt is made of.
type run struct {
	tokens []uint32 // of the run's blocks
	parent *event.BlockHash
	size   uint32 // tokens a block; 0 = 16
	lora   string
}

// stored makes the STORED of a run of blocks on the GPU.
func stored(r run, hashes ...event.BlockHash) event.Event {
	ev := event.Event{
		Kind: event.Stored, Tier: event.GPU, Group: event.NoGroup, LoRAID: event.NoLoRAID, BlockSize: 16,
		Tokens: r.tokens, LoRA: r.lora, Blocks: blocksOf(hashes),
	}
	if r.size != 0 {
		ev.BlockSize = r.size
	}
	if r.parent != nil {
		ev.HasParent, ev.Parent = true, *r.parent
	}
	return ev
}

// offloaded makes the placeholder that vLLM's offloading connector publishes: blocks without tokens.
func offloaded(tier event.Tier, hashes ...event.BlockHash) event.Event {
	ev := stored(run{}, hashes...)
	ev.Tier, ev.BlockSize = tier, 0
	return ev
}

func evicted(tier event.Tier, hashes ...event.BlockHash) event.Event {
	return event.Event{
		Kind: event.Evicted, Tier: tier, Group: event.NoGroup, LoRAID: event.NoLoRAID, Blocks: blocksOf(hashes),
	}
}

func cleared() event.Event {
	return event.Event{Kind: event.Cleared, Cause: event.ByEngine, Group: event.NoGroup, LoRAID: event.NoLoRAID}
}

func blocksOf(hashes []event.BlockHash) []event.Block {
	var blocks []event.Block
	for _, h := range hashes {
		blocks = append(blocks, event.Block{Hash: h, Copies: -1, Age: -1})
	}
	return blocks
}

// ints makes integer hashes.
func ints(values ...uint64) []event.BlockHash {
	var hashes []event.BlockHash
	for _, n := range values {
		hashes = append(hashes, event.IntHash(n))
	}
	return hashes
}

// digest makes a byte hash as vLLM's sha256 gives it, 32 bytes.
func digest(n int) event.BlockHash {
	return event.BytesHash(strings.Repeat(fmt.Sprintf("%08d", n), 4))
}

// prompt makes n tokens that are like no other prompt's, of every width that msgpack has.
func prompt(seed uint32, n int) []uint32 {
	tokens := make([]uint32, n)
	for i := range tokens {
		tokens[i] = (seed*7919 + uint32(i)*2654435761) >> (uint32(i) % 5 * 7)
	}
	return slices.Clip(tokens)
}
