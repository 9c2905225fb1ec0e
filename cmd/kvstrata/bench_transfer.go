package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/alecthomas/kong"

	"kvstrata/connector"
	"kvstrata/connector/device"
	"kvstrata/connector/transports"
	"kvstrata/event"
)

type benchTransferCmd struct {
	Connector string    `help:"Whose transfers: null, tcp, redis or lmcache." enum:"null,tcp,redis,lmcache" default:"tcp"`
	Block     byteCount `help:"Bytes a block, all layers: 32K to 4M." default:"2M"`
	Piece     byteCount `help:"Bytes that lie together: of one layer's keys or values of a block." default:"32K"`
	Blocks    int       `help:"Blocks that are moved in a round; 0: as many as make 256 MiB." default:"0"`
	Group     int       `help:"Blocks under one key of a store; 0: as many as make 1 MiB." default:"0"`
	Rounds    int       `help:"Rounds; each moves the blocks by every way once." default:"9"`
	Store     string    `help:"The store of redis or lmcache. Without it one is started." placeholder:"URL"`
	Extra     string    `name:"connector-config" help:"kv_connector_extra_config of both ends." default:"{}" placeholder:"JSON"`
	Python    string    `help:"The Python of interop/setup.sh lmcache, to measure LMCache's client beside ours; from the repository's root." placeholder:"PATH"`
	Format    string    `help:"table or json." enum:"table,json" default:"table"`
}

// byteCount is a number of bytes, typed as 32K or 4M.
type byteCount int

// Decode reads the flag.
func (s *byteCount) Decode(ctx *kong.DecodeContext) error {
	var text string
	if err := ctx.Scan.PopValueInto("size", &text); err != nil {
		return err
	}
	number, factor := text, 1
	switch {
	case strings.HasSuffix(text, "K"):
		number, factor = text[:len(text)-1], 1<<10
	case strings.HasSuffix(text, "M"):
		number, factor = text[:len(text)-1], 1<<20
	}
	n, err := strconv.Atoi(number)
	if err != nil || n < 1 || n > 1<<20 {
		return fmt.Errorf("%q: want bytes, as 32K or 4M", text)
	}
	*s = byteCount(n * factor)
	return nil
}

// Help shows how it is used and what is measured.
func (benchTransferCmd) Help() string {
	return `A producer and a consumer in this process, driven through the hooks as an engine drives them. A round moves the same blocks
once by each way: the connector, and the yardsticks, which have the same pieces in the same scattered order. A figure is the median of the
rounds, and its ratio the median of the rounds' ratios; goals are of the ratio.

  tcp      its yardstick is one loopback TCP connection, written with writev and read piece by piece to its place; through shared
           memory it is memcpy
  redis    GET and SET beside those of go-redis
  lmcache  beside LMCache's own Python client against the same server, where --python has one, which reads to one place that stays
           in the processor's caches; else beside a loopback TCP connection

Hooks: a step of 256 requests with nothing to move.

Example:

  kvstrata bench transfer --connector tcp --block 2M`
}

// Run measures and prints.
func (c *benchTransferCmd) Run(a *app) error {
	if err := c.complete(); err != nil {
		return err
	}
	b := &transferBench{cmd: c, app: a, figures: make(map[string]figure)}
	defer b.close()
	if err := b.measure(a.ctx); err != nil {
		return err
	}
	r := result{
		Bench: "transfer", Machine: machine(), KeptUp: true, Figures: b.figures,
		Workload: fmt.Sprintf("%s: %d blocks of %d bytes in pieces of %d, scattered, %d rounds", c.Connector, c.Blocks, int(c.Block), int(c.Piece), c.Rounds),
	}
	return r.print(a.stdout, c.Format)
}

func (c *benchTransferCmd) complete() error {
	if c.Block < 32<<10 || c.Block > 4<<20 {
		return usagef("--block %d: want 32K to 4M", int(c.Block))
	}
	c.Piece = min(c.Piece, c.Block/2)
	if c.Piece < 1024 || c.Piece%256 != 0 || int(c.Block)%(2*int(c.Piece)) != 0 {
		return usagef("--piece %d: want a multiple of 256 from 1K on, of which an even number is a block", int(c.Piece))
	}
	if c.Blocks == 0 {
		c.Blocks = (256 << 20) / int(c.Block)
	}
	if c.Group == 0 {
		c.Group = max(1, (1<<20)/int(c.Block))
	}
	c.Blocks = c.Blocks / c.Group * c.Group
	if c.Blocks < 1 || c.Blocks*int(c.Block) > 8<<30 || c.Rounds < 1 || c.Rounds > 1000 {
		return usagef("--blocks %d, --rounds %d: want blocks of 8 GiB at most, and 1 to 1000 rounds", c.Blocks, c.Rounds)
	}
	return nil
}

