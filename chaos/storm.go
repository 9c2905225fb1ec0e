package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"syscall"
	"time"

	"kvstrata/event"
)

// chaos is one run: storms of faults, and a quiet point after each.
type chaos struct {
	fleet    *fleet
	traffic  *traffic
	out      io.Writer
	patience time.Duration // what a quiet point may take
	began    time.Time
	noDisk   error // why no disk can be filled; nil when it can

	mu         sync.Mutex
	done       []*injury
	streamLost int
	violations []string
	quiet      []map[string]finding // of each quiet point, by engine
	storms     int
}

// injury is a fault that was done.
type injury struct {
	fault
	began, ended time.Time // ended is zero while it goes on
	well         time.Time // when everything flowed again; zero before
	missed       string    // why it was not done
	note         string
}

func (c *chaos) say(format string, args ...any) {
	fmt.Fprintf(c.out, "[%6.1fs] %s\n", time.Since(c.began).Seconds(), fmt.Sprintf(format, args...))
}

func (c *chaos) violate(format string, args ...any) {
	text := fmt.Sprintf(format, args...)
	c.say("WRONG: %s", text)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.violations = append(c.violations, text)
}

// storm does a schedule's faults while traffic flows, and returns when the last is over.
func (c *chaos) storm(ctx context.Context, faults []fault, length time.Duration) {
	stop := c.traffic.start()
	defer stop()
	began := time.Now()
	var group sync.WaitGroup
	for _, f := range faults {
		sleep(ctx, time.Until(began.Add(f.At)))
		if ctx.Err() != nil {
			break
		}
		group.Go(func() { c.harm(ctx, f) })
	}
	sleep(ctx, time.Until(began.Add(length)))
	group.Wait()
	for _, e := range c.fleet.engines {
		e.proxy.live.heal()
		e.proxy.replay.heal()
	}
}

// harm does one fault, and notes it.
func (c *chaos) harm(ctx context.Context, f fault) {
	i := &injury{fault: f, began: time.Now()}
	c.mu.Lock()
	c.done = append(c.done, i)
	number := len(c.done)
	c.mu.Unlock()
	c.say("%3d  %v", number, f)
	note, err := c.inject(ctx, f)
	c.mu.Lock()
	i.ended, i.note = time.Now(), note
	if err != nil {
		i.missed, i.well = err.Error(), i.ended
	}
	c.mu.Unlock()
	if err != nil {
		c.say("%3d  NOT DONE: %v", number, err)
	} else if note != "" {
		c.say("%3d  %s", number, note)
	}
}

func (c *chaos) inject(ctx context.Context, f fault) (note string, err error) {
	if e := c.fleet.engine(f.Target); e != nil {
		if c.injectProxy(ctx, e, f) {
			return "", nil
		}
	}
	p := c.fleet.processes[f.Target]
	switch f.Kind {
	case killProcess:
		return "", p.end(syscall.SIGKILL, nil)
	case restart:
		return "", p.end(syscall.SIGTERM, nil)
	case loseNATS:
		return "", p.end(syscall.SIGKILL, func() {
			c.mu.Lock()
			c.streamLost++
			c.mu.Unlock()
			if err := os.RemoveAll(c.fleet.natsDir); err != nil {
				c.violate("the harness can't remove the NATS store: %v", err)
			}
		})
	case stopProcess:
		if f.Target == clickhouseName {
			return "", c.stopClickHouse(ctx, f.For)
		}
		if e := c.fleet.engine(f.Target); e != nil && f.For > longStop {
			e.standsStill()
		}
		return "", p.pause(ctx, f.For)
	case killInsert:
		return c.killInsert(ctx)
	case fillDisk:
		return "", fill(ctx, c.fleet.historyDir, f.For)
	}
	return "", fmt.Errorf("nobody knows how to %v", f)
}

// longStop is from when on an engine that stands still may be asked in vain for a replay.
const longStop = 4 * time.Second

