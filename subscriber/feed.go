package subscriber

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/pebbe/zmq4"

	"kvstrata/event"
)

// feed is where an engine's events come from: its sockets, or something that is pulled. The goroutine of the engine's session
// alone uses it.
type feed interface {
	// poll waits up to timeout and returns what came, in order. It is valid until the next call. A feed that asks somebody asks
	// no longer than ctx lasts.
	poll(ctx context.Context, timeout time.Duration) ([]input, error)
	// ask sends a replay request; current reports whether an input is still of use after later ones.
	ask(from event.Seq, reopen bool) error
	current(in *input) bool
	// refusal tells why nothing can be heard; empty while something can.
	refusal() string
	close()
}

// openFeed opens what an engine's address names.
func openFeed(zctx *zmq4.Context, cfg EngineConfig) (feed, error) {
	switch scheme, _, _ := strings.Cut(cfg.Endpoint, "://"); scheme {
	case "tcp":
		return dial(zctx, cfg)
	case "http", "https":
		return newPull(cfg.Endpoint), nil
	case "file":
		return newRecording(cfg)
	default:
		return nil, fmt.Errorf("open %q: want tcp, http, https or file", cfg.Endpoint)
	}
}