// transferBench is one run.
type transferBench struct {
	cmd     *benchTransferCmd
	app     *app
	closers []func() error
	figures map[string]figure
	order   []int  // the blocks, scattered
	prefix  string // of this run's keys in Redis: it may be somebody's
}

// benchTokens is how many tokens a block of the benchmark has.
const benchTokens = 16

// benchEnd is one engine of the benchmark.
type benchEnd struct {
	conn   *connector.Engine
	memory device.Memory
	cache  *connector.Cache
}

func (b *transferBench) close() {
	for i := len(b.closers) - 1; i >= 0; i-- {
		if err := b.closers[i](); err != nil {
			b.app.log.Warn("cleaning up", "err", err)
		}
	}
}

func (b *transferBench) measure(ctx context.Context) error {
	b.order = rand.New(rand.NewPCG(1, 2)).Perm(b.cmd.Blocks)
	b.prefix = fmt.Sprintf("kvstrata-bench-%x", rand.Uint64())
	if err := b.hooks(ctx); err != nil {
		return err
	}
	switch b.cmd.Connector {
	case "null":
		return nil
	case "tcp":
		return b.measureTCP(ctx)
	default:
		return b.measureStore(ctx)
	}
}

// end makes an engine with memory for the blocks.
func (b *transferBench) end(role connector.Role, name string, extra map[string]any) (*benchEnd, error) {
	c := b.cmd
	var tensors []connector.Tensor
	heads, layers := int(c.Piece)/(benchTokens*8*2), int(c.Block)/(2*int(c.Piece))
	for i := range layers {
		tensors = append(tensors, connector.Packed(fmt.Sprint("layer.", i), i*2*c.Blocks*int(c.Piece), 2,
			connector.Dim{Axis: connector.AxisKV, Size: 2}, connector.Dim{Axis: connector.AxisBlock, Size: c.Blocks},
			connector.Dim{Axis: connector.AxisToken, Size: benchTokens}, connector.Dim{Axis: connector.AxisHead, Size: heads},
			connector.Dim{Axis: connector.AxisDim, Size: 8}))
	}
	memory, err := device.Host{}.Alloc(name, c.Blocks*int(c.Block))
	if err != nil {
		return nil, err
	}
	b.closers = append(b.closers, memory.Close)
	model := connector.Model{
		Name: "bench", DType: "float16", Layers: layers, KVHeads: heads, HeadSize: 8, BlockTokens: benchTokens, Ranks: 1,
	}
	caches := connector.Caches{Device: device.Host{}, Memory: memory, Tensors: tensors, Model: model}
	e := &benchEnd{memory: memory}
	if e.cache, err = connector.NewCache(caches); err != nil {
		return nil, err
	}
	cfg := connector.DefaultConfig()
	cfg.Connector, cfg.Role = c.Connector, role
	if err := json.Unmarshal([]byte(c.Extra), &cfg.Extra); err != nil {
		return nil, usagef("--connector-config: want a JSON object: %w", err)
	}
	for key, value := range extra {
		cfg.Extra[key], _ = json.Marshal(value) // strings, numbers and truth values
	}
	setup := connector.Setup{Config: cfg, Instance: name, Model: model, Log: b.app.log}
	if e.conn, err = connector.NewEngine(transports.Default(), setup, []connector.Caches{caches}); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- e.conn.Run(ctx) }()
	b.closers = append(b.closers, func() error {
		cancel()
		return <-done
	})
	return e, nil
}

// fill gives the producer's blocks their content, which the consumer's are compared with.
func (e *benchEnd) fill() {
	_, _ = rand.NewChaCha8([32]byte{}).Read(e.memory.Host()) // never fails
}

// request returns a request of all blocks.
func (b *transferBench) request(id string, names string, params *connector.Params) *connector.Request {
	tokens := b.cmd.Blocks * benchTokens
	r := &connector.Request{ID: id, Prompt: tokens, Tokens: tokens, Params: params}
	for i := range b.cmd.Blocks {
		r.Names = append(r.Names, connector.Name{Hash: event.BytesHash(fmt.Sprintf("%-24s%08d", names, i))})
	}
	return r
}

