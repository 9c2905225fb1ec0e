package main

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"kvstrata/subscriber"
)

type runCmd struct {
	natsFlags
	edgeFlags
	listenFlags
	kvIndexerFlag
	tokenizerFlag
	historyFlags
	storeFlags
	shareFlags
	insecureFlag

	Roles   []string `help:"Roles of this process: subscriber, prefix, history, web, store." default:"subscriber,prefix,history,web" env:"KVSTRATA_ROLES"`
	Engine  []string `help:"An engine, repeated: zmq+tcp://host:5557,model=NAME[,replay=tcp://host:5558][,instance=NAME][,rank=0][,ranks=1][,topic=PREFIX][,dialect=NAME][,report=new|full][,pool=BLOCKS][,curve=FILE][,hash=SCHEME][,hash-seed=SEED]; or trtllm+http://…, dynamo+file://…: docs/configuration.md." sep:"none" placeholder:"ENGINE" env:"KVSTRATA_ENGINE"`
	Engines string   `help:"A file of engines, one a line." type:"path" env:"KVSTRATA_ENGINES"`
	Data    string   `help:"Folder of the embedded NATS server and the embedded ClickHouse engine; kept." type:"path" placeholder:"DIR" env:"KVSTRATA_DATA"`
}

// Help shows how it is used.
func (runCmd) Help() string {
	return `Example:

  kvstrata run --engine zmq+tcp://10.0.0.5:5557,replay=tcp://10.0.0.5:5558,model=meta/Llama-3.1-8B
  kvstrata run --roles prefix --nats nats://10.0.0.9:4222 --nats-creds kvstrata.creds --listen 0.0.0.0:8080 --token-file tokens --tls-cert cert.pem --tls-key key.pem
  kvstrata run --roles prefix --shard 2/8 --nats nats://10.0.0.9:4222 --nats-creds kvstrata.creds
  kvstrata run --roles store --nats nats://10.0.0.9:4222 --store redis://10.0.0.7:6379/0 --store-model meta/Llama-3.1-8B`
}

var (
	fleetRoles = []string{"subscriber", "prefix", "history", "web"} // that every fleet has
	knownRoles = append(slices.Clone(fleetRoles), "store")
)

// Run runs the roles until a signal comes.
func (c *runCmd) Run(a *app) error {
	engines, err := c.engines()
	if err != nil {
		return err
	}
	if !c.Shard.Whole() && (slices.Contains(c.Roles, "web") || !slices.Contains(c.Roles, "prefix")) {
		return usagef("--shard %v: goes with the role prefix, and without web, whose dashboard needs a whole index; see --roles", c.Shard)
	}
	entrances := append(c.listenFlags.entrances(), c.kvIndexerFlag.entrances(c.listenFlags)...)
	if c.NATS == "" {
		nats, err := c.entrance(c.NATSListen)
		if err != nil {
			return err
		}
		entrances = append(entrances, nats)
	}
	if err := c.check(entrances...); err != nil {
		return err
	}
	dir := c.Data
	if dir == "" {
		if dir, err = stateDir(); err != nil {
			return err
		}
	}
	var watched storeSpec
	if slices.Contains(c.Roles, "store") {
		if watched, err = c.spec(); err != nil {
			return err
		}
	}
	if c.NATS == "" && !slices.Contains(c.Roles, "subscriber") && !slices.Contains(c.Roles, "store") {
		a.log.Warn("nothing will ever come: the embedded NATS is this process's own, and no subscriber is among its --roles; " +
			"name the servers that the subscriber publishes to with --nats")
	}
	s, err := newStack(a, c.natsFlags, filepath.Join(dir, "nats"))
	if err != nil {
		return err
	}
	defer s.close()
	for _, role := range c.Roles {
		switch role {
		case "subscriber":
			err = s.addSubscriber(c.edgeFlags.subscriber(), engines)
		case "prefix":
			err = s.addPrefix(c.HashKey, c.shareFlags)
		case "history":
			err = s.addHistory(c.HashKey, c.historyFlags, dir, nil)
		case "web":
			err = s.addWeb(c.HashKey, c.shareFlags, c.historyFlags, dir, c.Roles)
		case "store":
			err = s.addStore(watched)
		}
		if err != nil {
			return err
		}
	}
	if c.KVIndexer != "" {
		if err := s.addKVIndexer(c.kvIndexerFlag, c.listenFlags, c.HashKey); err != nil {
			return err
		}
	}
	if err := s.addTokenizer(c.tokenizerFlag, c.listenFlags); err != nil {
		return err
	}
	if err := s.listen(c.listenFlags); err != nil {
		return err
	}
	fmt.Fprintf(a.stdout, "kvstrata %s\n  api    %s\n  admin  %s\n", strings.Join(c.Roles, ", "), s.server.URL(), s.server.AdminURL())
	if s.rpc != nil {
		fmt.Fprintf(a.stdout, "  grpc   %s\n", s.rpc.Address())
	}
	if s.kvIndexer != nil {
		fmt.Fprintf(a.stdout, "  kv indexer  %s\n", s.kvIndexer.URL())
	}
	if s.nats != nil {
		fmt.Fprintf(a.stdout, "  nats   embedded at %s, streams in %s\n", s.nats.URL(), dir)
	}
	if s.engine != nil {
		fmt.Fprintf(a.stdout, "  history  embedded engine, data in %s\n", engineDir(dir))
	}
	if slices.Contains(c.Roles, "store") {
		fmt.Fprintf(a.stdout, "  store %v\n", watched.source)
	}
	for _, e := range engines {
		fmt.Fprintf(a.stdout, "  engine %v at %s\n", e.Source, e.Endpoint)
	}
	return s.run(a.ctx)
}

// stateDir is where data are kept when --data names no folder: the user's own.
func stateDir() (string, error) {
	if dir := os.Getenv("XDG_STATE_HOME"); filepath.IsAbs(dir) {
		return filepath.Join(dir, "kvstrata"), nil
	}
	home, err := os.UserHomeDir()
	if err != nil {
		return "", usagef("--data: %w; name a folder", err)
	}
	return filepath.Join(home, ".local", "state", "kvstrata"), nil
}

// engines reads the engines of flag and file, and checks them against the roles.
func (c *runCmd) engines() ([]subscriber.EngineConfig, error) {
	for _, role := range c.Roles {
		if !slices.Contains(knownRoles, role) {
			return nil, usagef("--roles %q: want some of %s", role, strings.Join(knownRoles, ", "))
		}
	}
	var all []subscriber.EngineConfig
	for _, text := range c.Engine {
		engines, err := subscriber.ParseEngine(text)
		if err != nil {
			return nil, usagef("%w", err)
		}
		all = append(all, engines...)
	}
	if c.Engines != "" {
		f, err := os.Open(c.Engines)
		if err != nil {
			return nil, usagef("--engines %s: %w", c.Engines, err)
		}
		defer f.Close()
		engines, err := subscriber.ReadEngines(f)
		if err != nil {
			return nil, usagef("--engines %s: %w", c.Engines, err)
		}
		all = append(all, engines...)
	}
	if slices.Contains(c.Roles, "subscriber") && len(all) == 0 && c.KVIndexer == "" {
		return nil, usagef("the subscriber needs engines: give --engine or --engines, or have them registered at --kv-indexer, or leave the role out of --roles")
	}
	if err := subscriber.UniqueSources(all); err != nil {
		return nil, usagef("%w", err)
	}
	return all, nil
}
