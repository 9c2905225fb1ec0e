package lmcache

import (
	"encoding/json"
	"errors"
	"fmt"

	"kvstrata/connector"
	"kvstrata/connector/store"
	"kvstrata/event"
)

// Transport is the connector over LMCache's stores. Its chunk_size must be that of the groups: group_blocks × block size.
func Transport() store.Transport {
	return store.Transport{
		Arrange: func(c connector.Caches) (connector.Caches, []byte, error) {
			c, shape, err := Arrange(c)
			if err != nil {
				return c, nil, err
			}
			text, err := json.Marshal(shape)
			return c, text, err
		},
		Check: func(s connector.Setup) error {
			_, err := configOf(&s)
			return err
		},
		Chunks: chunks,
		Open:   open,
	}
}

// chunks returns LMCache's names of a prompt's chunks; none where the engine's own are taken.
func chunks(s connector.Setup) (func([]uint32) ([]event.BlockHash, error), error) {
	cfg, err := configOf(&s)
	if err != nil || cfg.ChunkHashes == ofEngine {
		return nil, err
	}
	hashing, err := NewHashing(cfg.HashAlgorithm, cfg.HashSeed)
	if err != nil {
		return nil, fmt.Errorf("python_hash_seed %q: %w", cfg.HashSeed, err)
	}
	return func(tokens []uint32) ([]event.BlockHash, error) { return hashing.ChunkHashes(tokens, cfg.ChunkSize) }, nil
}

// configOf reads the configuration; its groups must be what LMCache calls a chunk.
func configOf(s *connector.Setup) (Config, error) {
	cfg, family := DefaultConfig(), store.DefaultConfig()
	keys := append(store.Keys(), Keys()...)
	if err := s.Config.Extra.Into(&cfg, keys...); err != nil {
		return cfg, err
	}
	if err := errors.Join(s.Config.Extra.Into(&family, keys...), cfg.Validate()); err != nil {
		return cfg, err
	}
	blocks, err := cfg.GroupBlocks(s.Model.BlockTokens)
	if err != nil {
		return cfg, err
	}
	if blocks != family.GroupBlocks {
		return cfg, fmt.Errorf("chunk_size %d and group_blocks %d: with blocks of %d tokens set group_blocks to %d", cfg.ChunkSize,
			family.GroupBlocks, s.Model.BlockTokens, blocks)
	}
	return cfg, nil
}

func open(o store.Opening) (store.Backend, error) {
	cfg, err := configOf(&o.Setup)
	if err != nil {
		return nil, err
	}
	var shape Shape
	if err := json.Unmarshal(o.Describe, &shape); err != nil {
		return nil, fmt.Errorf("read the shape of the caches: %w", err)
	}
	b, err := New(cfg, o.Setup.Model, shape)
	if err != nil {
		return nil, err
	}
	return b, nil
}
