// Package tracetest finds Mooncake's traces for tests; the project does not contain them.
package tracetest

import (
	"os"
	"path/filepath"
	"testing"
)

// Folder returns the folder that KVSTRATA_TRACES names. Without it the test fails in CI, and is skipped elsewhere.
func Folder(t testing.TB) string {
	t.Helper()
	folder := os.Getenv("KVSTRATA_TRACES")
	switch {
	case folder != "":
	case os.Getenv("CI") != "":
		t.Fatal("KVSTRATA_TRACES is not set: CI must look at the real traces")
	default:
		t.Skip("SKIPPED: KVSTRATA_TRACES is not set: it names the folder of the Mooncake traces")
	}
	return folder
}

// Open opens one of the traces until the test ends.
func Open(t testing.TB, name string) *os.File {
	t.Helper()
	file, err := os.Open(filepath.Join(Folder(t), name))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = file.Close() })
	return file
}
