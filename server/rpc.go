package server

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net"
	"net/http"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

// What the gRPC listener takes at most.
const (
	rpcMessage = 16 << 20 // bytes of a message, either way
	rpcCalls   = 256      // unary calls at a time
	rpcStreams = 256      // streams at a time: reflection, watched health, subscriptions
	rpcTime    = 30 * time.Second
	rpcIdle    = 2 * time.Minute  // of a connection without calls
	rpcAlive   = 30 * time.Second // a client that sends nothing is asked whether it is there, and has as long to answer
	rpcPing    = 10 * time.Second // a client that asks more often is sent away
)

// healthService is answered to everybody, as /healthz is.
const healthService = "/grpc.health.v1.Health/"

// RPC is the gRPC listener, bound, with the same door before it as the public one: tokens, TLS, limits.
type RPC struct {
	listener net.Listener
	server   *grpc.Server
	secure   bool
}

// rpcDoor stands before every call.
type rpcDoor struct {
	keys           *keyring // nil: everybody may come
	calls, streams chan struct{}
}

// NewRPC binds the listener at cfg.RPC, of host:port as the others; register enters the services. The tokens and the certificate are cfg's.
func NewRPC(cfg Config, register func(*grpc.Server), log *slog.Logger) (*RPC, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	keys, err := newKeyring(cfg, log)
	if err != nil {
		return nil, err
	}
	secure, err := newTLS(cfg, log)
	if err != nil {
		return nil, err
	}
	l, err := net.Listen("tcp", cfg.RPC)
	if err != nil {
		return nil, fmt.Errorf("listen on --grpc %s: %w; %s", cfg.RPC, err, offer("--grpc", cfg.RPC, cfg.Listen))
	}
	d := &rpcDoor{keys: keys, calls: make(chan struct{}, rpcCalls), streams: make(chan struct{}, rpcStreams)}
	srv := grpc.NewServer(append(d.options(), credentialsOf(secure)...)...)
	register(srv)
	return &RPC{listener: l, server: srv, secure: secure != nil}, nil
}

func credentialsOf(secure *tls.Config) []grpc.ServerOption {
	if secure == nil {
		return nil
	}
	return []grpc.ServerOption{grpc.Creds(credentials.NewTLS(secure))}
}

func (d *rpcDoor) options() []grpc.ServerOption {
	return []grpc.ServerOption{
		grpc.MaxRecvMsgSize(rpcMessage), grpc.MaxSendMsgSize(rpcMessage), grpc.MaxHeaderListSize(maxHeader),
		grpc.ConnectionTimeout(5 * time.Second), grpc.MaxConcurrentStreams(rpcCalls),
		grpc.KeepaliveParams(keepalive.ServerParameters{
			MaxConnectionIdle: rpcIdle, MaxConnectionAge: math.MaxInt64, Time: rpcAlive, Timeout: rpcAlive,
		}),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: rpcPing}),
		grpc.UnaryInterceptor(d.call), grpc.StreamInterceptor(d.stream),
	}
}

// call lets in one unary call, for a limited time.
func (d *rpcDoor) call(ctx context.Context, req any, info *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
	if err := d.admit(ctx, info.FullMethod); err != nil {
		return nil, err
	}
	leave, err := enter(d.calls, "calls")
	if err != nil {
		return nil, err
	}
	defer leave()
	ctx, cancel := context.WithTimeout(ctx, rpcTime)
	defer cancel()
	return next(ctx, req)
}

// stream lets in one stream, for as long as it goes on: how much waits for it is bounded where it comes from.
func (d *rpcDoor) stream(srv any, s grpc.ServerStream, info *grpc.StreamServerInfo, next grpc.StreamHandler) error {
	if err := d.admit(s.Context(), info.FullMethod); err != nil {
		return err
	}
	leave, err := enter(d.streams, "streams")
	if err != nil {
		return err
	}
	defer leave()
	return next(srv, s)
}

// enter takes one of the places, if there is one.
func enter(places chan struct{}, what string) (leave func(), err error) {
	select {
	case places <- struct{}{}:
		return func() { <-places }, nil
	default:
		return nil, status.Errorf(codes.ResourceExhausted, "%d %s are under way, which is the limit; try again", cap(places), what)
	}
}

// admit wants a token in the metadata, as HTTP has it in a header. Sessions are browsers', which do not come here.
func (d *rpcDoor) admit(ctx context.Context, method string) error {
	if d.keys == nil || strings.HasPrefix(method, healthService) {
		return nil
	}
	md, _ := metadata.FromIncomingContext(ctx)
	shown := http.Request{Header: http.Header{"Authorization": md.Get("authorization")}}
	if d.keys.admits(&shown, time.Now(), false) {
		return nil
	}
	return status.Error(codes.Unauthenticated, "this server wants one of its tokens, as metadata authorization: Bearer TOKEN")
}

// Address returns where it listens, as host:port.
func (r *RPC) Address() string { return r.listener.Addr().String() }

// Secure reports whether it speaks TLS.
func (r *RPC) Secure() bool { return r.secure }

// Close gives the listener back when Run was never called.
func (r *RPC) Close() { _ = r.listener.Close() }

// Run serves until ctx ends, then gives calls under way a second; streams go on until then.
func (r *RPC) Run(ctx context.Context) error {
	failed := make(chan error, 1)
	go func() { failed <- r.server.Serve(r.listener) }()
	select {
	case err := <-failed:
		return fmt.Errorf("serve %s: %w", r.Address(), err)
	case <-ctx.Done():
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		r.server.GracefulStop()
	}()
	grace := time.NewTimer(time.Second)
	defer grace.Stop()
	select {
	case <-done:
	case <-grace.C:
		r.server.Stop()
		<-done
	}
	if err := <-failed; err != nil && !errors.Is(err, grpc.ErrServerStopped) {
		return fmt.Errorf("serve %s: %w", r.Address(), err)
	}
	return nil
}
