package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"kvstrata/event"
	"kvstrata/publisher"
	"kvstrata/subscriber"
)

type benchPipelineCmd struct {
	Batch    int           `help:"Blocks a batch." default:"16"`
	Blocks   int           `help:"Block events of the run that finds the ceiling." default:"4000000"`
	Pool     int           `help:"Blocks that stay resident; each further one evicts the oldest." default:"200000"`
	Engines  int           `help:"Engines that publish." default:"2"`
	LagFor   time.Duration `help:"How long the lag is measured, at half of the ceiling." default:"10s"`
	Form     string        `help:"map or array." enum:"map,array" default:"map"`
	Format   string        `help:"table or json." enum:"table,json" default:"table"`
	KeepData bool          `help:"Keep the streams, and say where."`
}

// Help shows how it is used and what is measured.
func (benchPipelineCmd) Help() string {
	return `Everything runs in this process and shares its processors: publishers that send prepared vLLM payloads of
16-token blocks over ZeroMQ on loopback, the subscriber (decoding, hashing, judging), an embedded NATS server with
file storage, and the prefix index. A block event is one block stored or evicted, applied by the index.

The ceiling is found with a closed loop: each publisher runs at most 2,000 batches ahead of the index. Then batches are
sent at fixed times, at half of the ceiling; the visible lag is from a batch's due time until lookups see it.

Example:

  kvstrata bench pipeline --batch 256 --format json`
}

// Run measures and prints.
func (c *benchPipelineCmd) Run(a *app) error {
	if c.Batch < 1 || c.Batch > 4096 || c.Engines < 1 || c.Engines > 64 || c.Pool < 4*c.Batch || c.Blocks < 10*c.Batch {
		return usagef("--batch %d, --engines %d, --pool %d, --blocks %d: want 1 to 4096, 1 to 64, four batches or more, ten batches or more",
			c.Batch, c.Engines, c.Pool, c.Blocks)
	}
	dir, err := os.MkdirTemp("", "kvstrata-bench-")
	if err != nil {
		return fmt.Errorf("make temporary folder: %w", err)
	}
	if !c.KeepData {
		defer os.RemoveAll(dir)
	} else {
		fmt.Fprintln(a.stderr, "streams are in", dir)
	}
	s, err := newStack(a, natsFlags{NATSListen: "127.0.0.1:0", NATSReplicas: 1, NATSMaxAge: time.Hour, NATSMaxBytes: 8 << 30, LeaseTTL: 5 * time.Second},
		filepath.Join(dir, "nats"))
	if err != nil {
		return err
	}
	defer s.close()
	if err := s.addPrefix(""); err != nil {
		return err
	}
	ctx, stop := context.WithCancel(a.ctx)
	defer stop()
	sources, err := c.open(ctx, s)
	if err != nil {
		return err
	}
	done := make(chan error, 1)
	go func() { done <- s.run(ctx) }()
	r, err := c.measure(ctx, s, sources)
	stop()
	err = errors.Join(err, <-done)
	for _, src := range sources {
		err = errors.Join(err, <-src.done)
	}
	if err != nil {
		return err
	}
	return r.print(a.stdout, c.Format)
}

// benchSource is one engine that sends what was prepared.
type benchSource struct {
	source event.Source
	socket *publisher.ZMQ
	blocks *blockStream
	done   chan error
}

func (c *benchPipelineCmd) open(ctx context.Context, s *stack) ([]*benchSource, error) {
	var sources []*benchSource
	var engines []subscriber.EngineConfig
	for i := range c.Engines {
		cfg := publisher.DefaultZMQConfig()
		cfg.Endpoint, cfg.Replay = "tcp://127.0.0.1:*", "tcp://127.0.0.1:*"
		if err := cfg.Form.UnmarshalText([]byte(c.Form)); err != nil {
			return nil, err
		}
		socket, err := publisher.NewZMQ(cfg, s.app.log)
		if err != nil {
			return nil, err
		}
		src := &benchSource{
			source: event.Source{Cluster: event.DefaultCluster, Model: "bench", Instance: strconv.Itoa(i), Origin: event.Engine},
			socket: socket, blocks: newBlockStream(c.Batch, c.Pool/c.Engines, uint64(i)), done: make(chan error, 1),
		}
		go func() { src.done <- socket.Run(ctx) }()
		select {
		case <-socket.Ready():
		case err := <-src.done:
			return nil, err
		}
		sources = append(sources, src)
		engines = append(engines, subscriber.EngineConfig{
			Source: src.source, Endpoint: socket.Endpoint(), Replay: socket.ReplayEndpoint(), Dialect: "vllm",
		})
	}
	return sources, s.addSubscriber(subscriber.DefaultConfig(), engines)
}

