// Package encodertest is the contract of every encoder connector: [Run] runs it over one.
//
// It drives engines as an engine's scheduler and model runner would, with real memory. What an item holds is derived from
// its hash and size, so that a wrong byte is seen.
package encodertest

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"slices"
	"testing"
	"time"

	"github.com/zeebo/xxh3"

	"kvstrata/connector/device"
	"kvstrata/connector/encoder"
	"kvstrata/event"
)

// Rig is a transport under test.
type Rig struct {
	// Setup makes what the transport needs, servers included, for one test, and cleans up after it.
	Setup func(t *testing.T) Environment
	// Direct says that a consumer gets items from the producer itself: there is no store between them.
	Direct bool
	// Local says that there is no network between an engine and where its bytes come from.
	Local bool
	// Sealed says that nobody but an engine can put something in an item's place: the store's wire format has no way.
	Sealed bool
}

// Environment is where one test's engines find one another.
type Environment struct {
	Factory *encoder.Factory
	// Config returns an engine's configuration. Through is the address of a proxy in front of what Address says; empty = go
	// there directly.
	Config func(role encoder.Role, through string) encoder.Config
	// Address is where bytes come from: of the store. Empty where the producer's hand-off says it.
	Address string
	// Remove takes an item of engines that have the model out of the store. Nil where a producer frees it.
	Remove func(t *testing.T, m encoder.Model, i encoder.Item)
	// Spoil puts something else in the place of an item. Of a store that isn't sealed.
	Spoil func(t *testing.T, m encoder.Model, i encoder.Item)
}

// Model is what the engines under test run.
func Model() encoder.Model {
	return encoder.Model{Name: "test/vision", DType: "bfloat16", HiddenSize: 8, EncoderRevision: "1"}
}

// patience is how long anything may take that is waited for.
const patience = 30 * time.Second

// cacheBytes are of an engine's encoder cache.
const cacheBytes = 40 << 20

// engine is one engine under test: an encoder cache, and its connector.
type engine struct {
	t        *testing.T
	conn     *encoder.Engine
	memories []device.Memory // one a rank, addressable
	next     int             // where the cache goes on
	cached   []entry         // from the oldest on
	freed    []string        // for the next step
	place    map[string]device.Span
	encode   []entry // in the next step
	finished []string
	received map[string]bool // items whose load has ended: whether it failed
	delayed  map[string]bool // requests whose items must stay
	records  []event.Transfer
	stop     func()
}

// entry is an item in the cache.
type entry struct {
	encoder.Item
	span device.Span
	seed uint64
}

// options change an engine.
type options struct {
	through string
	ranks   int // 0 = 1
	model   func(*encoder.Model)
	config  func(*encoder.Config)
	opaque  bool // memory that the CPU cannot address
}

// newEngine starts an engine.
func newEngine(t *testing.T, env Environment, role encoder.Role, o options) *engine {
	t.Helper()
	e, err := tryEngine(t, env, role, o)
	if err != nil {
		t.Fatal(err)
	}
	return e
}

func tryEngine(t *testing.T, env Environment, role encoder.Role, o options) (*engine, error) {
	t.Helper()
	e := &engine{
		t: t, place: make(map[string]device.Span), received: make(map[string]bool), delayed: make(map[string]bool),
	}
	var caches []encoder.Caches
	var dev device.Device = device.Host{}
	for range max(o.ranks, 1) {
		memory, err := device.Host{}.Alloc("encoder cache", cacheBytes)
		if err != nil {
			t.Fatal(err)
		}
		e.memories = append(e.memories, memory)
		if o.opaque {
			dev, memory = card{}, cardMemory{memory}
		}
		caches = append(caches, encoder.Caches{Device: dev, Memory: memory})
	}
	model := Model()
	if o.model != nil {
		o.model(&model)
	}
	var err error
	setup := encoder.Setup{Config: env.Config(role, o.through), Model: model, Log: slog.New(slog.DiscardHandler)}
	set(&setup.Config, "lookup_timeout", 20) // on a busy machine too
	if o.config != nil {
		o.config(&setup.Config)
	}
	if e.conn, err = encoder.NewEngine(env.Factory, setup, caches); err != nil {
		for _, m := range e.memories {
			err = errors.Join(err, m.Close())
		}
		return nil, err
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- e.conn.Run(ctx) }()
	e.stop = func() {
		cancel()
		err := <-done
		for _, m := range e.memories {
			err = errors.Join(err, m.Close())
		}
		if err != nil {
			t.Error(err)
		}
		e.stop = func() {}
	}
	t.Cleanup(func() { e.stop() })
	return e, nil
}

