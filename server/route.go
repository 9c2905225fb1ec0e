package server

import (
	"net/http"
	"time"
)

// route is what one path takes at most.
type route struct {
	pattern string        // as a ServeMux has them
	body    int64         // bytes of a request's body
	time    time.Duration // of a request, until its answer is made; 0 = the path has bounds of its own
}

// publicRoutes are the limits of the public listener, and all that it takes beside GET and HEAD: nothing here changes
// anything. A path that is not listed has the limits of the last row.
var publicRoutes = []route{
	{"POST /v1/lookup", 16 << 20, 30 * time.Second},       // reads: a prompt is too long for a URL
	{"POST /v1/shard/lookup", 16 << 20, 30 * time.Second}, // reads: what a gather asks
	{"POST /v1/lookup/batch", 16 << 20, 30 * time.Second},
	{"POST /v1/lookup/explain", 16 << 20, 30 * time.Second},
	{"/v1/changes", 0, 0},             // a stream: the index bounds how many there are, and how much waits for each
	{"POST /v1/changes", 16 << 20, 0}, // reads, too
	{"POST " + loginPath, 4 << 10, 10 * time.Second},
	{"/v1/live", 0, 0}, // a WebSocket: package web bounds their number, their frames and their silence
	{"/v1/query/", 0, 30 * time.Second},
	{"/v1/explain/", 0, 30 * time.Second},
	{"POST /v1/explain", 16 << 20, 30 * time.Second}, // reads: a prompt is too long for a URL
	{"/v1/resident", 0, 5 * time.Minute},             // a line a block
	{"/", 0, 30 * time.Second},
}

// adminRoutes are those of the admin listener.
var adminRoutes = []route{
	{"/debug/pprof/", 0, 5 * time.Minute}, // profiles take as long as they are told to
	{"/", 0, 30 * time.Second},
}

// kvIndexerRoutes are those of the KV indexer's listener: what it takes beside GET and HEAD, which is all that its clients send.
var kvIndexerRoutes = []route{
	{"POST /query", 8 << 20, 30 * time.Second},
	{"POST /query_by_hash", 2 << 20, 30 * time.Second},
	{"POST /register", 2 << 20, 30 * time.Second},
	{"POST /unregister", 2 << 20, 30 * time.Second},
	{"POST /register_peer", 2 << 20, 30 * time.Second},
	{"POST /deregister_peer", 2 << 20, 30 * time.Second},
	{"POST /reopen_logs", 2 << 20, 30 * time.Second},
	{"/", 0, 30 * time.Second},
}

const (
	publicRequests = 256 // at a time, WebSockets not counted
	adminRequests  = 32

	maxHeader = 16 << 10 // bytes
	graceTime = 5 * time.Second
)

// limits finds the row of a request.
type limits struct{ mux *http.ServeMux }

func newLimits(routes []route) limits {
	l := limits{http.NewServeMux()}
	for i := range routes {
		l.mux.Handle(routes[i].pattern, &routes[i])
	}
	return l
}

// ServeHTTP makes a row findable by a ServeMux; it is not called.
func (*route) ServeHTTP(http.ResponseWriter, *http.Request) {}

// of returns the row of a request, and whether it may be made at all.
func (l limits) of(r *http.Request) (row *route, ok bool) {
	h, pattern := l.mux.Handler(r)
	row, found := h.(*route)
	if !found { // a path that the handlers' own mux will redirect
		row = &route{time: graceTime}
	}
	return row, r.Method == http.MethodGet || r.Method == http.MethodHead || found && pattern != "" && pattern[0] != '/'
}
