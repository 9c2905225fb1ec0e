package lmcache

import (
	"encoding/json"
	"fmt"
	"maps"

	"kvstrata/connector"
	"kvstrata/connector/store"
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
		Open: open,
	}
}

func open(o store.Opening) (store.Backend, error) {
	cfg, family := DefaultConfig(), store.DefaultConfig()
	own, rest := maps.Clone(o.Setup.Config.Extra), connector.Extra{}
	for _, key := range store.Keys() {
		if v, ok := own[key]; ok {
			rest[key] = v
			delete(own, key)
		}
	}
	if err := own.Into(&cfg, Keys()...); err != nil {
		return nil, err
	}
	if err := rest.Into(&family, store.Keys()...); err != nil {
		return nil, err
	}
	blocks, err := cfg.GroupBlocks(o.Setup.Model.BlockTokens)
	if err != nil {
		return nil, err
	}
	if blocks != family.GroupBlocks {
		return nil, fmt.Errorf("chunk_size %d and group_blocks %d: with blocks of %d tokens set group_blocks to %d", cfg.ChunkSize, family.GroupBlocks, o.Setup.Model.BlockTokens, blocks)
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
