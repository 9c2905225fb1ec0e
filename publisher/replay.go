package publisher

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"sort"
	"sync"
	"syscall"
	"time"

	"github.com/pebbe/zmq4"
)

// ring is what was sent last. Sequences rise; those that were dropped are missing.
type ring struct {
	limit int

	mu     sync.Mutex
	steps  []step // from the oldest on, around the end
	oldest int
}

func (r *ring) add(s step) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.steps) < r.limit {
		r.steps = append(r.steps, s)
		return
	}
	if r.limit > 0 {
		r.steps[r.oldest] = s
		r.oldest = (r.oldest + 1) % r.limit
	}
}

func (r *ring) at(i int) step { return r.steps[(r.oldest+i)%len(r.steps)] }

// from appends to dst, up to its capacity, what is kept of first … last.
func (r *ring) from(dst []step, first, last uint64) []step {
	r.mu.Lock()
	defer r.mu.Unlock()
	i := sort.Search(len(r.steps), func(i int) bool { return r.at(i).seq >= first })
	for ; i < len(r.steps) && len(dst) < cap(dst) && r.at(i).seq <= last; i++ {
		dst = append(dst, r.at(i))
	}
	return dst
}

// last returns the newest sequence.
func (r *ring) last() (seq uint64, ok bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.steps) == 0 {
		return 0, false
	}
	return r.at(len(r.steps) - 1).seq, true
}

const (
	replayHWM    = 1000 // messages that libzmq holds for one client
	replayBurst  = 64   // messages sent to one client before it is another's turn
	maxReplays   = 16   // clients served at the same time
	maxRequests  = 256  // replays under way or waiting
	maxRequest   = 1024 // bytes of a frame; libzmq disconnects who sends more
	shortestWait = time.Millisecond
	longestWait  = 20 * time.Millisecond
)

// replay is one client's request on its way: the batches of next … last that are still kept, then the end mark. What
// falls out of the ring meanwhile is skipped, as what was too old from the start.
type replay struct {
	client     []byte
	next, last uint64
	end        bool      // only the end mark is left
	moved      time.Time // when the client last took something; zero before its first turn
}

// server answers replay requests. Unlike vLLM's it never drops an answer: what a client's queue cannot take waits in
// the ring, while the other clients and the live socket go on.
type server struct {
	z       *ZMQ
	router  *zmq4.Socket
	replays []*replay
	burst   []step
}

// serve owns the ROUTER socket until its context ends.
func (z *ZMQ) serve(router *zmq4.Socket) error {
	s := server{z: z, router: router, burst: make([]step, 0, replayBurst)}
	poller := zmq4.NewPoller()
	poller.Add(router, zmq4.POLLIN)
	wait := time.Duration(-1) // for ever
	for {
		polled, err := poller.Poll(wait)
		if err == nil && len(polled) > 0 {
			err = s.receive()
		}
		var moved bool
		if err == nil {
			moved, err = s.advance()
		}
		if err != nil {
			if zmq4.AsErrno(err) == zmq4.ETERM {
				err = nil
			} else {
				err = fmt.Errorf("serve replays: %w", err)
			}
			return errors.Join(err, router.Close())
		}
		switch {
		case len(s.replays) == 0:
			wait = -1
		case moved:
			wait = 0
		default:
			// The socket tells that some client has room, not which: so it is asked again after a while.
			wait = min(max(2*wait, shortestWait), longestWait)
		}
	}
}

// receive reads the requests that wait: client, an empty frame, and the first sequence wanted, 8 bytes big-endian.
func (s *server) receive() error {
	for range replayBurst {
		frames, n, err := s.request()
		switch {
		case zmq4.AsErrno(err) == zmq4.Errno(syscall.EAGAIN):
			return nil
		case err != nil:
			return err
		case n != 3 || len(frames[1]) != 0 || len(frames[2]) != 8:
			s.z.malformed.Add(1)
			s.z.log.Debug("ignored a replay request", "frames", n)
			continue
		case len(s.replays) == maxRequests:
			s.z.malformed.Add(1)
			s.z.log.Warn("ignored a replay request: too many wait", "waiting", maxRequests)
			continue
		}
		first := binary.BigEndian.Uint64(frames[2])
		last, ok := s.z.ring.last()
		s.replays = append(s.replays, &replay{
			client: frames[0], next: first, last: last, end: !ok || first > last,
		})
	}
	return nil
}

// request reads one message and returns its first frames and how many it has.
func (s *server) request() (frames [3][]byte, n int, err error) {
	for more := true; more; n++ {
		frame, err := s.router.RecvBytes(zmq4.DONTWAIT)
		if err != nil {
			return frames, n, err
		}
		if n < len(frames) {
			frames[n] = frame
		}
		if more, err = s.router.GetRcvmore(); err != nil {
			return frames, n, err
		}
	}
	return frames, n, nil
}

// advance gives each of the first replays a turn and reports whether one of them moved. A client's second replay waits
// for its first.
func (s *server) advance() (moved bool, err error) {
	now := time.Now()
	served := 0
	for i, r := range s.replays {
		if served == maxReplays {
			break
		}
		sameClient := func(e *replay) bool { return e != nil && bytes.Equal(e.client, r.client) }
		if slices.ContainsFunc(s.replays[:i], sameClient) {
			continue
		}
		served++
		if r.moved.IsZero() {
			r.moved = now
		}
		sent, done, err := s.turn(r)
		if sent > 0 {
			moved, r.moved = true, now
		}
		errno := zmq4.AsErrno(err)
		full := errno == zmq4.Errno(syscall.EAGAIN)
		switch {
		case done:
			s.z.replays.Add(1)
			s.replays[i] = nil
		case err == nil, full && now.Sub(r.moved) < s.z.cfg.ReplayStall:
		case full, errno == zmq4.EHOSTUNREACH:
			s.z.abandoned.Add(1)
			s.z.log.Warn("gave up a replay: its client left or takes nothing", "next_seq", r.next)
			s.replays[i] = nil
		default:
			return moved, err
		}
	}
	s.replays = slices.DeleteFunc(s.replays, func(r *replay) bool { return r == nil })
	return moved, nil
}

// turn sends some of a replay, and its end mark when nothing else is left. It returns how many messages were taken.
func (s *server) turn(r *replay) (sent int, done bool, err error) {
	if !r.end {
		s.burst = s.z.ring.from(s.burst[:0], r.next, r.last)
		for _, st := range s.burst {
			err := sendFrames(s.router, zmq4.DONTWAIT, r.client, nil, s.z.topic, seqFrame(st.seq), st.payload)
			if err != nil {
				return sent, false, err
			}
			sent++
			s.z.replayed.Add(1)
			r.next = st.seq + 1
		}
		if len(s.burst) == cap(s.burst) {
			return sent, false, nil
		}
		r.end = true
	}
	if err := sendFrames(s.router, zmq4.DONTWAIT, r.client, nil, nil, seqFrame(endSeq), nil); err != nil {
		return sent, false, err
	}
	return sent + 1, true, nil
}
