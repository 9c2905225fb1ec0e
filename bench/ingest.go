package main

import (
	"context"
	"fmt"
	"runtime"
	"syscall"
	"time"

	"kvstrata/bench/workload"
	"kvstrata/event"
	"kvstrata/event/resident"
	"kvstrata/indexer/prefix"
	"kvstrata/subscriber"
)

// cpuTime returns the user and system time of the process so far, the collector's included.
func cpuTime() time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// ingestion is what work 2 costs an event, in µs of processor time.
type ingestion struct{ All, Decode, Judge, Apply float64 }

// ingester takes messages as a subscriber's session and an index in one process would: decoded, judged, applied.
type ingester struct {
	decoders []*subscriber.Decoder
	judges   []*resident.Set
	sources  []event.Source
	next     []event.Seq
	index    *prefix.Index
	batch    [1]event.Batch
}

func newIngester(pods int) *ingester {
	g := &ingester{index: newIndex(pods), next: make([]event.Seq, pods)}
	for p := range pods {
		g.decoders = append(g.decoders, subscriber.NewDecoder(subscriber.DecoderConfig{}))
		g.judges = append(g.judges, resident.New(resident.DefaultConfig()))
		g.sources = append(g.sources, engine(p))
	}
	return g
}

// stage is how far messages go.
type stage int

const (
	decoded stage = 1 + iota
	judged
	applied
)

func (g *ingester) take(p *workload.Payload, to stage) error {
	b := &g.batch[0]
	*b = event.Batch{First: g.next[p.Pod], Last: g.next[p.Pod], Way: event.Live}
	if err := g.decoders[p.Pod].Decode(p.Data, b); err != nil {
		return fmt.Errorf("decode message of pod %d: %w", p.Pod, err)
	}
	if to == decoded {
		return nil
	}
	g.judges[p.Pod].Judge(b)
	g.next[p.Pod]++
	if to == judged {
		return nil
	}
	_, err := g.index.Apply(context.Background(), &event.Message{Source: g.sources[p.Pod], Epoch: 1, Fence: 1, Batches: g.batch[:]})
	return err
}

// ingest runs the messages three times, each time one stage further, on fresh state: what a stage costs is the difference.
// (A clock read between the stages of each message would cost as much as decoding one.)
func ingest(shape workload.Shape, pods, messages int, asMaps bool) (*ingestion, error) {
	payloads := workload.Payloads(shape, pods, messages, asMaps)
	events := float64(pods * shape.Events(messages))
	var cost [applied + 1]float64
	for to := decoded; to <= applied; to++ {
		g := newIngester(pods)
		runtime.GC()
		before := cpuTime()
		for i := range payloads {
			if err := g.take(&payloads[i], to); err != nil {
				return nil, err
			}
		}
		cost[to] = float64((cpuTime() - before).Nanoseconds()) / 1000 / events
		runtime.KeepAlive(g)
	}
	return &ingestion{All: cost[applied], Decode: cost[decoded], Judge: cost[judged] - cost[decoded], Apply: cost[applied] - cost[judged]}, nil
}
