package workload_test

import (
	"bytes"
	"testing"

	"kvstrata/bench/workload"
	"kvstrata/event"
	"kvstrata/event/resident"
	"kvstrata/subscriber"
)

// TestPayloadsAreWhatTheProtocolSays lets the subscriber read them, and the judge find that nothing is odd.
func TestPayloadsAreWhatTheProtocolSays(t *testing.T) {
	const pods, messages = 3, 300
	for _, tt := range []struct {
		shape    workload.Shape
		resident uint64 // blocks of a pod afterwards
	}{
		{workload.Prefill64, 64 * messages},
		{workload.Decode1, 32 * messages},
		{workload.Churn, 32 * 256},
	} {
		for _, asMaps := range []bool{false, true} {
			dec := subscriber.NewDecoder(subscriber.DecoderConfig{})
			sets := make([]*resident.Set, pods)
			for p := range sets {
				sets[p] = resident.New(resident.DefaultConfig())
			}
			events := 0
			for i, p := range workload.Payloads(tt.shape, pods, messages, asMaps) {
				b := event.Batch{First: event.Seq(i), Last: event.Seq(i)}
				if err := dec.Decode(p.Data, &b); err != nil {
					t.Fatalf("%v: %v", tt.shape, err)
				}
				events += len(b.Events)
				sets[p.Pod].Judge(&b)
			}
			if want := pods * tt.shape.Events(messages); events != want {
				t.Errorf("%v: %d events, want %d", tt.shape, events, want)
			}
			if odd := dec.Oddities(); len(odd) > 0 {
				t.Errorf("%v: %v", tt.shape, odd)
			}
			for p, s := range sets {
				if s.Blocks() != tt.resident {
					t.Errorf("%v: pod %d holds %d blocks, want %d", tt.shape, p, s.Blocks(), tt.resident)
				}
				for _, c := range s.Oddities() {
					if c.Count > 0 {
						t.Errorf("%v: pod %d: %v", tt.shape, p, c)
					}
				}
			}
		}
	}
}

func TestPayloadsAreTheSameEachTime(t *testing.T) {
	a, b := workload.Payloads(workload.Churn, 2, 260, false), workload.Payloads(workload.Churn, 2, 260, false)
	for i := range a {
		if !bytes.Equal(a[i].Data, b[i].Data) {
			t.Fatalf("message %d differs", i)
		}
	}
}
