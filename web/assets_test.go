package web_test

import (
	"compress/gzip"
	"io/fs"
	"os"
	"strings"
	"testing"
)

// assetBudget is what a browser may have to fetch for the whole dashboard, compressed, in bytes.
const assetBudget = 120_000

func TestAssetsStayWithinTheirBudget(t *testing.T) {
	dist := os.DirFS("ui/dist")
	if _, err := fs.Stat(dist, "index.html"); err != nil {
		if os.Getenv("CI") != "" {
			t.Fatalf("%v; make build makes it", err)
		}
		t.Skipf("SKIPPED: %v; make build makes it", err)
	}
	total := 0
	err := fs.WalkDir(dist, ".", func(name string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || name == "placeholder.txt" {
			return err
		}
		data, err := fs.ReadFile(dist, name)
		if err != nil {
			return err
		}
		size := len(data)
		if !strings.HasSuffix(name, ".woff2") { // compressed already
			if size, err = compressed(data); err != nil {
				return err
			}
		}
		t.Logf("%6d %s", size, name)
		total += size
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%6d bytes in all", total)
	if total > assetBudget {
		t.Errorf("%d bytes, want at most %d", total, assetBudget)
	}
}

// compressed returns how long data are as gzip sends them.
func compressed(data []byte) (int, error) {
	var n counter
	w := gzip.NewWriter(&n)
	if _, err := w.Write(data); err != nil {
		return 0, err
	}
	err := w.Close()
	return int(n), err
}

// counter counts what is written.
type counter int

func (c *counter) Write(b []byte) (int, error) {
	*c += counter(len(b))
	return len(b), nil
}
