package connector

import "kvstrata/event"

// Name is what a full block is called: by its engine, and by the prefix that ends with it.
type Name struct {
	Hash   event.BlockHash
	Prefix event.PrefixHash // 0 = unknown
}

// Request is what the scheduler's half knows of one request (of vLLM's Request: request_id, num_tokens,
// kv_transfer_params, block_hashes). The engine owns it and changes it only between hooks; it is the same pointer in all of
// them. Its id is used again only when the engine is done with it: finished, and none of its blocks delayed.
type Request struct {
	ID     string
	Tokens int    // of the prompt, and generated so far
	Prompt int    // tokens of the prompt
	Names  []Name // of the leading full blocks, as far as the engine has hashed them; only grows
	LoRA   string // adapter
	Salt   string // cache salt: who has another shares nothing

	Session string // whom it is of, as far as its client told; empty = not told
	Tenant  string

	// TokenIDs are those of the prompt, for stores that name what they hold by tokens; nil where the engine does not tell.
	// They are prompt text: no half keeps, logs or tells them.
	TokenIDs []uint32

	Params *Params // what the client sent along; nil = nothing
}

// Params is the hand-off from producer to consumer that travels through the client or a proxy, as JSON (vLLM's
// kv_transfer_params; its spelling is that of the NixlConnector). The client sends {"do_remote_decode":true} to a producer,
// and what it got back to a consumer.
type Params struct {
	DoRemoteDecode  bool     `json:"do_remote_decode,omitempty"`  // to a producer: keep the blocks for a consumer
	DoRemotePrefill bool     `json:"do_remote_prefill,omitempty"` // to a consumer: fetch the blocks from a producer
	RemoteBlockIDs  []int    `json:"remote_block_ids,omitempty"`
	RemoteEngineID  string   `json:"remote_engine_id,omitempty"`
	RemoteRequestID string   `json:"remote_request_id,omitempty"`
	RemoteHost      string   `json:"remote_host,omitempty"` // of the first rank
	RemotePort      int      `json:"remote_port,omitempty"`
	RemoteRanks     []string `json:"remote_ranks,omitempty"` // ours: host:port of every tensor-parallel rank
	RemoteInstance  string   `json:"remote_instance,omitempty"`
	TPSize          int      `json:"tp_size,omitempty"`
	RemoteTokens    int      `json:"remote_num_tokens,omitempty"`
	RemoteExpiry    float64  `json:"remote_blocks_expiry_time,omitempty"` // s of Unix time
	Mode            string   `json:"transfer_mode,omitempty"`             // pull or push
}
