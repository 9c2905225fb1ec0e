package workload

import (
	"bufio"
	"bytes"
	"container/list"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"

	"kvstrata/event"
)

// The protocol of work 1.
const (
	TraceFile      = "mooncake_conversation_trace.jsonl"
	TraceSHA256    = "b8cbb061a85206d729d91cdc2981f43c9e0d99209dce588d3af5f7934408b9df"
	BlocksPerID    = 4      // a hash id is 512 tokens, an engine's block 128
	WorkersPerCopy = 16     // request k goes to worker k mod 16
	PoolBlocks     = 16_384 // of each worker
	RemovedPerCopy = 787_704
)

// Trace is a request log: what prompts came when, as chains of hash ids of which each names a prefix.
type Trace struct {
	SHA256   string
	Requests []TraceRequest
	Blocks   int // block numbers are below
}

// TraceRequest is one prompt. Its blocks are id·4 … id·4+3 of each id.
type TraceRequest struct {
	Millis int64
	IDs    []uint32
}

// Step is what one request makes its worker do: blocks that leave the pool, then runs that enter it.
type Step struct {
	Request int
	Worker  int
	Removed []uint32
	Stored  []Run
}

// Run is so many blocks of the request, from one place on, that are stored together.
type Run struct{ First, Blocks int }

// ReadTrace reads the trace from a folder.
func ReadTrace(folder string) (*Trace, error) {
	data, err := os.ReadFile(filepath.Join(folder, TraceFile))
	if err != nil {
		return nil, fmt.Errorf("read trace (KVSTRATA_TRACES names the folder that has %s): %w", TraceFile, err)
	}
	return ParseTrace(data)
}

// ParseTrace reads a trace of one JSON object a line. It refuses one in which an id follows two different ids: then ids
// would not name prefixes.
func ParseTrace(data []byte) (*Trace, error) {
	sum := sha256.Sum256(data)
	t := &Trace{SHA256: hex.EncodeToString(sum[:])}
	parents := make(map[uint32]int64)
	lines := bufio.NewScanner(bytes.NewReader(data))
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var line struct {
			Timestamp int64    `json:"timestamp"`
			HashIDs   []uint32 `json:"hash_ids"`
		}
		if err := json.Unmarshal(lines.Bytes(), &line); err != nil {
			return nil, fmt.Errorf("read request %d of trace: %w", len(t.Requests), err)
		}
		parent := int64(-1)
		for _, id := range line.HashIDs {
			if before, ok := parents[id]; ok && before != parent {
				return nil, fmt.Errorf("read request %d of trace: id %d follows %d and %d", len(t.Requests), id, before, parent)
			}
			parents[id], parent = parent, int64(id)
			t.Blocks = max(t.Blocks, int(id+1)*BlocksPerID)
		}
		t.Requests = append(t.Requests, TraceRequest{Millis: line.Timestamp, IDs: line.HashIDs})
	}
	return t, lines.Err()
}

// Block returns the number of block i of the prompt.
func (r *TraceRequest) Block(i int) uint32 {
	return r.IDs[i/BlocksPerID]*BlocksPerID + uint32(i%BlocksPerID)
}

// Len returns how many blocks the prompt has.
func (r *TraceRequest) Len() int { return len(r.IDs) * BlocksPerID }

// Steps runs the trace through workers' pools: each an LRU, touched in the prompt's order; what is not there enters, and
// where the pool is full the block that was touched longest ago leaves.
func (t *Trace) Steps(workers, pool int) []Step {
	pools := make([]lru, workers)
	for i := range pools {
		pools[i] = lru{order: list.New(), at: make(map[uint32]*list.Element)}
	}
	steps := make([]Step, len(t.Requests))
	for k := range t.Requests {
		r, s := &t.Requests[k], &steps[k]
		s.Request, s.Worker = k, k%workers
		p, run := &pools[s.Worker], false
		for i := range r.Len() {
			if p.touch(r.Block(i)) {
				run = false
				continue
			}
			if p.order.Len() > pool {
				s.Removed = append(s.Removed, p.evict())
			}
			if !run {
				s.Stored = append(s.Stored, Run{First: i})
			}
			s.Stored[len(s.Stored)-1].Blocks++
			run = true
		}
	}
	return steps
}

// Answers returns how many blocks the right answers to one copy's queries add up to: of each worker, the blocks of the prompt up to the
// first that it does not hold, counted plainly.
func (t *Trace) Answers() (blocks int) {
	var held [WorkersPerCopy]map[uint32]bool
	for w := range held {
		held[w] = make(map[uint32]bool)
	}
	for _, s := range t.Steps(WorkersPerCopy, PoolBlocks) {
		r := &t.Requests[s.Request]
		for w := range held {
			for i := 0; i < r.Len() && held[w][r.Block(i)]; i++ {
				blocks++
			}
		}
		for _, b := range s.Removed {
			delete(held[s.Worker], b)
		}
		for _, run := range s.Stored {
			for i := range run.Blocks {
				held[s.Worker][r.Block(run.First+i)] = true
			}
		}
	}
	return blocks
}

// lru is a pool: blocks in the order in which they were touched.
type lru struct {
	order *list.List
	at    map[uint32]*list.Element
}

// touch reports whether the block was there; now it is.
func (p *lru) touch(b uint32) bool {
	if e, ok := p.at[b]; ok {
		p.order.MoveToBack(e)
		return true
	}
	p.at[b] = p.order.PushBack(b)
	return false
}

func (p *lru) evict() uint32 {
	b := p.order.Remove(p.order.Front()).(uint32)
	delete(p.at, b)
	return b
}

// Names are one copy's names of the trace's blocks. Copies have none in common.
type Names struct {
	Local  []uint64           // by block number
	Prefix []event.PrefixHash // by block number
}

// Names returns the names of a copy.
func (t *Trace) Names(number int) *Names {
	n := &Names{Local: make([]uint64, t.Blocks), Prefix: make([]event.PrefixHash, t.Blocks)}
	for k := range t.Requests {
		r := &t.Requests[k]
		var parent event.PrefixHash
		for i := range r.Len() {
			b := r.Block(i)
			if n.Prefix[b] == 0 {
				n.Local[b] = Mix(uint64(number)<<40 | uint64(b) | 1<<63)
				if i == 0 {
					n.Prefix[b] = event.PrefixHash(n.Local[b])
				} else {
					n.Prefix[b] = event.Chain(parent, n.Local[b])
				}
			}
			parent = n.Prefix[b]
		}
	}
	return n
}

// Engine returns what the engines call a block. As in Dynamo's own benchmark, whose engines hash alike, it is the same on
// all of a copy's workers.
func (n *Names) Engine(b uint32) uint64 { return Mix(uint64(n.Prefix[b])) }
