package web

import (
	"errors"

	"github.com/prometheus/client_golang/prometheus"
)

type metrics struct {
	frames, coalesced, slow, sent, tailLines, refused prometheus.Counter
}

func newMetrics() *metrics {
	counter := func(name, help string) prometheus.Counter {
		return prometheus.NewCounter(prometheus.CounterOpts{Name: "kvstrata_web_" + name + "_total", Help: help})
	}
	return &metrics{
		frames:    counter("frames", "Frames sent to browsers."),
		coalesced: counter("frames_coalesced", "Versions of the state that a browser skipped because it was slow."),
		slow:      counter("slow_disconnects", "Browsers disconnected because they took nothing for too long."),
		sent:      counter("sent_bytes", "Bytes sent to browsers over live sockets, as they went over the wire."),
		tailLines: counter("tail_lines", "Event lines sent to browsers."),
		refused:   counter("refused_clients", "Browsers refused because too many were connected, or the hub did not run."),
	}
}

func (m *metrics) register(reg prometheus.Registerer, clients func() int) error {
	all := []prometheus.Collector{
		m.frames, m.coalesced, m.slow, m.sent, m.tailLines, m.refused,
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "kvstrata_web_clients", Help: "Browsers connected."},
			func() float64 { return float64(clients()) }),
	}
	var errs []error
	for _, c := range all {
		errs = append(errs, reg.Register(c))
	}
	return errors.Join(errs...)
}
