package lmcache_test

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"

	"kvstrata/connector"
	"kvstrata/connector/lmcache"
	"kvstrata/connector/store"
)

func setup(extra string) connector.Setup {
	s := connector.Setup{Config: connector.DefaultConfig(), Instance: "i", Ranks: 1, Model: model(), Log: quiet()}
	s.Config.Extra = nil
	if err := json.Unmarshal([]byte(extra), &s.Config.Extra); err != nil {
		panic(err)
	}
	return s
}

// TestTransport opens both halves with what the worker's caches tell.
func TestTransport(t *testing.T) {
	srv := serve(t, serverConfig(), "")
	tr := lmcache.Transport()
	c, describe, err := tr.Arrange(laid(t, axes{kvAxis, blockAxis, tokenAxis, headAxis, dimAxis}))
	if err != nil || len(c.Tensors) != 2*layers {
		t.Fatalf("%d tensors, %v", len(c.Tensors), err)
	}
	s := setup(`{"remote_url": "lm://` + srv.address + `", "chunk_size": 16, "group_blocks": 4, "parallel": 2}`)
	worker, err := tr.Open(store.Opening{Setup: s, Describe: describe})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = worker.Close() }() // nothing is under way
	scheduler, err := tr.Open(store.Opening{Setup: s, Describe: describe})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = scheduler.Close() }() // nothing is under way
	it := item(worker.(*lmcache.Backend), 1000)
	none(t, "put", worker.Put(t.Context(), []store.Item{it}))
	if n, err := scheduler.Prefix(t.Context(), []string{scheduler.Key(group(1000)), scheduler.Key(group(2000))}); n != 1 || err != nil {
		t.Errorf("prefix %d, %v; want 1", n, err)
	}
	tokens := make([]uint32, 40)
	name, err := tr.Chunks(s)
	if err != nil {
		t.Fatal(err)
	}
	hashing, err := lmcache.NewHashing("builtin", "0")
	if err != nil {
		t.Fatal(err)
	}
	want, err := hashing.ChunkHashes(tokens, 16)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := name(tokens); err != nil || !slices.Equal(got, want) || len(got) != 2 {
		t.Errorf("chunks %v, %v; want %v", got, err, want)
	}
	for extra, word := range map[string]string{
		`{"remote_url": "lm://h:1"}`:                      "group_blocks to 64", // of 4 tokens
		`{"remote_url": "lm://h:1", "chunk_size": 6}`:     "chunk_size",
		`{"remote_ulr": "lm://h:1"}`:                      "remote_url",
		`{"remote_url": "lm://h:1", "group_blocks": "x"}`: "group_blocks",
		`{"chunk_size": 16, "group_blocks": 4}`:           "remote_url",
	} {
		if _, err := tr.Open(store.Opening{Setup: setup(extra), Describe: describe}); err == nil || !strings.Contains(err.Error(), word) {
			t.Errorf("%s: %v; want one that names %s", extra, err, word)
		}
	}
	if _, err := tr.Open(store.Opening{Setup: s}); err == nil {
		t.Error("no shape is taken")
	}
	if _, _, err := tr.Arrange(laid(t, axes{kvAxis, blockAxis, headAxis, tokenAxis, dimAxis})); err == nil {
		t.Error("HND is taken")
	}
}