// benchWindow is how many batches a publisher of the closed loop runs ahead of the index.
const benchWindow = 2000

func (c *benchPipelineCmd) measure(ctx context.Context, s *stack, sources []*benchSource) (*result, error) {
	each := c.Blocks / len(sources)
	began := time.Now()
	group, groupCtx := errgroup.WithContext(ctx)
	var sent atomic.Uint64
	for _, src := range sources {
		group.Go(func() error {
			n, err := src.closedLoop(groupCtx, s, each)
			sent.Add(n)
			return err
		})
	}
	if err := group.Wait(); err != nil {
		return nil, err
	}
	ceiling := float64(sent.Load()) / time.Since(began).Seconds()
	lags, keptUp, err := c.openLoop(ctx, s, sources, ceiling/2)
	if err != nil {
		return nil, err
	}
	for _, info := range s.index.Sources() {
		if !info.Balanced || info.Ledger.Lost > 0 || info.Digest.Differed > 0 {
			return nil, fmt.Errorf("%w: %v: state %v, ledger %+v, %d digests differed", errMismatch, info.Source, info.State,
				info.Ledger, info.Digest.Differed)
		}
	}
	slices.Sort(lags)
	return &result{
		Bench: "pipeline", Machine: machine(), KeptUp: keptUp,
		Workload: fmt.Sprintf("%d engines, %d-block batches in %s form, 16 tokens a block, %d blocks resident, %d block events; lag at %.0f/s for %v",
			c.Engines, c.Batch, c.Form, c.Pool, sent.Load(), ceiling/2, c.LagFor),
		Figures: map[string]figure{
			"block_events_per_s": {Value: ceiling, Unit: "1/s", Goal: goal(300_000)},
			"visible_lag_p50_ms": {Value: quantile(lags, 0.5), Unit: "ms"},
			"visible_lag_p99_ms": {Value: quantile(lags, 0.99), Unit: "ms", Goal: goal(20)},
			"peak_rss_mb":        {Value: peakRSS(), Unit: "MB"},
		},
	}, nil
}

// closedLoop sends so many block events, and returns once the index has applied them.
func (b *benchSource) closedLoop(ctx context.Context, s *stack, events int) (sent uint64, err error) {
	for int(sent) < events {
		if err := b.await(ctx, s, benchWindow); err != nil {
			return sent, err
		}
		batch := b.blocks.next()
		sent += uint64(batch.Blocks())
		if err := b.socket.PublishWait(ctx, batch); err != nil {
			return sent, err
		}
	}
	return sent, b.await(ctx, s, 0)
}

// await waits until the index is no more than so many batches behind.
func (b *benchSource) await(ctx context.Context, s *stack, window uint64) error {
	for b.socket.Seq() > b.applied(s)+window {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(200 * time.Microsecond):
		}
	}
	return nil
}

func (b *benchSource) applied(s *stack) uint64 {
	if _, seq, started := s.index.Seq(b.source); started {
		return uint64(seq) + 1
	}
	return 0
}

