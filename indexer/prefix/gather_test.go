package prefix_test

import (
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"reflect"
	"slices"
	"testing"
	"time"

	"kvstrata/event"
	"kvstrata/indexer/prefix"
	"kvstrata/indexer/prefix/gather"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

// direct leads requests to handlers in this process, by host.
type direct map[string]http.Handler

func (d direct) RoundTrip(r *http.Request) (*http.Response, error) {
	w := httptest.NewRecorder()
	d[r.URL.Host].ServeHTTP(w, r)
	return w.Result(), nil
}

// front returns a gather over shards that has heard what each keeps.
func (p *parts) front(t tb) *gather.Gather {
	t.Helper()
	hosts, cfg := make(direct), gather.DefaultConfig()
	for i, x := range p.shards {
		host := fmt.Sprint("shard-", i)
		hosts[host] = x.ShardHandler(func() error { return nil })
		cfg.Shards = append(cfg.Shards, "http://"+host)
	}
	g, err := gather.New(cfg, &http.Client{Transport: hosts}, slog.New(slog.DiscardHandler), nil)
	if err != nil {
		t.Fatal(err)
	}
	g.Refresh(context.Background())
	if err := g.Ready(); err != nil {
		t.Fatal(err)
	}
	return g
}

// step does one thing that can happen to all indexes alike.
func (p *parts) step(t *rapid.T, authors []*author) {
	a := rapid.SampledFrom(authors).Draw(t, "source")
	tell := func() {
		st := a.status(rapid.SampledFrom([]event.State{
			event.StateLive, event.StateLive, event.StateLive, event.StateRecovering, event.StatePartial, event.StateStale, event.StateGone,
		}).Draw(t, "state"), "said")
		if a.source.Origin == event.Connector {
			st.Stores = rapid.SliceOfN(rapid.SampledFrom([]string{"s0", "s0", "s1", "s9"}), 0, 3).Draw(t, "named stores")
		}
		p.each(func(x *prefix.Index) { x.Tell(st) })
	}
	switch what := rapid.IntRange(0, 29).Draw(t, "what"); {
	case what < 19:
		p.apply(t, a.draw(t))
	case what < 21:
		p.restore(t, a.checkpoint(t).Bytes())
	case what < 22:
		a.begin(0)
	case what < 23:
		a.begin(0)
		tell()
	case what < 27:
		tell()
	case what < 28:
		a.fence++
		tell()
	case what < 29:
		p.clock.now = p.clock.now.Add(time.Duration(rapid.IntRange(1, 45).Draw(t, "seconds")) * time.Second)
	default:
		p.each(func(x *prefix.Index) { x.Compared(a.source, false) })
	}
}

// TestGatherIsOneIndex divides random worlds among shards, and compares what a gather answers with what one index does that has
// everything.
func TestGatherIsOneIndex(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := newParts(rapid.IntRange(1, 5).Draw(t, "shards"))
		g := p.front(t)
		authors := drawAuthors(t)
		for _, a := range authors { // a front asks the groups of whole prefixes alone
			a.groups = slices.Clone(a.groups)
			for i := range a.groups {
				if c := &a.groups[i]; !c.spec.HoldsPrefix() {
					c.spec, c.behind = event.SpecChunkedLocal, 0
				}
			}
		}
		if rapid.Bool().Draw(t, "together") { // so that more of them reach on into stores
			for _, a := range authors {
				a.source.Cluster, a.source.Model = "c", "m"
			}
		}
		for range rapid.IntRange(1, 20).Draw(t, "steps") {
			p.step(t, authors)
			for i, r := range drawRequests(t) {
				want, wantErr := p.whole.Lookup(r)
				if wantErr == nil && i%6 > 0 && !holdsSome(want) {
					continue // one of many like it
				}
				got, err := g.Lookup(context.Background(), r)
				if fmt.Sprint(wantErr) != fmt.Sprint(err) {
					t.Fatalf("error %v, want %v", err, wantErr)
				}
				if !reflect.DeepEqual(want, got) {
					t.Fatalf("answer to %+v:\n%s", r, cmp.Diff(want, got))
				}
			}
		}
	})
}

