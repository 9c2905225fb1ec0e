package tcp

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"time"

	"kvstrata/connector"
)

// Secret is what both ends of a connection must know. It prints as a placeholder, in logs, errors and JSON alike.
type Secret string

const redacted = "[secret]"

// String returns a placeholder.
func (s Secret) String() string { return redacted }

// GoString returns a placeholder.
func (s Secret) GoString() string { return redacted }

// LogValue returns a placeholder.
func (s Secret) LogValue() slog.Value { return slog.StringValue(redacted) }

// MarshalText returns a placeholder.
func (s Secret) MarshalText() ([]byte, error) { return []byte(redacted), nil }

// Config is the transport's part of kv_connector_extra_config.
type Config struct {
	Listen         string  `json:"listen"`            // host:port of the first rank; port 0 = any; empty = kv_ip and kv_port, any where that is upstream's default
	LeaseDuration  float64 `json:"kv_lease_duration"` // s
	Mode           string  `json:"mode"`              // pull, or push: what the scheduler's half asks for
	ChunkBytes     int     `json:"chunk_bytes"`       // that one read asks for, as far as a block is not larger
	InflightBytes  int     `json:"inflight_bytes"`    // asked for and not yet there, a connection
	Connections    int     `json:"connections"`       // of one load
	Parallel       int     `json:"parallel"`          // loads at a time
	MaxConnections int     `json:"max_connections"`   // of peers to this end
	Checksum       bool    `json:"checksum"`
	SharedMemory   bool    `json:"shared_memory"` // with peers on the same host
	Secret         Secret  `json:"secret"`        // better: secret_file or secret_env
	SecretFile     string  `json:"secret_file"`
	SecretEnv      string  `json:"secret_env"` // name of a variable
	TLSCert        string  `json:"tls_cert"`   // PEM files
	TLSKey         string  `json:"tls_key"`
	TLSCA          string  `json:"tls_ca"`        // of peers, in both directions
	StallTimeout   float64 `json:"stall_timeout"` // s without a byte
	LoadTimeout    float64 `json:"load_timeout"`  // s of a whole load, from its first read on
	PushTimeout    float64 `json:"push_timeout"`  // s that a load waits for a producer that has not finished
}

// Keys are the names of Config in kv_connector_extra_config.
func Keys() []string {
	return []string{
		"listen", "kv_lease_duration", "mode", "chunk_bytes", "inflight_bytes", "connections", "parallel", "max_connections", "checksum",
		"shared_memory", "secret", "secret_file", "secret_env", "tls_cert", "tls_key", "tls_ca", "stall_timeout", "load_timeout",
		"push_timeout",
	}
}

// DefaultConfig returns the configuration of an endpoint that trusts its network.
func DefaultConfig() Config {
	return Config{
		LeaseDuration: 30, Mode: "pull", ChunkBytes: 4 << 20, InflightBytes: 16 << 20, Connections: 2, Parallel: 4, MaxConnections: 512,
		Checksum: true, SharedMemory: true, StallTimeout: 5, LoadTimeout: 120, PushTimeout: 300,
	}
}

// ReadConfig reads kv_connector_extra_config over the defaults, and validates.
func ReadConfig(extra connector.Extra) (Config, error) {
	c := DefaultConfig()
	if err := extra.Into(&c, Keys()...); err != nil {
		return c, err
	}
	if err := c.Validate(); err != nil {
		return c, fmt.Errorf("kv_connector_extra_config: %w", err)
	}
	return c, nil
}

// minSecret is in bytes: who listens on the network may try guesses at leisure.
const minSecret = 16

// Validate returns every problem at once. Files and variables are read when an endpoint is made.
func (c *Config) Validate() error {
	var errs []error
	bad := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	between := func(name string, got, least, most int) {
		if got < least || got > most {
			bad("%s %d: want %d to %d", name, got, least, most)
		}
	}
	seconds := func(name string, got, most float64) {
		if !(got > 0 && got <= most) {
			bad("%s %v: want seconds, more than 0, at most %v", name, got, most)
		}
	}
	if c.Listen != "" {
		if _, _, err := net.SplitHostPort(c.Listen); err != nil {
			bad("listen %q: want host:port", c.Listen)
		}
	}
	if c.Mode != "pull" && c.Mode != "push" {
		bad("mode %q: want pull or push", c.Mode)
	}
	between("chunk_bytes", c.ChunkBytes, 1, maxPayload)
	between("inflight_bytes", c.InflightBytes, 1, maxPayload)
	between("connections", c.Connections, 1, 64)
	between("parallel", c.Parallel, 1, 1024)
	between("max_connections", c.MaxConnections, 1, 1<<16)
	seconds("kv_lease_duration", c.LeaseDuration, 86400)
	seconds("stall_timeout", c.StallTimeout, 600)
	seconds("load_timeout", c.LoadTimeout, 86400)
	seconds("push_timeout", c.PushTimeout, maxOpenWait.Seconds())
	given := 0
	for _, s := range []string{string(c.Secret), c.SecretFile, c.SecretEnv} {
		if s != "" {
			given++
		}
	}
	if given > 1 {
		bad("secret, secret_file, secret_env: want one of them at most")
	}
	if c.Secret != "" && len(c.Secret) < minSecret {
		bad("secret: %d bytes; want %d or more", len(c.Secret), minSecret)
	}
	if n := c.TLSCert != ""; n != (c.TLSKey != "") || n != (c.TLSCA != "") {
		bad("tls_cert, tls_key, tls_ca: want all of them or none")
	}
	return errors.Join(errs...)
}

// Push reports whether consumers ask before the producer has finished.
func (c *Config) Push() bool { return c.Mode == "push" }

func (c *Config) stall() time.Duration { return time.Duration(c.StallTimeout * float64(time.Second)) }

// secret reads it from where it lies.
func (c *Config) secret() ([]byte, error) {
	secret := []byte(c.Secret)
	from := "secret"
	switch {
	case c.SecretFile != "":
		text, err := os.ReadFile(c.SecretFile)
		if err != nil {
			return nil, fmt.Errorf("read secret_file: %w", err)
		}
		secret, from = bytes.TrimSpace(text), "secret_file "+c.SecretFile
	case c.SecretEnv != "":
		secret, from = []byte(os.Getenv(c.SecretEnv)), "secret_env "+c.SecretEnv
	case c.Secret == "":
		return nil, nil
	}
	if len(secret) < minSecret {
		return nil, fmt.Errorf("%s: holds %d bytes; want %d or more", from, len(secret), minSecret)
	}
	return secret, nil
}

// tls reads certificates; nil without. Both ends show one, and both verify it.
func (c *Config) tls() (*tls.Config, error) {
	if c.TLSCert == "" {
		return nil, nil
	}
	cert, err := tls.LoadX509KeyPair(c.TLSCert, c.TLSKey)
	if err != nil {
		return nil, fmt.Errorf("read tls_cert, tls_key: %w", err)
	}
	pem, err := os.ReadFile(c.TLSCA)
	if err != nil {
		return nil, fmt.Errorf("read tls_ca: %w", err)
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(pem) {
		return nil, fmt.Errorf("tls_ca %s: no certificate in it", c.TLSCA)
	}
	return &tls.Config{
		Certificates: []tls.Certificate{cert}, RootCAs: pool, ClientCAs: pool, ClientAuth: tls.RequireAndVerifyClientCert, MinVersion: tls.VersionTLS13,
	}, nil
}

// Lease returns the times of a hold.
func (c *Config) Lease() connector.LeaseConfig {
	return connector.LeaseFor(time.Duration(c.LeaseDuration * float64(time.Second)))
}