// openLoop sends batches when they are due, and returns each one's visible lag in milliseconds and whether the index
// was done within 10 % of the time.
func (c *benchPipelineCmd) openLoop(ctx context.Context, s *stack, sources []*benchSource, rate float64) ([]float64, bool, error) {
	perBatch := float64(2 * c.Batch) // in the steady state a batch stores and evicts as many
	interval := time.Duration(float64(time.Second) * perBatch * float64(len(sources)) / rate)
	began := time.Now()
	all := make([][]float64, len(sources))
	group, ctx := errgroup.WithContext(ctx)
	for i, src := range sources {
		due := make(chan time.Time, 1<<20)
		group.Go(func() error {
			defer close(due)
			for at := began; time.Since(began) < c.LagFor; at = at.Add(interval) {
				if err := sleepUntil(ctx, at); err != nil {
					return err
				}
				due <- at
				if err := src.socket.PublishWait(ctx, src.blocks.next()); err != nil {
					return err
				}
			}
			return nil
		})
		group.Go(func() error {
			seq := src.applied(s)
			for at := range due {
				for src.applied(s) <= seq {
					select {
					case <-ctx.Done():
						return ctx.Err()
					case <-time.After(100 * time.Microsecond):
					}
				}
				seq++
				all[i] = append(all[i], float64(time.Since(at).Microseconds())/1000)
			}
			return nil
		})
	}
	err := group.Wait()
	return slices.Concat(all...), time.Since(began) < c.LagFor*11/10, err
}

func sleepUntil(ctx context.Context, at time.Time) error {
	wait := time.Until(at)
	if wait < 50*time.Microsecond {
		return ctx.Err()
	}
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(wait):
		return nil
	}
}

func quantile(sorted []float64, q float64) float64 {
	if len(sorted) == 0 {
		return 0
	}
	return sorted[min(int(q*float64(len(sorted))), len(sorted)-1)]
}

// peakRSS returns the most resident memory that the process had, in MB.
func peakRSS() float64 {
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return 0
	}
	for line := range strings.Lines(string(status)) {
		if fields := strings.Fields(line); len(fields) == 3 && fields[0] == "VmHWM:" {
			kb, _ := strconv.ParseFloat(fields[1], 64)
			return kb / 1000
		}
	}
	return 0
}

// blockStream makes an engine's batches: each stores a run that continues a chain of chainBatches runs, and, once the
// pool is full, evicts the oldest run.
type blockStream struct {
	size, pool int
	seed       uint64
	n          uint64 // runs made
	tokens     []uint32
	stored     event.Event
	evicted    event.Event
	batch      event.Batch
}

// chainBatches is how many runs follow each other before a new root.
const chainBatches = 8

func newBlockStream(size, pool int, seed uint64) *blockStream {
	b := &blockStream{size: size, pool: pool, seed: seed << 40, tokens: make([]uint32, 16*size)}
	b.stored = event.Event{
		Kind: event.Stored, Tier: event.GPU, Group: 0, Spec: event.SpecFull, BlockSize: 16, LoRAID: event.NoLoRAID,
		Tokens: b.tokens, Blocks: make([]event.Block, size),
	}
	b.evicted = event.Event{Kind: event.Evicted, Tier: event.GPU, Group: 0, LoRAID: event.NoLoRAID, Blocks: make([]event.Block, size)}
	return b
}

// hash is the engine's name of block i of run n: spread over 64 bits, as real ones are.
func (b *blockStream) hash(n uint64, i int) event.BlockHash {
	x := b.seed + n*uint64(b.size) + uint64(i)
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return event.IntHash(x ^ x>>31)
}

func (b *blockStream) next() *event.Batch {
	for i := range b.tokens {
		b.tokens[i] = uint32(b.n*2654435761+uint64(i)*40503) & 0x1ffff
	}
	for i := range b.stored.Blocks {
		b.stored.Blocks[i] = event.Block{Hash: b.hash(b.n, i), Copies: -1, Age: -1}
	}
	if b.stored.HasParent = b.n%chainBatches > 0; b.stored.HasParent {
		b.stored.Parent = b.hash(b.n-1, b.size-1)
	}
	b.batch = event.Batch{Time: event.UnixTime(time.Now()), Rank: 0, Events: append(b.batch.Events[:0], b.stored)}
	if runs := uint64(b.pool / b.size); b.n >= runs {
		for i := range b.evicted.Blocks {
			b.evicted.Blocks[i] = event.Block{Hash: b.hash(b.n-runs, i), Copies: -1, Age: -1}
		}
		b.batch.Events = append(b.batch.Events, b.evicted)
	}
	b.n++
	return &b.batch
}
