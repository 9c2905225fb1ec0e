package interop_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"kvstrata/event"
	"kvstrata/indexer/prefix/kvindexer"
	"kvstrata/porttest"
	"kvstrata/publisher"
	"kvstrata/subscriber"
)

// added is the subscriber as the KV indexer's API sees it, as the command wires it.
type added struct{ sub *subscriber.Subscriber }

func (a added) Follow(e kvindexer.Engine) error {
	err := a.sub.Add(subscriber.EngineConfig{Source: e.Source, Endpoint: e.Endpoint, Replay: e.Replay})
	if errors.Is(err, subscriber.ErrFollowed) {
		return kvindexer.ErrFollowed
	}
	return err
}

func (a added) Unfollow(ctx context.Context, s event.Source) error { return a.sub.Remove(ctx, s) }

func (a added) Heard(s event.Source) *event.Status {
	st, _ := a.sub.Followed(s)
	return st
}

// pair is Dynamo's standalone indexer and ours, side by side: each is told the same, and asked the same.
type pair struct {
	t            *testing.T
	rig          *rig
	ours, theirs string // URLs
	markers      int
	engines      map[string]*publisher.ZMQ // by instance/rank
	stop         map[string]func()
}

func newPair(t *testing.T, dynamo ...string) *pair {
	dynamoRelease.need(t)
	r := newRig(t)
	open := func(source event.Source, fence event.Fence) subscriber.Stream {
		return publisher.NewStream(publisher.DefaultStreamConfig(), r.bus, source, fence, r.log)
	}
	cfg := quiet()
	cfg.AllowInvertible = true // blocks of four tokens
	sub, err := subscriber.New(cfg, nil, r.bus, open, r.log, r.reg)
	if err != nil {
		t.Fatal(err)
	}
	r.background(sub.Run)
	server := httptest.NewServer(kvindexer.New(kvindexer.Config{}, r.sink.index, added{sub}, slog.New(slog.DiscardHandler)).Handler())
	t.Cleanup(server.Close)
	return &pair{t: t, rig: r, ours: server.URL, theirs: startDynamo(t, dynamo...), engines: make(map[string]*publisher.ZMQ), stop: make(map[string]func())}
}

// startDynamo starts Dynamo's own indexer, and returns where it is.
func startDynamo(t *testing.T, args ...string) string {
	t.Helper()
	port := strconv.Itoa(porttest.Port(t))
	cmd := exec.Command(dynamoRelease.interpreter(), append([]string{"dynamo_indexer.py", "--port", port}, args...)...)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill() // it may have ended by itself
		_ = cmd.Wait()         // tells that it was killed
	})
	url := "http://127.0.0.1:" + port
	eventually(t, "Dynamo's indexer", func() error {
		resp, err := http.Get(url + "/health")
		if err == nil {
			resp.Body.Close()
		}
		return err
	})
	return url
}

// ask sends one of them a request.
func (p *pair) ask(url, method, path string, body any) (status int, answer any) {
	p.t.Helper()
	text, err := json.Marshal(body)
	if err != nil {
		p.t.Fatal(err)
	}
	req, err := http.NewRequestWithContext(p.t.Context(), method, url+path, bytes.NewReader(text))
	if err != nil {
		p.t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		p.t.Fatal(err)
	}
	defer resp.Body.Close()
	said, err := io.ReadAll(resp.Body)
	if err != nil {
		p.t.Fatal(err)
	}
	if err := json.Unmarshal(said, &answer); err != nil {
		p.t.Fatalf("%s %s: %s %q", method, path, resp.Status, said)
	}
	return resp.StatusCode, answer
}

// both asks both, and returns their answers.
func (p *pair) both(method, path string, body any) (ours, theirs any) {
	p.t.Helper()
	a, ours := p.ask(p.ours, method, path, body)
	b, theirs := p.ask(p.theirs, method, path, body)
	if a != b {
		p.t.Errorf("%s %s %v: status %d, Dynamo's %d", method, path, body, a, b)
	}
	return ours, theirs
}

// register starts an engine's publisher and has both follow it.
func (p *pair) register(instance, rank int) {
	p.t.Helper()
	cfg := publisher.DefaultZMQConfig()
	cfg.Endpoint, cfg.Replay = "tcp://127.0.0.1:0", "tcp://127.0.0.1:0"
	p.start(fmt.Sprint(instance, "/", rank), cfg)
	p.both("POST", "/register", p.registration(instance, rank))
}

