package embedded

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"sync"
	"syscall"
	"time"

	"github.com/cenkalti/backoff/v5"
	"github.com/prometheus/client_golang/prometheus"
)

const (
	startPoll   = 20 * time.Millisecond // between pings of a child that has not answered yet
	pingEvery   = 2 * time.Second       // and of one that has
	pingTimeout = 5 * time.Second
	maxPause    = 10 * time.Second // between two children
	steady      = time.Minute      // a child that lived so long begins the pauses anew
)

// Config says where and how the engine runs.
type Config struct {
	Dir     string   // holds the data; no other child has it
	Library string   // the engine's shared library; empty looks in the usual places
	Boot    []string // further arguments of ClickHouse's own
	Args    []string // arguments by which this very binary is the child, as the hidden subcommand's name
	Limits  Limits

	Patience time.Duration // a child that answers no ping for so long is killed and started again; opening much data takes a while too
	Grace    time.Duration // how long a child may take to stop before it is killed
}

// DefaultConfig lacks Dir and Args.
func DefaultConfig() Config {
	return Config{Limits: DefaultLimits(), Patience: time.Minute, Grace: 10 * time.Second}
}

// Validate reports every problem at once.
func (c Config) Validate() error {
	errs := []error{c.Limits.validate()}
	if c.Dir == "" {
		errs = append(errs, errors.New("history engine's folder: none given"))
	}
	if len(c.Args) == 0 {
		errs = append(errs, errors.New("history engine's arguments: none given, and without them the child would be another parent"))
	}
	if c.Patience <= 0 || c.Grace <= 0 {
		errs = append(errs, errors.New("history engine's patience and grace: want more than 0"))
	}
	return errors.Join(errs...)
}

// Engine is the parent's side of the child. Its methods may be called from any goroutine.
type Engine struct {
	cfg     Config
	log     *slog.Logger
	client  *http.Client
	restart prometheus.Counter
	upGauge prometheus.Gauge

	mu     sync.Mutex
	up     bool
	reason string // why it is not up
	pid    int
	ready  chan struct{} // closed while up
}

// New checks the configuration and finds the library; it starts nothing.
func New(cfg Config, log *slog.Logger, reg prometheus.Registerer) (*Engine, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	dir, err := filepath.Abs(cfg.Dir)
	if err != nil {
		return nil, fmt.Errorf("history folder: %w", err)
	}
	cfg.Dir = dir
	if cfg.Library, err = Find(cfg.Library); err != nil {
		return nil, err
	}
	e := &Engine{
		cfg: cfg, log: log, reason: "not started", ready: make(chan struct{}),
		restart: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "kvstrata_history_engine_restarts_total",
			Help: "Times that the history engine's child process died and was started again.",
		}),
		upGauge: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "kvstrata_history_engine_up",
			Help: "1 while the history engine's child process answers.",
		}),
	}
	e.client = &http.Client{Timeout: pingTimeout, Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return DialSocket(ctx, e.Socket())
		},
	}}
	for _, c := range []prometheus.Collector{e.restart, e.upGauge} {
		if err := reg.Register(c); err != nil {
			return nil, fmt.Errorf("register history engine's metrics: %w", err)
		}
	}
	return e, nil
}

// Socket returns where the child listens, for Dial. It stays the same from child to child.
func (e *Engine) Socket() string { return SocketPath(e.cfg.Dir) }

// PID returns the child's process id, and 0 while there is none.
func (e *Engine) PID() int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.pid
}

// State returns whether the child answers and, when it does not, why.
func (e *Engine) State() (up bool, reason string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.up, e.reason
}

// WaitReady blocks until the child answers, and returns ctx's error with the reason when that ends before.
func (e *Engine) WaitReady(ctx context.Context) error {
	for {
		e.mu.Lock()
		up, ready, reason := e.up, e.ready, e.reason
		e.mu.Unlock()
		if up {
			return nil
		}
		select {
		case <-ready:
		case <-ctx.Done():
			return fmt.Errorf("wait for the history engine (%s): %w", reason, ctx.Err())
		}
	}
}

// Run keeps a child running until ctx ends, stops it then, and returns nil.
func (e *Engine) Run(ctx context.Context) error {
	pause := backoff.NewExponentialBackOff()
	pause.InitialInterval, pause.MaxInterval = 100*time.Millisecond, maxPause
	pause.Reset()
	for {
		started := time.Now()
		reason := e.runChild(ctx)
		if ctx.Err() != nil {
			e.setDown("stopped")
			return nil
		}
		lived := time.Since(started)
		if lived >= steady {
			pause.Reset()
		}
		next := pause.NextBackOff()
		e.restart.Inc()
		e.log.Warn("history engine died; starting it again", "reason", reason, "lived", lived.Round(time.Millisecond), "in", next.Round(time.Millisecond))
		select {
		case <-ctx.Done():
			e.setDown("stopped")
			return nil
		case <-time.After(next):
		}
	}
}

