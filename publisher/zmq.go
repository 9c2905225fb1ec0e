package publisher

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pebbe/zmq4"
	"golang.org/x/sync/errgroup"

	"kvstrata/curve"
	"kvstrata/event"
)

// ZMQConfig is where and how a [ZMQ] publishes; the fields are those of vLLM's KVEventsConfig.
type ZMQConfig struct {
	// Endpoint is what the PUB socket binds to: tcp://address:port or ipc://path. The address may be * for all, the
	// port 0 or * for a free one. It always binds; vLLM's publisher instead connects where it sees no wildcard.
	Endpoint string
	// Replay is what the ROUTER socket for replay requests binds to, in the same form; empty for no replay.
	Replay string
	// Topic stands before each batch, and is what subscribers filter by.
	Topic string
	// BufferSteps is how many of the last batches are kept for replay.
	BufferSteps int
	// HWM is how many batches libzmq holds for each subscriber that is slower than we; it drops the next ones.
	HWM int
	// Queue is how many batches may wait to be sent; Publish drops the next ones.
	Queue int
	// Form is how events are written.
	Form Form
	// ReplayStall is how long a replay may stand still because its client takes nothing, before it is given up.
	ReplayStall time.Duration
	// Keys protect both sockets with CURVE; nil for none. vLLM's own subscribers have none.
	Keys *curve.Keys
}

// DefaultZMQConfig returns vLLM's defaults, except that it listens on loopback only, offers replay, and has a queue of a
// tenth.
func DefaultZMQConfig() ZMQConfig {
	return ZMQConfig{
		Endpoint: "tcp://127.0.0.1:5557", Replay: "tcp://127.0.0.1:5558", BufferSteps: 10_000, HWM: 100_000,
		Queue: 10_000, Form: MapForm, ReplayStall: 30 * time.Second,
	}
}

// Validate returns everything that is wrong with the configuration.
func (c ZMQConfig) Validate() error {
	errs := []error{checkEndpoint("endpoint", c.Endpoint)}
	if c.Replay != "" {
		errs = append(errs, checkEndpoint("replay endpoint", c.Replay))
		if c.Replay == c.Endpoint && !strings.HasSuffix(c.Replay, ":0") && !strings.HasSuffix(c.Replay, "*") {
			errs = append(errs, fmt.Errorf("replay endpoint %q: want another one than the endpoint", c.Replay))
		}
		if c.BufferSteps < 1 {
			errs = append(errs, fmt.Errorf("buffer steps %d: want 1 or more", c.BufferSteps))
		}
		if c.ReplayStall <= 0 {
			errs = append(errs, fmt.Errorf("replay stall %v: want a time above 0", c.ReplayStall))
		}
	}
	if c.HWM < 1 {
		errs = append(errs, fmt.Errorf("hwm %d: want 1 or more", c.HWM))
	}
	if c.Queue < 1 {
		errs = append(errs, fmt.Errorf("queue %d: want 1 or more", c.Queue))
	}
	if c.Form != MapForm && c.Form != ArrayForm {
		errs = append(errs, fmt.Errorf("form %v: want map or array", c.Form))
	}
	return errors.Join(errs...)
}

func checkEndpoint(name, endpoint string) error {
	scheme, rest, _ := strings.Cut(endpoint, "://")
	switch scheme {
	case "tcp":
		colon := strings.LastIndexByte(rest, ':')
		if colon > 0 {
			if _, err := strconv.ParseUint(rest[colon+1:], 10, 16); err == nil || rest[colon+1:] == "*" {
				return nil
			}
		}
	case "ipc":
		if rest != "" {
			return nil
		}
	}
	return fmt.Errorf("%s %q: want tcp://address:port or ipc://path", name, endpoint)
}

// ErrStopped is what publishing gives once Run has ended.
var ErrStopped = errors.New("the publisher has stopped")

const (
	drainTime = 250 * time.Millisecond // what a stop gives the queue, and then again the network
	endSeq    = ^uint64(0)             // of the message that ends a replay
)

// ZMQ publishes batches on ZeroMQ as vLLM's ZmqEventPublisher does, for the same subscribers: frames topic, sequence
// (8 bytes, big-endian, from 0) and payload on a PUB socket, and a ROUTER socket that replays what it kept. LOADED
// events never leave it; a batch of nothing else is not sent and has no sequence.
//
// All methods may be called at any time and from any goroutine.
type ZMQ struct {
	cfg   ZMQConfig
	log   *slog.Logger
	topic []byte
	queue chan step     // written under mu only
	room  chan struct{} // holds a token when the queue may have room again
	ready chan struct{}
	ring  ring

	mu       sync.Mutex
	next     uint64
	dropped  uint64
	scratch  []byte
	running  bool
	stopped  bool
	endpoint string // as bound
	replay   string // as bound

	replays, replayed, malformed, abandoned atomic.Uint64
	refused                                 atomic.Uint64
}

