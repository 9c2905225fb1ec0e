package bus_test

import (
	"fmt"
	"net/url"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"

	"kvstrata/bus"
	"kvstrata/porttest"
)

// TestDialWaitsForAClustersLeader connects while two of three servers run, and one of those has only just started: roles
// that start together with their cluster must not give up.
func TestDialWaitsForAClustersLeader(t *testing.T) {
	ports := []int{porttest.Port(t), porttest.Port(t), porttest.Port(t)}
	start := func(i int) *server.Server {
		opts := &server.Options{
			ServerName: fmt.Sprint("n", i), Host: "127.0.0.1", Port: -1, JetStream: true, StoreDir: t.TempDir(), NoLog: true, NoSigs: true,
			Cluster: server.ClusterOpts{Name: "c", Host: "127.0.0.1", Port: ports[i]},
		}
		for _, port := range ports {
			opts.Routes = append(opts.Routes, &url.URL{Scheme: "nats", Host: fmt.Sprint("127.0.0.1:", port)})
		}
		s, err := server.NewServer(opts)
		if err != nil {
			t.Fatal(err)
		}
		s.Start()
		t.Cleanup(func() {
			s.Shutdown()
			s.WaitForShutdown()
		})
		if !s.ReadyForConnections(10 * time.Second) {
			t.Fatal("not ready")
		}
		return s
	}
	first := start(0)
	cfg := bus.DefaultConfig()
	cfg.URL, cfg.Replicas = first.ClientURL(), 3
	dialled := make(chan error, 1)
	go func() {
		b, err := bus.Dial(t.Context(), cfg, "test", quiet())
		if err == nil {
			b.Close()
		}
		dialled <- err
	}()
	start(1)
	start(2)
	if err := <-dialled; err != nil {
		t.Fatal(err)
	}
}