// start begins a life of an engine's publisher, and ends the one before.
func (p *pair) start(key string, cfg publisher.ZMQConfig) {
	p.t.Helper()
	if stop := p.stop[key]; stop != nil {
		stop()
	}
	z, err := publisher.NewZMQ(cfg, p.rig.log)
	if err != nil {
		p.t.Fatal(err)
	}
	p.stop[key] = p.rig.background(z.Run)
	<-z.Ready()
	p.engines[key] = z
}

func (p *pair) registration(instance, rank int) map[string]any {
	z := p.engines[fmt.Sprint(instance, "/", rank)]
	return map[string]any{
		"instance_id": instance, "dp_rank": rank, "model_name": model, "block_size": 4, "endpoint": z.Endpoint(), "replay_endpoint": z.ReplayEndpoint(),
	}
}

// tell publishes one batch of an engine.
func (p *pair) tell(instance, rank int, events ...event.Event) {
	p.t.Helper()
	if err := p.engines[fmt.Sprint(instance, "/", rank)].Publish(&event.Batch{Rank: int32(rank), Events: events}); err != nil {
		p.t.Fatal(err)
	}
}

// settle waits until both have everything of an engine: they answer for a block that was told last.
func (p *pair) settle(instance, rank int) {
	p.t.Helper()
	inst, key := fmt.Sprint(instance), fmt.Sprint(rank)
	eventually(p.t, "both have heard "+inst, func() error {
		p.markers++
		tokens := []uint32{9000, uint32(p.markers), uint32(instance), uint32(rank)}
		p.tell(instance, rank, stored(run{tokens: tokens, size: 4}, event.IntHash(uint64(1<<40+p.markers))))
		for _, url := range []string{p.ours, p.theirs} {
			var found map[string]any
			for range 50 {
				_, answer := p.ask(url, "POST", "/query", map[string]any{"model_name": model, "token_ids": tokens})
				all, _ := answer.(map[string]any)["scores"].(map[string]any)
				if found, _ = all[inst].(map[string]any); found[key] != nil {
					break
				}
				<-time.After(2 * time.Millisecond)
			}
			if found[key] == nil {
				return fmt.Errorf("%s does not know marker %d: %v", url, p.markers, found)
			}
		}
		return nil
	})
}

// same asks both the same, and compares.
func (p *pair) same(path string, body map[string]any) {
	p.t.Helper()
	body["model_name"] = model
	ours, theirs := p.both("POST", path, body)
	if diff := cmp.Diff(theirs, ours); diff != "" {
		p.t.Errorf("%s %v (-Dynamo +ours):\n%s", path, body, diff)
	}
}

// scores returns an answer's scores, by instance and rank.
func (p *pair) scores(answer any) map[[2]string]float64 {
	all := make(map[[2]string]float64)
	found, _ := answer.(map[string]any)["scores"].(map[string]any)
	for instance, ranks := range found {
		for rank, n := range ranks.(map[string]any) {
			all[[2]string{instance, rank}] = n.(float64)
		}
	}
	return all
}

// longest returns what an instance has of a prompt, by ours and by Dynamo's.
func (p *pair) longest(instance int, body map[string]any) (ours, theirs float64) {
	p.t.Helper()
	body["model_name"] = model
	a, b := p.both("POST", "/query", body)
	read := func(answer any) float64 {
		of, _ := answer.(map[string]any)["instances"].(map[string]any)[fmt.Sprint(instance)].(map[string]any)
		n, _ := of["longest_matched"].(float64)
		return n
	}
	return read(a), read(b)
}

// story is what the engines of a pair hold: prefixes of a few prompts, on the device.
type story struct {
	prompts [][]uint32
	loras   []string
	held    map[[3]int]int // instance, rank, prompt: blocks

	ownNames bool // each engine has names of its own for blocks
}

// hash is what an engine calls a block: engines of one seed call blocks of the same content the same, others do not.
func (s *story) hash(instance, rank, prompt, block int) event.BlockHash {
	if block < common {
		prompt -= prompt % 2
	}
	n := prompt*1000 + block + 1
	if s.ownNames {
		n += instance*1_000_000 + rank*100_000
	}
	return event.IntHash(uint64(n))
}

// common is how many first blocks the prompts of a pair have in common.
const common = 5

