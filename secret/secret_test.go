package secret_test

import (
	"bytes"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"kvstrata/secret"
)

func TestATextIsNotShown(t *testing.T) {
	const hush = "hush-0123456789"
	text := secret.Text(hush)
	var log bytes.Buffer
	slog.New(slog.NewTextHandler(&log, nil)).Info("told", "token", text)
	slog.New(slog.NewJSONHandler(&log, nil)).Info("told", "token", text)
	said := fmt.Sprintf("%v %+v %#v %s %q %v", text, text, text, text, text, struct{ Token secret.Text }{text}) + log.String()
	if strings.Contains(said, hush) || strings.Count(said, "[secret]") != 8 {
		t.Error(said)
	}
}

func TestReadFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "f")
	for _, test := range []struct {
		bytes int
		err   string
	}{{0, ""}, {1 << 20, ""}, {1<<20 + 1, "which no file of keys has"}} {
		if err := os.WriteFile(path, make([]byte, test.bytes), 0o600); err != nil {
			t.Fatal(err)
		}
		text, err := secret.ReadFile(path, "keys")
		if (err == nil) != (test.err == "") || err != nil && !strings.Contains(err.Error(), test.err) || err == nil && len(text) != test.bytes {
			t.Errorf("of %d bytes: %d, %v", test.bytes, len(text), err)
		}
	}
	if _, err := secret.ReadFile(path+"2", "keys"); !os.IsNotExist(err) {
		t.Error(err)
	}
}
