package gather

import (
	"context"
	"errors"
	"fmt"
	"net/http"

	"kvstrata/indexer/prefix"
)

// Handler serves POST /v1/lookup, as an index does.
func (g *Gather) Handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("POST /v1/lookup", g.serveLookup)
	mux.HandleFunc("/v1/lookup", func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Allow", "POST")
		prefix.WriteError(w, http.StatusMethodNotAllowed, fmt.Errorf("method %s: use POST", r.Method))
	})
	mux.HandleFunc("/", func(w http.ResponseWriter, _ *http.Request) {
		prefix.WriteError(w, http.StatusNotFound, errors.New("no such path; here is POST /v1/lookup alone, ask an index about the rest"))
	})
	return mux
}

func (g *Gather) serveLookup(w http.ResponseWriter, r *http.Request) {
	var req prefix.Request
	if !prefix.ReadRequest(w, r, &req, "model and token_ids or prefix_hashes") {
		return
	}
	answer, err := g.Lookup(r.Context(), &req)
	var shard *ShardError
	switch {
	case err == nil:
		prefix.WriteAnswer(w, answer)
	case errors.Is(err, prefix.ErrUnknownModel):
		prefix.WriteError(w, http.StatusNotFound, err)
	case errors.As(err, &shard) || errors.Is(err, context.Canceled):
		prefix.WriteError(w, http.StatusServiceUnavailable, err)
	default:
		prefix.WriteError(w, http.StatusBadRequest, err)
	}
}
