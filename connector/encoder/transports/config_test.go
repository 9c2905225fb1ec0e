package transports_test

import (
	"log/slog"
	"strings"
	"testing"

	"kvstrata/connector/encoder"
	"kvstrata/connector/encoder/encodertest"
	"kvstrata/connector/encoder/transports"
)

// TestConfig makes both halves of what cannot be.
func TestConfig(t *testing.T) {
	for _, test := range []struct {
		transport string
		extra     map[string]any
		words     []string // none = it is taken
	}{
		{"redis", map[string]any{"address": "h:1"}, nil},
		{"redis", map[string]any{"address": "h:1", "key_prefix": "mine", "parallel": 8, "load_timeout": 5}, nil},
		{"redis", map[string]any{"adress": "h:1"}, []string{`"adress"; the nearest known one is "address"`}},
		{"redis", map[string]any{"address": "h:1", "paralel": 1}, []string{`"parallel"`}},
		{"redis", map[string]any{"address": "h:1", "group_blocks": 1}, []string{`"group_blocks"`}},
		{"redis", map[string]any{"address": "h:1", "key_prefix": "kv"}, []string{"key_prefix", "KV blocks"}},
		{"redis", map[string]any{"parallel": 0, "lookup_timeout": 0, "load_timeout": -1}, []string{"parallel", "lookup_timeout", "load_timeout", "url"}},
		{"redis", map[string]any{"address": 1}, []string{"address"}},
		{"lmcache", map[string]any{"remote_url": "lm://h:1"}, nil},
		{"lmcache", map[string]any{"remote_url": "redis://h:1/2", "connections": 2}, nil},
		{"lmcache", map[string]any{"remote_ulr": "lm://h:1"}, []string{`"remote_url"`}},
		{"lmcache", map[string]any{"remote_url": "lm://h:1", "chunk_size": 2}, []string{`"chunk_size"`}},
		{"lmcache", map[string]any{"remote_url": "http://h", "pipeline": 0}, []string{"remote_url", "pipeline"}},
		{"tcp", nil, nil},
		{"tcp", map[string]any{"peers": []string{"h:1", "h:1"}, "lookup_timeout": 2}, nil},
		{"tcp", map[string]any{"peer": []string{"h:1"}}, []string{`"peers"`}},
		{"tcp", map[string]any{"peers": []string{"h"}, "connections": 0}, []string{`peers: address "h"`, "connections"}},
		{"tcp", map[string]any{"peers": "h:1", "stall_timeout": "x"}, []string{"peers", "stall_timeout"}},
		{"tcp", map[string]any{"mode": "push"}, []string{`"mode"`}},
		{"tcp", map[string]any{"secret": "short"}, []string{"secret"}},
	} {
		s := encoder.Setup{Config: config(test.transport, encoder.Both, test.extra), Ranks: 1, Model: encodertest.Model(), Log: slog.New(slog.DiscardHandler)}
		_, err := transports.Default().Scheduler(s)
		_, err2 := transports.Default().Worker(s)
		for _, err := range []error{err, err2} {
			if len(test.words) == 0 && err != nil {
				t.Errorf("%s %v: %v", test.transport, test.extra, err)
			}
			for _, word := range test.words {
				if err == nil || !strings.Contains(err.Error(), word) || !strings.Contains(err.Error(), "ec_connector_extra_config") || strings.Contains(err.Error(), "kv_connector") {
					t.Errorf("%s %v: %v; want one that names %s", test.transport, test.extra, err, word)
				}
			}
		}
	}
	if got := strings.Join(transports.Default().Names(), " "); got != "lmcache redis tcp" {
		t.Error(got)
	}
}
