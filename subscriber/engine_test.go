package subscriber_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"kvstrata/bus"
	"kvstrata/event"
	"kvstrata/indexer/prefix"
	"kvstrata/publisher"
	"kvstrata/subscriber"
)

func TestEventsReachTheIndex(t *testing.T) {
	r, e := newRoad(t), startEngine(t)
	e.publish(storing(1, 4)) // before anybody listens: the replay tells
	r.subscribe(e.config("a"))
	r.await("a", 0, event.StateLive)
	e.publish(storing(5, 6), evicting(6))
	s := r.await("a", 2, event.StateLive)
	if got := r.matched("a"); got != 5 {
		t.Errorf("%d blocks matched, want 5", got)
	}
	if s.Ledger.Recovered+s.Ledger.Live+s.Ledger.Held+s.Ledger.Asked != 3 || s.Ledger.Lost != 0 {
		t.Errorf("ledger %+v", s.Ledger)
	}
}

func TestAGapIsClosedByReplayInOrder(t *testing.T) {
	for _, withTopic := range []bool{true, false} {
		r, e := newRoad(t), startEngine(t)
		e.withTopic = withTopic
		r.subscribe(e.config("a"))
		e.publish(storing(1, 2))
		r.await("a", 0, event.StateLive)
		e.drop(storing(3, 3), evicting(3))
		e.publish(storing(3, 3), storing(4, 4))
		s := r.await("a", 4, event.StateLive)
		if got := r.matched("a"); got != 4 {
			t.Errorf("%d blocks matched, want 4: stored, evicted and stored again must not change places", got)
		}
		if s.Ledger.Recovered < 2 || s.Ledger.Lost != 0 {
			t.Errorf("ledger %+v", s.Ledger)
		}
	}
}

func TestASilentEnginesLostTailIsAskedFor(t *testing.T) {
	r, e := newRoad(t), startEngine(t)
	r.subscribe(e.config("a"))
	e.publish(storing(1, 1))
	r.await("a", 0, event.StateLive)
	e.drop(storing(2, 3))
	if s := r.await("a", 1, event.StateLive); s.Ledger.Asked != 1 {
		t.Errorf("ledger %+v", s.Ledger)
	}
	if got := r.matched("a"); got != 3 {
		t.Errorf("%d blocks matched, want 3", got)
	}
}

func TestWhatNoReplayHasIsLostAndSaid(t *testing.T) {
	r, e := newRoad(t), startEngine(t)
	r.subscribe(e.config("a"))
	e.publish(storing(1, 4))
	r.await("a", 0, event.StateLive)
	e.drop(evicting(4), evicting(3))
	e.forget(3)
	e.publish(storing(5, 5))
	s := r.await("a", 3, event.StatePartial)
	want := []event.Hole{{First: 1, Last: 2, Reason: "the replay does not reach back so far"}}
	if diff := cmp.Diff(want, s.Ledger.Holes); diff != "" {
		t.Error(diff)
	}
	if got := r.matched("a"); got != 0 {
		t.Errorf("%d blocks matched: after a loss nothing earlier may be claimed", got)
	}
	e.publish(clearing(), storing(1, 2))
	r.await("a", 5, event.StateLive)
	if got := r.matched("a"); got != 2 {
		t.Errorf("%d blocks matched, want 2", got)
	}
}

func TestAnEngineWithoutReplayLosesAtOnce(t *testing.T) {
	r, e := newRoad(t), startEngine(t)
	cfg := e.config("a")
	cfg.Replay = ""
	r.subscribe(cfg)
	eventually(t, "the first batch", func() bool {
		e.publish(storing(1, 1))
		return r.info("a").Started
	})
	first := r.info("a").LastSeq
	e.drop(storing(2, 2))
	e.publish(storing(3, 3))
	eventually(t, "partial", func() bool { return r.info("a").State == event.StatePartial })
	eventually(t, "the loss", func() bool { return r.info("a").Ledger.Lost == 1 })
	if r.info("a").LastSeq <= first {
		t.Error("nothing was applied")
	}
}