// injectProxy does the faults of an engine's proxy; ok is false for those of its process.
func (c *chaos) injectProxy(ctx context.Context, e *engine, f fault) (ok bool) {
	live, replay := e.proxy.live, e.proxy.replay
	switch f.Kind {
	case dropFrames:
		live.change(func(p *plan) { p.drop += f.N })
	case loseFrames:
		live.change(func(p *plan) { p.lose += f.N })
	case dupFrames:
		live.change(func(p *plan) { p.duplicate += f.N })
	case swapFrames:
		live.change(func(p *plan) { p.swap += f.N })
	case holdFrames:
		live.change(func(p *plan) { p.hold = time.Now().Add(f.For) })
		sleep(ctx, f.For)
	case cutSockets:
		live.cut(0)
		replay.cut(0)
	case cutReplay:
		replay.change(func(p *plan) { p.cutAfter = f.N })
		live.change(func(p *plan) { p.drop += 2 * f.N }) // so that one is asked for
	case silentReplay:
		replay.change(func(p *plan) { p.silent = time.Now().Add(f.For) })
		live.change(func(p *plan) { p.drop += 3 })
		sleep(ctx, f.For)
	case outage:
		live.cut(f.For)
		replay.cut(f.For)
		sleep(ctx, f.For)
	default:
		return false
	}
	return true
}

var errNoClickHouse = errors.New("history has no ClickHouse child at the moment")

func (c *chaos) stopClickHouse(ctx context.Context, long time.Duration) error {
	history := c.fleet.processes[historyName]
	pid := history.child("history-engine")
	if pid == 0 {
		return errNoClickHouse
	}
	if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
		return err
	}
	sleep(ctx, long)
	if history.child("history-engine") == pid {
		return syscall.Kill(pid, syscall.SIGCONT)
	}
	return nil
}

// insertPatience is how long an insert is waited for.
const insertPatience = 3 * time.Second

// killInsert kills the ClickHouse child, if it can be during an insert.
func (c *chaos) killInsert(ctx context.Context) (note string, err error) {
	pid := c.fleet.processes[historyName].child("history-engine")
	if pid == 0 {
		return "", errNoClickHouse
	}
	note = "no insert was seen; killed all the same"
	for end := time.Now().Add(insertPatience); time.Now().Before(end) && ctx.Err() == nil; {
		if runs, err := c.fleet.tables.inserting(ctx); err == nil && runs {
			note = "killed during an insert"
			break
		}
	}
	return note, syscall.Kill(pid, syscall.SIGKILL)
}

const (
	watchPause = 500 * time.Millisecond
	stalled    = 2 * time.Second // from then on a pause that was too long is told
)

// watch looks again and again whether everything flows, notes when it did after each fault, and writes down what it sees, until
// ctx ends.
func (c *chaos) watch(ctx context.Context, seen io.Writer) {
	for ctx.Err() == nil {
		slept := time.Now()
		sleep(ctx, watchPause)
		if stood := time.Since(slept) - watchPause; stood > stalled {
			c.say("the machine stood still for %.1f s: recoveries take that in", stood.Seconds())
		}
		look, cancel := context.WithTimeout(ctx, 2*time.Second)
		heard, last, err := c.heard(look)
		cancel()
		at := time.Since(c.began).Seconds()
		if err != nil {
			fmt.Fprintf(seen, "[%6.1fs] %v\n", at, err)
			continue
		}
		fmt.Fprintf(seen, "[%6.1fs] behind by %.1f s: %s\n", at, time.Since(heard).Seconds(), last)
		c.recovered(heard)
	}
}

