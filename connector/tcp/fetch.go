package tcp

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"

	"kvstrata/connector"
)

// Pull is what is to be fetched: parts of a peer's export, each to the part at the same place of Into.
type Pull struct {
	Peer
	Name    string
	Parts   []int         // blocks of the peer's cache, or numbers of its pieces
	Ordinal bool          // of a cache: Parts are positions in the peer's list of the request's blocks
	Wait    time.Duration // how long the peer may wait for the request to be exported; a few seconds at most
	Into    Content
}

// Result is what came of a fetch.
type Result struct {
	Failed      []int // positions in Parts whose bytes did not come, or do not count
	Err         error // why; nil = all came
	Bytes       uint64
	Descriptors uint64        // contiguous pieces of Into's memory
	Post        time.Duration // until the first read was asked for
	Duration    time.Duration
	Shared      bool // out of shared memory
}

// chunk is a run of parts that one read asks for.
type chunk struct {
	from, to int
	bytes    int
	broken   bool // a connection broke in it before
	ok       bool
}

// fetch is the state of one Fetch.
type fetch struct {
	e     *Endpoint
	p     *peer
	pull  Pull
	start time.Time

	mu          sync.Mutex
	chunks      []chunk
	next        int
	again       []int // chunks to be asked for a second time
	shared      bool  // bytes come out of shared memory
	post        time.Duration
	bytes       uint64
	descriptors uint64
	err         error // the first one
	last        error // of a connection that broke, and for which another one was to help
}

// Fetch gets the parts of a peer's export, and returns which did not come. When it has returned nothing is written any more.
// A broken connection costs the parts that were on it a second try over a new one; more than that is the caller's to decide.
func (e *Endpoint) Fetch(ctx context.Context, pull *Pull) Result {
	f := e.fetches.Get().(*fetch)
	defer f.recycle()
	f.e, f.pull, f.start = e, *pull, time.Now()
	err := f.check()
	if err == nil {
		f.p, err = e.peer(pull.Peer)
	}
	if err == nil {
		defer f.p.done()
		f.split()
		f.run(ctx)
	} else {
		f.chunks = append(f.chunks[:0], chunk{to: len(pull.Parts)})
		f.err = err
	}
	r := Result{Bytes: f.bytes, Descriptors: f.descriptors, Post: f.post, Duration: time.Since(f.start), Shared: f.shared}
	for _, c := range f.chunks {
		for i := c.from; i < c.to && !c.ok; i++ {
			r.Failed = append(r.Failed, i)
		}
	}
	switch {
	case len(r.Failed) == 0 && err == nil:
		return r
	case ctx.Err() != nil:
		f.err = errors.Join(context.Cause(ctx), f.err)
	case f.err == nil:
		f.err = cmp.Or(f.last, errClosed)
	}
	r.Err = fmt.Errorf("fetch %d parts of %q from %s: %w", len(pull.Parts), pull.Name, pull.Address, f.err)
	return r
}

func (f *fetch) recycle() {
	e := f.e
	*f = fetch{chunks: f.chunks[:0], again: f.again[:0]}
	e.fetches.Put(f)
}

func (f *fetch) check() error {
	q := &f.pull
	if len(q.Name) < 1 || len(q.Name) > maxName {
		return fmt.Errorf("a name of %d bytes: want 1 to %d", len(q.Name), maxName)
	}
	if len(q.Parts) != q.Into.parts() {
		return fmt.Errorf("%d parts are to go to %d", len(q.Parts), q.Into.parts())
	}
	for i, p := range q.Parts {
		if !wirePart(p) {
			return fmt.Errorf("part %d cannot be", p)
		}
		if n := q.Into.size(i); n > maxPayload {
			return fmt.Errorf("part %d of %d bytes: more than %d", p, n, maxPayload)
		}
	}
	if c := q.Into.cache; c != nil {
		for _, b := range q.Into.blocks {
			if b < connector.Discard || b >= c.Layout().Blocks() {
				return fmt.Errorf("local block %d: there are %d", b, c.Layout().Blocks())
			}
		}
	}
	return nil
}

// split makes chunks of about chunk_bytes.
func (f *fetch) split() {
	f.chunks = f.chunks[:0]
	c := chunk{}
	for i := range f.pull.Parts {
		size := f.pull.Into.size(i)
		if c.to > c.from && (c.bytes+size > f.e.cfg.ChunkBytes || c.to-c.from == maxParts) {
			f.chunks = append(f.chunks, c)
			c = chunk{from: i, to: i}
		}
		c.bytes += size
		c.to = i + 1
	}
	if c.to > c.from {
		f.chunks = append(f.chunks, c)
	}
}

