package interop_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"kvstrata/event"
)

// dynamoRelease is NVIDIA Dynamo's own radix tree and hash functions; its wheel is in a venv of its own.
var dynamoRelease = version{name: "dynamo", number: "1.6.1"}

// dynamoQuery asks what Dynamo's router would see of a prompt.
type dynamoQuery struct {
	Tokens    []uint32 `json:"tokens"`
	BlockSize int      `json:"block_size"`
	LoRA      string   `json:"lora_name,omitempty"`
	Salt      string   `json:"cache_salt,omitempty"`
	EAGLE     bool     `json:"eagle,omitempty"`
}

// dynamoAnswer is Dynamo's answer to it: the prompt's block hashes, and what each worker has.
type dynamoAnswer struct {
	Hashes []uint64      `json:"hashes"`
	Scores []dynamoScore `json:"scores"`
	Error  string        `json:"error"`
}

type dynamoScore struct {
	Tier   string `json:"tier"`
	Worker uint64 `json:"worker"`
	DPRank uint32 `json:"dp_rank"`
	Blocks int    `json:"blocks"`
}

// ask asks Dynamo, and fails the test where it refuses.
func (p *python) ask(query dynamoQuery) dynamoAnswer {
	p.t.Helper()
	p.write(map[string]any{"query": query})
	var answer dynamoAnswer
	p.read(&answer)
	if answer.Error != "" {
		p.t.Fatalf("Dynamo: %s", answer.Error)
	}
	return answer
}

// tokensFrom returns n tokens of a made-up prompt.
func tokensFrom(first uint32, n int) []uint32 {
	tokens := make([]uint32, n)
	for i := range tokens {
		tokens[i] = first + uint32(i)*7919
	}
	return tokens
}

// Our local hashes are Dynamo's block hashes, whatever the block size, the adapter, the salt and the window.
func TestDynamoHashes(t *testing.T) {
	t.Parallel()
	dynamoRelease.need(t)
	dynamo := dynamoRelease.start(t, "dynamo_tree.py")
	queries := []dynamoQuery{
		{BlockSize: 1},
		{BlockSize: 4},
		{BlockSize: 16},
		{BlockSize: 64},
		{BlockSize: 16, LoRA: "my-lora"},
		{BlockSize: 16, Salt: "tenant-a"},
		{BlockSize: 16, LoRA: "my-lora", Salt: "tenant-a"},
		{BlockSize: 16, LoRA: "é", Salt: "salt with spaces, and more than sixteen bytes"},
		{BlockSize: 4, EAGLE: true},
		{BlockSize: 16, EAGLE: true, LoRA: "my-lora", Salt: "tenant-a"},
	}
	for _, query := range queries {
		for _, n := range []int{0, query.BlockSize - 1, query.BlockSize, query.BlockSize + 1, 333} {
			query.Tokens = tokensFrom(1<<31, n)
			window := query.BlockSize
			if query.EAGLE {
				window++
			}
			var want []uint64
			for start := 0; start+window <= n; start += query.BlockSize {
				seed := event.NewHasher("").Seed(query.LoRA, query.Salt)
				want = append(want, event.LocalHash(query.Tokens[start:start+window], seed))
			}
			got := dynamo.ask(query).Hashes
			if len(want)+len(got) > 0 && !cmp.Equal(got, want) {
				t.Errorf("%d tokens of %+v: %s", n, query, cmp.Diff(want, got))
			}
		}
	}
}

// Dynamo's tree takes router events that name blocks as ours do, by rank and tier, and refuses what it must.
func TestDynamoTree(t *testing.T) {
	t.Parallel()
	dynamoRelease.need(t)
	dynamo := dynamoRelease.start(t, "dynamo_tree.py")
	tokens := tokensFrom(5, 12)
	names := event.Prefixes(nil, tokens, 4, event.NewHasher("").Seed("", ""), false)
	block := func(i int) map[string]any {
		local := event.LocalHash(tokens[4*i:4*i+4], event.NewHasher("").Seed("", ""))
		return map[string]any{"block_hash": uint64(names[i]), "tokens_hash": local}
	}
	router := func(worker uint64, tier string, id int, rank uint32, data any) map[string]any {
		inner := map[string]any{"event_id": id, "data": data, "dp_rank": rank}
		return map[string]any{"worker_id": worker, "storage_tier": tier, "event": inner}
	}
	stored := func(parent any, blocks ...map[string]any) map[string]any {
		return map[string]any{"stored": map[string]any{"parent_hash": parent, "blocks": blocks}}
	}
	want := func(scores ...dynamoScore) {
		t.Helper()
		if diff := cmp.Diff(scores, dynamo.ask(dynamoQuery{Tokens: tokens, BlockSize: 4}).Scores); diff != "" {
			t.Error(diff)
		}
	}

	dynamo.write(router(7, "device", 1, 0, stored(nil, block(0), block(1))))
	dynamo.write(router(7, "device", 2, 3, stored(nil, block(0))))
	dynamo.write(map[string]any{"timestamp": 5, "event": router(7, "device", 3, 0, stored(uint64(names[1]), block(2)))})
	dynamo.write(router(8, "host_pinned", 1, 0, stored(nil, block(0), block(1))))
	want(
		dynamoScore{"device", 7, 0, 3}, dynamoScore{"device", 7, 3, 1},
		dynamoScore{"host_pinned", 8, 0, 2},
	)
	dynamo.write(router(7, "device", 4, 0, map[string]any{"removed": map[string]any{"block_hashes": []uint64{uint64(names[2])}}}))
	dynamo.write(router(7, "device", 5, 3, "cleared"))
	want(dynamoScore{"device", 7, 0, 2}, dynamoScore{"host_pinned", 8, 0, 2})

	dynamo.write(router(7, "device", 6, 0, stored(uint64(99), block(2))))
	var refused dynamoAnswer
	if dynamo.read(&refused); refused.Error == "" {
		t.Error("Dynamo takes a block whose parent it does not know")
	}
}
