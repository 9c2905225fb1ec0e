package main

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"github.com/nats-io/nats.go"

	"kvstrata/event"
	"kvstrata/indexer/history"
	"kvstrata/indexer/prefix"
	"kvstrata/publisher"
	"kvstrata/sim"
)

type demoCmd struct {
	edgeFlags
	listenFlags
	historyFlags
	natsLogin
	insecureFlag

	NATSListen string `name:"nats-listen" help:"Address of the embedded NATS server; port 0 takes a free one." default:"127.0.0.1:4222" env:"KVSTRATA_NATS_LISTEN"`
	Prefill    int    `help:"Prefill engines." default:"2"`
	Decode     int    `help:"Decode engines; with none, prefill engines generate." default:"2"`
	PoolBlocks int    `help:"Physical blocks of each engine; 0: 4096 for generated traffic, which fills them in a minute, 16384 for a trace." default:"0"`
	BlockSize  int    `help:"Tokens a block." default:"16"`
	Form       string `help:"Encoding of the engines' events: map as vLLM since 0.24, or array as before." enum:"map,array" default:"map"`
	Trace      string `help:"A Mooncake trace to replay instead of generated traffic." type:"path" placeholder:"FILE"`
	Speed      string `help:"Virtual time over real time; max: one request after another, as fast as it goes." default:"1"`
	Exit       bool   `help:"End with the trace: compare what the engines hold with what the index and history say, report, and exit 3 on a difference."`
	Processes  bool   `help:"Run each role, and with a connector each engine, in a process of its own, started again when it dies."`
	Connector  string `help:"How blocks go from prefill to decode engines; auto: tcp, and none at speed max." enum:"auto,none,null,tcp,redis,lmcache" default:"auto"`
	Store      string `help:"The shared store of connectors redis and lmcache, as redis://host:port or lm://host:port. Without it one is started." placeholder:"URL"`
	Extra      string `name:"connector-config" help:"kv_connector_extra_config of every engine's connector." default:"{}" placeholder:"JSON"`
	Data       string `help:"Folder of the embedded NATS server and ClickHouse engine; kept. Without it a temporary one is used and removed." type:"path" placeholder:"DIR"`
}

// Help shows how it is used.
func (demoCmd) Help() string {
	return `Example:

  kvstrata demo
  kvstrata demo --trace conversation_trace.jsonl --speed max --exit`
}

// demoModel is what the simulated engines serve.
const demoModel = "demo/llama-sim"