// run moves the chunks, out of shared memory or over connections.
func (f *fetch) run(ctx context.Context) {
	if f.p.memoryMayBeShared(f.pull.Into.cache) && f.copyShared(ctx) {
		if f.shared {
			f.e.counts.copied.Add(1)
		}
		return
	}
	f.e.counts.read.Add(1)
	var others sync.WaitGroup
	for range min(f.e.cfg.Connections, len(f.chunks)) - 1 {
		others.Go(func() { f.work(ctx) })
	}
	if len(f.chunks) > 0 {
		f.work(ctx)
	}
	others.Wait()
}

// take returns the next chunk to be asked for.
func (f *fetch) take() (int, bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if n := len(f.again); n > 0 {
		i := f.again[n-1]
		f.again = f.again[:n-1]
		return i, true
	}
	if f.next == len(f.chunks) {
		return 0, false
	}
	f.next++
	return f.next - 1, true
}

func (f *fetch) fail(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.err == nil {
		f.err = err
	}
}

// work moves chunks over one connection, and over a second one when that breaks.
func (f *fetch) work(ctx context.Context) {
	for try := range 3 {
		l, err := f.p.get(ctx)
		if err != nil {
			f.fail(err)
			return
		}
		if try > 0 {
			f.e.counts.reconnects.Add(1)
		}
		stop := context.AfterFunc(ctx, l.cut)
		err = f.drain(l)
		f.p.put(l, stop() && err == nil)
		if err == nil {
			return
		}
		if ctx.Err() != nil || !f.retry(l, stalled(err)) {
			return
		}
	}
}

// retry puts the chunks that were on a broken connection back, each once, and reports whether another connection may help.
func (f *fetch) retry(l *link, err error) bool {
	mayHelp := !errors.Is(err, ErrStalled) && !errors.Is(err, ErrProtocol)
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, i := range l.flight {
		c := &f.chunks[i]
		if mayHelp && !c.broken {
			f.again = append(f.again, i)
			c.broken, f.last = true, err
		} else if f.err == nil {
			f.err = err
		}
	}
	if !mayHelp && f.err == nil {
		f.err = err
	}
	return mayHelp
}

// drain asks for chunks, as many at a time as inflight_bytes allow, and receives them, until there are none left.
func (f *fetch) drain(l *link) error {
	l.flight, l.bytes = l.flight[:0], 0
	first, wait := true, time.Duration(f.waitMS())*time.Millisecond
	tag := l.tag + 1 // of the chunk that comes next
	for {
		l.out = l.out[:0]
		for len(l.flight) == 0 || l.bytes < f.e.cfg.InflightBytes && len(l.flight) < 8 {
			i, ok := f.take()
			if !ok {
				break
			}
			c := &f.chunks[i]
			l.tag++
			q := request{parts: f.pull.Parts[c.from:c.to]}
			if first { // those behind it are answered after it
				q.wait = f.waitMS()
			}
			first = false
			l.out = q.append(l.out, kindRead, f.flags(), l.tag, f.pull.Name)
			l.flight = append(l.flight, i)
			l.bytes += c.bytes
		}
		if len(l.out) > 0 {
			if err := l.conn.SetWriteDeadline(time.Now().Add(f.e.cfg.stall())); err != nil {
				return err
			}
			if _, err := l.conn.Write(l.out); err != nil {
				return err
			}
			f.posted()
		}
		if len(l.flight) == 0 {
			return nil
		}
		i := l.flight[0]
		if err := f.receive(l, &f.chunks[i], tag, wait); err != nil {
			return err
		}
		tag++
		wait = 0
		l.flight = append(l.flight[:0], l.flight[1:]...)
		l.bytes -= f.chunks[i].bytes
	}
}

func (f *fetch) waitMS() uint32 {
	return uint32(max(0, min(f.pull.Wait, maxReadWait)).Milliseconds())
}

func (f *fetch) flags() (flags uint8) {
	if f.pull.Ordinal {
		flags |= flagOrdinal
	}
	if f.e.cfg.Checksum {
		flags |= flagChecksum
	}
	return flags
}

func (f *fetch) posted() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.post == 0 {
		f.post = time.Since(f.start)
	}
}