// steps runs empty steps until a request is told in the output that pick picks.
func (e *benchEnd) steps(ctx context.Context, first *connector.Step, finished []string, id string, pick func(*connector.Output) []string) error {
	step := first
	for deadline := time.Now().Add(5 * time.Minute); time.Now().Before(deadline); {
		out, err := e.conn.Step(ctx, step, finished, func() error { return nil })
		if err != nil {
			return err
		}
		if len(out.InvalidBlocks) > 0 {
			return fmt.Errorf("%d blocks did not come", len(out.InvalidBlocks))
		}
		if slices.Contains(pick(&out), id) {
			return nil
		}
		step, finished = new(connector.Step), nil
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(50 * time.Microsecond):
		}
	}
	return errors.New("a transfer did not end")
}

func sent(o *connector.Output) []string     { return o.FinishedSending }
func received(o *connector.Output) []string { return o.FinishedReceiving }

// load has the consumer load a request, and returns how long its workers took from the post on.
func (b *transferBench) load(ctx context.Context, to *benchEnd, r *connector.Request) (time.Duration, error) {
	s := to.conn.Scheduler
	s.NewRequest(r)
	m := s.MatchedTokens(r, 0)
	for ; m.Later; m = s.MatchedTokens(r, 0) { // a lookup has a time limit of its own
		select {
		case <-ctx.Done():
			return 0, ctx.Err()
		case <-time.After(50 * time.Microsecond):
		}
	}
	if m.Tokens != r.Prompt {
		return 0, fmt.Errorf("%d of %d tokens are offered", m.Tokens, r.Prompt)
	}
	s.UpdateAfterAlloc(r, b.order, 0, m.Tokens)
	if err := to.steps(ctx, new(connector.Step), nil, r.ID, received); err != nil {
		return 0, err
	}
	s.RequestFinished(r, b.order, connector.EndStopped)
	return b.took(to, event.TransferLoaded)
}

// took returns what the records say of the last transfer.
func (b *transferBench) took(e *benchEnd, kind event.TransferKind) (time.Duration, error) {
	e.conn.Scheduler.TakeEvents()
	bytes, took := uint64(0), time.Duration(0)
	for _, t := range e.conn.Scheduler.TakeRecords() {
		if t.Kind == kind {
			bytes, took = bytes+t.Bytes, took+t.Duration
		}
	}
	if want := uint64(b.cmd.Blocks) * uint64(b.cmd.Block); bytes != want {
		return 0, fmt.Errorf("%d bytes were moved, want %d", bytes, want)
	}
	return took, nil
}

// save has the producer save a request, and returns how long that took.
func (b *transferBench) save(ctx context.Context, from *benchEnd, r *connector.Request) (time.Duration, error) {
	s := from.conn.Scheduler
	s.NewRequest(r)
	s.UpdateAfterAlloc(r, b.order, 0, 0)
	step := &connector.Step{Scheduled: []connector.Scheduled{{Request: r, Blocks: b.order, Computed: r.Prompt}}}
	if _, err := from.conn.Step(ctx, step, nil, func() error { return nil }); err != nil {
		return 0, err
	}
	if delay, _ := s.RequestFinished(r, b.order, connector.EndLength); delay {
		if err := from.steps(ctx, new(connector.Step), []string{r.ID}, r.ID, sent); err != nil {
			return 0, err
		}
	}
	return b.took(from, event.TransferSaved)
}

// ways are the ways of moving the blocks that are measured against one another; each is done once a round.
type way struct {
	name string
	move func() (time.Duration, error)
}

// rounds measures every way in every round, in turn, after one round that does not count.
func (b *transferBench) rounds(ctx context.Context, ways []way) (map[string][]time.Duration, error) {
	took := make(map[string][]time.Duration)
	for round := range b.cmd.Rounds + 1 {
		for _, w := range ways {
			if err := ctx.Err(); err != nil {
				return nil, err
			}
			d, err := w.move()
			if err != nil {
				return nil, fmt.Errorf("%s: %w", w.name, err)
			}
			if round > 0 {
				took[w.name] = append(took[w.name], d)
			}
		}
	}
	return took, nil
}

