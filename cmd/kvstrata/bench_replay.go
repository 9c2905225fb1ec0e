package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"kvstrata/event"
	"kvstrata/sim"
)

// The trace that is replayed, and how its prompts become blocks.
const (
	replayTrace     = "mooncake_conversation_trace.jsonl"
	replayBlocks    = 4   // of a hash id, which is 512 tokens
	replayBlockSize = 128 // tokens
	replayStep      = 64  // blocks that an engine stores in one step at most
)

// replay makes the messages of a fleet that serves a trace again and again: each copy's prompts have nothing in common with those
// before it. Request k goes to engine k modulo their number. The bus's clock runs with the events, so many an hour.
type replay struct {
	requests  []sim.TraceRequest
	engines   []*replayEngine
	unlike    bool // engines hash each its own way
	began     event.Time
	perHour   float64
	made      uint64 // block events, sent or not
	events    uint64 // sent
	copies    uint64
	next      int // request
	names     map[uint64]event.PrefixHash
	position  event.Position
	unsent    []*event.Message
	lastStamp event.Time
}

// replayEngine is one engine's pool, least recently used first.
type replayEngine struct {
	source event.Source
	seed   uint64
	seq    event.Seq
	room   int
	at     map[event.PrefixHash]*poolEntry
	ring   poolEntry // next is the oldest
}

type poolEntry struct {
	prefix     event.PrefixHash
	stored     event.Time
	prev, next *poolEntry
}

// newReplay reads the trace from a folder. The bus's clock begins at a moment.
func newReplay(folder string, engines, pool int, perHour float64, unlike bool, began time.Time) (*replay, error) {
	file, err := os.Open(filepath.Join(folder, replayTrace))
	if err != nil {
		return nil, fmt.Errorf("open the trace (--traces or KVSTRATA_TRACES names the folder that has %s): %w", replayTrace, err)
	}
	defer file.Close()
	r := &replay{
		began: event.UnixTime(began), lastStamp: event.UnixTime(began), perHour: perHour, unlike: unlike,
		position: event.Position{Stream: "KV_EVENTS", Created: event.UnixTime(began)},
	}
	for in := sim.NewTraceReader(file); ; {
		request, err := in.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, err
		}
		r.requests = append(r.requests, request)
	}
	if len(r.requests) == 0 {
		return nil, fmt.Errorf("%s holds no request", file.Name())
	}
	for i := range engines {
		e := &replayEngine{
			source: event.Source{Cluster: event.DefaultCluster, Model: "bench", Instance: strconv.Itoa(i), Origin: event.Engine},
			room:   pool, at: make(map[event.PrefixHash]*poolEntry, pool),
		}
		if unlike {
			e.seed = mixed(uint64(i + 1))
		}
		e.ring.prev, e.ring.next = &e.ring, &e.ring
		r.engines = append(r.engines, e)
	}
	return r, nil
}

// message returns the fleet's next message: one batch of what one engine's step evicted and stored.
func (r *replay) message() *event.Message {
	for len(r.unsent) == 0 {
		r.serve()
	}
	m := r.unsent[0]
	r.unsent = r.unsent[1:]
	r.events += uint64(m.Batches[0].Blocks())
	return m
}

