package main

import (
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"kvstrata/sim"
	"kvstrata/tracetest"
)

// TestCapacityOfATrace compares the ends of the curves with a count of the trace's ids.
func TestCapacityOfATrace(t *testing.T) {
	const small = "../../sim/testdata/small.jsonl"
	f, err := os.Open(small)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	type count struct{ asked, hits, tokens, hitTokens uint64 }
	counts := [3]count{} // all, and two engines
	seen := [3]map[uint64]bool{{}, {}, {}}
	in := sim.NewTraceReader(f)
	for n := 0; ; n++ {
		r, err := in.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		for i, id := range r.HashIDs {
			tokens := uint64(min(512, r.InputLength-512*i))
			for _, cache := range []int{0, 1 + n%2} {
				c := &counts[cache]
				c.asked++
				c.tokens += tokens
				if seen[cache][id] {
					c.hits++
					c.hitTokens += tokens
				}
				seen[cache][id] = true
			}
		}
	}
	o := command(t, "capacity", "--trace", small, "--engines", "2", "--blocks", "100", "--block-bytes", "1024", "--format", "json")
	var r capacityReport
	if err := json.Unmarshal([]byte(o.stdout), &r); o.code != exitOK || err != nil || len(r.Curves) != 3 {
		t.Fatalf("exit %d, %v\n%s\n%s", o.code, err, o.stdout, o.stderr)
	}
	for i, c := range r.Curves {
		last := c.Sizes[len(c.Sizes)-1]
		got := count{c.Blocks, last.HitBlocks, c.Tokens, last.HitTokens}
		if got != counts[i] || got.hits == 0 || c.Exactness != "exact" || last.BestBlocks == nil || *last.BestBlocks != got.hits {
			t.Errorf("%s: %+v, want %+v; %+v", c.Cache, got, counts[i], last)
		}
		names := ""
		for j, s := range c.Sizes {
			names += "|" + s.Name
			if s.Tokens != 512*s.Blocks || s.Bytes != 1024*s.Blocks || s.HitRate != float64(s.HitBlocks)/float64(c.Blocks) ||
				*s.BestBlocks < s.HitBlocks || j > 0 && (s.Blocks <= c.Sizes[j-1].Blocks || s.HitBlocks < c.Sizes[j-1].HitBlocks) {
				t.Errorf("%s: %+v", c.Cache, s)
			}
		}
		for _, want := range []string{"×0.75", "×1", "×1.25", "×2", "knee", "99 % of all", "all"} {
			if !strings.Contains(names, want) {
				t.Errorf("%s: no size is called %s: %s", c.Cache, want, names)
			}
		}
	}
	table := command(t, "capacity", "--trace", small, "--order", "prompt", "--block-size", "16")
	for _, want := range []string{"150 requests, blocks of 16 tokens, prompt order", "one cache: ", "; exact", "BEST OF BLOCKS", "█", "  knee\n"} {
		if table.code != exitOK || !strings.Contains(table.stdout, want) {
			t.Errorf("exit %d, the table lacks %q:\n%s", table.code, want, table.stdout)
		}
	}
	sampled := command(t, "capacity", "--trace", small, "--block-size", "16", "--max-blocks", "1024", "--format", "csv")
	lines := strings.Split(strings.TrimSpace(sampled.stdout), "\n")
	if sampled.code != exitOK || lines[0] != "cache,name,blocks,tokens,bytes,hit_blocks,of_blocks,hit_tokens,of_tokens,best_hit_blocks,sample" ||
		len(lines) < 4 || strings.HasSuffix(lines[1], ",1") {
		t.Errorf("exit %d\n%s", sampled.code, sampled.stdout)
	}
	for _, test := range []struct{ args, want string }{
		{"", "--trace"},
		{"--trace nowhere.jsonl", "--trace"},
		{"--trace " + small + " --engines 0", "--engines 0: want 1 to 1024"},
		{"--trace " + small + " --block-size 100", "--block-size 100: want a divisor of 512"},
		{"--trace " + small + " --max-blocks 1", "--max-blocks: blocks 1: want 1024"},
		{"--trace " + small + " --order tall", "--order"},
	} {
		if o := command(t, append([]string{"capacity"}, strings.Fields(test.args)...)...); o.code != exitUsage || !strings.Contains(o.stderr, test.want) {
			t.Errorf("%s: exit %d, %s", test.args, o.code, o.stderr)
		}
	}
	if o := command(t, "capacity", "--trace", "main.go"); o.code != exitFailure || !strings.Contains(o.stderr, "trace line 1") {
		t.Errorf("no trace: exit %d, %s", o.code, o.stderr)
	}
}

// TestTraceCapacity looks at the real trace: 36.64 % is what a cache that never evicts hits.
func TestTraceCapacity(t *testing.T) {
	dir := tracetest.Folder(t)
	o := command(t, "capacity", "--trace", filepath.Join(dir, "mooncake_conversation_trace.jsonl"), "--format", "csv")
	for _, want := range []string{
		"one cache,,10000,5120000,,61046,288500,31238981,144793823,105710,1\n",
		"one cache,all,158281,81039872,,105710,288500,54098411,144793823,105710,1\n",
	} {
		if o.code != exitOK || !strings.Contains(o.stdout, want) {
			t.Errorf("exit %d, no line is %s:\n%s", o.code, want, o.stdout)
		}
	}
}
