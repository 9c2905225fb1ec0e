// Package connectortest is the contract of every transport: [Run] runs it over one.
//
// It drives two engines, a producer and a consumer, as an engine's scheduler and model runner would, with real memory.
// What a block holds is derived from its name, so that a wrong byte is seen.
package connectortest

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"runtime"
	"testing"
	"time"

	"github.com/zeebo/xxh3"

	"kvstrata/connector"
	"kvstrata/connector/device"
	"kvstrata/event"
)

// Rig is a transport under test.
type Rig struct {
	// Setup makes what the transport needs, servers included, for one test, and cleans up after it.
	Setup func(t *testing.T) Environment
	// Direct says that the consumer gets blocks from the producer itself: there is no store between them.
	Direct bool
	// Unchecked says that the transport's wire format has no checksum: a byte that is flipped on the way can't be seen.
	Unchecked bool
	// Evicts says that a full store makes room rather than refuse what is new.
	Evicts bool
	// Local says that there is no network between an engine and where its bytes come from.
	Local bool
}

// Environment is where one test's engines find one another.
type Environment struct {
	Factory *connector.Factory
	// Config returns an engine's configuration. Through is the address of a proxy in front of what Address says; empty = go
	// there directly.
	Config func(role connector.Role, through string) connector.Config
	// Address is where bytes come from: of the store. Empty where the producer's hand-off says it.
	Address string
	// Restart ends the store's server and starts it again, empty. Nil where there is none.
	Restart func(t *testing.T)
	// Fill makes the store refuse further values. Of a store that doesn't evict.
	Fill func(t *testing.T)
	// Remove takes every rank's part of the groups whose last blocks have the names out of the store. Of every store.
	Remove func(t *testing.T, last []connector.Name)
}

// The engines' geometry: blocks of 16 tokens with 2 layers of keys and values of 1 KiB.
const (
	BlockTokens = 16
	layers      = 2
	heads       = 2
	headSize    = 16
	element     = 2
	poolBlocks  = 256
)

// Model is what the engines under test serve.
func Model() connector.Model {
	return connector.Model{
		Name: "test/model", DType: "float16", Layers: layers, KVHeads: heads, HeadSize: headSize, BlockTokens: BlockTokens, Ranks: 1,
	}
}

// Tensors lays out so many blocks, token before head, with gaps between layers: two engines need not lay theirs out alike.
func Tensors(blocks, gap int) (tensors []connector.Tensor, size int) {
	for i := range layers {
		t := connector.Packed(fmt.Sprintf("layer.%d", i), size, element, connector.Dim{Axis: connector.AxisKV, Size: 2},
			connector.Dim{Axis: connector.AxisBlock, Size: blocks}, connector.Dim{Axis: connector.AxisToken, Size: BlockTokens},
			connector.Dim{Axis: connector.AxisHead, Size: heads}, connector.Dim{Axis: connector.AxisDim, Size: headSize})
		tensors = append(tensors, t)
		size += 2*t.Dims[0].Stride + gap
	}
	return tensors, size
}

// engine is one engine under test: a pool of blocks, and its connector.
type engine struct {
	t        *testing.T
	conn     *connector.Engine
	memory   device.Memory
	cache    *connector.Cache
	free     []int
	delayed  map[string][]int // of finished requests
	received map[string]bool  // requests whose load has ended: whether it failed
	invalid  map[int]bool
	finished []string // requests that finished since the last step
	events   []event.Event
	records  []event.Transfer
	stop     func()
}

// newEngine starts an engine. edit may change its model or its tensors.
func newEngine(t *testing.T, env Environment, role connector.Role, name, through string, edit func(*connector.Caches)) *engine {
	t.Helper()
	e, err := tryEngine(t, env, role, name, through, edit)
	if err != nil {
		t.Fatal(err)
	}
	return e
}

func tryEngine(t *testing.T, env Environment, role connector.Role, name, through string, edit func(*connector.Caches)) (*engine, error) {
	t.Helper()
	gap := 0
	if role.Consumes() {
		gap = 4096
	}
	tensors, size := Tensors(poolBlocks, gap)
	memory, err := device.Host{}.Alloc(name, size)
	if err != nil {
		t.Fatal(err)
	}
	caches := connector.Caches{Device: device.Host{}, Memory: memory, Tensors: tensors, Model: Model()}
	if edit != nil {
		edit(&caches)
	}
	e := &engine{
		t: t, memory: memory, delayed: make(map[string][]int), received: make(map[string]bool), invalid: make(map[int]bool),
	}
	if e.cache, err = connector.NewCache(caches); err != nil {
		t.Fatal(err)
	}
	setup := connector.Setup{Config: env.Config(role, through), Instance: name, Model: caches.Model, Log: slog.New(slog.NewTextHandler(io.Discard, nil))}
	if e.conn, err = connector.NewEngine(env.Factory, setup, []connector.Caches{caches}); err != nil {
		return nil, errors.Join(err, memory.Close())
	}
	for b := range poolBlocks {
		e.free = append(e.free, b)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- e.conn.Run(ctx) }()
	e.stop = func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if err := memory.Close(); err != nil {
			t.Error(err)
		}
		e.stop = func() {}
	}
	t.Cleanup(func() { e.stop() })
	return e, nil
}

