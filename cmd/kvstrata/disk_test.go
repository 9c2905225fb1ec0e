package main

import (
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"kvstrata/event"
	"kvstrata/indexer/history"
)

// TestFullDisk fills the disk that ClickHouse has: ingest goes on, the state says why history does not, and once there is
// room again everything is kept.
func TestFullDisk(t *testing.T) {
	data := t.TempDir()
	dir := engineDir(data)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Mount("tmpfs", dir, "tmpfs", 0, "size=96m"); err != nil {
		t.Skipf("SKIPPED: a small disk can't be mounted here: %v", err)
	}
	t.Cleanup(func() {
		if err := syscall.Unmount(dir, syscall.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	p := start(t, append([]string{"demo", "--pool-blocks", "1024", "--data", data}, anyPorts...)...)
	url, admin := p.says(`kvstrata demo at (http://\S+)`), p.says(`admin +(http://\S+)`)
	kept := func() (stored uint64) {
		resp, err := http.Get(url + "/v1/query/engines?engine=prefill-0")
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		var answer history.Answer
		if resp.StatusCode != http.StatusOK { // for now: there is no table yet, or no room to answer
			return 0
		}
		if err := json.NewDecoder(resp.Body).Decode(&answer); err != nil {
			t.Fatal(err)
		}
		for _, row := range answer.Rows {
			stored += uint64(row[4].(float64))
		}
		return stored
	}
	eventually(t, "history has begun", func() bool { return kept() > 0 }, p.output)

	filler, err := os.Create(filepath.Join(dir, "filler"))
	if err != nil {
		t.Fatal(err)
	}
	defer filler.Close()
	if _, err := io.Copy(filler, zeros{}); !errors.Is(err, syscall.ENOSPC) {
		t.Fatalf("filling the disk: %v", err)
	}
	eventually(t, "one line says why", func() bool { return strings.Contains(p.output(), "ClickHouse takes nothing") }, p.output)
	eventually(t, "a metric says so", func() bool {
		resp, err := http.Get(admin + "/metrics")
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		body, err := io.ReadAll(resp.Body)
		return err == nil && strings.Contains(string(body), "\nkvstrata_history_up 0")
	}, p.output)
	stored := func() uint64 {
		for _, s := range sources(t, url) {
			if s.Source.Instance == "prefill-0" && s.Source.Origin == event.Engine {
				return s.Totals.Stored
			}
		}
		return 0
	}
	before := stored()
	eventually(t, "the index goes on", func() bool { return stored() > before+100 }, p.output)
	if err := os.Remove(filler.Name()); err != nil {
		t.Fatal(err)
	}
	if err := filler.Close(); err != nil {
		t.Fatal(err)
	}
	all := stored()
	eventually(t, "everything is kept", func() bool { return kept() >= all }, p.output)
	if n := strings.Count(p.output(), "ClickHouse takes nothing"); n > 3 {
		t.Errorf("%d lines about one full disk", n)
	}
}

// zeros has no end.
type zeros struct{}

func (zeros) Read(b []byte) (int, error) { return len(b), nil }
