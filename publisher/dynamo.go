package publisher

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"

	"github.com/zeebo/xxh3"

	"kvstrata/event"
)

// DynamoRecorder writes judged events as Dynamo's recorder does: a JSON line each, {timestamp, event}, the timestamp in ms since
// the first. A source is a worker; its ranks share the worker's id.
//
// Dynamo's router finds blocks by the local hashes of their tokens, so a STORED can be written only where tokens travel, in the
// scheme without a key. What Dynamo has no word for is left out: loads, copies but the last, and blocks with extra keys. So is
// what put no block here: re-reports, names that became known later, blocks elsewhere.
//
// Not safe for concurrent use.
type DynamoRecorder struct {
	out   io.Writer
	first event.Time
	next  map[event.Source]uint64 // event ids

	// Written counts lines, Unwritten STORED runs that could not be written, or not to their end.
	Written   int
	Unwritten uint64
}

// NewDynamoRecorder returns a recorder that writes to out.
func NewDynamoRecorder(out io.Writer) *DynamoRecorder {
	return &DynamoRecorder{out: out, next: make(map[event.Source]uint64)}
}

type dynamoLine struct {
	Timestamp int64       `json:"timestamp"`
	Event     dynamoEvent `json:"event"`
}

type dynamoEvent struct {
	Worker uint64 `json:"worker_id"`
	Tier   string `json:"storage_tier"`
	Event  struct {
		ID   uint64 `json:"event_id"`
		Data any    `json:"data"`
		Rank uint32 `json:"dp_rank"`
	} `json:"event"`
}

type dynamoStored struct {
	Stored struct {
		Parent *uint64       `json:"parent_hash"`
		Blocks []dynamoBlock `json:"blocks"`
	} `json:"stored"`
}

type dynamoBlock struct {
	Hash  uint64 `json:"block_hash"`
	Local uint64 `json:"tokens_hash"`
}

type dynamoRemoved struct {
	Removed struct {
		Hashes []uint64 `json:"block_hashes"`
	} `json:"removed"`
}

// errKeyed says that local hashes do not lead to the prefix hashes of the stream.
var errKeyed = errors.New("the stream's prefix hashes are not Dynamo's: it has a --hash-key")

// Write writes the events of a message.
func (d *DynamoRecorder) Write(m *event.Message) error {
	for i := range m.Batches {
		b := &m.Batches[i]
		if d.first == 0 {
			d.first = b.Received
		}
		for j := range b.Events {
			lines, err := d.data(&b.Events[j])
			if err != nil {
				return fmt.Errorf("write batch %d of %v: %w", b.First, m.Source, err)
			}
			for _, data := range lines {
				if err := d.line(m.Source, b, b.Events[j].Tier, data); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

func (d *DynamoRecorder) line(source event.Source, b *event.Batch, tier event.Tier, data any) error {
	line := dynamoLine{Timestamp: int64(b.Received-d.first) / 1e6}
	line.Event.Worker, line.Event.Tier = workerID(source), dynamoTier(tier)
	line.Event.Event.ID, line.Event.Event.Data, line.Event.Event.Rank = d.next[source], data, source.Rank
	d.next[source]++
	text, err := json.Marshal(line)
	if err != nil {
		return err
	}
	if _, err := d.out.Write(append(text, '\n')); err != nil {
		return err
	}
	d.Written++
	return nil
}

// data returns what Dynamo is to be told of an event, a line each.
func (d *DynamoRecorder) data(ev *event.Event) ([]any, error) {
	switch ev.Kind {
	case event.Cleared:
		return []any{"cleared"}, nil
	case event.Evicted:
		var removed dynamoRemoved
		for i := range ev.Blocks {
			if ev.Blocks[i].Effect < 0 && ev.Blocks[i].Copies <= 0 { // the last copy, or nobody knows
				removed.Removed.Hashes = append(removed.Removed.Hashes, dynamoHash(ev.Blocks[i].Hash))
			}
		}
		if removed.Removed.Hashes == nil {
			return nil, nil
		}
		return []any{removed}, nil
	case event.Stored:
		return d.stored(ev)
	default:
		return nil, nil
	}
}

// stored returns the chains of a run that its blocks of no effect leave. Behind a block without a name nothing is told: what
// Dynamo would call it is not what the stream does.
func (d *DynamoRecorder) stored(ev *event.Event) (chains []any, err error) {
	if !slices.ContainsFunc(ev.Blocks, func(b event.Block) bool { return b.Effect > 0 }) {
		return nil, nil
	}
	window := int(ev.BlockSize)
	if ev.Eagle {
		window++
	}
	size := int(ev.BlockSize)
	extra := slices.ContainsFunc(ev.ExtraKeys, func(keys []byte) bool { return keys != nil })
	if size == 0 || ev.Unrooted || extra || len(ev.Tokens) != (len(ev.Blocks)-1)*size+window {
		d.Unwritten++
		return nil, nil
	}
	var run *dynamoStored // nil where the next block begins one
	var last event.PrefixHash
	for i := range ev.Blocks {
		b := &ev.Blocks[i]
		if b.Prefix == 0 {
			d.Unwritten++
			break
		}
		local := event.LocalHash(ev.Tokens[i*size:i*size+window], ev.Seed)
		if (i > 0 || !ev.HasParent) && b.Prefix != event.Chain(last, local) { // before that the parent's name is not in the run
			return nil, errKeyed
		}
		last = b.Prefix
		if b.Effect <= 0 {
			run = nil
			continue
		}
		if run == nil {
			run = new(dynamoStored)
			run.Stored.Parent = dynamoParent(ev, i)
			chains = append(chains, run)
		}
		run.Stored.Blocks = append(run.Stored.Blocks, dynamoBlock{Hash: dynamoHash(b.Hash), Local: local})
	}
	return chains, nil
}

// dynamoParent returns the hash of what block i of a run follows; nil for a root.
func dynamoParent(ev *event.Event, i int) *uint64 {
	parent := ev.Parent
	switch {
	case i > 0:
		parent = ev.Blocks[i-1].Hash
	case !ev.HasParent:
		return nil
	}
	hash := dynamoHash(parent)
	return &hash
}

// dynamoHash returns a block hash as Dynamo has it: of bytes, the last eight.
func dynamoHash(h event.BlockHash) uint64 {
	if n, ok := h.Int(); ok {
		return n
	}
	b := h.AppendTo(nil)
	var n uint64
	for _, c := range b[max(0, len(b)-8):] {
		n = n<<8 | uint64(c)
	}
	return n
}

// workerID returns a number for a source's instance that is the same everywhere, and that a float64 holds.
func workerID(s event.Source) uint64 {
	s.Rank = 0
	return xxh3.HashString(s.Tokens()) & (1<<53 - 1)
}

func dynamoTier(t event.Tier) string {
	switch t.Warmth() {
	case 0:
		return "device"
	case 1:
		return "host_pinned"
	case 2:
		return "disk"
	default:
		return "external"
	}
}
