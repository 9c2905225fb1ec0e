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
	"sync"
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
	History  bool          `help:"Keep history too, in the embedded ClickHouse engine." default:"true" negatable:""`
	KeepData bool          `help:"Keep the streams, and say where."`
}

// Help shows how it is used and what is measured.
func (benchPipelineCmd) Help() string {
	return `Everything runs in this process and shares its processors: publishers that send prepared vLLM payloads of
16-token blocks over ZeroMQ on loopback, the subscriber (decoding, hashing, judging), an embedded NATS server with
file storage, the prefix index, and, in a child process, the ClickHouse engine that history writes to. A block event is
one block stored or evicted, applied by the index and committed by history.

The ceiling is found with a closed loop: each publisher runs at most 2,000 batches ahead of the index, and the time ends
when index and history have everything. Then batches are sent at fixed times, at half of the ceiling; the visible lag is
from a batch's due time until lookups see it, the committed lag until it is in the tables.

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
	watch := make(map[event.Source]*benchSource)
	if err := s.addPrefix("", shareFlags{}); err != nil {
		return err
	}
	s.observers = append(s.observers, func(m *event.Message) {
		if b := watch[m.Source]; b != nil {
			b.see(uint64(m.Batches[len(m.Batches)-1].Last)+1, time.Now())
		}
	})
	if c.History {
		if err := s.addHistory("", historyFlags{Memory: 2 << 30}, dir, func(source event.Source, m event.Mark) {
			if b := watch[source]; b != nil && m.Started {
				b.commit(uint64(m.Seq)+1, time.Now())
			}
		}); err != nil {
			return err
		}
	}
	ctx, stop := context.WithCancel(a.ctx)
	defer stop()
	sources, engines, err := c.publishers(ctx, s, watch)
	if err != nil {
		return err
	}
	if err := s.addSubscriber(subscriber.DefaultConfig(), engines); err != nil {
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

	mu       sync.Mutex
	moved    *sync.Cond // applied grew, or ended
	applied  uint64     // batches that lookups see
	ended    bool
	interval time.Duration // of the open loop; 0 before it
	began    time.Time     // when its first batch was due
	first    uint64        // that batch
	lags     []float64     // in ms, from when a batch was due until lookups saw it
	kept     uint64        // batches that history has committed
	keptLags []float64     // in ms, until history had committed it
}

func (b *benchSource) see(applied uint64, now time.Time) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.lags = b.overdue(b.lags, b.applied, applied, now)
	b.applied = applied
	b.moved.Broadcast()
}

func (b *benchSource) commit(kept uint64, now time.Time) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.keptLags = b.overdue(b.keptLags, b.kept, kept, now)
	b.kept = kept
	b.moved.Broadcast()
}

// overdue appends how long after their due times the batches of the open loop from one to another are done.
func (b *benchSource) overdue(lags []float64, from, to uint64, now time.Time) []float64 {
	for n := max(from, b.first); b.interval > 0 && n < to; n++ {
		due := b.began.Add(time.Duration(n-b.first) * b.interval)
		lags = append(lags, float64(now.Sub(due).Microseconds())/1000)
	}
	return lags
}

// await waits until the index is no more than so many batches behind.
func (b *benchSource) await(ctx context.Context, window uint64) error {
	return b.awaitThat(ctx, func() bool { return b.socket.Seq() <= b.applied+window })
}

// awaitKept waits until history has committed everything.
func (b *benchSource) awaitKept(ctx context.Context) error {
	return b.awaitThat(ctx, func() bool { return b.socket.Seq() <= b.kept })
}

func (b *benchSource) awaitThat(ctx context.Context, that func() bool) error {
	stop := context.AfterFunc(ctx, func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		b.ended = true
		b.moved.Broadcast()
	})
	defer stop()
	b.mu.Lock()
	defer b.mu.Unlock()
	for !that() && !b.ended {
		b.moved.Wait()
	}
	return ctx.Err()
}

// publishers starts the engines' sockets.
func (c *benchPipelineCmd) publishers(ctx context.Context, s *stack, watch map[event.Source]*benchSource) ([]*benchSource, []subscriber.EngineConfig, error) {
	var sources []*benchSource
	var engines []subscriber.EngineConfig
	for i := range c.Engines {
		cfg := publisher.DefaultZMQConfig()
		cfg.Endpoint, cfg.Replay = "tcp://127.0.0.1:*", "tcp://127.0.0.1:*"
		if err := cfg.Form.UnmarshalText([]byte(c.Form)); err != nil {
			return nil, nil, err
		}
		socket, err := publisher.NewZMQ(cfg, s.app.log)
		if err != nil {
			return nil, nil, err
		}
		src := &benchSource{
			source: event.Source{Cluster: event.DefaultCluster, Model: "bench", Instance: strconv.Itoa(i), Origin: event.Engine},
			socket: socket, blocks: newBlockStream(c.Batch, c.Pool/c.Engines, uint64(i)), done: make(chan error, 1),
		}
		src.moved = sync.NewCond(&src.mu)
		watch[src.source] = src // before the consumer runs
		go func() { src.done <- socket.Run(ctx) }()
		select {
		case <-socket.Ready():
		case err := <-src.done:
			return nil, nil, err
		}
		sources = append(sources, src)
		engines = append(engines, subscriber.EngineConfig{
			Source: src.source, Endpoint: socket.Endpoint(), Replay: socket.ReplayEndpoint(), Dialect: subscriber.DialectVLLM,
		})
	}
	return sources, engines, nil
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
			n, err := src.closedLoop(groupCtx, each)
			sent.Add(n)
			return err
		})
	}
	if err := group.Wait(); err != nil {
		return nil, err
	}
	visible := time.Since(began)
	if c.History {
		for _, src := range sources {
			if err := src.awaitKept(ctx); err != nil {
				return nil, err
			}
		}
	}
	ceiling := float64(sent.Load()) / time.Since(began).Seconds()
	lags, keptLags, keptUp, err := c.openLoop(ctx, sources, ceiling/2)
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
	slices.Sort(keptLags)
	r := &result{
		Bench: "pipeline", Machine: machine(), KeptUp: keptUp,
		Workload: fmt.Sprintf("%d engines, %d-block batches in %s form, 16 tokens a block, %d blocks resident, %d block events; lag at %.0f/s for %v",
			c.Engines, c.Batch, c.Form, c.Pool, sent.Load(), ceiling/2, c.LagFor),
		Figures: map[string]figure{
			"block_events_per_s":         {Value: ceiling, Unit: "1/s", Goal: goal(200_000)},
			"visible_block_events_per_s": {Value: float64(sent.Load()) / visible.Seconds(), Unit: "1/s"},
			"visible_lag_p50_ms":         {Value: quantile(lags, 0.5), Unit: "ms"},
			"visible_lag_p99_ms":         {Value: quantile(lags, 0.99), Unit: "ms", Goal: goal(20)},
			"peak_rss_mb":                {Value: peakRSS("self"), Unit: "MB"},
		},
	}
	if c.History {
		r.Figures["committed_lag_p50_ms"] = figure{Value: quantile(keptLags, 0.5), Unit: "ms"}
		r.Figures["committed_lag_p99_ms"] = figure{Value: quantile(keptLags, 0.99), Unit: "ms", Goal: goal(2000)}
		r.Figures["clickhouse_peak_rss_mb"] = figure{Value: peakRSS(strconv.Itoa(s.engine.PID())), Unit: "MB"}
	} else {
		r.Figures["block_events_per_s"] = figure{Value: ceiling, Unit: "1/s", Goal: goal(300_000)}
	}
	return r, nil
}

// closedLoop sends so many block events, and returns once the index has applied them.
func (b *benchSource) closedLoop(ctx context.Context, events int) (sent uint64, err error) {
	for n := 0; int(sent) < events; n++ {
		if n%(benchWindow/8) == 0 {
			if err := b.await(ctx, benchWindow*7/8); err != nil {
				return sent, err
			}
		}
		batch := b.blocks.next()
		sent += uint64(batch.Blocks())
		if err := b.socket.PublishWait(ctx, batch); err != nil {
			return sent, err
		}
	}
	return sent, b.await(ctx, 0)
}

// openLoop sends batches at fixed times, and returns each one's visible lag and whether the index was done within 10 %
// of the time.
func (c *benchPipelineCmd) openLoop(ctx context.Context, sources []*benchSource, rate float64) (lags, keptLags []float64, keptUp bool, err error) {
	perBatch := float64(2 * c.Batch) // in the steady state a batch stores and evicts as many
	interval := time.Duration(float64(time.Second) * perBatch * float64(len(sources)) / rate)
	began := time.Now()
	group, groupCtx := errgroup.WithContext(ctx)
	for _, src := range sources {
		src.mu.Lock()
		src.began, src.first, src.interval = began, src.socket.Seq(), interval
		src.mu.Unlock()
		group.Go(func() error {
			tick := time.NewTicker(time.Millisecond) // what falls due within it is sent together, and its lag counts from when it was due
			defer tick.Stop()
			for sent := 0; time.Since(began) < c.LagFor; {
				for ; time.Duration(sent)*interval <= time.Since(began); sent++ {
					if err := src.socket.PublishWait(groupCtx, src.blocks.next()); err != nil {
						return err
					}
				}
				select {
				case <-tick.C:
				case <-groupCtx.Done():
					return groupCtx.Err()
				}
			}
			return src.await(groupCtx, 0)
		})
	}
	if err := group.Wait(); err != nil {
		return nil, nil, false, err
	}
	keptUp = time.Since(began) < c.LagFor*11/10
	for _, src := range sources {
		if c.History {
			if err := src.awaitKept(ctx); err != nil {
				return nil, nil, false, err
			}
		}
	}
	for _, src := range sources {
		src.mu.Lock()
		lags, keptLags = append(lags, src.lags...), append(keptLags, src.keptLags...)
		src.mu.Unlock()
	}
	return lags, keptLags, keptUp, nil
}

func quantile(sorted []float64, q float64) float64 {
	if len(sorted) == 0 {
		return 0
	}
	return sorted[min(int(q*float64(len(sorted))), len(sorted)-1)]
}

// peakRSS returns the most resident memory that a process had, in MB.
func peakRSS(pid string) float64 {
	status, err := os.ReadFile("/proc/" + pid + "/status")
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
