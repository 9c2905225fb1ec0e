package interop_test

import (
	"errors"
	"net"
	"strings"
	"sync"
	"testing"
	"time"
)

// link is a line to one port of an engine, which can be cut and mended, led elsewhere, and be slow.
type link struct {
	listener net.Listener
	pace     time.Duration // of chunks on the way to us; 0 = as they come

	mu     sync.Mutex
	target string
	cut    bool
	hung   bool                  // what goes to the engine is swallowed
	lines  map[net.Conn]struct{} // both ends of each
	asked  int                   // bytes on the way to the engine
	wg     sync.WaitGroup
}

// chunk is what a slow link carries at a time.
const chunk = 32 << 10

// newLink lays a link to an address as ZeroMQ writes it.
func newLink(t *testing.T, endpoint string, pace time.Duration) *link {
	t.Helper()
	l := &link{target: strings.TrimPrefix(endpoint, "tcp://"), pace: pace, lines: make(map[net.Conn]struct{})}
	var err error
	if l.listener, err = net.Listen("tcp", "127.0.0.1:0"); err != nil {
		t.Fatal(err)
	}
	l.wg.Go(l.accept)
	t.Cleanup(func() {
		_ = l.listener.Close()
		l.sever()
		l.wg.Wait()
	})
	return l
}

func (l *link) endpoint() string { return "tcp://" + l.listener.Addr().String() }

func (l *link) accept() {
	for {
		near, err := l.listener.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err == nil {
			l.wg.Go(func() { l.join(near) })
		}
	}
}

// join carries bytes both ways until one end closes.
func (l *link) join(near net.Conn) {
	defer near.Close()
	l.mu.Lock()
	target, cut := l.target, l.cut
	l.mu.Unlock()
	if cut {
		return
	}
	far, err := net.Dial("tcp", target)
	if err != nil {
		return
	}
	defer far.Close()
	l.mu.Lock()
	if l.cut {
		l.mu.Unlock()
		return
	}
	l.lines[near], l.lines[far] = struct{}{}, struct{}{}
	l.mu.Unlock()
	var both sync.WaitGroup
	both.Go(func() { l.ask(far, near) })
	both.Go(func() { l.answer(near, far) })
	both.Wait()
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.lines, near)
	delete(l.lines, far)
}

// ask carries what goes to the engine, and closes both ends behind it.
func (l *link) ask(to, from net.Conn) {
	defer to.Close()
	defer from.Close()
	room := make([]byte, chunk)
	for {
		n, err := from.Read(room)
		if err != nil {
			return
		}
		l.mu.Lock()
		l.asked += n
		hung := l.hung
		l.mu.Unlock()
		if hung {
			continue
		}
		if _, err := to.Write(room[:n]); err != nil {
			return
		}
	}
}

// answer carries what comes from the engine, chunk by chunk if the link is slow, and closes both ends behind it.
func (l *link) answer(to, from net.Conn) {
	defer to.Close()
	defer from.Close()
	if l.pace > 0 {
		_ = from.(*net.TCPConn).SetReadBuffer(chunk) // else the kernel takes in megabytes at once
	}
	room := make([]byte, chunk)
	for {
		if l.pace > 0 {
			<-time.After(l.pace)
		}
		n, err := from.Read(room)
		if err != nil {
			return
		}
		if _, err := to.Write(room[:n]); err != nil {
			return
		}
	}
}

// hang keeps the link standing, but nothing gets through to the engine any more: it might as well hang.
func (l *link) hang() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.hung = true
}

// sever cuts the link: what is connected is cut off, and nothing connects.
func (l *link) sever() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.cut = true
	for c := range l.lines {
		_ = c.Close()
	}
}

// mend lets connections through again, to a target.
func (l *link) mend(endpoint string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.cut, l.hung, l.target = false, false, strings.TrimPrefix(endpoint, "tcp://")
}

// carried returns how many bytes went to the engine.
func (l *link) carried() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.asked
}
