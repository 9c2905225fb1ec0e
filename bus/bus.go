// Package bus is the contract with NATS: the grammar of subjects and headers, the streams, the checkpoint objects, the
// leases, and a real server to embed. docs/format/subjects.md is normative.
package bus

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"kvstrata/event"
)

// Names of what lies in JetStream.
const (
	EventStream      = "KV_EVENTS"      // kinds ev and status, in order
	RecordStream     = "KV_RECORDS"     // kinds transfer, lookup and gpu
	CheckpointBucket = "kv-checkpoints" // object store
	LeaseBucket      = "kv-leases"      // key-value, expiring
)

// Config says how to reach NATS and what to keep there.
type Config struct {
	// URL lists servers, comma-separated. Ignored where a server is embedded.
	URL string
	// Identity is how to log in; with all of it empty, as nobody.
	Identity
	// Credentials is a NATS credentials file; empty for none.
	Credentials string
	// ServerName is the name that the server's certificate must have; empty = the one in URL.
	ServerName string
	// Replicas of streams and buckets.
	Replicas int
	// MaxAge and MaxBytes bound the event stream; the oldest messages go first, since observing must never push back
	// on inference.
	MaxAge   time.Duration
	MaxBytes int64
	// LeaseTTL is how long a holder that vanished keeps its sources.
	LeaseTTL time.Duration
}

// DefaultConfig returns a configuration for one server.
func DefaultConfig() Config {
	return Config{
		URL: nats.DefaultURL, Replicas: 1, MaxAge: 24 * time.Hour, MaxBytes: 8 << 30, LeaseTTL: 5 * time.Second,
	}
}

// Validate reports every problem at once.
func (c Config) Validate() error {
	errs := c.Identity.validate()
	if strings.Contains(c.URL, "@") { // it is told in logs
		errs = append(errs, fmt.Errorf("--nats: holds a user; name it in --nats-user, and its password in --nats-password-file or %s", PasswordVariable))
	}
	given := 0
	for _, way := range []string{c.User, c.NKey, c.Credentials} {
		if way != "" {
			given++
		}
	}
	if given > 1 {
		errs = append(errs, errors.New("--nats-user, --nats-nkey, --nats-creds: want one of them at most"))
	}
	if c.Replicas < 1 || c.Replicas > 5 {
		errs = append(errs, fmt.Errorf("--nats-replicas %d: want 1 to 5", c.Replicas))
	}
	if c.MaxAge < time.Minute {
		errs = append(errs, fmt.Errorf("--nats-max-age %v: want a minute or more", c.MaxAge))
	}
	if c.MaxBytes < 1<<20 {
		errs = append(errs, fmt.Errorf("--nats-max-bytes %d: want 1048576 or more", c.MaxBytes))
	}
	if c.LeaseTTL < time.Second {
		errs = append(errs, fmt.Errorf("--lease-ttl %v: want a second or more", c.LeaseTTL))
	}
	return errors.Join(errs...)
}

// Bus is a connection to NATS with everything of ours in it. Safe for concurrent use.
type Bus struct {
	cfg         Config
	log         *slog.Logger
	conn        *nats.Conn
	js          jetstream.JetStream
	options     []nats.Option
	bulk        *nats.Conn // for checkpoints, since events must not queue behind them; nil in tools that only look
	checkpoints jetstream.ObjectStore
	pace        pace
	leases      jetstream.KeyValue
}

// Option changes how Dial connects.
type Option func(*[]nats.Option)

// InProcess connects to an embedded server without a socket, and with a key that only this process has. The identity of
// the configuration is the server's then, and is not used.
func InProcess(s *Server) Option {
	return func(opts *[]nats.Option) { *opts = append(*opts, s.inProcess...) }
}

