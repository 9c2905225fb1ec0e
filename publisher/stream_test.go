package publisher_test

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"kvstrata/bus"
	"kvstrata/event"
	"kvstrata/event/resident"
	"kvstrata/publisher"

	"github.com/google/go-cmp/cmp"
)

var (
	engineSource    = event.Source{Cluster: "c", Model: "m", Instance: "i", Origin: event.Engine}
	connectorSource = event.Source{Cluster: "c", Model: "m", Instance: "i", Origin: event.Connector}
)

func quiet() *slog.Logger { return slog.New(slog.DiscardHandler) }

// natsServer is an embedded server that can be stopped and started on the same port with the same streams.
type natsServer struct {
	t   *testing.T
	cfg bus.ServerConfig
	srv *bus.Server
}

func (s *natsServer) start() {
	s.t.Helper()
	srv, err := bus.StartServer(s.cfg, quiet())
	if err != nil {
		s.t.Fatal(err)
	}
	s.srv = srv
}

func startBus(t *testing.T) (*natsServer, *bus.Bus) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := &natsServer{t: t, cfg: bus.DefaultServerConfig()}
	s.cfg.Dir, s.cfg.Port = t.TempDir(), l.Addr().(*net.TCPAddr).Port
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	s.start()
	cfg := bus.DefaultConfig()
	cfg.URL = s.srv.URL()
	b, err := bus.Dial(t.Context(), cfg, "test", quiet())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		b.Close()
		s.srv.Shutdown()
	})
	return s, b
}

// runStream runs a stream until the test ends.
func runStream(t *testing.T, s *publisher.Stream) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		<-done // a stream whose server is gone can't say that all is stored
	})
}

// judged makes batches of one block each and judges them.
type judged struct {
	set  *resident.Set
	next event.Seq
}

func (j *judged) batch() *event.Batch {
	b := &event.Batch{
		First: j.next, Last: j.next, Way: event.Live, Time: event.Time(1e18), Rank: -1,
		Events: []event.Event{{
			Kind: event.Stored, Tier: event.GPU, Group: event.NoGroup, LoRAID: event.NoLoRAID,
			Blocks: []event.Block{{Hash: event.IntHash(uint64(j.next) + 1), Copies: -1, Age: -1}},
		}},
	}
	j.next++
	j.set.Judge(b)
	return b
}

func newJudged() *judged { return &judged{set: resident.New(resident.DefaultConfig())} }

