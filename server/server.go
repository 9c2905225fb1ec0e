// Package server holds the two listeners of a process: a public one that mounts the roles' handlers, and an admin one,
// on loopback, with health, metrics and profiles. A door stands before each: it asks for a token where there are any, and
// bounds what a request may take.
package server

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/pprof"
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"golang.org/x/sync/errgroup"
)

// Config says where to listen. All addresses are host:port; port 0 takes a free one.
type Config struct {
	Listen string // public API
	Admin  string // /healthz, /readyz, /metrics, /debug/pprof
	RPC    string // gRPC, by NewRPC; empty for none

	// TokenFile is a file of tokens, one a line, one of which every request must show but those for health. It is read again
	// when it changes. Token is one that comes from elsewhere. With neither, everybody may ask.
	TokenFile string
	Token     Secret
	// TLSCert and TLSKey are PEM files of the certificate of all listeners, read again when they change; empty for none.
	TLSCert, TLSKey string
}

// Guarded reports whether requests must show a token.
func (c Config) Guarded() bool { return c.TokenFile != "" || c.Token != "" }

// DefaultConfig listens on loopback.
func DefaultConfig() Config { return Config{Listen: "127.0.0.1:8080", Admin: "127.0.0.1:8081"} }

// Validate reports every problem at once.
func (c Config) Validate() error {
	var errs []error
	for _, at := range []struct{ flag, addr string }{{"--listen", c.Listen}, {"--admin", c.Admin}, {"--grpc", c.RPC}} {
		if at.addr == "" && at.flag == "--grpc" {
			continue
		}
		_, port, err := net.SplitHostPort(at.addr)
		if err == nil {
			_, err = net.LookupPort("tcp", port)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("%s %q: want host:port, as 127.0.0.1:8080", at.flag, at.addr))
		}
	}
	if (c.TLSCert == "") != (c.TLSKey == "") {
		errs = append(errs, errors.New("--tls-cert, --tls-key: want both or none"))
	}
	return errors.Join(errs...)
}

// Ready names something that must hold before the process serves; nil means that it does.
type Ready struct {
	Name  string
	Check func() error
}

// Server is the two listeners, bound.
type Server struct {
	public, admin net.Listener
	handler       http.Handler
	keys          *keyring    // nil: everybody may ask
	tls           *tls.Config // nil: in the clear
	ready         []Ready
	gatherer      prometheus.Gatherer
	log           *slog.Logger
}

// New binds both listeners, so that a taken port is told before anything else starts. handlers are mounted by pattern.
func New(cfg Config, handlers map[string]http.Handler, ready []Ready, gatherer prometheus.Gatherer, log *slog.Logger) (*Server, error) {
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
	public, err := net.Listen("tcp", cfg.Listen)
	if err != nil {
		return nil, fmt.Errorf("listen on --listen %s: %w; %s", cfg.Listen, err, offer("--listen", cfg.Listen, cfg.Admin))
	}
	admin, err := net.Listen("tcp", cfg.Admin)
	if err != nil {
		return nil, errors.Join(
			fmt.Errorf("listen on --admin %s: %w; %s", cfg.Admin, err, offer("--admin", cfg.Admin, cfg.Listen)), public.Close())
	}
	mux := http.NewServeMux()
	for pattern, h := range handlers {
		mux.Handle(pattern, h)
	}
	return &Server{
		public: public, admin: admin, handler: mux, keys: keys, tls: secure, ready: ready, gatherer: gatherer, log: log,
	}, nil
}

// newTLS reads the certificate; nil without. A new one that can't be read leaves the last one in use.
func newTLS(cfg Config, log *slog.Logger) (*tls.Config, error) {
	if cfg.TLSCert == "" {
		return nil, nil
	}
	cert, err := watch(log, func() (*tls.Certificate, error) {
		pair, err := tls.LoadX509KeyPair(cfg.TLSCert, cfg.TLSKey)
		if err != nil {
			return nil, fmt.Errorf("--tls-cert, --tls-key: %w", err)
		}
		return &pair, nil
	}, cfg.TLSCert, cfg.TLSKey)
	if err != nil {
		return nil, err
	}
	return &tls.Config{
		MinVersion: tls.VersionTLS12,
		GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) {
			pair, _ := cert.get() // the log says why there is no newer one
			return pair, nil
		},
	}, nil
}

// offer names another address for a flag: the next port of the same host that is free, and not the other flag's.
func offer(flag, addr, others string) string {
	host, port, err := net.SplitHostPort(addr)
	n, numeric := strconv.Atoi(port)
	if err != nil || numeric != nil {
		return "choose another with " + flag
	}
	for next := n + 1; next <= n+100 && next < 1<<16; next++ {
		other := net.JoinHostPort(host, strconv.Itoa(next))
		if other == others {
			continue
		}
		l, err := net.Listen("tcp", other)
		if err != nil {
			continue
		}
		if err := l.Close(); err != nil {
			break
		}
		return fmt.Sprintf("%s %s is free", flag, other)
	}
	return "choose another with " + flag
}

