// Package redis is the shared store in a Redis or Valkey server or cluster: a [Backend] that moves groups of blocks between
// their memory and the server without a copy of its own, and a [Watcher] that tells what the server holds as a source of
// events.
//
// One group is one value: a header that says whose blocks these are (see [Header]), then their bytes. A key is
// prefix:compatibility:rank:hash, with the first 16 digits of the compatibility hash and the hash of the group's last block.
package redis

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/zeebo/xxh3"

	"kvstrata/connector/store"
)

var _ store.Backend = (*Backend)(nil)

// errLeft says that the caller of an operation did not wait for it.
var errLeft = errors.New("its caller has left")

// ErrTimeout says that a call took longer than the configured timeout.
var ErrTimeout = errors.New("timeout")

// Backend is the data path. It connects when it is first used; Close ends the goroutines that serve its connections.
type Backend struct {
	cfg           Config
	server        endpoint
	log           *slog.Logger
	compatibility [sha256.Size]byte
	blockTokens   int
	keys          string // what keys begin with, up to the rank
	tail          []byte // what ends a SET behind its payload

	ctx     context.Context // of the connections' goroutines; ended by Close
	cancel  context.CancelFunc
	running sync.WaitGroup
	calls   sync.Pool
	route   atomic.Pointer[route]
	asking  chan struct{}    // holds one while somebody asks for the route, who owns
	nodes   map[string]*node // by address
	failed  time.Time        // when asking failed last, and
	failure error            // how
}

// New returns a backend for blocks of so many tokens of engines that have the compatibility hash. It does not connect.
func New(cfg Config, compatibility [sha256.Size]byte, blockTokens int, log *slog.Logger) (*Backend, error) {
	server, err := cfg.endpoint()
	if err != nil {
		return nil, fmt.Errorf("redis store: %w", err)
	}
	if blockTokens < 1 {
		return nil, fmt.Errorf("redis store: block size %d: want 1 token or more", blockTokens)
	}
	b := &Backend{
		cfg: cfg, server: server, log: log, compatibility: compatibility, blockTokens: blockTokens,
		keys: cfg.KeyPrefix + ":" + hex.EncodeToString(compatibility[:8]) + ":", tail: []byte("\r\n"),
		asking: make(chan struct{}, 1), nodes: make(map[string]*node),
	}
	if cfg.TTL > 0 {
		b.tail = appendBulk(b.tail, "PX")
		b.tail = appendBulk(b.tail, b.ttl())
	}
	b.ctx, b.cancel = context.WithCancel(context.Background())
	return b, nil
}

func (b *Backend) ttl() string { return strconv.FormatInt(seconds(b.cfg.TTL).Milliseconds(), 10) }

// Name returns the server's address without secrets.
func (b *Backend) Name() string { return b.server.name() }

// Key returns the key of a group.
func (b *Backend) Key(g *store.Group) string {
	var room, hash [256]byte
	key := append(room[:0], b.keys...)
	key = strconv.AppendInt(key, int64(g.Rank), 10)
	key = append(key, ':')
	key = hex.AppendEncode(key, g.Blocks[len(g.Blocks)-1].Hash.AppendTo(hash[:0]))
	return string(key)
}

// Close ends the connections. A call that is under way fails.
func (b *Backend) Close() error {
	b.cancel()
	b.running.Wait()
	return nil
}

// lookAhead is how many keys are asked for at a time: most prompts have fewer groups.
const lookAhead = 64

// Prefix returns how many of the keys, from the first on, are there.
func (b *Backend) Prefix(ctx context.Context, keys []string) (int, error) {
	for first := 0; first < len(keys); first += lookAhead {
		part := keys[first:min(first+lookAhead, len(keys))]
		c := b.open(len(part))
		for i, key := range part {
			c.reset(i, opExists, key, nil)
		}
		errs := b.do(ctx, c)
		for i, err := range errs {
			if errors.Is(err, store.ErrAbsent) {
				return first + i, nil
			}
			if err != nil {
				return first + i, fmt.Errorf("look up %s: %w", part[i], err)
			}
		}
	}
	return len(keys), nil
}

// Get reads groups into their pieces. An error is of its item only, and never carries what is not to be seen:
// [store.ErrAbsent], [ErrCorrupt], [ErrIncompatible], [ErrTimeout], a [ServerError], or one of the connection or ctx.
func (b *Backend) Get(ctx context.Context, items []store.Item) []error {
	c := b.open(len(items))
	for i := range items {
		c.reset(i, opGet, items[i].Key, &items[i])
	}
	return b.do(ctx, c)
}

// Put stores groups.
func (b *Backend) Put(ctx context.Context, items []store.Item) []error {
	c := b.open(len(items))
	for i := range items {
		c.reset(i, opSet, items[i].Key, &items[i])
	}
	return b.do(ctx, c)
}

func (b *Backend) open(n int) *call {
	c, ok := b.calls.Get().(*call)
	if !ok {
		c = newCall()
	}
	c.grow(n)
	return c
}