// Dial connects, waits for a server until ctx ends, and makes the streams and buckets that are missing. Later it
// reconnects by itself, for ever. The caller closes the bus.
func Dial(ctx context.Context, cfg Config, name string, log *slog.Logger, options ...Option) (*Bus, error) {
	b, err := Attach(ctx, cfg, name, log, options...)
	if err != nil {
		return nil, err
	}
	if b.bulk, err = nats.Connect(b.cfg.URL, b.options...); err != nil {
		b.Close()
		return nil, fmt.Errorf("connect to NATS at %s: %w", b.cfg.URL, err)
	}
	bulk, err := jetstream.New(b.bulk)
	if err == nil {
		b.checkpoints, b.leases, err = b.provideInTime(ctx, bulk)
	}
	if err != nil {
		b.Close()
		return nil, err
	}
	b.conn.SetReconnectHandler(func(*nats.Conn) {
		log.Info("reconnected to NATS")
		b.provideAgain(bulk)
	})
	return b, nil
}

// Attach connects as Dial does, but makes nothing: for tools that only look.
func Attach(ctx context.Context, cfg Config, name string, log *slog.Logger, options ...Option) (*Bus, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	if len(options) > 0 { // within a process there is no TLS
		cfg.URL = strings.Replace(cfg.URL, "tls://", "nats://", 1)
	}
	b := &Bus{cfg: cfg, log: log}
	opts := []nats.Option{
		nats.Name(name), nats.MaxReconnects(-1), nats.RetryOnFailedConnect(true), nats.IgnoreAuthErrorAbort(), // what a user may can change
		nats.ReconnectWait(250 * time.Millisecond), nats.ReconnectJitter(100*time.Millisecond, 100*time.Millisecond),
		nats.ReconnectBufSize(64 << 20), nats.PingInterval(5 * time.Second), nats.MaxPingsOutstanding(2),
	}
	if len(options) == 0 {
		login, err := cfg.clientOptions()
		if err != nil {
			return nil, fmt.Errorf("connect to NATS: %w", err)
		}
		opts = append(opts, login...)
	}
	for _, o := range options {
		o(&opts)
	}
	b.options = opts
	var refused time.Time // used by nats.go's one goroutine of callbacks
	conn, err := nats.Connect(cfg.URL, append(slices.Clone(opts),
		nats.ConnectHandler(func(conn *nats.Conn) {
			log.Info("connected to NATS")
			if host, ok := cfg.inTheClear(conn); ok {
				log.Warn("the NATS password went over the network in the clear; use tls:// and --nats-ca, or --nats-nkey", "host", host)
			}
		}),
		nats.DisconnectErrHandler(func(_ *nats.Conn, err error) {
			if err != nil {
				log.Warn("NATS connection lost; reconnecting", "err", err)
			}
		}),
		nats.ReconnectHandler(func(*nats.Conn) { log.Info("reconnected to NATS") }),
		nats.ErrorHandler(func(_ *nats.Conn, sub *nats.Subscription, err error) {
			if errors.Is(err, nats.ErrAuthorization) { // at each try
				if time.Since(refused) < refusedEvery {
					return
				}
				refused = time.Now()
			}
			subject := ""
			if sub != nil {
				subject = sub.Subject
			}
			log.Warn("NATS reports an error", "subject", subject, "err", err)
		}))...)
	if err != nil {
		return nil, fmt.Errorf("connect to NATS at %s: %w; see that --nats names a server with JetStream", cfg.URL, err)
	}
	b.conn = conn
	if err := b.open(ctx); err != nil {
		b.Close()
		return nil, err
	}
	return b, nil
}

// refusedEvery is how often at most the log tells that the server refuses the user.
const refusedEvery = 10 * time.Second

// maxPending is how many publishes may await their acknowledgement in nats.go; our own publishers bound bytes.
const maxPending = 1 << 16

func (b *Bus) open(ctx context.Context) error {
	if err := b.awaitConnection(ctx); err != nil {
		return err
	}
	js, err := jetstream.New(b.conn, jetstream.WithPublishAsyncMaxPending(maxPending),
		jetstream.WithPublishAsyncTimeout(5*time.Second))
	if err != nil {
		return fmt.Errorf("open JetStream: %w", err)
	}
	b.js = js
	return nil
}

