package prefix_test

import (
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"

	"kvstrata/event"
	"kvstrata/indexer/prefix"
)

// tellingIndex returns an index that tells one lookup in so many, and what it told.
func tellingIndex(oneIn uint32) (*prefix.Index, *[]event.Lookup) {
	told := new([]event.Lookup)
	cfg := prefix.DefaultConfig()
	cfg.Clock = (&clock{began}).Now
	cfg.Lookups = &prefix.Teller{OneIn: oneIn, Tell: func(l event.Lookup) { *told = append(*told, l) }}
	return prefix.New(cfg), told
}

func TestLookupsAreTold(t *testing.T) {
	x, told := tellingIndex(1)
	p := prompt(1, 4)
	newPublisher(engine("e1"), false).tell(t, x, p.stored(event.GPU, 0, 1))
	e2 := newPublisher(engine("e2"), false)
	e2.tell(t, x, p.stored(event.GPU, 0, 3))
	e2.tell(t, x, p.offloaded(event.CPU, 0, 3), p.evicted(event.GPU, 2, 3))
	newPublisher(engine("e3"), false).tell(t, x, prompt(2, 1).stored(event.GPU, 0, 1))

	lookup(t, x, &prefix.Request{Model: "m", Tokens: p.tokens, ID: "r", Session: "s", Tenant: "t"})
	lookup(t, x, &prefix.Request{Model: "m", Hashes: p.hashes(), BlockSize: 16})
	lookup(t, x, &prefix.Request{Model: "m", Tokens: text(3, 40)})
	best := event.Lookup{
		Source: engine("e2"), Asker: event.AskerIndex, Time: event.UnixTime(began), Request: "r", Session: "s", Tenant: "t", OneIn: 1, BlockSize: 16,
		Tokens: uint64(len(p.tokens)), Prefix: p.hashes()[3], Holders: 2, Longest: 48,
		Shares: []event.Share{{Tier: event.GPU, Tokens: 32}, {Tier: event.CPU, Tokens: 16}},
	}
	byHash := best
	byHash.Request, byHash.Session, byHash.Tenant = "", "", ""
	nobody := event.Lookup{
		Source: event.Source{Model: "m", Origin: event.Engine}, Asker: event.AskerIndex, Time: event.UnixTime(began), OneIn: 1, BlockSize: 16, Tokens: 40,
		Prefix: (chain{tokens: text(3, 40), size: 16}).hashes()[1],
	}
	if diff := cmp.Diff([]event.Lookup{best, byHash, nobody}, *told); diff != "" {
		t.Error(diff)
	}
}

// Of lookups with a request's id the same are told by whoever picks one in as many; of the others every so-many-th.
func TestOneLookupInSoMany(t *testing.T) {
	var picked [2]map[string]bool
	for i := range picked {
		x, told := tellingIndex(10)
		newPublisher(engine("e1"), false).tell(t, x, prompt(1, 4).stored(event.GPU, 0, 1))
		for range 100 * (i + 1) {
			lookup(t, x, &prefix.Request{Model: "m", Tokens: text(1, 16)})
		}
		if len(*told) != 10*(i+1) || (*told)[0].OneIn != 10 {
			t.Fatalf("%d of %d are told", len(*told), 100*(i+1))
		}
		*told = nil
		picked[i] = make(map[string]bool)
		for n := range 1000 {
			lookup(t, x, &prefix.Request{Model: "m", Tokens: text(1, 16), ID: fmt.Sprint("request-", n)})
		}
		for _, l := range *told {
			picked[i][l.Request] = true
		}
	}
	if diff := cmp.Diff(picked[0], picked[1]); diff != "" || len(picked[0]) < 60 || len(picked[0]) > 140 {
		t.Errorf("%d of 1000 are told; %s", len(picked[0]), diff)
	}
}
