package store

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"kvstrata/connector"
)

// Worker is one rank's half: it moves groups between the registered memory and the store, beside the engine's steps.
type Worker struct {
	setup     connector.Setup
	cfg       Config
	transport Transport
	cache     *connector.Cache
	backend   Backend
	describe  []byte
	bound     *metadata
	loads     chan *job
	saves     chan *job

	mu      sync.Mutex
	idle    *sync.Cond          // signalled when a save has ended
	loading map[string]*job     // under way or waiting, by request
	saving  map[string][]*job   // likewise
	ended   map[string]struct{} // requests that are told as sent once their saves have ended
	out     connector.Output
	report  connector.Report
	stats   connector.Stats
}

// job is an order under way.
type job struct {
	order
	ctx    context.Context // ends when the request is cancelled
	cancel context.CancelFunc
	posted time.Time

	began bool // a worker's mutex guards it: somebody does it, or has done
}

// maxJobs bounds the loads, and the saves, that wait for their turn. A load that finds no room fails; a save is left out.
const maxJobs = 4096

var _ connector.Worker = (*Worker)(nil)

var (
	errNoRoom    = errors.New("too many transfers wait")
	errPreempted = errors.New("the request was preempted")
)

// NewWorker returns one rank's half of a transport.
func NewWorker(s connector.Setup, t Transport) (*Worker, error) {
	cfg, err := t.check(&s)
	if err != nil {
		return nil, err
	}
	w := &Worker{
		setup: s, cfg: cfg, transport: t, loads: make(chan *job, maxJobs), saves: make(chan *job, maxJobs),
		loading: make(map[string]*job), saving: make(map[string][]*job), ended: make(map[string]struct{}),
	}
	w.idle = sync.NewCond(&w.mu)
	return w, nil
}

// RegisterCaches opens the store for the caches.
func (w *Worker) RegisterCaches(c connector.Caches) (err error) {
	if w.transport.Arrange != nil {
		if c, w.describe, err = w.transport.Arrange(c); err != nil {
			return fmt.Errorf("arrange caches for %s: %w", w.setup.Config.Connector, err)
		}
	}
	if w.cache, err = connector.NewCache(c); err != nil {
		return err
	}
	w.backend, err = w.transport.Open(Opening{
		Setup: w.setup, Cache: w.cache, Compatibility: w.cache.Compatibility(), BlockBytes: w.cache.BlockBytes(), Describe: w.describe,
	})
	return err
}

// Handshake returns what the scheduler's half opens the store with.
func (w *Worker) Handshake() ([]byte, error) {
	hash := w.cache.Compatibility()
	return json.Marshal(handshake{Compatibility: hash[:], BlockBytes: w.cache.BlockBytes(), Describe: w.describe})
}

// Run moves groups until ctx ends. What is under way then ends early, and fails.
func (w *Worker) Run(ctx context.Context) error {
	var group sync.WaitGroup
	work := func(jobs <-chan *job, do func(context.Context, *job)) {
		for {
			select {
			case <-ctx.Done():
				return
			case j := <-jobs:
				w.run(ctx, j, do)
			}
		}
	}
	for range w.cfg.Parallel {
		group.Go(func() { work(w.loads, w.load) })
		group.Go(func() { work(w.saves, w.save) })
	}
	<-ctx.Done()
	group.Wait()
	for len(w.loads) > 0 { // what never began
		j := <-w.loads
		w.loaded(j, w.unmoved(j), connector.Transfer{}, context.Cause(ctx))
	}
	for len(w.saves) > 0 {
		if j := <-w.saves; w.begin(j) {
			w.savedAll(j, context.Cause(ctx))
		}
	}
	return errors.Join(w.backend.Close(), w.cache.Close())
}

// run does a job under a context that ends with the request or with Run, unless it was dropped.
func (w *Worker) run(ctx context.Context, j *job, do func(context.Context, *job)) {
	if !w.begin(j) {
		return
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stop := context.AfterFunc(j.ctx, cancel)
	defer stop()
	do(ctx, j) // also one whose time is over: the store's client refuses it at once
}

// begin takes a job; one that was taken already is left alone.
func (w *Worker) begin(j *job) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	began := j.began
	j.began = true
	return !began
}

// Bind takes the step's orders.
func (w *Worker) Bind(m connector.Metadata) { w.bound, _ = m.(*metadata) }

// Clear forgets them.
func (w *Worker) Clear() { w.bound = nil }