func TestARestartedEngineBeginsANewEpoch(t *testing.T) {
	r, e := newRoad(t), startEngine(t)
	r.subscribe(e.config("a"))
	e.publish(storing(1, 4), storing(5, 8))
	before := r.await("a", 1, event.StateLive)
	e.restart()
	e.publish(storing(1, 2))
	eventually(t, "another epoch", func() bool { return r.info("a").Epoch > before.Epoch })
	r.await("a", 0, event.StateLive)
	if got := r.matched("a"); got != 2 {
		t.Errorf("%d blocks matched, want 2: the old life's blocks are gone", got)
	}
}

// What became of the life before is told for as long as others have not taken its place, whoever is told by.
func TestALifeThatEndedIsRemembered(t *testing.T) {
	r, e := newRoad(t), startEngine(t)
	stop := r.subscribe(e.config("a"))
	e.publish(storing(1, 2), storing(3, 4))
	before := r.await("a", 1, event.StateLive)
	e.restart()
	e.publish(storing(1, 1))
	eventually(t, "another epoch", func() bool { return r.info("a").Epoch > before.Epoch })
	check := func(s prefix.SourceInfo) {
		t.Helper()
		if len(s.Past) != 1 || s.Past[0].Epoch != before.Epoch || s.Past[0].Ledger.Last != 1 || !s.Past[0].TailUnknown {
			t.Errorf("past lives %+v, want that of epoch %d", s.Past, before.Epoch)
		}
	}
	check(r.await("a", 0, event.StateLive))
	stop()
	r.subscribe(e.config("a"))
	e.publish(storing(2, 2))
	check(r.await("a", 1, event.StateLive))
}

func TestARestartPastOurSequenceIsNoticed(t *testing.T) {
	r, e := newRoad(t), startEngine(t)
	r.subscribe(e.config("a"))
	e.publish(storing(1, 4))
	before := r.await("a", 0, event.StateLive)
	e.restart()
	e.drop(storing(1, 1), storing(2, 2), storing(3, 3)) // the new life is past sequence 0 before we hear of it
	e.publish(storing(4, 4))
	eventually(t, "another epoch", func() bool { return r.info("a").Epoch > before.Epoch })
	s := r.await("a", 3, event.StateLive)
	if got := r.matched("a"); got != 4 || s.Ledger.Lost != 0 {
		t.Errorf("%d blocks matched, ledger %+v", got, s.Ledger)
	}
}

func TestOurOwnRestartChangesNothing(t *testing.T) {
	r, e := newRoad(t), startEngine(t)
	stop := r.subscribe(e.config("a"))
	e.publish(storing(1, 2), storing(3, 4))
	before := r.await("a", 1, event.StateLive)
	stop()
	eventually(t, "the farewell", func() bool { return r.info("a").State == event.StateRecovering })
	if got := r.matched("a"); got != 4 {
		t.Errorf("%d blocks matched while the subscriber is away, want 4", got)
	}
	e.publish(storing(5, 5), evicting(5)) // nobody listens
	e.publish(storing(5, 6))
	r.subscribe(e.config("a"))
	after := r.await("a", 4, event.StateLive)
	if after.Epoch != before.Epoch {
		t.Errorf("epoch %d became %d", before.Epoch, after.Epoch)
	}
	if after.Fence <= before.Fence {
		t.Errorf("fence %d after %d", after.Fence, before.Fence)
	}
	if got := r.matched("a"); got != 6 || after.Ledger.Lost != 0 {
		t.Errorf("%d blocks matched, ledger %+v", got, after.Ledger)
	}
}

func TestASubscriberThatWasKilledChangesNothing(t *testing.T) {
	r, e := newRoad(t), startEngine(t)
	// A bus of its own, closed under the subscriber's feet: nothing it says at the end gets out.
	cfg := bus.DefaultConfig()
	cfg.URL, cfg.LeaseTTL = r.srv.URL(), time.Second
	doomed, err := bus.Dial(t.Context(), cfg, "doomed", quiet())
	if err != nil {
		t.Fatal(err)
	}
	open := func(source event.Source, fence event.Fence) subscriber.Stream {
		return publisher.NewStream(publisher.DefaultStreamConfig(), doomed, source, fence, quiet())
	}
	sub, err := subscriber.New(r.cfg, []subscriber.EngineConfig{e.config("a")}, doomed, open, quiet(), nil)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- sub.Run(ctx) }()
	e.publish(storing(1, 2), storing(3, 4))
	before := r.await("a", 1, event.StateLive)
	doomed.Close()
	cancel()
	<-done
	e.publish(storing(5, 5))
	r.subscribe(e.config("a")) // waits for the lease to run out
	after := r.await("a", 2, event.StateLive)
	if after.Epoch != before.Epoch || r.matched("a") != 5 {
		t.Errorf("epoch %d became %d, %d blocks matched", before.Epoch, after.Epoch, r.matched("a"))
	}
}