// request returns a request of so many tokens whose blocks are named after a prompt.
func request(id, prompt string, tokens int, params *connector.Params) *connector.Request {
	r := &connector.Request{ID: id, Prompt: tokens, Tokens: tokens, Params: params}
	for i := range tokens / BlockTokens {
		r.Names = append(r.Names, nameOf(prompt, i))
	}
	return r
}

func nameOf(prompt string, i int) connector.Name {
	h := xxh3.Hash128([]byte(fmt.Sprint(prompt, " ", i))).Bytes()
	return connector.Name{Hash: event.BytesHash(string(h[:]) + string(h[:])), Prefix: event.PrefixHash(binary.LittleEndian.Uint64(h[:]))}
}

// content is what block i of a prompt holds: a function of its name. The last block's may be of fewer tokens.
func content(prompt string, i int) uint64 {
	return xxh3.HashString(fmt.Sprint("content of ", prompt, " ", i))
}

func (e *engine) fill(block int, seed uint64) {
	e.t.Helper()
	w, err := e.cache.Scatter([]int{block})
	if err != nil {
		e.t.Fatal(err)
	}
	defer w.Release()
	for _, p := range w.Pieces {
		for ; len(p) >= 8; p = p[8:] {
			seed = seed*6364136223846793005 + 1442695040888963407
			binary.LittleEndian.PutUint64(p, seed)
		}
	}
}

func (e *engine) holds(block int, seed uint64) bool {
	e.t.Helper()
	w, err := e.cache.Gather(context.Background(), []int{block})
	if err != nil {
		e.t.Fatal(err)
	}
	defer w.Release()
	right := true
	for _, p := range w.Pieces {
		for ; len(p) >= 8; p = p[8:] {
			seed = seed*6364136223846793005 + 1442695040888963407
			right = right && binary.LittleEndian.Uint64(p) == seed
		}
	}
	return right
}

func (e *engine) allocate(n int) []int {
	e.t.Helper()
	e.until(fmt.Sprintf("%d free blocks", n), func() bool { return len(e.free) >= n })
	blocks := append([]int(nil), e.free[:n]...)
	e.free = e.free[n:]
	return blocks
}

// step runs one step, and takes in what came about.
func (e *engine) step(s *connector.Step) {
	e.t.Helper()
	out, err := e.conn.Step(e.t.Context(), s, e.finished, func() error { return nil })
	e.finished = nil
	if err != nil {
		e.t.Fatal(err)
	}
	for _, b := range out.InvalidBlocks {
		e.invalid[b] = true
	}
	for _, id := range out.FinishedReceiving {
		e.received[id] = false
	}
	for _, id := range out.FailedReceiving {
		e.received[id] = true
	}
	for _, ids := range [][]string{out.FinishedSending, out.FinishedReceiving} {
		for _, id := range ids {
			e.free = append(e.free, e.delayed[id]...)
			delete(e.delayed, id)
		}
	}
	e.events = append(e.events, e.conn.Scheduler.TakeEvents()...)
	e.records = append(e.records, e.conn.Scheduler.TakeRecords()...)
}

// patience is how long anything may take that is waited for.
const patience = 30 * time.Second

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
		e.step(new(connector.Step))
	}
}

// produce computes a prompt and finishes the request. It returns what the client is answered.
func (e *engine) produce(r *connector.Request, prompt string) *connector.Params {
	e.t.Helper()
	e.conn.Scheduler.NewRequest(r)
	n := (r.Prompt + BlockTokens - 1) / BlockTokens
	blocks := e.allocate(n)
	if m := e.conn.Scheduler.MatchedTokens(r, 0); m.Tokens != 0 || m.Later {
		e.t.Fatalf("a producer is offered %+v", m)
	}
	e.conn.Scheduler.UpdateAfterAlloc(r, blocks, 0, 0)
	for i, b := range blocks {
		e.fill(b, content(prompt, i))
	}
	e.step(&connector.Step{Scheduled: []connector.Scheduled{{Request: r, Blocks: blocks, Computed: r.Prompt}}})
	r.Tokens++
	return e.finish(r, blocks, connector.EndLength)
}

func (e *engine) finish(r *connector.Request, blocks []int, end connector.End) *connector.Params {
	delay, params := e.conn.Scheduler.RequestFinished(r, blocks, end)
	e.finished = append(e.finished, r.ID)
	if delay {
		e.delayed[r.ID] = blocks
	} else {
		e.free = append(e.free, blocks...)
	}
	return params
}

