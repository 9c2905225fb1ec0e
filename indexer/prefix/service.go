package prefix

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"

	"kvstrata/event"
)

// Bounds of requests, over HTTP and over gRPC.
const (
	maxPrompt = 1 << 20 // tokens, or prefix hashes
	maxBatch  = 256     // lookups
)

// BatchRequest is several lookups.
type BatchRequest struct {
	Requests []Request `json:"requests"`
}

// Validate reports what is wrong with the batch as a whole.
func (r *BatchRequest) Validate() error {
	if n := len(r.Requests); n == 0 || n > maxBatch {
		return fmt.Errorf("requests: %d of them; want 1 to %d", n, maxBatch)
	}
	sum := 0
	for i := range r.Requests {
		sum += len(r.Requests[i].Tokens) + len(r.Requests[i].Hashes)
	}
	if sum > maxPrompt {
		return fmt.Errorf("requests: %d tokens and hashes in all; want %d at most", sum, maxPrompt)
	}
	return nil
}

// BatchResult is the answer to one request, or why there is none.
type BatchResult struct {
	Answer *Answer `json:"answer,omitempty"`
	Status int     `json:"status,omitempty"` // of HTTP, with Error
	Error  string  `json:"error,omitempty"`

	err error
}

// LookupBatch answers several requests, in order, each as Lookup does.
func (x *Index) LookupBatch(ctx context.Context, r *BatchRequest) ([]BatchResult, error) {
	if err := r.Validate(); err != nil {
		return nil, err
	}
	results := make([]BatchResult, len(r.Requests))
	for i := range r.Requests {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		a, err := x.Lookup(&r.Requests[i])
		if err != nil {
			results[i] = BatchResult{Status: statusOf(err), Error: err.Error(), err: err}
			continue
		}
		results[i].Answer = a
	}
	return results, nil
}

// SourcesNamed lists one source by its id, or all where the id is empty.
func (x *Index) SourcesNamed(id string) ([]SourceInfo, error) {
	if id == "" {
		return x.Sources(), nil
	}
	x.mu.RLock()
	defer x.mu.RUnlock()
	s, err := x.sourceNamed(id)
	if err != nil {
		return nil, err
	}
	return []SourceInfo{x.info(s, x.cfg.Clock())}, nil
}

// statusOf returns the HTTP status of an error of this package.
func statusOf(err error) int {
	switch {
	case errors.Is(err, ErrUnknownModel), errors.Is(err, ErrUnknownSource):
		return http.StatusNotFound
	case errors.Is(err, ErrListingEnded):
		return http.StatusConflict
	case errors.Is(err, ErrFull), errors.Is(err, ErrFellBehind), errors.Is(err, context.DeadlineExceeded), errors.Is(err, context.Canceled):
		return http.StatusServiceUnavailable
	default:
		return http.StatusBadRequest
	}
}

// mountService adds what the index answers beside single lookups.
func (x *Index) mountService(mux *http.ServeMux) {
	mux.HandleFunc("POST /v1/lookup/batch", x.serveBatch)
	mux.HandleFunc("POST /v1/lookup/explain", x.serveExplain)
	mux.HandleFunc("GET /v1/changes", x.serveChanges)
	mux.HandleFunc("POST /v1/changes", x.serveChanges)
	for path, methods := range map[string]string{
		"/v1/lookup/batch": "POST", "/v1/lookup/explain": "POST", "/v1/changes": "GET, HEAD, POST",
	} {
		mux.HandleFunc(path, allow(methods))
	}
}

func (x *Index) serveBatch(w http.ResponseWriter, r *http.Request) {
	var req BatchRequest
	if !ReadRequest(w, r, &req, "requests, each as for /v1/lookup") {
		return
	}
	results, err := x.LookupBatch(r.Context(), &req)
	if err != nil {
		writeError(w, statusOf(err), err)
		return
	}
	writeJSON(w, http.StatusOK, map[string]any{"answers": results})
}

func (x *Index) serveExplain(w http.ResponseWriter, r *http.Request) {
	var req ExplainRequest
	if !ReadRequest(w, r, &req, "model and token_ids or prefix_hashes, and tier or device") {
		return
	}
	explanation, err := x.Explain(&req)
	if err != nil {
		writeError(w, statusOf(err), err)
		return
	}
	writeJSON(w, http.StatusOK, explanation)
}

// asksForPage reports whether a listing is wanted page by page.
func asksForPage(r *http.Request) bool {
	q := r.URL.Query()
	return q.Has("limit") || q.Has("after")
}

func (x *Index) servePage(w http.ResponseWriter, r *http.Request) {
	q := r.URL.Query()
	req := PageRequest{Source: q.Get("source"), After: q.Get("after")}
	if text := q.Get("limit"); text != "" {
		n, err := strconv.Atoi(text)
		if err != nil || n < 1 || n > maxPage {
			writeError(w, http.StatusBadRequest, fmt.Errorf("limit %q: want 1 to %d", text, maxPage))
			return
		}
		req.Limit = n
	}
	page, err := x.Page(&req)
	if err != nil {
		writeError(w, statusOf(err), err)
		return
	}
	writeJSON(w, http.StatusOK, page)
}

