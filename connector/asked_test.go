package connector_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"kvstrata/connector"
	"kvstrata/connector/null"
	"kvstrata/event"
)

// half hands one transfer record over, and is otherwise null's.
type half struct{ null.Scheduler }

func (half) TakeRecords() []event.Transfer { return []event.Transfer{{Kind: event.LeaseExpired}} }

func TestWhatAnEngineAsksIsNoted(t *testing.T) {
	a := connector.NewAsked(half{}, 16)
	names := []connector.Name{{Prefix: 1}, {Prefix: 2}, {Prefix: 3}, {Prefix: 4}}
	warm := &connector.Request{ID: "warm", Prompt: 50, Tokens: 50, Names: names, Session: "s", Tenant: "t"}
	cold := &connector.Request{ID: "cold", Prompt: 10, Tokens: 10}
	a.NewRequest(warm)
	a.NewRequest(cold)
	a.UpdateAfterAlloc(warm, nil, 32, 16)
	a.UpdateAfterAlloc(warm, nil, 48, 0) // its load has ended
	a.UpdateAfterAlloc(cold, nil, 0, 0)
	warm.Tokens = 60
	a.RequestFinished(warm, nil, connector.EndLength)
	a.RequestFinished(&connector.Request{ID: "never heard of"}, nil, connector.EndAborted)

	source := event.Source{Model: "m", Instance: "i", Origin: event.Connector}
	engine := event.Source{Model: "m", Instance: "i", Origin: event.Engine}
	want := event.Records{
		Transfers: []event.Transfer{{Source: source, Time: 7, Kind: event.LeaseExpired}},
		Lookups: []event.Lookup{
			{
				Source: engine, Asker: event.AskerConnector, Time: 7, Request: "warm", Session: "s", Tenant: "t", OneIn: 1, BlockSize: 16, Tokens: 50, Prefix: 3,
				Shares: []event.Share{{Tier: event.GPU, Tokens: 32}, {Tier: event.External, Tokens: 16}}, Holders: 1, Longest: 48,
			},
			{Source: engine, Asker: event.AskerConnector, Time: 7, Request: "cold", OneIn: 1, BlockSize: 16, Tokens: 10},
		},
		Requests: []event.Request{{
			Source: engine, Time: 7, Request: "warm", Session: "s", Tenant: "t", Prompt: 50, Output: 10, Cached: 32, External: 16, End: event.EndLength,
		}},
	}
	if diff := cmp.Diff(want, a.TakeAll(source, 7)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if again := a.TakeAll(source, 8); len(again.Lookups)+len(again.Requests) > 0 {
		t.Errorf("told twice: %+v", again)
	}
	// An id may come again once its request has finished.
	a.NewRequest(warm)
	a.UpdateAfterAlloc(warm, nil, 0, 0)
	if again := a.TakeAll(source, 9); len(again.Lookups) != 1 {
		t.Errorf("%+v, want the second request of the name", again)
	}
}

// What nobody takes is bounded.
func TestWhatAnEngineAsksIsBounded(t *testing.T) {
	a := connector.NewAsked(half{}, 16)
	for range 1<<16 + 10 {
		r := &connector.Request{ID: "r", Prompt: 1}
		a.NewRequest(r)
		a.UpdateAfterAlloc(r, nil, 0, 0)
		a.RequestFinished(r, nil, connector.EndStopped)
	}
	if all := a.TakeAll(event.Source{}, 1); len(all.Lookups)+len(all.Requests) != 1<<16 {
		t.Errorf("%d lookups, %d requests", len(all.Lookups), len(all.Requests))
	}
}
