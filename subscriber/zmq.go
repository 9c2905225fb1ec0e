package subscriber

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"syscall"
	"time"

	"github.com/pebbe/zmq4"
	"github.com/zeebo/xxh3"

	"kvstrata/curve"
	"kvstrata/event"
	"kvstrata/subscriber/recovery"
)

// sockets are one engine's live and replay sockets. They live in the goroutine that uses them.
type sockets struct {
	ctx      *zmq4.Context
	live     *zmq4.Socket // SUB
	monitor  *zmq4.Socket // PAIR: connected or not
	dealer   *zmq4.Socket // DEALER to the engine's replay ROUTER; nil while none is needed
	poller   *zmq4.Poller
	replay   string
	keys     *curve.Keys // nil where the engine's sockets are open
	refused  string      // why the last handshake failed; empty once one did not
	received []input
	reopened int // replay sockets so far
	topics   topics
}

// inputKind says what a socket delivered.
type inputKind uint8

const (
	liveFrame inputKind = iota
	replayFrame
	replayEnd
	peerConnected
	peerDisconnected
	peerRefused
	strayFrame // not three frames, or a sequence that is not 8 bytes
)

type input struct {
	kind  inputKind
	frame recovery.Frame
	asked int // of a replay: which of our replay sockets it came from
}

// receiveHWM is how many messages libzmq keeps for us; vLLM's publisher keeps as many.
const receiveHWM = 100_000

// maxMessage bounds the bytes of a frame; libzmq ends a connection that sends a longer one.
const maxMessage = 64 << 20

// drainMost bounds how many messages of a socket are taken between two looks at the clock.
const drainMost = 256

// dial opens the live socket; libzmq connects, and reconnects, by itself.
func dial(ctx *zmq4.Context, cfg EngineConfig) (*sockets, error) {
	s := &sockets{ctx: ctx, replay: cfg.Replay, poller: zmq4.NewPoller()}
	if cfg.Curve != "" {
		keys, err := curve.ReadSubscriber(cfg.Curve)
		if err != nil {
			return nil, err
		}
		s.keys = keys
	}
	live, err := ctx.NewSocket(zmq4.SUB)
	if err != nil {
		return nil, fmt.Errorf("open SUB socket: %w", err)
	}
	s.live = live
	monitor := fmt.Sprintf("inproc://monitor-%p", live)
	err = errors.Join(
		live.SetRcvhwm(receiveHWM), live.SetMaxmsgsize(maxMessage), live.SetLinger(0), live.SetSubscribe(cfg.Topic),
		live.SetReconnectIvl(100*time.Millisecond), live.SetReconnectIvlMax(2*time.Second),
		live.SetHeartbeatIvl(5*time.Second), live.SetHeartbeatTimeout(15*time.Second),
		live.Monitor(monitor, zmq4.EVENT_HANDSHAKE_SUCCEEDED|zmq4.EVENT_DISCONNECTED|curve.FailedEvents), s.protect(live),
	)
	if err == nil {
		s.monitor, err = ctx.NewSocket(zmq4.PAIR)
	}
	if err == nil {
		err = errors.Join(s.monitor.SetLinger(0), s.monitor.Connect(monitor))
	}
	if err == nil {
		err = live.Connect(cfg.Endpoint)
	}
	if err != nil {
		s.close()
		return nil, fmt.Errorf("open live socket to %s: %w", cfg.Endpoint, err)
	}
	s.poller.Add(live, zmq4.POLLIN)
	s.poller.Add(s.monitor, zmq4.POLLIN)
	return s, nil
}

// protect gives a socket that will connect the engine's keys, if it has any.
func (s *sockets) protect(socket *zmq4.Socket) error {
	if s.keys == nil {
		return nil
	}
	return s.keys.Connect(socket)
}

func (s *sockets) close() {
	for _, socket := range []*zmq4.Socket{s.live, s.monitor, s.dealer} {
		if socket != nil {
			_ = socket.Close() // nothing is left to be done about it
		}
	}
}

// ask sends a replay request. With reopen, what is still under way of an earlier reply is dropped with its socket.
func (s *sockets) ask(from event.Seq, reopen bool) error {
	if s.dealer != nil && reopen {
		if err := errors.Join(s.poller.RemoveBySocket(s.dealer), s.dealer.Close()); err != nil {
			return fmt.Errorf("close replay socket: %w", err)
		}
		s.dealer = nil
	}
	if s.dealer == nil {
		dealer, err := s.ctx.NewSocket(zmq4.DEALER)
		if err != nil {
			return fmt.Errorf("open DEALER socket: %w", err)
		}
		if err := errors.Join(dealer.SetRcvhwm(receiveHWM), dealer.SetMaxmsgsize(maxMessage), dealer.SetLinger(0), s.protect(dealer), dealer.Connect(s.replay)); err != nil {
			_ = dealer.Close()
			return fmt.Errorf("open replay socket to %s: %w", s.replay, err)
		}
		s.dealer = dealer
		s.reopened++
		s.poller.Add(dealer, zmq4.POLLIN)
	}
	request := binary.BigEndian.AppendUint64(nil, uint64(from))
	if _, err := s.dealer.SendMessageDontwait("", request); err != nil {
		return fmt.Errorf("ask %s for replay: %w", s.replay, err)
	}
	return nil
}