// truth returns what the engines hold of a prompt's first blocks, in tokens.
func (s *story) truth(prompt, tokens int) map[[2]string]float64 {
	all := make(map[[2]string]float64)
	for key, blocks := range s.held {
		n := 0
		if s.loras[key[2]] == s.loras[prompt] {
			for n < blocks && 4*(n+1) <= tokens && cmp.Equal(s.prompts[key[2]][4*n:4*n+4], s.prompts[prompt][4*n:4*n+4]) {
				n++
			}
		}
		who := [2]string{fmt.Sprint(key[0]), fmt.Sprint(key[1])}
		if n > 0 {
			all[who] = max(all[who], float64(4*n))
		}
	}
	return all
}

// step makes one event of an engine: a prefix grows, shrinks from its end, or all is cleared.
func (s *story) step(r *rand.Rand, instance, rank int) event.Event {
	i := 2*r.IntN(len(s.prompts)/2) + (instance+rank)%2
	key := [3]int{instance, rank, i}
	have, most := s.held[key], len(s.prompts[i])/4
	switch op := r.IntN(20); {
	case op == 0:
		for i := range s.prompts {
			delete(s.held, [3]int{instance, rank, i})
		}
		return cleared()
	case op < 7 && have > 0 || have == most:
		n := 1 + r.IntN(have)
		var gone []event.BlockHash
		for b := have - 1; b >= have-n; b-- {
			gone = append(gone, s.hash(instance, rank, i, b))
		}
		s.held[key] = have - n
		return evicted(event.GPU, gone...)
	default:
		n := 1 + r.IntN(most-have)
		grown := run{tokens: s.prompts[i][4*have : 4*(have+n)], size: 4, lora: s.loras[i]}
		if have > 0 {
			parent := s.hash(instance, rank, i, have-1)
			grown.parent = &parent
		}
		var names []event.BlockHash
		for b := have; b < have+n; b++ {
			names = append(names, s.hash(instance, rank, i, b))
		}
		s.held[key] = have + n
		return stored(grown, names...)
	}
}

// The same events told to Dynamo's own standalone indexer and to ours get the same questions the same answers, field by field, where
// all engines call a block the same. Where each has names of its own, as vLLM's do unless they share a seed, ours are what the
// engines hold, and Dynamo's are not.
func TestIndexersAgree(t *testing.T) {
	for _, test := range []struct {
		name     string
		args     []string
		ownNames bool
	}{{"one seed", nil, false}, {"one seed, one thread", []string{"--threads", "1"}, false}, {"seeds of their own", nil, true}} {
		t.Run(test.name, func(t *testing.T) { indexersAgree(t, test.ownNames, test.args...) })
	}
}

func indexersAgree(t *testing.T, ownNames bool, dynamo ...string) {
	p := newPair(t, dynamo...)
	r := rand.New(rand.NewPCG(7, 11))
	// Two prompts of a pair have their first blocks in common; the second pair has the first one's tokens, for an adapter. An
	// engine has one prompt of a pair, since it calls blocks of the same content the same.
	s := &story{ownNames: ownNames, held: make(map[[3]int]int), loras: []string{"", "", "other-lora", "other-lora", "my-lora", "my-lora"}}
	for i := range s.loras {
		prompt := tokensFrom(uint32(1+i/4), 64)
		for at := 4 * common; at < len(prompt); at++ {
			prompt[at] += uint32(i % 2)
		}
		s.prompts = append(s.prompts, prompt)
	}
	engines := [][2]int{{1, 0}, {1, 1}, {2, 0}, {77, 0}}
	for _, e := range engines {
		p.register(e[0], e[1])
	}
	asked, differ := 0, 0
	for round := range 12 {
		for range 25 {
			e := engines[r.IntN(len(engines))]
			var batch []event.Event
			for range 1 + r.IntN(3) {
				batch = append(batch, s.step(r, e[0], e[1]))
			}
			p.tell(e[0], e[1], batch...)
		}
		for _, e := range engines {
			p.settle(e[0], e[1])
		}
		for i, prompt := range s.prompts {
			for _, n := range []int{0, 3, 4, 21, len(prompt)} {
				ours, theirs := p.both("POST", "/query", map[string]any{"model_name": model, "token_ids": prompt[:n], "lora_name": s.loras[i]})
				want := s.truth(i, n)
				if diff := cmp.Diff(want, p.scores(ours)); diff != "" {
					t.Errorf("%d tokens of prompt %d (-held +ours):\n%s", n, i, diff)
				}
				asked++
				if !cmp.Equal(ours, theirs) {
					differ++
					if !ownNames {
						t.Errorf("%d tokens of prompt %d (-Dynamo +ours):\n%s", n, i, cmp.Diff(theirs, ours))
					}
				}
			}
			var hashes []int64
			for at := 0; at < len(prompt); at += 4 {
				hashes = append(hashes, int64(event.LocalHash(prompt[at:at+4], event.NewHasher("").Seed(s.loras[i], ""))))
			}
			if !ownNames {
				p.same("/query_by_hash", map[string]any{"block_hashes": hashes})
			}
			p.same("/query", map[string]any{"token_ids": prompt, "lora_name": "nobody's"})
		}
		if t.Failed() {
			t.Fatalf("in round %d", round)
		}
	}
	t.Logf("%d of %d answers of Dynamo's differ from what the engines hold", differ, asked)
	if ownNames != (differ > 0) {
		t.Errorf("Dynamo differs in %d answers", differ)
	}
	// Who leaves is not answered for; who comes back tells what he has.
	p.both("POST", "/unregister", map[string]any{"instance_id": 1, "model_name": model})
	eventually(t, "the index has forgotten instance 1", func() error {
		if ours, theirs := p.longest(1, map[string]any{"token_ids": s.prompts[0]}); ours+theirs != 0 {
			return fmt.Errorf("%v and Dynamo %v tokens", ours, theirs)
		}
		return nil
	})
	p.both("POST", "/register", p.registration(1, 0))
	p.settle(1, 0)
	ours, _ := p.longest(1, map[string]any{"token_ids": s.prompts[0]})
	if want := float64(4 * s.held[[3]int{1, 0, 0}]); ours < want {
		t.Errorf("%v tokens after a return, want at least %v", ours, want)
	}
}

