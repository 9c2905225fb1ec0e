package web_test

import (
	"testing"
	"time"

	"kvstrata/event"
	"kvstrata/web"
)

// typical is a message of one batch: 16 blocks stored, 16 evicted.
func typical() *event.Message {
	stored, evicted := make([]int8, 16), make([]int8, 16)
	for i := range stored {
		stored[i], evicted[i] = 1, -1
	}
	return message(prefill, run(event.Stored, stored...), run(event.Evicted, evicted...))
}

func BenchmarkRatesObserve(b *testing.B) {
	r, m := web.NewRates(time.Now), typical()
	b.ReportAllocs()
	for b.Loop() {
		r.Observe(m)
	}
}

func BenchmarkRatesPoints(b *testing.B) {
	now := time.Unix(1_800_000_000, 0)
	r, m := web.NewRates(func() time.Time { return now }), typical()
	for range 300 {
		now = now.Add(time.Second)
		r.Observe(m)
	}
	collect := r.Points().Collect
	b.ReportAllocs()
	for b.Loop() {
		r.Observe(m)
		collect(now, func(string, any) {})
	}
}

func BenchmarkTailObserveIdle(b *testing.B) {
	tail, m := web.NewTail(), typical()
	b.ReportAllocs()
	for b.Loop() {
		tail.Observe(m)
	}
}

// BenchmarkTailObserve has ten clients that look for a block which never comes: what the scan costs.
func BenchmarkTailObserve(b *testing.B) {
	tail, m := web.NewTail(), typical()
	s := serve(b, web.DefaultConfig(), nil, tail)
	for range 10 {
		c := connect(b, s)
		c.ask(b, `{"tail": {"source": "prefill-*", "hash": "ffffffffffffffff"}}`)
		c.settle(b)
	}
	b.ReportAllocs()
	for b.Loop() {
		tail.Observe(m)
	}
}
