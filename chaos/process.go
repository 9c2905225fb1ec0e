package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// process is one of the fleet's processes through all its lives.
type process struct {
	name string
	args func(life int) []string // the whole command line of a life, which begins with the program
	log  *os.File

	mu       sync.Mutex
	life     int // 1 is the first; 0 before
	pid      int // 0 between two lives
	expected bool
	told     map[string]string // what it said of itself, in lines of two words
	changed  chan struct{}     // closed when any of this changes
	before   func()            // called between two lives, once
	deaths   []string          // that nobody asked for
}

func newProcess(name, logs string, args func(life int) []string) (*process, error) {
	f, err := os.Create(filepath.Join(logs, name+".log"))
	if err != nil {
		return nil, fmt.Errorf("make log of %s: %w", name, err)
	}
	return &process{name: name, args: args, log: f, told: make(map[string]string), changed: make(chan struct{})}, nil
}

// rebirthPause is between the end of a life and the beginning of the next.
const rebirthPause = 100 * time.Millisecond

// run keeps the process running until ctx ends, and then ends it.
func (p *process) run(ctx context.Context) {
	defer p.log.Close()
	for ctx.Err() == nil {
		err := p.live(ctx)
		p.mu.Lock()
		if !p.expected && ctx.Err() == nil {
			p.deaths = append(p.deaths, fmt.Sprintf("%s ended by itself in life %d: %v", p.name, p.life, err))
		} else if err != nil && ctx.Err() != nil && !p.expected {
			p.deaths = append(p.deaths, fmt.Sprintf("%s did not stop cleanly: %v", p.name, err))
		}
		between := p.before
		p.pid, p.before, p.expected = 0, nil, false
		clear(p.told)
		p.tell()
		p.mu.Unlock()
		fmt.Fprintf(p.log, "--- chaos: life %d ended: %v\n", p.life, err)
		if between != nil {
			between()
		}
		select {
		case <-ctx.Done():
		case <-time.After(rebirthPause):
		}
	}
}

// stopPatience is how long a process may take to stop when it is asked to.
const stopPatience = 20 * time.Second

// live is one life.
func (p *process) live(ctx context.Context) error {
	// The kernel ends the process when the thread that started it ends: this one must not, before the process has.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	p.mu.Lock()
	p.life++
	clear(p.told)
	args := p.args(p.life)
	p.mu.Unlock()
	cmd := exec.CommandContext(ctx, args[0], args[1:]...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
	cmd.Cancel = func() error {
		return errors.Join(cmd.Process.Signal(syscall.SIGCONT), cmd.Process.Signal(syscall.SIGTERM))
	}
	cmd.WaitDelay = stopPatience
	cmd.Stderr = p.log
	out, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	fmt.Fprintf(p.log, "--- chaos: life %d: %s\n", p.life, strings.Join(args, " "))
	if err := cmd.Start(); err != nil {
		return err
	}
	p.mu.Lock()
	p.pid = cmd.Process.Pid
	p.tell()
	p.mu.Unlock()
	p.listen(out)
	if err := cmd.Wait(); cmd.ProcessState == nil || !cmd.ProcessState.Success() {
		return err
	}
	return nil // also when it was asked to end
}

// listen reads what the process prints.
func (p *process) listen(out io.Reader) {
	lines := bufio.NewScanner(out)
	for lines.Scan() {
		fmt.Fprintln(p.log, lines.Text())
		if fields := strings.Fields(lines.Text()); len(fields) == 2 {
			p.mu.Lock()
			p.told[fields[0]] = fields[1]
			p.tell()
			p.mu.Unlock()
		}
	}
	_, _ = io.Copy(io.Discard, out) // a line that is too long must not stop the process
}

func (p *process) tell() {
	close(p.changed)
	p.changed = make(chan struct{})
}

// said returns what the process said of itself in this life; empty when it has not yet.
func (p *process) said(what string) string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.told[what]
}

// await waits until the process has said something of itself.
func (p *process) await(ctx context.Context, what string) (string, error) {
	for {
		p.mu.Lock()
		said, changed, deaths := p.told[what], p.changed, len(p.deaths)
		p.mu.Unlock()
		switch {
		case said != "":
			return said, nil
		case deaths > 0:
			return "", fmt.Errorf("%s does not start; its log says why", p.name)
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return "", fmt.Errorf("wait for %s to say its %s: %w", p.name, what, ctx.Err())
		}
	}
}

// lives returns the number of the present life.
func (p *process) lives() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.life
}

// end sends a signal that ends the life. between, which may be nil, is called before the next one.
func (p *process) end(sig syscall.Signal, between func()) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.pid == 0 {
		return errBetween
	}
	p.expected, p.before = true, between
	if sig != syscall.SIGKILL { // who is stopped takes no other
		_ = syscall.Kill(p.pid, syscall.SIGCONT)
	}
	return syscall.Kill(p.pid, sig)
}

// errBetween says that a process was between two lives when it was to be harmed.
var errBetween = errors.New("it is between two lives")

// pause stops the process for a time, unless its life ends before.
func (p *process) pause(ctx context.Context, long time.Duration) error {
	p.mu.Lock()
	pid, life := p.pid, p.life
	if pid == 0 {
		p.mu.Unlock()
		return errBetween
	}
	err := syscall.Kill(pid, syscall.SIGSTOP)
	p.mu.Unlock()
	if err != nil {
		return err
	}
	sleep(ctx, long)
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.pid == pid && p.life == life {
		return syscall.Kill(pid, syscall.SIGCONT)
	}
	return nil
}

// child returns the process id of a child of this life whose command line has a word; 0 when there is none.
func (p *process) child(word string) int {
	p.mu.Lock()
	pid := p.pid
	p.mu.Unlock()
	if pid == 0 {
		return 0
	}
	for _, child := range children(pid) {
		line, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", child))
		if err == nil && strings.Contains(string(line), "\x00"+word+"\x00") {
			return child
		}
	}
	return 0
}

// children returns the process ids of a process's children.
func children(pid int) (all []int) {
	tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid))
	if err != nil {
		return nil
	}
	for _, task := range tasks {
		text, err := os.ReadFile(task)
		if err != nil {
			continue // the thread has ended
		}
		for _, word := range strings.Fields(string(text)) {
			if child, err := strconv.Atoi(word); err == nil {
				all = append(all, child)
			}
		}
	}
	return all
}

// sweep ends what is left of this process's descendants, and returns what ran. Children whose parents have ended become this
// process's, those that were killed with them as well.
func sweep() (ended []int) {
	for range 100 {
		left := children(os.Getpid())
		if len(left) == 0 {
			break
		}
		for _, pid := range left {
			var status syscall.WaitStatus
			if had, err := syscall.Wait4(pid, &status, syscall.WNOHANG, nil); err == nil && had == 0 { // it had not ended
				ended = append(ended, pid)
				_ = syscall.Kill(pid, syscall.SIGKILL)
				_, _ = syscall.Wait4(pid, &status, 0, nil)
			}
		}
	}
	return ended
}

func sleep(ctx context.Context, long time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(long):
	}
}