// heard returns since when, at the latest, everything flows: the reception of the last batch that both the index and history
// have, of the source that is furthest behind, and which one that is. It is an error when a source is in doubt.
func (c *chaos) heard(ctx context.Context) (oldest time.Time, last string, err error) {
	api := c.fleet.processes[indexName].said("api")
	if api == "" {
		return oldest, "", fmt.Errorf("ask the index: %w", errBetween)
	}
	infos, err := sourcesAt(ctx, api)
	if err != nil {
		return oldest, "", fmt.Errorf("ask the index: %w", err)
	}
	kept, err := c.fleet.tables.received(ctx)
	if err != nil {
		return oldest, "", fmt.Errorf("ask history: %w", err)
	}
	oldest, found := time.Now(), 0
	for _, info := range infos {
		if info.State != event.StateLive && info.State != event.StatePartial {
			return oldest, "", fmt.Errorf("%v is %v: %s", info.Source, info.State, info.Reason)
		}
		for by, at := range map[string]time.Time{"the index": time.UnixMilli(info.Heard), "history": kept[info.Source.Tokens()]} {
			if at.Before(c.began) {
				return oldest, "", fmt.Errorf("%s has nothing of %v yet", by, info.Source)
			}
			if at.Before(oldest) {
				oldest, last = at, fmt.Sprintf("%s with %v", by, info.Source)
			}
		}
		found++
	}
	if found < len(c.fleet.engines) {
		return oldest, "", errUnknown
	}
	return oldest, last, nil
}

func (c *chaos) recovered(heard time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, i := range c.done {
		if i.well.IsZero() && !i.ended.IsZero() && heard.After(i.ended) {
			i.well = time.Now()
		}
	}
}

// settle waits until simulator, index and history say the same of every engine, and reports what differs when its time is
// over. What is partial must be live once its engine has cleared its cache.
func (c *chaos) settle(ctx context.Context) {
	c.mu.Lock()
	c.storms++
	round := c.storms
	c.mu.Unlock()
	began := time.Now()
	ctx, cancel := context.WithTimeout(ctx, c.patience)
	defer cancel()
	if err := c.traffic.last(ctx, round); err != nil {
		c.violate("quiet point %d: %v", round, err)
		return
	}
	found := c.agree(ctx, round, false)
	c.recovered(time.Now())
	c.mu.Lock()
	c.quiet = append(c.quiet, found)
	c.mu.Unlock()
	if ctx.Err() != nil {
		return
	}
	cleared := c.clear(ctx, round, found)
	c.say("quiet point %d: %s cleared now", round, strings.Join(cleared, ", "))
	c.agree(ctx, round, true)
	batches := 0
	for _, f := range found {
		batches += f.Batches
	}
	c.say("quiet point %d: simulator, index and history were compared after %.1f s; %d batches so far", round, time.Since(began).Seconds(), batches)
}

// agree compares every engine until nothing is wrong, or ctx ends.
func (c *chaos) agree(ctx context.Context, round int, mustBeLive bool) map[string]finding {
	found := make(map[string]finding)
	for _, e := range c.fleet.engines {
		var f finding
		for {
			f = c.compare(ctx, e)
			if mustBeLive && f.Partial {
				f.wrong("its state is partial after its engine has cleared its cache")
			}
			if len(f.Wrong) == 0 || ctx.Err() != nil {
				break
			}
			sleep(ctx, 500*time.Millisecond)
		}
		found[e.name] = f
		for _, text := range f.Wrong {
			c.violate("quiet point %d: %s: %s", round, e.name, text)
		}
	}
	return found
}

func (c *chaos) compare(ctx context.Context, e *engine) finding {
	c.mu.Lock()
	lost := c.streamLost > 0
	c.mu.Unlock()
	// The last look is after the time is over.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 20*time.Second)
	defer cancel()
	t, x, h, err := c.fleet.look(ctx, e, lost)
	if err != nil {
		return finding{Wrong: []string{err.Error()}}
	}
	return compare(t, x, h)
}

// clear has engines clear their caches: those whose sources are partial, and one in turn. It returns which.
func (c *chaos) clear(ctx context.Context, round int, found map[string]finding) (names []string) {
	for i, e := range c.fleet.engines {
		name := e.name
		switch {
		case found[e.name].Partial:
			name += " (partial)"
		case i != round%len(c.fleet.engines):
			continue
		}
		names = append(names, name)
		if err := insist(ctx, func() error { return e.reset(ctx) }); err != nil {
			c.violate("%s does not clear its cache: %v", e.name, err)
		}
	}
	return names
}
