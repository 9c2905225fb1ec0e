package subscriber_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"kvstrata/curve"
	"kvstrata/event"
	"kvstrata/publisher"
	"kvstrata/subscriber"
)

func TestCurveOfAnEngine(t *testing.T) {
	engines, err := subscriber.ParseEngine("zmq+tcp://10.0.0.5:5557,model=m,ranks=2,curve=/etc/keys")
	if err != nil || len(engines) != 2 || engines[0].Curve != "/etc/keys" || engines[1].Curve != "/etc/keys" {
		t.Errorf("%+v, %v", engines, err)
	}
}

// Keys that are missing are told at the start; those that an engine refuses are told in the source's state, until they are
// replaced by others that it takes.
func TestAnEngineThatRefusesUs(t *testing.T) {
	r := newRoad(t)
	pub, sub, err := curve.Generate()
	if err != nil {
		t.Fatal(err)
	}
	_, stranger, err := curve.Generate()
	if err != nil {
		t.Fatal(err)
	}
	stranger.Server = pub.Public
	cfg := publisher.DefaultZMQConfig()
	cfg.Endpoint, cfg.Replay, cfg.Keys = "tcp://127.0.0.1:0", "tcp://127.0.0.1:*", pub
	z, err := publisher.NewZMQ(cfg, quiet())
	if err != nil {
		t.Fatal(err)
	}
	r.run(z.Run)
	<-z.Ready()

	keys := filepath.Join(t.TempDir(), "keys")
	engine := subscriber.EngineConfig{
		Source:   event.Source{Cluster: "c", Model: "m", Instance: "i", Origin: event.Engine},
		Endpoint: z.Endpoint(), Replay: z.ReplayEndpoint(), Dialect: subscriber.AnyDialect, Curve: keys,
	}
	if _, err := subscriber.New(r.cfg, []subscriber.EngineConfig{engine}, r.bus, nil, quiet(), nil); err == nil ||
		!strings.Contains(err.Error(), "m@i") || !strings.Contains(err.Error(), "curve-keys makes them") {
		t.Errorf("keys that are not there: %v", err)
	}
	write := func(k *curve.Keys) {
		t.Helper()
		if err := os.WriteFile(keys, k.Text(), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write(stranger)
	stop := r.subscribe(engine)
	const refused = "CURVE handshake refused: this end's public key is not among those that the other end allows"
	eventually(t, "the reason in the state", func() bool {
		s := r.info("i")
		return s.State == event.StateRecovering && strings.Contains(s.Reason, refused)
	})
	stop()
	write(sub)
	r.subscribe(engine)
	eventually(t, "a connection", func() bool { return r.info("i").Reason == "connected, but no event yet" })
	for n := uint64(1); n <= 3; n++ {
		if err := z.Publish(storing(int(n), int(n))); err != nil {
			t.Fatal(err)
		}
	}
	r.await("i", 2, event.StateLive)
	for _, key := range []string{pub.Secret, sub.Secret, stranger.Secret} {
		if text := r.info("i").Reason; strings.Contains(text, key) {
			t.Errorf("a key is told: %s", text)
		}
	}
}
