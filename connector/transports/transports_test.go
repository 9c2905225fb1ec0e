package transports_test

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"kvstrata/connector"
	"kvstrata/connector/connectortest"
	"kvstrata/connector/device"
	"kvstrata/connector/null"
	"kvstrata/connector/transports"
)

func setup(name, extra string) connector.Setup {
	c, err := connector.ParseConfig([]byte(`{"kv_connector":"` + name + `","kv_role":"kv_both","kv_connector_extra_config":` + extra + `}`))
	if err != nil {
		panic(err)
	}
	return connector.Setup{Config: c, Ranks: 1, Model: connector.Model{BlockTokens: 16}, Log: slog.New(slog.NewTextHandler(io.Discard, nil))}
}

func TestDefault(t *testing.T) {
	f := transports.Default()
	if diff := cmp.Diff([]string{"lmcache", "null", "redis", "tcp"}, f.Names()); diff != "" {
		t.Error(diff)
	}
	if err := f.Register("tcp", null.Transport); err == nil || !strings.Contains(err.Error(), "taken") {
		t.Errorf("a name was given twice: %v", err)
	}
	if err := f.Register("mine", null.Transport); err != nil {
		t.Error(err)
	}
	if _, err := f.Worker(setup("mine", "{}")); err != nil {
		t.Error(err)
	}
}

// A mistake is named in the words that were typed, and in both halves.
func TestMistakesAreNamed(t *testing.T) {
	f := transports.Default()
	for _, test := range []struct{ name, extra, want string }{
		{"nixl", "{}", "there are lmcache, null, redis, tcp"},
		{"tcp", `{"chunk_byte":1}`, `unknown key "chunk_byte"; the nearest known one is "chunk_bytes"`},
		{"tcp", `{"mode":"shove"}`, `mode "shove": want pull or push`},
		{"null", `{"ttl":1}`, `unknown key "ttl"`},
		{"redis", `{"group_blocks":0}`, "group_blocks 0"},
		{"redis", `{"urls":"redis://h:1"}`, `the nearest known one is "url"`},
		{"lmcache", `{"paralel":2}`, `the nearest known one is "parallel"`},
	} {
		var errs [2]error
		_, errs[0] = f.Scheduler(setup(test.name, test.extra))
		_, errs[1] = f.Worker(setup(test.name, test.extra))
		for half, err := range errs {
			if err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("%s %s, half %d: %v, want %q", test.name, test.extra, half, err, test.want)
			}
		}
	}
}

// caches returns memory for 4 blocks.
func caches(t testing.TB) connector.Caches {
	t.Helper()
	tensors, size := connectortest.Tensors(4, 0)
	memory, err := device.Host{}.Alloc("test", size)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = memory.Close() }) // nothing refers to it
	return connector.Caches{Device: device.Host{}, Memory: memory, Tensors: tensors, Model: connectortest.Model()}
}

// A step of 256 requests with nothing to move allocates nothing, whatever the transport.
func TestAStepWithNothingToMoveAllocatesNothing(t *testing.T) {
	for name, extra := range map[string]string{
		"null": "{}", "tcp": `{"listen":"127.0.0.1:0"}`, "redis": `{"url":"redis://127.0.0.1:1"}`, "lmcache": `{"remote_url":"lm://127.0.0.1:1"}`,
	} {
		s := setup(name, extra)
		s.Model = connectortest.Model()
		e, err := connector.NewEngine(transports.Default(), s, []connector.Caches{caches(t)})
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		step := new(connector.Step)
		for i := range 256 {
			r := &connector.Request{ID: fmt.Sprint("r", i), Prompt: 8, Tokens: 8}
			e.Scheduler.NewRequest(r)
			step.Scheduled = append(step.Scheduled, connector.Scheduled{Request: r, Blocks: []int{0}, Computed: 8})
		}
		compute := func() error { return nil }
		if n := testing.AllocsPerRun(100, func() {
			if _, err := e.Step(t.Context(), step, nil, compute); err != nil {
				t.Error(err)
			}
		}); n > 0 {
			t.Errorf("%s: %v allocations a step", name, n)
		}
		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		if err := e.Run(ctx); err != nil { // it releases what was bound
			t.Error(err)
		}
	}
}
