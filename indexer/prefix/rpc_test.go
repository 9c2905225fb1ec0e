package prefix_test

import (
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"sync/atomic"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"

	"kvstrata/event"
	"kvstrata/indexer/prefix"
	pb "kvstrata/indexer/prefix/prefixpb"

	"github.com/google/go-cmp/cmp"
)

// serveRPC serves an index on loopback.
func serveRPC(t *testing.T, x *prefix.Index, caughtUp func() bool) *grpc.ClientConn {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := grpc.NewServer(grpc.MaxRecvMsgSize(16 << 20))
	x.RegisterRPC(s, caughtUp)
	done := make(chan error, 1)
	go func() { done <- s.Serve(l) }()
	conn, err := grpc.NewClient(l.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		conn.Close()
		s.Stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return conn
}

func hashesPB(hashes []event.PrefixHash) (out []uint64) {
	for _, h := range hashes {
		out = append(out, uint64(h))
	}
	return out
}

// What gRPC answers is what the index does.
func TestRPCAnswers(t *testing.T) {
	x := fleet(t)
	client, ctx, p := pb.NewPrefixIndexClient(serveRPC(t, x, func() bool { return true })), t.Context(), prompt(1, 4)
	want := lookup(t, x, &prefix.Request{Model: "m", Tokens: p.tokens})
	got, err := client.Lookup(ctx, &pb.LookupRequest{Model: "m", TokenIds: p.tokens})
	if err != nil {
		t.Fatal(err)
	}
	if len(got.Matches) != len(want.Matches) || len(got.LeftOut) != len(want.LeftOut) {
		t.Fatalf("%v, want %+v", got, want)
	}
	for i, m := range got.Matches {
		w := want.Matches[i]
		if m.Source.Id != w.Source.Tokens() || int(m.MatchedBlocks) != w.Blocks || int(m.DeviceTokens) != w.DeviceTokens || m.State.String() != "STATE_"+strings.ToUpper(w.State.String()) ||
			m.Source.Origin.String() != "ORIGIN_"+strings.ToUpper(w.Source.Origin.String()) || len(m.Tiers) != len(w.Tiers) {
			t.Errorf("match %d: %v, want %+v", i, m, w)
		}
	}
	batch, err := client.BatchLookup(ctx, &pb.BatchLookupRequest{Requests: []*pb.LookupRequest{
		{Model: "m", PrefixHashes: hashesPB(p.hashes())}, {Model: "gpt", TokenIds: []uint32{1}}, {},
	}})
	if err != nil {
		t.Fatal(err)
	}
	if a := batch.Results[0].GetAnswer(); a == nil || a.Matches[0].MatchedBlocks != uint64(want.Matches[0].Blocks) {
		t.Errorf("%v", batch.Results[0])
	}
	for i, code := range []codes.Code{1: codes.NotFound, 2: codes.InvalidArgument} {
		if e := batch.Results[i].GetError(); code != codes.OK && (e == nil || codes.Code(e.Code) != code) {
			t.Errorf("result %d: %v", i, batch.Results[i])
		}
	}
	why, err := client.Explain(ctx, &pb.ExplainRequest{Prompt: &pb.LookupRequest{Model: "m", TokenIds: p.tokens}, Device: true})
	if err != nil || len(why.Endings) != len(want.Matches)+len(want.LeftOut) {
		t.Errorf("%v %v", why, err)
	}
	infos, err := client.Sources(ctx, &pb.SourcesRequest{})
	if err != nil || len(infos.Sources) != len(x.Sources()) {
		t.Errorf("%v %v", infos, err)
	}
}

// Bad requests get the same sentence over both.
func TestRPCAndHTTPRefuseAlike(t *testing.T) {
	x := fleet(t)
	client, ctx := pb.NewPrefixIndexClient(serveRPC(t, x, func() bool { return true })), t.Context()
	many := make([]uint32, 1<<20+1)
	id := engine("e1").Tokens()
	for _, c := range []struct {
		name               string
		method, path, body string
		status             int
		call               func() error
		code               codes.Code
	}{
		{"no model", "POST", "/v1/lookup", `{}`, 400, func() error { _, err := client.Lookup(ctx, &pb.LookupRequest{}); return err }, codes.InvalidArgument},
		{"unknown model", "POST", "/v1/lookup/explain", `{"model": "gpt", "token_ids": [1]}`, 404, func() error {
			_, err := client.Explain(ctx, &pb.ExplainRequest{Prompt: &pb.LookupRequest{Model: "gpt", TokenIds: []uint32{1}}})
			return err
		}, codes.NotFound},
		{"tier and device", "POST", "/v1/lookup/explain", `{"model": "m", "tier": "GPU", "device": true}`, 400, func() error {
			_, err := client.Explain(ctx, &pb.ExplainRequest{Prompt: &pb.LookupRequest{Model: "m"}, Tier: "GPU", Device: true})
			return err
		}, codes.InvalidArgument},
		{"too many tokens", "POST", "/v1/lookup", `{"model": "m", "token_ids": ` + encoded(t, many) + `}`, 400, func() error {
			_, err := client.Lookup(ctx, &pb.LookupRequest{Model: "m", TokenIds: many})
			return err
		}, codes.InvalidArgument},
		{"empty batch", "POST", "/v1/lookup/batch", `{"requests": []}`, 400, func() error {
			_, err := client.BatchLookup(ctx, &pb.BatchLookupRequest{})
			return err
		}, codes.InvalidArgument},
		{"large batch", "POST", "/v1/lookup/batch", `{"requests": [` + strings.Repeat("{},", 256) + `{}]}`, 400, func() error {
			_, err := client.BatchLookup(ctx, &pb.BatchLookupRequest{Requests: make([]*pb.LookupRequest, 257)})
			return err
		}, codes.InvalidArgument},
		{"no source", "GET", "/v1/resident?limit=10&source=x", "", 400, func() error {
			_, err := client.Resident(ctx, &pb.ResidentRequest{Source: "x", Limit: 10})
			return err
		}, codes.InvalidArgument},
		{"unknown source", "GET", "/v1/resident?limit=10&source=c.m.nobody.0.engine", "", 404, func() error {
			_, err := client.Resident(ctx, &pb.ResidentRequest{Source: "c.m.nobody.0.engine"})
			return err
		}, codes.NotFound},
		{"large page", "GET", "/v1/resident?limit=10001&source=" + id, "", 400, func() error {
			_, err := client.Resident(ctx, &pb.ResidentRequest{Source: id, Limit: 10001})
			return err
		}, codes.InvalidArgument},
		{"no cursor", "GET", "/v1/resident?after=abc&source=" + id, "", 400, func() error {
			_, err := client.Resident(ctx, &pb.ResidentRequest{Source: id, After: "abc"})
			return err
		}, codes.InvalidArgument},
		{"another's cursor", "GET", "/v1/resident?after=AAAAAAAAAAEB&source=" + id, "", 409, func() error {
			_, err := client.Resident(ctx, &pb.ResidentRequest{Source: id, After: "AAAAAAAAAAEB"})
			return err
		}, codes.Aborted},
		{"nobody to watch", "GET", "/v1/changes", "", 400, func() error { return firstOf(client.Subscribe(ctx, &pb.SubscribeRequest{})) }, codes.InvalidArgument},
		{"both to watch", "GET", "/v1/changes?model=m&source=" + id, "", 400, func() error {
			return firstOf(client.Subscribe(ctx, &pb.SubscribeRequest{Source: id, Of: &pb.LookupRequest{Model: "m"}}))
		}, codes.InvalidArgument},
		{"unknown to watch", "GET", "/v1/changes?source=c.m.nobody.0.engine", "", 404, func() error {
			return firstOf(client.Subscribe(ctx, &pb.SubscribeRequest{Source: "c.m.nobody.0.engine"}))
		}, codes.NotFound},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := ask(x, c.method, c.path, c.body)
			var said struct{ Error string }
			if err := json.Unmarshal(w.Body.Bytes(), &said); err != nil || w.Code != c.status {
				t.Errorf("HTTP: %d %s", w.Code, w.Body)
			}
			err := c.call()
			if status.Code(err) != c.code {
				t.Errorf("gRPC: %v", err)
			}
			if got := status.Convert(err).Message(); got != said.Error && c.name != "large page" {
				t.Errorf("HTTP says %q, gRPC %q", said.Error, got)
			}
		})
	}
}

