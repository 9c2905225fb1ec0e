package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"kvstrata/sim"
)

// An engine of its own needs no NATS, writes down what it publishes, and clears its cache when it is asked to.
func TestEngineWritesAJournal(t *testing.T) {
	path := filepath.Join(t.TempDir(), "journal")
	now := time.Now().UnixNano()
	p := start(t, "engine", "--name", "e", "--journal", path, "--buffer-steps", "3", "--pool-blocks", "64", "--speed", "100",
		"--start", fmt.Sprint(now), "--began", fmt.Sprint(now))
	api := p.says(`api (http://\S+)`)
	post := func(path string, body any) {
		t.Helper()
		text, err := json.Marshal(body)
		if err != nil {
			t.Fatal(err)
		}
		resp, err := http.Post(api+path, "application/json", bytes.NewReader(text))
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		if resp.StatusCode != http.StatusOK {
			t.Fatalf("%s: %s", path, resp.Status)
		}
	}
	for _, id := range []string{"one", "two", "three"} { // more than fits, so that some is evicted
		post("/requests", wireRequest{ID: id, Prompt: tokens(500, len(id)), Output: 20})
	}
	post("/reset", nil)

	var story engineStory
	resp, err := http.Get(api + "/story")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if err := json.NewDecoder(resp.Body).Decode(&story); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var sum journalLine
	var got sim.EngineStats
	for i, line := range strings.Split(strings.TrimSpace(string(text)), "\n") {
		var b journalLine
		if err := json.Unmarshal([]byte(line), &b); err != nil {
			t.Fatal(err)
		}
		if b.Seq != uint64(i) || b.Time <= sum.Time {
			t.Errorf("line %d: %+v", i, b)
		}
		got.Batches++
		got.BlocksStored += uint64(b.Stored)
		got.BlocksEvicted += uint64(b.Evicted)
		sum.Time, sum.Cleared = b.Time, sum.Cleared+b.Cleared
	}
	want := sim.EngineStats{Batches: story.Published, BlocksStored: story.Stats.BlocksStored, BlocksEvicted: story.Stats.BlocksEvicted}
	if diff := cmp.Diff(want, got); diff != "" || sum.Cleared != 1 || got.BlocksEvicted == 0 {
		t.Errorf("%d resets, %+v\n%s", sum.Cleared, got, diff)
	}
}

// A connector's events go onto NATS: without its address the engine says so.
func TestEngineWithAConnectorNeedsNATS(t *testing.T) {
	o := command(t, "engine", "--name", "e", "--start", "1", "--began", "1", "--kv-transfer-config", `{"kv_connector":"null","kv_role":"kv_both"}`)
	if o.code != exitUsage || !strings.Contains(o.stderr, "--nats") {
		t.Errorf("exit %d\n%s", o.code, o.stderr)
	}
}

// tokens returns a prompt of so many tokens.
func tokens(n, seed int) []uint32 {
	all := make([]uint32, n)
	for i := range all {
		all[i] = uint32(10_000*seed + i)
	}
	return all
}
