package connectortest

import (
	"io"
	"net"
	"sync"
	"testing"
)

// Proxy stands between a consumer and where its bytes come from, and does what networks do. Only bytes towards the consumer
// are counted and touched.
type Proxy struct {
	listener net.Listener

	mu     sync.Mutex
	target string
	budget int // bytes that pass before the fault; negative = no fault
	fault  Fault
	conns  map[net.Conn]struct{}
	closed bool
	hit    chan struct{} // closed when the fault happens
}

// Fault is what a proxy does once so many bytes have passed.
type Fault uint8

// The faults.
const (
	Cut   Fault = 1 + iota // the connection ends
	Stall                  // nothing passes any more
	Flip                   // one bit is another, and all goes on
)

// NewProxy starts a proxy to a target that may be set later.
func NewProxy(t *testing.T, target string) *Proxy {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &Proxy{listener: l, target: target, budget: -1, conns: make(map[net.Conn]struct{}), hit: make(chan struct{})}
	var group sync.WaitGroup
	group.Go(func() { p.accept(&group) })
	t.Cleanup(func() {
		_ = l.Close()
		p.CloseConnections(true)
		group.Wait()
	})
	return p
}

// Address is where the proxy listens.
func (p *Proxy) Address() string { return p.listener.Addr().String() }

// SetTarget says where new connections go.
func (p *Proxy) SetTarget(target string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.target = target
}

// Break arms a fault; it happens once, after so many more bytes. The channel is closed when it has happened.
func (p *Proxy) Break(f Fault, after int) <-chan struct{} {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.fault, p.budget, p.hit = f, after, make(chan struct{})
	return p.hit
}

// CloseConnections ends every connection; for good also all that come.
func (p *Proxy) CloseConnections(forGood bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.closed = p.closed || forGood
	for c := range p.conns {
		_ = c.Close()
	}
}

func (p *Proxy) accept(group *sync.WaitGroup) {
	for {
		client, err := p.listener.Accept()
		if err != nil {
			return
		}
		p.mu.Lock()
		target := p.target
		p.mu.Unlock()
		server, err := net.Dial("tcp", target)
		if err != nil {
			_ = client.Close()
			continue
		}
		if !p.keep(client, server) {
			continue
		}
		group.Go(func() {
			_, _ = io.Copy(server, client)
			_ = server.Close()
		})
		group.Go(func() {
			p.pass(client, server)
			_ = client.Close()
			p.forget(client, server)
		})
	}
}

func (p *Proxy) keep(conns ...net.Conn) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range conns {
		if p.closed {
			_ = c.Close()
		} else {
			p.conns[c] = struct{}{}
		}
	}
	return !p.closed
}

func (p *Proxy) forget(conns ...net.Conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range conns {
		delete(p.conns, c)
	}
}

// pass copies from server to client until either ends or a fault ends it.
func (p *Proxy) pass(client, server net.Conn) {
	buf := make([]byte, 16<<10)
	for {
		n, err := server.Read(buf)
		data, fault := p.touch(buf[:n])
		if _, werr := client.Write(data); werr != nil {
			return
		}
		switch {
		case fault == Cut:
			_ = server.Close()
			return
		case fault == Stall:
			_, _ = io.Copy(io.Discard, server)
			return
		case err != nil:
			return
		}
	}
}

// touch applies the armed fault when its place lies in data. It returns what passes.
func (p *Proxy) touch(data []byte) ([]byte, Fault) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.budget < 0 || len(data) == 0 {
		return data, 0
	}
	if p.budget >= len(data) {
		p.budget -= len(data)
		return data, 0
	}
	at := p.budget
	p.budget = -1
	close(p.hit)
	if p.fault == Flip {
		data[at] ^= 0x10
		return data, 0
	}
	return data[:at], p.fault
}
