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

// Records puts a source's transfer records on the bus (kind `transfer`). They have no sequence: what finds no room, or is
// not taken by JetStream, is counted and lost.
type Records struct {
	bus     *bus.Bus
	subject string
	queue   chan []event.Transfer
	dropped atomic.Uint64
	log     *slog.Logger
}

// maxQueuedRecords bounds the calls of Record that wait to be sent; maxRecordsAMessage what goes into one message.
const (
	maxQueuedRecords   = 1024
	maxRecordsAMessage = 256 // a record has 3 KiB at most
)

// NewRecords returns a publisher of a source's records. Nothing is sent before Run runs.
func NewRecords(b *bus.Bus, source event.Source, log *slog.Logger) *Records {
	return &Records{
		bus: b, subject: bus.Subject(bus.Transfer, source), queue: make(chan []event.Transfer, maxQueuedRecords),
		log: log.With("source", source.String()),
	}
}

// Record takes records, which are its own from then on. It never waits.
func (r *Records) Record(records []event.Transfer) {
	select {
	case r.queue <- records:
	default:
		r.dropped.Add(uint64(len(records)))
	}
}

// Dropped returns how many records were lost.
func (r *Records) Dropped() uint64 { return r.dropped.Load() }

// Collector returns the metric of lost records, for the engine's registry.
func (r *Records) Collector(engine string) prometheus.Collector {
	return prometheus.NewCounterFunc(prometheus.CounterOpts{
		Name: "kvstrata_publisher_records_dropped_total", Help: "Transfer records that found no room, or that NATS did not take.",
		ConstLabels: prometheus.Labels{"engine": engine},
	}, func() float64 { return float64(r.Dropped()) })
}

// recordsGrace is how long Run goes on after its context for what is queued.
const recordsGrace = time.Second

// Run sends until ctx ends, and then what is queued. One message is under way at a time.
func (r *Records) Run(ctx context.Context) error {
	grace, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	defer context.AfterFunc(ctx, func() { time.AfterFunc(recordsGrace, cancel) })()
	for {
		select {
		case records := <-r.queue:
			r.send(grace, records)
		case <-ctx.Done():
			if len(r.queue) == 0 {
				return nil
			}
		}
	}
}

func (r *Records) send(ctx context.Context, records []event.Transfer) {
	for len(records) > 0 {
		n := min(len(records), maxRecordsAMessage)
		payload, err := event.MarshalTransfers(records[:n])
		if err == nil {
			err = r.store(ctx, payload)
		}
		if err != nil {
			r.dropped.Add(uint64(n))
			r.log.Debug("transfer records are lost", "records", n, "err", err)
		}
		records = records[n:]
	}
}

// store waits until JetStream has a message.
func (r *Records) store(ctx context.Context, payload []byte) error {
	future, err := r.bus.PublishAsync(&nats.Msg{Subject: r.subject, Data: payload})
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
