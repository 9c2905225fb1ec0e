package web

import (
	"encoding/json"
	"net/http"
)

// policy lets the dashboard load what was built into the binary and talk to the API it came from, and nothing else.
const policy = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; " +
	"connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"

// pages are the paths that the dashboard routes by itself.
var pages = []string{"/{$}", "/engines", "/transfers", "/prefixes", "/history", "/explain", "/explain/{hash...}", "/tail"}

// Handler serves GET /v1/live, the dashboard's pages and its files; anything else is answered with 404. It may be mounted
// at both /v1/live and /.
func (h *Hub) Handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /v1/live", h.serveLive)
	for _, page := range pages {
		mux.Handle("GET "+page, h.dashboard.index)
	}
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		file := h.dashboard.files[r.URL.Path]
		if file == nil || r.Method != http.MethodGet && r.Method != http.MethodHead {
			writeError(w, http.StatusNotFound, "nothing is served here; the dashboard is at /, the API under /v1/")
			return
		}
		file.ServeHTTP(w, r)
	})
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		head := w.Header()
		head.Set("Content-Security-Policy", policy)
		head.Set("X-Content-Type-Options", "nosniff")
		head.Set("Referrer-Policy", "no-referrer")
		head.Set("Cross-Origin-Opener-Policy", "same-origin")
		head.Set("Cross-Origin-Resource-Policy", "same-origin")
		mux.ServeHTTP(w, r)
	})
}

// refuseUpgrade answers a request that can't become a WebSocket.
func refuseUpgrade(w http.ResponseWriter, _ *http.Request, status int, reason error) {
	text := reason.Error()
	if status == http.StatusForbidden {
		text = "a page of another origin may not open the live socket; open the dashboard from this address"
	}
	w.Header().Set("Sec-Websocket-Version", "13")
	writeError(w, status, text)
}

func writeError(w http.ResponseWriter, status int, text string) {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(errorFrame{text}) // the status says it too
}
