package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"time"

	"kvstrata/event"
	"kvstrata/porttest"
	"kvstrata/sim"
)

// fleet is every process, the proxies, and the folders in which all of it lies.
type fleet struct {
	dir       string // data and logs
	binary    string // kvstrata
	self      string // this program, which also is the NATS server's process
	engines   []*engine
	processes map[string]*process
	tables    *tables

	natsAt, natsDir string
	historyDir      string // the ClickHouse engine's
}

// engine is a simulated engine with the proxy before it.
type engine struct {
	name    string
	source  event.Source
	process *process
	proxy   *proxy
	buffer  int // batches kept for replay
	dir     string

	began time.Time // the engine's clock showed the real time then

	mu    sync.Mutex
	stood []time.Time // when the engine stood still for long
}

// What the engines are like. One of them keeps so few batches for replay that an outage really loses some.
const (
	model       = "chaos/llama-sim"
	poolBlocks  = 1024
	blockSize   = 16
	speed       = 2
	longBuffer  = 10_000
	shortBuffer = 60
)

// freeAddress returns an address of loopback that nobody has, and gets, before a process of the fleet listens there.
func freeAddress() (string, error) {
	port, err := porttest.Run(1)
	return net.JoinHostPort("127.0.0.1", strconv.Itoa(port)), err
}

// newFleet prepares everything in a folder, and starts nothing.
func newFleet(dir, binary, self string, engines int) (*fleet, error) {
	f := &fleet{
		dir: dir, binary: binary, self: self, processes: make(map[string]*process),
		natsDir: filepath.Join(dir, "nats"), historyDir: filepath.Join(dir, "data", "clickhouse"),
	}
	for _, d := range []string{f.natsDir, f.historyDir, f.logs()} {
		if err := os.MkdirAll(d, 0o700); err != nil {
			return nil, err
		}
	}
	var err error
	if f.natsAt, err = freeAddress(); err != nil {
		return nil, err
	}
	if err := f.add(natsName, func(int) []string { return []string{self, "nats", f.natsAt, f.natsDir} }); err != nil {
		return nil, err
	}
	began := time.Now().UnixNano()
	for i := range engines {
		if err := f.addEngine(i, began); err != nil {
			return nil, err
		}
	}
	for _, name := range subscriberNames {
		args := f.role(name, "subscriber")
		for _, e := range f.engines {
			args = append(args, "--engine", fmt.Sprintf("zmq+tcp://%s,replay=tcp://%s,model=%s,instance=%s,pool=%d", e.proxy.live.address(),
				e.proxy.replay.address(), model, e.name, poolBlocks))
		}
		if err := f.add(name, func(int) []string { return args }); err != nil {
			return nil, err
		}
	}
	for name, role := range map[string]string{indexName: "prefix", historyName: "history"} {
		args := f.role(name, role)
		if err := f.add(name, func(int) []string { return args }); err != nil {
			return nil, err
		}
	}
	f.tables, err = openTables(f.historyDir)
	return f, err
}

// close removes what the fleet left, but for the logs and journals where they are to be kept.
func (f *fleet) close(mounted, keep bool) error {
	errs := []error{f.tables.close()}
	if mounted {
		errs = append(errs, unmount(f.historyDir))
	}
	errs = append(errs, os.RemoveAll(f.natsDir), os.RemoveAll(filepath.Join(f.dir, "data")))
	if !keep {
		errs = append(errs, os.RemoveAll(f.dir))
	}
	return errors.Join(errs...)
}

func (f *fleet) logs() string { return filepath.Join(f.dir, "logs") }

func (f *fleet) add(name string, args func(life int) []string) error {
	p, err := newProcess(name, f.logs(), args)
	f.processes[name] = p
	return err
}

// role returns the command line of a role.
func (f *fleet) role(name, role string) []string {
	return []string{
		f.binary, "run", "--roles", role, "--nats", "nats://" + f.natsAt, "--lease-ttl", "2s", "--data", filepath.Join(f.dir, "data"),
		"--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--clickhouse-memory", "1073741824", "--log-level", "info",
	}
}

