package embedded

import (
	"context"
	"fmt"
	"strings"
	"time"
)

// pool lends connections, each to one request at a time. A bounded number of requests wait, each for a bounded time.
type pool struct {
	name     Pool
	readOnly bool
	free     chan *connection
	waiting  chan struct{}
	wait     time.Duration
}

func (p *pool) acquire(ctx context.Context) (*connection, error) {
	select {
	case c := <-p.free:
		return c, nil
	default:
	}
	select {
	case p.waiting <- struct{}{}:
		defer func() { <-p.waiting }()
	default:
		return nil, refuse(codeTooMany, "TOO_MANY_SIMULTANEOUS_QUERIES", "%d requests already wait for the %s connections; try again later", cap(p.waiting), p.name)
	}
	timer := time.NewTimer(p.wait)
	defer timer.Stop()
	select {
	case c := <-p.free:
		return c, nil
	case <-timer.C:
		return nil, refuse(codeTooMany, "TOO_MANY_SIMULTANEOUS_QUERIES", "no %s connection came free within %v; try again later", p.name, p.wait)
	case <-ctx.Done():
		return nil, refuse(codeCancelled, "QUERY_WAS_CANCELLED", "the client went away")
	}
}

func (p *pool) release(c *connection) { p.free <- c }

// pools are the connections of one child, all to one path.
type pools struct {
	named   map[Pool]*pool
	control *pool // ours: pings, and the ends of others' queries
}

// openPools boots the engine on dir and opens every connection that there will be.
func openPools(lib *library, dir string, more []string, l Limits) (*pools, error) {
	boot := []string{
		"kvstrata", "--path=" + dir,
		fmt.Sprintf("--max_server_memory_usage=%d", l.Memory),
		fmt.Sprintf("--mark_cache_size=%d", l.MarkCache),
	}
	boot = append(boot, more...)
	read := []string{
		"--readonly=1",
		fmt.Sprintf("--max_memory_usage=%d", l.QueryMemory),
		fmt.Sprintf("--max_execution_time=%g", l.QueryTime.Seconds()),
		"--timeout_overflow_mode=throw",
		fmt.Sprintf("--max_result_bytes=%d", l.AnswerBytes),
		"--result_overflow_mode=throw",
	}
	all := &pools{named: make(map[Pool]*pool)}
	open := func(name Pool, n int, readOnly bool, args ...string) (*pool, error) {
		p := &pool{
			name: name, readOnly: readOnly,
			free: make(chan *connection, n), waiting: make(chan struct{}, l.Queue), wait: l.QueueWait,
		}
		for range n {
			c, err := lib.newConnection(append(boot[:len(boot):len(boot)], args...))
			if err != nil {
				return nil, fmt.Errorf("open history folder %s: %w", dir, err)
			}
			p.free <- c
		}
		return p, nil
	}
	var err error
	if all.control, err = open("control", 1, false); err != nil {
		return nil, err
	}
	for _, p := range []struct {
		name     Pool
		n        int
		readOnly bool
		args     []string
	}{{Writer, l.Writers, false, nil}, {Aside, 2, false, nil}, {Dashboard, l.Readers, true, read}, {Free, 1, true, read}} {
		if all.named[p.name], err = open(p.name, p.n, p.readOnly, p.args...); err != nil {
			return nil, err
		}
	}
	return all, nil
}

// close gives back every connection that comes free before ctx ends, and reports whether that was all. The engine closes with the last.
func (p *pools) close(ctx context.Context) bool {
	for _, pool := range []*pool{p.named[Writer], p.named[Aside], p.named[Dashboard], p.named[Free], p.control} {
		for range cap(pool.free) {
			select {
			case c := <-pool.free:
				c.close()
			case <-ctx.Done():
				return false
			}
		}
	}
	return true
}

// use makes a database the current one of a connection.
func (c *connection) use(database string) error {
	if database == "" {
		database = "default"
	}
	if c.database == database {
		return nil
	}
	if _, err := c.query("USE "+quoteName(database), "Null", nil); err != nil {
		return err
	}
	c.database = database
	return nil
}

func quoteName(name string) string {
	return "`" + strings.NewReplacer(`\`, `\\`, "`", "\\`").Replace(name) + "`"
}

func quoteText(text string) string {
	return "'" + strings.NewReplacer(`\`, `\\`, "'", `\'`).Replace(text) + "'"
}
