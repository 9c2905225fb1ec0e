package main

import (
	"os"
	"testing"

	"kvstrata/bench/workload"
)

// TestOursAnswersTheTraceRightly compares the sum of all answers of work 1 with a plain count.
func TestOursAnswersTheTraceRightly(t *testing.T) {
	folder := os.Getenv("KVSTRATA_TRACES")
	if folder == "" && os.Getenv("CI") != "" {
		t.Fatal("KVSTRATA_TRACES is not set: CI must check the trace")
	}
	if folder == "" || testing.Short() {
		t.Skip("KVSTRATA_TRACES is not set, or the test is to be short: the trace is not checked")
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
