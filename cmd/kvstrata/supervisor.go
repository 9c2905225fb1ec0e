package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/url"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// supervisor runs roles as processes of this binary, and starts those again that die.
type supervisor struct {
	app *app
	env []string // of the processes, beside this one's: what must not be read off their command lines

	mu      sync.Mutex
	changed chan struct{} // closed when a process says where it is
	told    map[place]string
}

// place is something that a role's process says of itself in a line of two words: where its api is, its events, …
type place struct{ role, what string }

func newSupervisor(a *app) *supervisor {
	return &supervisor{app: a, changed: make(chan struct{}), told: make(map[place]string)}
}

// Between the death of a process and its next life: more after each short one.
const (
	restartPause    = 200 * time.Millisecond
	maxRestartPause = 5 * time.Second
	steadyLife      = 10 * time.Second
)

// run keeps a role running until ctx ends. args is asked for each life; env is what of them must not be read off a command line.
func (s *supervisor) run(ctx context.Context, role string, args func() []string, env ...string) error {
	exe, err := os.Executable()
	if err != nil {
		return fmt.Errorf("start role %s: %w", role, err)
	}
	pause := restartPause
	for ctx.Err() == nil {
		began := time.Now()
		err := s.life(ctx, role, exe, args(), env)
		switch {
		case ctx.Err() != nil:
			return nil
		case !s.spoke(role):
			return fmt.Errorf("role %s does not start: %w; what it said is above", role, err)
		case time.Since(began) > steadyLife:
			pause = restartPause
		}
		s.app.log.Warn("a role's process ended; starting it again", "role", role, "err", err, "in", pause)
		select {
		case <-ctx.Done():
		case <-time.After(pause):
		}
		pause = min(2*pause, maxRestartPause)
	}
	return nil
}

// spoke reports whether a role's process ever said where it is.
func (s *supervisor) spoke(role string) bool {
	return s.said(role, "api") != ""
}

// said returns what a role's process said of itself; empty when it has not.
func (s *supervisor) said(role, what string) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.told[place{role, what}]
}

// life is one process of a role, from its start to its end.
func (s *supervisor) life(ctx context.Context, role, exe string, args, env []string) error {
	// The kernel ends the process when the thread that started it ends: this one must not, before the process has.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	cmd := exec.CommandContext(ctx, exe, args...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGTERM, Setpgid: true} // Ctrl-C is this process's to handle
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = 20 * time.Second
	cmd.Stderr = s.app.stderr
	cmd.Env = slices.Concat(os.Environ(), s.env, env)
	out, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	s.app.log.Info("a role's process began", "role", role, "pid", cmd.Process.Pid)
	s.listen(role, out)
	return cmd.Wait()
}

// listen reads what a process prints, and notes where it says what is; its api comes last.
func (s *supervisor) listen(role string, out io.Reader) {
	lines := bufio.NewScanner(out)
	for lines.Scan() {
		fields := strings.Fields(lines.Text())
		if len(fields) != 2 {
			continue
		}
		s.mu.Lock()
		s.told[place{role, fields[0]}] = fields[1]
		close(s.changed)
		s.changed = make(chan struct{})
		s.mu.Unlock()
	}
	_, _ = io.Copy(io.Discard, out) // a line that is too long must not stop the process
}

// url returns where a role's API is, once it said so; empty when ctx ended first.
func (s *supervisor) url(ctx context.Context, role string) string { return s.where(ctx, role, "api") }

// where returns what a role's process said of itself, once it did; empty when ctx ended first.
func (s *supervisor) where(ctx context.Context, role, what string) string {
	for {
		s.mu.Lock()
		said, changed := s.told[place{role, what}], s.changed
		s.mu.Unlock()
		if said != "" {
			return said
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ""
		}
	}
}

// addProcesses adds a process for each role to what the stack runs.
func (c *demoCmd) addProcesses(s *stack, sup *supervisor, engines *demoEngines, flags natsFlags, dir string) error {
	login, err := c.natsLogin.child(s.nats.URL())
	if err != nil {
		return err
	}
	common := slices.Concat(login, c.listenFlags.child(), []string{
		"--nats-max-age", flags.NATSMaxAge.String(), "--nats-max-bytes", fmt.Sprint(flags.NATSMaxBytes),
		"--lease-ttl", flags.LeaseTTL.String(), "--data", dir,
		"--clickhouse-memory", fmt.Sprint(c.Memory), "--log-json=" + strconv.FormatBool(s.app.logJSON),
		"--insecure=" + strconv.FormatBool(c.Insecure),
	})
	if c.CHDB != "" {
		common = append(common, "--chdb", c.CHDB)
	}
	roles := fleetRoles
	if engines.store != "" {
		roles = knownRoles
	}
	for _, role := range roles {
		args := append([]string{"run", "--roles", role}, common...)
		listen, admin, grpc := "127.0.0.1:0", "127.0.0.1:0", ""
		if role == "web" {
			listen, admin, grpc = c.Listen, c.Admin, c.GRPC
		}
		args = append(args, "--listen", listen, "--admin", admin, "--grpc="+grpc, "--log-level", s.app.level.String())
		if role == "subscriber" {
			args = append(args, "--tokens", c.Tokens)
			if c.AllowInvertible {
				args = append(args, "--allow-invertible")
			}
			for _, e := range engines.configs {
				args = append(args, "--engine", fmt.Sprintf("zmq+%s,replay=%s,model=%s,instance=%s,pool=%d", e.Endpoint, e.Replay,
					e.Source.Model, e.Source.Instance, e.PoolSize))
			}
		}
		if role == "store" {
			watched, err := c.storeArgs(engines.store)
			if err != nil {
				return err
			}
			args = append(args, watched...)
		}
		s.runs = append(s.runs, func(ctx context.Context) error { return sup.run(ctx, role, func() []string { return args }) })
	}
	return nil
}

// storeArgs returns the arguments of the store's watcher. A password is in its environment.
func (c *demoCmd) storeArgs(address string) ([]string, error) {
	spec, err := c.storeSpec(address)
	if err != nil {
		return nil, err
	}
	u, err := url.Parse(address)
	if err != nil {
		return nil, usagef("--store: want redis://host:port/db or lm://host:port")
	}
	if u.User != nil {
		u.User = url.User(u.User.Username())
	}
	delete(spec.extra, "url")
	delete(spec.extra, "remote_url")
	extra, err := json.Marshal(spec.extra)
	if err != nil {
		return nil, err
	}
	return []string{
		"--store", u.String(), "--store-format", spec.format, "--store-model", spec.source.Model, "--store-name", spec.source.Instance,
		"--store-block-size", strconv.Itoa(spec.blockSize), "--store-dtype", spec.dtype, "--store-config", string(extra),
	}, nil
}
