package main

import (
	"fmt"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"kvstrata/bus"
	"kvstrata/event"
	"kvstrata/indexer/history"
)

// What is behind is told from the stream and from where history last stood, also while ClickHouse does not answer.
func TestWatchTellsWhatWaits(t *testing.T) {
	now := time.Unix(1000, 0)
	stream := func(sequence uint64) event.Position {
		return event.Position{Stream: "KV_EVENTS", Created: 7, Sequence: sequence}
	}
	var w historyWatch
	for _, step := range []struct {
		name       string
		after      time.Duration
		kept, end  uint64
		first      uint64
		want       historyDetail
		otherState bool // the stream was made anew
	}{
		{"nothing was ever kept", 0, 0, 5, 1, historyDetail{BehindMessages: 5}, false},
		{"and is not for long", 30 * time.Second, 0, 9, 1, historyDetail{BehindMessages: 9, LagSeconds: 30}, false},
		{"it gets on", 31 * time.Second, 4, 9, 1, historyDetail{BehindMessages: 5}, false},
		{"all is kept", 32 * time.Second, 9, 9, 1, historyDetail{}, false},
		{"after an idle hour one message is no hour late", time.Hour, 9, 10, 1, historyDetail{BehindMessages: 1}, false},
		{"ClickHouse is away, and more comes", time.Hour + time.Minute, 9, 70, 1, historyDetail{BehindMessages: 61, LagSeconds: 60}, false},
		{"the stream forgets some of it", time.Hour + 2*time.Minute, 9, 90, 40, historyDetail{BehindMessages: 81, LagSeconds: 120, LostMessages: 30}, false},
		{"another stream", time.Hour + 3*time.Minute, 9, 3, 1, historyDetail{BehindMessages: 3}, true},
	} {
		w.last = history.Standing{At: stream(step.kept)}
		end := stream(step.end)
		if step.otherState {
			end.Created = 8
		}
		if diff := cmp.Diff(&step.want, w.detail(end, step.first, now.Add(step.after))); diff != "" {
			t.Errorf("%s: %s", step.name, diff)
		}
	}
}

// Records come from their stream into history, once, whenever its process is killed.
func TestRecordsAreKept(t *testing.T) {
	source := event.Source{Cluster: event.DefaultCluster, Model: "m", Instance: "e", Origin: event.Connector}
	payload, err := event.MarshalTransfers([]event.Transfer{
		{Kind: event.TransferLoaded, Request: "req-7", Transport: "tcp", From: event.CPU, To: event.GPU, Blocks: 4, Ranks: 1, Bytes: 4096, Pieces: 2},
		{Kind: event.LeaseExpired, Transport: "tcp", Blocks: 1},
	})
	if err != nil {
		t.Fatal(err)
	}
	engine := source
	engine.Origin = event.Engine
	lookups, err := event.MarshalLookups([]event.Lookup{{Asker: event.AskerRouter, OneIn: 1, Tokens: 32, Shares: []event.Share{{Tier: event.GPU, Tokens: 16}}}},
		[]event.Request{{Request: "r", Prompt: 32, Cached: 16, End: event.EndStopped}})
	if err != nil {
		t.Fatal(err)
	}
	samples, err := event.MarshalSamples([]event.Sample{{Device: "GPU-0", MemoryUsed: 1}})
	if err != nil {
		t.Fatal(err)
	}
	data := t.TempDir()
	for life := 1; life <= 2; life++ {
		p := start(t, append([]string{"run", "--roles", "history", "--data", data, "--log-level", "error"}, anyPorts...)...)
		api, admin := p.says(`api +(http://\S+)`), p.says(`admin +(http://\S+)`)
		conn, err := nats.Connect(p.says(`embedded at (nats://\S+?),`))
		if err != nil {
			t.Fatal(err)
		}
		js, err := jetstream.New(conn)
		if err != nil {
			t.Fatal(err)
		}
		for subject, payloads := range map[string][][]byte{
			bus.Subject(bus.Transfer, source): {payload, []byte("no records\xff")}, bus.Subject(bus.Lookup, engine): {lookups}, bus.Subject(bus.GPU, engine): {samples},
		} {
			for _, data := range payloads {
				if _, err := js.Publish(t.Context(), subject, data); err != nil {
					t.Fatal(err)
				}
			}
		}
		eventually(t, "history is ready", func() bool { return string(fetch(t, admin+"/readyz")) == "ready\n" }, p.output)
		ask := clickHouse(t, data)
		want := fmt.Sprintf("%d\t%d\t%d\t%d\t%d\t%d\n", 2*life, 2*life, 4096*life, 16*life, 16*life, life)
		eventually(t, "records in history", func() bool {
			return ask("SELECT count(), uniqExact(stream_seq, rec), sum(bytes), (SELECT sum(matched) FROM kvstrata.lookups WHERE asker = 'router'), "+
				"(SELECT sum(cached) FROM kvstrata.requests), (SELECT sum(memory_used) FROM kvstrata.gpu_samples) FROM kvstrata.transfers FORMAT TSV") == want
		}, p.output)
		for _, whom := range [][]string{{"--data", data}, {"--server", api}} {
			o := command(t, append([]string{"explain", "--request", "req-7"}, whom...)...)
			if o.code != exitOK || strings.Count(o.stdout, "e loaded 4 blocks (4.0 KiB) from CPU to GPU by tcp") != life {
				t.Errorf("explain --request, asked of %v: %+v", whom, o)
			}
		}
		conn.Close()
		kill(t, p.cmd.Process.Pid, syscall.SIGKILL)
		<-p.exited
	}
}
