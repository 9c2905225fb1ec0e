// Package connector is the KV connector of disaggregated prefill: a prefill engine computes KV blocks, a decode engine
// fetches them. It mirrors the contract of vLLM's connectors (vllm/distributed/kv_transfer/kv_connector/v1/base.py).
//
// A transport has two halves, [Scheduler] and [Worker], which a [Factory] makes by the name that [Config] gives; [Engine] runs their
// hooks in the order that their contracts want. What all transports share is here: blocks in memory ([Cache], [Window]), the
// aggregation of ranks, statistics, leases, and the [Journal] of what is to be told. The transports are below this folder.
package connector
