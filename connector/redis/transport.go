package redis

import (
	"slices"

	"kvstrata/connector"
	"kvstrata/connector/store"
)

// Transport returns the connector over a Redis store, for the factory's Register.
func Transport() store.Transport { return store.Transport{Open: Open} }

// Open returns the backend of a half, from what its kv_connector_extra_config holds beside the store's own keys.
func Open(o store.Opening) (store.Backend, error) {
	cfg, err := FromExtra(o.Setup.Config.Extra)
	if err != nil {
		return nil, err
	}
	b, err := New(cfg, o.Compatibility, o.Setup.Model.BlockTokens, o.Setup.Log)
	if err != nil {
		return nil, err
	}
	return b, nil
}

// FromExtra reads the configuration from kv_connector_extra_config, and leaves the store's own keys alone.
func FromExtra(extra connector.Extra) (Config, error) {
	own := connector.Extra{}
	for key, value := range extra {
		if !slices.Contains(store.Keys(), key) {
			own[key] = value
		}
	}
	cfg := DefaultConfig()
	if err := own.Into(&cfg, Keys()...); err != nil {
		return cfg, err
	}
	return cfg, cfg.Validate()
}
