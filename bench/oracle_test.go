package main

import (
	"testing"

	"kvstrata/bench/workload"
	"kvstrata/tracetest"
)

// TestOursAnswersTheTraceRightly compares the sum of all answers of work 1 with a plain count.
func TestOursAnswersTheTraceRightly(t *testing.T) {
	folder := tracetest.Folder(t)
	if testing.Short() {
		t.Skip("SKIPPED with -short: the trace is not checked")
	}
	trace, err := workload.ReadTrace(folder)
	if err != nil {
		t.Fatal(err)
	}
	got, err := verifyPart("1", folder)
	if err != nil {
		t.Fatal(err)
	}
	if want := trace.Answers(); int(got["blocks_0"]) != want {
		t.Errorf("answers add up to %.0f blocks, want %d", got["blocks_0"], want)
	}
}
