package server

import (
	"context"
	"crypto/tls"
	"fmt"
	"log/slog"
	"net"
	"net/http"

	"golang.org/x/sync/errgroup"
)

// KVIndexer is a listener of its own for the API of the standalone KV indexer, with the same door: over that one engines come
// and go, which nothing on the public listener can do.
type KVIndexer struct {
	listener net.Listener
	door     *door
	tls      *tls.Config
}

// NewKVIndexer binds an address, and serves handler there with the tokens and the certificate of cfg.
func NewKVIndexer(cfg Config, address string, handler http.Handler, log *slog.Logger) (*KVIndexer, error) {
	keys, err := newKeyring(cfg, log)
	if err != nil {
		return nil, err
	}
	secure, err := newTLS(cfg, log)
	if err != nil {
		return nil, err
	}
	listener, err := net.Listen("tcp", address)
	if err != nil {
		return nil, fmt.Errorf("listen on --kv-indexer %s: %w; %s", address, err, offer("--kv-indexer", address, cfg.Listen))
	}
	return &KVIndexer{listener, &door{
		limits: newLimits(kvIndexerRoutes), slots: make(chan struct{}, publicRequests), inner: handler,
		open: map[string]bool{"/health": true}, keys: keys, log: log,
	}, secure}, nil
}

// URL returns the address.
func (s *KVIndexer) URL() string {
	if s.tls != nil {
		return "https://" + s.listener.Addr().String()
	}
	return "http://" + s.listener.Addr().String()
}

// Close gives the listener back when Run was never called.
func (s *KVIndexer) Close() { _ = s.listener.Close() } // nothing can be done about it

// Run serves until ctx ends, then gives requests under way a second.
func (s *KVIndexer) Run(ctx context.Context) error {
	group, ctx := errgroup.WithContext(ctx)
	serve(ctx, group, s.listener, s.door, s.tls)
	return group.Wait()
}