func TestTwoSubscribersOneSource(t *testing.T) {
	r, e := newRoad(t), startEngine(t)
	first := r.subscribe(e.config("a"))
	e.publish(storing(1, 1))
	before := r.await("a", 0, event.StateLive)
	r.subscribe(e.config("a")) // waits
	e.publish(storing(2, 2))
	r.await("a", 1, event.StateLive)
	first()
	e.publish(storing(3, 3))
	after := r.await("a", 2, event.StateLive)
	if after.Fence <= before.Fence || after.Epoch != before.Epoch || r.matched("a") != 3 {
		t.Errorf("before %+v, after %+v", before, after)
	}
}

func TestAMalformedBatchCostsOnlyItself(t *testing.T) {
	r, e := newRoad(t), startEngine(t)
	r.subscribe(e.config("a"))
	e.publish(storing(1, 2))
	r.await("a", 0, event.StateLive)
	e.raw(true, []byte("\xc1 this is no msgpack"))
	e.publish(storing(3, 3))
	s := r.await("a", 2, event.StatePartial)
	if s.Ledger.Malformed != 1 || s.Ledger.Lost != 1 || len(s.Ledger.Holes) != 1 || !strings.Contains(s.Ledger.Holes[0].Reason, "malformed") {
		t.Errorf("ledger %+v", s.Ledger)
	}
	if !strings.Contains(s.Reason, "malformed") {
		t.Errorf("the state does not say why: %q", s.Reason)
	}
}

func TestAnUnreachableEngineHoldsNobodyUp(t *testing.T) {
	r, e := newRoad(t), startEngine(t)
	away := e.config("away")
	away.Endpoint, away.Replay = freeAddress(t), freeAddress(t)
	r.subscribe(away, e.config("a"))
	e.publish(storing(1, 2))
	r.await("a", 0, event.StateLive)
	eventually(t, "a state for the other", func() bool {
		s := r.info("away")
		return s.State == event.StateRecovering && s.Reason == "not connected yet"
	})
}

func TestNATSRestartsUnderTheRoad(t *testing.T) {
	r, e := newRoad(t), startEngine(t)
	r.subscribe(e.config("a"))
	e.publish(storing(1, 2))
	before := r.await("a", 0, event.StateLive)
	r.srv.Shutdown()
	e.publish(storing(3, 3), storing(4, 4))
	r.startNATS()
	e.publish(storing(5, 5))
	after := r.await("a", 3, event.StateLive)
	if after.Epoch != before.Epoch || after.Ledger.Lost != 0 || r.matched("a") != 5 {
		t.Errorf("before %+v, after %+v", before, after)
	}
}

func TestNATSComesBackWithoutItsStore(t *testing.T) {
	r, e := newRoad(t), startEngine(t)
	r.subscribe(e.config("a"))
	e.publish(storing(1, 2))
	before := r.await("a", 0, event.StateLive)
	r.srv.Shutdown()
	e.publish(storing(3, 3))
	r.srvCfg.Dir = t.TempDir() // streams, checkpoints and leases are gone
	r.startNATS()
	e.publish(storing(4, 4))
	eventually(t, "the blocks of before and after", func() bool { return r.matched("a") == 4 })
	e.publish(storing(5, 5))
	eventually(t, "the source in step again", func() bool {
		s := r.info("a")
		return s.State == event.StateLive && s.Balanced && s.LastSeq >= 3 && r.matched("a") == 5
	})
	after := r.info("a")
	if after.Epoch < before.Epoch || after.Ledger.Lost != 0 {
		t.Errorf("before %+v, after %+v", before, after)
	}
	late := prefix.New(prefix.DefaultConfig())
	r.consume(late)
	eventually(t, "who comes late to know it all", func() bool {
		for _, s := range late.Sources() {
			return s.State == event.StateLive && s.LastSeq == after.LastSeq && s.Resident[0].Blocks == 5
		}
		return false
	})
}

