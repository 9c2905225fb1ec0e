package main

import (
	"context"
	"encoding/json"
	"fmt"
	"iter"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"

	"kvstrata/bus"
	"kvstrata/connector"
	"kvstrata/connector/transports"
	"kvstrata/curve"
	"kvstrata/event"
	"kvstrata/publisher"
	"kvstrata/sim"
)

// simSpec says what one simulated engine is like, in this process or in another.
type simSpec struct {
	Name       string `help:"Name, the source's instance." required:""`
	Model      string `help:"What it serves." default:"demo/llama-sim"`
	PoolBlocks int    `help:"Physical blocks." default:"4096"`
	BlockSize  int    `help:"Tokens a block." default:"16"`
	Seed       uint64 `help:"Engines with different seeds call the same prefix differently."`
	Form       string `help:"Encoding of the events." enum:"map,array" default:"map"`
	Events     string `help:"Where events are published." default:"tcp://127.0.0.1:*"`
	Replay     string `help:"Where they are replayed." default:"tcp://127.0.0.1:*"`
	Curve      string `help:"Keys that protect both sockets; kvstrata curve-keys makes them." type:"path" placeholder:"FILE" env:"KVSTRATA_CURVE"`
	Buffer     int    `name:"buffer-steps" help:"Batches kept for replay; 0: 10000, as vLLM."`
	HashKey    string `help:"Key of the prefix hashes." env:"KVSTRATA_HASH_KEY"`
	Transfer   string `name:"kv-transfer-config" help:"The connector, as vLLM's flag of this name has it; without one there is none." placeholder:"JSON" env:"KVSTRATA_KV_TRANSFER_CONFIG"`
}

// simEngine is a simulated engine of this process with its sockets and its connector.
type simEngine struct {
	*sim.Engine
	source event.Source
	socket *publisher.ZMQ
	runs   []func(context.Context) error
}

// newSimEngine makes an engine. wrap, where it is not nil, stands between the engine and its socket.
func newSimEngine(a *app, b *bus.Bus, metrics prometheus.Registerer, spec simSpec, wrap func(*publisher.ZMQ, event.Source) sim.Publisher) (*simEngine, error) {
	cfg := publisher.DefaultZMQConfig()
	cfg.Endpoint, cfg.Replay, cfg.Topic = spec.Events, spec.Replay, "kv@"+spec.Name+"@"+spec.Model
	if spec.Buffer > 0 {
		cfg.BufferSteps = spec.Buffer
	}
	if err := cfg.Form.UnmarshalText([]byte(spec.Form)); err != nil {
		return nil, err
	}
	if spec.Curve != "" {
		keys, err := curve.ReadPublisher(spec.Curve)
		if err != nil {
			return nil, usagef("--curve: %w", err)
		}
		cfg.Keys = keys
	}
	socket, err := publisher.NewZMQ(cfg, a.log)
	if err != nil {
		return nil, err
	}
	e := &simEngine{
		source: event.Source{Cluster: event.DefaultCluster, Model: spec.Model, Instance: spec.Name, Origin: event.Engine},
		socket: socket, runs: []func(context.Context) error{socket.Run},
	}
	var out sim.Publisher = socket
	if wrap != nil {
		out = wrap(socket, e.source)
	}
	engineCfg := sim.DefaultEngineConfig()
	engineCfg.Name, engineCfg.PoolBlocks, engineCfg.BlockSize = spec.Name, spec.PoolBlocks, spec.BlockSize
	engineCfg.HashSeed, engineCfg.ReportGroup = spec.Seed, spec.Form == "map"
	if e.Engine, err = sim.NewEngine(engineCfg, out); err != nil {
		return nil, usagef("%w", err)
	}
	if spec.Transfer != "" {
		if err := e.connect(a, b, metrics, spec); err != nil {
			return nil, err
		}
	}
	return e, nil
}

// connect gives the engine a connector, whose events and records go onto the bus.
func (e *simEngine) connect(a *app, b *bus.Bus, metrics prometheus.Registerer, spec simSpec) error {
	transfer, err := connector.ParseConfig([]byte(spec.Transfer))
	if err != nil {
		return usagef("%w", err)
	}
	source := e.source
	source.Origin = event.Connector
	cfg := publisher.DefaultNATSConfig()
	if name, ok := transfer.Extra["store_name"]; ok && transfer.Role.Consumes() {
		var store string
		if err := json.Unmarshal(name, &store); err != nil {
			return usagef("store_name: want text: %w", err)
		}
		cfg.Stores = []string{store}
	}
	events, err := publisher.NewNATS(cfg, b, source, a.log)
	if err != nil {
		return err
	}
	records := publisher.NewRecords(b, a.log)
	if err := metrics.Register(records.Collector(spec.Name)); err != nil {
		return fmt.Errorf("register metrics of %s: %w", spec.Name, err)
	}
	monitor, err := connector.NewMonitor(transfer.Connector, spec.Name, a.log, metrics)
	if err != nil {
		return err
	}
	kv := sim.DefaultKVConfig()
	kv.Factory, kv.Transfer, kv.Model, kv.Log = transports.Default(), transfer, spec.Model, a.log
	kv.Source, kv.Hasher, kv.Events, kv.Records, kv.Stats = source, event.NewHasher(spec.HashKey), events, records.Record, monitor.Observe
	if err := e.Connect(kv); err != nil {
		return fmt.Errorf("connector of %s: %w", spec.Name, err)
	}
	e.runs = append(e.runs, events.Run, records.Run, monitor.Run, e.Run)
	return nil
}

// run runs what the engine needs around it until ctx ends; the engine itself is stepped by its fleet, or its host. Whoever
// steps it has stopped before Close.
func (e *simEngine) run(ctx context.Context) error {
	group, ctx := errgroup.WithContext(ctx)
	for _, run := range e.runs {
		group.Go(func() error { return run(ctx) })
	}
	return group.Wait()
}

// demoEngine is a simulated engine as the demo's report sees it, in this process or in another.
type demoEngine interface {
	Name() string
	// Tell returns what the engine did, and how many batches it published.
	Tell(ctx context.Context) (engineStory, error)
	// Resident yields what is cached and in how many copies.
	Blocks(ctx context.Context) iter.Seq2[sim.BlockKey, int]
}

// engineStory is what an engine did.
type engineStory struct {
	Stats     sim.EngineStats
	Published uint64 // batches
}

// Tell returns the engine's numbers; it stands still.
func (e *simEngine) Tell(context.Context) (engineStory, error) {
	return engineStory{Stats: e.Stats(), Published: e.socket.Seq()}, nil
}

// Blocks yields what is resident; the engine stands still.
func (e *simEngine) Blocks(context.Context) iter.Seq2[sim.BlockKey, int] { return e.Resident() }