// step is one batch on its way.
type step struct {
	seq     uint64
	payload []byte
}

// NewZMQ returns a publisher. It takes batches at once, and sends them when Run runs.
func NewZMQ(cfg ZMQConfig, log *slog.Logger) (*ZMQ, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	return &ZMQ{
		cfg: cfg, log: log, topic: []byte(cfg.Topic), queue: make(chan step, cfg.Queue),
		room: make(chan struct{}, 1), ready: make(chan struct{}), ring: ring{limit: cfg.BufferSteps},
	}, nil
}

// Publish encodes a batch, gives it the next sequence and queues it. It never waits. A batch that finds the queue full
// is dropped and counted; its sequence stays unused, and subscribers see the gap, which replay cannot fill.
func (z *ZMQ) Publish(b *event.Batch) error {
	z.mu.Lock()
	defer z.mu.Unlock()
	if z.stopped {
		return ErrStopped
	}
	s, ok := z.number(b)
	if !ok {
		return nil
	}
	select {
	case z.queue <- s:
	default:
		z.dropped++
	}
	return nil
}

// PublishWait is Publish for who would rather wait than lose a batch: it waits for room in the queue.
func (z *ZMQ) PublishWait(ctx context.Context, b *event.Batch) error {
	for {
		done, err := z.publishIfRoom(b)
		if done || err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait for room to publish: %w", ctx.Err())
		case <-z.room:
		}
	}
}

func (z *ZMQ) publishIfRoom(b *event.Batch) (done bool, err error) {
	z.mu.Lock()
	defer z.mu.Unlock()
	switch {
	case z.stopped:
		z.signalRoom() // for the others who wait
		return false, ErrStopped
	case len(z.queue) == cap(z.queue):
		return false, nil
	}
	if s, ok := z.number(b); ok {
		z.queue <- s
	}
	if len(z.queue) < cap(z.queue) {
		z.signalRoom()
	}
	return true, nil
}

// signalRoom wakes one of those who wait for room; it passes the word on.
func (z *ZMQ) signalRoom() {
	select {
	case z.room <- struct{}{}:
	default:
	}
}

// number encodes a batch and takes the next sequence for it, unless there is nothing to send.
func (z *ZMQ) number(b *event.Batch) (step, bool) {
	z.scratch = AppendVLLM(z.scratch[:0], b, z.cfg.Form)
	if len(z.scratch) == 0 {
		return step{}, false
	}
	s := step{seq: z.next, payload: bytes.Clone(z.scratch)}
	z.next++
	return s, true
}

// Ready is closed once both sockets are bound.
func (z *ZMQ) Ready() <-chan struct{} { return z.ready }

// Endpoint returns where the PUB socket is bound, wildcards resolved; it is empty before Ready.
func (z *ZMQ) Endpoint() string {
	z.mu.Lock()
	defer z.mu.Unlock()
	return z.endpoint
}

// ReplayEndpoint returns where the ROUTER socket is bound, wildcards resolved; it is empty before Ready.
func (z *ZMQ) ReplayEndpoint() string {
	z.mu.Lock()
	defer z.mu.Unlock()
	return z.replay
}

// Seq returns the sequence that the next batch will have.
func (z *ZMQ) Seq() uint64 {
	z.mu.Lock()
	defer z.mu.Unlock()
	return z.next
}

// Dropped returns how many batches found the queue full.
func (z *ZMQ) Dropped() uint64 {
	z.mu.Lock()
	defer z.mu.Unlock()
	return z.dropped
}

// ReplayStats counts what the replay socket did.
type ReplayStats struct {
	Replays   uint64 // answered to their end
	Batches   uint64 // sent in them
	Malformed uint64 // requests that are none, or one too many; they get no answer
	Abandoned uint64 // replays given up because their client left or stood still
}

// ReplayStats returns the counts since the start.
func (z *ZMQ) ReplayStats() ReplayStats {
	return ReplayStats{
		Replays: z.replays.Load(), Batches: z.replayed.Load(), Malformed: z.malformed.Load(), Abandoned: z.abandoned.Load(),
	}
}

// Refused returns how many handshakes failed: clients without keys, with wrong ones, or that are not allowed.
func (z *ZMQ) Refused() uint64 { return z.refused.Load() }

