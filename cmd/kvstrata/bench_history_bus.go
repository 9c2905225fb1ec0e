package main

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"kvstrata/event"
	"kvstrata/publisher"
)

// busFence is the fence that the bench publishes under.
const busFence = 1

// overBus measures what comes from publish to committed rows: the prepared messages' batches go through publishers' streams into the embedded NATS server,
// and from there through history's consumer and writer into ClickHouse.
func (c *benchHistoryCmd) overBus(a *app, work *replay, dir string) (r *result, err error) {
	s, err := newStack(a, natsFlags{NATSListen: "127.0.0.1:0", NATSReplicas: 1, NATSMaxAge: time.Hour, NATSMaxBytes: 8 << 30, LeaseTTL: 5 * time.Second},
		filepath.Join(dir, "nats"))
	if err != nil {
		return nil, err
	}
	defer s.close()
	kept := busKept{ended: make(chan struct{}), last: make(map[event.Source]event.Seq)}
	if err := s.addHistory("", historyFlags{CHDB: c.CHDB, Memory: c.Memory}, dir, kept.committed); err != nil {
		return nil, err
	}
	sources := make([]*busSource, len(work.engines))
	for i, e := range work.engines {
		sources[i] = &busSource{stream: publisher.NewStream(publisher.DefaultStreamConfig(), s.bus, e.source, busFence, a.log), source: e.source}
	}
	for events := c.prepare(work); len(events) > 0; events = events[1:] {
		n, err := strconv.Atoi(events[0].Source.Instance) // as the replay names them
		if err != nil {
			return nil, err
		}
		src := sources[n]
		src.batches = append(src.batches, &events[0].Batches[0])
		src.epoch = events[0].Epoch
		kept.last[src.source] = events[0].Batches[0].Last
	}
	ctx, stop := context.WithCancel(a.ctx)
	defer stop()
	running, runCtx := errgroup.WithContext(ctx)
	running.Go(func() error { return s.run(runCtx) })
	for _, src := range sources {
		running.Go(func() error { return src.stream.Run(runCtx) })
	}
	defer func() {
		stop()
		err = errors.Join(err, running.Wait())
	}()
	if _, _, err := s.writer.Resume(runCtx); err != nil {
		return nil, err
	}
	began := time.Now()
	for _, src := range sources {
		running.Go(func() error { src.publish(runCtx); return nil })
	}
	select {
	case <-kept.ended:
	case <-runCtx.Done():
		return nil, runCtx.Err()
	}
	took := time.Since(began).Seconds()
	total := uint64(0)
	for _, src := range sources {
		t, err := s.reader.Totals(runCtx, src.source)
		if err != nil {
			return nil, err
		}
		total += t.Stored + t.Evicted
	}
	if total != work.events {
		return nil, fmt.Errorf("%w: %d block events were published, and %d are kept", errMismatch, work.events, total)
	}
	return &result{
		Bench: "history", Machine: machine(), KeptUp: true,
		Workload: fmt.Sprintf("%d block events of %d engines that hold %d blocks each, through an embedded NATS server, from publish to committed",
			work.events, c.Engines, c.Pool),
		Figures: map[string]figure{
			"bus_events_per_s":       {Value: float64(work.events) / took, Unit: "1/s", Goal: goal(500_000)},
			"peak_rss_mb":            {Value: peakRSS("self"), Unit: "MB"},
			"clickhouse_peak_rss_mb": {Value: peakRSS(strconv.Itoa(s.engine.PID())), Unit: "MB", Goal: goal(1536)},
		},
	}, nil
}

// busSource is one engine's publisher, and what it will publish.
type busSource struct {
	source  event.Source
	stream  *publisher.Stream
	epoch   event.Epoch
	batches []*event.Batch
}

// publish publishes everything, as fast as the stream takes it.
func (s *busSource) publish(ctx context.Context) {
	digest := event.Digest(0)
	for _, b := range s.batches {
		for i := range b.Events {
			ev := &b.Events[i]
			for j := range ev.Blocks {
				digest += event.Digest(int64(ev.Blocks[j].Effect)) * event.Digest(event.Mix64(ev.Blocks[j].Hash, ev.Group, ev.Tier))
			}
		}
		s.stream.Publish(ctx, s.epoch, b, digest)
	}
}

// busKept follows what is committed.
type busKept struct {
	mu    sync.Mutex
	last  map[event.Source]event.Seq // of each source whose end is not committed
	ended chan struct{}              // closed when all are
}

func (k *busKept) committed(source event.Source, m event.Mark) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if last, ok := k.last[source]; !ok || !m.Started || m.Seq < last {
		return
	}
	if delete(k.last, source); len(k.last) == 0 {
		close(k.ended)
	}
}
