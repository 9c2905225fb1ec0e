// Package kvindexer serves the HTTP API of the standalone KV indexer, as NVIDIA Dynamo's implements it after Mooncake's RFC 1403,
// over an index of ours: clients of that one need not be changed. What is the same, what differs and why is in
// docs/kv-indexer-api.md.
//
// Its routing group is our cluster: the engines among which one router chooses. An instance's rank is a source of it.
package kvindexer

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"slices"
	"sync"

	"kvstrata/event"
	"kvstrata/indexer/prefix"
)

// What a Follower says no with.
var (
	ErrFollowed    = errors.New("already registered")
	ErrNotFollowed = errors.New("not registered")
)

// Engine is one rank of an engine to be followed.
type Engine struct {
	Source   event.Source
	Endpoint string // of its events, as ZeroMQ has it
	Replay   string // of its replay socket; empty = it has none
}

// Follower hears engines: the subscriber of the same process.
type Follower interface {
	// Follow begins to hear an engine. ErrFollowed: somebody has asked for it before.
	Follow(Engine) error
	// Unfollow ends that, and has the source's blocks forgotten. It returns when Follow takes the source again.
	Unfollow(context.Context, event.Source) error
	// Heard reports what is known of the way to an engine; nil before anything is.
	Heard(event.Source) *event.Status
}

// Config says how the service sees the index.
type Config struct {
	Keyed bool // the index hashes with a key: hashes that clients have computed mean nothing to it
}

// Service is the API. What is registered lives as long as it does. Safe for concurrent use.
type Service struct {
	cfg    Config
	index  *prefix.Index
	follow Follower // nil where no subscriber is in this process
	log    *slog.Logger

	mu      sync.Mutex // held while an engine is added, not while one is removed
	workers map[uint64]*worker
	peers   []string
}

// worker is one registered instance.
type worker struct {
	partition partition
	blockSize uint32
	ranks     map[uint32]Engine
}

// partition is what one tree of Dynamo's is for.
type partition struct{ model, group string }

func (p partition) String() string { return fmt.Sprintf("model=%s routing_group=%s", p.model, p.group) }

// New returns a service with nothing registered.
func New(cfg Config, index *prefix.Index, follow Follower, log *slog.Logger) *Service {
	return &Service{cfg: cfg, index: index, follow: follow, log: log, workers: make(map[uint64]*worker)}
}

// Bounds of a request's body, in bytes: Dynamo's.
const (
	maxQuery = 8 << 20
	maxOther = 2 << 20
)

// Handler serves the paths of the API.
func (s *Service) Handler() http.Handler {
	mux := http.NewServeMux()
	handle := func(method, allow, path string, h http.HandlerFunc) {
		mux.HandleFunc(method+" "+path, h)
		mux.HandleFunc(path, func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Allow", allow)
			w.WriteHeader(http.StatusMethodNotAllowed)
		})
	}
	post := func(path string, most int64, h func(context.Context, *fields) (int, any)) {
		handle("POST", "POST", path, func(w http.ResponseWriter, r *http.Request) {
			f, err := readFields(w, r, most)
			if err == nil {
				status, answer := h(r.Context(), f)
				if err = f.err; err == nil {
					writeJSON(w, status, answer)
					return
				}
			}
			writeRefusal(w, err)
		})
	}
	get := func(path string, h http.HandlerFunc) { handle("GET", "GET,HEAD", path, h) }
	post("/register", maxOther, s.register)
	post("/unregister", maxOther, s.unregister)
	post("/query", maxQuery, s.query)
	post("/query_by_hash", maxOther, s.queryByHash)
	post("/register_peer", maxOther, s.registerPeer)
	post("/deregister_peer", maxOther, s.deregisterPeer)
	get("/workers", s.listWorkers)
	get("/dump", s.dump)
	get("/peers", s.listPeers)
	get("/health", func(http.ResponseWriter, *http.Request) {})
	handle("POST", "POST", "/reopen_logs", func(w http.ResponseWriter, _ *http.Request) { // there are none
		writeJSON(w, http.StatusOK, done)
	})
	mux.HandleFunc("/", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNotFound) })
	return mux
}

type answer map[string]string

var done = answer{"status": "ok"}

func refusal(format string, args ...any) answer { return answer{"error": fmt.Sprintf(format, args...)} }

func writeJSON(w http.ResponseWriter, status int, v any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(v) // the client went away
}

// registerPeer notes a peer. Nothing is ever asked of one: a start goes on from checkpoints.
func (s *Service) registerPeer(_ context.Context, f *fields) (int, any) {
	var url string
	f.required("url", &url)
	if f.err != nil {
		return 0, nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case slices.Contains(s.peers, url):
	case len(s.peers) == maxPeers:
		return http.StatusConflict, refusal("%d peers are registered, which is the limit", maxPeers)
	default:
		s.peers = append(s.peers, url)
	}
	return http.StatusCreated, done
}

// maxPeers bounds what is noted of peers.
const maxPeers = 256

func (s *Service) deregisterPeer(_ context.Context, f *fields) (int, any) {
	var url string
	f.required("url", &url)
	if f.err != nil {
		return 0, nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	i := slices.Index(s.peers, url)
	if i < 0 {
		return http.StatusNotFound, refusal("peer not found")
	}
	s.peers = slices.Delete(s.peers, i, i+1)
	return http.StatusOK, done
}

func (s *Service) listPeers(w http.ResponseWriter, _ *http.Request) {
	s.mu.Lock()
	peers := append([]string{}, s.peers...)
	s.mu.Unlock()
	writeJSON(w, http.StatusOK, peers)
}

// dump answers for each partition that its tree can't be had, in the form in which Dynamo itself tells that. Its events name a
// block by the hash of its own tokens, and its parent: both end at the subscriber's edge. Who recovers from peers takes the next
// one; events without those hashes would give it a tree that answers wrongly.
func (s *Service) dump(w http.ResponseWriter, _ *http.Request) {
	all := make(map[string]answer)
	for p := range s.partitions() {
		all[p.model+":"+p.group] = refusal("tokens_hash and parent_hash of blocks are not kept; GET /v1/resident lists what a source holds")
	}
	writeJSON(w, http.StatusOK, all)
}
