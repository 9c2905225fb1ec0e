package subscriber

import (
	"fmt"

	"kvstrata/event"
	"kvstrata/event/enginehash"
)

// hashing is what is known of how an engine names its blocks: found from its runs with tokens, or configured. It belongs to
// the goroutine of the engine's session.
type hashing struct {
	verifier *enginehash.Verifier
	scheme   string // configured
	seed     string
}

// newHashing takes a configuration that checkHashing has passed.
func newHashing(cfg *EngineConfig) hashing {
	v, err := newVerifier(cfg)
	if err != nil {
		panic(fmt.Sprintf("subscriber: engine %v was not checked: %v", cfg.Source, err))
	}
	return hashing{verifier: v, scheme: cfg.Hash, seed: cfg.HashSeed}
}

func newVerifier(cfg *EngineConfig) (*enginehash.Verifier, error) {
	c := enginehash.DefaultConfig()
	c.Seed = cfg.HashSeed
	return enginehash.NewVerifier(c)
}

// checkHashing says what is wrong with hash= and hash-seed=.
func checkHashing(cfg *EngineConfig) error {
	if cfg.Hash != "" {
		if _, err := enginehash.ParseRecipe(cfg.Hash, cfg.HashSeed); err != nil {
			return fmt.Errorf("hash=%s: %w", cfg.Hash, err)
		}
	}
	if _, err := newVerifier(cfg); err != nil {
		return fmt.Errorf("hash-seed: %w", err)
	}
	return nil
}

// tell enters in a status by what consumers can compute the engine's hashes. What was found goes before what was
// configured.
func (h *hashing) tell(st *event.Status) {
	st.Contract.Check = h.verifier.Contract()
	var found bool
	if st.HashScheme, st.HashSeed, found = h.verifier.Recipe(); !found {
		st.HashScheme, st.HashSeed = h.scheme, h.seed
	}
}