// serve replays one request.
func (r *replay) serve() {
	if r.next == 0 {
		r.copies++
		r.names = make(map[uint64]event.PrefixHash)
	}
	request, e := &r.requests[r.next], r.engines[r.next%len(r.engines)]
	r.next = (r.next + 1) % len(r.requests)
	var evicted []event.Block
	var runs []event.Event
	var parent event.PrefixHash
	blocks, run := 0, false
	flush := func() {
		if blocks > 0 {
			r.step(e, evicted, runs)
		}
		evicted, runs, blocks, run = nil, nil, 0, false
	}
	for i := range replayBlocks * len(request.HashIDs) {
		id := request.HashIDs[i/replayBlocks]*replayBlocks + uint64(i%replayBlocks)
		name, ok := r.names[id]
		if !ok {
			local := mixed(r.copies<<40 | id | 1<<63)
			if name = event.PrefixHash(local); i > 0 {
				name = event.Chain(parent, local)
			}
			r.names[id] = name
		}
		if e.touch(name) {
			parent, run = name, false
			continue
		}
		if blocks == replayStep {
			flush()
		}
		if len(e.at) == e.room {
			old := e.evict()
			evicted = append(evicted, event.Block{Hash: e.name(old.prefix), Prefix: old.prefix, Effect: -1, Age: time.Duration(old.stored)})
		}
		if !run {
			ev := event.Event{
				Kind: event.Stored, Tier: event.GPU, Group: 0, Spec: event.SpecFull, LoRAID: event.NoLoRAID, BlockSize: replayBlockSize,
			}
			if i > 0 {
				ev.HasParent, ev.Parent = true, e.name(parent)
			}
			runs, run = append(runs, ev), true
		}
		e.enter(name)
		last := &runs[len(runs)-1]
		last.Blocks = append(last.Blocks, event.Block{Hash: e.name(name), Prefix: name, Effect: 1, Copies: -1, Age: -1})
		parent = name
		blocks++
	}
	flush()
}

// step makes the message of one step, some milliseconds after it. Clocks differ from each other as on a network that is well.
func (r *replay) step(e *replayEngine, evicted []event.Block, runs []event.Event) {
	b := event.Batch{First: e.seq, Last: e.seq, Way: event.Live, Rank: -1}
	e.seq++
	r.made += uint64(len(evicted))
	for i := range runs {
		r.made += uint64(len(runs[i].Blocks))
	}
	noise := mixed(r.position.Sequence)
	stored := r.began + event.Time(float64(r.made)/r.perHour*float64(time.Hour)) + event.Time(noise%5_000_000)
	stored = max(stored, r.lastStamp+1000) // a stream's clock does not go back
	r.lastStamp = stored
	b.Received = stored - event.Time(200_000+noise>>20%5_000_000)
	b.Time = b.Received - event.Time(100_000+noise>>40%2_000_000)
	if len(evicted) > 0 {
		for i := range evicted {
			evicted[i].Age = max(time.Duration(b.Time)-evicted[i].Age, 0).Truncate(time.Microsecond)
		}
		b.Events = append(b.Events, event.Event{Kind: event.Evicted, Tier: event.GPU, Group: 0, LoRAID: event.NoLoRAID, Blocks: evicted})
	}
	b.Events = append(b.Events, runs...)
	for i := range runs {
		for j := range runs[i].Blocks {
			if at := e.at[runs[i].Blocks[j].Prefix]; at != nil {
				at.stored = b.Time
			}
		}
	}
	r.position.Sequence++
	r.unsent = append(r.unsent, &event.Message{
		Source: e.source, Epoch: event.Epoch(time.Duration(r.began).Milliseconds()), Fence: 1, Position: r.position, Stored: stored,
		Batches: []event.Batch{b},
	})
}

// name is what the engine calls a block.
func (e *replayEngine) name(prefix event.PrefixHash) event.BlockHash {
	return event.IntHash(mixed(uint64(prefix) ^ e.seed))
}

// touch reports whether the engine holds a block; then it is the one that was used last.
func (e *replayEngine) touch(prefix event.PrefixHash) bool {
	entry, ok := e.at[prefix]
	if ok {
		entry.unlink()
		e.push(entry)
	}
	return ok
}

func (e *replayEngine) enter(prefix event.PrefixHash) {
	entry := &poolEntry{prefix: prefix}
	e.at[prefix] = entry
	e.push(entry)
}

func (e *replayEngine) evict() *poolEntry {
	entry := e.ring.next
	entry.unlink()
	delete(e.at, entry.prefix)
	return entry
}

func (e *replayEngine) push(entry *poolEntry) {
	entry.prev, entry.next = e.ring.prev, &e.ring
	entry.prev.next, e.ring.prev = entry, entry
}

func (p *poolEntry) unlink() { p.prev.next, p.next.prev = p.next, p.prev }

// mixed is splitmix64's output function, a permutation of 64 bits.
func mixed(x uint64) uint64 {
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}
