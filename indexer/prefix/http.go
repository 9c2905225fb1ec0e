package prefix

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
)

// maxBody bounds a lookup's request: a million token ids and more.
const maxBody = 16 << 20

// Handler serves POST /v1/lookup and GET /v1/sources. Errors are JSON objects with a field error that says what to
// change.
func (x *Index) Handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("POST /v1/lookup", x.serveLookup)
	mux.HandleFunc("GET /v1/sources", x.serveSources)
	mux.HandleFunc("/v1/lookup", allow("POST"))
	mux.HandleFunc("/v1/sources", allow("GET, HEAD"))
	mux.HandleFunc("/", func(w http.ResponseWriter, _ *http.Request) {
		writeError(w, http.StatusNotFound, errors.New("no such path; there are POST /v1/lookup and GET /v1/sources"))
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
	dec := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxBody))
	dec.DisallowUnknownFields()
	err := dec.Decode(&req)
	if err == nil {
		if _, end := dec.Token(); !errors.Is(end, io.EOF) {
			err = errors.New("more follows the JSON object")
		}
	}
	if err != nil {
		var tooLarge *http.MaxBytesError
		if errors.As(err, &tooLarge) {
			writeError(w, http.StatusRequestEntityTooLarge, fmt.Errorf("request is larger than %d bytes", tooLarge.Limit))
			return
		}
		writeError(w, http.StatusBadRequest, fmt.Errorf("request: %w; want JSON with model and token_ids or prefix_hashes", err))
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

func (x *Index) serveSources(w http.ResponseWriter, _ *http.Request) {
	writeJSON(w, http.StatusOK, map[string]any{"sources": x.Sources()})
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
