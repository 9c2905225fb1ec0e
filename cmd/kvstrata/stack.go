package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"

	"kvstrata/bus"
	"kvstrata/event"
	"kvstrata/indexer/history"
	"kvstrata/indexer/history/embedded"
	"kvstrata/indexer/prefix"
	"kvstrata/indexer/prefix/llmd"
	"kvstrata/publisher"
	"kvstrata/server"
	"kvstrata/subscriber"
)

// natsFlags say which NATS to use.
type natsFlags struct {
	natsLogin

	NATS         string        `name:"nats" help:"NATS servers, comma-separated. Empty: a server is embedded." placeholder:"URL" env:"KVSTRATA_NATS"`
	NATSListen   string        `name:"nats-listen" help:"Address of the embedded NATS server; port 0 takes a free one." default:"127.0.0.1:4222" env:"KVSTRATA_NATS_LISTEN"`
	NATSReplicas int           `name:"nats-replicas" help:"Replicas of streams and buckets." default:"1" env:"KVSTRATA_NATS_REPLICAS"`
	NATSMaxAge   time.Duration `name:"nats-max-age" help:"How long the event stream keeps messages." default:"24h" env:"KVSTRATA_NATS_MAX_AGE"`
	NATSMaxBytes int64         `name:"nats-max-bytes" help:"How many bytes the event stream keeps." default:"8589934592" env:"KVSTRATA_NATS_MAX_BYTES"`
	LeaseTTL     time.Duration `name:"lease-ttl" help:"How long a subscriber that vanished keeps its sources." default:"5s" env:"KVSTRATA_LEASE_TTL"`
}

func (f natsFlags) config() bus.Config {
	cfg := bus.Config{
		URL: f.NATS, Replicas: f.NATSReplicas, MaxAge: f.NATSMaxAge, MaxBytes: f.NATSMaxBytes, LeaseTTL: f.LeaseTTL,
	}
	if f.NATS == "" { // the login is the embedded server's
		return cfg
	}
	return f.client(cfg)
}

// edgeFlags say what of prompts may pass.
type edgeFlags struct {
	HashKey         string `help:"Key of the prefix hashes; the subscriber's and the index's must be the same. Empty: Dynamo's public scheme." env:"KVSTRATA_HASH_KEY"`
	Tokens          string `help:"drop or keep the token ids, which are prompt text, after hashing." enum:"drop,keep" default:"drop" env:"KVSTRATA_TOKENS"`
	AllowInvertible bool   `help:"Publish prefix hashes also for blocks under 16 tokens, which a table inverts." env:"KVSTRATA_ALLOW_INVERTIBLE"`
}

func (f edgeFlags) subscriber() subscriber.Config {
	cfg := subscriber.DefaultConfig()
	cfg.HashKey, cfg.KeepTokens, cfg.AllowInvertible = f.HashKey, f.Tokens == "keep", f.AllowInvertible
	return cfg
}

// listenFlags say where the process is reached.
type listenFlags struct {
	Listen    string `help:"Address of the API." default:"127.0.0.1:8080" env:"KVSTRATA_LISTEN"`
	Admin     string `help:"Address of health, metrics and profiles." default:"127.0.0.1:8081" env:"KVSTRATA_ADMIN"`
	GRPC      string `name:"grpc" help:"Address of the index's gRPC service, with the roles prefix and web; port 0 takes a free one. Empty: none." placeholder:"HOST:PORT" env:"KVSTRATA_GRPC"`
	TokenFile string `help:"File of tokens, one a line, one of which every request must show; or $KVSTRATA_TOKEN holds one." type:"path" placeholder:"FILE" env:"KVSTRATA_TOKEN_FILE"`
	TLSCert   string `name:"tls-cert" help:"Certificate in PEM of all listeners." type:"path" placeholder:"FILE" env:"KVSTRATA_TLS_CERT"`
	TLSKey    string `name:"tls-key" help:"The key of --tls-cert." type:"path" placeholder:"FILE" env:"KVSTRATA_TLS_KEY"`
}

func (f listenFlags) config() server.Config {
	return server.Config{
		Listen: f.Listen, Admin: f.Admin, RPC: f.GRPC, TokenFile: f.TokenFile, Token: server.Secret(os.Getenv(server.TokenVariable)),
		TLSCert: f.TLSCert, TLSKey: f.TLSKey,
	}
}

// child returns the arguments with which a process of ours has the same door.
func (f listenFlags) child() (args []string) {
	for flag, value := range map[string]string{"--token-file": f.TokenFile, "--tls-cert": f.TLSCert, "--tls-key": f.TLSKey} {
		if value != "" {
			args = append(args, flag, value)
		}
	}
	return args
}

