package connector

import (
	"context"

	"kvstrata/event"
)

// Scheduler is the half of a connector in the engine's scheduler (vLLM's KVConnectorBase_V1 with role SCHEDULER,
// vllm/distributed/kv_transfer/kv_connector/v1/base.py at 00f4240e; the upstream name stands at each hook). No hook waits on
// a network. One goroutine calls the hooks, in this order in a step:
//
//	NewRequest (when one is added) → MatchedTokens → UpdateAfterAlloc → … → BuildMetadata → the workers' half of the step →
//	UpdateOutput → RequestFinished for those that stopped → TakeEvents
//
// Upstream calls RequestFinished of those that stopped before UpdateOutput: a half must bear both orders.
//
// A step without work runs the hooks all the same while anything is pending.
type Scheduler interface {
	// Run owns the half's goroutines: it returns nil after ctx has ended and they have. It is called once; the other hooks
	// may be called before it and are not called after it has returned.
	Run(ctx context.Context) error

	// SetHandshake takes what each rank's worker returned from Handshake, by rank, before the first request
	// (set_xfer_handshake_metadata).
	SetHandshake(ranks [][]byte) error

	// NewRequest tells of a request when it is added (on_new_request).
	NewRequest(r *Request)

	// MatchedTokens says how many tokens beyond the first computed ones, which the engine has itself, can be loaded from
	// outside (get_num_new_matched_tokens). It may be called repeatedly for one request and has no side effects that a
	// further call would show. Only what is really available counts.
	MatchedTokens(r *Request, computed int) Match

	// UpdateAfterAlloc tells which blocks the request has got (update_state_after_alloc): those of the tokens computed, those
	// to be loaded, and maybe more; external of its tokens are to be loaded. The decision goes by external, not by blocks. A
	// request that loads asynchronously is told of a second time when its load has ended, with external 0.
	UpdateAfterAlloc(r *Request, blocks []int, computed, external int)

	// BuildMetadata returns what the workers are to do in this step, and begins the next one (build_connector_meta). It
	// changes nothing of the step. What it returns is valid until the next call.
	BuildMetadata(s *Step) Metadata

	// UpdateOutput takes what the workers did, aggregated over ranks (update_connector_output).
	UpdateOutput(o *Output)

	// RequestFinished is called exactly once a request, before its blocks are freed (request_finished). If delay is true they
	// must stay allocated until the request comes back in Output.FinishedSending, or, of a request whose load was under way,
	// in FinishedReceiving. The parameters, nil for none, go to the client with the answer.
	RequestFinished(r *Request, blocks []int, end End) (delay bool, params *Params)

	// Pending reports whether steps must go on though no request is scheduled (has_pending_block_frees,
	// has_pending_push_work): something is to be told to the workers, or expected of them.
	Pending() bool

	// TakeEvents returns what happened since the last call, and forgets it (take_events). The engine publishes it.
	TakeEvents() []event.Event

	// TakeRecords returns what is told of transfers beside the events: failures and leases that expired.
	TakeRecords() []event.Transfer

	// FinishedCount returns how many ranks report each request; 0 = all (get_finished_count).
	FinishedCount() int

	// Reset forgets what the half remembers of the cache (reset_cache), and reports whether it could.
	Reset() bool
}

// Match is the answer of MatchedTokens.
type Match struct {
	Tokens int
	Later  bool // it is not known yet: ask again in a later step (upstream returns None)
	Async  bool // the load goes on between steps, and the request waits for it unscheduled; false when Tokens is 0
}

// End is how a request ended.
type End = event.RequestEnd

// The ends.
const (
	EndStopped   = event.EndStopped   // by itself: end of text, or a stop word
	EndLength    = event.EndLength    // at the length that was asked for: the one after which a producer hands over
	EndAborted   = event.EndAborted   // by its client
	EndLoadError = event.EndLoadError // because blocks could not be loaded, under the policy fail
)

// Step is what a scheduler decided for one step (vLLM's SchedulerOutput, as far as connectors read it).
type Step struct {
	Scheduled []Scheduled
	Preempted []string // requests whose blocks were taken in this step
}

// Scheduled is one request that computes in a step.
type Scheduled struct {
	Request  *Request
	Blocks   []int // of the request, in order; shared with the engine
	Computed int   // tokens whose KV will be in the blocks after the step
}

// Metadata is what the scheduler's half tells the workers in one step (vLLM's KVConnectorMetadata). Each transport's
// halves know their own.
type Metadata interface {
	// Empty reports whether there is nothing to do.
	Empty() bool
}

// Nothing is the metadata of a step in which there is nothing to do.
type Nothing struct{}

// Empty returns true.
func (Nothing) Empty() bool { return true }