// After NATS has lost its store, the holder of a source goes on in the new stream, and a subscriber that waited for the lease may
// come before the holder's checkpoint is written. What it reads then begins in the middle of an epoch: it is no past to go on from.
func TestAStreamThatBeginsInTheMiddleIsNoPast(t *testing.T) {
	r, e := newRoad(t), startEngine(t)
	stop := r.subscribe(e.config("a"))
	for n := range event.Seq(3) {
		e.publish(storing(int(2*n+1), int(2*n+2)))
		r.await("a", n, event.StateLive)
	}
	before := r.info("a")
	stop()
	r.forget("a", 2)
	r.subscribe(e.config("a"))
	eventually(t, "a new epoch", func() bool { return r.info("a").Epoch > before.Epoch })
	r.await("a", 2, event.StateLive)
	if r.matched("a") != 6 {
		t.Errorf("%d blocks matched", r.matched("a"))
	}
}

func TestAShortBlocksHashesAreWithheld(t *testing.T) {
	r, e := newRoad(t), startEngine(t)
	r.subscribe(e.config("a"))
	b := storing(1, 1)
	b.Events[0].BlockSize, b.Events[0].Tokens = 4, b.Events[0].Tokens[:4]
	e.publish(b)
	s := r.await("a", 0, event.StateLive)
	if len(s.Oddities) != 1 || s.Oddities[0].Name != "prefix_hash_withheld" {
		t.Errorf("oddities %+v", s.Oddities)
	}
}

func TestPromptTextStopsAtTheEdge(t *testing.T) {
	for _, keep := range []bool{false, true} {
		r, e := newRoad(t), startEngine(t)
		r.cfg.KeepTokens = keep
		r.subscribe(e.config("a"))
		b := storing(1, 1)
		b.Events[0].Tokens[3] = 0x0abcdef
		b.Events[0].ExtraKeys = [][]byte{[]byte("\x91\xabcanary-salt")}
		e.publish(b)
		r.await("a", 0, event.StateLive)
		reader, err := r.bus.Read(t.Context(), 1)
		if err != nil {
			t.Fatal(err)
		}
		defer reader.Close()
		var dec event.Decoder
		for {
			d, err := reader.Next(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if strings.Contains(string(d.Data), "canary") && !keep {
				t.Error("the salt reached NATS")
			}
			if d.Kind != bus.Events {
				continue
			}
			batches, err := dec.Decode(d.Data)
			if err != nil {
				t.Fatal(err)
			}
			if got := len(batches[0].Events[0].Tokens) > 0; got != keep {
				t.Errorf("keep %v, and tokens travel: %v", keep, got)
			}
			want := event.Prefixes(nil, b.Events[0].Tokens, 16, event.Hasher{}.Seed("", "canary-salt"), false)[0]
			if got := batches[0].Events[0].Blocks[0].Prefix; got != want {
				t.Errorf("prefix %v, want %v: the salt is part of the name", got, want)
			}
			break
		}
	}
}

func TestParseEngine(t *testing.T) {
	got, err := subscriber.ParseEngine("zmq+tcp://10.0.0.5:5557,replay=tcp://10.0.0.5:6557,model=org/m,instance=pod-3,ranks=2,topic=kv@,report=full,pool=100,hash=xxhash,hash-seed=7")
	if err != nil {
		t.Fatal(err)
	}
	first := subscriber.EngineConfig{
		Source:   event.Source{Cluster: event.DefaultCluster, Model: "org/m", Instance: "pod-3", Origin: event.Engine},
		Endpoint: "tcp://10.0.0.5:5557", Replay: "tcp://10.0.0.5:6557", Topic: "kv@", Dialect: subscriber.AnyDialect, AsSet: true, PoolSize: 100,
		Hash: "xxhash", HashSeed: "7",
	}
	second := first
	second.Source.Rank, second.Endpoint, second.Replay = 1, "tcp://10.0.0.5:5558", "tcp://10.0.0.5:6558"
	if diff := cmp.Diff([]subscriber.EngineConfig{first, second}, got); diff != "" {
		t.Error(diff)
	}
	for text, wants := range map[string][]string{
		"tcp://h:1,model=m":                                       {"zmq+tcp://host:port"},
		"zmq+tcp://h:1":                                           {"model is missing"},
		"zmq+tcp://*:1,model=m":                                   {"where an engine listens"},
		"zmq+tcp://0.0.0.0:1,model=m":                             {"where an engine listens"},
		"zmq+tcp://h:99999,model=m":                               {`address "tcp://h:99999"`},
		"zmq+tcp://h,rank=x,repay=y":                              {"address", `rank "x"`, `"repay": unknown`, "model is missing"},
		"zmq+tcp://h:65535,model=m,ranks=2":                       {"past 65535"},
		"zmq+tcp://h:1,model=m,dialect=klingon":                   {`dialect "klingon"`, "auto, vllm, sglang"},
		"zmq+tcp://h:1,model=m,dialect=mooncake,replay=tcp://h:2": {"has none"},
		"trtllm+http://u:p@h:1/x,model=m":                         {"want trtllm+http"},
		"dynamo+file:///f,model=m":                                {"block is missing"},
		"dynamo+file:///f,model=m,block=16,ranks=2":               {"for engines with sockets"},
		"zmq+tcp://h:1,model=m,hash=md5":                          {`hash scheme "md5"`, "sha256_cbor"},
		"zmq+tcp://h:1,model=m,hash=xxhash":                       {"random unless PYTHONHASHSEED is set"},
		"zmq+tcp://h:1,model=m,hash-seed=root:":                   {"hash-seed", "want 1 to 32"},
	} {
		_, err := subscriber.ParseEngine(text)
		for _, want := range wants {
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("%s: %v does not say %q", text, err, want)
			}
		}
	}
	if _, err := subscriber.ReadEngines(strings.NewReader("# fleet\n\nzmq+tcp://h:1,model=m\nnonsense\n")); err == nil || !strings.Contains(err.Error(), "line 4") {
		t.Errorf("%v does not name the line", err)
	}
}