// Run runs everything until a signal comes, or, with --exit, until the trace has ended.
func (c *demoCmd) Run(a *app) (err error) {
	speed, err := c.speed()
	if err != nil {
		return err
	}
	if c.PoolBlocks == 0 {
		c.PoolBlocks = map[bool]int{true: 4096, false: 16384}[c.Trace == ""]
	}
	entrances, err := c.connectorEntrances()
	if err != nil {
		return err
	}
	nats, err := c.entrance(c.NATSListen)
	if err != nil {
		return err
	}
	if err := c.check(slices.Concat(entrances, c.listenFlags.entrances(), []entrance{nats})...); err != nil {
		return err
	}
	dir := c.Data
	if dir == "" {
		if dir, err = os.MkdirTemp("", "kvstrata-demo-"); err != nil {
			return fmt.Errorf("make temporary folder: %w", err)
		}
		defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	}
	flags := natsFlags{
		natsLogin: c.natsLogin, NATSListen: c.NATSListen, NATSReplicas: 1, NATSMaxAge: time.Hour, NATSMaxBytes: 2 << 30, LeaseTTL: 2 * time.Second,
	}
	if c.Data != "" {
		flags.NATSMaxAge = 24 * time.Hour
	}
	s, err := newStack(a, flags, filepath.Join(dir, "nats"))
	if err != nil {
		return err
	}
	defer s.close()
	var view fleetView = localView{s}
	var supervisor *supervisor
	if c.Processes {
		supervisor = newSupervisor(a)
		supervisor.env = []string{"KVSTRATA_HASH_KEY=" + c.HashKey, "KVSTRATA_CLICKHOUSE=" + c.ClickHouse}
		if u, err := url.Parse(c.Store); err == nil {
			if password, ok := u.User.Password(); ok {
				supervisor.env = append(supervisor.env, storePassword+"="+password)
			}
		}
		client, err := c.listenFlags.self(a.log, time.Minute)
		if err != nil {
			return err
		}
		view = newRemoteView(supervisor, client)
	} else if err := c.addRoles(s, dir); err != nil {
		return err
	}
	// The engines run under a context of their own: they stop first.
	simCtx, stopSim := context.WithCancel(a.ctx)
	defer stopSim()
	engines, err := c.startEngines(simCtx, s, view, supervisor, speed)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, engines.stop()) }()
	if c.Processes {
		if err := c.addProcesses(s, supervisor, engines, flags, dir); err != nil {
			return err
		}
	} else {
		if err := s.addSubscriber(c.edgeFlags.subscriber(), engines.configs); err != nil {
			return err
		}
		if engines.store != "" {
			spec, err := c.storeSpec(engines.store)
			if err == nil {
				err = s.addStore(spec)
			}
			if err != nil {
				return err
			}
		}
		if err := s.listen(c.listenFlags); err != nil {
			return err
		}
	}
	stackCtx, stopStack := context.WithCancel(context.WithoutCancel(a.ctx))
	defer stopStack()
	stackDone, announced := make(chan error, 1), make(chan struct{})
	go func() { stackDone <- s.run(stackCtx) }()
	go func() {
		defer close(announced)
		c.announce(simCtx, a, s, view, engines, dir)
	}()
	select {
	case <-announced:
	case err = <-stackDone: // a process does not start
		stopSim()
		<-announced
		return err
	}
	simDone := make(chan error, 1)
	go func() { simDone <- c.drive(simCtx, a, engines, s, view, dir, speed) }()
	select {
	case err = <-stackDone: // a role failed
		stopSim()
		return errors.Join(err, <-simDone)
	case err = <-simDone:
	}
	stopStack()
	return errors.Join(err, <-stackDone)
}

// addRoles adds every role to this process, but for the subscriber, which needs the engines' addresses.
func (c *demoCmd) addRoles(s *stack, dir string) error {
	if err := s.addPrefix(c.HashKey, shareFlags{Told: 1}); err != nil {
		return err
	}
	if err := s.addHistory(c.HashKey, c.historyFlags, dir, nil); err != nil {
		return err
	}
	return s.addWeb(c.HashKey, shareFlags{}, c.historyFlags, dir, fleetRoles)
}

func (c *demoCmd) speed() (float64, error) {
	if c.Exit && c.Trace == "" {
		return 0, usagef("--exit: goes with --trace; generated traffic has no end")
	}
	if c.Speed == "max" {
		return 0, nil
	}
	speed, err := strconv.ParseFloat(c.Speed, 64)
	if err != nil || speed <= 0 || speed > 1e6 {
		return 0, usagef("--speed %q: want max or a factor above 0, as 10", c.Speed)
	}
	return speed, nil
}

// pacedPublisher keeps an engine at full speed from running further ahead of the index than its replay buffer reaches:
// a real engine is slowed by its model.
type pacedPublisher struct {
	ctx     context.Context
	out     *publisher.ZMQ
	window  int
	applied func() uint64
}

// Publish waits while too much is under way.
func (p *pacedPublisher) Publish(b *event.Batch) error {
	for p.out.Seq() > p.applied()+uint64(p.window) {
		select {
		case <-p.ctx.Done():
			return p.ctx.Err()
		case <-time.After(time.Millisecond):
		}
	}
	return p.out.PublishWait(p.ctx, b)
}