func TestStreamTellsItsDigestAtMessagesEnds(t *testing.T) {
	_, b := startBus(t)
	cfg := publisher.DefaultStreamConfig()
	cfg.FlushBytes = 400 // a few batches a message
	s := publisher.NewStream(cfg, b, engineSource, 9, quiet())
	runStream(t, s)
	j := newJudged()
	const n = 200
	for range n {
		batch := j.batch()
		s.Publish(t.Context(), 5, batch, j.set.Digest())
	}
	end, err := s.Settle(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	reader, err := b.Read(t.Context(), 1)
	if err != nil {
		t.Fatal(err)
	}
	defer reader.Close()
	follower := resident.New(resident.Config{})
	var dec event.Decoder
	next, digests, messages := event.Seq(0), 0, 0
	for seq := uint64(0); seq < end.Sequence; messages++ {
		d, err := reader.Next(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		seq = d.Sequence
		batches, err := dec.Decode(d.Data)
		if err != nil {
			t.Fatal(err)
		}
		if d.Head.Epoch != 5 || d.Head.Fence != 9 || d.Head.First != next || d.Head.Blocks != len(batches) {
			t.Fatalf("head %+v before sequence %d", d.Head, next)
		}
		for i := range batches {
			if err := follower.Apply(&batches[i]); err != nil {
				t.Fatal(err)
			}
		}
		next = d.Head.Last + 1
		if d.Head.HasDigest {
			digests++
			if follower.Digest() != d.Head.Digest {
				t.Fatalf("the digest of message %d is not the set's after its last batch", messages)
			}
		}
	}
	if next != n || messages < 10 || digests < 1 || digests > messages/2 {
		t.Errorf("%d sequences in %d messages, %d with a digest", next, messages, digests)
	}
}

func TestStreamLosesNothingWhenNATSRestarts(t *testing.T) {
	srv, b := startBus(t)
	s := publisher.NewStream(publisher.DefaultStreamConfig(), b, engineSource, 1, quiet())
	runStream(t, s)
	j := newJudged()
	publish := func(n int) {
		for range n {
			batch := j.batch()
			s.Publish(t.Context(), 1, batch, j.set.Digest())
		}
	}
	publish(100)
	if _, err := s.Settle(t.Context()); err != nil {
		t.Fatal(err)
	}
	srv.srv.Shutdown()
	publish(100)
	srv.start()
	publish(100)
	if _, err := s.Settle(t.Context()); err != nil {
		t.Fatal(err)
	}
	received := streamReader(t, b)
	seen := make(map[event.Seq]bool)
	for len(seen) < 300 { // duplicates, and what is sent again behind what followed it, are for consumers to put in order
		seen[received(t).First] = true
	}
}

func TestStreamDropsWhatFindsNoRoomAndSaysSo(t *testing.T) {
	srv, b := startBus(t)
	cfg := publisher.DefaultStreamConfig()
	cfg.MaxPending, cfg.MaxWait, cfg.FlushBytes = 200, 20*time.Millisecond, 1
	s := publisher.NewStream(cfg, b, engineSource, 1, quiet())
	runStream(t, s)
	j := newJudged()
	publish := func() {
		batch := j.batch()
		s.Publish(t.Context(), 1, batch, j.set.Digest())
	}
	publish()
	if _, err := s.Settle(t.Context()); err != nil {
		t.Fatal(err)
	}
	if s.CheckpointDue(time.Now(), 0) {
		t.Fatal("a checkpoint is due for no reason")
	}
	srv.srv.Shutdown()
	for s.Stats().Dropped < 3 {
		publish()
	}
	srv.start()
	eventually(t, "room for messages", func() bool { return s.Stats().PendingBytes == 0 })
	if !s.CheckpointDue(time.Now(), 0) {
		t.Error("after a drop a checkpoint must be due: consumers resync from it")
	}
	publish()
	if _, err := s.Settle(t.Context()); err != nil {
		t.Fatal(err)
	}
	// What was sent again may come behind what followed it, as consumers know; in the end every sequence was told.
	received := streamReader(t, b)
	told := make(map[event.Seq]bool)
	dropped := uint64(0)
	for len(told) < int(j.next) {
		got := received(t)
		for seq := got.First; seq <= got.Last; seq++ {
			if got.Way == event.Dropped && !told[seq] {
				dropped++
			}
			told[seq] = true
		}
		if got.Way == event.Dropped && (len(got.Events) > 0 || got.Reason == "") {
			t.Errorf("dropped range %+v: want no events, and a reason", got)
		}
	}
	if dropped != s.Stats().Dropped {
		t.Errorf("%d sequences told as dropped, %d counted", dropped, s.Stats().Dropped)
	}
}

func TestStreamWritesCheckpointsThatStandInTheStream(t *testing.T) {
	_, b := startBus(t)
	s := publisher.NewStream(publisher.DefaultStreamConfig(), b, engineSource, 3, quiet())
	runStream(t, s)
	j := newJudged()
	for range 10 {
		batch := j.batch()
		s.Publish(t.Context(), 2, batch, j.set.Digest())
	}
	cp := &event.Checkpoint{Epoch: 2, Seq: 9, State: event.StateLive, Ledger: event.Ledger{Started: true, Last: 9, Live: 10}}
	s.Checkpoint(cp, j.set.Snapshot())
	end, err := s.Settle(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	var names []bus.CheckpointName
	eventually(t, "a checkpoint", func() bool {
		all, err := b.Checkpoints(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		names = all[engineSource]
		return len(names) > 0
	})
	again := resident.New(resident.DefaultConfig())
	got, err := b.LoadCheckpoint(t.Context(), names[0], again.Load)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(end, got.Position); diff != "" {
		t.Errorf("the checkpoint does not stand at the message with its last batch: %s", diff)
	}
	if got.Fence != 3 || got.Seq != 9 || again.Digest() != j.set.Digest() {
		t.Errorf("checkpoint %+v", got)
	}

	// Nothing happens but a status: the next checkpoint is the same object, further on.
	if err := s.Status(&event.Status{Epoch: 2, Seq: 9, State: event.StateLive}); err != nil {
		t.Fatal(err)
	}
	same := *cp
	s.Checkpoint(&same, j.set.Snapshot())
	later, err := s.Settle(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "the checkpoint further on", func() bool {
		got, err := b.LoadCheckpoint(t.Context(), names[0], again.Load)
		return err == nil && got.Position == later
	})
	if all, err := b.Checkpoints(t.Context()); err != nil || len(all[engineSource]) != 1 {
		t.Errorf("%v, %v: want one object", all, err)
	}
}

func TestStreamAnswersRequestsForACheckpoint(t *testing.T) {
	_, b := startBus(t)
	s := publisher.NewStream(publisher.DefaultStreamConfig(), b, engineSource, 3, quiet())
	runStream(t, s)
	eventually(t, "an answer", func() bool { return b.RequestCheckpoint(t.Context(), engineSource) == nil })
	if !s.CheckpointDue(time.Now(), 0) {
		t.Error("it was asked for, and is not due")
	}
}

func TestNATSPublisherRefusesEngines(t *testing.T) {
	_, b := startBus(t)
	if _, err := publisher.NewNATS(publisher.DefaultNATSConfig(), b, engineSource, quiet()); err == nil {
		t.Error("an engine's events are judged by its subscriber")
	}
}

func TestNATSPublisherCheckpointsAtStartAndStop(t *testing.T) {
	_, b := startBus(t)
	n, err := publisher.NewNATS(publisher.DefaultNATSConfig(), b, connectorSource, quiet())
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- n.Run(ctx) }()
	raw := &event.Batch{Time: 5, Rank: -1, Events: []event.Event{{
		Kind: event.Stored, Tier: event.CPU, Group: event.NoGroup, LoRAID: event.NoLoRAID, BlockSize: 2, Salt: "canary",
		Tokens: []uint32{1, 2}, Blocks: []event.Block{{Hash: event.IntHash(7), Copies: -1, Age: -1}},
	}}}
	if err := n.Publish(raw); err != nil {
		t.Fatal(err)
	}
	if raw.Events[0].Blocks[0].Prefix != 0 || len(raw.Events[0].Tokens) == 0 {
		t.Error("the caller's batch was changed")
	}
	got := streamReader(t, b)(t)
	if ev := got.Events[0]; len(ev.Tokens) > 0 || ev.Salt != "" || ev.Blocks[0].Prefix == 0 || ev.Blocks[0].Effect != 1 {
		t.Errorf("published %+v: want a name, an effect and no prompt text", ev)
	}
	eventually(t, "a checkpoint at the start", func() bool {
		all, err := b.Checkpoints(t.Context())
		return err == nil && len(all[connectorSource]) > 0
	})
	cancel()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	all, err := b.Checkpoints(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	set := resident.New(resident.DefaultConfig())
	if _, err := b.LoadCheckpoint(t.Context(), all[connectorSource][0], set.Load); err != nil {
		t.Fatal(err)
	}
	if set.Blocks() != 1 {
		t.Errorf("the last checkpoint holds %d blocks, want the one published", set.Blocks())
	}
}

// A publisher that was elected numbers its life by its fence, and says at once when it can be trusted.
func TestNATSPublisherTellsItsState(t *testing.T) {
	_, b := startBus(t)
	var ready atomic.Bool
	cfg := publisher.DefaultNATSConfig()
	cfg.Fence, cfg.Stores, cfg.Judge.AsSet = 77, []string{"shelf"}, true
	cfg.State = func() (event.State, string) {
		if ready.Load() {
			return event.StateLive, ""
		}
		return event.StateRecovering, "not compared"
	}
	n, err := publisher.NewNATS(cfg, b, connectorSource, quiet())
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- n.Run(ctx) }()
	reader, err := b.Read(t.Context(), 1)
	if err != nil {
		t.Fatal(err)
	}
	defer reader.Close()
	var told []string
	await := func(want ...string) {
		t.Helper()
		for !slices.Equal(told, want) {
			if len(told) > len(want) {
				t.Fatalf("told %v, want %v", told, want)
			}
			d, err := reader.Next(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			st, err := event.UnmarshalStatus(d.Data, d.Source)
			if err != nil || st.Epoch != 77 || st.Fence != 77 || !slices.Equal(st.Stores, cfg.Stores) {
				t.Fatalf("%+v, %v", st, err)
			}
			if says := fmt.Sprint(st.State, " ", st.Reason); len(told) == 0 || told[len(told)-1] != says {
				told = append(told, says)
			}
		}
	}
	await("recovering not compared")
	ready.Store(true)
	await("recovering not compared", "live ")
	cancel()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	await("recovering not compared", "live ", "gone its publisher has stopped")
}
