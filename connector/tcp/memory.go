package tcp

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"kvstrata/connector"
	"kvstrata/connector/device"
)

const (
	copyBytes = 16 << 20  // that one goroutine copies at a time
	openBytes = 256 << 20 // that are copied before the peer is asked whether they count
	maxDims   = 16        // of a peer's tensor
)

// layoutText is what a peer is told of this end's memory.
type layoutText struct {
	Size    int                `json:"size"`
	Tensors []connector.Tensor `json:"tensors"`
}

// mapping is a peer's memory.
type mapping struct {
	mem    []byte
	layout *connector.Layout
}

func (m *mapping) close() { _ = unix.Munmap(m.mem) }

// serveLocal hands the memory's file to a peer on this host, for reading only.
func (e *Endpoint) serveLocal(conn net.Conn) {
	if err := e.handOver(conn.(*net.UnixConn)); err != nil {
		e.id.Log.Debug("hand memory to a peer", "err", err)
	}
	_ = conn.Close()
}

func (e *Endpoint) handOver(conn *net.UnixConn) error {
	if err := sameUser(conn); err != nil {
		return err
	}
	if _, err := e.welcome(conn, e.token); err != nil {
		return err
	}
	if err := conn.SetDeadline(time.Now().Add(handshakeTimeout)); err != nil {
		return err
	}
	caches := e.id.Cache.Caches()
	file, err := os.Open(fmt.Sprintf("/proc/self/fd/%d", caches.Memory.File().Fd()))
	if err != nil {
		return fmt.Errorf("open memory for reading: %w", err)
	}
	defer file.Close()
	body, err := json.Marshal(layoutText{Size: caches.Memory.Size(), Tensors: caches.Tensors})
	if err != nil {
		return fmt.Errorf("write layout: %w", err)
	}
	head := frame{length: len(body), kind: kindMap}.append(nil)
	if _, _, err := conn.WriteMsgUnix(head, unix.UnixRights(int(file.Fd())), nil); err != nil {
		return fmt.Errorf("send memory's file: %w", err)
	}
	_, err = conn.Write(body)
	return err
}

// sameUser wants the other end of a local socket to be a process of this user, or of root.
func sameUser(conn *net.UnixConn) error {
	raw, err := conn.SyscallConn()
	if err != nil {
		return err
	}
	var cred *unix.Ucred
	var credErr error
	if err := raw.Control(func(fd uintptr) {
		cred, credErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); err != nil || credErr != nil {
		return errors.Join(err, credErr)
	}
	if cred.Uid != 0 && int(cred.Uid) != os.Geteuid() {
		return fmt.Errorf("%w: local peer of user %d", ErrRefused, cred.Uid)
	}
	return nil
}

// memoryMayBeShared reports whether it is worth asking the peer.
func (p *peer) memoryMayBeShared(into *connector.Cache) bool {
	return p.e.cfg.SharedMemory && into != nil && into == p.e.id.Cache && p.e.bootID != ""
}

// shareMemory returns the peer's memory; nil when there is none to be had. It is tried once a process.
func (p *peer) shareMemory(ctx context.Context, host about) *mapping {
	select {
	case p.setup <- struct{}{}:
		defer func() { <-p.setup }()
	case <-ctx.Done():
		return nil
	}
	if host.name == "" || host.bootID != p.e.bootID {
		return nil
	}
	if p.token != nil && bytes.Equal(p.token, host.token) {
		return p.memory
	}
	// The first time, or another process answers at the address: what was mapped is not its memory. It stays mapped for
	// those that copy from it still.
	if p.memory != nil {
		p.former, p.memory = append(p.former, p.memory), nil
	}
	m, err := p.e.mapPeer(ctx, p.Peer, host)
	if err != nil {
		if ctx.Err() != nil {
			return nil
		}
		p.e.id.Log.Info("no shared memory with peer on this host, TCP is used", "peer", p.Address, "err", err)
	}
	p.token, p.memory = host.token, m
	return m
}

// mapPeer gets the file of a peer's memory and maps it.
func (e *Endpoint) mapPeer(ctx context.Context, p Peer, host about) (*mapping, error) {
	ctx, cancel := context.WithTimeout(ctx, handshakeTimeout)
	defer cancel()
	c, err := new(net.Dialer).DialContext(ctx, "unix", "@"+host.name)
	if err != nil {
		return nil, fmt.Errorf("connect to local socket: %w", err)
	}
	defer c.Close()
	defer context.AfterFunc(ctx, func() { _ = c.Close() })()
	conn := c.(*net.UnixConn)
	if len(host.token) < 32 {
		return nil, fmt.Errorf("%w: token of %d bytes", ErrProtocol, len(host.token))
	}
	if _, err := e.greet(conn, p.Engine, purposeMap, host.token); err != nil {
		return nil, fmt.Errorf("shake hands over local socket: %w", err)
	}
	if err := conn.SetDeadline(time.Now().Add(handshakeTimeout)); err != nil {
		return nil, err
	}
	var head [header]byte
	oob := make([]byte, unix.CmsgSpace(4))
	n, oobn, _, _, err := conn.ReadMsgUnix(head[:], oob)
	if err != nil {
		return nil, fmt.Errorf("receive memory's file: %w", err)
	}
	file, err := received(oob[:oobn])
	if err != nil {
		return nil, err
	}
	defer file.Close()
	if _, err := io.ReadFull(conn, head[n:]); err != nil {
		return nil, fmt.Errorf("receive layout: %w", err)
	}
	f := parseFrame(head[:])
	if f.kind != kindMap {
		return nil, fmt.Errorf("%w: %v instead of map", ErrProtocol, f.kind)
	}
	body, err := readBody(conn, f, maxMap, nil)
	if err != nil {
		return nil, fmt.Errorf("receive layout: %w", err)
	}
	return e.mapFile(file, body)
}

// received returns the file of a control message.
func received(oob []byte) (*os.File, error) {
	messages, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil, fmt.Errorf("receive memory's file: %w", err)
	}
	var fds []int
	for i := range messages {
		if some, err := unix.ParseUnixRights(&messages[i]); err == nil {
			fds = append(fds, some...)
		}
	}
	if len(fds) != 1 {
		for _, fd := range fds {
			_ = unix.Close(fd)
		}
		return nil, fmt.Errorf("%w: %d files instead of one", ErrProtocol, len(fds))
	}
	return os.NewFile(uintptr(fds[0]), "peer"), nil
}

