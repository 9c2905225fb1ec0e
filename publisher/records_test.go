package publisher_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"kvstrata/bus"
	"kvstrata/event"
	"kvstrata/publisher"
)

func TestRecordsReachTheirStream(t *testing.T) {
	srv, b := startBus(t)
	source := event.Source{Cluster: "c", Model: "m", Instance: "decode-0", Origin: event.Connector}
	r := publisher.NewRecords(b, source, quiet())
	var want []event.Transfer
	for i := range 700 { // more than one message takes
		want = append(want, event.Transfer{
			Source: source, Kind: event.TransferLoaded, Time: event.Time(i), Transport: "tcp", Request: "r", Peer: "prefill-0",
			From: event.GPU, To: event.GPU, Blocks: 7, Ranks: 2, Bytes: 1 << 20, Pieces: 64, Duration: time.Millisecond, Post: time.Microsecond,
		})
	}
	expired := event.Transfer{Source: source, Kind: event.LeaseExpired, Transport: "tcp", Request: "s", Reason: "-ERR \xff\xfe" + strings.Repeat("x", 600)}
	r.Record(want)
	r.Record([]event.Transfer{expired})
	expired.Reason = "-ERR \uFFFD" + strings.Repeat("x", 505) // what a server says is cut, and made UTF-8
	want = append(want, expired)
	// What is queued is sent though Run is told to end at once.
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := r.Run(ctx); err != nil {
		t.Fatal(err)
	}
	if r.Dropped() > 0 {
		t.Errorf("%d were dropped", r.Dropped())
	}
	conn, err := nats.Connect(srv.srv.URL())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	js, err := jetstream.New(conn)
	if err != nil {
		t.Fatal(err)
	}
	stream, err := js.Stream(t.Context(), bus.RecordStream)
	if err != nil {
		t.Fatal(err)
	}
	var got []event.Transfer
	for seq := uint64(1); seq <= stream.CachedInfo().State.LastSeq; seq++ {
		msg, err := stream.GetMsg(t.Context(), seq)
		if err != nil {
			t.Fatal(err)
		}
		kind, from, err := bus.ParseSubject(msg.Subject)
		if err != nil || kind != bus.Transfer || from != source {
			t.Fatalf("subject %s: %v", msg.Subject, err)
		}
		records, err := event.UnmarshalTransfers(msg.Data, from)
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, records...)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// Nobody waits: what finds no room is counted.
func TestRecordsThatFindNoRoom(t *testing.T) {
	_, b := startBus(t)
	r := publisher.NewRecords(b, event.Source{Origin: event.Connector}, quiet())
	for range 2000 {
		r.Record(make([]event.Transfer, 3))
	}
	if n := r.Dropped(); n == 0 || n%3 != 0 || n >= 6000 {
		t.Errorf("%d of 6000 were dropped", n)
	}
}
