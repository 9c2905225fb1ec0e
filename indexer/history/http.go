package history

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strings"
)

// Handler serves GET /v1/queries, /v1/query/NAME and /v1/explain/HASH, and POST /v1/explain. Errors are JSON objects with a field error that
// says what to change.
func (r *Reader) Handler() http.Handler {
	mux := http.NewServeMux()
	get := func(path string, serve http.HandlerFunc) {
		mux.HandleFunc(path, func(w http.ResponseWriter, req *http.Request) {
			if req.Method != http.MethodGet && req.Method != http.MethodHead {
				w.Header().Set("Allow", "GET, HEAD")
				writeJSON(w, http.StatusMethodNotAllowed, errorJSON(fmt.Errorf("method %s: use GET", req.Method)))
				return
			}
			serve(w, req)
		})
	}
	get("/v1/queries", func(w http.ResponseWriter, _ *http.Request) {
		writeJSON(w, http.StatusOK, map[string]any{"queries": queries})
	})
	get("/v1/query/{name}", r.serveQuery)
	get("/v1/explain/{hash}", r.serveExplain)
	mux.HandleFunc("/v1/explain", r.serveWalk)
	get("/", func(w http.ResponseWriter, req *http.Request) {
		writeJSON(w, http.StatusNotFound, errorJSON(
			fmt.Errorf("nothing is at %s; there are /v1/queries, /v1/query/NAME and /v1/explain/HASH", req.URL.Path)))
	})
	return mux
}

// parameters returns what a request asks with; each name may stand once.
func parameters(query url.Values) (map[string]string, error) {
	values := make(map[string]string)
	for name, list := range query {
		if len(list) > 1 {
			return nil, fmt.Errorf("%w %s: given %d times (%s)", ErrBadParam, name, len(list), strings.Join(list, ", "))
		}
		values[name] = list[0]
	}
	return values, nil
}

func (r *Reader) serveQuery(w http.ResponseWriter, req *http.Request) {
	values, err := parameters(req.URL.Query())
	if err != nil {
		writeError(w, err)
		return
	}
	sql := values["sql"] == "1"
	delete(values, "sql")
	answer, err := r.Ask(req.Context(), req.PathValue("name"), values)
	if err != nil {
		writeError(w, err)
		return
	}
	if !sql {
		answer.SQL = ""
	}
	writeJSON(w, http.StatusOK, answer)
}

func (r *Reader) serveExplain(w http.ResponseWriter, req *http.Request) {
	values, err := parameters(req.URL.Query())
	for name := range values {
		if name != "since" {
			err = fmt.Errorf("%w %s: a story does not have it; %sit has since", ErrBadParam, name, suggestion(name, []string{"since"}))
		}
	}
	if err != nil {
		writeError(w, err)
		return
	}
	story, err := r.Explain(req.Context(), req.PathValue("hash"), values["since"])
	if err != nil {
		writeError(w, err)
		return
	}
	writeJSON(w, http.StatusOK, story)
}

// maxPromptBody bounds a prompt in JSON.
const maxPromptBody = 16 << 20

func (r *Reader) serveWalk(w http.ResponseWriter, req *http.Request) {
	if req.Method != http.MethodPost {
		w.Header().Set("Allow", "POST")
		writeJSON(w, http.StatusMethodNotAllowed, errorJSON(fmt.Errorf("method %s: use POST, or GET /v1/explain/HASH", req.Method)))
		return
	}
	p := new(Prompt)
	body := json.NewDecoder(http.MaxBytesReader(w, req.Body, maxPromptBody))
	body.DisallowUnknownFields()
	if err := body.Decode(p); err != nil {
		writeError(w, fmt.Errorf("%w of the body: %w", ErrBadParam, err))
		return
	}
	walk, err := r.Walk(req.Context(), p)
	if err != nil {
		writeError(w, err)
		return
	}
	writeJSON(w, http.StatusOK, walk)
}

func writeError(w http.ResponseWriter, err error) {
	status := http.StatusInternalServerError
	for _, known := range []struct {
		err    error
		status int
	}{
		{ErrBadParam, http.StatusBadRequest},
		{ErrUnknownQuery, http.StatusNotFound},
		{ErrTooMuch, http.StatusUnprocessableEntity},
		{ErrUnavailable, http.StatusServiceUnavailable},
	} {
		if errors.Is(err, known.err) {
			status = known.status
		}
	}
	writeJSON(w, status, errorJSON(err))
}

func errorJSON(err error) map[string]string { return map[string]string{"error": err.Error()} }

func writeJSON(w http.ResponseWriter, status int, v any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(v) // the client went away: nobody is left to tell
}