// runChild runs one child to its end and returns why it ended.
func (e *Engine) runChild(ctx context.Context) (reason string) {
	defer func() { e.setDown(reason) }()
	e.setDown("starting")
	child, err := e.start()
	if err != nil {
		return err.Error()
	}
	e.mu.Lock()
	e.pid = child.cmd.Process.Pid
	e.mu.Unlock()
	pings := make(chan struct{}, 1)
	pinging, cancel := context.WithCancel(ctx)
	pinged := make(chan struct{})
	go func() { defer close(pinged); e.ping(pinging, pings) }()
	defer func() { cancel(); <-pinged }()
	silence := time.NewTimer(e.cfg.Patience)
	defer silence.Stop()
	for {
		select {
		case <-pings:
			silence.Reset(e.cfg.Patience)
			e.setUp()
		case err := <-child.ended:
			return child.why(err)
		case <-silence.C:
			_ = child.cmd.Process.Kill()
			<-child.ended
			return fmt.Sprintf("killed: it answered no ping for %v", e.cfg.Patience)
		case <-ctx.Done():
			e.stop(child)
			return "stopped"
		}
	}
}

// ping sends to pings for each answer of the child, until ctx ends.
func (e *Engine) ping(ctx context.Context, pings chan<- struct{}) {
	every := startPoll
	for ctx.Err() == nil {
		if e.pingOnce(ctx) {
			every = pingEvery
			select {
			case pings <- struct{}{}:
			default:
			}
		}
		select {
		case <-ctx.Done():
		case <-time.After(every):
		}
	}
}

func (e *Engine) pingOnce(ctx context.Context) bool {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://localhost/ping", nil)
	if err != nil {
		return false
	}
	response, err := e.client.Do(request)
	if err != nil {
		return false
	}
	defer response.Body.Close()
	return response.StatusCode == http.StatusOK
}

func (e *Engine) stop(child *child) {
	_ = child.cmd.Process.Signal(syscall.SIGTERM)
	select {
	case <-child.ended:
	case <-time.After(e.cfg.Grace):
		e.log.Warn("history engine does not stop; killing it", "after", e.cfg.Grace)
		_ = child.cmd.Process.Kill()
		<-child.ended
	}
}

func (e *Engine) setUp() {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.up {
		return
	}
	e.up, e.reason = true, ""
	close(e.ready)
	e.upGauge.Set(1)
	e.log.Info("history engine up", "pid", e.pid, "socket", e.Socket())
}

func (e *Engine) setDown(reason string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.up {
		e.ready = make(chan struct{})
	}
	e.up, e.reason, e.pid = false, reason, 0
	e.upGauge.Set(0)
}

// child is one process.
type child struct {
	cmd   *exec.Cmd
	said  *relay
	ended chan error // what Wait returned
}

// start runs this binary as the child. Its standard input carries the configuration and then only stays open: its end
// is how the child learns of our death, however we die.
func (e *Engine) start() (*child, error) {
	exe, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("start the history engine: %w", err)
	}
	if err := os.MkdirAll(e.cfg.Dir, 0o700); err != nil {
		return nil, fmt.Errorf("make history folder: %w", err)
	}
	config, err := json.Marshal(ChildConfig{Dir: e.cfg.Dir, Library: e.cfg.Library, Boot: e.cfg.Boot, Limits: e.cfg.Limits})
	if err != nil {
		return nil, fmt.Errorf("start the history engine: %w", err)
	}
	c := &child{cmd: exec.Command(exe, e.cfg.Args...), said: newRelay(e.log), ended: make(chan error, 1)}
	c.cmd.Stderr = c.said
	c.cmd.Dir = e.cfg.Dir                      // whatever the engine would open by a relative path is not the user's
	c.cmd.Env = append(os.Environ(), "TZ=UTC") // days and partitions are the same wherever the data is read
	c.cmd.SysProcAttr = &syscall.SysProcAttr{
		Setpgid:   true, // a terminal's Ctrl-C is ours: we stop the child after its clients
		Pdeathsig: syscall.SIGKILL,
	}
	c.cmd.WaitDelay = time.Second // a grandchild might hold stderr
	stdin, err := c.cmd.StdinPipe()
	if err != nil {
		return nil, fmt.Errorf("start the history engine: %w", err)
	}
	started := make(chan error)
	go func() {
		// The death signal comes when the thread that started the child ends, so that the thread stays as long as the child.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := c.cmd.Start()
		started <- err
		if err == nil {
			err := c.cmd.Wait()
			c.said.end()
			c.ended <- err
		}
	}()
	if err := <-started; err != nil {
		return nil, fmt.Errorf("start the history engine: %w", errors.Join(err, stdin.Close()))
	}
	if _, err := stdin.Write(append(config, '\n')); err != nil {
		e.log.Debug("history engine took no configuration", "err", err) // it has died, and says why
	}
	return c, nil
}

// why tells a death in one line: how the process ended, and the last that it said.
func (c *child) why(err error) string {
	how := "exit status 0"
	if err != nil {
		how = err.Error()
	}
	if last := c.said.lastLine(); last != "" {
		return how + ": " + last
	}
	return how
}
