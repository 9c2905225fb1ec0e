package subscriber_test

import (
	"strings"
	"testing"

	"kvstrata/event"
	"kvstrata/event/enginehash"
	"kvstrata/subscriber"
)

// vllmNames gives the blocks of a batch that storing made, first and after, the hashes that vLLM gives them under sha256 and
// PYTHONHASHSEED=0.
func vllmNames(t *testing.T, b *event.Batch, first int) *event.Batch {
	t.Helper()
	recipe, err := enginehash.ParseRecipe("sha256", "0")
	if err != nil {
		t.Fatal(err)
	}
	ev := &b.Events[0]
	var prompt []uint32
	for n := 1; n < first+len(ev.Blocks); n++ {
		prompt = append(prompt, tokens(n)...)
	}
	chain, _ := recipe.Chain(enginehash.Plain, prompt, 16, "", "")
	n := 1
	for d, more := chain.Next(); more; d, more = chain.Next() {
		switch {
		case n == first-1:
			ev.Parent = recipe.Scheme.Name(d)
		case n >= first:
			ev.Blocks[n-first].Hash = recipe.Scheme.Name(d)
		}
		n++
	}
	return b
}

// withoutTokens tells the same blocks without their tokens.
func withoutTokens(b *event.Batch) *event.Batch {
	ev := &b.Events[0]
	ev.Tokens, ev.HasParent, ev.Parent = nil, false, event.BlockHash{}
	return b
}

// An engine's scheme is found from the runs that have tokens; then prompts find those that have none.
func TestBlocksWithoutTokensAreFoundByEngineHash(t *testing.T) {
	r, e := newRoad(t), startEngine(t)
	r.subscribe(e.config("a"))
	e.publish(vllmNames(t, storing(1, 2), 1), withoutTokens(vllmNames(t, storing(3, 5), 3)))
	s := r.await("a", 1, event.StateLive)
	eventually(t, "the scheme", func() bool { return r.info("a").Hashes == "sha256" })
	if got := r.matched("a"); got != 5 || s.Unnamed != 3 {
		t.Errorf("%d blocks matched, want 5; %d without a name, want 3", got, s.Unnamed)
	}
	// Another life may have another root: nothing of the old one's is assumed.
	e.restart()
	e.publish(storing(1, 2))
	eventually(t, "no scheme", func() bool { return r.info("a").Epoch > s.Epoch && r.info("a").Hashes == "" })
}

// An engine that never tells tokens is told of.
func TestTheSchemeOfAnEngineWithoutTokensIsConfigured(t *testing.T) {
	r, e := newRoad(t), startEngine(t)
	cfg := e.config("a")
	cfg.Hash, cfg.HashSeed = "sha256", "0"
	r.subscribe(cfg)
	e.publish(withoutTokens(vllmNames(t, storing(1, 4), 1)))
	r.await("a", 0, event.StateLive)
	eventually(t, "the scheme", func() bool { return r.info("a").Hashes == "sha256" })
	if got := r.matched("a"); got != 4 {
		t.Errorf("%d blocks matched, want 4", got)
	}
}

// A seed that can't be read is refused whoever made the configuration, and not told.
func TestASeedThatCantBeReadIsRefused(t *testing.T) {
	engine := subscriber.EngineConfig{
		Source: event.Source{Model: "m", Instance: "i", Origin: event.Engine}, Endpoint: "tcp://127.0.0.1:1", HashSeed: "root:hush",
	}
	_, newErr := subscriber.New(subscriber.DefaultConfig(), []subscriber.EngineConfig{engine}, nil, nil, quiet(), nil)
	_, probeErr := subscriber.Probe(t.Context(), subscriber.DefaultConfig(), engine)
	for _, err := range []error{newErr, probeErr} {
		if err == nil || !strings.Contains(err.Error(), "hash-seed") || strings.Contains(err.Error(), "hush") {
			t.Errorf("%v", err)
		}
	}
}
