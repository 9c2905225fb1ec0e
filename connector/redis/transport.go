package redis

import (
	"kvstrata/connector"
	"kvstrata/connector/store"
)

// Transport returns the connector over a Redis store, for the factory's Register.
func Transport() store.Transport {
	return store.Transport{
		Check: func(s connector.Setup) error {
			_, err := FromExtra(s.Config.Extra)
			return err
		},
		Open: Open,
	}
}

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

// FromExtra reads the configuration from kv_connector_extra_config, in which the store's own keys may stand too.
func FromExtra(extra connector.Extra) (Config, error) {
	cfg := DefaultConfig()
	if err := extra.Into(&cfg, append(store.Keys(), Keys()...)...); err != nil {
		return cfg, err
	}
	return cfg, cfg.Validate()
}
