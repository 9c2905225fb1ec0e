package history

import "github.com/prometheus/client_golang/prometheus"

// writerMetrics are what a writer counts.
type writerMetrics struct {
	rows                           *prometheus.CounterVec
	retries                        prometheus.Counter
	digestsAgreed, digestsDiffered prometheus.Counter
	rounds, lag                    prometheus.Histogram
}

func newWriterMetrics(w *Writer, reg prometheus.Registerer) *writerMetrics {
	m := &writerMetrics{
		rows: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "kvstrata_history_rows_total", Help: "Rows inserted.",
		}, []string{"table"}),
		retries: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "kvstrata_history_failures_total", Help: "Statements that ClickHouse did not take at the first try.",
		}),
		digestsAgreed: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "kvstrata_history_digests_agreed_total", Help: "Digests of the stream that were history's own.",
		}),
		digestsDiffered: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "kvstrata_history_digests_differed_total", Help: "Digests of the stream that were not history's own.",
		}),
		rounds: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "kvstrata_history_round_seconds", Help: "How long the inserts of one round took.",
			Buckets: prometheus.ExponentialBuckets(0.005, 2, 14),
		}),
		lag: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "kvstrata_history_committed_lag_seconds", Help: "From the bus's stream to ClickHouse, of the oldest row of each round.",
			Buckets: prometheus.ExponentialBuckets(0.05, 1.6, 16),
		}),
	}
	if reg != nil {
		reg.MustRegister(m.rows, m.retries, m.digestsAgreed, m.digestsDiffered, m.rounds, m.lag,
			prometheus.NewGaugeFunc(prometheus.GaugeOpts{
				Name: "kvstrata_history_up", Help: "1 while ClickHouse takes rows.",
			}, func() float64 {
				if w.Trouble() == "" {
					return 1
				}
				return 0
			}))
	}
	return m
}