// item names an item.
func item(hash string, bytes int) encoder.Item { return encoder.Item{Hash: hash, Bytes: bytes} }

// items returns so many, of different sizes.
func items(prefix string, n int) (list []encoder.Item) {
	for i := range n {
		list = append(list, item(fmt.Sprintf("%064x", xxh3.HashString(fmt.Sprint(prefix, i))), 1+(i*7919+len(prefix))%(96<<10)))
	}
	return list
}

func request(id string, params encoder.Params, list ...encoder.Item) *encoder.Request {
	return &encoder.Request{ID: id, Items: list, Params: params}
}

// seedOf is what an item holds.
func seedOf(i encoder.Item) uint64 { return xxh3.HashString(fmt.Sprint(i.Hash, " ", i.Bytes)) }

// pattern follows from a seed, and what an item holds repeats it. Its length does not divide that of any piece, so that
// pieces at each other's place are seen.
func pattern(seed uint64) []byte {
	p := make([]byte, 0, 513*8)
	for len(p) < cap(p) {
		seed = seed*6364136223846793005 + 1442695040888963407
		p = binary.LittleEndian.AppendUint64(p, seed)
	}
	return p
}

func fill(b []byte, seed uint64) {
	for p := pattern(seed); len(b) > 0; {
		b = b[copy(b, p):]
	}
}

func holds(b []byte, seed uint64) bool {
	p := pattern(seed)
	for len(b) > len(p) {
		if !bytes.Equal(b[:len(p)], p) {
			return false
		}
		b = b[len(p):]
	}
	return bytes.Equal(b, p[:len(b)])
}

// in returns a span's bytes in a rank.
func (e *engine) in(rank int, s device.Span) []byte {
	return e.memories[rank].Host()[s.Offset : s.Offset+s.Length]
}

// write puts something into a span in every rank.
func (e *engine) write(s device.Span, seed uint64) {
	for rank := range e.memories {
		fill(e.in(rank, s), seed)
	}
}

// holds reports whether a span holds something in every rank.
func (e *engine) holds(s device.Span, seed uint64) bool {
	for rank := range e.memories {
		if !holds(e.in(rank, s), seed) {
			return false
		}
	}
	return true
}

// allocate gives an item room: that of the oldest ones, which are freed with the next step.
func (e *engine) allocate(i encoder.Item) device.Span {
	e.t.Helper()
	if e.next+i.Bytes > cacheBytes {
		e.next = 0
	}
	span := device.Span{Offset: e.next, Length: i.Bytes}
	e.next += i.Bytes
	e.cached = slices.DeleteFunc(e.cached, func(x entry) bool {
		old := x.Hash == i.Hash || x.span.Offset < e.next && span.Offset < x.span.Offset+x.span.Length
		if old {
			e.freed = append(e.freed, x.Hash)
		}
		return old
	})
	e.cached = append(e.cached, entry{i, span, seedOf(i)})
	return span
}

// free takes an item out of the cache with the next step.
func (e *engine) free(i encoder.Item) {
	e.cached = slices.DeleteFunc(e.cached, func(x entry) bool { return x.Hash == i.Hash })
	e.freed = append(e.freed, i.Hash)
}