// provide makes the streams and buckets that are missing.
func (b *Bus) provide(ctx context.Context, bulk jetstream.JetStream) (jetstream.ObjectStore, jetstream.KeyValue, error) {
	for _, stream := range []jetstream.StreamConfig{
		{
			Name: EventStream, Subjects: []string{subjectRoot + "ev.>", subjectRoot + "status.>"},
			MaxAge: b.cfg.MaxAge, MaxBytes: b.cfg.MaxBytes,
		},
		{
			Name: RecordStream, Subjects: []string{subjectRoot + "transfer.>", subjectRoot + "lookup.>", subjectRoot + "gpu.>"},
			MaxAge: b.cfg.MaxAge, MaxBytes: b.cfg.MaxBytes / 8,
		},
	} {
		stream.Storage = jetstream.FileStorage
		stream.Discard = jetstream.DiscardOld
		stream.Replicas = b.cfg.Replicas
		stream.Duplicates = 5 * time.Second
		if _, err := b.js.CreateOrUpdateStream(ctx, stream); err != nil {
			return nil, nil, fmt.Errorf("make stream %s: %w; NATS needs JetStream with room on disk", stream.Name, err)
		}
	}
	checkpoints, err := bulk.CreateOrUpdateObjectStore(ctx, jetstream.ObjectStoreConfig{
		Bucket: CheckpointBucket, Storage: jetstream.FileStorage, Replicas: b.cfg.Replicas,
	})
	if err != nil {
		return nil, nil, fmt.Errorf("make object store %s: %w", CheckpointBucket, err)
	}
	leases, err := b.js.CreateOrUpdateKeyValue(ctx, jetstream.KeyValueConfig{
		Bucket: LeaseBucket, Storage: jetstream.FileStorage, Replicas: b.cfg.Replicas, TTL: b.cfg.LeaseTTL,
	})
	if err != nil {
		return nil, nil, fmt.Errorf("make key-value bucket %s: %w", LeaseBucket, err)
	}
	return checkpoints, leases, nil
}

// provideTime is how long JetStream may take to become ready: a cluster that just started elects leaders first.
const provideTime = 30 * time.Second

// provideInTime makes what is missing, and waits for a JetStream that is not ready yet.
func (b *Bus) provideInTime(ctx context.Context, bulk jetstream.JetStream) (jetstream.ObjectStore, jetstream.KeyValue, error) {
	for began, said := time.Now(), false; ; {
		checkpoints, leases, err := b.provide(ctx, bulk)
		if !notReady(err) || ctx.Err() != nil || time.Since(began) > provideTime {
			return checkpoints, leases, err
		}
		if !said {
			said = true
			b.log.Warn("waiting for JetStream", "err", err)
		}
		select {
		case <-ctx.Done():
			return nil, nil, err
		case <-time.After(250 * time.Millisecond):
		}
	}
}

// notReady reports whether an error says that JetStream may do it later.
func notReady(err error) bool {
	var refused *jetstream.APIError
	return errors.Is(err, context.DeadlineExceeded) || errors.Is(err, nats.ErrTimeout) || errors.Is(err, nats.ErrNoResponders) ||
		errors.As(err, &refused) && refused.Code == http.StatusServiceUnavailable
}

// provideAgain makes what a server that came back without its store lost. What refers to it by name goes on.
func (b *Bus) provideAgain(bulk jetstream.JetStream) {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	for {
		_, _, err := b.provide(ctx, bulk)
		if err == nil || b.conn.IsClosed() {
			return
		}
		select {
		case <-ctx.Done():
			b.log.Warn("streams can't be made anew on the server that came back", "err", err)
			return
		case <-time.After(250 * time.Millisecond):
		}
	}
}

// final reports whether an error of the first connection is one that waiting does not mend.
func final(err error) bool {
	var cert *tls.CertificateVerificationError
	return errors.Is(err, nats.ErrAuthorization) || errors.Is(err, nats.ErrAuthExpired) || errors.Is(err, nats.ErrAuthRevoked) ||
		errors.Is(err, nats.ErrSecureConnWanted) || errors.Is(err, nats.ErrSecureConnRequired) || errors.As(err, &cert)
}