// receive reads the answer for a chunk, which may take the wait longer than usual to begin. An error is the connection's; what the peer says of the chunk is entered.
func (f *fetch) receive(l *link, c *chunk, tag uint64, wait time.Duration) error {
	if err := l.conn.SetReadDeadline(time.Now().Add(f.e.cfg.stall() + wait)); err != nil {
		return err
	}
	h, err := l.reply(tag)
	if err != nil {
		return err
	}
	if h.kind == kindTrailer {
		return f.refused(l, h)
	}
	if h.kind != kindData || h.length != c.bytes {
		return fmt.Errorf("%w: %v of %d bytes instead of %d of data", ErrProtocol, h.kind, h.length, c.bytes)
	}
	o, err := f.pull.Into.scatter(c.from, c.to)
	if err != nil { // no pinned memory: the bytes cannot be skipped
		f.fail(err)
		return fmt.Errorf("%w: %w", ErrProtocol, err)
	}
	defer o.release()
	if err := l.payload(&o, f.e.cfg.Checksum, f.e.cfg.stall()); err != nil {
		return err
	}
	if h, err = l.reply(tag); err != nil {
		return err
	}
	if h.kind != kindTrailer || h.length != 8 || h.status == statusOK && f.e.cfg.Checksum && h.flags&flagChecksum == 0 {
		return fmt.Errorf("%w: %v of %d bytes, flags %d, instead of a trailer", ErrProtocol, h.kind, h.length, h.flags)
	}
	if h.status != statusOK {
		return f.refused(l, h)
	}
	if err := l.trailer(); err != nil {
		return err
	}
	if f.e.cfg.Checksum && le.Uint64(l.in[header:]) != l.sum.sum64() {
		f.fail(ErrChecksum)
		return nil
	}
	// The end of ctx must not leave a copy behind that still runs.
	if err := o.commit(context.Background()); err != nil {
		f.fail(err)
		return nil
	}
	f.arrived(c, &o)
	return nil
}

func (f *fetch) arrived(c *chunk, o *opened) {
	f.mu.Lock()
	defer f.mu.Unlock()
	c.ok = true
	f.bytes += uint64(o.bytes)
	f.descriptors += uint64(o.descriptors())
}

// refused ends a chunk of which the peer says that it does not count.
func (f *fetch) refused(l *link, h frame) error {
	if h.length != 8 || h.status == statusOK {
		return fmt.Errorf("%w: trailer of %d bytes without data, status %d", ErrProtocol, h.length, h.status)
	}
	f.fail(h.status.err())
	return l.trailer()
}

// trailer reads a trailer's body.
func (l *link) trailer() error {
	_, err := io.ReadFull(l.conn, l.in[header:])
	return err
}

// payload reads into the pieces, a portion at a time, and hashes what has come while it is in the cache: whole segments, so
// that they are hashed where they lie. Pieces of discarded blocks share their memory, and so are read and hashed one by one.
func (l *link) payload(o *opened, checksum bool, stall time.Duration) error {
	l.sum.reset()
	oneByOne := o.discards()
	at, offset, got := 0, 0, 0         // what is read
	hashAt, hashOffset, sum := 0, 0, 0 // what is hashed
	for got < o.bytes {
		if offset == len(o.pieces[at]) {
			at, offset = at+1, 0
			continue
		}
		if err := l.conn.SetReadDeadline(time.Now().Add(stall)); err != nil {
			return err
		}
		to := o.pieces[at:]
		if oneByOne {
			to = to[:1]
		}
		n, err := l.vector.read(to, offset, portion)
		if err != nil {
			return err
		}
		got += n
		for offset += n; offset > len(o.pieces[at]); at++ {
			offset -= len(o.pieces[at])
		}
		ready := got
		if !oneByOne && got < o.bytes {
			ready = got / segment * segment
		}
		for checksum && sum < ready {
			p := o.pieces[hashAt][hashOffset:]
			p = p[:min(len(p), ready-sum)]
			l.sum.write(p)
			sum += len(p)
			if hashOffset += len(p); hashOffset == len(o.pieces[hashAt]) {
				hashAt, hashOffset = hashAt+1, 0
			}
		}
	}
	return nil
}

// discards reports whether pieces share their memory.
func (o *opened) discards() bool {
	if o.window == nil || len(o.pieces) != len(o.window.Spans()) {
		return false
	}
	for _, s := range o.window.Spans() {
		if s.Offset < 0 {
			return true
		}
	}
	return false
}
