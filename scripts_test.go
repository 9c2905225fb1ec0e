package kvstrata_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// TestSetupSaysWhatIsMissing runs scripts/setup.sh where tools are missing, and wants the remedy.
func TestSetupSaysWhatIsMissing(t *testing.T) {
	script, err := filepath.Abs("scripts/setup.sh")
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name  string
		tools map[string]string // name → what it prints
		wants string            // in its output; empty = it must succeed and say nothing
	}{
		{"no go", map[string]string{}, "go is missing: install Go"},
		{"old go", map[string]string{"go": "go1.21.3", "gcc": "", "git": ""}, "go1.21.3 is too old"},
		{"no compiler", map[string]string{"go": "go1.26.1", "git": ""}, "gcc is missing: install a C compiler"},
		{"not root", map[string]string{"go": "go1.26.1", "gcc": "", "git": "", "apt-get": "", "id": "1000"}, "not root; run: sudo apt-get install pkg-config libzmq3-dev"},
		{"no apt", map[string]string{"go": "go1.26.1", "gcc": "", "git": "", "id": "0"}, "install pkg-config and libzmq 4.3 or newer"},
		{"all there", map[string]string{"go": "go1.27rc1", "gcc": "", "git": "", "pkg-config": ""}, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			bin := t.TempDir()
			for tool, prints := range c.tools {
				stub := "#!/bin/sh\necho '" + prints + "'\n"
				if err := os.WriteFile(filepath.Join(bin, tool), []byte(stub), 0o755); err != nil {
					t.Fatal(err)
				}
			}
			cmd := exec.CommandContext(t.Context(), "/bin/bash", script)
			cmd.Env = []string{"PATH=" + bin}
			out, err := cmd.CombinedOutput()
			if c.wants == "" && (err != nil || strings.TrimSpace(string(out)) != "") || c.wants != "" && (err == nil || !strings.Contains(string(out), c.wants)) {
				t.Errorf("%v:\n%s", err, out)
			}
		})
	}
}
