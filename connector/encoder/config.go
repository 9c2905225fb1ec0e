package encoder

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"

	"kvstrata/connector"
)

// Role says which side of a disaggregated encoder an engine is (vLLM's ec_role).
type Role uint8

// The roles.
const (
	Producer Role = 1 + iota // ec_producer: runs the encoder and shares its outputs
	Consumer                 // ec_consumer: loads them
	Both                     // ec_both
)

var roleNames = []string{Producer: "ec_producer", Consumer: "ec_consumer", Both: "ec_both"}

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
	if i := slices.Index(roleNames, string(text)); i >= int(Producer) {
		*r = Role(i)
		return nil
	}
	return fmt.Errorf("ec_role %q: want ec_producer, ec_consumer or ec_both", text)
}

// Produces reports whether outputs are shared (vLLM's is_ec_producer).
func (r Role) Produces() bool { return r == Producer || r == Both }

// Consumes reports whether outputs are loaded (vLLM's is_ec_consumer).
func (r Role) Consumes() bool { return r == Consumer || r == Both }

// Config is vLLM's ECTransferConfig (vllm/config/ec_transfer.py) with its field names, defaults and JSON spelling.
type Config struct {
	Connector    string          `json:"ec_connector"` // name in the factory
	EngineID     string          `json:"engine_id"`    // unique; a random UUID by default
	BufferDevice string          `json:"ec_buffer_device"`
	BufferSize   float64         `json:"ec_buffer_size"` // bytes: what peers read of memory that the CPU cannot address is copied to so many at most
	Role         Role            `json:"ec_role"`
	Rank         *int            `json:"ec_rank"` // of this instance; nil when not told
	ParallelSize int             `json:"ec_parallel_size"`
	IP           string          `json:"ec_ip"`
	Port         int             `json:"ec_port"`
	Extra        connector.Extra `json:"ec_connector_extra_config"` // the transport's own
	ModulePath   string          `json:"ec_connector_module_path"`  // of a Python class; means nothing here
}

// DefaultPort is upstream's: the same on every host, so that it says nothing of where a producer is to listen.
const DefaultPort = 14579

// DefaultConfig returns upstream's defaults, with a fresh engine id and no connector.
func DefaultConfig() Config {
	return Config{
		EngineID: connector.DefaultConfig().EngineID, BufferDevice: "cuda", BufferSize: 1e9, ParallelSize: 1, IP: "127.0.0.1",
		Port: DefaultPort, Extra: connector.Extra{},
	}
}

var configKeys = []string{
	"ec_connector", "engine_id", "ec_buffer_device", "ec_buffer_size", "ec_role", "ec_rank", "ec_parallel_size", "ec_ip", "ec_port",
	"ec_connector_extra_config", "ec_connector_module_path",
}

// ParseConfig reads what stands behind vLLM's --ec-transfer-config. A key that upstream does not know is an error that names
// the nearest one that it does.
func ParseConfig(text []byte) (Config, error) {
	c := DefaultConfig()
	var given connector.Extra
	err := json.Unmarshal(text, &given)
	if err == nil {
		err = Strictly(given, &c, configKeys...)
	}
	if err == nil {
		if c.Extra == nil {
			c.Extra = connector.Extra{}
		}
		if c.EngineID == "" {
			c.EngineID = connector.DefaultConfig().EngineID
		}
		err = c.Validate()
	}
	if err != nil {
		return c, fmt.Errorf("ec-transfer-config: %w", err)
	}
	return c, nil
}

// Strictly reads a JSON object into a struct whose present values are the defaults. An unknown key is an error that names
// the nearest one.
func Strictly(given connector.Extra, target any, keys ...string) error {
	err := given.Into(target, keys...)
	if inner := errors.Unwrap(err); inner != nil { // without the name that the KV connector's configuration has
		return inner
	}
	return err
}

// Validate returns every problem at once.
func (c *Config) Validate() error {
	var errs []error
	bad := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	if c.Connector != "" && (c.Role < Producer || c.Role > Both) {
		bad("ec_role: missing; ec_connector %q needs ec_producer, ec_consumer or ec_both", c.Connector)
	}
	if !(c.BufferSize > 0 && c.BufferSize < 1<<50) {
		bad("ec_buffer_size %v: want bytes, more than 0", c.BufferSize)
	}
	if c.ParallelSize < 1 {
		bad("ec_parallel_size %d: want 1 or more", c.ParallelSize)
	}
	if c.Rank != nil && (*c.Rank < 0 || *c.Rank >= c.ParallelSize) {
		bad("ec_rank %d: want 0 to %d", *c.Rank, c.ParallelSize-1)
	}
	if c.Port < 1 || c.Port > 65535 {
		bad("ec_port %d: want 1 to 65535", c.Port)
	}
	if c.IP == "" || strings.ContainsAny(c.IP, " /@") {
		bad("ec_ip %q: want a host or an address", c.IP)
	}
	if c.ModulePath != "" {
		bad("ec_connector_module_path %q: names a Python module; register a Go transport instead", c.ModulePath)
	}
	return errors.Join(errs...)
}

// Address returns ec_ip and ec_port as host:port.
func (c *Config) Address() string { return net.JoinHostPort(c.IP, strconv.Itoa(c.Port)) }
