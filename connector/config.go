package connector

import (
	"bytes"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"slices"
	"strconv"
	"strings"
)

// Role says which side of disaggregated prefill an engine is (vLLM's kv_role).
type Role uint8

// The roles.
const (
	Producer Role = 1 + iota // kv_producer: computes prompts and hands their blocks over
	Consumer                 // kv_consumer: fetches them
	Both                     // kv_both
)

var roleNames = []string{Producer: "kv_producer", Consumer: "kv_consumer", Both: "kv_both"}

func (r Role) String() string {
	if r >= Producer && r <= Both {
		return roleNames[r]
	}
	return fmt.Sprintf("Role(%d)", uint8(r))
}

// MarshalText writes the role's upstream name.
func (r Role) MarshalText() ([]byte, error) { return []byte(r.String()), nil }

// UnmarshalText reads an upstream name.
func (r *Role) UnmarshalText(text []byte) error {
	for i := Producer; i <= Both; i++ {
		if roleNames[i] == string(text) {
			*r = i
			return nil
		}
	}
	return fmt.Errorf("kv_role %q: want kv_producer, kv_consumer or kv_both", text)
}

// Produces reports whether blocks are handed over (vLLM's is_kv_producer).
func (r Role) Produces() bool { return r == Producer || r == Both }

// Consumes reports whether blocks are fetched (vLLM's is_kv_consumer).
func (r Role) Consumes() bool { return r == Consumer || r == Both }

// FailurePolicy says what becomes of a request whose blocks could not be loaded (vLLM's kv_load_failure_policy).
type FailurePolicy uint8

// The policies.
const (
	Fail      FailurePolicy = 1 + iota // the request ends with an error
	Recompute                          // the engine computes what did not come
)

var policyNames = []string{Fail: "fail", Recompute: "recompute"}

func (p FailurePolicy) String() string {
	if p >= Fail && p <= Recompute {
		return policyNames[p]
	}
	return fmt.Sprintf("FailurePolicy(%d)", uint8(p))
}

// MarshalText writes the policy's upstream name.
func (p FailurePolicy) MarshalText() ([]byte, error) { return []byte(p.String()), nil }

// UnmarshalText reads an upstream name.
func (p *FailurePolicy) UnmarshalText(text []byte) error {
	for i := Fail; i <= Recompute; i++ {
		if policyNames[i] == string(text) {
			*p = i
			return nil
		}
	}
	return fmt.Errorf("kv_load_failure_policy %q: want fail or recompute", text)
}

// Config is vLLM's KVTransferConfig (vllm/config/kv_transfer.py) with its field names, defaults and JSON spelling.
type Config struct {
	Connector      string        `json:"kv_connector"` // name in the factory
	EngineID       string        `json:"engine_id"`    // unique; a random UUID by default
	BufferDevice   string        `json:"kv_buffer_device"`
	BufferSize     float64       `json:"kv_buffer_size"` // bytes
	Role           Role          `json:"kv_role"`
	Rank           *int          `json:"kv_rank"` // of this instance; nil when not told
	ParallelSize   int           `json:"kv_parallel_size"`
	IP             string        `json:"kv_ip"`
	Port           int           `json:"kv_port"`
	Extra          Extra         `json:"kv_connector_extra_config"` // the transport's own
	ModulePath     string        `json:"kv_connector_module_path"`  // of a Python class; means nothing here
	PermuteLocalKV bool          `json:"enable_permute_local_kv"`
	OnLoadFailure  FailurePolicy `json:"kv_load_failure_policy"`
}

// Extra is a transport's own configuration, by upstream's or its own names. It may hold secrets: printed or logged it shows
// its keys alone.
type Extra map[string]json.RawMessage

// String returns the keys.
func (e Extra) String() string { return fmt.Sprint(slices.Sorted(maps.Keys(e))) }

// GoString returns the keys.
func (e Extra) GoString() string { return e.String() }

// LogValue returns the keys.
func (e Extra) LogValue() slog.Value { return slog.StringValue(e.String()) }

// DefaultConfig returns upstream's defaults, with a fresh engine id and no connector. The buffer device is host memory;
// upstream takes its platform's.
func DefaultConfig() Config {
	return Config{
		EngineID: newEngineID(), BufferDevice: "cpu", BufferSize: 1e9, ParallelSize: 1, IP: "127.0.0.1", Port: 14579, Extra: Extra{},
		OnLoadFailure: Fail,
	}
}

// newEngineID returns a random UUID (version 4), as upstream does.
func newEngineID() string {
	var b [16]byte
	_, _ = rand.Read(b[:]) // never fails
	b[6], b[8] = b[6]&0x0f|0x40, b[8]&0x3f|0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:])
}

