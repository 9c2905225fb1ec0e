package redis

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"

	goredis "github.com/redis/go-redis/v9"

	"kvstrata/event"
)

// The states of a feed.
const (
	feedDown int32 = iota // not subscribed
	feedLost              // subscribed, but something may have been missed: what comes is dropped until the owner compares
	feedLive              // what comes goes into the queue
)

// wanted are the notifications that a watcher lives by: keyevents of generic and string commands, expiry and eviction.
const wanted = "Eg$xe"

// The events that say that a key has a value, and that it has none any more.
var (
	setEvents  = []string{"set", "setrange", "append", "restore", "rename_to", "copy_to", "move_to"}
	goneEvents = []string{"del", "expired", "evicted", "rename_from", "move_from"}
)

// ConfigError says that a server does not send the notifications that a watcher needs.
type ConfigError struct {
	Address string
	Have    string // its notify-keyspace-events
	Want    string
	Err     error // why it was not set
}

func (e *ConfigError) Error() string {
	return fmt.Sprintf("%s sends no notifications of all changes: notify-keyspace-events is %q and could not be set (%v); set it to %q in the "+
		"server's configuration, or allow this user CONFIG SET", e.Address, e.Have, e.Err, e.Want)
}

func (e *ConfigError) Unwrap() error { return e.Err }

// feed is the notifications of one node.
type feed struct {
	w       *Watcher
	n       *watched
	address string
	client  *goredis.Client
	state   atomic.Int32
}

func newFeed(w *Watcher, n *watched, address string) *feed {
	return &feed{w: w, n: n, address: address, client: w.server.control(address)}
}

// run subscribes, again when the connection is lost.
func (f *feed) run(ctx context.Context) error {
	for backoff := firstBackoff; ; {
		subscribed, err := f.subscribe(ctx)
		f.state.Store(feedDown)
		f.w.ready.Store(false)
		f.tell()
		if ctx.Err() != nil {
			return nil
		}
		var wrong *ConfigError
		if errors.As(err, &wrong) {
			return err
		}
		f.w.log.Warn("notifications of the store are lost; subscribing again", "store", f.w.Name(), "node", f.address, "err", f.w.server.hide(err.Error()))
		if subscribed {
			backoff = firstBackoff
		}
		pause(ctx, backoff)
		backoff = min(2*backoff, lastBackoff)
	}
}

// subscribe hands notifications to the owner until the connection is lost; it reports whether there were any to come.
func (f *feed) subscribe(ctx context.Context) (bool, error) {
	if err := f.configure(ctx); err != nil {
		return false, err
	}
	dialCtx, cancel := context.WithTimeout(ctx, f.w.server.timeout)
	defer cancel()
	conn, err := f.w.server.dial(dialCtx, f.address)
	if err != nil {
		return false, err
	}
	defer conn.Close()
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	defer stop()
	// A client that tracks keys, and reads none, is told of FLUSHALL and FLUSHDB, which no keyevent tells.
	out := appendCommand(nil, "HELLO", "3")
	out = appendCommand(out, "CLIENT", "TRACKING", "ON")
	subscribe := []string{"SUBSCRIBE"}
	channel := "__keyevent@" + strconv.Itoa(f.w.server.db) + "__:"
	for _, name := range slices.Concat(setEvents, goneEvents) {
		subscribe = append(subscribe, channel+name)
	}
	if _, err := conn.Write(appendCommand(out, subscribe...)); err != nil {
		return false, err
	}
	in := newPushReader(conn)
	var parts [][]byte
	for _, what := range []string{"HELLO 3", "CLIENT TRACKING ON"} {
		if parts, err = in.next(parts); err != nil {
			return false, fmt.Errorf("%s (want Redis 6, Valkey 7 or newer): %w", what, err)
		}
	}
	for open := len(subscribe) - 1; ; {
		if parts, err = in.next(parts); err != nil {
			return open == 0, fmt.Errorf("wait for notifications: %w", err)
		}
		switch {
		case len(parts) == 3 && string(parts[0]) == "subscribe":
			if open--; open == 0 {
				f.state.Store(feedLost)
				f.tell()
			}
		case len(parts) == 3 && string(parts[0]) == "message":
			f.take(strings.TrimPrefix(string(parts[1]), channel), string(parts[2]))
		case len(parts) == 2 && string(parts[0]) == "invalidate" && len(parts[1]) == 0:
			f.lose()
		}
	}
}

// take hands one notification to the owner.
func (f *feed) take(name, key string) {
	if !strings.HasPrefix(key, f.w.match) || f.state.Load() != feedLive {
		return
	}
	select {
	case f.n.queue <- notice{key: key, set: slices.Contains(setEvents, name)}:
	default:
		f.w.dropped.Add(1)
		f.lose()
	}
}

// lose says that something of a subscribed node may have been missed.
func (f *feed) lose() {
	if f.state.CompareAndSwap(feedLive, feedLost) {
		f.w.ready.Store(false)
		f.tell()
	}
}

func (f *feed) tell() {
	select {
	case f.n.wake <- struct{}{}:
	default:
	}
}

// find makes a lost feed live: the owner is about to compare. It reports whether the node is subscribed to.
func (f *feed) find() bool {
	return f.state.CompareAndSwap(feedLost, feedLive) || f.state.Load() == feedLive
}

