package publisher

import (
	"context"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/prometheus/client_golang/prometheus"

	"kvstrata/bus"
	"kvstrata/event"
)

// Records puts records on the bus: transfers, lookups, requests and samples of devices. They have no sequence: what finds no
// room, or is not taken by JetStream, is counted and lost.
type Records struct {
	bus     *bus.Bus
	queue   chan event.Records
	dropped atomic.Uint64
	log     *slog.Logger
}

// maxQueuedRecords bounds the calls of Record that wait to be sent; maxRecordsAMessage what goes into one message, and what is gathered
// before it is sent.
const (
	maxQueuedRecords   = 1024
	maxRecordsAMessage = 256 // a record has 3 KiB at most
)

// NewRecords returns a publisher of records. Nothing is sent before Run runs.
func NewRecords(b *bus.Bus, log *slog.Logger) *Records {
	return &Records{bus: b, queue: make(chan event.Records, maxQueuedRecords), log: log}
}

// Record takes records, which are its own from then on; each names its source. It never waits.
func (r *Records) Record(records event.Records) {
	select {
	case r.queue <- records:
	default:
		r.dropped.Add(uint64(records.Len()))
	}
}

// Dropped returns how many records were lost.
func (r *Records) Dropped() uint64 { return r.dropped.Load() }

// Collector returns the metric of lost records, for a registry; who is the engine, or the service, that tells them.
func (r *Records) Collector(who string) prometheus.Collector {
	return prometheus.NewCounterFunc(prometheus.CounterOpts{
		Name: "kvstrata_publisher_records_dropped_total", Help: "Records that found no room, or that NATS did not take.",
		ConstLabels: prometheus.Labels{"engine": who},
	}, func() float64 { return float64(r.Dropped()) })
}

// recordsGrace is how long Run goes on after its context for what is queued.
const recordsGrace = time.Second

// Run sends until ctx ends, and then what is queued. One message is under way at a time; what comes meanwhile goes into the next.
func (r *Records) Run(ctx context.Context) error {
	grace, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	defer context.AfterFunc(ctx, func() { time.AfterFunc(recordsGrace, cancel) })()
	for {
		select {
		case records := <-r.queue:
			r.send(grace, r.gather(records))
		case <-ctx.Done():
			if len(r.queue) == 0 {
				return nil
			}
		}
	}
}

// gather adds what is queued, as much as goes into a message.
func (r *Records) gather(first event.Records) map[event.Source]*event.Records {
	bySource := make(map[event.Source]*event.Records)
	of := func(source event.Source) *event.Records {
		if bySource[source] == nil {
			bySource[source] = new(event.Records)
		}
		return bySource[source]
	}
	for n, more := 0, first; ; {
		for _, t := range more.Transfers {
			of(t.Source).Transfers = append(of(t.Source).Transfers, t)
		}
		for _, l := range more.Lookups {
			of(l.Source).Lookups = append(of(l.Source).Lookups, l)
		}
		for _, q := range more.Requests {
			of(q.Source).Requests = append(of(q.Source).Requests, q)
		}
		for _, s := range more.Samples {
			of(s.Source).Samples = append(of(s.Source).Samples, s)
		}
		if n += more.Len(); n >= maxRecordsAMessage {
			return bySource
		}
		select {
		case more = <-r.queue:
		default:
			return bySource
		}
	}
}

func (r *Records) send(ctx context.Context, bySource map[event.Source]*event.Records) {
	for source, all := range bySource {
		inMessages(all.Transfers, func(part []event.Transfer) {
			payload, err := event.MarshalTransfers(part)
			r.store(ctx, bus.Transfer, source, payload, len(part), err)
		})
		inMessages(all.Lookups, func(part []event.Lookup) {
			payload, err := event.MarshalLookups(part, nil)
			r.store(ctx, bus.Lookup, source, payload, len(part), err)
		})
		inMessages(all.Requests, func(part []event.Request) {
			payload, err := event.MarshalLookups(nil, part)
			r.store(ctx, bus.Lookup, source, payload, len(part), err)
		})
		inMessages(all.Samples, func(part []event.Sample) {
			payload, err := event.MarshalSamples(part)
			r.store(ctx, bus.GPU, source, payload, len(part), err)
		})
	}
}

// inMessages hands over records in parts that fit into a message.
func inMessages[T any](records []T, send func([]T)) {
	for len(records) > 0 {
		n := min(len(records), maxRecordsAMessage)
		send(records[:n])
		records = records[n:]
	}
}

// store waits until JetStream has a message of so many records, unless there is an error already.
func (r *Records) store(ctx context.Context, kind bus.Kind, source event.Source, payload []byte, records int, err error) {
	if err == nil {
		err = r.put(ctx, &nats.Msg{Subject: bus.Subject(kind, source), Data: payload})
	}
	if err != nil {
		r.dropped.Add(uint64(records))
		r.log.Debug("records are lost", "kind", kind, "source", source.String(), "records", records, "err", err)
	}
}

func (r *Records) put(ctx context.Context, msg *nats.Msg) error {
	future, err := r.bus.PublishAsync(msg)
	if err != nil {
		return err
	}
	select {
	case <-future.Ok():
		return nil
	case err := <-future.Err():
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}
