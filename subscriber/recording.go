package subscriber

import (
	"bufio"
	"context"
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

// recording follows a file of Dynamo's recorder, a line an event: it is an engine whose replay buffer is the file. The lines of one
// worker's one rank are a source, those of others are passed over; of several lives in the file the last one is heard.
//
// Asked for a replay, it looks through the file for where the last life begins, answers with what that has, and goes on behind it.
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

	asks int // so far
	does doing
	from event.Seq // of the replay
	life life
}

// doing is what a recording is read for.
type doing uint8

const (
	following doing = iota // as live frames
	looking                // for the last life
	answering              // as a replay of it
)

// life is where a life begins in a recording, and its last line so far.
type life struct {
	begins  int64
	known   bool
	seq     event.Seq
	payload uint64
}

// another takes a frame that begins at an offset, and reports whether it begins a life: its number falls back.
func (l *life) another(f *recovery.Frame, at int64) bool {
	begins := !l.known || f.Seq < l.seq || f.Seq == l.seq && f.Payload != l.payload
	if begins {
		l.begins = at
	}
	l.known, l.seq, l.payload = true, f.Seq, f.Payload
	return begins
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

// ask begins an answer. What is still under way of an earlier one is dropped.
func (r *recording) ask(from event.Seq, _ bool) error {
	r.asks++
	r.does, r.from = looking, from
	at := r.life.begins
	r.life = life{}
	return r.seek(at)
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
	if !r.began {
		r.began = true
		r.inputs = append(r.inputs, input{kind: peerConnected})
		return r.inputs, nil
	}
	ended, err := r.read(r.take)
	switch {
	case err != nil || !ended:
	case r.does == looking:
		r.does = answering
		err = r.seek(r.life.begins)
		r.life = life{begins: r.life.begins}
	case r.does == answering:
		r.end()
	case len(r.inputs) == 0:
		wait(ctx, timeout)
	}
	return r.inputs, err
}

// end ends an answer.
func (r *recording) end() {
	r.does = following
	r.inputs = append(r.inputs, input{kind: replayEnd, asked: r.asks})
}

// wait waits until ctx ends, but no longer than a while.
func wait(ctx context.Context, during time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(during):
	}
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

// take turns a line into an input, if it is of the source and this is not the time to look only.
func (r *recording) take(line []byte) {
	frame, ours, err := r.frame(line)
	switch {
	case err != nil && r.does == following:
		r.inputs = append(r.inputs, input{kind: strayFrame})
		return
	case err != nil || !ours:
		return
	}
	known := r.life.known
	if r.life.another(&frame, r.at-int64(len(line))) && known && r.does == answering {
		r.end() // a life that began since; it is heard as an engine's would be
	}
	switch {
	case r.does == following:
		r.inputs = append(r.inputs, input{kind: liveFrame, frame: frame})
	case r.does == answering && frame.Seq >= r.from:
		r.inputs = append(r.inputs, input{kind: replayFrame, asked: r.asks, frame: frame})
	}
}

// frame reads a line, and reports whether it is of the source.
func (r *recording) frame(line []byte) (f recovery.Frame, ours bool, err error) {
	head, err := readDynamoHead(line)
	switch {
	case err != nil:
		return f, false, err
	case head.rank != r.rank:
		return f, false, nil
	case r.worker == "":
		r.worker = head.worker
	case r.worker != head.worker:
		return f, false, nil
	}
	line = line[:len(line)-1]
	return recovery.Frame{Seq: head.id, Payload: xxh3.Hash(line), Data: line}, true, nil
}