func firstOf(stream grpc.ServerStreamingClient[pb.Changes], err error) error {
	if err != nil {
		return err
	}
	_, err = stream.Recv()
	return err
}

func TestRPCHealth(t *testing.T) {
	x, _ := newIndex()
	var caughtUp atomic.Bool
	client := healthpb.NewHealthClient(serveRPC(t, x, caughtUp.Load))
	watch, err := client.Watch(t.Context(), &healthpb.HealthCheckRequest{})
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []healthpb.HealthCheckResponse_ServingStatus{healthpb.HealthCheckResponse_NOT_SERVING, healthpb.HealthCheckResponse_SERVING} {
		got, err := watch.Recv()
		if err != nil || got.Status != want {
			t.Fatalf("%v %v, want %v", got, err, want)
		}
		now, err := client.Check(t.Context(), &healthpb.HealthCheckRequest{Service: "kvstrata.index.v1.PrefixIndex"})
		if err != nil || now.Status != want {
			t.Errorf("%v %v, want %v", now, err, want)
		}
		caughtUp.Store(true)
	}
	if _, err := client.Check(t.Context(), &healthpb.HealthCheckRequest{Service: "other"}); status.Code(err) != codes.NotFound {
		t.Errorf("another service: %v", err)
	}
}

// A listing by pages has each block that stays exactly once, whatever comes and goes meanwhile, and ends where it can't go on.
func TestPages(t *testing.T) {
	x, now := newIndex()
	pub := newPublisher(engine("e"), false)
	p, visitors := prompt(1, 300), prompt(50_000, 300)
	pub.tell(t, x, p.stored(event.GPU, 0, 300), p.offloaded(event.CPU, 0, 50))
	seen := make(map[string]int)
	id, after, pages := pub.source.Tokens(), "", 0
	for n := 0; ; n++ {
		w := ask(x, "GET", fmt.Sprintf("/v1/resident?limit=7&source=%s&after=%s", url.QueryEscape(id), after), "")
		var page prefix.Page
		if err := json.Unmarshal(w.Body.Bytes(), &page); err != nil || w.Code != http.StatusOK {
			t.Fatalf("%d %s", w.Code, w.Body)
		}
		for _, b := range page.Blocks {
			seen[b.Hash.String()+string(b.Tier)]++
		}
		if pages++; page.Next == "" {
			break
		}
		after = page.Next
		if n%2 == 0 {
			pub.tell(t, x, visitors.stored(event.GPU, 0, 1+n))
		} else {
			pub.tell(t, x, visitors.evicted(event.GPU, 0, n))
		}
	}
	for i := range 300 {
		for tier, want := range map[event.Tier]int{event.GPU: 1, event.CPU: map[bool]int{true: 1}[i < 50]} {
			if got := seen[p.hash(i).String()+string(tier)]; got != want {
				t.Errorf("block %d came %d times in %s", i, got, tier)
			}
		}
	}
	if pages < 300/7/2 { // the last stripe of a page may have more than was asked for
		t.Errorf("%d pages", pages)
	}
	now.now = now.now.Add(1)
	restore(t, x, pub.checkpoint(t))
	if w := ask(x, "GET", "/v1/resident?source="+url.QueryEscape(id)+"&after="+after, ""); w.Code != http.StatusConflict {
		t.Errorf("behind a checkpoint: %d %s", w.Code, w.Body)
	}
}

