package subscriber

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"time"

	"github.com/zeebo/xxh3"

	"kvstrata/event"
	"kvstrata/subscriber/recovery"
)

// pull asks TensorRT-LLM's server for the events that it has buffered, again and again. The server forgets what it has handed
// out, so that nobody else may ask it, and what an answer on its way lost is lost.
type pull struct {
	url    string
	client *http.Client
	next   time.Time // of asking
	up     bool
	failed string // why the last answer was none
	inputs []input
}

const (
	pullEvery   = 100 * time.Millisecond
	pullRetry   = 2 * time.Second // after an answer that was none
	pullTimeout = 5 * time.Second
	maxPulled   = 64 << 20 // bytes of an answer
)

func newPull(url string) *pull {
	return &pull{url: url, client: &http.Client{
		Timeout: pullTimeout,
		// Events are taken from who was named, and from nobody that it names.
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}}
}

// ask is never called: a buffer that is pulled has no replay.
func (p *pull) ask(event.Seq, bool) error {
	return fmt.Errorf("ask %s for a replay: it has none", p.url)
}

func (p *pull) current(*input) bool { return true }

func (p *pull) refusal() string { return p.failed }

func (p *pull) close() { p.client.CloseIdleConnections() }

// poll asks when it is time to. An answer that is under way when ctx ends is lost.
func (p *pull) poll(ctx context.Context, timeout time.Duration) ([]input, error) {
	p.inputs = p.inputs[:0]
	if left := time.Until(p.next); left > 0 {
		wait(ctx, min(left, timeout))
		return nil, nil
	}
	p.next = time.Now().Add(pullEvery)
	events, err := p.fetch(ctx)
	if ctx.Err() != nil {
		return nil, nil // which says nothing of the server
	}
	if up := err == nil; up != p.up {
		p.up = up
		if up {
			p.inputs = append(p.inputs, input{kind: peerConnected})
		} else {
			p.inputs = append(p.inputs, input{kind: peerDisconnected})
		}
	}
	p.failed = ""
	if err != nil {
		p.failed, p.next = err.Error(), time.Now().Add(pullRetry)
		return p.inputs, nil
	}
	for _, raw := range events {
		p.inputs = append(p.inputs, jsonInput(raw))
	}
	return p.inputs, nil
}

// jsonInput is the live frame of an event that carries its number, a stray when it does not.
func jsonInput(raw []byte) input {
	var head struct {
		ID *event.Seq `json:"event_id"`
	}
	if err := json.Unmarshal(raw, &head); err != nil || head.ID == nil {
		return input{kind: strayFrame}
	}
	return input{kind: liveFrame, frame: recovery.Frame{Seq: *head.ID, Payload: xxh3.Hash(raw), Data: raw}}
}

func (p *pull) fetch(ctx context.Context) ([]json.RawMessage, error) {
	ctx, cancel := context.WithTimeout(ctx, pullTimeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, p.url, nil)
	if err != nil {
		return nil, err
	}
	resp, err := p.client.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("answers %s", resp.Status)
	}
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxPulled+1))
	if err != nil {
		return nil, err
	}
	if len(body) > maxPulled {
		return nil, fmt.Errorf("answers more than %d bytes", maxPulled)
	}
	if len(bytes.TrimSpace(body)) == 0 {
		return nil, nil
	}
	var events []json.RawMessage
	if err := json.Unmarshal(body, &events); err != nil {
		return nil, fmt.Errorf("answers no array of events: %w", err)
	}
	return events, nil
}
