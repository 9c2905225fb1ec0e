package encoder

import (
	"context"

	"kvstrata/connector"
	"kvstrata/connector/device"
)

// Worker is the half of an encoder connector beside the engine's model, one a tensor-parallel rank (vLLM's ECConnectorBase
// with role WORKER; the upstream name stands at each hook). Every rank has the whole of an output: the first one saves it,
// and each loads it. One goroutine calls the hooks, in this order in a step:
//
//	Bind → StartLoad → Save for each output that the encoder made → Collect → Clear
//
// A step without work runs them all the same.
type Worker interface {
	// RegisterCaches gives the half the memory that outputs lie in, once, before everything else (register_caches). Sockets are
	// bound here.
	RegisterCaches(c Caches) error

	// Handshake returns what the scheduler's half, and through it peers, must know of this worker. It is called after
	// RegisterCaches.
	Handshake() ([]byte, error)

	// Run owns the half's goroutines and sockets: it returns nil after ctx has ended and they have. It is called once after
	// RegisterCaches, even with a ctx that has ended; the other hooks are not called after it has returned.
	Run(ctx context.Context) error

	// Bind gives the step's metadata before the forward pass (bind_connector_metadata).
	Bind(m connector.Metadata)

	// Clear takes it away afterwards (clear_connector_metadata).
	Clear()

	// StartLoad begins the step's loads and returns (start_load_caches): an item goes to the span of the registered memory that
	// the engine has given its hash. Before that it ends whatever still touches the memory of items that this step frees, which
	// takes as long as to stop it: a save that is cut so has failed. The error is of ctx alone; an item without a span of its
	// size is told as failed.
	StartLoad(ctx context.Context, spans map[string]device.Span) error

	// Save begins to share an output, and returns (save_caches). Its span keeps what is in it until the item is freed by a
	// step, or, if its request has finished, until that is told as sent. An error says that the item or the span cannot be.
	Save(i Item, span device.Span) error

	// Collect returns what came about since the last call (get_finished). FinishedReceiving are the hashes of items whose loads
	// have ended, FailedReceiving those of them whose bytes did not come: their spans' content is undefined, and nothing writes
	// to it any more. FinishedSending are requests, of those that finished in this step or earlier: nothing touches the room of
	// their items any more. Metadata is a [connector.Report] whose Request is an item's hash. Nil = nothing.
	Collect(finished []string) *connector.Output
}
