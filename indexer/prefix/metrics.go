package prefix

import (
	"strconv"
	"strings"

	"github.com/prometheus/client_golang/prometheus"

	"kvstrata/event"
)

// metrics are the index's own histograms; what is known of sources is collected when asked for.
type metrics struct {
	lookups prometheus.Histogram
	lag     prometheus.Histogram
}

func newMetrics() metrics {
	return metrics{
		lookups: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "kvstrata_prefix_lookup_duration_seconds", Help: "Time to answer one lookup.",
			Buckets: prometheus.ExponentialBuckets(1e-6, 4, 12),
		}),
		lag: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "kvstrata_prefix_visible_lag_seconds", Help: "Time from a batch's reception by the subscriber until lookups see it.",
			Buckets: prometheus.ExponentialBuckets(1e-4, 2, 18),
		}),
	}
}

var (
	sourceLabels = []string{"cluster", "model", "instance", "dp_rank", "origin"}
	residentDesc = prometheus.NewDesc("kvstrata_prefix_resident_blocks", "Blocks with at least one copy.", append(sourceLabels, "tier"), nil)
	copiesDesc   = prometheus.NewDesc("kvstrata_prefix_resident_copies", "Copies of blocks.", append(sourceLabels, "tier"), nil)
	stateDesc    = prometheus.NewDesc("kvstrata_prefix_source_state", "1 for the state that the source is in.", append(sourceLabels, "state"), nil)
	behindDesc   = prometheus.NewDesc("kvstrata_prefix_behind_sequences", "Batches that the subscriber told of and that are not applied yet.", sourceLabels, nil)
	leftOutDesc  = prometheus.NewDesc("kvstrata_prefix_left_out_copies", "Copies that had no room within the bound of memory.", sourceLabels, nil)
	memoryDesc   = prometheus.NewDesc("kvstrata_prefix_memory_bytes", "Memory of the index: engines' names of blocks (shelves), prefixes (blocks), sets of owners (owners), and what is kept for what comes (idle).", []string{"part"}, nil)
	opsDesc      = prometheus.NewDesc("kvstrata_prefix_block_operations_total", "Block operations applied.", sourceLabels, nil)
)

// Describe names the metrics.
func (x *Index) Describe(ch chan<- *prometheus.Desc) {
	x.metrics.lookups.Describe(ch)
	x.metrics.lag.Describe(ch)
	for _, d := range []*prometheus.Desc{residentDesc, copiesDesc, stateDesc, behindDesc, leftOutDesc, memoryDesc, opsDesc} {
		ch <- d
	}
}

// Collect reads the index.
func (x *Index) Collect(ch chan<- prometheus.Metric) {
	x.metrics.lookups.Collect(ch)
	x.metrics.lag.Collect(ch)
	x.mu.RLock()
	defer x.mu.RUnlock()
	now := x.cfg.Clock()
	memory := x.bytes()
	for part, n := range map[string]int64{"shelves": memory.Shelves, "blocks": memory.Blocks, "owners": memory.Owners, "idle": memory.Idle} {
		ch <- prometheus.MustNewConstMetric(memoryDesc, prometheus.GaugeValue, float64(n), part)
	}
	for _, s := range x.byID {
		labels := labelsOf(s.name)
		put := func(d *prometheus.Desc, kind prometheus.ValueType, v uint64, more ...string) {
			ch <- prometheus.MustNewConstMetric(d, kind, float64(v), append(labels, more...)...)
		}
		info := x.info(s, now)
		for _, t := range info.Resident {
			put(residentDesc, prometheus.GaugeValue, t.Blocks, label(string(t.Tier)))
			put(copiesDesc, prometheus.GaugeValue, t.Copies, label(string(t.Tier)))
		}
		put(stateDesc, prometheus.GaugeValue, 1, info.State.String())
		put(behindDesc, prometheus.GaugeValue, info.Behind)
		put(leftOutDesc, prometheus.GaugeValue, s.leftOut)
		put(opsDesc, prometheus.CounterValue, s.blocks)
	}
}

func labelsOf(s event.Source) []string {
	return []string{label(s.Cluster), label(s.Model), label(s.Instance), strconv.FormatUint(uint64(s.Rank), 10), s.Origin.String()}
}

// label returns a name as text: one value that is not would fail the whole scrape.
func label(name string) string { return strings.ToValidUTF8(name, "\uFFFD") }