func (c *demoCmd) announce(ctx context.Context, a *app, s *stack, view fleetView, d *demoEngines, dir string) {
	url := view.url(ctx)
	if url == "" {
		return // stopped before it was known
	}
	fmt.Fprintf(a.stdout, "kvstrata demo at %s\n", url)
	fmt.Fprintf(a.stdout, "  dashboard   %s\n", url)
	fmt.Fprintf(a.stdout, "  nats        embedded at %s, streams in %s\n", s.nats.URL(), dir)
	for _, e := range d.configs {
		fmt.Fprintf(a.stdout, "  engine      %s publishes on %s, replays on %s\n", e.Source.Instance, e.Endpoint, e.Replay)
	}
	if d.connector != "" {
		fmt.Fprintf(a.stdout, "  connector   %s\n", d.connector)
	}
	if d.store != "" {
		fmt.Fprintf(a.stdout, "  store       what it holds is told as a source of its own\n")
	}
	fmt.Fprintf(a.stdout, "  subscriber  hears %d engines\n", len(d.configs))
	fmt.Fprintf(a.stdout, "  prefix      %s/v1/lookup and /v1/sources\n", url)
	if c.ClickHouse == "" {
		fmt.Fprintf(a.stdout, "  history     embedded ClickHouse engine, data in %s\n", engineDir(dir))
	} else {
		fmt.Fprintf(a.stdout, "  history     the ClickHouse given with --clickhouse\n")
	}
	if s.server != nil {
		fmt.Fprintf(a.stdout, "  admin       %s\n", s.server.AdminURL())
	}
	if c.Data == "" {
		fmt.Fprintf(a.stdout, "The data are removed at the end; --data DIR keeps them.\n")
	}
	tail := "kvstrata tail"
	if s.nats.URL() != nats.DefaultURL {
		tail += " --nats " + s.nats.URL()
	}
	query := "kvstrata query evictions"
	if url != "http://127.0.0.1:8080" {
		query += " --server " + url
	}
	fmt.Fprintf(a.stdout, "Try: %s, or %s   Ctrl-C stops.\n", tail, query)
}

// drive sends the traffic; with --exit it compares and reports at the end.
func (c *demoCmd) drive(ctx context.Context, a *app, d *demoEngines, s *stack, view fleetView, dir string, speed float64) error {
	fleet, err := d.fleet(speed)
	if err != nil {
		return usagef("%w", err)
	}
	arrivals, closeTrace, err := c.arrivals()
	if err != nil {
		return err
	}
	defer closeTrace()
	if speed > 0 && s.index != nil {
		arrivals = lookedUp(arrivals, s.index)
	}
	if err := fleet.Run(ctx, arrivals); err != nil && ctx.Err() == nil {
		return fmt.Errorf("simulate: %w", err)
	}
	if !c.Exit {
		if ctx.Err() == nil {
			fmt.Fprintln(a.stdout, "The traffic has ended; the answers stay. Ctrl-C stops.")
			<-ctx.Done()
		}
		return d.checkTransfers(context.WithoutCancel(ctx), a)
	}
	if ctx.Err() != nil {
		return errors.New("stopped before the trace ended")
	}
	kept, err := c.historyFlags.config(dir)
	if err != nil {
		return err
	}
	reader, err := history.NewReader(kept)
	if err != nil {
		return err
	}
	return errors.Join(c.report(ctx, a, d, view, reader, fleet.Report()), reader.Close())
}

// lookedUp asks the index for each request when it comes, as a router would. The fleet goes on in turn: what is shown is
// what could be known.
func lookedUp(arrivals iter.Seq2[sim.Arrival, error], index *prefix.Index) iter.Seq2[sim.Arrival, error] {
	return func(yield func(sim.Arrival, error) bool) {
		for a, err := range arrivals {
			if err == nil && len(a.Request.Prompt) > 0 {
				// A model is unknown until its first event: nothing can be asked of it yet.
				_, _ = index.Lookup(&prefix.Request{Model: demoModel, Tokens: a.Request.Prompt, LoRA: a.Request.LoRA, Salt: a.Request.Salt, ID: a.Request.ID, Session: a.Request.Session, Tenant: a.Request.Tenant})
			}
			if !yield(a, err) {
				return
			}
		}
	}
}

func (c *demoCmd) arrivals() (iter.Seq2[sim.Arrival, error], func(), error) {
	if c.Trace == "" {
		traffic, err := sim.NewTraffic(sim.DefaultTrafficConfig())
		if err != nil {
			return nil, nil, err
		}
		return traffic.Arrivals(), func() {}, nil
	}
	f, err := os.Open(c.Trace)
	if err != nil {
		return nil, nil, usagef("--trace %s: %w", c.Trace, err)
	}
	return sim.NewTraceReader(f).Arrivals(), func() { _ = f.Close() }, nil
}
