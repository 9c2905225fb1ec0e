package workload_test

import (
	"strings"
	"testing"

	"kvstrata/bench/workload"
	"kvstrata/tracetest"

	"github.com/google/go-cmp/cmp"
)

func TestTheTraceRemovesWhatTheProtocolSays(t *testing.T) {
	folder := tracetest.Folder(t)
	trace, err := workload.ReadTrace(folder)
	if err != nil {
		t.Fatal(err)
	}
	if !strings.HasPrefix(trace.SHA256, workload.TraceSHA256) {
		t.Errorf("sha256 %s, want %s…", trace.SHA256, workload.TraceSHA256)
	}
	removed := 0
	for _, s := range trace.Steps(workload.WorkersPerCopy, workload.PoolBlocks) {
		removed += len(s.Removed)
	}
	if removed != workload.RemovedPerCopy {
		t.Errorf("%d blocks removed, want %d", removed, workload.RemovedPerCopy)
	}
}

const small = `{"timestamp": 0, "hash_ids": [0, 1]}
{"timestamp": 1, "hash_ids": [0, 2]}
{"timestamp": 2, "hash_ids": [0, 1]}
`

func TestStepsOfASmallTrace(t *testing.T) {
	trace, err := workload.ParseTrace([]byte(small))
	if err != nil {
		t.Fatal(err)
	}
	want := []workload.Step{
		{Request: 0, Stored: []workload.Run{{First: 0, Blocks: 8}}},
		{Request: 1, Removed: []uint32{4, 5}, Stored: []workload.Run{{First: 4, Blocks: 4}}},
		{Request: 2, Removed: []uint32{6, 7}, Stored: []workload.Run{{First: 4, Blocks: 2}}},
	}
	got := trace.Steps(1, 10)
	// Blocks 4 and 5 come back; to make room 6 and 7 leave, and come back themselves.
	want[2].Stored, want[2].Removed = []workload.Run{{First: 4, Blocks: 4}}, []uint32{6, 7, 8, 9}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

func TestAnswersOfASmallTrace(t *testing.T) {
	trace, err := workload.ParseTrace([]byte(small))
	if err != nil {
		t.Fatal(err)
	}
	// The second request finds 4 blocks on the first one's worker; the third 8 there, and 4 on the second's.
	if got := trace.Answers(); got != 16 {
		t.Errorf("%d blocks, want 16", got)
	}
}

func TestAnIDWithTwoParentsIsRefused(t *testing.T) {
	if _, err := workload.ParseTrace([]byte(small + `{"timestamp": 3, "hash_ids": [2, 1]}`)); err == nil {
		t.Error("no error")
	}
}

func TestCopiesHaveNoNameInCommon(t *testing.T) {
	trace, err := workload.ParseTrace([]byte(small))
	if err != nil {
		t.Fatal(err)
	}
	seen := make(map[uint64]bool)
	for c := range 3 {
		n := trace.Names(c)
		for b := range trace.Blocks {
			for _, name := range []uint64{n.Local[b], n.Engine(uint32(b))} {
				if seen[name] {
					t.Fatalf("copy %d block %d: name %x stands twice", c, b, name)
				}
				seen[name] = true
			}
		}
	}
}