// HandlePreemptions gives up the saves of the requests, and waits until none reads their blocks any more: for what is under
// way, that is as long as the store's client takes to let go.
func (w *Worker) HandlePreemptions(ctx context.Context, preempted []string) error {
	stop := context.AfterFunc(ctx, func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.idle.Broadcast()
	})
	defer stop()
	for _, id := range preempted {
		w.mu.Lock()
		jobs := slices.Clone(w.saving[id])
		w.mu.Unlock()
		for _, j := range jobs {
			j.cancel()
			if w.begin(j) {
				w.savedAll(j, errPreempted)
			}
		}
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, id := range preempted {
		for len(w.saving[id]) > 0 {
			if err := ctx.Err(); err != nil {
				return fmt.Errorf("wait for the saves of preempted request %q: %w", id, err)
			}
			w.idle.Wait()
		}
	}
	return nil
}

// StartLoad begins the step's loads.
func (w *Worker) StartLoad(context.Context) error {
	if w.bound == nil {
		return nil
	}
	for _, o := range w.bound.loads {
		j := w.job(o)
		w.mu.Lock()
		w.loading[o.request] = j
		w.mu.Unlock()
		select {
		case w.loads <- j:
		default:
			w.loaded(j, w.unmoved(j), connector.Transfer{}, errNoRoom)
		}
	}
	for _, id := range w.bound.cancels {
		w.mu.Lock()
		if j := w.loading[id]; j != nil {
			j.cancel()
		}
		w.mu.Unlock()
	}
	return nil
}

// job makes an order this rank's own: the ranks of one process are given the same metadata.
func (w *Worker) job(o order) *job {
	o.groups = slices.Clone(o.groups)
	for i := range o.groups {
		o.groups[i].Rank = w.setup.Rank
	}
	j := &job{order: o, posted: time.Now()}
	j.ctx, j.cancel = context.WithTimeout(context.Background(), time.Duration(w.cfg.Timeout*float64(time.Second)))
	return j
}

// WaitForLayer returns at once: loads are asynchronous.
func (w *Worker) WaitForLayer(context.Context, string) error { return nil }

// SaveLayer does nothing: a group is saved when all its layers are computed.
func (w *Worker) SaveLayer(context.Context, string) error { return nil }

// WaitForSave begins the step's saves. They read the blocks after it has returned.
func (w *Worker) WaitForSave(context.Context) error {
	if w.bound == nil {
		return nil
	}
	for _, o := range w.bound.saves {
		j := w.job(o)
		w.mu.Lock()
		w.saving[o.request] = append(w.saving[o.request], j)
		w.mu.Unlock()
		select {
		case w.saves <- j:
		default:
			w.savedAll(j, errNoRoom)
		}
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, id := range w.bound.finished {
		w.ended[id] = struct{}{}
	}
	return nil
}

// load reads the groups of an order.
func (w *Worker) load(ctx context.Context, j *job) {
	n := w.cfg.GroupBlocks
	items, windows := make([]Item, len(j.groups)), make([]*connector.Window, len(j.groups))
	moved := connector.Transfer{}
	for i := range j.groups {
		window, err := w.cache.Scatter(j.blocks[i*n : (i+1)*n])
		if err != nil { // the engine gave blocks that do not exist
			release(windows[:i])
			w.loaded(j, w.unmoved(j), connector.Transfer{}, err)
			return
		}
		windows[i] = window
		items[i] = w.item(&j.groups[i], window)
	}
	moved.Post = time.Since(j.posted)
	errs := w.backend.Get(ctx, items)
	var invalid []int
	var failure error
	for i, window := range windows {
		err := at(errs, i)
		if err == nil {
			err = window.Commit(ctx)
		}
		if err != nil {
			failure = cmp.Or(failure, err)
			invalid = appendBlocks(invalid, j.blocks[i*n:(i+1)*n])
		} else {
			moved.Bytes += uint64(window.Kept())
			moved.Descriptors += uint64(window.Descriptors())
		}
	}
	release(windows)
	moved.Duration = time.Since(j.posted)
	w.loaded(j, invalid, moved, failure)
}

// at returns the error of item i: a store that did all says nothing.
func at(errs []error, i int) error {
	if i < len(errs) {
		return errs[i]
	}
	return nil
}

func release(windows []*connector.Window) {
	for _, w := range windows {
		w.Release()
	}
}

// unmoved returns every block of an order.
func (w *Worker) unmoved(j *job) []int { return appendBlocks(nil, j.blocks) }

func appendBlocks(dst, blocks []int) []int {
	for _, b := range blocks {
		if b != connector.Discard {
			dst = append(dst, b)
		}
	}
	return dst
}

func (w *Worker) item(g *Group, window *connector.Window) Item {
	return Item{Key: w.backend.Key(g), Group: g, Pieces: window.Pieces, Bytes: window.Bytes}
}

// loaded notes that a load has ended.
func (w *Worker) loaded(j *job, invalid []int, moved connector.Transfer, err error) {
	j.cancel()
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.loading, j.request)
	w.out.FinishedReceiving = append(w.out.FinishedReceiving, j.request)
	w.out.InvalidBlocks = append(w.out.InvalidBlocks, invalid...)
	if err != nil {
		w.out.FailedReceiving = append(w.out.FailedReceiving, j.request)
	}
	w.note(connector.Done{Op: connector.Load, Request: j.request, First: j.first, Blocks: len(j.blocks), Transfer: moved, Err: err})
}

