// Command chaos runs the real processes of a small fleet, does them harm at random, and holds what the index and history say
// against what the simulated engines know of themselves. docs/chaos.md describes it.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"kvstrata/bus"
)

// Exit codes, as those of kvstrata.
const (
	exitOK       = 0
	exitFailure  = 1
	exitUsage    = 2
	exitMismatch = 3
)

// errWrong says that something was found that must not be.
var errWrong = errors.New("the fleet did not survive")

type options struct {
	time     time.Duration
	seed     uint64
	binary   string
	engines  int
	patience time.Duration
	faults   string
	keep     bool
}

func main() {
	if len(os.Args) == 4 && os.Args[1] == natsName {
		os.Exit(serveNATS(os.Args[2], os.Args[3]))
	}
	var o options
	flag.DurationVar(&o.time, "time", time.Minute, "how long storms last, all together")
	flag.Uint64Var(&o.seed, "seed", 0, "of faults and traffic; 0 takes one by the clock")
	flag.StringVar(&o.binary, "binary", "bin/kvstrata", "the kvstrata that is run")
	flag.IntVar(&o.engines, "engines", 3, "simulated engines; the first keeps few batches for replay")
	flag.DurationVar(&o.patience, "patience", 75*time.Second, "how long a quiet point may take")
	flag.StringVar(&o.faults, "faults", "", "only these kinds of faults, separated by commas")
	flag.BoolVar(&o.keep, "keep", false, "keep logs and journals also when all is well")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	code, isolated := isolate(ctx)
	if !isolated {
		err := run(ctx, o, os.Stdout)
		if code = exitCode(err); err != nil {
			fmt.Fprintln(os.Stderr, "chaos:", err)
		}
	}
	stop()
	os.Exit(code)
}

func exitCode(err error) int {
	switch {
	case err == nil:
		return exitOK
	case errors.Is(err, errWrong):
		return exitMismatch
	case errors.Is(err, errUsage):
		return exitUsage
	default:
		return exitFailure
	}
}

var (
	errUsage       = errors.New("usage")
	errInterrupted = errors.New("interrupted")
)

// serveNATS is the NATS server's process.
func serveNATS(at, dir string) int {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	log := slog.New(slog.NewTextHandler(os.Stderr, nil))
	cfg, err := bus.ListenAt(at)
	cfg.Dir = dir
	if err == nil {
		var server *bus.Server
		if server, err = bus.StartServer(cfg, log); err == nil {
			fmt.Printf("nats %s\n", server.URL())
			<-ctx.Done()
			server.Shutdown()
			return exitOK
		}
	}
	fmt.Fprintln(os.Stderr, "chaos nats:", err)
	return exitFailure
}

// stormLength is how long one storm lasts.
const stormLength = 30 * time.Second

// makeFleet makes the fleet in a new folder.
func (o *options) makeFleet() (*fleet, error) {
	binary, err := filepath.Abs(o.binary)
	if err != nil {
		return nil, err
	}
	if _, err := os.Stat(binary); err != nil {
		return nil, fmt.Errorf("--binary: %w; make build makes it (%w)", err, errUsage)
	}
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp("", "kvstrata-chaos-")
	if err != nil {
		return nil, err
	}
	f, err := newFleet(dir, binary, self, o.engines)
	if err != nil {
		return nil, errors.Join(err, os.RemoveAll(dir))
	}
	return f, nil
}