// URL returns the public address, AdminURL the admin one.
func (s *Server) URL() string { return s.scheme() + s.public.Addr().String() }

// AdminURL returns the admin address.
func (s *Server) AdminURL() string { return s.scheme() + s.admin.Addr().String() }

func (s *Server) scheme() string {
	if s.tls != nil {
		return "https://"
	}
	return "http://"
}

// Close gives the listeners back when Run was never called.
func (s *Server) Close() { _ = errors.Join(s.public.Close(), s.admin.Close()) }

// writeTimeout is how long an answer may take, profiles of a minute and long listings included: a client that reads nothing
// must not hold what its answer is made of for ever. A WebSocket has its own.
const writeTimeout = 5 * time.Minute

// Run serves until ctx ends, then gives requests under way a second.
func (s *Server) Run(ctx context.Context) error {
	group, ctx := errgroup.WithContext(ctx)
	serve(ctx, group, s.public, &door{
		limits: newLimits(publicRoutes), slots: make(chan struct{}, publicRequests), login: true, inner: s.handler, keys: s.keys, log: s.log,
	}, s.tls)
	serve(ctx, group, s.admin, &door{
		limits: newLimits(adminRoutes), slots: make(chan struct{}, adminRequests), inner: s.adminHandler(),
		open: map[string]bool{"/healthz": true, "/readyz": true}, keys: s.keys, log: s.log,
	}, s.tls)
	return group.Wait()
}

// serve has a group serve a listener behind its door until ctx ends; requests under way get a second then.
func serve(ctx context.Context, group *errgroup.Group, listener net.Listener, d *door, secure *tls.Config) {
	srv := &http.Server{
		Handler: ownNames(listener.Addr(), d), TLSConfig: secure.Clone(), MaxHeaderBytes: maxHeader, ReadHeaderTimeout: 5 * time.Second, ReadTimeout: 30 * time.Second, WriteTimeout: writeTimeout, IdleTimeout: 2 * time.Minute,
		ErrorLog: slog.NewLogLogger(d.log.Handler(), slog.LevelWarn),
	}
	group.Go(func() error {
		serve := srv.Serve
		if secure != nil {
			serve = func(l net.Listener) error { return srv.ServeTLS(l, "", "") }
		}
		if err := serve(listener); !errors.Is(err, http.ErrServerClosed) {
			return fmt.Errorf("serve %s: %w", listener.Addr(), err)
		}
		return nil
	})
	group.Go(func() error {
		<-ctx.Done()
		grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		defer cancel()
		if err := srv.Shutdown(grace); err != nil {
			return srv.Close()
		}
		return nil
	})
}

// ownNames refuses requests by another name than the machine's own to a listener on loopback: a page from elsewhere that has
// its own name resolve to loopback would otherwise pass for ours (DNS rebinding).
func ownNames(addr net.Addr, h http.Handler) http.Handler {
	tcp, ok := addr.(*net.TCPAddr)
	if !ok || !tcp.IP.IsLoopback() {
		return h
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		host := r.Host
		if name, _, err := net.SplitHostPort(host); err == nil {
			host = name
		}
		if ip := net.ParseIP(strings.Trim(host, "[]")); host != "localhost" && (ip == nil || !ip.IsLoopback()) {
			http.Error(w, "this listener is on loopback, and is asked by localhost or 127.0.0.1 only", http.StatusMisdirectedRequest)
			return
		}
		h.ServeHTTP(w, r)
	})
}

func (s *Server) adminHandler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	mux.HandleFunc("GET /readyz", s.serveReady)
	mux.Handle("GET /metrics", promhttp.HandlerFor(s.gatherer, promhttp.HandlerOpts{}))
	mux.HandleFunc("GET /debug/pprof/", pprof.Index)
	mux.HandleFunc("GET /debug/pprof/cmdline", http.NotFound) // flags may hold what is nobody's business
	mux.HandleFunc("GET /debug/pprof/profile", pprof.Profile)
	mux.HandleFunc("GET /debug/pprof/symbol", pprof.Symbol)
	mux.HandleFunc("GET /debug/pprof/trace", pprof.Trace)
	return mux
}

// serveReady answers 200 once everything holds, and otherwise 503 with one line on each thing that does not; who shows no
// token gets the status alone.
func (s *Server) serveReady(w http.ResponseWriter, r *http.Request) {
	var missing []string
	for _, r := range s.ready {
		if err := r.Check(); err != nil {
			missing = append(missing, r.Name+": "+err.Error())
		}
	}
	if len(missing) > 0 {
		w.WriteHeader(http.StatusServiceUnavailable)
		if !wasAdmitted(r) {
			missing = []string{"not ready; with a token it is said why"}
		}
		fmt.Fprintln(w, strings.Join(missing, "\n"))
		return
	}
	fmt.Fprintln(w, "ready")
}
