package direct_test

import (
	"io"
	"log/slog"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"kvstrata/connector"
	"kvstrata/connector/direct"
	"kvstrata/event"
)

func newHalf(t testing.TB, role connector.Role, push bool) *direct.Scheduler {
	t.Helper()
	cfg := connector.DefaultConfig()
	cfg.Role, cfg.EngineID = role, "engine-1"
	s := direct.NewScheduler(connector.Setup{
		Config: cfg, Instance: "prefill-0", Ranks: 2, Tier: event.GPU, Model: connector.Model{BlockTokens: 4},
		Now: func() time.Time { return time.Unix(1000, 0) }, Log: slog.New(slog.NewTextHandler(io.Discard, nil)),
	}, 30*time.Second, push)
	if err := s.SetHandshake([][]byte{[]byte(`{"address":"10.0.0.1:7001"}`), []byte(`{"address":"10.0.0.1:7002"}`)}); err != nil {
		t.Fatal(err)
	}
	return s
}

func take(s *direct.Scheduler) *direct.Metadata {
	m, _ := s.BuildMetadata(&connector.Step{}).(*direct.Metadata)
	return m
}

// What a producer answers is in the spelling of vLLM's NixlConnector, and is what a consumer needs.
func TestHandOff(t *testing.T) {
	p, c := newHalf(t, connector.Producer, false), newHalf(t, connector.Consumer, false)
	r := &connector.Request{ID: "r", Prompt: 10, Tokens: 11, Params: &connector.Params{DoRemoteDecode: true}}
	if m := p.MatchedTokens(r, 0); m != (connector.Match{}) {
		t.Errorf("a producer is offered %+v", m)
	}
	delay, params := p.RequestFinished(r, []int{5, 6, 9, 12}, connector.EndLength)
	if !delay || !p.Pending() {
		t.Error("the blocks are not kept")
	}
	want := &connector.Params{
		DoRemotePrefill: true, RemoteBlockIDs: []int{5, 6, 9}, RemoteEngineID: "engine-1", RemoteRequestID: "r", RemoteHost: "10.0.0.1",
		RemotePort: 7001, RemoteRanks: []string{"10.0.0.1:7001", "10.0.0.1:7002"}, RemoteInstance: "prefill-0", TPSize: 2, RemoteTokens: 10,
		RemoteExpiry: 1030, Mode: "pull",
	}
	if diff := cmp.Diff(want, params); diff != "" {
		t.Errorf("parameters (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(&direct.Metadata{Holds: []direct.Hold{{Request: "r", Blocks: []int{5, 6, 9}}}}, take(p)); diff != "" {
		t.Errorf("to the producer's workers (-want +got):\n%s", diff)
	}

	d := &connector.Request{ID: "d", Prompt: 10, Tokens: 10, Params: params, Names: make([]connector.Name, 2)}
	for range 2 { // asking changes nothing
		if m := c.MatchedTokens(d, 4); m != (connector.Match{Tokens: 6, Async: true}) {
			t.Errorf("the consumer is offered %+v", m)
		}
	}
	c.UpdateAfterAlloc(d, []int{1, 2, 3, 4}, 4, 6)
	load := direct.Load{
		Request: "d", First: 1, Local: []int{2, 3}, Blocks: []int{6, 9},
		Remote: direct.Remote{EngineID: "engine-1", Instance: "prefill-0", Request: "r", Ranks: params.RemoteRanks},
	}
	if diff := cmp.Diff(&direct.Metadata{Loads: []direct.Load{load}}, take(c)); diff != "" {
		t.Errorf("to the consumer's workers (-want +got):\n%s", diff)
	}
	if m := c.MatchedTokens(d, 0); m != (connector.Match{}) {
		t.Errorf("offered again: %+v", m)
	}
	c.UpdateOutput(&connector.Output{FinishedReceiving: []string{"d"}})
	if delay, _ := c.RequestFinished(d, []int{1, 2, 3, 4}, connector.EndStopped); delay || c.Pending() {
		t.Error("the consumer's blocks are kept after the load")
	}
	p.UpdateOutput(&connector.Output{FinishedSending: []string{"r"}})
	if p.Pending() {
		t.Error("the producer waits for something")
	}
}

func TestProducersKeepOnlyWhatWasAskedFor(t *testing.T) {
	asked := &connector.Params{DoRemoteDecode: true}
	for name, test := range map[string]struct {
		role   connector.Role
		params *connector.Params
		end    connector.End
		blocks []int
		keeps  bool
	}{
		"asked for, at its length":   {connector.Producer, asked, connector.EndLength, []int{1}, true},
		"both roles":                 {connector.Both, asked, connector.EndLength, []int{1}, true},
		"nobody asked":               {connector.Producer, nil, connector.EndLength, []int{1}, false},
		"asked for something else":   {connector.Producer, &connector.Params{}, connector.EndLength, []int{1}, false},
		"it stopped before":          {connector.Producer, asked, connector.EndStopped, []int{1}, false},
		"its client went away":       {connector.Producer, asked, connector.EndAborted, []int{1}, false},
		"a consumer":                 {connector.Consumer, asked, connector.EndLength, []int{1}, false},
		"nothing was computed of it": {connector.Producer, asked, connector.EndLength, nil, false},
	} {
		s := newHalf(t, test.role, false)
		delay, params := s.RequestFinished(&connector.Request{ID: "r", Prompt: 3, Params: test.params}, test.blocks, test.end)
		if delay != test.keeps || (params != nil) != test.keeps || (take(s) != nil) != test.keeps {
			t.Errorf("%s: delay %v, parameters %v", name, delay, params)
		}
	}
}

// The hand-off comes through a client: one that contradicts itself must not make anybody read what is not there.
func TestHandOffsThatContradictThemselves(t *testing.T) {
	for name, params := range map[string]*connector.Params{
		"too few blocks":    {DoRemotePrefill: true, RemoteBlockIDs: []int{1}, RemoteTokens: 10},
		"no blocks":         {DoRemotePrefill: true, RemoteTokens: 10},
		"not for consumers": {DoRemoteDecode: true, RemoteBlockIDs: []int{1, 2, 3}, RemoteTokens: 10},
		"none":              nil,
	} {
		c := newHalf(t, connector.Consumer, false)
		if m := c.MatchedTokens(&connector.Request{ID: "r", Prompt: 10, Params: params}, 0); m != (connector.Match{}) {
			t.Errorf("%s: %+v", name, m)
		}
	}
	c := newHalf(t, connector.Consumer, false)
	long := &connector.Params{DoRemotePrefill: true, RemoteBlockIDs: make([]int, 100), RemoteTokens: 400}
	if m := c.MatchedTokens(&connector.Request{ID: "r", Prompt: 10, Params: long}, 0); m.Tokens != 10 {
		t.Errorf("of a producer that has more than the prompt %d tokens are taken", m.Tokens)
	}
}

func TestTheProducerIsToldWhatIsNotNeeded(t *testing.T) {
	params := &connector.Params{DoRemotePrefill: true, RemoteBlockIDs: []int{5, 6, 9}, RemoteRequestID: "p", RemoteHost: "h", RemotePort: 1}
	want := &direct.Metadata{Notices: []direct.Remote{{Request: "p", Ranks: []string{"h:1"}}}}

	all := newHalf(t, connector.Consumer, false) // every token is there
	r := &connector.Request{ID: "r", Prompt: 12, Params: params}
	all.UpdateAfterAlloc(r, []int{1, 2, 3}, 12, 0)
	if diff := cmp.Diff(want, take(all)); diff != "" {
		t.Errorf("all there (-want +got):\n%s", diff)
	}

	aborted := newHalf(t, connector.Consumer, false) // before it was given blocks
	if delay, _ := aborted.RequestFinished(r, nil, connector.EndAborted); delay {
		t.Error("it has no blocks, and they are kept")
	}
	if diff := cmp.Diff(want, take(aborted)); diff != "" {
		t.Errorf("aborted (-want +got):\n%s", diff)
	}

	loading := newHalf(t, connector.Consumer, false)
	loading.UpdateAfterAlloc(r, []int{1, 2, 3}, 0, 12)
	if take(loading) == nil {
		t.Fatal("no load was ordered")
	}
	if delay, _ := loading.RequestFinished(r, []int{1, 2, 3}, connector.EndAborted); !delay {
		t.Error("blocks are freed that are being written")
	}
	if diff := cmp.Diff(&direct.Metadata{Cancels: []string{"r"}}, take(loading)); diff != "" {
		t.Errorf("aborted while loading (-want +got):\n%s", diff)
	}
}

// A step in which 256 requests compute and nothing is to be moved costs nothing worth telling, and allocates nothing.
func BenchmarkStep(b *testing.B) {
	s := newHalf(b, connector.Both, false)
	step := &connector.Step{}
	for i := range 256 {
		step.Scheduled = append(step.Scheduled, connector.Scheduled{Request: &connector.Request{ID: string(rune('a' + i))}, Computed: 100})
	}
	for b.Loop() {
		if !s.BuildMetadata(step).Empty() {
			b.Fatal("there is something to do")
		}
		s.UpdateOutput(&connector.Output{})
	}
}
