package subscriber

import (
	"bufio"
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/pebbe/zmq4"

	"kvstrata/event"
)

// frameLine is a line of raw frames, as [ReadHeard] reads it.
type frameLine struct {
	Kind     string   `json:"kind"`
	Frames   []string `json:"frames,omitempty"`
	Received string   `json:"received"`
}

// Capture writes what an engine's sockets bring, a line a frame, until ctx ends or so many batches of the live socket came; 0 = without
// end. It asks for a replay once, where the engine has one. Everything that the engine sends is written, prompts' tokens too. It returns
// how many batches came.
func Capture(ctx context.Context, cfg EngineConfig, out io.Writer, most int) (batches int, err error) {
	zctx, err := zmq4.NewContext()
	if err != nil {
		return 0, fmt.Errorf("make ZeroMQ context: %w", err)
	}
	defer func() { err = errors.Join(err, zctx.Term()) }()
	f, err := openFeed(zctx, cfg)
	if err != nil {
		return 0, err
	}
	defer f.close()
	w := bufio.NewWriterSize(out, 1<<20)
	defer func() { err = errors.Join(err, w.Flush()) }()
	asked := cfg.Replay == ""
	for ctx.Err() == nil && (most == 0 || batches < most) {
		inputs, err := f.poll(ctx, 50*time.Millisecond)
		if err != nil {
			return batches, err
		}
		for i := range inputs {
			line, ok := captured(&inputs[i], time.Now())
			if !ok {
				continue
			}
			text, err := json.Marshal(line)
			if err != nil {
				return batches, err
			}
			if _, err := w.Write(append(text, '\n')); err != nil {
				return batches, err
			}
			switch inputs[i].kind {
			case liveFrame:
				batches++
			case peerConnected:
				if !asked {
					asked = true
					if err := f.ask(0, false); err != nil {
						return batches, err
					}
				}
			}
		}
		if len(inputs) == 0 { // nothing presses
			if err := w.Flush(); err != nil {
				return batches, err
			}
		}
	}
	return batches, nil
}

// captured is an input as a line; strays and refusals are none.
func captured(in *input, now time.Time) (line frameLine, ok bool) {
	line = frameLine{Received: now.UTC().Format(time.RFC3339Nano)}
	frames := func(seq event.Seq, data []byte) []string {
		return []string{"", fmt.Sprintf("%016x", uint64(seq)), hex.EncodeToString(data)}
	}
	switch in.kind {
	case liveFrame:
		line.Kind, line.Frames = "live", frames(in.frame.Seq, in.frame.Data)
	case replayFrame:
		line.Kind, line.Frames = "replay", frames(in.frame.Seq, in.frame.Data)
	case replayEnd:
		line.Kind = "end"
	case peerConnected:
		line.Kind = "connected"
	case peerDisconnected:
		line.Kind = "disconnected"
	default:
		return line, false
	}
	return line, true
}
