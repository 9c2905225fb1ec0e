package prefix

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
)

// ShardInfo says which part of which models an index keeps.
type ShardInfo struct {
	Shard  Shard    `json:"shard"`
	Models []string `json:"models"` // that it is asked for; none = all
	Ready  bool     `json:"ready"`  // it has caught up with the stream
}

// ShardHandler serves GET /v1/shard, which says what the index keeps, and POST /v1/shard/lookup. ready says what is missing until
// the index has caught up.
func (x *Index) ShardHandler(ready func() error) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /v1/shard", func(w http.ResponseWriter, _ *http.Request) {
		models := x.cfg.Models
		if models == nil {
			models = []string{}
		}
		writeJSON(w, http.StatusOK, ShardInfo{Shard: x.cfg.Shard, Models: models, Ready: ready() == nil})
	})
	mux.HandleFunc("POST /v1/shard/lookup", func(w http.ResponseWriter, r *http.Request) {
		var req ShardRequest
		if !ReadRequest(w, r, &req, "model, shard and cuts") {
			return
		}
		isReady := ready() == nil // before it answers: what it says of itself was true then
		a, err := x.LookupShard(&req)
		switch {
		case errors.Is(err, ErrOtherShard):
			writeError(w, http.StatusMisdirectedRequest, err)
		case err != nil:
			writeError(w, http.StatusBadRequest, err)
		default:
			a.Ready = isReady
			writeCompact(w, a)
		}
	})
	mux.HandleFunc("/v1/shard", allow("GET, HEAD"))
	mux.HandleFunc("/v1/shard/lookup", allow("POST"))
	return mux
}

// RefuseLookup answers whole lookups where an index keeps a part: its answer would end at the first block of another part.
func (x *Index) RefuseLookup() http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		writeError(w, http.StatusMisdirectedRequest, fmt.Errorf("this index keeps shard %v of the prefix hashes; ask kvstrata gather, which asks all shards", x.cfg.Shard))
	})
}

// ReadRequest reads the one JSON object of a request's body; where it is none, it answers what to send, and returns false.
func ReadRequest(w http.ResponseWriter, r *http.Request, into any, want string) bool {
	dec := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxBody))
	dec.DisallowUnknownFields()
	err := dec.Decode(into)
	if err == nil {
		if _, end := dec.Token(); !errors.Is(end, io.EOF) {
			err = errors.New("more follows the JSON object")
		}
	}
	var tooLarge *http.MaxBytesError
	switch {
	case err == nil:
		return true
	case errors.As(err, &tooLarge):
		WriteError(w, http.StatusRequestEntityTooLarge, fmt.Errorf("request is larger than %d bytes", tooLarge.Limit))
	default:
		WriteError(w, http.StatusBadRequest, fmt.Errorf("request: %w; want JSON with %s", err, want))
	}
	return false
}

// WriteError answers with a JSON object that says what to change.
func WriteError(w http.ResponseWriter, status int, err error) { writeError(w, status, err) }

// WriteAnswer answers with a JSON object, laid out for people.
func WriteAnswer(w http.ResponseWriter, v any) { writeJSON(w, http.StatusOK, v) }

// writeCompact answers programs.
func writeCompact(w http.ResponseWriter, v any) {
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(v) // the client went away: nobody is left to tell
}