// stack is the roles of one process around one bus. Whoever makes it closes it.
type stack struct {
	app      *app
	registry *prometheus.Registry
	nats     *bus.Server // nil where a real server is used
	bus      *bus.Bus

	index     *prefix.Index
	consumer  *subscriber.Consumer // of the index
	observers []func(*event.Message)
	sub       *subscriber.Subscriber
	wrap      func(event.Source, subscriber.Stream) subscriber.Stream // what a benchmark puts round a stream; nil for nothing
	engine    *embedded.Engine                                        // nil where a real ClickHouse is used
	writer    *history.Writer
	reader    *history.Reader
	watch     *historyWatch
	server    *server.Server
	rpc       *server.RPC       // nil without --grpc
	kvIndexer *server.KVIndexer // nil without --kv-indexer
	tokenizer *llmd.Tokenizer   // nil without --tokenizer

	handlers map[string]http.Handler
	ready    []server.Ready
	runs     []func(context.Context) error
}

// newStack connects to NATS, or embeds a server whose streams lie in dir.
func newStack(a *app, flags natsFlags, dir string) (*stack, error) {
	s := &stack{app: a, registry: prometheus.NewRegistry(), handlers: make(map[string]http.Handler)}
	s.registry.MustRegister(collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	cfg := flags.config()
	if err := cfg.Validate(); err != nil {
		return nil, usagef("%w", err)
	}
	var options []bus.Option
	if cfg.URL == "" {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return nil, fmt.Errorf("make data folder: %w; choose another with --data", err)
		}
		srvCfg, err := flags.server(flags.NATSListen)
		if err != nil {
			return nil, err
		}
		srvCfg.Dir = dir
		srv, err := bus.StartServer(srvCfg, a.log)
		if err != nil {
			return nil, fmt.Errorf("%w; choose another address with --nats-listen, or use a server that runs with --nats", err)
		}
		s.nats = srv
		cfg.URL = srv.URL()
		options = append(options, bus.InProcess(srv))
	}
	b, err := bus.Dial(a.ctx, cfg, "kvstrata", a.log, options...)
	if err != nil {
		s.close()
		return nil, err
	}
	s.bus = b
	s.registry.MustRegister(
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "kvstrata_bus_connected", Help: "1 while the connection to NATS stands.",
		}, func() float64 {
			if b.Connected() {
				return 1
			}
			return 0
		}),
		prometheus.NewCounterFunc(prometheus.CounterOpts{
			Name: "kvstrata_bus_reconnects_total", Help: "How often the connection to NATS was lost and made again.",
		}, func() float64 { return float64(b.Reconnects()) }))
	s.ready = append(s.ready, server.Ready{Name: "nats", Check: func() error {
		if !b.Connected() {
			return errors.New("not connected")
		}
		return nil
	}})
	return s, nil
}

// shareFlags say which part of a fleet the process's index keeps.
type shareFlags struct {
	Shard  prefix.Shard `help:"The part of the prefix hashes that the index keeps, as 2/8 for the second of eight; kvstrata gather asks all. Without: all." placeholder:"PART/PARTS" env:"KVSTRATA_SHARD"`
	Models []string     `help:"Models that the index keeps, comma-separated. Without: all." placeholder:"MODEL" env:"KVSTRATA_MODELS"`
	Told   uint32       `name:"lookup-records" help:"Of this many lookups one is told to history; 1: each, 0: none." default:"100" env:"KVSTRATA_LOOKUP_RECORDS"`
	Memory int64        `name:"index-memory" help:"Bytes that the blocks of the prefix index may take; beyond it those not used for longest are left out, and their sources are partial. 0: no bound." default:"0" env:"KVSTRATA_INDEX_MEMORY"`
}