// ParseConfig reads what stands behind vLLM's --kv-transfer-config. A key that upstream does not know is an error that
// names the nearest one that it does.
func ParseConfig(text []byte) (Config, error) {
	c := DefaultConfig()
	if err := decodeStrictly(text, &c, configKeys); err != nil {
		return c, fmt.Errorf("kv-transfer-config: %w", err)
	}
	if c.Extra == nil {
		c.Extra = Extra{}
	}
	if c.EngineID == "" {
		c.EngineID = newEngineID()
	}
	if err := c.Validate(); err != nil {
		return c, fmt.Errorf("kv-transfer-config: %w", err)
	}
	return c, nil
}

var configKeys = []string{
	"kv_connector", "engine_id", "kv_buffer_device", "kv_buffer_size", "kv_role", "kv_rank", "kv_parallel_size", "kv_ip", "kv_port",
	"kv_connector_extra_config", "kv_connector_module_path", "enable_permute_local_kv", "kv_load_failure_policy",
}

// Validate returns every problem at once.
func (c *Config) Validate() error {
	var errs []error
	bad := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	if c.Connector != "" && (c.Role < Producer || c.Role > Both) {
		bad("kv_role: missing; kv_connector %q needs kv_producer, kv_consumer or kv_both", c.Connector)
	}
	if !(c.BufferSize > 0 && c.BufferSize < 1<<50) {
		bad("kv_buffer_size %v: want bytes, more than 0", c.BufferSize)
	}
	if c.ParallelSize < 1 {
		bad("kv_parallel_size %d: want 1 or more", c.ParallelSize)
	}
	if c.Rank != nil && (*c.Rank < 0 || *c.Rank >= c.ParallelSize) {
		bad("kv_rank %d: want 0 to %d", *c.Rank, c.ParallelSize-1)
	}
	if c.Port < 1 || c.Port > 65535 {
		bad("kv_port %d: want 1 to 65535", c.Port)
	}
	if c.IP == "" || strings.ContainsAny(c.IP, " /@") {
		bad("kv_ip %q: want a host or an address", c.IP)
	}
	if c.ModulePath != "" {
		bad("kv_connector_module_path %q: names a Python module; register a Go transport instead", c.ModulePath)
	}
	if c.OnLoadFailure < Fail || c.OnLoadFailure > Recompute {
		bad("kv_load_failure_policy: want fail or recompute")
	}
	return errors.Join(errs...)
}

// Address returns kv_ip and kv_port as host:port.
func (c *Config) Address() string { return net.JoinHostPort(c.IP, strconv.Itoa(c.Port)) }

// Into reads a transport's own configuration into a struct whose present values are the defaults, by the struct's json
// names. An unknown key is an error that names the nearest one.
func (e Extra) Into(target any, keys ...string) error {
	text, err := json.Marshal(e)
	if err != nil {
		return err
	}
	if err := decodeStrictly(text, target, keys); err != nil {
		return fmt.Errorf("kv_connector_extra_config: %w", err)
	}
	return nil
}

// decodeStrictly reads one JSON object whose keys are all known.
func decodeStrictly(text []byte, target any, known []string) error {
	var given map[string]json.RawMessage
	dec := json.NewDecoder(bytes.NewReader(text))
	if err := dec.Decode(&given); err != nil {
		return fmt.Errorf("want a JSON object: %w", err)
	}
	if dec.More() {
		return errors.New("more follows the JSON object")
	}
	var errs []error
	for _, key := range slices.Sorted(maps.Keys(given)) {
		switch {
		case slices.Contains(known, key):
		case len(known) == 0:
			errs = append(errs, fmt.Errorf("unknown key %q; there are none", key))
		default:
			errs = append(errs, fmt.Errorf("unknown key %q; the nearest known one is %q", key, nearest(key, known)))
		}
	}
	if len(errs) > 0 {
		return errors.Join(errs...)
	}
	return json.Unmarshal(text, target)
}

// nearest returns the known key that is fewest edits away.
func nearest(key string, known []string) string {
	best, fewest := "", -1
	for _, k := range known {
		if d := edits(key, k); fewest < 0 || d < fewest {
			best, fewest = k, d
		}
	}
	return best
}

// edits is the Levenshtein distance.
func edits(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		before := row[0]
		row[0] = i + 1
		for j := range len(b) {
			change := before
			if a[i] != b[j] {
				change++
			}
			before = row[j+1]
			row[j+1] = min(change, row[j]+1, before+1)
		}
	}
	return row[len(b)]
}
