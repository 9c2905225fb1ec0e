package redis

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"time"

	goredis "github.com/redis/go-redis/v9"
)

const numSlots = 16384 // of a cluster

// route says which node has which keys. It does not change.
type route struct {
	asked time.Time
	only  *node            // the only one, outside a cluster
	slots *[numSlots]*node // in a cluster; nil = nobody serves the slot
}

// node is a server with its data connections.
type node struct {
	address string
	links   []*link
}

// of returns the node of a key, nil when there is none.
func (r *route) of(key string) *node {
	if r.only != nil {
		return r.only
	}
	return r.slots[slotOf(key)]
}

// idle returns the connection with the least to do.
func (n *node) idle() *link {
	best := n.links[0]
	for _, l := range n.links[1:] {
		if l.load.Load() < best.load.Load() {
			best = l
		}
	}
	return best
}

// slotOf is CRC-16/XMODEM of a key without a hash tag (Redis cluster specification, "Key distribution model"); our keys have
// no braces.
func slotOf(key string) int {
	var crc uint16
	for i := range len(key) {
		crc ^= uint16(key[i]) << 8
		for range 8 {
			if crc&0x8000 != 0 {
				crc = crc<<1 ^ 0x1021
			} else {
				crc <<= 1
			}
		}
	}
	return int(crc) % numSlots
}

// master is a node of a cluster and the slots that it serves.
type master struct {
	address string
	ranges  [][2]int
}

// masters asks a server who serves the slots; nil without an error says that it is no cluster.
func (e *endpoint) masters(ctx context.Context, address string) ([]master, error) {
	client := e.control(address)
	slots := goredis.NewClusterSlotsCmd(ctx, "cluster", "slots") // CLUSTER SHARDS begins with Redis 7 only
	err := client.Process(ctx, slots)
	told := slots.Val()
	if err := errors.Join(err, client.Close()); err != nil {
		if !isAnswer(err) {
			return nil, fmt.Errorf("ask %s for its cluster: %w", address, err)
		}
		return nil, nil // disabled, unknown, or forbidden: a single server
	}
	var all []master
	for _, s := range told {
		if len(s.Nodes) == 0 {
			continue
		}
		at := s.Nodes[0].Addr
		if host, port, err := net.SplitHostPort(at); err == nil && host == "" { // the one that was asked
			if own, _, err := net.SplitHostPort(address); err == nil {
				at = net.JoinHostPort(own, port)
			}
		}
		i := 0
		for i < len(all) && all[i].address != at {
			i++
		}
		if i == len(all) {
			all = append(all, master{address: at})
		}
		all[i].ranges = append(all[i].ranges, [2]int{max(s.Start, 0), min(s.End, numSlots-1)})
	}
	if len(all) == 0 {
		return nil, fmt.Errorf("ask %s for its cluster: no node serves a slot", address)
	}
	return all, nil
}

// isAnswer reports whether an error is what a server said about a command, and not that it could not be asked.
func isAnswer(err error) bool {
	text := err.Error()
	return strings.HasPrefix(text, "ERR ") || strings.HasPrefix(text, "NOPERM")
}

func isMoved(err error) bool {
	if err == nil { // the rest allocates
		return false
	}
	var e ServerError
	return errors.As(err, &e) && strings.HasPrefix(string(e), "MOVED ")
}

// routing returns the route, asking for it when there is none, or none but the one that was found outdated.
func (b *Backend) routing(ctx context.Context, outdated *route) (*route, error) {
	if r := b.route.Load(); r != nil && r != outdated {
		return r, nil
	}
	own, cancel := context.WithTimeout(ctx, b.server.timeout)
	defer cancel()
	select {
	case b.asking <- struct{}{}:
		defer func() { <-b.asking }()
	case <-own.Done():
		return nil, fmt.Errorf("wait for who asks %s for its cluster: %w", b.server.address, own.Err())
	}
	if r := b.route.Load(); r != nil && r != outdated {
		return r, nil
	}
	if time.Since(b.failed) < askAgain { // calls that waited meanwhile need not find out again
		return nil, b.failure
	}
	r, err := b.ask(own)
	if err == nil {
		b.route.Store(r)
		return r, nil
	}
	if ctx.Err() == nil {
		b.failed, b.failure = time.Now(), err
	}
	return nil, err
}

const (
	askAgain = 100 * time.Millisecond // after a failure
	routeAge = time.Second            // at which a node that cannot be reached makes a cluster's route outdated
)

// ask asks the configured server, or one that was known, for the route.
func (b *Backend) ask(ctx context.Context) (*route, error) {
	all, err := b.server.masters(ctx, b.server.address)
	for address := range b.nodes {
		if err == nil {
			break
		}
		all, err = b.server.masters(ctx, address)
	}
	if err != nil {
		return nil, errors.New(b.server.hide(err.Error()))
	}
	r := &route{asked: time.Now()}
	if all == nil {
		r.only = b.node(b.server.address)
		return r, nil
	}
	r.slots = new([numSlots]*node)
	for _, m := range all {
		n := b.node(m.address)
		for _, at := range m.ranges {
			for s := at[0]; s <= at[1]; s++ {
				r.slots[s] = n
			}
		}
	}
	return r, nil
}

// node returns a node, with its connections when it is new. A node that left a cluster keeps them until the backend is
// closed: calls may be about to use them.
func (b *Backend) node(address string) *node {
	if n := b.nodes[address]; n != nil {
		return n
	}
	n := &node{address: address}
	for range b.cfg.Connections {
		l := &link{b: b, address: address, queue: make(chan *op, queueOps)}
		n.links = append(n.links, l)
		b.running.Go(func() { l.run(b.ctx) })
	}
	b.nodes[address] = n
	return n
}
