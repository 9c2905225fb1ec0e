// Package gather answers lookups of a fleet whose prefix hashes are divided among several indexes: it cuts a prompt into blocks,
// asks each shard about those that fall to it, and puts the answers together. It keeps nothing of the fleet.
//
// A source holds exactly as much of the prompt as the least that a shard says: the first block that it lacks is the first of
// the first ones that the shards say it lacks. Where shards stand at different places in the stream, an answer may be too short. A
// shard that does not answer has no replacement but its replicas: without one, there is no answer.
package gather

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"

	"kvstrata/event"
	"kvstrata/indexer/prefix"
)

// Config says whom to ask.
type Config struct {
	// Shards are the addresses of the indexes, as http://host:port: every part of the range, each once or more.
	Shards []string
	// HashKey is the subscriber's: empty for the public scheme.
	HashKey string
	// Timeout is how long one shard may take to answer; then its replicas are tried.
	Timeout time.Duration
	// Refresh is how often the shards are asked what they keep.
	Refresh time.Duration
}

// DefaultConfig returns the bounds of a front in the same data centre; the addresses are missing.
func DefaultConfig() Config { return Config{Timeout: 2 * time.Second, Refresh: time.Second} }

// maxAddresses bounds how many indexes one front asks.
const maxAddresses = 4096

// Validate reports every problem at once.
func (c Config) Validate() error {
	var errs []error
	if len(c.Shards) == 0 || len(c.Shards) > maxAddresses {
		errs = append(errs, fmt.Errorf("--shards: %d addresses, want 1 to %d, as http://10.0.0.5:8080,http://10.0.0.6:8080", len(c.Shards), maxAddresses))
	}
	for i, address := range c.Shards {
		u, err := url.Parse(address)
		if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" || u.User != nil || u.RawQuery != "" {
			errs = append(errs, fmt.Errorf("--shards %q: want http://host:port or https://host:port", address))
		}
		if slices.Contains(c.Shards[:i], address) {
			errs = append(errs, fmt.Errorf("--shards %q: it is there twice", address))
		}
	}
	if c.Timeout < time.Millisecond {
		errs = append(errs, fmt.Errorf("--shard-timeout %v: want a millisecond or more", c.Timeout))
	}
	if c.Refresh < time.Millisecond {
		errs = append(errs, fmt.Errorf("refresh %v: want a millisecond or more", c.Refresh))
	}
	return errors.Join(errs...)
}

// Gather is the front. Safe for concurrent use.
type Gather struct {
	cfg    Config
	client *http.Client
	hasher event.Hasher
	log    *slog.Logger
	peers  []*peer
	turn   turns

	mu   sync.Mutex
	cuts map[string][]cut // of each model, as the shards told

	lookups prometheus.Histogram
	failed  *prometheus.CounterVec
}

// cut is one way of cutting a prompt into blocks.
type cut struct {
	blockSize uint32
	eagle     bool
}

// maxModels bounds of how many models it is remembered how their prompts are cut.
const maxModels = 1024

// New returns a front. The client shows what the shards want to see; its requests end after cfg.Timeout in any case.
func New(cfg Config, client *http.Client, log *slog.Logger, reg prometheus.Registerer) (*Gather, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	g := &Gather{
		cfg: cfg, client: client, hasher: event.NewHasher(cfg.HashKey), log: log, cuts: make(map[string][]cut),
		lookups: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "kvstrata_gather_lookup_duration_seconds", Help: "Time to answer one lookup from all shards.",
			Buckets: prometheus.ExponentialBuckets(1e-4, 2, 16),
		}),
		failed: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "kvstrata_gather_shard_failures_total", Help: "Questions that an index did not answer.",
		}, []string{"shard"}),
	}
	for _, address := range cfg.Shards {
		g.peers = append(g.peers, &peer{url: strings.TrimSuffix(address, "/")})
	}
	if reg != nil {
		for _, c := range []prometheus.Collector{g.lookups, g.failed} {
			if err := reg.Register(c); err != nil {
				return nil, fmt.Errorf("register gather metrics: %w", err)
			}
		}
	}
	return g, nil
}