// enter adds the figure of a way and of its yardstick.
func (b *transferBench) enter(name string, took map[string][]time.Duration, ours, yardstick string, least float64) {
	rate := func(d time.Duration) float64 { return float64(b.cmd.Blocks) * float64(b.cmd.Block) / d.Seconds() / 1e9 }
	median := func(v []float64) float64 {
		slices.Sort(v)
		return v[len(v)/2]
	}
	var values, baselines, ratios []float64
	for i, d := range took[ours] {
		values = append(values, rate(d))
		if yardstick != "" {
			baselines, ratios = append(baselines, rate(took[yardstick][i])), append(ratios, rate(d)/rate(took[yardstick][i]))
		}
	}
	f := figure{Value: median(values), Unit: "GB/s"}
	if yardstick != "" {
		baseline, ratio := median(baselines), median(ratios)
		f.Baseline, f.Ratio = &baseline, &ratio
	}
	if least > 0 {
		f.Goal = goal(least)
	}
	b.figures[name] = f
}

// hooks measures a step of 256 requests with nothing to move.
func (b *transferBench) hooks(ctx context.Context) error {
	small := *b.cmd
	small.Blocks = small.Group
	own := &transferBench{cmd: &small, app: &app{log: slog.New(slog.NewTextHandler(io.Discard, nil))}}
	defer own.close()
	e, err := own.end(connector.Both, "hooks", b.nowhere())
	if err != nil {
		return err
	}
	step := new(connector.Step)
	for i := range 256 {
		r := &connector.Request{ID: fmt.Sprint("request-", i), Prompt: benchTokens / 2, Tokens: benchTokens / 2}
		e.conn.Scheduler.NewRequest(r)
		step.Scheduled = append(step.Scheduled, connector.Scheduled{Request: r, Blocks: []int{0}, Computed: benchTokens / 2})
	}
	const steps = 2000
	began := time.Now()
	for range steps {
		if _, err := e.conn.Step(ctx, step, nil, func() error { return nil }); err != nil {
			return err
		}
	}
	us := float64(time.Since(began).Nanoseconds()) / steps / 1e3
	b.figures["hook_step_us"] = figure{Value: us, Unit: "µs", Goal: goal(50)}
	return nil
}

// nowhere is a configuration that moves nothing.
func (b *transferBench) nowhere() map[string]any {
	switch b.cmd.Connector {
	case "tcp":
		return map[string]any{"listen": "127.0.0.1:0"}
	case "redis":
		return map[string]any{"url": "redis://127.0.0.1:1", "group_blocks": b.cmd.Group}
	case "lmcache":
		return map[string]any{"remote_url": "lm://127.0.0.1:1", "group_blocks": b.cmd.Group, "chunk_size": b.cmd.Group * benchTokens, "chunk_hashes": "engine"}
	default:
		return nil
	}
}

// measureTCP compares the network with a bare connection, and shared memory with memcpy.
func (b *transferBench) measureTCP(ctx context.Context) error {
	over := func(shared bool) (way, error) {
		extra := map[string]any{"listen": "127.0.0.1:0", "shared_memory": shared}
		from, err := b.end(connector.Producer, "producer", extra)
		if err != nil {
			return way{}, err
		}
		to, err := b.end(connector.Consumer, "consumer", extra)
		if err != nil {
			return way{}, err
		}
		from.fill()
		round := 0
		return way{map[bool]string{true: "shm", false: "tcp"}[shared], func() (time.Duration, error) {
			round++
			r := b.request(fmt.Sprint("round-", round), "", &connector.Params{DoRemoteDecode: true})
			s := from.conn.Scheduler
			s.NewRequest(r)
			s.UpdateAfterAlloc(r, b.order, 0, 0)
			_, params := s.RequestFinished(r, b.order, connector.EndLength)
			if _, err := from.conn.Step(ctx, new(connector.Step), []string{r.ID}, func() error { return nil }); err != nil {
				return 0, err
			}
			took, err := b.load(ctx, to, b.request(fmt.Sprint("load-", round), "", params))
			if err != nil {
				return 0, err
			}
			if err := from.steps(ctx, new(connector.Step), nil, r.ID, sent); err != nil {
				return 0, err
			}
			return took, b.same(from, to, round)
		}}, nil
	}
	network, err := over(false)
	if err != nil {
		return err
	}
	shared, err := over(true)
	if err != nil {
		return err
	}
	ways := []way{network, shared}
	for _, yardstick := range []func() (way, error){b.bareTCP, b.bareUnix, b.memcpy} {
		w, err := yardstick()
		if err != nil {
			return err
		}
		ways = append(ways, w)
	}
	took, err := b.rounds(ctx, ways)
	if err != nil {
		return err
	}
	b.enter("gb_per_s", took, "tcp", "bare tcp", 0.9)
	b.enter("shared_memory_gb_per_s", took, "shm", "memcpy", 0.8)
	b.enter("unix_socket_gb_per_s", took, "bare unix", "", 0)
	return nil
}