// mapFile maps a file whose size nobody can cut any more, and checks that the peer's layout lies within.
func (e *Endpoint) mapFile(file *os.File, body []byte) (*mapping, error) {
	seals, err := unix.FcntlInt(file.Fd(), unix.F_GET_SEALS, 0)
	if err != nil || seals&unix.F_SEAL_SHRINK == 0 {
		return nil, fmt.Errorf("peer's memory is not sealed against shrinking (seals %#x): %w", seals, errors.Join(ErrProtocol, err))
	}
	info, err := file.Stat()
	if err != nil {
		return nil, fmt.Errorf("peer's memory: %w", err)
	}
	layout, size, err := e.parseLayout(body, info.Size())
	if err != nil {
		return nil, err
	}
	mem, err := unix.Mmap(int(file.Fd()), 0, size, unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("map peer's memory of %d bytes: %w", size, err)
	}
	return &mapping{mem: mem, layout: layout}, nil
}

// parseLayout reads a peer's layout, which must lie in so many bytes and have blocks of this end's size.
func (e *Endpoint) parseLayout(body []byte, in int64) (*connector.Layout, int, error) {
	var told layoutText
	if err := json.Unmarshal(body, &told); err != nil {
		return nil, 0, fmt.Errorf("%w: read layout: %w", ErrProtocol, err)
	}
	if told.Size < 1 || int64(told.Size) > in {
		return nil, 0, fmt.Errorf("%w: layout of %d bytes in a file of %d", ErrProtocol, told.Size, in)
	}
	own := e.id.Cache.Caches().Tensors
	if len(told.Tensors) != len(own) {
		return nil, 0, fmt.Errorf("%w: layout of %d tensors instead of %d", ErrProtocol, len(told.Tensors), len(own))
	}
	for _, t := range told.Tensors {
		if t.Offset < 0 || t.Offset > told.Size || len(t.Dims) > maxDims {
			return nil, 0, fmt.Errorf("%w: tensor at %d of %d bytes, with %d axes", ErrProtocol, t.Offset, told.Size, len(t.Dims))
		}
	}
	layout, err := connector.NewLayout(told.Tensors, told.Size)
	if err != nil {
		return nil, 0, fmt.Errorf("%w: %w", ErrProtocol, err)
	}
	if got, want := layout.BlockBytes(), e.id.Cache.BlockBytes(); got != want {
		return nil, 0, fmt.Errorf("%w: blocks of %d bytes instead of %d", ErrCompatibility, got, want)
	}
	return layout, told.Size, nil
}

// copyShared copies the chunks out of the peer's memory. False: it cannot be done that way, and nothing has been entered.
func (f *fetch) copyShared(ctx context.Context) bool {
	l, err := f.p.get(ctx)
	if err != nil {
		f.fail(err)
		return true
	}
	sound := true
	stop := context.AfterFunc(ctx, l.cut)
	defer func() { f.p.put(l, stop() && sound) }()
	m := f.p.shareMemory(ctx, l.host)
	if m == nil {
		return false
	}
	f.shared = true
	blocks := max(1, min(maxParts, openBytes/f.pull.Into.cache.BlockBytes()))
	whole := chunk{to: len(f.pull.Parts)}
	f.chunks = f.chunks[:0]
	for from := 0; from < whole.to; from += blocks {
		f.chunks = append(f.chunks, chunk{from: from, to: min(whole.to, from+blocks)})
	}
	for i := range f.chunks {
		st, err := f.copyGroup(ctx, l, m, &f.chunks[i], i == 0)
		switch {
		case errors.Is(err, errFault):
			f.fail(err)
			return true
		case err != nil && i == 0 && ctx.Err() == nil: // the connection was old, say
			sound, f.shared = false, false
			f.split()
			return false
		case err != nil:
			sound = false
			f.fail(stalled(err))
			return true
		case st != statusOK:
			f.fail(st.err())
			return true
		}
	}
	return true
}

