package subscriber

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/zeebo/xxh3"

	"kvstrata/event"
	"kvstrata/subscriber/recovery"
)

// HeardKind is what a line of a recording tells.
type HeardKind uint8

// The kinds.
const (
	HeardFrame        HeardKind = iota // a batch of the live socket
	HeardReplay                        // a batch of a replay
	HeardReplayEnd                     // the end of a replay
	HeardConnected                     // the live socket has a peer
	HeardDisconnected                  // it lost it
)

// RecordingForm is how a recording is written.
type RecordingForm uint8

// The forms.
const (
	NoRecording RecordingForm = iota
	DynamoForm                // Dynamo's recorder: {"timestamp": ms since it began, "event": a router event}
	FrameForm                 // raw frames: {"frames": ["topic", "sequence", "payload"], "kind", "received"}, the frames in hexadecimal
	EventForm                 // JSON events with numbers of their own, as TensorRT-LLM's buffer has them: {"event_id", "data"}
)

var recordingForms = []string{NoRecording: "unknown", DynamoForm: "Dynamo recorder", FrameForm: "raw frames", EventForm: "JSON events"}

func (f RecordingForm) String() string { return recordingForms[f] }

// Heard is one line of a recording.
type Heard struct {
	Form   RecordingForm
	Kind   HeardKind
	Worker string        // Dynamo's worker_id
	Rank   uint32        // of the worker
	Since  time.Duration // since Dynamo's recorder began
	At     time.Time     // when it was received, or else by the engine's clock; zero: the line does not say
	Frame  recovery.Frame
}

// errNoLine says that a line is of no recording.
var errNoLine = errors.New(`no line of a recording: want {"timestamp", "event"} as Dynamo's recorder writes, {"frames": […]}, or {"event_id", "data"}`)

// heardLine is a line of any form.
type heardLine struct {
	Timestamp *uint64
	Event     json.RawMessage
	Frames    []string
	Kind      string
	Received  string
	ID        *event.Seq `json:"event_id"`
	Rank      uint32     `json:"dp_rank"`
	Data      json.RawMessage
}

// maxRecorded bounds how long a recorder runs: what is beyond is no time.
const maxRecorded = 10 * 365 * 24 * time.Hour

// ReadHeard reads a line. The frame's data are the line, or memory of its own.
func ReadHeard(line []byte) (h Heard, err error) {
	var l heardLine
	if err := json.Unmarshal(line, &l); err != nil {
		return h, fmt.Errorf("not a JSON object of a recording: %w", err)
	}
	switch {
	case l.Timestamp != nil && l.Event != nil:
		return readDynamo(line, *l.Timestamp)
	case l.Frames != nil || l.Kind != "":
		return readFrames(&l)
	case l.ID != nil && len(l.Data) > 0 && !bytes.Equal(l.Data, []byte("null")):
		h = Heard{Form: EventForm, Rank: l.Rank, Frame: recovery.Frame{Seq: *l.ID, Payload: xxh3.Hash(line), Data: line}}
		return h, nil
	default:
		return h, errNoLine
	}
}

func readDynamo(line []byte, timestamp uint64) (h Heard, err error) {
	head, err := readDynamoHead(line)
	if err != nil {
		return h, err
	}
	if timestamp > uint64(maxRecorded.Milliseconds()) {
		return h, fmt.Errorf("timestamp %d: want milliseconds since the recorder began", timestamp)
	}
	return Heard{
		Form: DynamoForm, Worker: head.worker, Rank: head.rank, Since: time.Duration(timestamp) * time.Millisecond,
		Frame: recovery.Frame{Seq: head.id, Payload: xxh3.Hash(line), Data: line},
	}, nil
}

func readFrames(l *heardLine) (h Heard, err error) {
	h.Form = FrameForm
	if l.Received != "" {
		if h.At, err = time.Parse(time.RFC3339Nano, l.Received); err != nil {
			return h, fmt.Errorf("received: %w", err)
		}
	}
	switch l.Kind {
	case "connected":
		h.Kind = HeardConnected
		return h, nil
	case "disconnected":
		h.Kind = HeardDisconnected
		return h, nil
	case "", "live":
		if len(l.Frames) != 3 {
			return h, fmt.Errorf("%d frames: want topic, sequence and payload", len(l.Frames))
		}
	case "end":
		h.Kind = HeardReplayEnd
		return h, nil
	case "replay":
		h.Kind = HeardReplay
		if len(l.Frames) < 2 {
			return h, fmt.Errorf("%d frames of a replay: want sequence and payload at least", len(l.Frames))
		}
	default:
		return h, fmt.Errorf("kind %.32q: want live, replay, end, connected or disconnected", l.Kind)
	}
	raw := make([][]byte, 2)
	for i, text := range l.Frames[len(l.Frames)-2:] {
		if raw[i], err = hex.DecodeString(strings.TrimSpace(text)); err != nil {
			return h, fmt.Errorf("frame: %w", err)
		}
	}
	seq, payload := raw[0], raw[1]
	if len(seq) != 8 {
		return h, fmt.Errorf("a sequence of %d bytes: want 8", len(seq))
	}
	if h.Frame = frame(seq, payload); h.Kind == HeardReplay && (len(payload) == 0 || h.Frame.Seq == 1<<64-1) {
		h.Kind = HeardReplayEnd
	}
	if h.At.IsZero() && h.Frame.Time != 0 {
		h.At = h.Frame.Time.Std()
	}
	return h, nil
}

// dynamoHead is what tells whose an event of a recorder's line is.
type dynamoHead struct {
	worker string
	rank   uint32
	id     event.Seq
}

// errNoEvent says that a line is none of the recorder's.
var errNoEvent = errors.New("no event of a worker")

func readDynamoHead(line []byte) (h dynamoHead, err error) {
	var head struct {
		Event struct {
			Worker json.Number `json:"worker_id"`
			Event  struct {
				ID   *event.Seq `json:"event_id"`
				Rank uint32     `json:"dp_rank"`
			} `json:"event"`
		} `json:"event"`
	}
	if err := json.Unmarshal(line, &head); err != nil {
		return h, err
	}
	id := &head.Event.Event
	if head.Event.Worker == "" || id.ID == nil {
		return h, errNoEvent
	}
	return dynamoHead{head.Event.Worker.String(), id.Rank, *id.ID}, nil
}
