package encoder_test

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"kvstrata/connector"
	"kvstrata/connector/encoder"
)

func TestDefaultsAreUpstreams(t *testing.T) {
	c := encoder.DefaultConfig()
	if len(c.EngineID) != 36 || c.EngineID == encoder.DefaultConfig().EngineID {
		t.Errorf("engine id %q: want a fresh UUID", c.EngineID)
	}
	c.EngineID = ""
	want := encoder.Config{
		BufferDevice: "cuda", BufferSize: 1e9, ParallelSize: 1, IP: "127.0.0.1", Port: 14579, Extra: connector.Extra{},
	}
	if diff := cmp.Diff(want, c); diff != "" {
		t.Error(diff)
	}
}

func TestParseConfig(t *testing.T) {
	c, err := encoder.ParseConfig([]byte(`{"ec_connector": "redis", "ec_role": "ec_both", "ec_rank": 1, "ec_parallel_size": 2, "engine_id": "",
		"ec_buffer_device": "cpu", "ec_buffer_size": 5, "ec_ip": "::1", "ec_port": 7, "ec_connector_extra_config": {"url": "redis://u:secret@h"}}`))
	if err != nil {
		t.Fatal(err)
	}
	if c.Connector != "redis" || c.Role != encoder.Both || *c.Rank != 1 || c.EngineID == "" || c.Address() != "[::1]:7" || c.BufferDevice != "cpu" || c.BufferSize != 5 {
		t.Errorf("%+v", c)
	}
	if text := c.Extra.String(); text != "[url]" {
		t.Errorf("extra prints as %s", text)
	}
	for text, words := range map[string][]string{
		`{"ec_conector": "x", "ec_prot": 1}`: {`"ec_conector"; the nearest known one is "ec_connector"`, `"ec_prot"; the nearest known one is "ec_port"`},
		`{"ec_connector": "x"}`:              {"ec_role"},
		`{"ec_role": "kv_producer"}`:         {"ec_role", "ec_producer"},
		`{"ec_role": ""}`:                    {"ec_role"},
		`{"ec_connector": "x", "ec_buffer_size": 0, "ec_parallel_size": 0, "ec_rank": -1, "ec_port": 0, "ec_ip": "a b", "ec_connector_module_path": "m"}`: {
			"ec_role", "ec_buffer_size", "ec_parallel_size", "ec_rank", "ec_port", "ec_ip", "ec_connector_module_path",
		},
		`[]`: {"ec-transfer-config"}, `{}{}`: {"ec-transfer-config"}, ``: {"ec-transfer-config"},
	} {
		_, err := encoder.ParseConfig([]byte(text))
		if err == nil {
			t.Errorf("%s is taken", text)
			continue
		}
		for _, word := range append(words, "ec-transfer-config") {
			if !strings.Contains(err.Error(), word) || strings.Contains(err.Error(), "kv_connector_extra_config") {
				t.Errorf("%s: %v; want %s", text, err, word)
			}
		}
	}
}

func TestRole(t *testing.T) {
	for _, r := range []encoder.Role{encoder.Producer, encoder.Consumer, encoder.Both} {
		text, err := json.Marshal(r)
		var back encoder.Role
		if err != nil || json.Unmarshal(text, &back) != nil || back != r {
			t.Errorf("%v is written as %s and read as %v", r, text, back)
		}
		if r.Produces() != (r != encoder.Consumer) || r.Consumes() != (r != encoder.Producer) {
			t.Errorf("%v produces %v, consumes %v", r, r.Produces(), r.Consumes())
		}
	}
	if got := encoder.Role(9).String(); got != "Role(9)" {
		t.Error(got)
	}
}

func TestParams(t *testing.T) {
	place, err := encoder.PlaceAt("[::1]:80", "e")
	if err != nil {
		t.Fatal(err)
	}
	text, err := json.Marshal(encoder.Params{"hash": place})
	if want := `{"hash":{"remote_host":"::1","remote_port":80,"remote_engine_id":"e"}}`; err != nil || string(text) != want {
		t.Errorf("%s, %v; want %s", text, err, want)
	}
	if place.Address() != "[::1]:80" {
		t.Error(place.Address())
	}
	for _, bad := range []string{"", "h", "h:", "h:0", "h:65536", ":80", "h:x"} {
		if _, err := encoder.PlaceAt(bad, ""); err == nil {
			t.Errorf("%q is taken", bad)
		}
	}
}

func TestCompatibility(t *testing.T) {
	m := encoder.Model{Name: "m", DType: "bfloat16", HiddenSize: 8, EncoderRevision: "r"}
	same := m
	if m.Compatibility() != same.Compatibility() {
		t.Error("one model has two hashes")
	}
	for _, other := range []encoder.Model{
		{"n", "bfloat16", 8, "r"}, {"m", "float16", 8, "r"}, {"m", "bfloat16", 9, "r"}, {"m", "bfloat16", 8, "s"},
	} {
		if other.Compatibility() == m.Compatibility() {
			t.Errorf("%+v and %+v have one hash", m, other)
		}
	}
	err := (&encoder.Model{}).Validate()
	for _, word := range []string{"model", "dtype", "hidden_size"} {
		if err == nil || !strings.Contains(err.Error(), word) {
			t.Errorf("%v; want one that names %s", err, word)
		}
	}
}

func TestItem(t *testing.T) {
	for _, i := range []encoder.Item{
		{"", 1}, {strings.Repeat("a", encoder.MaxHash+1), 1}, {"a", 0}, {"a", -1}, {"a", encoder.MaxBytes + 1},
	} {
		if i.Validate() == nil {
			t.Errorf("%d bytes of %d are taken", len(i.Hash), i.Bytes)
		}
	}
	if err := (encoder.Item{Hash: "a", Bytes: 1}).Validate(); err != nil {
		t.Error(err)
	}
}

func FuzzParseConfig(f *testing.F) {
	f.Add([]byte(`{"ec_connector": "redis", "ec_role": "ec_both", "ec_rank": 0, "ec_connector_extra_config": {"url": "redis://h"}}`))
	f.Add([]byte(`{"ec_buffer_size": 1e300, "ec_port": -1}`))
	f.Add([]byte(`{"ec_connector_extra_config": null, "engine_id": null}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		c, err := encoder.ParseConfig(text)
		if err == nil && (c.Validate() != nil || c.EngineID == "" || c.Extra == nil) {
			t.Errorf("%s is taken as %+v", text, c)
		}
	})
}
