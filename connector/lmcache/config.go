package lmcache

import (
	"errors"
	"fmt"
	"net"
	"net/url"
	"slices"
	"strings"
	"time"
)

// Config is what the backend takes of kv_connector_extra_config. The keys that LMCache has too are spelled as in its own
// configuration (lmcache/v1/config.py).
type Config struct {
	RemoteURL     string `json:"remote_url"`                 // lm://host:port, or redis://[[user]:password@]host:port[/db]
	ChunkSize     int    `json:"chunk_size"`                 // tokens under one key
	ChunkHashes   string `json:"chunk_hashes"`               // lmcache: computed from tokens as LMCache does; engine: the name of a chunk's last block
	HashAlgorithm string `json:"pre_caching_hash_algorithm"` // of the chunk hashes; builtin ones are spelled with a sign
	HashSeed      string `json:"python_hash_seed"`           // PYTHONHASHSEED of LMCache's engines
	Timeout       int    `json:"blocking_timeout_secs"`      // for a window of requests, and to connect
	Connections   int    `json:"connections"`
	Pipeline      int    `json:"pipeline"` // requests on their way on one connection
	Protocol      string `json:"protocol"` // of lm://: v1, or v0 as LMCache had it in 2024
}

// The values of chunk_hashes.
const (
	ofLMCache = "lmcache"
	ofEngine  = "engine"
)

// Keys are the names of Config in kv_connector_extra_config.
func Keys() []string {
	return []string{
		"remote_url", "chunk_size", "chunk_hashes", "pre_caching_hash_algorithm", "python_hash_seed", "blocking_timeout_secs", "connections",
		"pipeline", "protocol",
	}
}

// DefaultConfig returns LMCache's defaults and our own.
func DefaultConfig() Config {
	return Config{
		ChunkSize: 256, ChunkHashes: ofLMCache, HashAlgorithm: "builtin", HashSeed: "0", Timeout: 10, Connections: 4, Pipeline: 16, Protocol: "v1",
	}
}

// maxPipeline bounds what lies in socket buffers while nobody reads it: 64 requests and as many replies, without values,
// are 14 KiB, so that neither side waits for the other to read.
const maxPipeline = 64

// Validate returns every problem at once.
func (c *Config) Validate() error {
	var errs []error
	bad := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	if _, err := c.remote(); err != nil {
		errs = append(errs, err)
	}
	if c.ChunkSize < 1 || c.ChunkSize > 1<<20 {
		bad("chunk_size %d: want 1 token or more", c.ChunkSize)
	}
	if !slices.Contains([]string{"builtin", "sha256", "sha256_cbor", "sha256_cbor_64bit", "xxhash", "xxhash_cbor"}, c.HashAlgorithm) {
		bad("pre_caching_hash_algorithm %q: want builtin, sha256, sha256_cbor, xxhash or xxhash_cbor", c.HashAlgorithm)
	}
	if c.ChunkHashes != ofLMCache && c.ChunkHashes != ofEngine {
		bad("chunk_hashes %q: want lmcache or engine", c.ChunkHashes)
	}
	if c.Timeout < 1 || c.Timeout > 3600 {
		bad("blocking_timeout_secs %d: want 1 to 3600", c.Timeout)
	}
	if c.Connections < 1 || c.Connections > 256 {
		bad("connections %d: want 1 to 256", c.Connections)
	}
	if c.Pipeline < 1 || c.Pipeline > maxPipeline {
		bad("pipeline %d: want 1 to %d", c.Pipeline, maxPipeline)
	}
	if _, err := ParseProtocol(c.Protocol); err != nil {
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// remote returns the parsed address. Errors do not repeat it: it may hold a password.
func (c *Config) remote() (*url.URL, error) {
	want := errors.New("remote_url: want lm://host:port or redis://host:port")
	u, err := url.Parse(c.RemoteURL)
	if err != nil || u.Host == "" || u.Scheme != "lm" && u.Scheme != "redis" {
		return nil, want
	}
	if u.Scheme == "lm" {
		if host, port, err := net.SplitHostPort(u.Host); err != nil || host == "" || port == "" || u.User != nil || strings.Trim(u.Path, "/") != "" {
			return nil, want
		}
	}
	return u, nil
}

// GroupBlocks returns how many blocks of so many tokens make a chunk.
func (c *Config) GroupBlocks(blockTokens int) (int, error) {
	if blockTokens < 1 || c.ChunkSize%blockTokens != 0 {
		return 0, fmt.Errorf("chunk_size %d: want a multiple of the block size, %d tokens", c.ChunkSize, blockTokens)
	}
	return c.ChunkSize / blockTokens, nil
}

func (c *Config) timeout() time.Duration { return time.Duration(c.Timeout) * time.Second }
