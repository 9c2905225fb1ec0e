package sim

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"strconv"
	"time"
)

// traceBlock is how many tokens a hash id of Mooncake's traces stands for.
const traceBlock = 512

// Bounds of a trace, against input that promises more than it holds. The longest request published has 191,378 tokens.
const (
	maxTraceTokens = 1 << 24
	maxTraceLine   = 1 << 20 // bytes
)

// TraceRequest is one line of a trace in the form that the Mooncake project published with its FAST'25 paper:
//
//	{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, …]}
type TraceRequest struct {
	Timestamp    int64    `json:"timestamp"`     // ms since the start of the trace
	InputLength  int      `json:"input_length"`  // tokens of the prompt
	OutputLength int      `json:"output_length"` // tokens generated
	HashIDs      []uint64 `json:"hash_ids"`      // each names 512 tokens and all before them; the last what remains
}

// Prompt returns the request's tokens, which the trace does not hold: of hash id i, min(512, input_length − 512·i) of
// them, each a function of the id and the token's offset in it. Equal ids give equal tokens, and so equal blocks.
func (t *TraceRequest) Prompt() []uint32 {
	prompt := make([]uint32, 0, t.InputLength)
	for i, id := range t.HashIDs {
		prompt = appendTokens(prompt, id, 0, min(traceBlock, t.InputLength-traceBlock*i), 0)
	}
	return prompt
}

// check returns what makes the request impossible, as a sentence without a subject; empty when nothing does.
func (t *TraceRequest) check() string {
	want := (t.InputLength + traceBlock - 1) / traceBlock
	switch {
	case t.Timestamp < 0 || t.Timestamp > int64(1<<62)/int64(time.Millisecond):
		return fmt.Sprintf("timestamp %d: want milliseconds from 0 on", t.Timestamp)
	case t.InputLength < 1 || t.InputLength > maxTraceTokens:
		return fmt.Sprintf("input_length %d: want 1 to %d tokens", t.InputLength, maxTraceTokens)
	case t.OutputLength < 0 || t.OutputLength > maxTraceTokens:
		return fmt.Sprintf("output_length %d: want 0 to %d tokens", t.OutputLength, maxTraceTokens)
	case len(t.HashIDs) != want:
		return fmt.Sprintf("hash_ids: want %d for input_length %d, have %d", want, t.InputLength, len(t.HashIDs))
	}
	return ""
}

// TraceError says what is wrong with which line of a trace.
type TraceError struct {
	Line   int // from 1 on
	Reason string
}

func (e *TraceError) Error() string { return fmt.Sprintf("trace line %d: %s", e.Line, e.Reason) }

// TraceReader reads a trace line by line; it holds one line at a time. Not safe for concurrent use.
type TraceReader struct {
	in   *bufio.Reader
	line int
	long []byte // a line longer than the reader's buffer
}

// NewTraceReader returns a reader of the trace r.
func NewTraceReader(r io.Reader) *TraceReader { return &TraceReader{in: bufio.NewReaderSize(r, 1<<16)} }

// Next returns the next request, io.EOF after the last, or a [*TraceError] for a line that is not a request; the reader
// is of no use after an error. Empty lines are passed over.
func (r *TraceReader) Next() (TraceRequest, error) {
	for {
		line, err := r.readLine()
		if err != nil {
			return TraceRequest{}, err
		}
		if line = bytes.TrimSpace(line); len(line) > 0 {
			return r.parse(line)
		}
	}
}

// readLine returns the next line, valid until the next call.
func (r *TraceReader) readLine() ([]byte, error) {
	r.line++
	r.long = r.long[:0]
	for {
		part, err := r.in.ReadSlice('\n')
		switch {
		case len(r.long)+len(part) > maxTraceLine:
			return nil, &TraceError{Line: r.line, Reason: fmt.Sprintf("longer than %d bytes", maxTraceLine)}
		case errors.Is(err, bufio.ErrBufferFull):
			r.long = append(r.long, part...)
		case err == nil, errors.Is(err, io.EOF) && len(r.long)+len(part) > 0:
			if len(r.long) > 0 {
				r.long = append(r.long, part...)
				part = r.long
			}
			return part, nil
		case errors.Is(err, io.EOF):
			return nil, io.EOF
		default:
			return nil, fmt.Errorf("read trace line %d: %w", r.line, err)
		}
	}
}

// parse reads one line. Pointers tell what is missing or null from what is 0.
func (r *TraceReader) parse(line []byte) (TraceRequest, error) {
	var raw struct {
		Timestamp    *int64    `json:"timestamp"`
		InputLength  *int      `json:"input_length"`
		OutputLength *int      `json:"output_length"`
		HashIDs      []*uint64 `json:"hash_ids"`
	}
	fail := func(reason string) (TraceRequest, error) {
		return TraceRequest{}, &TraceError{Line: r.line, Reason: reason}
	}
	if err := json.Unmarshal(line, &raw); err != nil {
		return fail(err.Error())
	}
	switch {
	case raw.Timestamp == nil:
		return fail("timestamp: is missing")
	case raw.InputLength == nil:
		return fail("input_length: is missing")
	case raw.OutputLength == nil:
		return fail("output_length: is missing")
	case raw.HashIDs == nil:
		return fail("hash_ids: is missing")
	}
	t := TraceRequest{
		Timestamp: *raw.Timestamp, InputLength: *raw.InputLength, OutputLength: *raw.OutputLength,
		HashIDs: make([]uint64, len(raw.HashIDs)),
	}
	for i, id := range raw.HashIDs {
		if id == nil {
			return fail("hash_ids: holds null")
		}
		t.HashIDs[i] = *id
	}
	if reason := t.check(); reason != "" {
		return fail(reason)
	}
	return t, nil
}

// Arrivals yields the requests that are left as what a [Fleet] takes, up to the first error. They are named by their
// lines.
func (r *TraceReader) Arrivals() iter.Seq2[Arrival, error] {
	return func(yield func(Arrival, error) bool) {
		for {
			t, err := r.Next()
			if errors.Is(err, io.EOF) {
				return
			}
			if err != nil {
				yield(Arrival{}, err)
				return
			}
			a := Arrival{
				At:      time.Duration(t.Timestamp) * time.Millisecond,
				Request: Request{ID: "line-" + strconv.Itoa(r.line), Prompt: t.Prompt(), Output: t.OutputLength},
				HashIDs: t.HashIDs,
			}
			if !yield(a, nil) {
				return
			}
		}
	}
}

// TraceWriter writes a trace that a [TraceReader] reads; each request is one write to the writer beneath.
type TraceWriter struct {
	out  io.Writer
	line int
}

// NewTraceWriter returns a writer of a trace to w.
func NewTraceWriter(w io.Writer) *TraceWriter { return &TraceWriter{out: w} }

// Write appends a request, or refuses an impossible one with a [*TraceError].
func (w *TraceWriter) Write(t *TraceRequest) error {
	w.line++
	if reason := t.check(); reason != "" {
		return &TraceError{Line: w.line, Reason: reason}
	}
	line, err := json.Marshal(t)
	if err != nil {
		return fmt.Errorf("encode trace line %d: %w", w.line, err)
	}
	if _, err := w.out.Write(append(line, '\n')); err != nil {
		return fmt.Errorf("write trace line %d: %w", w.line, err)
	}
	return nil
}
