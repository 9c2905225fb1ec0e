package connector

import "context"

// Worker is the half of a connector beside the engine's model, one a tensor-parallel rank (vLLM's KVConnectorBase_V1 with
// role WORKER, vllm/distributed/kv_transfer/kv_connector/v1/base.py at 00f4240e; the upstream name stands at each hook). One
// goroutine calls the hooks, in this order in a step:
//
//	HandlePreemptions → Bind → StartLoad → for each layer: WaitForLayer, SaveLayer → WaitForSave → Collect → Clear
//
// A step without work runs them all the same, without the layers (kv_connector_no_forward).
type Worker interface {
	// RegisterCaches gives the half its memory, once, before everything else (register_kv_caches). Sockets are bound here.
	RegisterCaches(c Caches) error

	// Handshake returns what the scheduler's half, and through it peers, must know of this worker
	// (get_handshake_metadata). It is called after RegisterCaches.
	Handshake() ([]byte, error)

	// Run owns the half's goroutines and sockets: it returns nil after ctx has ended and they have (shutdown). It is called
	// once after RegisterCaches, even with a ctx that has ended; the other hooks are not called after it has returned.
	Run(ctx context.Context) error

	// Bind gives the step's metadata before the forward pass (bind_connector_metadata).
	Bind(m Metadata)

	// Clear takes it away afterwards (clear_connector_metadata).
	Clear()

	// HandlePreemptions returns once no transfer reads the blocks of the preempted requests any more: they are about to be
	// overwritten (handle_preemptions).
	HandlePreemptions(ctx context.Context, preempted []string) error

	// StartLoad begins the loads of the step (start_load_kv). Asynchronous ones go on between steps.
	StartLoad(ctx context.Context) error

	// WaitForLayer returns once what this step loads synchronously of a layer is in place (wait_for_layer_load). Blocks that
	// did not come are told by Collect.
	WaitForLayer(ctx context.Context, layer string) error

	// SaveLayer tells that a layer's blocks of this step are computed (save_kv_layer).
	SaveLayer(ctx context.Context, layer string) error

	// WaitForSave is called once a step, also in empty ones, when the whole step is computed (wait_for_save). What is saved
	// asynchronously afterwards stays untouched until the request is told as sent.
	WaitForSave(ctx context.Context) error

	// Collect returns what came about since the last call: transfers that ended, blocks with load errors, statistics
	// (get_finished, get_block_ids_with_load_errors, get_kv_connector_stats, build_connector_worker_meta). finished are the
	// requests that finished in this step: only such, and those of earlier steps, are told as sent. A load that failed is told
	// as received too, in no pass before the one that tells its blocks. Nil = nothing.
	Collect(finished []string) *Output
}
