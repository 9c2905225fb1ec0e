// Package encoder is the encoder-cache connector of disaggregated multimodal serving: a producer runs the multimodal
// encoder and shares its outputs, keyed by multimodal hash; a consumer loads them instead of running the encoder. It mirrors
// the contract of vLLM's ECConnectorBase (vllm/distributed/ec_transfer/ec_connector/base.py at dc6d3096).
//
// Here is what both halves of any transport agree on: items and requests, the configuration in upstream's spelling, the
// hooks, the factory, and [Engine], which drives the hooks as an engine does. The halves are in encoder/carry, over what
// moves the bytes: encoder/shared is a store's backend, encoder/peers goes from engine to engine.
//
// Upstream has no events of encoder caches on the KV stream; there are none here either, but transfer records.
package encoder

import (
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"strconv"

	"kvstrata/connector/device"
)

// Item is one output of the encoder: that of an image, say. Two engines mean the same item only if both fields agree.
type Item struct {
	Hash  string // upstream's mm_hash, or the identifier that a client gave instead
	Bytes int    // of the output; 1 or more
}

// The bounds of an item: what every transport takes.
const (
	MaxHash  = 255     // bytes of a hash
	MaxBytes = 1 << 30 // of an output
)

// Validate wants an item that can travel.
func (i Item) Validate() error {
	if len(i.Hash) < 1 || len(i.Hash) > MaxHash {
		return fmt.Errorf("item with an mm_hash of %d bytes: want 1 to %d", len(i.Hash), MaxHash)
	}
	if i.Bytes < 1 || i.Bytes > MaxBytes {
		return fmt.Errorf("item %s of %d bytes: want 1 to %d", i.Hash, i.Bytes, MaxBytes)
	}
	return nil
}

// Model is what two engines must agree on for one to use the other's encoder outputs.
type Model struct {
	Name            string `json:"model"`
	DType           string `json:"dtype"`            // of the outputs' elements
	HiddenSize      int    `json:"hidden_size"`      // elements of one of the outputs' tokens
	EncoderRevision string `json:"encoder_revision"` // of the encoder's weights and of what it makes of its inputs; empty = not told
}

// Validate returns every problem at once.
func (m *Model) Validate() error {
	var errs []error
	if m.Name == "" {
		errs = append(errs, errors.New("model: no name"))
	}
	if m.DType == "" {
		errs = append(errs, errors.New("dtype: missing; want that of the encoder's outputs, as bfloat16"))
	}
	if m.HiddenSize < 1 {
		errs = append(errs, fmt.Errorf("hidden_size %d: want 1 or more", m.HiddenSize))
	}
	return errors.Join(errs...)
}

// compatibilityVersion is of what is hashed.
const compatibilityVersion = 1

// Compatibility returns the hash that two engines must have in common to exchange items.
func (m *Model) Compatibility() [sha256.Size]byte {
	told := struct {
		Kind    string `json:"kind"`
		Version int    `json:"version"`
		Model   *Model `json:"model"`
	}{"encoder cache", compatibilityVersion, m}
	text, _ := json.Marshal(told) // strings and numbers always can be
	return sha256.Sum256(text)
}

// Caches are what an engine registers once (upstream's register_caches): the memory that encoder outputs lie in, each
// contiguous. Whoever allocated it closes it after the worker's Run has returned.
type Caches struct {
	Device device.Device
	Memory device.Memory
}

// Request is what the scheduler's half knows of one request (of vLLM's Request: request_id, mm_features,
// ec_transfer_params). The engine owns it; it is the same pointer in all hooks, and its items do not change.
type Request struct {
	ID     string
	Items  []Item // in the order of the prompt
	Params Params // what the client sent along: a producer's hand-off; nil = nothing
}

// Params is the hand-off from producer to consumer that travels through the client or a proxy, as JSON: where an item is, by
// mm_hash (vLLM's ec_transfer_params).
type Params map[string]Place

// Place is an engine that has an item.
type Place struct {
	Host     string `json:"remote_host"`
	Port     int    `json:"remote_port"`
	EngineID string `json:"remote_engine_id"` // one that has restarted has another; empty = whichever answers
}

// Address returns host:port.
func (p Place) Address() string { return net.JoinHostPort(p.Host, strconv.Itoa(p.Port)) }

// PlaceAt reads an address.
func PlaceAt(address, engine string) (Place, error) {
	host, text, err := net.SplitHostPort(address)
	if err != nil {
		return Place{}, fmt.Errorf("address %q: want host:port", address)
	}
	port, err := strconv.Atoi(text)
	if err != nil || port < 1 || port > 65535 || host == "" {
		return Place{}, fmt.Errorf("address %q: want host:port, the port 1 to 65535", address)
	}
	return Place{Host: host, Port: port, EngineID: engine}, nil
}