// current reports whether an input is still of use: replies from a replay socket that was closed since are not.
func (s *sockets) current(in *input) bool {
	return in.kind != replayFrame && in.kind != replayEnd || in.asked == s.reopened
}

// poll waits up to timeout and returns what came: connection changes first, then replays, then live frames. What it
// returns is valid until the next call.
func (s *sockets) poll(_ context.Context, timeout time.Duration) ([]input, error) {
	s.received = s.received[:0]
	ready, err := s.poller.Poll(timeout)
	if err != nil {
		return nil, fmt.Errorf("poll sockets: %w", err)
	}
	var live, replay bool
	for _, r := range ready {
		switch r.Socket {
		case s.monitor:
			if err := s.readMonitor(); err != nil {
				return nil, err
			}
		case s.live:
			live = true
		case s.dealer:
			replay = true
		}
	}
	if replay {
		if err := s.drain(s.dealer, s.replayed); err != nil {
			return nil, err
		}
	}
	if live {
		if err := s.drain(s.live, s.lived); err != nil {
			return nil, err
		}
	}
	return s.received, nil
}

func (s *sockets) refusal() string { return s.refused }

func (s *sockets) readMonitor() error {
	for {
		kind, _, value, err := s.monitor.RecvEvent(zmq4.DONTWAIT)
		if isAgain(err) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("read socket monitor: %w", err)
		}
		switch kind {
		case zmq4.EVENT_HANDSHAKE_SUCCEEDED:
			s.refused = ""
			s.received = append(s.received, input{kind: peerConnected})
		case zmq4.EVENT_DISCONNECTED:
			s.received = append(s.received, input{kind: peerDisconnected})
		default:
			if reason := curve.Refused(kind, value); reason != "" {
				s.refuse(reason)
			}
		}
	}
}

// wantsKeys is what is told where the engine hangs up on a handshake without keys.
const wantsKeys = "handshake refused: the engine hangs up; does it want CURVE keys (curve=FILE)?"

// refuse notes why a handshake failed; that the engine hung up is no more than a guess at it.
func (s *sockets) refuse(reason string) {
	guess := reason == curve.HungUp
	if guess && s.keys == nil {
		reason = wantsKeys
	}
	if guess && s.refused != "" || reason == s.refused {
		return
	}
	s.refused = reason
	s.received = append(s.received, input{kind: peerRefused})
}

func (s *sockets) drain(socket *zmq4.Socket, take func([][]byte)) error {
	for range drainMost {
		frames, err := socket.RecvMessageBytes(zmq4.DONTWAIT)
		if isAgain(err) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("receive: %w", err)
		}
		take(frames)
	}
	return nil
}

// lived takes [topic, sequence, payload].
func (s *sockets) lived(frames [][]byte) {
	if len(frames) != 3 || len(frames[1]) != 8 {
		s.received = append(s.received, input{kind: strayFrame})
		return
	}
	s.topics.note(frames[0])
	s.received = append(s.received, input{kind: liveFrame, frame: frame(frames[1], frames[2])})
}

// replayed takes ["", topic, sequence, payload], or without the topic from older engines: it is read from the tail.
// The end is marked by a sequence of eight FF, or by an empty payload.
func (s *sockets) replayed(frames [][]byte) {
	n := len(frames)
	switch {
	case n < 2 || len(frames[n-2]) != 8:
		s.received = append(s.received, input{kind: strayFrame})
	case len(frames[n-1]) == 0 || binary.BigEndian.Uint64(frames[n-2]) == 1<<64-1:
		s.received = append(s.received, input{kind: replayEnd, asked: s.reopened})
	default:
		s.received = append(s.received, input{kind: replayFrame, asked: s.reopened, frame: frame(frames[n-2], frames[n-1])})
	}
}

func frame(seq, payload []byte) recovery.Frame {
	f := recovery.Frame{
		Seq: event.Seq(binary.BigEndian.Uint64(seq)), Payload: xxh3.Hash(payload), Data: payload,
	}
	f.Time, _ = PeekTime(payload) // 0 where there is none: the decoder will say why
	return f
}

func isAgain(err error) bool { return zmq4.AsErrno(err) == zmq4.Errno(syscall.EAGAIN) }