// The same changes come over gRPC and over HTTP, and a mirror of them is the index.
func TestRPCAndHTTPStreamAlike(t *testing.T) {
	x, _ := newIndex()
	pub := newPublisher(engine("e"), false)
	p := prompt(1, 6)
	pub.tell(t, x, p.stored(event.GPU, 0, 3))
	x.Tell(pub.status(event.StateLive, ""))
	site := httptest.NewServer(x.Handler())
	defer site.Close()
	resp, err := http.Get(site.URL + "/v1/changes?model=m")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	stream, err := pb.NewPrefixIndexClient(serveRPC(t, x, func() bool { return true })).Subscribe(t.Context(), &pb.SubscribeRequest{Of: &pb.LookupRequest{Model: "m"}})
	if err != nil {
		t.Fatal(err)
	}
	lines := json.NewDecoder(resp.Body)
	var byHTTP, byRPC []string
	read := func(last string) {
		for len(byHTTP) == 0 || !strings.HasPrefix(byHTTP[len(byHTTP)-1], last) {
			var l prefix.ChangeLine
			if err := lines.Decode(&l); err != nil {
				t.Fatal(err)
			}
			text := fmt.Sprint(l.Kind, " ", l.Source, " ", l.Epoch, " ", l.Seq, " ", l.State, l.Reason)
			if l.Hash != nil {
				text += fmt.Sprint(" ", l.Hash, " ", l.Prefix, " ", *l.Tier, " ", *l.Group, " ", l.BlockSize)
			}
			byHTTP = append(byHTTP, text)
		}
		for len(byRPC) < len(byHTTP) {
			m, err := stream.Recv()
			if err != nil {
				t.Fatal(err)
			}
			for _, c := range m.Changes {
				state := strings.ToLower(strings.TrimPrefix(c.State.String(), "STATE_"))
				if c.State == 0 {
					state = ""
				}
				text := fmt.Sprint(strings.ToLower(strings.TrimPrefix(c.Kind.String(), "CHANGE_")), " ", c.Source, " ", c.Epoch, " ", c.Seq, " ", state, c.Reason)
				if b := c.Block; b != nil {
					text += fmt.Sprint(" ", event.BytesHash(string(b.EngineHash)), " ", event.PrefixHash(b.Prefix), " ", b.Tier, " ", b.Group, " ", b.BlockSize)
				}
				byRPC = append(byRPC, text)
			}
		}
	}
	read("listed")
	pub.tell(t, x, p.evicted(event.GPU, 2, 3), p.stored(event.GPU, 2, 6))
	pub.tell(t, x, cleared(event.ByEngine))
	x.Tell(pub.status(event.StatePartial, "lost 1"))
	read("state")
	if diff := cmp.Diff(byHTTP, byRPC); diff != "" {
		t.Errorf("HTTP and gRPC differ:\n%s", diff)
	}
	kinds := make(map[string]int)
	for _, l := range byRPC {
		kind, _, _ := strings.Cut(l, " ")
		kinds[kind]++
	}
	if diff := cmp.Diff(map[string]int{"begin": 1, "held": 3, "listed": 1, "fell": 1, "rose": 4, "cleared": 1, "state": 1}, kinds); diff != "" {
		t.Error(diff)
	}
}
