package prefix

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strconv"

	"kvstrata/event"
)

// maxBody bounds a lookup's request: a million token ids and more.
const maxBody = 16 << 20

// Handler serves POST /v1/lookup, /v1/lookup/batch and /v1/lookup/explain, and GET /v1/sources, /v1/prefixes, /v1/resident and
// /v1/changes. Errors are JSON objects with a field error that says what to
// change.
func (x *Index) Handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("POST /v1/lookup", x.serveLookup)
	mux.HandleFunc("GET /v1/sources", x.serveSources)
	mux.HandleFunc("GET /v1/prefixes", x.servePrefixes)
	mux.HandleFunc("GET /v1/resident", x.serveResident)
	mux.HandleFunc("/v1/lookup", allow("POST"))
	for _, path := range []string{"/v1/sources", "/v1/prefixes", "/v1/resident"} {
		mux.HandleFunc(path, allow("GET, HEAD"))
	}
	x.mountService(mux)
	mux.HandleFunc("/", func(w http.ResponseWriter, _ *http.Request) {
		writeError(w, http.StatusNotFound, errors.New("no such path; there are POST /v1/lookup, /v1/lookup/batch and /v1/lookup/explain, and GET /v1/sources, /v1/prefixes, /v1/resident and /v1/changes"))
	})
	return mux
}

// allow answers the methods that a path does not have.
func allow(methods string) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Allow", methods)
		writeError(w, http.StatusMethodNotAllowed, fmt.Errorf("method %s: use %s", r.Method, methods))
	}
}

func (x *Index) serveLookup(w http.ResponseWriter, r *http.Request) {
	var req Request
	if !ReadRequest(w, r, &req, "model and token_ids or prefix_hashes") {
		return
	}
	answer, err := x.Lookup(&req)
	switch {
	case errors.Is(err, ErrUnknownModel):
		writeError(w, http.StatusNotFound, err)
	case err != nil:
		writeError(w, http.StatusBadRequest, err)
	default:
		writeJSON(w, http.StatusOK, answer)
	}
}

func (x *Index) serveSources(w http.ResponseWriter, r *http.Request) {
	all := x.Sources()
	if id := r.URL.Query().Get("source"); id != "" {
		all = slices.DeleteFunc(all, func(s SourceInfo) bool { return s.Source.Tokens() != id })
		if len(all) == 0 {
			writeError(w, http.StatusNotFound, fmt.Errorf("source %q: not known; GET /v1/sources lists them", id))
			return
		}
	}
	writeJSON(w, http.StatusOK, map[string]any{"sources": all})
}

// Bounds of GET /v1/prefixes.
const (
	defaultPrefixes = 50
	maxPrefixes     = 1000
)

func (x *Index) servePrefixes(w http.ResponseWriter, r *http.Request) {
	limit := defaultPrefixes
	if text := r.URL.Query().Get("limit"); text != "" {
		n, err := strconv.Atoi(text)
		if err != nil || n < 1 || n > maxPrefixes {
			writeError(w, http.StatusBadRequest, fmt.Errorf("limit %q: want 1 to %d", text, maxPrefixes))
			return
		}
		limit = n
	}
	writeJSON(w, http.StatusOK, map[string]any{"rows": x.Hot(limit)})
}

// residentLine is one resident block of GET /v1/resident.
type residentLine struct {
	Hash   event.BlockHash   `json:"hash"`
	Prefix *event.PrefixHash `json:"prefix,omitempty"`
	Tier   event.Tier        `json:"tier"`
	Group  event.Group       `json:"group"`
	Copies uint32            `json:"copies"`
}

// serveResident lists a source's resident blocks as they are at one moment, a JSON line each.
func (x *Index) serveResident(w http.ResponseWriter, r *http.Request) {
	if asksForPage(r) {
		x.servePage(w, r)
		return
	}
	id := r.URL.Query().Get("source")
	name, err := event.ParseSource(id)
	if err != nil {
		writeError(w, http.StatusBadRequest, fmt.Errorf("source: %w", err))
		return
	}
	x.mu.RLock()
	s := x.sources[name]
	if s == nil {
		x.mu.RUnlock()
		writeError(w, http.StatusNotFound, fmt.Errorf("source %q: not known; GET /v1/sources lists them", id))
		return
	}
	entries := slices.Collect(s.entries(x))
	x.mu.RUnlock()
	w.Header().Set("Content-Type", "application/x-ndjson")
	enc := json.NewEncoder(w)
	for i := range entries {
		e := &entries[i]
		line := residentLine{Hash: e.Hash, Tier: e.Tier, Group: e.Group, Copies: e.Copies}
		if e.Prefix != 0 {
			line.Prefix = &e.Prefix
		}
		if enc.Encode(line) != nil {
			return // the client went away
		}
	}
}

func writeError(w http.ResponseWriter, status int, err error) {
	writeJSON(w, status, map[string]string{"error": err.Error()})
}

func writeJSON(w http.ResponseWriter, status int, v any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	_ = enc.Encode(v) // the client went away: nobody is left to tell
}