// holdsSome reports whether some source holds, or reaches, a block of the prompt.
func holdsSome(a *prefix.Answer) bool {
	return slices.ContainsFunc(a.Matches, func(m prefix.Match) bool { return m.Blocks > 0 || m.Reach != nil && m.Reach.Blocks > 0 })
}

// A shard that has not read as far as the others makes answers shorter, not longer.
func TestAShardThatIsBehindShortens(t *testing.T) {
	p := newParts(3)
	g := p.front(t)
	pub := newPublisher(engine("e1"), false)
	text := prompt(1, 32)
	matched := func() (int, event.Epoch, event.Seq) {
		a, err := g.Lookup(t.Context(), &prefix.Request{Model: "m", Tokens: text.tokens})
		if err != nil {
			t.Fatal(err)
		}
		return a.Matches[0].Blocks, a.Matches[0].Epoch, a.Matches[0].Seq
	}
	behind := 0 // the first of its blocks ends what is known
	for ; !p.of[2].Holds(text.hashes()[behind]); behind++ {
	}
	ahead := func(m *event.Message) {
		for _, x := range p.shards[:2] {
			if _, err := x.Apply(t.Context(), m); err != nil {
				t.Fatal(err)
			}
		}
	}
	first := pub.message(t, []event.Event{text.stored(event.GPU, 0, 32)})
	ahead(first)
	if n, _, _ := matched(); n != behind {
		t.Errorf("%d blocks while a shard does not know the source, want %d", n, behind)
	}
	if _, err := p.shards[2].Apply(t.Context(), first); err != nil {
		t.Fatal(err)
	}
	if n, _, _ := matched(); n != 32 {
		t.Errorf("%d blocks, want all", n)
	}
	pub.dec = event.Decoder{}
	ahead(pub.message(t, nil))
	if n, epoch, seq := matched(); n != 32 || epoch != 1 || seq != 0 {
		t.Errorf("%d blocks at %d/%d, want all at what every shard has read", n, epoch, seq)
	}
	pub.restart(0)
	ahead(pub.message(t, []event.Event{text.stored(event.GPU, 0, 32)}))
	if n, epoch, _ := matched(); n != behind || epoch != 2 {
		t.Errorf("%d blocks of epoch %d while a shard is in an earlier life, want %d", n, epoch, behind)
	}
}

// An engine of two groups that reaches on into two stores, each of which has some of the blocks, in any tiers.
func TestGatherReachesIntoStores(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := newParts(rapid.IntRange(2, 4).Draw(t, "shards"))
		g := p.front(t)
		base := prompt(1, 8)
		groups := []chain{base, base}
		groups[0].group, groups[0].spec = 0, event.SpecFull
		groups[1].group, groups[1].spec = 1, event.SpecMLA
		tiers := []event.Tier{"", event.GPU, event.GPU, event.CPU, event.Storage}
		for _, source := range []event.Source{
			engine("e1"), {Cluster: "c", Model: "m", Instance: "s0", Origin: event.Store}, {Cluster: "c", Model: "m", Instance: "s1", Origin: event.Store},
		} {
			pub := newPublisher(source, false)
			events := []event.Event{groups[0].stored(event.GPU, 0, 8), groups[1].stored(event.GPU, 0, 8), cleared(event.ByEngine)}
			for _, c := range groups {
				for i := range c.len() {
					if tier := rapid.SampledFrom(tiers).Draw(t, "tier"); tier != "" {
						events = append(events, c.stored(tier, i, i+1))
					}
				}
			}
			p.apply(t, pub.message(t, events))
			st := pub.status(event.StateLive, "")
			p.each(func(x *prefix.Index) { x.Tell(st) })
		}
		source := engine("e1")
		source.Origin = event.Connector
		st := newPublisher(source, false).status(event.StateLive, "")
		st.Epoch, st.Stores = 0, []string{"s0", "s1"}
		p.each(func(x *prefix.Index) { x.Tell(st) })
		r := &prefix.Request{Model: "m", Tokens: base.tokens}
		want := lookup(t, p.whole, r)
		got, err := g.Lookup(context.Background(), r)
		if err != nil {
			t.Fatal(err)
		}
		if !reflect.DeepEqual(want, got) {
			t.Fatalf("%s", cmp.Diff(want, got))
		}
		if want.Matches[0].Reach == nil {
			t.Fatal("the engine does not reach into its stores")
		}
	})
}
