package kvstrata_test

import (
	"errors"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// TestSetupSaysWhatIsMissing runs scripts/setup.sh where tools are missing, and wants the remedy.
func TestSetupSaysWhatIsMissing(t *testing.T) {
	script, err := os.ReadFile("scripts/setup.sh")
	if err != nil {
		t.Fatal(err)
	}
	const failing = "failing"
	// with is a machine that has everything, changed, and without some.
	with := func(changed map[string]string, without ...string) map[string]string {
		tools := map[string]string{"go": "go1.27rc1", "gcc": "", "git": "", "node": "v20.19.0", "npm": "", "pkg-config": ""}
		maps.Copy(tools, changed)
		for _, name := range without {
			delete(tools, name)
		}
		return tools
	}
	for _, c := range []struct {
		name  string
		tools map[string]string // name → what it prints
		wants string            // in its output; what installs must succeed, and say nothing the second time
	}{
		{"no go", map[string]string{}, "go is missing: install Go"},
		{"no compiler", map[string]string{"go": "go1.26.1", "git": ""}, "gcc is missing: install a C compiler"},
		{"no node", with(nil, "node"), "node is missing: install Node"},
		{"no npm", with(nil, "npm"), "npm is missing: install Node"},
		{"old go", with(map[string]string{"go": "go1.21.3"}), "go1.21.3 is too old"},
		{"old node", with(map[string]string{"node": "v18.20.4"}), "node v18.20.4 is too old"},
		{"not root", with(map[string]string{"apt-get": "", "id": "1000"}, "pkg-config"), "not root; run: sudo apt-get install pkg-config libzmq3-dev"},
		{"no apt", with(map[string]string{"id": "0"}, "pkg-config"), "install by hand: pkg-config libzmq3-dev"},
		{"no registry", with(map[string]string{"npm": failing}), "npm failed in indexer/history/embedded"},
		{"no package", with(map[string]string{"no package": ""}), "npm has no ClickHouse engine for"},
		{"nothing installed", with(nil), "installing the dashboard's libraries"},
	} {
		t.Run(c.name, func(t *testing.T) {
			root := t.TempDir()
			bin := filepath.Join(root, "bin")
			for _, dir := range []string{"bin", "scripts", "indexer/history/embedded/node_modules", "web/ui/node_modules"} {
				if err := os.MkdirAll(filepath.Join(root, dir), 0o755); err != nil {
					t.Fatal(err)
				}
			}
			at := filepath.Join(root, "scripts", "setup.sh")
			if err := os.WriteFile(at, script, 0o755); err != nil {
				t.Fatal(err)
			}
			if _, none := c.tools["no package"]; !none {
				lib := filepath.Join(root, "indexer/history/embedded/node_modules/@chdb/lib-linux-x64-gnu/libchdb.so")
				if err := errors.Join(os.MkdirAll(filepath.Dir(lib), 0o755), os.WriteFile(lib, nil, 0o644)); err != nil {
					t.Fatal(err)
				}
			}
			for _, tool := range []string{"dirname", "mktemp", "tail", "touch", "rm", "ls", "uname"} {
				path, err := exec.LookPath(tool)
				if err != nil {
					t.Fatal(err)
				}
				if err := os.Symlink(path, filepath.Join(bin, tool)); err != nil {
					t.Fatal(err)
				}
			}
			for tool, prints := range c.tools {
				stub := "#!/bin/sh\necho '" + prints + "'\n"
				if prints == failing {
					stub = "#!/bin/sh\nexit 1\n"
				}
				if err := os.WriteFile(filepath.Join(bin, tool), []byte(stub), 0o755); err != nil {
					t.Fatal(err)
				}
			}
			run := func() (string, error) {
				cmd := exec.CommandContext(t.Context(), "/bin/bash", at)
				cmd.Env = []string{"PATH=" + bin}
				out, err := cmd.CombinedOutput()
				return string(out), err
			}
			installs := strings.HasPrefix(c.wants, "installing")
			out, err := run()
			if installs != (err == nil) || !strings.Contains(out, c.wants) {
				t.Fatalf("%v:\n%s", err, out)
			}
			if !installs {
				return
			}
			for _, lock := range []string{"indexer/history/embedded", "web/ui"} {
				if err := os.WriteFile(filepath.Join(root, lock, "package-lock.json"), nil, 0o644); err != nil {
					t.Fatal(err)
				}
				old := time.Now().Add(-time.Hour)
				if err := os.Chtimes(filepath.Join(root, lock, "package-lock.json"), old, old); err != nil {
					t.Fatal(err)
				}
			}
			if out, err := run(); err != nil || strings.TrimSpace(out) != "" {
				t.Errorf("the second time: %v:\n%s", err, out)
			}
		})
	}
}