// step runs one step, and takes in what came about.
func (e *engine) step() {
	e.t.Helper()
	step, place, encode, finished := &encoder.Step{Freed: e.freed}, e.place, e.encode, e.finished
	e.freed, e.place, e.encode, e.finished = nil, make(map[string]device.Span), nil, nil
	out, err := e.conn.Step(e.t.Context(), step, place, finished, func(save func(encoder.Item, device.Span) error) error {
		for _, x := range encode {
			e.write(x.span, x.seed)
			if err := save(x.Item, x.span); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		e.t.Fatal(err)
	}
	for _, hash := range out.FinishedReceiving {
		e.received[hash] = slices.Contains(out.FailedReceiving, hash)
	}
	for _, hash := range out.FailedReceiving {
		if !slices.Contains(out.FinishedReceiving, hash) {
			e.t.Errorf("item %s has failed and not ended", hash)
		}
	}
	for _, id := range out.FinishedSending {
		if !e.delayed[id] {
			e.t.Errorf("request %q is told as sent and was not delayed", id)
		}
		delete(e.delayed, id)
	}
	e.records = append(e.records, e.conn.Scheduler.TakeRecords()...)
}

// until steps until something is so: without a pause at first, since most things take microseconds.
func (e *engine) until(what string, is func() bool) {
	e.t.Helper()
	tick := time.NewTicker(200 * time.Microsecond)
	defer tick.Stop()
	deadline := time.Now().Add(patience)
	for round := 0; !is(); round++ {
		if time.Now().After(deadline) {
			e.t.Fatalf("%s: not within %v", what, patience)
		}
		if round < 20 {
			runtime.Gosched()
		} else {
			<-tick.C
		}
		e.step()
	}
}

// encodes has the engine's encoder make items of a request in the next step.
func (e *engine) encodes(r *encoder.Request, list ...encoder.Item) {
	e.t.Helper()
	for index, i := range r.Items {
		if slices.Contains(list, i) {
			e.conn.Scheduler.UpdateStateAfterAlloc(r, index)
			e.encode = append(e.encode, entry{i, e.allocate(i), seedOf(i)})
		}
	}
}

// finish ends a request.
func (e *engine) finish(r *encoder.Request) encoder.Params {
	delay, params := e.conn.Scheduler.RequestFinished(r)
	e.finished = append(e.finished, r.ID)
	if delay {
		e.delayed[r.ID] = true
	}
	return params
}

// settled steps until no request is delayed.
func (e *engine) settled() {
	e.t.Helper()
	e.until("nothing is delayed", func() bool { return len(e.delayed) == 0 && len(e.finished) == 0 })
}

// produce has the engine make items, and returns the hand-off.
func (e *engine) produce(id string, list ...encoder.Item) encoder.Params {
	e.t.Helper()
	r := request(id, nil, list...)
	e.encodes(r, list...)
	e.step()
	params := e.finish(r)
	e.settled()
	return params
}

// came is what came of a request's items.
type came struct {
	absent, loaded, failed, wrong []string
	spans                         map[string]device.Span
	reasons                       []string // of failures
}

// begin looks up a request's items, and orders the loads of those that are there. It returns where they go.
func (e *engine) begin(r *encoder.Request) came {
	e.t.Helper()
	c := e.lookUp(r)
	e.order(r, &c)
	e.step()
	return c
}

// lookUp asks for a request's items.
func (e *engine) lookUp(r *encoder.Request) came {
	e.t.Helper()
	c := came{spans: make(map[string]device.Span)}
	for index, i := range r.Items {
		var p encoder.Presence
		e.until("an answer to a lookup", func() bool {
			p = e.conn.Scheduler.HasItem(r, index)
			return p != encoder.Later
		})
		if p == encoder.Absent {
			c.absent = append(c.absent, i.Hash)
		}
	}
	return c
}

// order orders the loads of what is not absent.
func (e *engine) order(r *encoder.Request, c *came) {
	for index, i := range r.Items {
		if slices.Contains(c.absent, i.Hash) {
			continue
		}
		e.conn.Scheduler.UpdateStateAfterAlloc(r, index)
		span, ok := e.place[i.Hash]
		if !ok {
			span = e.allocate(i)
			e.place[i.Hash] = span
		}
		c.spans[i.Hash] = span
	}
}

// settle waits for a request's loads, and checks what came.
func (e *engine) settle(r *encoder.Request, c *came) {
	e.t.Helper()
	for _, i := range r.Items {
		span, ok := c.spans[i.Hash]
		if !ok {
			continue
		}
		e.until("the end of a load", func() bool { _, ok := e.received[i.Hash]; return ok })
		switch {
		case e.received[i.Hash]:
			c.failed = append(c.failed, i.Hash)
		case e.holds(span, seedOf(i)):
			c.loaded = append(c.loaded, i.Hash)
		default:
			c.wrong = append(c.wrong, i.Hash)
		}
	}
	for hash := range c.spans {
		delete(e.received, hash)
	}
	for _, record := range e.records {
		if record.Kind == event.TransferFailed && record.Request == r.ID {
			c.reasons = append(c.reasons, record.Reason)
		}
	}
}

// consume loads a request's items, checks what came, and finishes the request.
func (e *engine) consume(r *encoder.Request) came {
	e.t.Helper()
	c := e.begin(r)
	e.settle(r, &c)
	e.finish(r)
	e.settled()
	return c
}

// want compares what came with what was to come.
func (c *came) want(t *testing.T, loaded, failed, absent []encoder.Item) {
	t.Helper()
	say := t.Failed()
	for _, part := range []struct {
		what string
		got  []string
		want []encoder.Item
	}{{"loaded", c.loaded, loaded}, {"failed", c.failed, failed}, {"absent", c.absent, absent}, {"wrong", c.wrong, nil}} {
		var want []string
		for _, i := range part.want {
			want = append(want, i.Hash)
		}
		if !slices.Equal(part.got, want) {
			t.Errorf("%s: %d items %.200v, want %d %.200v", part.what, len(part.got), part.got, len(want), want)
		}
	}
	if !say && t.Failed() {
		for _, reason := range c.reasons {
			t.Log(reason)
		}
	}
}