// copyGroup opens a group of blocks at the peer, copies them, and has the peer confirm that they still count.
func (f *fetch) copyGroup(ctx context.Context, l *link, m *mapping, c *chunk, first bool) (status, error) {
	l.tag++
	q := request{parts: f.pull.Parts[c.from:c.to]}
	wait := f.e.cfg.stall()
	if first {
		q.wait = f.waitMS()
		wait += time.Duration(q.wait) * time.Millisecond
	}
	l.out = q.append(l.out[:0], kindOpen, f.flags()&flagOrdinal, l.tag, f.pull.Name)
	st, generation, err := l.ask(wait)
	if err != nil || st != statusOK {
		return st, err
	}
	f.posted()
	blocks := f.pull.Parts[c.from:c.to]
	if f.pull.Ordinal {
		if blocks = l.parts; len(blocks) != c.to-c.from {
			return 0, fmt.Errorf("%w: %d blocks opened instead of %d", ErrProtocol, len(blocks), c.to-c.from)
		}
	}
	moved, err := f.copyBlocks(ctx, m, blocks, c)
	if err != nil {
		return 0, err
	}
	l.tag++
	l.out = frame{length: 8 + len(f.pull.Name), kind: kindConfirm, tag: l.tag}.append(l.out[:0])
	l.out = append(le.AppendUint64(l.out, generation), f.pull.Name...)
	st, _, err = l.ask(f.e.cfg.stall())
	if err == nil && st == statusOK {
		f.mu.Lock()
		defer f.mu.Unlock()
		c.ok = true
		f.bytes += uint64((c.to - c.from) * f.pull.Into.cache.BlockBytes())
		f.descriptors += moved
	}
	return st, err
}

// errFault is of a peer whose memory could not be read: there was no page for it any more.
var errFault = errors.New("the peer's memory cannot be read")

// copyBlocks copies one block of the peer's to each of a chunk, by as many goroutines as a load has connections.
func (f *fetch) copyBlocks(ctx context.Context, m *mapping, blocks []int, c *chunk) (descriptors uint64, err error) {
	each := max(1, copyBytes/f.pull.Into.cache.BlockBytes())
	parts := (len(blocks) + each - 1) / each
	var next, moved atomic.Int64
	var failed atomic.Pointer[error]
	work := func() {
		for failed.Load() == nil {
			i := int(next.Add(1)) - 1
			if i >= parts {
				return
			}
			err := ctx.Err()
			select {
			case <-f.e.closing:
				err = errClosed
			default:
			}
			if err == nil {
				from, to := i*each, min(len(blocks), (i+1)*each)
				var n int
				n, err = copyRun(m, blocks[from:to], &f.pull.Into, c.from+from, c.from+to)
				moved.Add(int64(n))
			}
			if err != nil {
				failed.CompareAndSwap(nil, &err)
			}
		}
	}
	var others sync.WaitGroup
	for range min(parts, f.e.cfg.Connections) - 1 {
		others.Go(work)
	}
	work()
	others.Wait()
	if p := failed.Load(); p != nil {
		return 0, *p
	}
	return uint64(moved.Load()), nil
}

var spanPool = sync.Pool{New: func() any { return new([]device.Span) }}

// copyRun copies blocks of the peer's, which its layout checks, to parts of this end's.
func copyRun(m *mapping, blocks []int, into *Content, from, to int) (descriptors int, err error) {
	spans := spanPool.Get().(*[]device.Span)
	defer spanPool.Put(spans)
	if *spans, err = m.layout.Plan((*spans)[:0], blocks); err != nil {
		return 0, fmt.Errorf("%w: %w", ErrForeign, err)
	}
	o, err := into.scatter(from, to)
	if err != nil {
		return 0, err
	}
	defer o.release()
	if err := copySpans(o.pieces, m.mem, *spans); err != nil {
		return 0, err
	}
	return o.descriptors(), o.commit(context.Background())
}

// copySpans copies pieces of memory to other pieces, as many bytes in all. A page that the peer's system cannot provide is an
// error, not the end of this process.
func copySpans(to [][]byte, mem []byte, spans []device.Span) (err error) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		if r := recover(); r != nil {
			fault, ok := r.(interface{ Addr() uintptr })
			if !ok {
				panic(r)
			}
			err = fmt.Errorf("%w at %#x", errFault, fault.Addr())
		}
	}()
	at, offset := 0, 0
	for _, s := range spans {
		src := mem[s.Offset : s.Offset+s.Length]
		for len(src) > 0 {
			if offset == len(to[at]) {
				at, offset = at+1, 0
				continue
			}
			n := copy(to[at][offset:], src)
			src = src[n:]
			offset += n
		}
	}
	return nil
}
