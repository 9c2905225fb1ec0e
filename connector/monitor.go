package connector

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// Monitor makes an engine's statistics known: as metrics, and as a line in the log each interval in which anything moved
// (vLLM's KVConnectorLogging and KVConnectorProm). Every figure says whether it is pooled over ranks or of one rank's
// transfer. It is safe for concurrent use.
type Monitor struct {
	log *slog.Logger

	mu       sync.Mutex
	interval Stats

	transfers, bytes, pieces, failed, unnotified, expired prometheus.Counter
	ranks                                                 prometheus.Gauge
	duration, post                                        prometheus.Histogram
}

// NewMonitor returns a monitor of one engine's connector, registered.
func NewMonitor(connector, engine string, log *slog.Logger, registry prometheus.Registerer) (*Monitor, error) {
	labels := prometheus.Labels{"connector": connector, "engine": engine}
	counter := func(name, help string) prometheus.Counter {
		return prometheus.NewCounter(prometheus.CounterOpts{Name: "kvstrata_connector_" + name, Help: help, ConstLabels: labels})
	}
	seconds := func(name, help string) prometheus.Histogram {
		return prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "kvstrata_connector_" + name, Help: help, ConstLabels: labels, Buckets: prometheus.ExponentialBuckets(1e-4, 4, 10),
		})
	}
	m := &Monitor{
		log:        log.With("connector", connector, "engine", engine),
		transfers:  counter("rank_transfers_total", "Transfers that were done, each of one rank: with R ranks R a request."),
		bytes:      counter("bytes_total", "Bytes that were moved, over all ranks."),
		pieces:     counter("descriptors_total", "Contiguous pieces of memory that were moved, over all ranks."),
		failed:     counter("failed_rank_transfers_total", "Transfers that were not done wholly, each of one rank."),
		unnotified: counter("failed_notifications_total", "Peers that could not be told that their blocks are free."),
		expired:    counter("expired_leases_total", "Leases, each of one rank, that ended before a consumer had fetched the blocks."),
		ranks: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "kvstrata_connector_ranks", Help: "Tensor-parallel ranks, over which the other metrics are taken.", ConstLabels: labels,
		}),
		duration: seconds("rank_transfer_seconds", "From post to completion, of one rank's transfer."),
		post:     seconds("rank_post_seconds", "What the call that posts it takes, of one rank's transfer."),
	}
	for _, c := range []prometheus.Collector{
		m.transfers, m.bytes, m.pieces, m.failed, m.unnotified, m.expired, m.ranks, m.duration, m.post,
	} {
		if err := registry.Register(c); err != nil {
			return nil, fmt.Errorf("register metrics of connector %s: %w", connector, err)
		}
	}
	return m, nil
}

// Observe takes the statistics of a step; nil is nothing.
func (m *Monitor) Observe(s *Stats) {
	if s == nil {
		return
	}
	for _, t := range s.Transfers {
		m.bytes.Add(float64(t.Bytes))
		m.pieces.Add(float64(t.Descriptors))
		m.duration.Observe(t.Duration.Seconds())
		m.post.Observe(t.Post.Seconds())
	}
	m.transfers.Add(float64(len(s.Transfers)))
	m.failed.Add(float64(s.FailedTransfers))
	m.unnotified.Add(float64(s.FailedNotifications))
	m.expired.Add(float64(s.ExpiredRequests))
	m.mu.Lock()
	defer m.mu.Unlock()
	m.interval.Extend(s)
	m.ranks.Set(float64(max(s.Ranks, 1)))
}

// logInterval is how often the log has a line, as upstream's.
const logInterval = 10 * time.Second

// Run logs until ctx ends.
func (m *Monitor) Run(ctx context.Context) error {
	tick := time.NewTicker(logInterval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
			m.mu.Lock()
			interval := m.interval
			m.interval = Stats{}
			m.mu.Unlock()
			if !interval.Empty() {
				m.log.Info("KV transfers", "in", logInterval, "summary", interval.Summarize().String())
			}
		}
	}
}
