// Package connector is the KV connector of disaggregated prefill: a prefill engine computes KV blocks, a decode engine
// fetches them. It mirrors the contract of vLLM's connectors (vllm/distributed/kv_transfer/kv_connector/v1/base.py).
//
// There so far: the configuration in upstream's spelling, the aggregation of what a rank's workers did into one view for
// the scheduler, statistics, the leases under which a producer holds blocks, and the memory that blocks lie in: arenas
// outside the Go heap, layouts, and the pieces in which blocks travel. Roles and transports are not there yet.
package connector