func (f *fleet) addEngine(i int, began int64) error {
	e := &engine{
		name: fmt.Sprintf("engine-%d", i), buffer: longBuffer, dir: f.logs(), began: time.Unix(0, began),
	}
	if i == 0 {
		e.buffer = shortBuffer
	}
	e.source = event.Source{Cluster: event.DefaultCluster, Model: model, Instance: e.name, Origin: event.Engine}
	events, err := freeAddress()
	if err != nil {
		return err
	}
	replay, err := freeAddress()
	if err != nil {
		return err
	}
	if e.proxy, err = newProxy(events, replay); err != nil {
		return err
	}
	err = f.add(e.name, func(life int) []string {
		return []string{
			f.binary, "engine", "--name", e.name, "--model", model, "--pool-blocks", fmt.Sprint(poolBlocks), "--block-size", fmt.Sprint(blockSize),
			"--seed", fmt.Sprint(i), "--events", "tcp://" + events, "--replay", "tcp://" + replay, "--buffer-steps", fmt.Sprint(e.buffer),
			"--speed", fmt.Sprint(speed), "--start", fmt.Sprint(began), "--began", fmt.Sprint(began), "--journal", e.journal(life), "--log-level", "info",
		}
	})
	e.process = f.processes[e.name]
	f.engines = append(f.engines, e)
	return err
}

// run runs everything until ctx ends: first the roles and engines end, then NATS, so that everything that waits to be said can
// be.
func (f *fleet) run(ctx context.Context) {
	proxies, stopProxies := context.WithCancel(context.WithoutCancel(ctx))
	server, stopServer := context.WithCancel(context.WithoutCancel(ctx))
	defer stopServer()
	defer stopProxies()
	var last, first sync.WaitGroup
	for _, e := range f.engines {
		last.Go(func() { e.proxy.run(proxies) })
	}
	last.Go(func() { f.processes[natsName].run(server) })
	for name, p := range f.processes {
		if name != natsName {
			first.Go(func() { p.run(ctx) })
		}
	}
	first.Wait()
	stopServer()
	stopProxies()
	last.Wait()
}

// ready waits until everything answers for the first time.
func (f *fleet) ready(ctx context.Context) error {
	for _, e := range f.engines {
		if _, err := e.process.await(ctx, "api"); err != nil {
			return err
		}
	}
	for name, p := range f.processes {
		if name == natsName || f.engine(name) != nil {
			continue
		}
		// Both subscribers compete: who has no engine is not ready, and is well.
		if _, err := p.await(ctx, "admin"); err != nil {
			return err
		}
		if name != indexName && name != historyName {
			continue
		}
		for !f.answers(ctx, p) {
			if ctx.Err() != nil {
				return fmt.Errorf("%s is not ready: %w", name, ctx.Err())
			}
			sleep(ctx, 100*time.Millisecond)
		}
	}
	return nil
}

// answers reports whether a role says that it is ready.
func (f *fleet) answers(ctx context.Context, p *process) bool {
	at := p.said("admin")
	return at != "" && get(ctx, at+"/readyz", func(io.Reader) error { return nil }) == nil
}

func (f *fleet) engine(name string) *engine {
	for _, e := range f.engines {
		if e.name == name {
			return e
		}
	}
	return nil
}

func (f *fleet) engineNames() (names []string) {
	for _, e := range f.engines {
		names = append(names, e.name)
	}
	return names
}

func (e *engine) journal(life int) string {
	return filepath.Join(e.dir, fmt.Sprintf("%s.life-%03d.jsonl", e.name, life))
}

// standsStill notes that the engine can't answer for long.
func (e *engine) standsStill() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.stood = append(e.stood, time.Now())
}

// aftermath is how long before and behind a disturbance batches may be lost by it: a replay is given up after three attempts of 5 s,
// and may have waited for another.
const aftermath = 30 * time.Second

// disturbed returns the times, by the engine's clock, in which replays were not all that they should be.
func (e *engine) disturbed() (all []window) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, at := range append(e.proxy.replay.disturbed(), e.stood...) {
		shows := func(at time.Time) int64 { return e.began.Add(speed * at.Sub(e.began)).UnixMicro() }
		all = append(all, window{From: shows(at.Add(-aftermath)), To: shows(at.Add(aftermath))})
	}
	return all
}

