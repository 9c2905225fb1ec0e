package publisher_test

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/pebbe/zmq4"

	"kvstrata/curve"
	"kvstrata/event"
	"kvstrata/publisher"
	"kvstrata/subscriber"
)

// keyring makes keys of a publisher, of a subscriber that it lets in, and of one that it does not.
func keyring(t *testing.T) (pub, sub, stranger *curve.Keys) {
	t.Helper()
	pub, sub, err := curve.Generate()
	if err != nil {
		t.Fatal(err)
	}
	if _, stranger, err = curve.Generate(); err != nil {
		t.Fatal(err)
	}
	return pub, sub, stranger
}

func keyFile(t *testing.T, k *curve.Keys) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "keys")
	if err := os.WriteFile(path, k.Text(), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// Each kind of client tries a publisher's both sockets.
func TestWhoMayHearAPublisherWithKeys(t *testing.T) {
	pub, sub, stranger := keyring(t)
	wrong := *sub
	wrong.Server = stranger.Server
	known := *stranger // knows the publisher's public key, as anybody may
	known.Server = pub.Public
	open := *pub
	open.Allow = nil
	for _, test := range []struct {
		name    string
		pub     *curve.Keys
		sub     *curve.Keys
		refused string // why, one of two; empty = it is let in
		counted bool   // the publisher sees it
	}{
		{"its own", pub, sub, "", false},
		{"no keys", pub, nil, "one end has keys, the other has none|does it want CURVE keys", true},
		{"another publisher's key", pub, &wrong, "is server-key its public key", true},
		{"not allowed", pub, &known, "not among those that the other end allows", true},
		{"not allowed, where all are", &open, &known, "", false},
		{"keys to a publisher without", nil, sub, "one end has keys, the other has none|the other end hangs up", false},
	} {
		t.Run(test.name, func(t *testing.T) {
			cfg := testConfig()
			cfg.Keys = test.pub
			z := newZMQ(t, cfg)
			run(t, z)
			engine := subscriber.EngineConfig{
				Source: event.Source{Model: "m", Instance: "i", Origin: event.Engine}, Endpoint: z.Endpoint(), Replay: z.ReplayEndpoint(),
			}
			if test.sub != nil {
				engine.Curve = keyFile(t, test.sub)
			}
			ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
			defer cancel()
			heard, err := subscriber.Probe(ctx, subscriber.DefaultConfig(), engine)
			if err != nil {
				t.Fatal(err)
			}
			switch {
			case test.refused == "" && (!heard.Connected || heard.Refused != ""):
				t.Errorf("%+v", heard)
			case test.refused != "" && (heard.Connected || !slices.ContainsFunc(strings.Split(test.refused, "|"), func(why string) bool {
				return strings.Contains(heard.Refused, why)
			})):
				t.Errorf("%q, want %q", heard.Refused, test.refused)
			}
			if got := z.Refused() > 0; got != test.counted {
				t.Errorf("%d refusals", z.Refused())
			}
			if test.refused != "" {
				hearsNothing(t, z, test.sub)
			}
		})
	}
}

// hearsNothing checks that a client who was refused gets neither batches nor replays, while the publisher sends.
func hearsNothing(t *testing.T, z *publisher.ZMQ, keys *curve.Keys) {
	t.Helper()
	zctx, err := zmq4.NewContext()
	if err != nil {
		t.Fatal(err)
	}
	live, err := zctx.NewSocket(zmq4.SUB)
	if err != nil {
		t.Fatal(err)
	}
	dealer, err := zctx.NewSocket(zmq4.DEALER)
	if err != nil {
		t.Fatal(err)
	}
	err = errors.Join(live.SetSubscribe(""), live.SetLinger(0), dealer.SetLinger(0))
	if keys != nil {
		err = errors.Join(err, keys.Connect(live), keys.Connect(dealer))
	}
	err = errors.Join(err, live.Connect(z.Endpoint()), dealer.Connect(z.ReplayEndpoint()))
	if err != nil {
		t.Fatal(err)
	}
	_, _ = dealer.SendMessageDontwait("", make([]byte, 8)) // no peer: it may be refused at once
	poller := zmq4.NewPoller()
	poller.Add(live, zmq4.POLLIN)
	poller.Add(dealer, zmq4.POLLIN)
	for n := range uint64(20) {
		if err := z.Publish(batch(n, 200)); err != nil {
			t.Fatal(err)
		}
		ready, err := poller.Poll(10 * time.Millisecond)
		if err != nil || len(ready) > 0 {
			t.Fatalf("%d sockets have something, %v", len(ready), err)
		}
	}
	if err := errors.Join(live.Close(), dealer.Close(), zctx.Term()); err != nil {
		t.Error(err)
	}
}

// A publisher that can't bind leaves nothing open.
func TestDoorsOfAPublisherThatFails(t *testing.T) {
	pub, _, _ := keyring(t)
	cfg := testConfig()
	cfg.Keys = pub
	first := newZMQ(t, cfg)
	run(t, first)
	cfg.Endpoint = first.Endpoint()
	if err := newZMQ(t, cfg).Run(t.Context()); err == nil || !strings.Contains(err.Error(), "bind PUB socket") {
		t.Errorf("%v, want a taken address", err)
	}
}

// A publisher that stops while handshakes fail all the time stops cleanly: the stop may come between a monitor's being ready
// and its being read.
func TestDoorsStopCleanlyAmidRefusals(t *testing.T) {
	pub, _, _ := keyring(t)
	greeting := make([]byte, 64) // of ZMTP 3.1 without keys
	copy(greeting, "\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03\x01NULL")
	for range 40 {
		cfg := testConfig()
		cfg.Keys = pub
		z := newZMQ(t, cfg)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- z.Run(ctx) }()
		<-z.Ready()
		var callers sync.WaitGroup
		for range 4 {
			callers.Go(func() {
				for {
					conn, err := net.Dial("tcp", strings.TrimPrefix(z.Endpoint(), "tcp://"))
					if err != nil {
						return // it has stopped
					}
					_, _ = conn.Write(greeting)
					_, _ = io.Copy(io.Discard, conn) // until it is hung up on
					_ = conn.Close()
				}
			})
		}
		eventually(t, "refusals", func() bool { return z.Refused() > 20 })
		cancel()
		if err := <-done; err != nil {
			t.Errorf("stopped with %v", err)
		}
		callers.Wait()
	}
}
