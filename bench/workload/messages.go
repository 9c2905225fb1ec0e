package workload

import (
	"fmt"

	"kvstrata/event"

	"github.com/tinylib/msgp/msgp"
)

// Payload is an engine's message: a vLLM KVEventBatch in msgpack.
type Payload struct {
	Pod  int
	Data []byte
}

// Shape says what the messages of work 2 hold.
type Shape int

// The shapes.
const (
	Prefill64 Shape = iota // one BlockStored of 64 blocks
	Decode1                // 32 BlockStored of one block, each the child of the one before
	Churn                  // 8 BlockStored of 4 blocks, and 8 BlockRemoved of 4 that were stored 256 messages ago
)

func (s Shape) String() string { return []string{"prefill64", "decode1", "churn"}[s] }

// Events returns how many events n messages of a pod hold.
func (s Shape) Events(n int) int {
	switch s {
	case Prefill64:
		return n
	case Decode1:
		return 32 * n
	default:
		return 8*n + 8*max(n-churnLag, 0)
	}
}

const (
	blockTokens = 16
	churnLag    = 256
	chainLength = 1024 // blocks after which decode1 begins another sequence
)

// Payloads returns n messages of each of so many pods, in turn. Every pod has hashes and tokens of its own; asMaps
// chooses the form of vLLM 0.24, else events are arrays of 8 fields.
func Payloads(shape Shape, pods, n int, asMaps bool) []Payload {
	writers := make([]podWriter, pods)
	for p := range writers {
		writers[p] = podWriter{random: NewRandom(uint64(p+1) << 32), asMaps: asMaps}
	}
	payloads := make([]Payload, 0, pods*n)
	for i := range n {
		for p := range writers {
			payloads = append(payloads, Payload{Pod: p, Data: writers[p].message(shape, i)})
		}
	}
	return payloads
}

type podWriter struct {
	random *Random
	asMaps bool
	parent uint64
	chain  int
	stored [][]uint64 // churn: runs, oldest first
}

func (w *podWriter) message(shape Shape, number int) []byte {
	b := msgp.AppendArrayHeader(nil, 3)
	b = msgp.AppendFloat64(b, 1_790_000_000+float64(number)/100)
	switch shape {
	case Prefill64:
		b = msgp.AppendArrayHeader(b, 1)
		b, _ = w.appendStored(b, 64, 0)
	case Decode1:
		b = msgp.AppendArrayHeader(b, 32)
		for range 32 {
			var hashes []uint64
			b, hashes = w.appendStored(b, 1, w.parent)
			w.parent = hashes[0]
			if w.chain++; w.chain%chainLength == 0 {
				w.parent = 0
			}
		}
	case Churn:
		removes := 0
		if number >= churnLag {
			removes = 8
		}
		b = msgp.AppendArrayHeader(b, uint32(8+removes))
		for range 8 {
			var hashes []uint64
			b, hashes = w.appendStored(b, 4, 0)
			w.stored = append(w.stored, hashes)
		}
		for range removes {
			b = w.appendRemoved(b, w.stored[0])
			w.stored = w.stored[1:]
		}
	default:
		panic(fmt.Sprintf("work: shape %d", shape))
	}
	return msgp.AppendNil(b)
}

// key begins a field: by its name in a map, by its place in an array.
func (w *podWriter) key(b []byte, name string) []byte {
	if w.asMaps {
		b = msgp.AppendString(b, name)
	}
	return b
}

func (w *podWriter) header(b []byte, fields uint32, tag string) []byte {
	if w.asMaps {
		b = msgp.AppendMapHeader(b, fields)
		b = msgp.AppendString(b, "type")
	} else {
		b = msgp.AppendArrayHeader(b, fields)
	}
	return msgp.AppendString(b, tag)
}

// appendStored appends a run of n new blocks below a parent; 0 = a root.
func (w *podWriter) appendStored(b []byte, n int, parent uint64) ([]byte, []uint64) {
	hashes := make([]uint64, n)
	for i := range hashes {
		hashes[i] = w.random.Next()
	}
	b = w.header(b, 8, "BlockStored")
	b = appendHashes(w.key(b, "block_hashes"), hashes)
	b = w.key(b, "parent_block_hash")
	if parent == 0 {
		b = msgp.AppendNil(b)
	} else {
		b = msgp.AppendUint64(b, parent)
	}
	b = msgp.AppendArrayHeader(w.key(b, "token_ids"), uint32(n*blockTokens))
	for range n * blockTokens {
		b = msgp.AppendUint32(b, w.random.Token())
	}
	b = msgp.AppendUint32(w.key(b, "block_size"), blockTokens)
	b = msgp.AppendNil(w.key(b, "lora_id"))
	b = msgp.AppendString(w.key(b, "medium"), string(event.GPU))
	return msgp.AppendNil(w.key(b, "lora_name")), hashes
}

func (w *podWriter) appendRemoved(b []byte, hashes []uint64) []byte {
	b = w.header(b, 3, "BlockRemoved")
	b = appendHashes(w.key(b, "block_hashes"), hashes)
	return msgp.AppendString(w.key(b, "medium"), string(event.GPU))
}

func appendHashes(b []byte, hashes []uint64) []byte {
	b = msgp.AppendArrayHeader(b, uint32(len(hashes)))
	for _, h := range hashes {
		b = msgp.AppendUint64(b, h)
	}
	return b
}
