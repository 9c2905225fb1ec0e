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
	c := enginehash.DefaultConfig()
	c.Seed = cfg.HashSeed
	v, err := enginehash.NewVerifier(c)
	if err != nil { // of a configuration that nobody parsed: the known seeds are tried all the same
		c.Seed = ""
		v, _ = enginehash.NewVerifier(c)
	}
	return hashing{verifier: v, scheme: cfg.Hash, seed: cfg.HashSeed}
}

// checkHashing says what is wrong with hash= and hash-seed=.
func checkHashing(cfg *EngineConfig) error {
	if cfg.Hash != "" {
		if _, err := enginehash.ParseRecipe(cfg.Hash, cfg.HashSeed); err != nil {
			return fmt.Errorf("hash=%s: %w", cfg.Hash, err)
		}
	}
	c := enginehash.DefaultConfig()
	c.Seed = cfg.HashSeed
	if _, err := enginehash.NewVerifier(c); err != nil {
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
