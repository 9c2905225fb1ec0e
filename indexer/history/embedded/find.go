package embedded

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
)

const libraryName = "libchdb.so"

var errNoLibrary = errors.New("the ClickHouse engine's library is not there")

// Find returns where the engine's library is: at explicit, which a flag gave, or else at $KVSTRATA_CHDB, or else in the
// first of the usual places that has it. Whoever names a place gets that place or an error, never another.
func Find(explicit string) (string, error) {
	named := []struct{ by, path string }{{"the flag", explicit}, {"KVSTRATA_CHDB", os.Getenv("KVSTRATA_CHDB")}}
	for _, n := range named {
		if n.path == "" {
			continue
		}
		path, err := filepath.Abs(n.path)
		if err != nil {
			return "", fmt.Errorf("find the ClickHouse engine: %w", err)
		}
		if info, err := os.Stat(path); err == nil && info.IsDir() {
			path = filepath.Join(path, libraryName)
		}
		if _, err := os.Stat(path); err != nil {
			return "", fmt.Errorf("%w where %s says: %w; run make setup and name no place, or correct it", errNoLibrary, n.by, err)
		}
		return path, nil
	}
	tried := places()
	for _, path := range tried {
		if info, err := os.Stat(path); err == nil && info.Mode().IsRegular() {
			return path, nil
		}
	}
	return "", fmt.Errorf("%w; run make setup, or name it by KVSTRATA_CHDB; looked for %s", errNoLibrary, strings.Join(tried, ", "))
}

// places are the usual ones: beside the binary, in the user's cache, and where npm puts the package in a checkout.
func places() []string {
	var roots, found []string
	if exe, err := os.Executable(); err == nil {
		if real, err := filepath.EvalSymlinks(exe); err == nil {
			exe = real
		}
		found = append(found, filepath.Join(filepath.Dir(exe), libraryName))
		roots = append(roots, filepath.Dir(filepath.Dir(exe)))
	}
	if cache, err := os.UserCacheDir(); err == nil {
		found = append(found, filepath.Join(cache, "kvstrata", libraryName))
	}
	if dir, err := os.Getwd(); err == nil {
		roots = append([]string{dir}, roots...)
	}
	arch := map[string]string{"amd64": "x64"}[runtime.GOARCH]
	if arch == "" {
		arch = runtime.GOARCH
	}
	for _, root := range roots {
		for _, modules := range []string{filepath.Join("indexer", "history", "embedded", "node_modules"), "node_modules"} {
			found = append(found, filepath.Join(root, modules, "@chdb", "lib-linux-"+arch+"-gnu", libraryName))
		}
	}
	return found
}
