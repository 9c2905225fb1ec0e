package connector_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"kvstrata/connector"
	"kvstrata/connector/connectortest"
	"kvstrata/connector/device"
	"kvstrata/connector/null"
)

// Every figure says what it is taken over: with two ranks a request is two transfers.
func TestMonitor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log bytes.Buffer
		registry := prometheus.NewRegistry()
		m, err := connector.NewMonitor("tcp", "decode-0", slog.New(slog.NewTextHandler(&log, nil)), registry)
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- m.Run(ctx) }()
		m.Observe(nil)
		transfer := connector.Transfer{Duration: 3 * time.Millisecond, Post: time.Microsecond, Bytes: 1000, Descriptors: 4}
		m.Observe(&connector.Stats{Transfers: []connector.Transfer{transfer, transfer}, Ranks: 2, FailedTransfers: 1, ExpiredRequests: 3})
		time.Sleep(time.Minute) // of the bubble's clock
		synctest.Wait()
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
		if lines := strings.Count(log.String(), "KV transfers"); lines != 1 || !strings.Contains(log.String(), "2 transfers of 2 ranks, 2000 bytes") {
			t.Errorf("the log has %d lines for one interval in which something moved:\n%s", lines, &log)
		}
		const labels = `{connector="tcp",engine="decode-0"}`
		want := `# HELP kvstrata_connector_bytes_total Bytes that were moved, over all ranks.
# TYPE kvstrata_connector_bytes_total counter
kvstrata_connector_bytes_total` + labels + ` 2000
# HELP kvstrata_connector_expired_leases_total Leases, each of one rank, that ended before a consumer had fetched the blocks.
# TYPE kvstrata_connector_expired_leases_total counter
kvstrata_connector_expired_leases_total` + labels + ` 3
# HELP kvstrata_connector_rank_transfers_total Transfers that were done, each of one rank: with R ranks R a request.
# TYPE kvstrata_connector_rank_transfers_total counter
kvstrata_connector_rank_transfers_total` + labels + ` 2
# HELP kvstrata_connector_ranks Tensor-parallel ranks, over which the other metrics are taken.
# TYPE kvstrata_connector_ranks gauge
kvstrata_connector_ranks` + labels + ` 2
`
		if err := testutil.GatherAndCompare(registry, strings.NewReader(want), "kvstrata_connector_bytes_total",
			"kvstrata_connector_expired_leases_total", "kvstrata_connector_rank_transfers_total", "kvstrata_connector_ranks"); err != nil {
			t.Error(err)
		}
		if _, err := connector.NewMonitor("tcp", "decode-0", slog.Default(), registry); err == nil {
			t.Error("two monitors of one engine are registered")
		}
	})
}

// bound is a worker that has taken something when it is registered, and must be run to give it back.
type bound struct {
	null.Worker
	fail  error
	taken *atomic.Int32
}

func (b *bound) RegisterCaches(c connector.Caches) error {
	if b.fail != nil {
		return b.fail
	}
	b.taken.Add(1)
	return b.Worker.RegisterCaches(c)
}

func (b *bound) Run(ctx context.Context) error {
	defer b.taken.Add(-1)
	return b.Worker.Run(ctx)
}

// An engine that can't be made gives back what its first ranks took.
func TestAnEngineThatCannotBeMadeKeepsNothing(t *testing.T) {
	failure := errors.New("no more memory")
	var taken atomic.Int32
	var f connector.Factory
	err := f.Register("bound", connector.Transport{
		NewScheduler: null.Transport.NewScheduler,
		NewWorker: func(s connector.Setup) (connector.Worker, error) {
			b := &bound{taken: &taken}
			if s.Rank == 2 {
				b.fail = failure
			}
			return b, nil
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	tensors, size := connectortest.Tensors(4, 0)
	memory, err := device.Host{}.Alloc("test", size)
	if err != nil {
		t.Fatal(err)
	}
	defer memory.Close()
	caches := connector.Caches{Device: device.Host{}, Memory: memory, Tensors: tensors, Model: connectortest.Model()}
	setup := connector.Setup{Config: connector.DefaultConfig(), Model: connectortest.Model(), Log: slog.Default()}
	setup.Config.Connector, setup.Config.Role = "bound", connector.Both
	_, err = connector.NewEngine(&f, setup, []connector.Caches{caches, caches, caches})
	if !errors.Is(err, failure) || !strings.Contains(err.Error(), "rank 2") {
		t.Errorf("error %v", err)
	}
	if n := taken.Load(); n != 0 {
		t.Errorf("%d ranks keep what they took", n)
	}
}

func TestFactoryRefuses(t *testing.T) {
	var f connector.Factory
	for name, transport := range map[string]connector.Transport{"": null.Transport, "half": {NewWorker: null.Transport.NewWorker}} {
		if err := f.Register(name, transport); err == nil {
			t.Errorf("%q is registered", name)
		}
	}
	if err := f.Register("null", null.Transport); err != nil {
		t.Fatal(err)
	}
	setup := connector.Setup{Config: connector.DefaultConfig(), Ranks: 2, Rank: 2}
	setup.Config.Connector = "null"
	_, err := f.Worker(setup)
	for _, want := range []string{"kv_role", "rank 2 of 2", "block size 0", "no logger"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v does not tell %q", err, want)
		}
	}
}
