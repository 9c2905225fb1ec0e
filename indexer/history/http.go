package history

import (
	"encoding/json"
	"errors"
	"net/http"
)

// Handler serves GET /v1/queries, /v1/query/NAME and /v1/explain/HASH. Errors are JSON objects with a field error that
// says what to change.
func (r *Reader) Handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /v1/queries", func(w http.ResponseWriter, _ *http.Request) {
		writeJSON(w, http.StatusOK, map[string]any{"queries": queries})
	})
	mux.HandleFunc("GET /v1/query/{name}", r.serveQuery)
	mux.HandleFunc("GET /v1/explain/{hash}", r.serveExplain)
	return mux
}

func (r *Reader) serveQuery(w http.ResponseWriter, req *http.Request) {
	values := make(map[string]string)
	for name, list := range req.URL.Query() {
		values[name] = list[len(list)-1]
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
	story, err := r.Explain(req.Context(), req.PathValue("hash"), req.URL.Query().Get("since"))
	if err != nil {
		writeError(w, err)
		return
	}
	writeJSON(w, http.StatusOK, story)
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
	writeJSON(w, status, map[string]string{"error": err.Error()})
}

func writeJSON(w http.ResponseWriter, status int, v any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(v) // the client went away: nobody is left to tell
}
