package subscriber

import (
	"slices"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"kvstrata/event"
)

// engineCollector shows each engine's last status as metrics.
type engineCollector struct {
	sub *Subscriber

	state, sequences, receptions, dropped, violations, age *prometheus.Desc
}

func newEngineCollector(s *Subscriber) *engineCollector {
	labels := []string{"cluster", "model", "instance", "dp_rank"}
	desc := func(name, help string, more ...string) *prometheus.Desc {
		return prometheus.NewDesc("kvstrata_subscriber_"+name, help, append(labels, more...), nil)
	}
	return &engineCollector{
		sub:        s,
		state:      desc("source_state", "1 for the state that the source is in.", "state"),
		sequences:  desc("sequences_total", "Batches of the source's present life, by how they reached the stream; lost ones never did.", "way"),
		receptions: desc("useless_receptions_total", "Batches received in the present life that were of no use.", "reason"),
		dropped:    desc("dropped_sequences_total", "Batches that were judged and found no room on the way to NATS."),
		violations: desc("violations_total", "How often the stream broke its contract; unknown_word is a word of the stream that we do not know.", "violation"),
		age:        desc("status_age_seconds", "Time since the source's state was last told."),
	}
}

// Describe names the metrics.
func (c *engineCollector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{c.state, c.sequences, c.receptions, c.dropped, c.violations, c.age} {
		ch <- d
	}
}

// Collect reads the engines' last statuses.
func (c *engineCollector) Collect(ch chan<- prometheus.Metric) {
	for _, e := range c.sub.all() {
		st := e.told.Load()
		if st == nil {
			continue
		}
		src := []string{e.cfg.Source.Cluster, e.cfg.Source.Model, e.cfg.Source.Instance, strconv.FormatUint(uint64(e.cfg.Source.Rank), 10)}
		put := func(d *prometheus.Desc, kind prometheus.ValueType, v float64, more ...string) {
			ch <- prometheus.MustNewConstMetric(d, kind, v, append(src, more...)...)
		}
		put(c.state, prometheus.GaugeValue, 1, st.State.String())
		for _, w := range []struct {
			way event.Way
			n   uint64
		}{
			{event.Live, st.Ledger.Live},
			{event.Recovered, st.Ledger.Recovered},
			{event.Held, st.Ledger.Held},
			{event.Asked, st.Ledger.Asked},
			{event.Lost, st.Ledger.Lost},
		} {
			put(c.sequences, prometheus.CounterValue, float64(w.n), w.way.String())
		}
		put(c.receptions, prometheus.CounterValue, float64(st.Ledger.Duplicates), "duplicate")
		put(c.receptions, prometheus.CounterValue, float64(st.Ledger.Malformed), "malformed")
		put(c.dropped, prometheus.CounterValue, float64(st.Ledger.Dropped))
		unknown := uint64(0)
		for _, o := range st.Counters {
			if !slices.Contains(violationNames, o.Name) {
				unknown += o.Count // its name is the stream's, and no label
				continue
			}
			put(c.violations, prometheus.CounterValue, float64(o.Count), o.Name)
		}
		put(c.violations, prometheus.CounterValue, float64(unknown), "unknown_word")
		put(c.age, prometheus.GaugeValue, time.Since(st.Time.Std()).Seconds())
	}
}
