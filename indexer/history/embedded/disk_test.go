package embedded_test

import (
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"kvstrata/indexer/history/embedded"
)

func TestAFullDisk(t *testing.T) {
	needLibrary(t)
	dir := t.TempDir()
	if err := syscall.Mount("tmpfs", dir, "tmpfs", 0, "size=48m"); err != nil {
		t.Skip("SKIPPED, A SMALL DISK NEEDS ROOT: mount: ", err)
	}
	t.Cleanup(func() {
		if err := syscall.Unmount(dir, 0); err != nil {
			t.Error(err)
		}
	})
	r := start(t, config(dir))
	pid := r.PID()
	w := r.open(t, embedded.Writer)
	exec(t, w, "CREATE TABLE numbers (a UInt64 CODEC(NONE), b UInt64 CODEC(NONE)) ENGINE = MergeTree ORDER BY a")
	exec(t, w, "SYSTEM STOP MERGES")
	if err := fill(t.Context(), w, "numbers", 0, 1000); err != nil {
		t.Fatal(err)
	}
	filler := filepath.Join(dir, "filler")
	var stat syscall.Statfs_t
	if err := syscall.Statfs(dir, &stat); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filler, make([]byte, int64(stat.Bavail)*stat.Bsize-256<<10), 0o600); err != nil {
		t.Fatal(err)
	}
	err := fill(t.Context(), w, "numbers", 1000, 200_000)
	if err == nil || !strings.Contains(err.Error(), "space") {
		t.Errorf("an INSERT that finds no room: %v", err)
	}
	if n := count(t, w, "numbers"); n != 1000 {
		t.Errorf("%d rows of a refused INSERT", n-1000)
	}
	if err := os.Remove(filler); err != nil {
		t.Fatal(err)
	}
	if err := fill(t.Context(), w, "numbers", 1000, 200_000); err != nil {
		t.Errorf("an INSERT once there is room: %v", err)
	}
	if n := count(t, w, "numbers"); n != 201_000 {
		t.Errorf("%d rows", n)
	}
	if r.PID() != pid {
		t.Error("the child died")
	}
}