// same compares both memories in the first round; that the rest is right is what checksums and tests are for.
func (b *transferBench) same(from, to *benchEnd, round int) error {
	if round == 1 && !slices.Equal(from.memory.Host(), to.memory.Host()) {
		return fmt.Errorf("%w: other bytes have come than were sent", errMismatch)
	}
	return nil
}

// measureStore compares loads and saves with those of another client of the same server.
func (b *transferBench) measureStore(ctx context.Context) error {
	url, stop, err := startStore(b.app, b.cmd.Connector, b.cmd.Store, (3*b.cmd.Blocks*int(b.cmd.Block))>>20+64)
	if err != nil {
		return err
	}
	b.closers = append(b.closers, stop)
	extra := map[string]any{"group_blocks": b.cmd.Group}
	switch b.cmd.Connector {
	case "redis":
		extra["url"], extra["key_prefix"] = url, b.prefix
	case "lmcache":
		extra["remote_url"], extra["chunk_size"], extra["chunk_hashes"] = url, b.cmd.Group*benchTokens, "engine"
	}
	from, err := b.end(connector.Producer, "producer", extra)
	if err != nil {
		return err
	}
	to, err := b.end(connector.Consumer, "consumer", extra)
	if err != nil {
		return err
	}
	from.fill()
	round := 0
	ways := []way{
		{"save", func() (time.Duration, error) {
			round++
			if err := b.forget(ctx, url); err != nil {
				return 0, err
			}
			return b.save(ctx, from, b.request(fmt.Sprint("save-", round), fmt.Sprint(round), nil))
		}},
		{"load", func() (time.Duration, error) {
			took, err := b.load(ctx, to, b.request(fmt.Sprint("load-", round), fmt.Sprint(round), nil))
			if err != nil {
				return 0, err
			}
			return took, b.same(from, to, round)
		}},
	}
	if b.cmd.Connector == "redis" {
		other, err := b.goRedis(ctx, url)
		if err != nil {
			return err
		}
		ways = append(ways, other...)
	}
	bare, err := b.bareTCP()
	if err != nil {
		return err
	}
	took, err := b.rounds(ctx, append(ways, bare))
	if err = errors.Join(err, b.forget(context.WithoutCancel(ctx), url)); err != nil {
		return err
	}
	b.enter("bare_tcp_gb_per_s", took, bare.name, "", 0)
	if b.cmd.Connector == "redis" {
		b.enter("gb_per_s", took, "load", "go-redis GET", 1.5)
		b.enter("save_gb_per_s", took, "save", "go-redis SET", 0)
		return nil
	}
	b.enter("gb_per_s", took, "load", bare.name, 0)
	b.enter("save_gb_per_s", took, "save", bare.name, 0)
	return b.python(ctx, url)
}

// python measures LMCache's own client against the same server, with values of the same size. It does not scatter them.
func (b *transferBench) python(ctx context.Context, url string) error {
	if b.cmd.Python == "" {
		return nil
	}
	size := fmt.Sprint(int(b.cmd.Block) * b.cmd.Group)
	cmd := exec.CommandContext(ctx, b.cmd.Python, "interop/lmcache_bench.py", "--url", url, "--size", size,
		"--bytes", fmt.Sprint(b.cmd.Blocks*int(b.cmd.Block)), "--rounds", fmt.Sprint(b.cmd.Rounds))
	cmd.Stderr = b.app.stderr
	out, err := cmd.Output()
	if err != nil {
		return fmt.Errorf("run LMCache's client: %w", err)
	}
	var theirs struct {
		Put map[string]float64 `json:"put_gb_per_s"`
		Get map[string]float64 `json:"get_gb_per_s"`
	}
	if err := json.Unmarshal(out, &theirs); err != nil {
		return fmt.Errorf("read what LMCache's client says: %w", err)
	}
	for name, baseline := range map[string]float64{"gb_per_s": theirs.Get[size], "save_gb_per_s": theirs.Put[size]} {
		f := b.figures[name]
		ratio := f.Value / baseline
		f.Baseline, f.Ratio, f.Goal = &baseline, &ratio, goal(3)
		b.figures[name] = f
	}
	return nil
}