// Where Dynamo's answers are not what the engine holds, ours are. Should Dynamo mend one, this test says so.
func TestIndexersDiffer(t *testing.T) {
	p := newPair(t)
	tokens := tokensFrom(77, 32)
	names := func(from, to int) (all []event.BlockHash) {
		for n := from; n < to; n++ {
			all = append(all, event.IntHash(uint64(100+n)))
		}
		return all
	}
	query := map[string]any{"token_ids": tokens}
	check := func(what string, ours, theirs float64) {
		t.Helper()
		a, b := p.longest(1, query)
		t.Logf("%s: ours %v tokens, Dynamo's %v", what, a, b)
		if a != ours || b != theirs {
			t.Errorf("%s: ours %v tokens, want %v; Dynamo's %v, was %v", what, a, ours, b, theirs)
		}
	}
	p.register(1, 0)
	p.tell(1, 0, stored(run{tokens: tokens, size: 4}, names(0, 8)...))
	p.settle(1, 0)
	check("eight blocks", 32, 32)

	// A block goes out of the middle, and comes back.
	p.tell(1, 0, evicted(event.GPU, names(3, 4)...))
	p.settle(1, 0)
	check("without the fourth", 12, 12)
	parent := names(2, 3)[0]
	p.tell(1, 0, stored(run{tokens: tokens[12:16], size: 4, parent: &parent}, names(3, 4)...))
	p.settle(1, 0)
	check("the fourth is back", 32, 16)

	// The engine begins anew under the same addresses, and with nothing.
	z := p.engines["1/0"]
	cfg := publisher.DefaultZMQConfig()
	cfg.Endpoint, cfg.Replay = z.Endpoint(), z.ReplayEndpoint()
	p.start("1/0", cfg)
	p.settle(1, 0)
	if a, b := p.longest(1, query); a != 0 || b == 0 {
		t.Errorf("a restarted, empty engine: ours %v tokens, Dynamo's %v", a, b)
	} else {
		t.Logf("a restarted, empty engine: ours %v tokens, Dynamo's %v", a, b)
	}
}

// Dynamo asks its peers for their trees when it starts. Ours says that it has none to give, and Dynamo goes on.
func TestDynamoRecoversFromElsewhere(t *testing.T) {
	p := newPair(t)
	p.register(1, 0)
	p.settle(1, 0)
	_, dump := p.ask(p.ours, "GET", "/dump", nil)
	if of, _ := dump.(map[string]any)[model+":default"].(map[string]any); !strings.Contains(fmt.Sprint(of["error"]), "/v1/resident") {
		t.Errorf("dump: %v", dump)
	}
	url := startDynamo(t, "--peers", p.ours)
	if status, answer := p.ask(url, "GET", "/dump", nil); status != 200 || len(answer.(map[string]any)) != 0 {
		t.Errorf("%d %v", status, answer)
	}
}
