// Package sim is engines without models: block pools, schedulers and KV events that behave as vLLM v1's do, fed with
// live traffic or with a recorded trace.
//
// An [Engine] owns a [BlockPool] and tells what happens in it through a [Publisher], one batch a step, as vLLM tells it
// on its socket. A [Fleet] sends requests to prefill and decode engines, as fast as it can or in time. Requests come
// from [Traffic], which makes conversations, or from a [TraceReader], which reads Mooncake's traces.
//
// Everything is a function of its seeds and its input: there is no clock but the time that the caller passes, except
// in a timed [Fleet.Run], which waits.
//
// What an engine does follows vllm/v1/core (block_pool.py, kv_cache_utils.py, kv_cache_manager.py, sched/scheduler.py)
// as read in 2026, for one KV cache group of full attention without speculative decoding.
package sim

import (
	"errors"
	"time"

	"kvstrata/connector"
	"kvstrata/event"
)

// Publisher takes the batches of one engine in order, numbers them and sends them. The batch is its own from then on:
// the engine keeps nothing of it. Tokens may alias the request's prompt and ExtraKeys a table of the engine's, so
// nobody writes to either. An error ends the engine's story: its caller stops stepping it.
type Publisher interface {
	Publish(b *event.Batch) error
}

// Request is one prompt and how much to generate from it.
type Request struct {
	ID      string   // unique among the engine's live requests; the generated tokens are a function of it
	Prompt  []uint32 // token ids; shared with the published events, so never changed after Submit
	Output  int      // tokens to generate; an engine always generates the first, so 0 is as good as 1
	LoRA    string   // adapter name; part of every block's hash
	Salt    string   // cache salt; part of the first block's hash, hence of every one's
	Session string   // told in the STORED events that the request causes
	Tenant  string   // told to the connector

	// External says that the prompt's KV arrives by transfer from another engine (the decode role): its blocks are
	// allocated at once, cached one step later, when they are loaded, and only the last token is computed.
	// An engine with a connector asks that instead.
	External bool

	// Params are the connector's: on the way to an engine what its client brought along, on the way back what the engine
	// answered (vLLM's kv_transfer_params).
	Params *connector.Params
}

// Why an engine refuses a request.
var (
	ErrEmptyPrompt = errors.New("prompt is empty")
	ErrTooLong     = errors.New("request does not fit into the block pool")
	ErrQueueFull   = errors.New("waiting queue is full")
	ErrDuplicateID = errors.New("a live request has this id, or one whose blocks a connector still reads")
)

// Arrival is a request and when it comes.
type Arrival struct {
	At      time.Duration // since the start of the run, in virtual time
	Request Request
	HashIDs []uint64 // of a trace's request: what its blocks of 512 tokens are called; nil otherwise
}