func (b *Bus) awaitConnection(ctx context.Context) error {
	said := false
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for !b.conn.IsConnected() {
		if err := b.conn.LastError(); final(err) {
			return fmt.Errorf("connect to NATS at %s: %w; see --nats-user, --nats-nkey or --nats-creds, and with TLS --nats-ca, --nats-cert "+
				"and --nats-server-name", b.cfg.URL, err)
		}
		if !said {
			said = true
			b.log.Warn("waiting for NATS", "url", b.cfg.URL)
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("connect to NATS at %s: %w; see that --nats names a server that runs", b.cfg.URL, ctx.Err())
		case <-tick.C:
		}
	}
	return nil
}

// Close ends the connection; what was published and not yet acknowledged may be lost.
func (b *Bus) Close() {
	b.conn.Close()
	if b.bulk != nil {
		b.bulk.Close()
	}
}

// Connected reports whether the connection stands.
func (b *Bus) Connected() bool { return b.conn.IsConnected() }

// Reconnects returns how often the connection was lost and made again.
func (b *Bus) Reconnects() uint64 { return b.conn.Stats().Reconnects }

// Position returns where the event stream ends, with its identity.
func (b *Bus) Position(ctx context.Context) (event.Position, error) {
	return b.position(ctx, EventStream)
}

func (b *Bus) position(ctx context.Context, name string) (event.Position, error) {
	stream, err := b.js.Stream(ctx, name)
	if err != nil {
		return event.Position{}, fmt.Errorf("look up stream %s: %w", name, err)
	}
	info := stream.CachedInfo()
	return event.Position{
		Stream: info.Config.Name, Created: event.UnixTime(info.Created), Sequence: info.State.LastSeq,
	}, nil
}

// First returns the first stream sequence that the event stream still holds.
func (b *Bus) First(ctx context.Context) (uint64, error) {
	stream, err := b.js.Stream(ctx, EventStream)
	if err != nil {
		return 0, fmt.Errorf("look up stream %s: %w", EventStream, err)
	}
	return stream.CachedInfo().State.FirstSeq, nil
}

// MaxPayload returns the largest message that the server takes, in bytes.
func (b *Bus) MaxPayload() int64 { return b.conn.MaxPayload() }

// PublishAsync sends a message in order with all others of this bus; the future tells whether it was stored. The
// message may be sent again after its future has failed.
func (b *Bus) PublishAsync(msg *nats.Msg) (jetstream.PubAckFuture, error) {
	msg.Reply = ""
	return b.js.PublishMsgAsync(msg)
}

// HandleControl answers requests for a source, on core NATS, until the subscription is ended. handle runs on a
// goroutine of the subscription's own and returns the reply.
func (b *Bus) HandleControl(source event.Source, handle func(request string) string) (*nats.Subscription, error) {
	subject := Subject(Control, source)
	sub, err := b.conn.Subscribe(subject, func(msg *nats.Msg) {
		reply := handle(string(msg.Data))
		if msg.Reply == "" {
			return
		}
		if err := msg.Respond([]byte(reply)); err != nil {
			b.log.Warn("control request could not be answered", "source", source, "err", err)
		}
	})
	if err != nil {
		return nil, fmt.Errorf("subscribe to %s: %w", subject, err)
	}
	return sub, nil
}

// CheckpointRequest asks a source's publisher for a fresh checkpoint.
const CheckpointRequest = "checkpoint"

// RequestCheckpoint asks a source's publisher for a fresh checkpoint; it appears in the object store soon after.
func (b *Bus) RequestCheckpoint(ctx context.Context, source event.Source) error {
	if _, err := b.conn.RequestWithContext(ctx, Subject(Control, source), []byte(CheckpointRequest)); err != nil {
		return fmt.Errorf("ask %v for a checkpoint: %w", source, err)
	}
	return nil
}
