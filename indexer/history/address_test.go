package history_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"kvstrata/indexer/history"
)

func TestAddress(t *testing.T) {
	for _, test := range []struct{ address, want string }{
		{"clickhouse://h:9000", ""},
		{"clickhouse://u:secret@h:9000/db", ""},
		{"http://u:secret@h:8123/db?dial_timeout=1s", ""},
		{"https://h:8443", ""},
		{"unix:///a/b.sock", ""},
		{"", "no host"},
		{"h:9000", "want clickhouse://host:9000"},
		{"unix:relative", "three slashes"},
		{"unix://a/b.sock", "three slashes"},
		{"http://", "no host"},
		{"ftp://u:secret@h/db", "scheme"},
		{"http://u:secret@h:8123/da-ta", "letters, digits and _"},
		{"http://u:secret@h:8123/db?nonsense=secret", ""},
		{"http://u:secret@h:99999999/db", ""},
		{"http://u:secret@h:x/db", "not a URL"},
		{"clickhouse://u:secret@h:9000/db?dial_timeout=secret", "dial"},
		{"http://u:sec%zzret@h:8123", "not a URL"},
	} {
		t.Run(test.address, func(t *testing.T) {
			cfg := history.DefaultConfig()
			cfg.Address = test.address
			err := cfg.Validate()
			if test.want == "" && err != nil || test.want != "" && (err == nil || !strings.Contains(err.Error(), test.want)) {
				t.Errorf("%v, want %q", err, test.want)
			}
			if err != nil && !strings.Contains(test.address, "=secret") && strings.Contains(err.Error(), "sec") {
				t.Errorf("the password is in %v", err)
			}
		})
	}
}

// No error tells a password, whatever fails.
func TestPasswordsAreNotTold(t *testing.T) {
	for _, address := range []string{
		"http://u:secret@127.0.0.1:1/db", "clickhouse://u:secret@127.0.0.1:1/db", "clickhouse://127.0.0.1:1/db?username=u&password=secret",
		"http://127.0.0.1:1/db?username=u&password=secret", "https://u:secret@127.0.0.1:1/db",
	} {
		cfg := history.DefaultConfig()
		cfg.Address = address
		var errs []error
		_, err := history.Migrate(t.Context(), cfg)
		errs = append(errs, err)
		_, err = history.Status(t.Context(), cfg)
		errs = append(errs, err)
		_, err = newReader(t, cfg).Standing(t.Context())
		errs = append(errs, err)
		cfg.Address = address + "&dial_timeout=x"
		if !strings.Contains(address, "?") {
			cfg.Address = address + "?dial_timeout=x"
		}
		errs = append(errs, cfg.Validate())
		cfg.Address = address
		w, err := history.NewWriter(cfg, silent(), nil)
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- w.Run(ctx) }()
		eventually(t, "the trouble is told", func() bool { return w.Trouble() != "" })
		if strings.Contains(w.Trouble(), "secret") {
			t.Errorf("the password is in %s", w.Trouble())
		}
		cancel()
		<-done
		for _, err := range errs {
			if err == nil || strings.Contains(err.Error(), "secret") {
				t.Errorf("%s: %v", address, err)
			}
		}
	}
}

func TestValidateTellsAll(t *testing.T) {
	err := history.Config{}.Validate()
	for _, want := range []string{"--clickhouse", "flush interval", "rows of a round"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
	cfg := history.DefaultConfig()
	cfg.Address, cfg.FlushEvery = "unix:///a", time.Nanosecond
	if cfg.Validate() == nil {
		t.Error("a flush interval of 1 ns is taken")
	}
}