// run runs storms for a time, and quiet points between them.
func run(ctx context.Context, o options, out io.Writer) (err error) {
	if o.time < time.Second || o.engines < 1 || o.engines > 16 {
		return fmt.Errorf("--time %v, --engines %d: want 1s or more, and 1 to 16 (%w)", o.time, o.engines, errUsage)
	}
	if o.seed == 0 {
		o.seed = uint64(time.Now().UnixNano()) % 1_000_000
	}
	storms := max(1, int((o.time+stormLength/2)/stormLength))
	length := o.time / time.Duration(storms)
	// Whoever loses its parent becomes ours, so that nobody is left behind.
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("become the parent of orphans: %w", err)
	}
	f, err := o.makeFleet()
	if err != nil {
		return err
	}
	noDisk := mountSmall(f.historyDir)
	keep := o.keep
	defer func() {
		keep = keep || err != nil && !errors.Is(err, errInterrupted)
		err = errors.Join(err, f.close(noDisk == nil, keep))
	}()
	all, err := only(plots(f.engineNames(), noDisk == nil), strings.FieldsFunc(o.faults, func(r rune) bool { return r == ',' }))
	if err != nil {
		return fmt.Errorf("%w (%w)", err, errUsage)
	}
	c := &chaos{fleet: f, traffic: newTraffic(o.seed, f.engines), out: out, patience: o.patience, began: time.Now(), noDisk: noDisk}
	fmt.Fprintf(out, "chaos with seed %d: %d storms of %v; CHAOSSEED=%d CHAOSTIME=%v has the same faults again\n", o.seed, storms, length, o.seed, o.time)
	fmt.Fprintf(out, "logs and journals: %s\n", f.logs())
	if noDisk != nil {
		fmt.Fprintf(out, "\nNOT DONE: full disks. %v\nA small disk takes root, and a machine that lets it mount.\n\n", noDisk)
	}
	err = c.run(ctx, schedule(o.seed, storms, length, all), length)
	c.leave()
	c.report(out)
	if len(c.violations) == 0 {
		return err
	}
	for _, v := range c.violations {
		fmt.Fprintf(out, "  WRONG: %s\n", v)
	}
	return errors.Join(err, fmt.Errorf("%w: %d things are wrong; logs and journals are in %s", errWrong, len(c.violations), f.logs()))
}

// run starts the fleet, does the storms, and ends the fleet.
func (c *chaos) run(ctx context.Context, storms [][]fault, length time.Duration) error {
	fleetCtx, stopFleet := context.WithCancel(context.WithoutCancel(ctx))
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		c.fleet.run(fleetCtx)
	}()
	var around sync.WaitGroup
	aroundCtx, stopAround := context.WithCancel(ctx)
	defer func() {
		stopAround()
		around.Wait()
		stopFleet()
		<-ended
	}()
	starting, cancel := context.WithTimeout(ctx, 60*time.Second)
	defer cancel()
	if err := c.fleet.ready(starting); err != nil {
		return err
	}
	c.say("everything runs")
	seen, err := os.Create(filepath.Join(c.fleet.logs(), "watch.log"))
	if err != nil {
		return err
	}
	defer seen.Close()
	around.Go(func() { c.watch(aroundCtx, seen) })
	around.Go(func() {
		if err := c.traffic.run(aroundCtx); err != nil {
			c.violate("the traffic ended: %v", err)
		}
	})
	for _, faults := range storms {
		c.storm(ctx, faults, length)
		if ctx.Err() != nil {
			return errInterrupted
		}
		before := len(c.violations)
		c.settle(ctx)
		if ctx.Err() != nil { // what was not waited for is not wrong
			c.violations = c.violations[:before]
			return errInterrupted
		}
	}
	return nil
}

// leave looks at what the processes said at their end, and ends what is left of them.
func (c *chaos) leave() {
	for _, pid := range sweep() {
		c.violate("process %d was left behind", pid)
	}
	for name, p := range c.fleet.processes {
		for _, death := range p.deaths {
			c.violate("%s", death)
		}
		text, err := os.ReadFile(filepath.Join(c.fleet.logs(), name+".log"))
		if err != nil {
			c.violate("%v", err)
		}
		for _, word := range []string{"panic: ", "fatal error: ", "DATA RACE"} {
			if strings.Contains(string(text), word) {
				c.violate("the log of %s has %q", name, word)
			}
		}
	}
}