// configure sees to it that the node sends what is wanted.
func (f *feed) configure(ctx context.Context) error {
	const name = "notify-keyspace-events"
	got, err := f.client.ConfigGet(ctx, name).Result()
	if err != nil {
		if !isAnswer(err) {
			return fmt.Errorf("read %s of %s: %w", name, f.address, err)
		}
		f.w.log.Warn("cannot check the server's configuration; events are missed unless it is as wanted", "node", f.address, "setting", name,
			"wanted", wanted, "err", err)
		return nil
	}
	have := got[name]
	want := have
	for _, flag := range wanted {
		if strings.ContainsRune(have, flag) || flag != 'E' && strings.ContainsRune(have, 'A') {
			continue
		}
		want += string(flag)
	}
	if want == have {
		return nil
	}
	if err := f.client.ConfigSet(ctx, name, want).Err(); err != nil {
		if !isAnswer(err) {
			return fmt.Errorf("set %s of %s: %w", name, f.address, err)
		}
		return &ConfigError{Address: f.address, Have: have, Want: want, Err: err}
	}
	f.w.log.Info("the server sends notifications from now on", "node", f.address, "setting", name, "was", have, "is", want)
	return nil
}

const (
	scanCount   = 1000    // keys that a step of SCAN looks at
	headerGuess = 1 << 10 // bytes of a value that are read first: 16 names and more
)

// scan adds all keys of the node that begin with match, and the sizes of their values.
func (f *feed) scan(ctx context.Context, match string, there map[string]int64) error {
	for cursor := uint64(0); ; {
		keys, next, err := f.client.Scan(ctx, cursor, match+"*", scanCount).Result()
		if err != nil {
			return fmt.Errorf("scan %s: %w", f.address, err)
		}
		sizes, err := f.pipeline(ctx, keys, func(p goredis.Pipeliner, key string) { p.StrLen(ctx, key) })
		if err != nil {
			return fmt.Errorf("scan %s: %w", f.address, err)
		}
		for i, key := range keys {
			if n, err := sizes[i].(*goredis.IntCmd).Result(); err == nil && n > 0 { // else it is no text, or gone since
				there[key] = n
			}
		}
		if cursor = next; cursor == 0 {
			return nil
		}
	}
}

// pipeline sends one command a key and returns them with their replies. Errors that the server answered stay in them.
func (f *feed) pipeline(ctx context.Context, keys []string, add func(goredis.Pipeliner, string)) ([]goredis.Cmder, error) {
	if len(keys) == 0 {
		return nil, nil
	}
	p := f.client.Pipeline()
	for _, key := range keys {
		add(p, key)
	}
	cmds, err := p.Exec(ctx)
	if err == nil {
		return cmds, nil
	}
	for _, cmd := range cmds { // Exec returns the first error only
		var answer goredis.Error
		if err := cmd.Err(); err != nil && !errors.As(err, &answer) {
			return nil, err
		}
	}
	return cmds, nil
}

// entries reads the headers of keys, and what their values' sizes are.
func (f *feed) entries(ctx context.Context, keys []string, entries map[string]*Entry) error {
	for part := range slices.Chunk(keys, roundNotices) {
		var longer []string
		longest := int64(0)
		err := f.read(ctx, part, headerGuess, func(key string, b []byte, size int64) {
			e, more := entryOf(key, b, size)
			if more > 0 {
				longer, longest = append(longer, key), max(longest, int64(more))
				return
			}
			entries[key] = e
		})
		if err != nil {
			return err
		}
		if len(longer) == 0 {
			continue
		}
		if err := f.read(ctx, longer, longest, func(key string, b []byte, size int64) { entries[key], _ = entryOf(key, b, size) }); err != nil {
			return err
		}
	}
	return nil
}

// read reads the first n bytes of values. Between a value and its size it may be overwritten: then another notification of
// the key is on its way.
func (f *feed) read(ctx context.Context, keys []string, n int64, each func(key string, b []byte, size int64)) error {
	cmds, err := f.pipeline(ctx, keys, func(p goredis.Pipeliner, key string) {
		p.GetRange(ctx, key, 0, n-1)
		p.StrLen(ctx, key)
	})
	if err != nil {
		return fmt.Errorf("read headers of %d keys at %s: %w", len(keys), f.address, err)
	}
	for i, key := range keys {
		text, err := cmds[2*i].(*goredis.StringCmd).Bytes()
		size, err2 := cmds[2*i+1].(*goredis.IntCmd).Result()
		if err == nil && err2 == nil {
			each(key, text, size)
		}
	}
	return nil
}

// entryOf reads a header; nil when it is none of the key's. more is as in ParseHeader.
func entryOf(key string, b []byte, size int64) (e *Entry, more int) {
	h, more, err := ParseHeader(b, size)
	if err != nil || more > 0 {
		return nil, more
	}
	k, ok := parseKey(key)
	last := h.Group.Blocks[len(h.Group.Blocks)-1].Hash
	if !ok || k.rank != h.Group.Rank || k.hash != last || k.space != beSpace(&h.Compatibility) {
		return nil, 0
	}
	return &Entry{Group: h.Group, BlockTokens: h.BlockTokens, Value: size, space: k.space}, 0
}

// beSpace is what a key tells of a compatibility hash.
func beSpace(compatibility *[32]byte) uint64 {
	n, _ := event.BytesHash(string(compatibility[:8])).Int()
	return n
}
