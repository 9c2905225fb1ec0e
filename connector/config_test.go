package connector_test

import (
	"fmt"
	"log/slog"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"kvstrata/connector"
)

func TestParseConfig(t *testing.T) {
	c, err := connector.ParseConfig([]byte(`{"kv_connector":"redis","kv_role":"kv_producer","kv_rank":0,"kv_parallel_size":2,
		"kv_buffer_size":5e9,"kv_load_failure_policy":"recompute","kv_connector_extra_config":{"ttl":60}}`))
	if err != nil {
		t.Fatal(err)
	}
	rank := 0
	want := connector.Config{
		Connector: "redis", EngineID: c.EngineID, BufferDevice: "cpu", BufferSize: 5e9, Role: connector.Producer, Rank: &rank,
		ParallelSize: 2, IP: "127.0.0.1", Port: 14579, Extra: connector.Extra{"ttl": []byte("60")}, OnLoadFailure: connector.Recompute,
	}
	if diff := cmp.Diff(want, c); diff != "" {
		t.Error(diff)
	}
	if len(c.EngineID) != 36 || c.EngineID[14] != '4' || c.EngineID == connector.DefaultConfig().EngineID {
		t.Errorf("engine id %q is no fresh UUID of version 4", c.EngineID)
	}
	if !c.Role.Produces() || c.Role.Consumes() || !connector.Both.Consumes() {
		t.Error("roles")
	}
	if empty, err := connector.ParseConfig([]byte(`{}`)); err != nil || empty.OnLoadFailure != connector.Fail {
		t.Errorf("upstream takes an empty object: %+v, %v", empty, err)
	}
}

func TestBadConfigIsNamed(t *testing.T) {
	for text, want := range map[string]string{
		`{"kv_connector":"redis","kv_rol":"kv_both"}`:      `unknown key "kv_rol"; the nearest known one is "kv_role"`,
		`{"kv_conector":"redis","kv_load_failure":"fail"}`: `the nearest known one is "kv_load_failure_policy"`,
		`{"kv_connector":"redis"}`:                         `kv_role: missing`,
		`{"kv_role":"producer"}`:                           `kv_role "producer": want kv_producer`,
		`{"kv_load_failure_policy":"ignore"}`:              `want fail or recompute`,
		`{"kv_port":0}`:                                    `kv_port 0: want 1 to 65535`,
		`{"kv_rank":2,"kv_parallel_size":2}`:               `kv_rank 2: want 0 to 1`,
		`{"kv_parallel_size":0}`:                           `kv_parallel_size 0`,
		`{"kv_buffer_size":-1}`:                            `kv_buffer_size -1`,
		`{"kv_ip":""}`:                                     `kv_ip ""`,
		`{"kv_connector_module_path":"a.b"}`:               `names a Python module`,
		`[1]`:                                              `want a JSON object`,
		`{} {}`:                                            `more follows`,
		`{"kv_port":"x"}`:                                  `kv_port`,
		`{"kv_port":0,"kv_ip":"","kv_connector":"x"}`:      `kv_ip`,
	} {
		if _, err := connector.ParseConfig([]byte(text)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", text, err, want)
		}
	}
}

func TestExtra(t *testing.T) {
	cfg := struct {
		TTL  int    `json:"ttl"`
		Name string `json:"name"`
	}{TTL: 5, Name: "n"}
	if err := (connector.Extra{"ttl": []byte("60")}).Into(&cfg, "ttl", "name"); err != nil || cfg.TTL != 60 || cfg.Name != "n" {
		t.Errorf("%+v, %v", cfg, err)
	}
	err := (connector.Extra{"tll": []byte("60")}).Into(&cfg, "ttl", "name")
	if err == nil || !strings.Contains(err.Error(), `the nearest known one is "ttl"`) {
		t.Error(err)
	}
}

// A transport's configuration may hold a secret: whatever prints a configuration shows the keys alone.
func TestExtraKeepsItsSecrets(t *testing.T) {
	c, err := connector.ParseConfig([]byte(`{"kv_connector":"x","kv_role":"kv_both","kv_connector_extra_config":{"secret":"hunter2hunter2"}}`))
	if err != nil {
		t.Fatal(err)
	}
	var out strings.Builder
	slog.New(slog.NewTextHandler(&out, nil)).Info("made", "config", c, "extra", c.Extra)
	slog.New(slog.NewTextHandler(&out, nil)).Info(fmt.Sprintf("%v %+v %#v %s", c, c, c, c.Extra))
	if strings.Contains(out.String(), "hunter2") || !strings.Contains(out.String(), "secret") {
		t.Error(out.String())
	}
}
