package subscriber

import (
	"context"
	"time"
)

// OpenRecording opens a recording. poll tells how many live frames came, and their bytes.
func OpenRecording(cfg EngineConfig) (poll func() (frames, bytes int, err error), closeFile func(), err error) {
	r, err := newRecording(cfg)
	if err != nil {
		return nil, nil, err
	}
	return func() (frames, bytes int, err error) {
		inputs, err := r.poll(context.Background(), time.Millisecond)
		for i := range inputs {
			if inputs[i].kind == liveFrame {
				frames++
				bytes += len(inputs[i].frame.Data)
			}
		}
		return frames, bytes, err
	}, r.close, nil
}
