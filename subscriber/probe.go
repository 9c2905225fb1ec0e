package subscriber

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/pebbe/zmq4"
)

// What Probe can find wrong.
var (
	ErrNoHandshake = errors.New("no ZeroMQ publisher answers")
	ErrNoReplay    = errors.New("the replay socket does not answer")
)

// Probe looks whether an engine can be heard, without judging or publishing anything: whether its live socket shakes
// hands, and whether its replay socket answers a request beyond its last batch with the end marker. ctx must end.
func Probe(ctx context.Context, cfg EngineConfig) (said string, err error) {
	zctx, err := zmq4.NewContext()
	if err != nil {
		return "", fmt.Errorf("make ZeroMQ context: %w", err)
	}
	s, err := dial(zctx, cfg)
	if err != nil {
		return "", errors.Join(err, zctx.Term())
	}
	defer func() {
		s.close()
		err = errors.Join(err, zctx.Term())
	}()
	if !s.await(ctx, peerConnected) {
		if s.refused != "" {
			return "", fmt.Errorf("%w: %s", ErrNoHandshake, s.refused)
		}
		return "", ErrNoHandshake
	}
	if cfg.Replay == "" {
		return "connected", nil
	}
	if err := s.ask(1<<64-2, false); err != nil {
		return "", err
	}
	if !s.await(ctx, replayEnd) {
		return "", ErrNoReplay
	}
	return "connected, and its replay socket answers", nil
}

// await polls until an input of a kind comes; false when ctx ended first.
func (s *sockets) await(ctx context.Context, kind inputKind) bool {
	for ctx.Err() == nil {
		inputs, err := s.poll(20 * time.Millisecond)
		if err != nil {
			return false
		}
		for i := range inputs {
			if inputs[i].kind == kind {
				return true
			}
		}
	}
	return false
}