// engineStory is what an engine's process tells of itself.
type engineStory struct {
	Stats     sim.EngineStats
	Published uint64
}

func (e *engine) story(ctx context.Context) (s engineStory, err error) {
	at := e.process.said("api")
	if at == "" {
		return s, errBetween
	}
	err = get(ctx, at+"/story", func(in io.Reader) error { return json.NewDecoder(in).Decode(&s) })
	return s, err
}

// reset makes the engine clear its cache.
func (e *engine) reset(ctx context.Context) error {
	at := e.process.said("api")
	if at == "" {
		return errBetween
	}
	return ask(ctx, http.MethodPost, at+"/reset", nil, func(io.Reader) error { return nil })
}

// serve has the engine serve a request.
func (e *engine) serve(ctx context.Context, r *sim.Request) error {
	at := e.process.said("api")
	if at == "" {
		return errBetween
	}
	body, err := json.Marshal(map[string]any{
		"id": r.ID, "prompt": r.Prompt, "max_tokens": r.Output, "lora": r.LoRA, "cache_salt": r.Salt, "session": r.Session,
	})
	if err != nil {
		return err
	}
	return ask(ctx, http.MethodPost, at+"/requests", body, func(io.Reader) error { return nil })
}

// truth reads what the engine did in all its lives. It stands still.
func (e *engine) truth(ctx context.Context, streamLost bool) (*truth, error) {
	t := &truth{StreamLost: streamLost, Disturbed: e.disturbed()}
	lives := e.process.lives()
	for n := 1; n <= lives; n++ {
		batches, err := readJournal(e.journal(n))
		if err != nil {
			return nil, err
		}
		t.Lives = append(t.Lives, life{Batches: batches, Buffer: e.buffer})
	}
	if err := e.confirm(ctx, t.Lives[lives-1].Batches); err != nil {
		return nil, err
	}
	at := e.process.said("api")
	if at == "" {
		return nil, errBetween
	}
	var err error
	if t.Resident, err = residentAt(ctx, at+"/resident"); err != nil {
		return nil, err
	}
	e.proxy.mu.Lock()
	defer e.proxy.mu.Unlock()
	t.Dropped, t.Passed, t.Withheld = e.proxy.dropped.clone(), e.proxy.passed.clone(), e.proxy.withheld.clone()
	return t, nil
}

// confirm holds the journal of the present life against the engine's own totals.
func (e *engine) confirm(ctx context.Context, batches []batch) error {
	s, err := e.story(ctx)
	if err != nil {
		return err
	}
	var stored, evicted uint64
	for _, b := range batches {
		stored, evicted = stored+uint64(b.Stored), evicted+uint64(b.Evicted)
	}
	if s.Published != uint64(len(batches)) || s.Stats.BlocksStored != stored || s.Stats.BlocksEvicted != evicted {
		return fmt.Errorf("its journal has %d batches with %d blocks stored and %d evicted, it tells of %d, %d and %d", len(batches), stored, evicted,
			s.Published, s.Stats.BlocksStored, s.Stats.BlocksEvicted)
	}
	return nil
}

// look reads all three sides of an engine's story.
func (f *fleet) look(ctx context.Context, e *engine, streamLost bool) (*truth, *indexed, *kept, error) {
	t, err := e.truth(ctx, streamLost)
	if err != nil {
		return nil, nil, nil, fmt.Errorf("ask the engine: %w", err)
	}
	x, err := f.indexed(ctx, e)
	if err != nil {
		return nil, nil, nil, fmt.Errorf("ask the index: %w", err)
	}
	h, err := f.tables.look(ctx, e.source)
	return t, x, h, err
}

var errUnknown = errors.New("the index does not know the source")

func (f *fleet) indexed(ctx context.Context, e *engine) (*indexed, error) {
	api := f.processes[indexName].said("api")
	if api == "" {
		return nil, errBetween
	}
	infos, err := sourcesAt(ctx, api)
	if err != nil {
		return nil, err
	}
	for _, info := range infos {
		if info.Source == e.source {
			x := &indexed{Info: info}
			x.Resident, err = residentOfIndex(ctx, api, e.source)
			return x, err
		}
	}
	return nil, errUnknown
}