// What an engine's address could hold of secrets is refused, and told to nobody; neither is the seed of its hashes.
func TestParseEngineTellsNoSecrets(t *testing.T) {
	const secret = "hush-7f3a"
	for _, text := range []string{
		"trtllm+http://h:1/x?api_key=hush-7f3a,model=m",
		"trtllm+https://h:1/x?a=1,b=hush-7f3a,model=m",
		"trtllm+http://h:1/x#hush-7f3a,model=m",
		"trtllm+http://u:hush-7f3a@h:1/x,model=m",
		"trtllm+http://hush-7f3a@h:1/x,model=m",
		"trtllm+http://u:hush-7f3a@h:b/x,model=m",
		"http://u:hush-7f3a@h:1/x,model=m",
		"zmq+tcp://u:hush-7f3a@h:1,model=m",
		"zmq+tcp://h:1,replay=tcp://u:hush-7f3a@h:1,model=m",
		"zmq+tcp://h:1,hash-seed=hush-7f3a",
		"zmq+tcp://h:1,model=m,hash=nonsense,hash-seed=hush-7f3a",
		"zmq+tcp://h:1,model=m,hash-seed=root:hush-7f3a",
		"zmq+tcp://h:1,model=m,hash_seed=hush-7f3a",
		"zmq+tcp://h:1,model=m,hash-seed=1,hush-7f3a",
	} {
		_, err := subscriber.ParseEngine(text)
		if err == nil || strings.Contains(err.Error(), secret) {
			t.Errorf("%s: %v", text, err)
		}
		if _, err := subscriber.ReadEngines(strings.NewReader(text)); err == nil || strings.Contains(err.Error(), secret) {
			t.Errorf("%s in a file: %v", text, err)
		}
	}
	for text, want := range map[string]string{
		"trtllm+http://h:1/kv_cache_events,model=m":      "h:1",
		"trtllm+https://h/kv_cache_events,model=m":       "h",
		"zmq+tcp://[::1]:5,model=m":                      "[::1]:5",
		"dynamo+file:///var/x@y?z.jsonl,model=m,block=4": "/var/x@y?z.jsonl",
	} {
		engines, err := subscriber.ParseEngine(text)
		if err != nil || engines[0].Source.Instance != want {
			t.Errorf("%s: %+v, %v; want instance %s", text, engines, err, want)
		}
	}
}
