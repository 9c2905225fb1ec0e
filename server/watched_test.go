package server_test

import (
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"kvstrata/server"
)

// However often a value is asked for, its file is looked at once a second, whether it changes or not.
func TestWatchedFilesAreLookedAtOnceASecond(t *testing.T) {
	path := filepath.Join(t.TempDir(), "f")
	write := func(text string) {
		t.Helper()
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("a")
	synctest.Test(t, func(t *testing.T) {
		get, err := server.Watch(slog.New(slog.DiscardHandler), func() (string, error) {
			text, err := os.ReadFile(path)
			return string(text), err
		}, path)
		if err != nil {
			t.Fatal(err)
		}
		for _, step := range []struct {
			wait        time.Duration
			write, want string
		}{
			{time.Second, "", "a"},
			{0, "bb", "a"}, // the look before was just now
			{999 * time.Millisecond, "", "a"},
			{time.Millisecond, "", "bb"},
			{500 * time.Millisecond, "ccc", "bb"},
			{500 * time.Millisecond, "", "ccc"},
		} {
			time.Sleep(step.wait)
			if step.write != "" {
				write(step.write)
			}
			if got, err := get(); got != step.want || err != nil {
				t.Errorf("%+v: %q, %v", step, got, err)
			}
		}
	})
}
