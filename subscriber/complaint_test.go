package subscriber_test

import (
	"log/slog"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"kvstrata/event"
	"kvstrata/logtest"
	"kvstrata/publisher"
	"kvstrata/subscriber"
)

// linesWith returns the lines of a log that hold a text.
func linesWith(log *logtest.Buffer, text string) (found []string) {
	for line := range strings.Lines(log.String()) {
		if strings.Contains(line, text) {
			found = append(found, line)
		}
	}
	return found
}

// What goes wrong with a stream is one line in the log, a metric, and a state or counter of the source.
func TestWhatIsWrongIsSaidOnceAndCounted(t *testing.T) {
	r, e := newRoad(t), startEngine(t)
	log, registry := new(logtest.Buffer), prometheus.NewRegistry()
	open := func(source event.Source, fence event.Fence) subscriber.Stream {
		return publisher.NewStream(publisher.DefaultStreamConfig(), r.bus, source, fence, quiet())
	}
	sub, err := subscriber.New(r.cfg, []subscriber.EngineConfig{e.config("a")}, r.bus, open, slog.New(slog.NewTextHandler(log, nil)), registry)
	if err != nil {
		t.Fatal(err)
	}
	r.run(sub.Run)
	for range 5 {
		e.raw(true, []byte(`{"this": "is another dialect"}`))
	}
	r.await("a", 4, event.StatePartial)
	lines := linesWith(log, "can't be decoded")
	if len(lines) != 1 || !strings.Contains(lines[0], "another dialect than those we know") {
		t.Errorf("five batches of another dialect gave %q, want one line that says so", lines)
	}
	if partial := linesWith(log, "state=partial"); len(partial) == 0 || !strings.Contains(partial[0], "level=WARN") {
		t.Errorf("the state is not warned of: %q", partial)
	}

	wrong := storing(1, 2)
	wrong.Events[0].Tokens = wrong.Events[0].Tokens[:17] // a block size that does not match
	e.publish(wrong, wrong, evicting(77))
	eventually(t, "the oddities", func() bool { return len(r.info("a").Oddities) >= 2 })
	const want = `
# HELP kvstrata_subscriber_violations_total How often the stream broke its contract; unknown_word is a word of the stream that we do not know.
# TYPE kvstrata_subscriber_violations_total counter
kvstrata_subscriber_violations_total{cluster="c",dp_rank="0",instance="a",model="m",violation="evicted_absent_block"} 1
kvstrata_subscriber_violations_total{cluster="c",dp_rank="0",instance="a",model="m",violation="tokens_do_not_fill_blocks"} 2
kvstrata_subscriber_violations_total{cluster="c",dp_rank="0",instance="a",model="m",violation="unknown_word"} 0
`
	eventually(t, "the metric", func() bool {
		err = testutil.GatherAndCompare(registry, strings.NewReader(want), "kvstrata_subscriber_violations_total")
		return err == nil
	})
	if err != nil {
		t.Error(err)
	}
	if said := linesWith(log, "oddities"); len(said) == 0 || !strings.Contains(said[len(said)-1], "tokens_do_not_fill_blocks") {
		t.Errorf("the log does not name the oddities: %q", said)
	}
}
