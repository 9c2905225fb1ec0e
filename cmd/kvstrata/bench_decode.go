package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"kvstrata/event"
	"kvstrata/publisher"
	"kvstrata/subscriber"
)

type benchDecodeCmd struct {
	Batch   int    `help:"Blocks a batch." default:"64"`
	Rounds  int    `help:"Rounds of 20,000 batches that are decoded on one core; the median counts." default:"7"`
	Blocks  int    `help:"Blocks that go through the subscriber." default:"4000000"`
	Engines int    `help:"Engines that publish them." default:"2"`
	Form    string `help:"map or array." enum:"map,array" default:"map"`
	Format  string `help:"table or json." enum:"table,json" default:"table"`
}

// Help shows how it is used and what is measured.
func (benchDecodeCmd) Help() string {
	return `First one goroutine decodes prepared vLLM payloads, and hashes every block's tokens into the names of prefixes; beside it,
as the baseline, the same hashes of tokens that lie ready.

Then publishers send such payloads over ZeroMQ on loopback, and keep them for replay, to the whole subscriber: recovery, decoding,
hashing, judging, digest, ledger, and JetStream with file storage, all in this process. The time ends when JetStream has
acknowledged everything. Blocks are only stored, none evicted.

Example:

  kvstrata bench decode --format json`
}

// Run measures and prints.
func (c *benchDecodeCmd) Run(a *app) error {
	if c.Batch < 1 || c.Batch > 4096 || c.Engines < 1 || c.Engines > 64 || c.Rounds < 1 || c.Blocks < 10*c.Batch {
		return usagef("--batch %d, --engines %d, --rounds %d, --blocks %d: want 1 to 4096, 1 to 64, 1 or more, ten batches or more",
			c.Batch, c.Engines, c.Rounds, c.Blocks)
	}
	var form publisher.Form
	if err := form.UnmarshalText([]byte(c.Form)); err != nil {
		return err
	}
	decode, hash, err := c.decode(form)
	if err != nil {
		return err
	}
	rate, err := c.subscribe(a)
	if err != nil {
		return err
	}
	r := &result{
		Bench: "decode", Machine: machine(), KeptUp: true,
		Workload: fmt.Sprintf("%d-block batches in %s form, 16 tokens a block; %d blocks from %d engines through the subscriber",
			c.Batch, c.Form, c.Blocks, c.Engines),
		Figures: map[string]figure{
			"ns_per_block":            {Value: decode, Unit: "ns", Baseline: &hash, Ratio: ratio(decode, hash), Goal: goal(60)},
			"subscriber_blocks_per_s": {Value: rate, Unit: "1/s", Goal: goal(1_000_000)},
		},
	}
	return r.print(a.stdout, c.Format)
}

func ratio(a, b float64) *float64 {
	r := a / b
	return &r
}

// decode returns what a block costs from payload to prefix hash, and what the hashing alone does, in ns.
func (c *benchDecodeCmd) decode(form publisher.Form) (decode, hash float64, err error) {
	const batches = 20_000
	blocks := newBlockStream(c.Batch, 1<<30, 0)
	var payloads [][]byte
	for range 64 {
		payloads = append(payloads, publisher.AppendVLLM(nil, blocks.next(), form))
	}
	d, seed := subscriber.NewDecoder(subscriber.DecoderConfig{}), event.Hasher{}.Seed("", "")
	var names []event.PrefixHash
	var both, only []float64
	var b event.Batch
	for range c.Rounds {
		began := time.Now()
		for i := range batches {
			if err := d.Decode(payloads[i%len(payloads)], &b); err != nil {
				return 0, 0, err
			}
			names = event.Prefixes(names[:0], b.Events[0].Tokens, 16, seed, false)
		}
		both = append(both, float64(time.Since(began).Nanoseconds())/float64(batches*c.Batch))
		began = time.Now()
		for range batches {
			names = event.Prefixes(names[:0], b.Events[0].Tokens, 16, seed, false)
		}
		only = append(only, float64(time.Since(began).Nanoseconds())/float64(batches*c.Batch))
	}
	slices.Sort(both)
	slices.Sort(only)
	return quantile(both, 0.5), quantile(only, 0.5), nil
}

// watchedStream tells a source how far its subscriber has come.
type watchedStream struct {
	subscriber.Stream
	source *benchSource
}

// Publish publishes, and tells.
func (w watchedStream) Publish(ctx context.Context, epoch event.Epoch, b *event.Batch, digest event.Digest) {
	w.Stream.Publish(ctx, epoch, b, digest)
	w.source.see(uint64(b.Last)+1, time.Now())
}

// subscribe returns how many blocks a second go through the subscriber until JetStream has them.
func (c *benchDecodeCmd) subscribe(a *app) (rate float64, err error) {
	dir, err := os.MkdirTemp("", "kvstrata-bench-")
	if err != nil {
		return 0, fmt.Errorf("make temporary folder: %w", err)
	}
	defer os.RemoveAll(dir)
	s, err := newStack(a, natsFlags{NATSListen: "127.0.0.1:0", NATSReplicas: 1, NATSMaxAge: time.Hour, NATSMaxBytes: 8 << 30, LeaseTTL: 5 * time.Second},
		filepath.Join(dir, "nats"))
	if err != nil {
		return 0, err
	}
	defer s.close()
	ctx, stop := context.WithCancel(a.ctx)
	defer stop()
	watch := make(map[event.Source]*benchSource)
	pipeline := benchPipelineCmd{Batch: c.Batch, Pool: 1 << 40, Engines: c.Engines, Form: c.Form}
	sources, engines, err := pipeline.publishers(ctx, s, watch)
	if err != nil {
		return 0, err
	}
	var mu sync.Mutex
	var streams []subscriber.Stream
	s.wrap = func(source event.Source, stream subscriber.Stream) subscriber.Stream {
		mu.Lock()
		defer mu.Unlock()
		streams = append(streams, stream)
		return watchedStream{stream, watch[source]}
	}
	if err := s.addSubscriber(subscriber.DefaultConfig(), engines); err != nil {
		return 0, err
	}
	done := make(chan error, 1)
	go func() { done <- s.run(ctx) }()
	began := time.Now()
	group, groupCtx := errgroup.WithContext(ctx)
	for _, src := range sources {
		group.Go(func() error {
			_, err := src.closedLoop(groupCtx, c.Blocks/c.Engines)
			return err
		})
	}
	err = group.Wait()
	for _, stream := range streams {
		_, settled := stream.Settle(ctx)
		err = errors.Join(err, settled)
	}
	took := time.Since(began)
	stop()
	err = errors.Join(err, <-done)
	for _, src := range sources {
		err = errors.Join(err, <-src.done)
	}
	return float64(c.Blocks) / took.Seconds(), err
}