// Lookup answers as one index would that keeps everything, but for blocks without a name.
func (g *Gather) Lookup(ctx context.Context, r *prefix.Request) (*prefix.Answer, error) {
	if err := r.Validate(); err != nil {
		return nil, err
	}
	start := time.Now()
	parts, err := g.plan(r.Model)
	if err != nil {
		return nil, err
	}
	cuts := g.known(r.Model)
	for tries := 0; ; tries++ {
		q := g.question(r, cuts, parts)
		answers, err := g.ask(ctx, parts, q)
		if err != nil {
			return nil, err
		}
		told := cutsOf(answers, cuts)
		if len(told) == len(cuts) || tries == maxRounds {
			a, err := q.merge(r, answers)
			g.lookups.Observe(time.Since(start).Seconds())
			return a, err
		}
		cuts = told
		g.remember(r.Model, cuts)
	}
}

// maxRounds bounds how often shards are asked again because they cut prompts in ways that were not known.
const maxRounds = 3

func (g *Gather) known(model string) []cut {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.cuts[model]
}

func (g *Gather) remember(model string, cuts []cut) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if _, ok := g.cuts[model]; !ok && len(g.cuts) >= maxModels {
		clear(g.cuts) // they are asked for again
	}
	g.cuts[model] = cuts
}

// cutsOf returns the known ways of cutting and those that shards tell beside them.
func cutsOf(answers []*prefix.ShardAnswer, known []cut) []cut {
	all := slices.Clip(known)
	for _, a := range answers {
		for i := range a.Sources {
			for _, group := range a.Sources[i].Groups {
				if c := (cut{group.BlockSize, group.Eagle}); !slices.Contains(all, c) {
					all = append(all, c)
				}
			}
		}
	}
	return all
}

// ask asks one index of each part.
func (g *Gather) ask(ctx context.Context, parts []part, q *question) ([]*prefix.ShardAnswer, error) {
	answers := make([]*prefix.ShardAnswer, len(parts))
	group, ctx := errgroup.WithContext(ctx)
	for i := range parts {
		group.Go(func() (err error) {
			answers[i], err = g.askPart(ctx, parts[i], &q.requests[i])
			return err
		})
	}
	return answers, group.Wait()
}

// question is a lookup as it is put to the shards.
type question struct {
	cuts     []cut
	blocks   []int                 // of the prompt, by cut
	requests []prefix.ShardRequest // by part
}

// question cuts a prompt in every way that is known, and gives each part its blocks.
func (g *Gather) question(r *prefix.Request, cuts []cut, parts []part) *question {
	q := &question{cuts: cuts, blocks: make([]int, len(cuts)), requests: make([]prefix.ShardRequest, len(parts))}
	for i := range parts {
		q.requests[i] = prefix.ShardRequest{
			Shard: parts[i].shard, Model: r.Model, Cluster: r.Cluster, Anywhere: r.Anywhere, Cuts: make([]prefix.Cut, len(cuts)),
		}
	}
	for c := range cuts {
		hashes := g.hashes(r, cuts[c])
		q.blocks[c] = len(hashes)
		for i := range parts {
			share := len(hashes)/len(parts) + 8
			q.requests[i].Cuts[c] = prefix.Cut{
				BlockSize: cuts[c].blockSize, Eagle: cuts[c].eagle, Blocks: len(hashes),
				Positions: make([]int, 0, share), Hashes: make(prefix.HashList, 0, share),
			}
		}
		for at, h := range hashes {
			one := &q.requests[prefix.PartOf(h, uint32(len(parts)))].Cuts[c]
			one.Positions, one.Hashes = append(one.Positions, at), append(one.Hashes, h)
		}
	}
	return q
}

// hashes returns the prefix hashes of a prompt's blocks under one way of cutting.
func (g *Gather) hashes(r *prefix.Request, c cut) []event.PrefixHash {
	if len(r.Hashes) > 0 {
		if r.BlockSize != 0 && r.BlockSize != c.blockSize {
			return nil
		}
		return r.Hashes
	}
	return event.Prefixes(nil, r.Tokens, int(c.blockSize), g.hasher.Seed(r.LoRA, r.Salt), c.eagle)
}