// ChangeLine is a change as a line of GET /v1/changes. The last line of a stream that can't go on has an error alone.
type ChangeLine struct {
	Kind      ChangeKind        `json:"kind"`
	Source    string            `json:"source"`
	Epoch     event.Epoch       `json:"epoch"`
	Seq       event.Seq         `json:"seq"`
	Hash      *event.BlockHash  `json:"hash,omitempty"`
	Prefix    *event.PrefixHash `json:"prefix,omitempty"`
	Tier      *event.Tier       `json:"tier,omitempty"`
	Group     *uint32           `json:"group,omitempty"`
	BlockSize uint32            `json:"block_size,omitempty"`
	State     string            `json:"state,omitempty"`
	Reason    string            `json:"reason,omitempty"`
}

// HasBlock reports whether a change is one of a block.
func (c *Change) HasBlock() bool { return c.Kind == Held || c.Kind == Rose || c.Kind == Fell }

// HasState reports whether a change tells a source's state.
func (c *Change) HasState() bool { return c.Kind == Begin || c.Kind == StateIsNew }

// ids remembers the ids of sources: they are long to write, and stand in every change.
type ids map[*event.Source]string

func (i ids) of(s *event.Source) string {
	id, ok := i[s]
	if !ok {
		id = s.Tokens()
		i[s] = id
	}
	return id
}

// line returns the change as a line; it shares c's memory.
func (c *Change) line(known ids) ChangeLine {
	l := ChangeLine{Kind: c.Kind, Source: known.of(c.Source), Epoch: c.Epoch, Seq: c.Seq}
	if c.HasBlock() {
		l.Hash, l.Tier, l.Group, l.BlockSize = &c.Block.Hash, &c.Block.Tier, &c.Block.Group, c.Block.BlockSize
		if c.Block.Prefix != 0 {
			l.Prefix = &c.Block.Prefix
		}
	}
	if c.HasState() {
		l.State, l.Reason = c.State.String(), c.Reason
	}
	return l
}

// watchRequest reads what a subscriber over HTTP wants.
func watchRequest(w http.ResponseWriter, r *http.Request) (*WatchRequest, bool) {
	req := new(WatchRequest)
	if r.Method == http.MethodPost {
		return req, ReadRequest(w, r, req, "source, or model with or without token_ids or prefix_hashes")
	}
	q := r.URL.Query()
	req.Source, req.Model, req.Cluster = q.Get("source"), q.Get("model"), q.Get("cluster")
	for _, text := range q["prefix"] {
		for one := range strings.SplitSeq(text, ",") {
			var h event.PrefixHash
			if err := h.UnmarshalText([]byte(one)); err != nil {
				writeError(w, http.StatusBadRequest, err)
				return nil, false
			}
			req.Hashes = append(req.Hashes, h)
		}
	}
	if text := q.Get("block_size"); text != "" {
		n, err := strconv.ParseUint(text, 10, 32)
		if err != nil {
			writeError(w, http.StatusBadRequest, fmt.Errorf("block_size %q: want a number", text))
			return nil, false
		}
		req.BlockSize = uint32(n)
	}
	return req, true
}

// takeTime is how long a subscriber over HTTP may take nothing.
const takeTime = 30 * time.Second

// serveChanges streams changes, a JSON line each, until the client goes, or falls behind.
func (x *Index) serveChanges(w http.ResponseWriter, r *http.Request) {
	req, ok := watchRequest(w, r)
	if !ok {
		return
	}
	sub, err := x.Subscribe(req)
	if err != nil {
		if errors.Is(err, ErrFull) {
			w.Header().Set("Retry-After", "10")
		}
		writeError(w, statusOf(err), err)
		return
	}
	defer sub.Close()
	w.Header().Set("Content-Type", "application/x-ndjson")
	w.Header().Set("Cache-Control", "no-store")
	if r.Method == http.MethodHead {
		return
	}
	// The stream has no end, so the server's limits for whole requests do not fit. Errors are of writers that have no deadlines.
	out := http.NewResponseController(w)
	_ = out.SetReadDeadline(time.Time{})
	enc, known := json.NewEncoder(w), make(ids)
	for {
		changes, err := sub.Next(r.Context())
		_ = out.SetWriteDeadline(time.Now().Add(takeTime))
		if err != nil {
			if r.Context().Err() == nil {
				_ = enc.Encode(map[string]string{"error": err.Error()}) // it ends either way
			}
			return
		}
		for i := range changes {
			if enc.Encode(changes[i].line(known)) != nil {
				return // the client went away
			}
		}
		if out.Flush() != nil {
			return
		}
	}
}
