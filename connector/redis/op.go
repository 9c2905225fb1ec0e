package redis

import (
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"kvstrata/connector/store"
)

// opKind is what an operation does.
type opKind uint8

const (
	opGet opKind = 1 + iota
	opSet
	opExists
)

func (k opKind) String() string {
	switch k {
	case opGet:
		return "GET"
	case opSet:
		return "SET"
	case opExists:
		return "EXISTS"
	default:
		return fmt.Sprintf("opKind(%d)", uint8(k))
	}
}

// op is one operation on its way. Its call owns it until it is handed to a link, and again when it is finished. Whoever
// leaves it before, leaves it for good: then item is not to be touched, and nobody reads what became of it.
type op struct {
	call  *call
	kind  opKind
	key   string
	bytes int    // of the payload
	cost  int    // bytes that it has under way
	head  []byte // of a SET: the command up to the payload
	link  *link  // to which it was handed

	mu       sync.Mutex
	item     *store.Item
	left     bool // by its caller
	finished bool
	session  *session // on which it is under way
	writing  bool     // its pieces are being written
	err      error
	again    bool // to be tried once more: see link.finish, and MOVED
}

// start says that a session begins to write the operation, unless its caller has left.
func (o *op) start(s *session) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.left {
		return false
	}
	o.session, o.writing = s, o.kind == opSet
	return true
}

// busy reports whether a writer still has the operation's pieces.
func (o *op) busy() bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.writing
}

// finish ends the operation and tells its call.
func (o *op) finish(err error, again bool) {
	o.mu.Lock()
	o.finished, o.err, o.again, o.session = true, err, again, nil
	o.mu.Unlock()
	o.call.done()
}

// leave ends the wait for an operation that is not finished. A connection on which a payload is half written is of no use
// any more; nor is one that let a time limit pass, when kill says so. It reports whether the operation had been finished.
func (o *op) leave(kill error) bool {
	o.mu.Lock()
	finished, s := o.finished, o.session
	if !finished {
		o.left, o.item = true, nil
		if !o.writing && kill == nil {
			s = nil
		}
	}
	o.mu.Unlock()
	if finished || s == nil {
		return finished
	}
	if kill == nil {
		kill = errLeft
	}
	s.kill(kill) // without the lock: closing a connection waits for who reads from it, who may wait for the lock
	return false
}

// call is the operations of one call of a backend. It is reused unless an operation was left.
type call struct {
	ops    []*op
	all    []*op         // ops, and more for larger calls
	open   atomic.Int64  // operations that are not finished, and one more while they are handed over
	ready  chan struct{} // told when open gets to 0
	timer  *time.Timer
	header []byte // room
}

func newCall() *call {
	c := &call{ready: make(chan struct{}, 1), timer: time.NewTimer(time.Hour)}
	c.timer.Stop()
	return c
}

// grow makes room for n operations.
func (c *call) grow(n int) {
	for len(c.all) < n {
		c.all = append(c.all, &op{call: c})
	}
	c.ops = c.all[:n]
}

// reset makes operation i ready to be handed over.
func (c *call) reset(i int, kind opKind, key string, item *store.Item) *op {
	o := c.ops[i]
	o.kind, o.key, o.item, o.link = kind, key, item, nil
	o.bytes, o.head = 0, o.head[:0]
	if item != nil {
		o.bytes = item.Bytes
	}
	o.cost = max(o.bytes, len(key)+64)
	o.left, o.finished, o.session, o.writing, o.err, o.again = false, false, nil, false, nil, false
	return o
}

// done counts a finished operation.
func (c *call) done() {
	if c.open.Add(-1) == 0 {
		c.ready <- struct{}{}
	}
}

// outdated returns the route by which the operations went, when they show that a cluster has another one now.
func (c *call) outdated(r *route) *route {
	if r == nil || r.only != nil {
		return nil
	}
	for _, o := range c.ops {
		if o.again && (isMoved(o.err) || time.Since(r.asked) > routeAge) {
			return r
		}
	}
	return nil
}
