package embedded

import (
	"bytes"
	"log/slog"
	"sync"
	"time"
)

const (
	maxLine   = 1 << 10 // bytes of one line that are kept
	maxLines  = 100     // lines in relaySpan that are logged
	relaySpan = 10 * time.Second
)

// relay logs what the child writes to stderr, line by line, no more of it than a log can bear.
type relay struct {
	log *slog.Logger

	mu      sync.Mutex
	line    []byte
	cut     bool // the line goes on, past what is kept of it
	last    string
	since   time.Time
	logged  int
	dropped int
}

func newRelay(log *slog.Logger) *relay { return &relay{log: log} }

// Write never fails, and never keeps more than a line.
func (r *relay) Write(p []byte) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for rest := p; len(rest) > 0; {
		text, after, ended := bytes.Cut(rest, []byte("\n"))
		rest = after
		if room := maxLine - len(r.line); len(text) > room {
			text, r.cut = text[:room], true
		}
		r.line = append(r.line, text...)
		if ended {
			r.flush()
		}
	}
	return len(p), nil
}

// end logs a last line that nothing ended.
func (r *relay) end() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.flush()
	r.tellDropped()
}

func (r *relay) lastLine() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.last
}

func (r *relay) flush() {
	if len(r.line) == 0 {
		return
	}
	r.last = string(bytes.ToValidUTF8(r.line, []byte("?")))
	if r.cut {
		r.last += "…"
	}
	r.line, r.cut = r.line[:0], false
	if now := time.Now(); now.Sub(r.since) > relaySpan {
		r.tellDropped()
		r.since, r.logged = now, 0
	}
	if r.logged++; r.logged > maxLines {
		r.dropped++
		return
	}
	r.log.Info("history engine says", "line", r.last)
}

func (r *relay) tellDropped() {
	if r.dropped > 0 {
		r.log.Info("history engine says more than is logged", "lines_dropped", r.dropped)
		r.dropped = 0
	}
}