// do hands operations to connections, waits for them and returns one error each, nil when there is none. What a lost
// connection or a changed cluster got in the way of is tried once more.
func (b *Backend) do(ctx context.Context, c *call) []error {
	if len(c.ops) == 0 {
		b.calls.Put(c)
		return nil
	}
	c.timer.Reset(b.server.timeout)
	var errs []error
	var r *route
	for attempt := range 2 {
		next, err := b.routing(ctx, c.outdated(r))
		if err != nil && attempt == 0 {
			c.timer.Stop()
			return slices.Repeat([]error{err}, len(c.ops))
		}
		if err != nil { // what was done stays done
			break
		}
		r = next
		if end := b.hand(ctx, c, r, attempt > 0); end != nil {
			c.timer.Stop()
			return b.leave(c, end)
		}
		again := false
		for _, o := range c.ops {
			again = again || o.again
		}
		if !again {
			break
		}
	}
	for i, o := range c.ops {
		if o.err != nil && errs == nil {
			errs = make([]error, len(c.ops))
		}
		if o.err != nil {
			errs[i] = b.explain(o, o.err)
		}
		o.item, o.key = nil, ""
	}
	c.timer.Stop() // before somebody else sets it
	b.calls.Put(c)
	return errs
}

// hand hands operations over, all or those that are to be tried again, and waits for them. It returns why the wait ended
// early, if it did.
func (b *Backend) hand(ctx context.Context, c *call, r *route, retry bool) error {
	c.open.Store(1)
	for _, o := range c.ops {
		if retry && !o.again {
			continue
		}
		o.finished, o.again, o.err = false, false, nil
		c.open.Add(1)
		if err := b.prepare(o); err != nil {
			o.finish(err, false)
			continue
		}
		n := r.of(o.key)
		if n == nil {
			o.finish(errors.New("no node of the cluster serves the key's slot"), false)
			continue
		}
		l := n.idle()
		if o.link != nil && o.link.address == n.address {
			l = o.link // it has a new connection by now; another may not have noticed yet that its own is lost
		}
		o.link = l
		l.load.Add(int64(o.cost))
		select {
		case l.queue <- o:
			continue
		default:
		}
		select {
		case l.queue <- o:
		case <-ctx.Done():
			l.load.Add(-int64(o.cost))
			o.finish(ctx.Err(), false)
			return ctx.Err()
		case <-c.timer.C:
			l.load.Add(-int64(o.cost))
			o.finish(ErrTimeout, false)
			return ErrTimeout
		case <-b.ctx.Done():
			l.load.Add(-int64(o.cost))
			o.finish(errClosed, false)
			return errClosed
		}
	}
	c.done()
	select {
	case <-c.ready:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	case <-c.timer.C:
		return ErrTimeout
	case <-b.ctx.Done():
		return errClosed
	}
}

// prepare checks an operation's item, and makes the command of a SET up to its payload. It runs while connections move the
// operations before this one.
func (b *Backend) prepare(o *op) error {
	if o.kind == opExists {
		return nil
	}
	n := 0
	for _, p := range o.item.Pieces {
		n += len(p)
	}
	if n != o.item.Bytes || n < 0 {
		return fmt.Errorf("pieces of %d bytes for an item of %d", n, o.item.Bytes)
	}
	if o.kind == opGet || len(o.head) > 0 {
		return nil
	}
	if o.item.Group == nil || len(o.item.Group.Blocks) == 0 {
		return errors.New("a group without blocks")
	}
	h := Header{Group: *o.item.Group, Compatibility: b.compatibility, BlockTokens: uint32(b.blockTokens), Payload: uint64(n), HasSum: b.cfg.Checksum}
	if b.cfg.Checksum {
		hash, _ := hashers.Get().(*xxh3.Hasher)
		hash.Reset()
		for _, p := range o.item.Pieces {
			_, _ = hash.Write(p)
		}
		h.Sum = hash.Sum64()
		hashers.Put(hash)
	}
	var err error
	if o.call.header, err = AppendHeader(o.call.header[:0], &h); err != nil {
		return err
	}
	parts := "*3\r\n"
	if b.cfg.TTL > 0 {
		parts = "*5\r\n"
	}
	o.head = append(o.head, parts...)
	o.head = append(o.head, "$3\r\nSET\r\n"...)
	o.head = appendBulk(o.head, o.key)
	o.head = appendLength(o.head, len(o.call.header)+n)
	o.head = append(o.head, o.call.header...)
	return nil
}

var hashers = sync.Pool{New: func() any { return xxh3.New() }}

// leave leaves the operations that are not finished. The call is not used again: connections may still hold them.
func (b *Backend) leave(c *call, end error) []error {
	errs := make([]error, len(c.ops))
	var kill error
	if errors.Is(end, ErrTimeout) {
		kill = ErrTimeout
	}
	for i, o := range c.ops {
		switch {
		case !o.leave(kill):
			errs[i] = b.explain(o, end)
		case o.err != nil:
			errs[i] = b.explain(o, o.err)
		}
	}
	return errs
}

// explain says which operation an error is of. Absence is common, and says enough.
func (b *Backend) explain(o *op, err error) error {
	if err == store.ErrAbsent {
		return err
	}
	return fmt.Errorf("%s %s at %s: %w", o.kind, o.key, b.server.name(), err)
}