// addPrefix adds the prefix index; once is enough.
func (s *stack) addPrefix(hashKey string, share shareFlags) error {
	if s.index != nil {
		return nil
	}
	cfg := prefix.DefaultConfig()
	cfg.HashKey, cfg.Shard, cfg.Models, cfg.MaxBytes = hashKey, share.Shard, share.Models, share.Memory
	if share.Told > 0 {
		records := publisher.NewRecords(s.bus, s.app.log)
		if err := s.registry.Register(records.Collector("index")); err != nil {
			return fmt.Errorf("register metrics of lookup records: %w", err)
		}
		s.runs = append(s.runs, records.Run)
		cfg.Lookups = &prefix.Teller{OneIn: share.Told, Tell: func(l event.Lookup) { records.Record(event.Records{Lookups: []event.Lookup{l}}) }}
	}
	s.index = prefix.New(cfg)
	if err := s.registry.Register(s.index); err != nil {
		return fmt.Errorf("register index metrics: %w", err)
	}
	consume := subscriber.DefaultConsumerConfig()
	consume.Models = share.Models
	s.consumer = subscriber.NewConsumer(consume, s.bus, observedIndex{s.index, s}, "prefix", s.app.log, s.registry)
	caughtUp := func() error {
		if !s.consumer.CaughtUp() {
			return errors.New("not caught up with the stream")
		}
		return nil
	}
	s.handlers["/v1/"] = s.index.Handler()
	s.handlers["/v1/shard"] = s.index.ShardHandler(caughtUp)
	s.handlers["/v1/shard/"] = s.handlers["/v1/shard"]
	if !cfg.Shard.Whole() {
		s.handlers["/v1/lookup"] = s.index.RefuseLookup()
	}
	s.ready = append(s.ready, server.Ready{Name: "prefix", Check: caughtUp})
	s.runs = append(s.runs, s.consumer.Run)
	return nil
}

// observedIndex shows the stack's observers each message as soon as lookups see it. They are set before the stack runs.
type observedIndex struct {
	*prefix.Index
	stack *stack
}

// Apply applies, and shows.
func (x observedIndex) Apply(ctx context.Context, m *event.Message) (event.Digest, error) {
	digest, err := x.Index.Apply(ctx, m)
	if err == nil {
		for _, observe := range x.stack.observers {
			observe(m)
		}
	}
	return digest, err
}

// addSubscriber adds the subscriber of engines.
func (s *stack) addSubscriber(cfg subscriber.Config, engines []subscriber.EngineConfig) error {
	open := func(source event.Source, fence event.Fence) subscriber.Stream {
		stream := publisher.NewStream(publisher.DefaultStreamConfig(), s.bus, source, fence, s.app.log)
		if s.wrap != nil {
			return s.wrap(source, stream)
		}
		return stream
	}
	sub, err := subscriber.New(cfg, engines, s.bus, open, s.app.log, s.registry)
	if err != nil {
		return err
	}
	s.sub = sub
	s.ready = append(s.ready, server.Ready{Name: "subscriber", Check: func() error {
		if !sub.Ready() {
			return errors.New("not every engine's session has begun")
		}
		return nil
	}})
	s.runs = append(s.runs, sub.Run)
	return nil
}

// listen binds the public and the admin address.
func (s *stack) listen(flags listenFlags) error {
	if err := flags.config().Validate(); err != nil {
		return usagef("%w", err)
	}
	if flags.config().Guarded() && flags.TLSCert == "" && (reachable(flags.Listen) || reachable(flags.Admin) || reachable(flags.GRPC)) {
		s.app.log.Warn("tokens travel in the clear: give --tls-cert and --tls-key, or have something in front that speaks TLS")
	}
	srv, err := server.New(flags.config(), s.handlers, s.ready, s.registry, s.app.log)
	if err != nil {
		return err
	}
	s.server = srv
	s.runs = append(s.runs, srv.Run)
	if flags.GRPC == "" {
		return nil
	}
	return s.listenRPC(flags)
}

// listenRPC binds the address of the index's gRPC service.
func (s *stack) listenRPC(flags listenFlags) error {
	if s.index == nil {
		return usagef("--grpc %s: serves the index, and no role of this process has one; add prefix to --roles", flags.GRPC)
	}
	rpc, err := server.NewRPC(flags.config(), func(r *grpc.Server) {
		llmd.Register(r, s.index, s.tokenize())
		s.index.RegisterRPC(r, s.consumer.CaughtUp)
	}, s.app.log)
	if err != nil {
		return err
	}
	s.app.log.Info("the index's gRPC service is up", "address", rpc.Address())
	s.rpc = rpc
	s.runs = append(s.runs, rpc.Run)
	return nil
}

// run runs all roles until ctx ends, or one fails.
func (s *stack) run(ctx context.Context) error {
	group, ctx := errgroup.WithContext(ctx)
	for _, r := range s.runs {
		group.Go(func() error { return r(ctx) })
	}
	return group.Wait()
}

func (s *stack) close() {
	if s.tokenizer != nil {
		s.tokenizer.Close()
	}
	if s.reader != nil {
		if err := s.reader.Close(); err != nil {
			s.app.log.Warn("closing the connections to ClickHouse", "err", err)
		}
	}
	if s.bus != nil {
		s.bus.Close()
	}
	if s.nats != nil {
		s.nats.Shutdown()
	}
}
