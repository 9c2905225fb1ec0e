package subscriber

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/zeebo/xxh3"

	"kvstrata/event"
	"kvstrata/subscriber/recovery"
)

// recording follows a file of Dynamo's recorder, from its beginning: a line an event. The lines of one worker's one rank are a
// source; those of others are passed over.
//
// A recording is its own replay. Asked for a batch that is known from before, it looks for it in the last life that the file
// tells, answers with it, and goes on behind it. Of anything else the file has no more than comes in its order.
type recording struct {
	path   string
	file   *os.File
	in     *bufio.Reader
	at     int64  // offset behind the last whole line
	line   []byte // that has no end yet
	rank   uint32
	worker string // empty until a line has named it
	began  bool
	inputs []input

	asks  int // so far
	asked bool
	from  event.Seq
	told  bool    // live frames were: what is asked for from now on is not in the file
	past  history // what looking for a batch has found
}

// history is what the lines of a source say of its lives, as far as they were looked at.
type history struct {
	began bool
	life  int64 // offset of the last life
	last  recovery.Frame
	found bool
	frame recovery.Frame // of the last life, the first at or behind what is looked for
	at    int64          // where it begins
	next  int64          // and ends
}

// bounds of what one poll reads: whatever it finds, the clock is looked at in between.
const (
	maxLines     = drainMost
	maxLineBytes = 8 << 20
)

// recordingPatience is how long the answer of a recording may take: a file always comes to its end.
const recordingPatience = time.Hour

// maxLine bounds a line of a recording.
const maxLine = 64 << 20

// errLongLine ends a session: what follows can't be told apart.
var errLongLine = errors.New("a line of more than 64 MiB")

func newRecording(cfg EngineConfig) (*recording, error) {
	path := strings.TrimPrefix(cfg.Endpoint, "file://")
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("open recording: %w", err)
	}
	return &recording{path: path, file: f, in: bufio.NewReaderSize(f, 1<<20), rank: cfg.Source.Rank, worker: cfg.Worker}, nil
}

// ask notes what poll is to answer.
func (r *recording) ask(from event.Seq, _ bool) error {
	r.asks++
	r.asked, r.from, r.past = true, from, history{life: r.past.life}
	if !r.told && from > 0 {
		return r.seek(0)
	}
	return nil
}

// current reports whether an answer is to the last question.
func (r *recording) current(in *input) bool {
	return in.kind != replayFrame && in.kind != replayEnd || in.asked == r.asks
}

func (r *recording) refusal() string { return "" }

func (r *recording) close() { _ = r.file.Close() } // it was only read

func (r *recording) seek(at int64) error {
	if _, err := r.file.Seek(at, io.SeekStart); err != nil {
		return fmt.Errorf("go to %d in %s: %w", at, r.path, err)
	}
	r.in.Reset(r.file)
	r.at, r.line = at, nil
	return nil
}

// poll returns the next lines, or what answers a question; at the end of the file it waits for more.
func (r *recording) poll(ctx context.Context, timeout time.Duration) ([]input, error) {
	r.inputs = r.inputs[:0]
	switch {
	case !r.began:
		r.began = true
		r.inputs = append(r.inputs, input{kind: peerConnected})
		return r.inputs, nil
	case r.asked:
		return r.inputs, r.answer()
	}
	ended, err := r.read(r.take)
	if ended && len(r.inputs) == 0 {
		wait(ctx, timeout)
	}
	return r.inputs, err
}

// wait waits until ctx ends, but no longer than a while.
func wait(ctx context.Context, during time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(during):
	}
}

// answer works on what was asked for. No live frame comes with an answer, so that the file can still be gone back in.
func (r *recording) answer() error {
	switch {
	case r.told:
	case r.from == 0:
		if err := r.seek(r.past.life); err != nil {
			return err
		}
	default:
		ended, err := r.read(r.look)
		if err != nil || !ended {
			return err
		}
		if p := &r.past; p.found {
			r.inputs = append(r.inputs, input{kind: replayFrame, asked: r.asks, frame: p.frame})
			next := p.at
			if p.frame.Seq == r.from {
				next = p.next
			}
			if err := r.seek(next); err != nil {
				return err
			}
		}
	}
	r.asked = false
	r.inputs = append(r.inputs, input{kind: replayEnd, asked: r.asks})
	return nil
}

// read hands over whole lines, as many as one poll may read, and reports whether the file has no more.
func (r *recording) read(take func(line []byte)) (ended bool, err error) {
	bytes := 0
	for lines := 0; lines < maxLines && bytes < maxLineBytes; {
		part, err := r.in.ReadSlice('\n')
		bytes += len(part)
		if r.line = append(r.line, part...); len(r.line) > maxLine {
			return false, fmt.Errorf("read %s: %w", r.path, errLongLine)
		}
		switch {
		case errors.Is(err, bufio.ErrBufferFull):
			continue
		case errors.Is(err, io.EOF):
			return true, nil
		case err != nil:
			return false, fmt.Errorf("read %s: %w", r.path, err)
		}
		lines++
		r.at += int64(len(r.line))
		take(r.line)
		r.line = nil
	}
	return false, nil
}

// take turns a line into an input, if it is of the source.
func (r *recording) take(line []byte) {
	switch frame, ours, err := r.frame(line); {
	case err != nil:
		r.inputs = append(r.inputs, input{kind: strayFrame})
	case ours:
		r.told = true
		r.inputs = append(r.inputs, input{kind: liveFrame, frame: frame})
	}
}

// look notes where lives begin, and the batch that is looked for. Numbers that fall back begin a life.
func (r *recording) look(line []byte) {
	f, ours, err := r.frame(line)
	if err != nil || !ours {
		return
	}
	p, at := &r.past, r.at-int64(len(line))
	if !p.began || f.Seq < p.last.Seq || f.Seq == p.last.Seq && f.Payload != p.last.Payload {
		p.began, p.life, p.found = true, at, false
	}
	p.last = recovery.Frame{Seq: f.Seq, Payload: f.Payload}
	if !p.found && f.Seq >= r.from {
		p.found, p.frame, p.at, p.next = true, f, at, r.at
	}
}

// errNoEvent says that a line is none of the recorder's.
var errNoEvent = errors.New("no event of a worker")

// frame reads a line, and reports whether it is of the source.
func (r *recording) frame(line []byte) (f recovery.Frame, ours bool, err error) {
	var head struct {
		Event struct {
			Worker json.Number `json:"worker_id"`
			Event  struct {
				ID   *event.Seq `json:"event_id"`
				Rank uint32     `json:"dp_rank"`
			} `json:"event"`
		} `json:"event"`
	}
	id := &head.Event.Event
	switch err := json.Unmarshal(line, &head); {
	case err != nil:
		return f, false, err
	case head.Event.Worker == "" || id.ID == nil:
		return f, false, errNoEvent
	case id.Rank != r.rank:
		return f, false, nil
	case r.worker == "":
		r.worker = head.Event.Worker.String()
	case r.worker != head.Event.Worker.String():
		return f, false, nil
	}
	line = line[:len(line)-1]
	return recovery.Frame{Seq: *id.ID, Payload: xxh3.Hash(line), Data: line}, true, nil
}
