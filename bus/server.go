package bus

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	natsserver "github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nkeys"
)

// ServerConfig says how the embedded NATS server runs.
type ServerConfig struct {
	// Dir holds the streams.
	Dir string
	// Host and Port are where it listens; Port −1 takes a free one. Loopback unless told otherwise.
	Host string
	Port int
	// Identity names whom it lets in, and its certificate; with all of it empty, everybody, in the clear.
	Identity
}

// Validate reports every problem at once.
func (c ServerConfig) Validate() error { return errors.Join(c.Identity.validate()...) }

// Guarded reports whether the server asks who comes.
func (c ServerConfig) Guarded() bool {
	return c.User != "" || c.NKey != "" || c.Cert != "" && c.CA != ""
}

// DefaultServerConfig listens on a free port of loopback.
func DefaultServerConfig() ServerConfig {
	return ServerConfig{Host: "127.0.0.1", Port: natsserver.RANDOM_PORT}
}

// ListenAt returns a configuration that listens at host:port; port 0 takes a free one.
func ListenAt(addr string) (ServerConfig, error) {
	host, text, err := net.SplitHostPort(addr)
	if err != nil {
		return ServerConfig{}, fmt.Errorf("want host:port, as 127.0.0.1:4222: %w", err)
	}
	port, err := strconv.ParseUint(text, 10, 16)
	if err != nil {
		return ServerConfig{}, fmt.Errorf("port %q: want a number from 0 to 65535", text)
	}
	if port == 0 {
		return ServerConfig{Host: host, Port: natsserver.RANDOM_PORT}, nil
	}
	return ServerConfig{Host: host, Port: int(port)}, nil
}

// Server is a real NATS server within this process.
type Server struct {
	srv       *natsserver.Server
	lock      *os.File      // of the store folder
	inProcess []nats.Option // of this process's own connections
}

// maxPayload is what one message may hold: an engine's largest batch, with room.
const maxPayload = 8 << 20

// StartServer starts an embedded server and returns once it takes connections. The caller shuts it down.
func StartServer(cfg ServerConfig, log *slog.Logger) (*Server, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	if cfg.Port > 0 { // the server would try for long, and not say why
		l, err := net.Listen("tcp", net.JoinHostPort(cfg.Host, strconv.Itoa(cfg.Port)))
		if err != nil {
			return nil, fmt.Errorf("start embedded NATS: %w", err)
		}
		if err := l.Close(); err != nil {
			return nil, fmt.Errorf("start embedded NATS: %w", err)
		}
	}
	lock, err := lockStore(cfg.Dir)
	if err != nil {
		return nil, err
	}
	opts := &natsserver.Options{
		ServerName: "kvstrata", Host: cfg.Host, Port: cfg.Port, JetStream: true, StoreDir: cfg.Dir,
		NoSigs: true, NoLog: true, MaxPayload: maxPayload, MaxPending: 256 << 20,
	}
	own, err := cfg.protect(opts)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("start embedded NATS: %w", err), lock.Close())
	}
	srv, err := natsserver.NewServer(opts)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("start embedded NATS: %w", err), lock.Close())
	}
	srv.SetLoggerV2(serverLog{log}, false, false, false)
	srv.Start()
	if !srv.ReadyForConnections(20 * time.Second) {
		srv.Shutdown()
		srv.WaitForShutdown()
		_ = lock.Close()
		return nil, fmt.Errorf("start embedded NATS at %s:%d with %s: %w; see that the port is free and the folder can be written",
			cfg.Host, cfg.Port, cfg.Dir, errNotReady)
	}
	return &Server{srv: srv, lock: lock, inProcess: inProcess(srv, own)}, nil
}

// lockStore takes the store folder's lock, which ends with the process at the latest: two servers would ruin each other's
// files.
func lockStore(dir string) (*os.File, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("start embedded NATS: %w", err)
	}
	f, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("start embedded NATS: %w", err)
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		return nil, errors.Join(fmt.Errorf("start embedded NATS: another process has the folder %s (%w)", dir, err), f.Close())
	}
	return f, nil
}

// inProcess returns how this process connects to its own server; own is nil where everybody may.
func inProcess(srv *natsserver.Server, own nkeys.KeyPair) []nats.Option {
	opts := []nats.Option{nats.InProcessServer(srv)}
	if own != nil {
		public, _ := own.PublicKey() // it was had before
		opts = append(opts, nats.Nkey(public, own.Sign))
	}
	return opts
}

var errNotReady = errors.New("not ready after 20 s")

// URL returns the address for clients.
func (s *Server) URL() string { return s.srv.ClientURL() }

// Shutdown stops the server and waits until it has.
func (s *Server) Shutdown() {
	s.srv.Shutdown()
	s.srv.WaitForShutdown()
	_ = s.lock.Close() // gives the folder free
}

// serverLog passes the server's complaints on; what it merely tells is debug.
type serverLog struct{ log *slog.Logger }

func (l serverLog) Noticef(format string, v ...any) {
	l.log.Debug("nats: " + fmt.Sprintf(format, v...))
}

func (l serverLog) Warnf(format string, v ...any) {
	if strings.HasPrefix(format, "Plaintext passwords detected") { // it has the password from us, and not from a file of its own
		return
	}
	l.log.Warn("nats: " + fmt.Sprintf(format, v...))
}

func (l serverLog) Fatalf(format string, v ...any) { l.log.Error("nats: " + fmt.Sprintf(format, v...)) }

func (l serverLog) Errorf(format string, v ...any) {
	text := fmt.Sprintf(format, v...)
	if strings.Contains(text, "authentication error") || strings.Contains(text, "TLS handshake error") { // a stranger knocked
		l.log.Warn("nats: " + text)
		return
	}
	l.log.Error("nats: " + text)
}

func (l serverLog) Debugf(string, ...any) {}
func (l serverLog) Tracef(string, ...any) {}
