package server

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"sync/atomic"
	"time"
)

// door stands before everything that a listener serves: it lets in who shows a token, refuses what would change something,
// and bounds each request.
type door struct {
	keys   *keyring // nil: everybody may come
	limits limits
	slots  chan struct{}   // a token for each request under way
	open   map[string]bool // paths that are answered to everybody
	login  bool            // browsers may open a session, and it counts
	log    *slog.Logger
	inner  http.Handler

	warned atomic.Int64 // when the log last told of a refused login, in seconds of Unix time
}

func (d *door) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	row, ok := d.limits.of(r)
	switch {
	case !ok:
		w.Header().Set("Allow", "GET, HEAD")
		refuse(w, http.StatusMethodNotAllowed, fmt.Sprintf("method %s: nothing can be changed here; use GET", r.Method))
		return
	case r.ContentLength > row.body:
		w.Header().Set("Connection", "close")
		refuse(w, http.StatusRequestEntityTooLarge, fmt.Sprintf("request is larger than %d bytes", row.body))
		return
	}
	r.Body = http.MaxBytesReader(w, r.Body, row.body)
	if d.login && d.keys != nil && r.Method == http.MethodPost && r.URL.Path == loginPath {
		d.openSession(w, r)
		return
	}
	admitted := d.keys == nil || d.keys.admits(r, time.Now(), d.login)
	if !admitted && !d.open[r.URL.Path] {
		d.turnAway(w, r)
		return
	}
	if row.time == 0 {
		d.inner.ServeHTTP(w, r)
		return
	}
	select {
	case d.slots <- struct{}{}:
		defer func() { <-d.slots }()
	default:
		w.Header().Set("Retry-After", "1")
		refuse(w, http.StatusServiceUnavailable, fmt.Sprintf("%d requests are under way, which is the limit; try again", cap(d.slots)))
		return
	}
	ctx, cancel := context.WithTimeout(context.WithValue(r.Context(), admittedKey{}, admitted), row.time)
	defer cancel()
	// A handler that was stopped gets some time to say so.
	_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(row.time + graceTime)) // one that can't has the server's
	d.inner.ServeHTTP(w, r.WithContext(ctx))
}

// admittedKey is where a request's context says whether it has shown a token, or none is wanted.
type admittedKey struct{}

func wasAdmitted(r *http.Request) bool {
	admitted, _ := r.Context().Value(admittedKey{}).(bool)
	return admitted
}

// turnAway answers a request without a token: a person gets a form, a program what to send.
func (d *door) turnAway(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("WWW-Authenticate", `Bearer realm="kvstrata"`)
	if d.login && wantsPage(r) {
		writeLogin(w, r, r.URL.RequestURI(), "")
		return
	}
	refuse(w, http.StatusUnauthorized, "this server wants one of its tokens, as Authorization: Bearer TOKEN; "+
		"kvstrata's own commands take --token-file or "+TokenVariable)
}

func refuse(w http.ResponseWriter, status int, text string) {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(map[string]string{"error": text}) // the status says it too
}
