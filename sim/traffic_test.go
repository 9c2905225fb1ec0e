package sim_test

import (
	"slices"
	"strings"
	"testing"
	"time"

	"kvstrata/event"
	"kvstrata/sim"

	"github.com/google/go-cmp/cmp"
)

// summary is an arrival with its prompt summed up, since cmp takes its time with tokens.
type summary struct {
	At             time.Duration
	ID, Salt, LoRA string
	Session        string
	Output, Tokens int
	Prompt         uint64
}

func summarize(all []sim.Arrival) []summary {
	var out []summary
	for _, a := range all {
		r := a.Request
		out = append(out, summary{
			At: a.At, ID: r.ID, Salt: r.Salt, LoRA: r.LoRA, Session: r.Session, Output: r.Output, Tokens: len(r.Prompt),
			Prompt: event.LocalHash(r.Prompt, 0),
		})
	}
	return out
}

// arrivals returns the first n of a generator.
func arrivals(t testing.TB, n int, edit func(*sim.TrafficConfig)) []sim.Arrival {
	t.Helper()
	cfg := sim.DefaultTrafficConfig()
	cfg.Requests = n
	if edit != nil {
		edit(&cfg)
	}
	traffic, err := sim.NewTraffic(cfg)
	if err != nil {
		t.Fatal(err)
	}
	var all []sim.Arrival
	for a, err := range traffic.Arrivals() {
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, a)
	}
	if len(all) != n {
		t.Fatalf("%d arrivals, want %d", len(all), n)
	}
	return all
}

func TestTrafficIsAFunctionOfItsSeed(t *testing.T) {
	want := summarize(arrivals(t, 300, nil))
	if diff := cmp.Diff(want, summarize(arrivals(t, 300, nil))); diff != "" {
		t.Errorf("the same seed gives another traffic (-first +second):\n%s", diff)
	}
	if other := summarize(arrivals(t, 300, func(c *sim.TrafficConfig) { c.Seed = 2 })); cmp.Equal(want, other) {
		t.Error("another seed gives the same traffic")
	}
	traffic, err := sim.NewTraffic(sim.DefaultTrafficConfig())
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		var endless []sim.Arrival
		for a := range traffic.Arrivals() {
			if endless = append(endless, a); len(endless) == len(want) {
				break
			}
		}
		if diff := cmp.Diff(want, summarize(endless)); diff != "" {
			t.Errorf("an endless traffic begins otherwise than a short one (-short +endless):\n%s", diff)
		}
	}
}

func TestTrafficConversations(t *testing.T) {
	all := arrivals(t, 2000, nil)
	cfg := sim.DefaultTrafficConfig()
	ids := make(map[string]bool)
	last := make(map[string]sim.Request) // by session
	systems := make(map[uint64]int)
	turns, kinds := 0, make(map[string]int)
	for i, a := range all {
		r := a.Request
		if ids[r.ID] || len(r.Prompt) == 0 || len(r.Prompt) > cfg.MaxPrompt || r.Output < 1 || r.External {
			t.Fatalf("request %q with %d tokens of prompt and %d of output: seen %v", r.ID, len(r.Prompt), r.Output, ids[r.ID])
		}
		ids[r.ID] = true
		if i > 0 && a.At < all[i-1].At {
			t.Fatalf("request %q comes before the one that it follows", r.ID)
		}
		systems[event.LocalHash(r.Prompt[:cfg.SystemTokens], 0)]++
		switch {
		case r.Salt != "" && r.LoRA != "":
			t.Fatalf("request %q has a salt and an adapter", r.ID)
		case r.Salt != "":
			kinds["salt"]++
		case r.LoRA != "":
			kinds["lora"]++
		default:
			kinds["plain"]++
		}
		if before, ok := last[r.Session]; ok {
			turns++
			history := sim.AppendOutput(slices.Clone(before.Prompt), before.ID, before.Output)
			if len(r.Prompt) <= len(history) || !slices.Equal(history, r.Prompt[:len(history)]) {
				t.Fatalf("request %q does not continue %q", r.ID, before.ID)
			}
			if before.Salt != r.Salt || before.LoRA != r.LoRA {
				t.Fatalf("conversation %q changes its tenant", r.Session)
			}
		}
		last[r.Session] = r
	}
	if turns < 1000 || len(systems) != cfg.SystemPrompts || len(kinds) != 3 {
		t.Errorf("%d further turns, %d system prompts, tenants %v", turns, len(systems), kinds)
	}
}

func TestTrafficRateAndBursts(t *testing.T) {
	steady := arrivals(t, 2000, func(c *sim.TrafficConfig) { c.BurstEvery = 0 })
	if rate := 2000 / steady[1999].At.Seconds(); rate < 3.5 || rate > 4.6 {
		t.Errorf("%.2f requests a second, want about 4", rate)
	}
	perSecond := make(map[time.Duration]int)
	for _, a := range arrivals(t, 2000, nil) {
		perSecond[a.At.Truncate(time.Second)]++
	}
	for at := 30 * time.Second; at <= 300*time.Second; at += 30 * time.Second {
		if perSecond[at] < 20 {
			t.Errorf("%d requests in the second from %v on, want a burst of 20", perSecond[at], at)
		}
	}
}

func TestTrafficConfigValidate(t *testing.T) {
	_, err := sim.NewTraffic(sim.TrafficConfig{Requests: -1, SystemTokens: -1, BurstEvery: 1, BurstChats: -1})
	if err == nil {
		t.Fatal("no error")
	}
	want := []string{
		"requests -1: want 0 (endless) or more",
		"rate 0: want 0.001 to 1000000 requests a second",
		"chats 0: want 1 to 1048576",
		"tenants 0: want 1 to 1048576",
		"system-prompts 0: want 1 to 1048576",
		"system-tokens -1: want 0 to 1048576",
		"user-tokens 0: want 1 to 1048576",
		"output-tokens 0: want 1 to 1048576",
		"turns 0: want 1 to 1048576",
		"burst-every 1ns: want 0 (none) or at least 1s",
		"burst-chats -1: want 0 to 1048576",
	}
	if diff := cmp.Diff(want, strings.Split(err.Error(), "\n")); diff != "" {
		t.Errorf("problems (-want +got):\n%s", diff)
	}
}