// Run binds the sockets and sends until ctx ends; it runs once. What is queued then gets a quarter of a second to
// leave, and the network as much again.
func (z *ZMQ) Run(ctx context.Context) error {
	z.mu.Lock()
	if z.running || z.stopped {
		z.mu.Unlock()
		return errors.New("publish on ZeroMQ: Run was called before")
	}
	z.running = true
	z.mu.Unlock()
	defer z.stop()

	// The sockets have a context of their own, so that ending it ends them and nothing else.
	zctx, err := zmq4.NewContext()
	if err != nil {
		return fmt.Errorf("publish on ZeroMQ: %w", err)
	}
	doors, err := z.openDoors(zctx)
	if err != nil {
		return errors.Join(err, zctx.Term())
	}
	pub, router, err := z.open(zctx)
	if err == nil {
		if err = doors.watch(pub, router); err != nil {
			err = errors.Join(err, closeAll(pub, router))
		}
	}
	if err != nil {
		return errors.Join(err, doors.close(), zctx.Term())
	}
	close(z.ready)
	z.log.Info("publishing on ZeroMQ", "endpoint", z.Endpoint(), "replay", z.ReplayEndpoint(), "form", z.cfg.Form)

	group, ctx := errgroup.WithContext(ctx)
	doors.run(group)
	if router != nil {
		group.Go(func() error { return z.serve(router) })
	}
	err = z.send(ctx, pub)
	// Term ends the polls of serve and of the doors, and returns once they have closed their sockets.
	return errors.Join(err, pub.Close(), zctx.Term(), group.Wait())
}

// stop refuses further batches.
func (z *ZMQ) stop() {
	z.mu.Lock()
	defer z.mu.Unlock()
	z.stopped = true
	z.signalRoom()
}

// open makes and binds the sockets; router is nil without replay.
func (z *ZMQ) open(zctx *zmq4.Context) (pub, router *zmq4.Socket, err error) {
	pub, endpoint, err := z.bind(zctx, zmq4.PUB, z.cfg.Endpoint, func(s *zmq4.Socket) error {
		return errors.Join(s.SetSndhwm(z.cfg.HWM), s.SetLinger(drainTime))
	})
	if err != nil {
		return nil, nil, err
	}
	var replay string
	if z.cfg.Replay != "" {
		router, replay, err = z.bind(zctx, zmq4.ROUTER, z.cfg.Replay, func(s *zmq4.Socket) error {
			// Mandatory makes a send say that the client is full or gone, instead of dropping the message.
			return errors.Join(
				s.SetRouterMandatory(1), s.SetSndhwm(replayHWM), s.SetMaxmsgsize(maxRequest), s.SetLinger(0),
			)
		})
		if err != nil {
			return nil, nil, errors.Join(err, pub.Close())
		}
	}
	z.mu.Lock()
	defer z.mu.Unlock()
	z.endpoint, z.replay = endpoint, replay
	return pub, router, nil
}

func (z *ZMQ) bind(
	zctx *zmq4.Context, kind zmq4.Type, endpoint string, set func(*zmq4.Socket) error,
) (s *zmq4.Socket, bound string, err error) {
	if s, err = zctx.NewSocket(kind); err != nil {
		return nil, "", fmt.Errorf("open %v socket: %w", kind, err)
	}
	err = errors.Join(set(s), s.SetIpv6(strings.Contains(endpoint, "[")), s.SetTcpKeepalive(1))
	if err == nil && z.cfg.Keys != nil {
		err = z.cfg.Keys.Bind(s)
	}
	if err == nil {
		err = s.Bind(endpoint)
	}
	if err == nil {
		bound, err = s.GetLastEndpoint()
	}
	if err != nil {
		return nil, "", errors.Join(fmt.Errorf("bind %v socket to %s: %w", kind, endpoint, err), s.Close())
	}
	return s, bound, nil
}

// send owns the PUB socket until ctx has ended and the queue is empty, or its time is over.
func (z *ZMQ) send(ctx context.Context, pub *zmq4.Socket) error {
	for ctx.Err() == nil {
		select {
		case s := <-z.queue:
			if err := z.sendStep(pub, s); err != nil {
				return err
			}
		case <-ctx.Done():
		}
	}
	z.stop()
	for deadline := time.Now().Add(drainTime); time.Now().Before(deadline); {
		select {
		case s := <-z.queue:
			if err := z.sendStep(pub, s); err != nil {
				return err
			}
		default:
			return nil
		}
	}
	z.log.Warn("stopped with batches unsent", "batches", len(z.queue))
	return nil
}

// sendStep sends one batch. It is kept for replay first, so that who has seen it can ask for all before it.
func (z *ZMQ) sendStep(pub *zmq4.Socket, s step) error {
	z.signalRoom()
	z.ring.add(s)
	if err := sendFrames(pub, 0, z.topic, seqFrame(s.seq), s.payload); err != nil {
		return fmt.Errorf("publish batch seq=%d: %w", s.seq, err)
	}
	return nil
}

func seqFrame(seq uint64) []byte { return binary.BigEndian.AppendUint64(nil, seq) }

// sendFrames sends the frames of one message. Only the first can find the socket full.
func sendFrames(s *zmq4.Socket, flags zmq4.Flag, frames ...[]byte) error {
	for i, frame := range frames {
		more := flags
		if i < len(frames)-1 {
			more |= zmq4.SNDMORE
		}
		if _, err := s.SendBytes(frame, more); err != nil {
			return err
		}
	}
	return nil
}
