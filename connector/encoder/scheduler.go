package encoder

import (
	"context"
	"fmt"

	"kvstrata/connector"
	"kvstrata/event"
)

// Scheduler is the half of an encoder connector in the engine's scheduler (vLLM's ECConnectorBase with role SCHEDULER; the
// upstream name stands at each hook). No hook waits on a network. One goroutine calls the hooks, in this order in a step:
//
//	HasItem → UpdateStateAfterAlloc → … → BuildMetadata → the workers' half of the step → UpdateOutput → RequestFinished for
//	those that stopped → TakeRecords
//
// A step without work runs the hooks all the same while anything is pending.
type Scheduler interface {
	// Run owns the half's goroutines: it returns nil after ctx has ended and they have. It is called once; the other hooks
	// may be called before it and are not called after it has returned.
	Run(ctx context.Context) error

	// SetHandshake takes what each rank's worker returned from Handshake, by rank, before the first request (of upstream's KV
	// connectors set_xfer_handshake_metadata; its encoder connectors have none yet).
	SetHandshake(ranks [][]byte) error

	// HasItem says whether item index of a request can be loaded (has_cache_item, which answers yes or no at once). It may be
	// called repeatedly. Once a load of it was ordered it is absent to this request, even if the load failed.
	HasItem(r *Request, index int) Presence

	// UpdateStateAfterAlloc tells that item index has got room in the engine's encoder cache (update_state_after_alloc). Where
	// HasItem's last answer was [Present] it is loaded in this step; else the engine runs the encoder, and a producer saves what
	// comes of it. Requests that want one item share its load, and so its room: the engine gives an item no other room before
	// its load has ended, unless a step frees it. A load that is cut so has failed for all of them.
	UpdateStateAfterAlloc(r *Request, index int)

	// BuildMetadata returns what the workers are to do in this step, and begins the next one (build_connector_meta). It changes
	// nothing of the step.
	BuildMetadata(s *Step) connector.Metadata

	// UpdateOutput takes what the workers did, aggregated over ranks (update_connector_output).
	UpdateOutput(o *connector.Output)

	// RequestFinished is called exactly once a request, before its items may be freed (request_finished). If delay is true the
	// room that its items have must not be used for others until the request comes back in Output.FinishedSending: loads or
	// saves of them are under way. The parameters, nil for none, go to the client with the answer.
	RequestFinished(r *Request) (delay bool, params Params)

	// Pending reports whether steps must go on though no request is scheduled.
	Pending() bool

	// TakeRecords returns what is told of loads and saves since the last call, failures included, and forgets it. Upstream has
	// no counterpart. A record's Blocks is 0: an item is none.
	TakeRecords() []event.Transfer
}

// Presence is the answer of HasItem.
type Presence uint8

// The answers.
const (
	Later   Presence = iota // it is not known yet: ask again in a later step
	Absent                  // the engine runs the encoder
	Present                 // it was there when it was looked up
)

var presenceNames = []string{"later", "absent", "present"}

func (p Presence) String() string {
	if p <= Present {
		return presenceNames[p]
	}
	return fmt.Sprintf("Presence(%d)", uint8(p))
}

// Step is what a scheduler decided for one step, as far as encoder connectors read it.
type Step struct {
	// Freed are the items that leave the engine's encoder cache in this step, by hash: their room is for others from now on
	// (SchedulerOutput.free_encoder_mm_hashes).
	Freed []string
}
