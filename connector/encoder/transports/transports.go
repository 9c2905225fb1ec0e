// Package transports is the factory of the encoder connectors that come with kvstrata.
package transports

import (
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"

	"kvstrata/connector"
	"kvstrata/connector/encoder"
	"kvstrata/connector/encoder/peers"
	"kvstrata/connector/encoder/shared"
	"kvstrata/connector/lmcache"
	"kvstrata/connector/redis"
	"kvstrata/connector/store"
)

// Default returns a factory that knows every transport of this module, by the names that ec_connector has. A program adds
// its own to it.
func Default() *encoder.Factory {
	f := new(encoder.Factory)
	for name, t := range map[string]encoder.Transport{
		"tcp": peers.Connector(), "redis": Redis().Connector(), "lmcache": LMCache().Connector(),
	} {
		if err := f.Register(name, t); err != nil {
			panic(err) // two of the names above are the same
		}
	}
	return f
}

// keyPrefix is the default of what items' keys in Redis begin with.
const keyPrefix = "ec"

// Redis is items in a Redis or Valkey server or cluster: as groups of one block, whose key is
// ec:compatibility:0:mm_hash in hexadecimal.
func Redis() shared.Shelf {
	return shared.Shelf{
		Store: redis.Transport(), Keys: redis.Keys(), MaxName: encoder.MaxHash,
		Check: func(extra connector.Extra) error {
			cfg := redis.DefaultConfig()
			kv := cfg.KeyPrefix
			cfg.KeyPrefix = keyPrefix
			if err := encoder.Strictly(extra, &cfg, redis.Keys()...); err != nil {
				return err
			}
			err := cfg.Validate()
			if cfg.KeyPrefix == kv {
				err = errors.Join(err, fmt.Errorf("key_prefix %q: KV blocks are under it; want another", kv))
			}
			return err
		},
		Prepare: func(o *store.Opening) error {
			if _, ok := o.Setup.Config.Extra["key_prefix"]; !ok {
				o.Setup.Config.Extra["key_prefix"] = json.RawMessage(`"` + keyPrefix + `"`)
			}
			return nil
		},
	}
}

// lmcacheKeys are what can be set of LMCache's configuration: chunks have no meaning here.
func lmcacheKeys() []string {
	return []string{"remote_url", "blocking_timeout_secs", "connections", "pipeline", "protocol"}
}

// LMCache is items in what speaks LMCache's remote formats: lm://, or its layout in Redis. A value has the shape of so many
// tokens of one byte, of a cache with one layer and one latent (KV_MLA_FMT of uint8), since the client takes no value without
// a shape; LMCache's own encoder caches (EC_TD) are not read. The wire format has neither a place for the compatibility hash
// nor a checksum: the hash is in the key, where a model's name is.
func LMCache() shared.Shelf {
	return shared.Shelf{
		Store: lmcache.Transport(), Keys: lmcacheKeys(), Nameless: true,
		MaxName: 32, // in hexadecimal, with the rest of the key, it fits into a frame's 150 bytes
		Check: func(extra connector.Extra) error {
			cfg := lmcache.DefaultConfig()
			if err := encoder.Strictly(extra, &cfg, lmcacheKeys()...); err != nil {
				return err
			}
			return cfg.Validate()
		},
		Prepare: func(o *store.Opening) error {
			o.Setup.Model.Name = "ec-" + hex.EncodeToString(o.Compatibility[:16])
			extra := o.Setup.Config.Extra
			extra["chunk_size"], extra["group_blocks"], extra["chunk_hashes"] = json.RawMessage("1"), json.RawMessage("1"), json.RawMessage(`"engine"`)
			var err error
			o.Describe, err = json.Marshal(lmcache.Shape{Format: lmcache.KVMLA, DType: lmcache.Uint8, KV: 1, Layers: 1, Hidden: 1})
			return err
		},
	}
}
