package subscriber

import (
	"bufio"
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
type recording struct {
	path   string
	file   *os.File
	in     *bufio.Reader
	line   []byte // that has no end yet
	rank   uint32
	worker string // empty until a line has named it
	began  bool
	inputs []input
}

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

// ask is never called: a recording is its own replay.
func (r *recording) ask(event.Seq, bool) error {
	return fmt.Errorf("ask %s for a replay: it has none", r.path)
}

func (r *recording) current(*input) bool { return true }

func (r *recording) refusal() string { return "" }

func (r *recording) close() { _ = r.file.Close() } // it was only read

// poll returns the next lines; at the end of the file it waits for more.
func (r *recording) poll(timeout time.Duration) ([]input, error) {
	r.inputs = r.inputs[:0]
	if !r.began {
		r.began = true
		r.inputs = append(r.inputs, input{kind: peerConnected})
	}
	for len(r.inputs) < drainMost {
		part, err := r.in.ReadSlice('\n')
		if r.line = append(r.line, part...); len(r.line) > maxLine {
			return nil, fmt.Errorf("read %s: %w", r.path, errLongLine)
		}
		switch {
		case errors.Is(err, bufio.ErrBufferFull):
			continue
		case errors.Is(err, io.EOF):
			if len(r.inputs) == 0 {
				time.Sleep(timeout)
			}
			return r.inputs, nil
		case err != nil:
			return nil, fmt.Errorf("read %s: %w", r.path, err)
		}
		r.take(r.line)
		r.line = nil
	}
	return r.inputs, nil
}

// take turns a line into an input, if it is of the source.
func (r *recording) take(line []byte) {
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
	case err != nil || head.Event.Worker == "" || id.ID == nil:
		r.inputs = append(r.inputs, input{kind: strayFrame})
		return
	case id.Rank != r.rank:
		return
	case r.worker == "":
		r.worker = head.Event.Worker.String()
	case r.worker != head.Event.Worker.String():
		return
	}
	line = line[:len(line)-1]
	r.inputs = append(r.inputs, input{kind: liveFrame, frame: recovery.Frame{Seq: *id.ID, Payload: xxh3.Hash(line), Data: line}})
}
