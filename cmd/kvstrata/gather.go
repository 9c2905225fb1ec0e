package main

import (
	"fmt"
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"kvstrata/indexer/prefix/gather"
	"kvstrata/server"
)

type gatherCmd struct {
	listenFlags
	insecureFlag

	Shards         []string      `help:"Addresses of the indexes, comma-separated: every part of the prefix hashes, each once or more." required:"" placeholder:"URL" env:"KVSTRATA_SHARDS"`
	HashKey        string        `help:"Key of the prefix hashes; the subscriber's. Empty: Dynamo's public scheme." env:"KVSTRATA_HASH_KEY"`
	ShardTimeout   time.Duration `help:"How long one index may take to answer; then another one of its part is asked." default:"2s" env:"KVSTRATA_SHARD_TIMEOUT"`
	ShardTokenFile string        `help:"File whose first token the indexes are shown. Empty: that of --token-file, or $KVSTRATA_TOKEN." type:"path" placeholder:"FILE" env:"KVSTRATA_SHARD_TOKEN_FILE"`
	ShardCA        string        `name:"shard-ca" help:"Certificates in PEM that the indexes' must come from; empty: the system's." type:"path" placeholder:"FILE" env:"KVSTRATA_SHARD_CA"`
}

// Help shows how it is used.
func (gatherCmd) Help() string {
	return `Answers POST /v1/lookup from indexes that each keep a part (run --roles prefix --shard 1/2), or some models (--models).

Example:

  kvstrata gather --shards http://10.0.0.5:8080,http://10.0.0.6:8080 --listen 0.0.0.0:8090 --token-file tokens`
}

// shardConnections is how many connections to one index are kept for the next question.
const shardConnections = 64

// Run answers until a signal comes.
func (c *gatherCmd) Run(a *app) error {
	if err := c.check(c.listenFlags.entrances()...); err != nil {
		return err
	}
	cfg := gather.DefaultConfig()
	cfg.Shards, cfg.HashKey, cfg.Timeout = c.Shards, c.HashKey, c.ShardTimeout
	if err := cfg.Validate(); err != nil {
		return usagef("%w", err)
	}
	show := clientFlags{TokenFile: c.ShardTokenFile, CA: c.ShardCA}
	if show.TokenFile == "" {
		show.TokenFile = c.TokenFile
	}
	client, err := show.client(a.log, 0) // each question has a limit of its own
	if err != nil {
		return err
	}
	client.Transport.(*bearer).next.MaxIdleConnsPerHost = shardConnections
	client.Transport.(*bearer).next.MaxIdleConns = 0
	s := &stack{app: a, registry: prometheus.NewRegistry(), handlers: make(map[string]http.Handler)}
	s.registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	front, err := gather.New(cfg, client, a.log, s.registry)
	if err != nil {
		return err
	}
	s.handlers["/v1/"] = front.Handler()
	s.ready = append(s.ready, server.Ready{Name: "shards", Check: front.Ready})
	s.runs = append(s.runs, front.Run)
	if err := s.listen(c.listenFlags); err != nil {
		return err
	}
	fmt.Fprintf(a.stdout, "kvstrata gather\n  api    %s\n  admin  %s\n  shards %d addresses\n", s.server.URL(), s.server.AdminURL(), len(c.Shards))
	return s.run(a.ctx)
}