// note adds a transfer to the report and the statistics.
func (w *Worker) note(d connector.Done) {
	d.Peer = w.peer()
	w.report.Done = append(w.report.Done, d)
	switch {
	case d.Err != nil:
		w.stats.FailedTransfers++
	case d.Bytes > 0:
		w.stats.Extend(&connector.Stats{Transfers: []connector.Transfer{d.Transfer}})
	}
}

func (w *Worker) peer() string {
	if w.cfg.Name != "" {
		return w.cfg.Name
	}
	return w.backend.Name()
}

// save writes those groups of an order that the store does not have.
func (w *Worker) save(ctx context.Context, j *job) {
	n := w.cfg.GroupBlocks
	keys := make([]string, len(j.groups))
	for i := range j.groups {
		keys[i] = w.backend.Key(&j.groups[i])
	}
	there, err := w.backend.Prefix(ctx, keys)
	if err != nil {
		w.savedAll(j, err)
		return
	}
	items, windows := make([]Item, 0, len(j.groups)-there), make([]*connector.Window, 0, len(j.groups)-there)
	for i := there; i < len(j.groups); i++ {
		window, err := w.cache.Gather(ctx, j.blocks[i*n:(i+1)*n])
		if err != nil {
			release(windows)
			w.savedAll(j, err)
			return
		}
		windows = append(windows, window)
		items = append(items, w.item(&j.groups[i], window))
	}
	moved := connector.Transfer{Post: time.Since(j.posted)}
	errs := w.backend.Put(ctx, items)
	moved.Duration = time.Since(j.posted)
	var bad []int
	var failure error
	for i, window := range windows {
		if err := at(errs, i); err != nil {
			failure = cmp.Or(failure, err)
			bad = w.appendGroup(bad, there+i)
			continue
		}
		moved.Bytes += uint64(window.Bytes)
		moved.Descriptors += uint64(window.Descriptors())
	}
	release(windows)
	w.saved(j, bad, moved, failure)
}

// appendGroup appends the numbers of a group's blocks within its order.
func (w *Worker) appendGroup(dst []int, group int) []int {
	for i := range w.cfg.GroupBlocks {
		dst = append(dst, group*w.cfg.GroupBlocks+i)
	}
	return dst
}

// savedAll notes that nothing of an order was saved.
func (w *Worker) savedAll(j *job, err error) {
	var bad []int
	for i := range j.groups {
		bad = w.appendGroup(bad, i)
	}
	w.saved(j, bad, connector.Transfer{}, err)
}

// saved notes that a save has ended.
func (w *Worker) saved(j *job, bad []int, moved connector.Transfer, err error) {
	j.cancel()
	w.mu.Lock()
	defer w.mu.Unlock()
	w.note(connector.Done{Op: connector.Save, Request: j.request, First: j.first, Blocks: len(j.blocks), Bad: bad, Transfer: moved, Err: err})
	left := slices.DeleteFunc(w.saving[j.request], func(other *job) bool { return other == j })
	if w.saving[j.request] = left; len(left) == 0 {
		delete(w.saving, j.request)
	}
	w.idle.Broadcast()
}

// Collect returns what has ended since the last call.
func (w *Worker) Collect([]string) *connector.Output {
	w.mu.Lock()
	defer w.mu.Unlock()
	for id := range w.ended {
		if len(w.saving[id]) == 0 {
			delete(w.ended, id)
			w.out.FinishedSending = append(w.out.FinishedSending, id)
		}
	}
	if w.out.Empty() && len(w.report.Done) == 0 && w.stats.Empty() {
		return nil
	}
	out := new(connector.Output)
	*out, w.out = w.out, connector.Output{}
	if len(w.report.Done) > 0 {
		report := w.report
		w.report = connector.Report{}
		out.Metadata = &report
	}
	if !w.stats.Empty() {
		stats := w.stats
		w.stats = connector.Stats{}
		out.Stats = &stats
	}
	return out
}
