package main

import (
	"bytes"
	encoding "encoding/binary"
	"encoding/hex"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// What is captured of an engine is for its owner alone, is imported, and leaves its tokens behind there.
func TestCaptureIsImported(t *testing.T) {
	e := startCanaryEngine(t)
	endpoint, err := e.pub.GetLastEndpoint()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	file := filepath.Join(dir, "frames.jsonl")
	done := make(chan outcome, 1)
	go func() {
		done <- command(t, "capture", "zmq+"+endpoint+",model=m", "-o", file, "--count", "3", "--log-level", "warn")
	}()
	got := outcome{code: -1}
	for deadline := time.Now().Add(patience); got.code < 0 && time.Now().Before(deadline); {
		e.send(t, canaryEvent(e.seq, 16, canaryRun(16), nil))
		select {
		case got = <-done:
		case <-time.After(20 * time.Millisecond):
		}
	}
	if got.code != exitOK || !strings.Contains(got.stdout, "3 batches") {
		t.Fatalf("%+v", got)
	}
	info, err := os.Stat(file)
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", info.Mode(), err)
	}
	if got := command(t, "capture", "zmq+"+endpoint+",model=m", "-o", file); got.code != exitUsage || !strings.Contains(got.stderr, "exists") {
		t.Errorf("over a file that is there: %+v", got)
	}
	data := filepath.Join(dir, "history")
	if said := well(t, "import", file, "--data", data, "--model", "m"); !strings.Contains(said, "raw frames") || !strings.Contains(said, "3 batches") {
		t.Errorf("said\n%s", said)
	}
	h := newHaul()
	h.add("export", []byte(well(t, "export", "--data", data, "--since", "1h", "--format", "jsonl")))
	if found := h.find(); len(found) > 0 {
		t.Errorf("prompts are in %v", found)
	}
	raw, err := os.ReadFile(file)
	if err != nil || !bytes.Contains(raw, []byte(hex.EncodeToString(encoding.BigEndian.AppendUint32(nil, canaryTokens[0])))) {
		t.Errorf("the capture has not what the engine sent (%v)", err)
	}
}