// loaded is how a load went.
type loaded struct {
	matched int   // tokens
	blocks  []int // of the request
	failed  []int // blocks of the prompt, by number
	wrong   []int // blocks that are told as loaded and hold something else
}

// begin asks for a request and starts its load; the blocks are those of the tokens matched.
func (e *engine) begin(r *connector.Request, computed int) (loaded, []int) {
	e.t.Helper()
	e.conn.Scheduler.NewRequest(r)
	var m connector.Match
	e.until("an answer to a lookup", func() bool {
		m = e.conn.Scheduler.MatchedTokens(r, computed)
		return !m.Later
	})
	n := (computed + m.Tokens + BlockTokens - 1) / BlockTokens
	blocks := e.allocate(n)
	e.conn.Scheduler.UpdateAfterAlloc(r, blocks, computed, m.Tokens)
	e.step(new(connector.Step))
	return loaded{matched: m.Tokens, blocks: blocks}, blocks
}

// consume loads a request whose first tokens are computed already, checks what came, and finishes the request.
func (e *engine) consume(r *connector.Request, prompt string, computed int) loaded {
	e.t.Helper()
	l, blocks := e.begin(r, computed)
	if l.matched > 0 {
		e.settle(r, prompt, computed, &l)
	}
	e.finish(r, blocks, connector.EndStopped)
	return l
}

// settle waits for a load, and checks what came.
func (e *engine) settle(r *connector.Request, prompt string, computed int, l *loaded) {
	e.t.Helper()
	e.until("the end of a load", func() bool { _, ok := e.received[r.ID]; return ok })
	failed := e.received[r.ID]
	delete(e.received, r.ID)
	for i, b := range l.blocks {
		switch {
		case i < computed/BlockTokens:
		case e.invalid[b]:
			l.failed = append(l.failed, i)
			delete(e.invalid, b)
		case !e.holds(b, content(prompt, i)):
			l.wrong = append(l.wrong, i)
		}
	}
	if failed != (len(l.failed) > 0) {
		e.t.Errorf("request %q: failed is %v, and %d blocks are invalid", r.ID, failed, len(l.failed))
	}
}

// settled steps both engines until every block is free again.
func settled(engines ...*engine) {
	for _, e := range engines {
		e.t.Helper()
		e.until("all blocks are free", func() bool { return len(e.free) == poolBlocks })
		if len(e.delayed) > 0 {
			e.t.Errorf("%d requests are delayed", len(e.delayed))
		}
	}
}

// pair is a producer and a consumer.
type pair struct {
	*testing.T
	rig      Rig
	env      Environment
	producer *engine
	consumer *engine
	proxy    *Proxy // nil = none
}

// newPair starts both. With a proxy what travels to the consumer goes through it.
func newPair(t *testing.T, rig Rig, proxied bool, edit func(*connector.Caches)) *pair {
	t.Helper()
	p := &pair{T: t, rig: rig, env: rig.Setup(t)}
	through := ""
	if proxied {
		p.proxy = NewProxy(t, p.env.Address)
		through = p.proxy.Address()
	}
	p.producer = newEngine(t, p.env, connector.Producer, "producer", "", nil)
	p.consumer = newEngine(t, p.env, connector.Consumer, "consumer", through, edit)
	return p
}

// hand computes a prompt at the producer, and returns the request for the consumer.
func (p *pair) hand(id, prompt string, tokens int) *connector.Request {
	p.Helper()
	r := p.offer(id, prompt, tokens)
	p.offered()
	return r
}

// offer is hand before the blocks can be had.
func (p *pair) offer(id, prompt string, tokens int) *connector.Request {
	p.Helper()
	params := p.producer.produce(request(id, prompt, tokens, &connector.Params{DoRemoteDecode: true}), prompt)
	if !p.rig.Direct {
		return request(id, prompt, tokens, nil)
	}
	if params == nil {
		p.Fatal("the producer hands nothing over")
	}
	if p.proxy != nil {
		p.proxy.SetTarget(params.RemoteRanks[0])
		params.RemoteRanks = []string{p.proxy.Address()}
	}
	return request(id, prompt, tokens, params)
}

// offered waits until everything offered can be had.
func (p *pair) offered() {
	p.Helper()
	if p.rig.Direct {
		p.producer.step(new(connector.Step)) // the worker learns what it holds
		return
	}
	p.producer.until("the blocks are saved", func() bool { return len(p.producer.delayed) == 0 })
}

// expect returns how many tokens of a prompt travel: a store has whole groups.
func (p *pair) expect(tokens int) int {
	if p.rig.Direct {
		return tokens
	}
	return tokens / (GroupBlocks * BlockTokens) * GroupBlocks * BlockTokens
}

// GroupBytes is how many bytes such a group has.
const GroupBytes = GroupBlocks * BlockTokens * layers * 2 * heads * headSize * element

// GroupBlocks is how many blocks a store has under one key: an environment's configuration says so.
const GroupBlocks = 4
