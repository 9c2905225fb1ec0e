package carry

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
	"kvstrata/connector/device"
	"kvstrata/connector/encoder"
)

// Worker is one rank's half: it moves items between the registered memory and the carrier, beside the engine's steps.
type Worker struct {
	setup     encoder.Setup
	cfg       Config
	transport Transport
	carrier   Carrier
	memory    *memory
	bound     *metadata
	loads     chan *job
	saves     chan *job

	mu       sync.Mutex
	idle     *sync.Cond      // signalled when a job has ended
	loading  map[string]*job // under way or waiting, by hash
	saving   map[string]*job
	suspects map[string]struct{} // items that did not come though they were there: a save overwrites them
	ends     []end
	out      connector.Output
	report   connector.Report
	stats    connector.Stats
}

// job is a load or a save under way.
type job struct {
	want    Want
	op      connector.Op
	span    device.Span
	ctx     context.Context // ends when nobody wants the job any more
	cancel  context.CancelCauseFunc
	posted  time.Time
	started bool // under the worker's mu, and
	over    bool
}

const (
	maxJobs     = 4096 // loads, and saves, that wait for their turn; one that finds no room has failed
	maxSuspects = 1024 // above, they are forgotten: a save then leaves alone what is there
)

var _ encoder.Worker = (*Worker)(nil)

var (
	errCancelled = errors.New("nobody wants the item any more")
	errFreed     = errors.New("the item was freed")
)

// NewWorker returns one rank's half of a transport.
func NewWorker(s encoder.Setup, t Transport) (*Worker, error) {
	cfg, err := configure(&s, &t)
	if err != nil {
		return nil, err
	}
	w := &Worker{
		setup: s, cfg: cfg, transport: t, loads: make(chan *job, maxJobs), saves: make(chan *job, maxJobs), loading: make(map[string]*job),
		saving: make(map[string]*job), suspects: make(map[string]struct{}),
	}
	w.idle = sync.NewCond(&w.mu)
	return w, nil
}

// saver reports whether this rank saves: all have the same, so that the first one does.
func (w *Worker) saver() bool { return w.setup.Rank == 0 && w.setup.Config.Role.Produces() }

// RegisterCaches takes the memory and opens the carrier.
func (w *Worker) RegisterCaches(c encoder.Caches) error {
	m, err := newMemory(c, w.transport.Keeps && w.saver(), w.setup.Config.BufferSize)
	if err != nil {
		return err
	}
	carrier, err := w.transport.Open(Opening{Setup: w.setup, Compatibility: w.setup.Model.Compatibility(), Shares: w.saver()})
	if err != nil {
		return errors.Join(err, m.close())
	}
	w.memory, w.carrier = m, carrier
	return nil
}

// Handshake returns what the scheduler's half hands over.
func (w *Worker) Handshake() ([]byte, error) {
	if w.carrier == nil {
		return nil, errors.New("handshake: no encoder cache is registered")
	}
	hash := w.setup.Model.Compatibility()
	return json.Marshal(handshake{Compatibility: hash[:], Address: w.carrier.Address()})
}

// Run moves items until ctx ends. What is under way then ends early, and fails.
func (w *Worker) Run(ctx context.Context) error {
	if w.carrier == nil {
		<-ctx.Done()
		return nil
	}
	err := serve(ctx, w.carrier, func(ctx context.Context) {
		var group sync.WaitGroup
		for range w.cfg.Parallel {
			group.Go(func() { w.work(ctx, w.loads, w.load) })
			group.Go(func() { w.work(ctx, w.saves, w.save) })
		}
		group.Wait()
		for len(w.loads)+len(w.saves) > 0 { // what never began
			select {
			case j := <-w.loads:
				w.end(j, connector.Transfer{}, "", context.Cause(ctx))
			case j := <-w.saves:
				w.end(j, connector.Transfer{}, "", context.Cause(ctx))
			}
		}
	})
	return errors.Join(err, w.memory.close())
}

func (w *Worker) work(ctx context.Context, jobs <-chan *job, do func(context.Context, *job)) {
	for {
		select {
		case <-ctx.Done():
			return
		case j := <-jobs:
			w.run(ctx, j, do)
		}
	}
}

// run does a job under a context that ends with Run, or when nobody wants the job any more, or after its time.
func (w *Worker) run(ctx context.Context, j *job, do func(context.Context, *job)) {
	w.mu.Lock()
	over := j.over
	j.started = true
	w.mu.Unlock()
	if over {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, seconds(w.cfg.LoadTimeout))
	defer cancel()
	stop := context.AfterFunc(j.ctx, cancel)
	defer stop()
	do(ctx, j)
}

// Bind takes the step's orders.
func (w *Worker) Bind(m connector.Metadata) { w.bound, _ = m.(*metadata) }

// Clear forgets them.
func (w *Worker) Clear() { w.bound = nil }

// StartLoad ends what is not wanted any more, and begins the step's loads.
func (w *Worker) StartLoad(ctx context.Context, spans map[string]device.Span) error {
	if w.bound == nil {
		return nil
	}
	err := w.free(ctx, w.bound.freed)
	for _, want := range w.bound.loads {
		j := w.job(want, connector.Load, spans[want.Hash])
		failure := cmp.Or(err, w.memory.check(want.Item, j.span))
		w.post(j, w.loading, w.loads, failure)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, hash := range w.bound.cancels {
		w.cancel(w.loading[hash], errCancelled)
	}
	w.ends = append(w.ends, w.bound.ends...)
	return err
}

// free returns once nothing touches the room of items any more: what is under way is cut.
func (w *Worker) free(ctx context.Context, hashes []string) error {
	stop := context.AfterFunc(ctx, func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.idle.Broadcast()
	})
	defer stop()
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, hash := range hashes {
		w.cancel(w.loading[hash], errFreed)
		w.cancel(w.saving[hash], errFreed)
	}
	for _, hash := range hashes {
		for w.loading[hash] != nil || w.saving[hash] != nil {
			if err := ctx.Err(); err != nil {
				return fmt.Errorf("wait for the transfers of freed item %s: %w", hash, err)
			}
			w.idle.Wait()
		}
		w.carrier.Drop(hash)
		w.takeBack(hash)
	}
	return nil
}

// takeBack makes a save that was not told yet one that was cut, where dropping the item has undone it: the scheduler's half
// would hand it over. The worker's mu is held.
func (w *Worker) takeBack(hash string) {
	for i := range w.report.Done {
		d := &w.report.Done[i]
		if w.transport.Keeps && d.Op == connector.Save && d.Request == hash && d.Err == nil {
			d.Err = fmt.Errorf("item %s: %w", hash, errFreed)
			w.stats.FailedTransfers++
		}
	}
}

// cancel ends a job: at once when it has not begun. The worker's mu is held.
func (w *Worker) cancel(j *job, why error) {
	if j == nil {
		return
	}
	j.cancel(why)
	if !j.started {
		w.endLocked(j, connector.Transfer{}, "", why)
	}
}

func (w *Worker) job(want Want, op connector.Op, span device.Span) *job {
	j := &job{want: want, op: op, span: span, posted: time.Now()}
	j.ctx, j.cancel = context.WithCancelCause(context.Background())
	return j
}

// post hands a job to the goroutines, unless it has failed already.
func (w *Worker) post(j *job, under map[string]*job, to chan<- *job, failure error) {
	w.mu.Lock()
	under[j.want.Hash] = j
	w.mu.Unlock()
	if failure == nil {
		select {
		case to <- j:
			return
		default:
			failure = errNoRoom
		}
	}
	w.end(j, connector.Transfer{}, "", failure)
}

// Save begins to share an output, in the first rank of a producer.
func (w *Worker) Save(i encoder.Item, span device.Span) error {
	if !w.saver() {
		return nil
	}
	if err := errors.Join(i.Validate(), w.memory.check(i, span)); err != nil {
		return fmt.Errorf("save: %w", err)
	}
	w.mu.Lock()
	busy := w.saving[i.Hash] != nil
	w.mu.Unlock()
	if !busy {
		w.post(w.job(Want{Item: i}, connector.Save, span), w.saving, w.saves, nil)
	}
	return nil
}

// load reads an item.
func (w *Worker) load(ctx context.Context, j *job) {
	win, err := w.memory.scatter(j.span)
	if err != nil {
		w.end(j, connector.Transfer{}, "", err)
		return
	}
	moved := connector.Transfer{Post: time.Since(j.posted)}
	from, err := w.carrier.Get(ctx, &j.want, win.bytes)
	if err == nil {
		err = win.commit()
	}
	win.release()
	if moved.Duration = time.Since(j.posted); err == nil {
		moved.Bytes, moved.Descriptors = uint64(j.want.Bytes), 1
	}
	w.end(j, moved, from, err)
}

// save shares an item.
func (w *Worker) save(ctx context.Context, j *job) {
	win, err := w.memory.gather(j.span)
	if err != nil {
		w.end(j, connector.Transfer{}, w.carrier.Name(), err)
		return
	}
	w.mu.Lock()
	_, suspect := w.suspects[j.want.Hash]
	w.mu.Unlock()
	moved := connector.Transfer{Post: time.Since(j.posted)}
	n, err := w.carrier.Put(ctx, j.want.Item, win.bytes, suspect)
	win.release()
	if moved.Duration = time.Since(j.posted); err == nil && n > 0 {
		moved.Bytes, moved.Descriptors = uint64(n), 1
	}
	w.end(j, moved, w.carrier.Name(), err)
}

func (w *Worker) end(j *job, moved connector.Transfer, peer string, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.endLocked(j, moved, peer, err)
}

// endLocked notes that a job has ended, once.
func (w *Worker) endLocked(j *job, moved connector.Transfer, peer string, err error) {
	if j.over {
		return
	}
	j.over = true
	if cause := context.Cause(j.ctx); err != nil && cause != nil {
		err = cause
	}
	hash := j.want.Hash
	if err != nil {
		err = fmt.Errorf("item %s: %w", hash, err)
	}
	if j.op == connector.Load {
		delete(w.loading, hash)
		w.out.FinishedReceiving = append(w.out.FinishedReceiving, hash)
		if err != nil {
			w.out.FailedReceiving = append(w.out.FailedReceiving, hash)
		}
		w.suspect(j, err)
	} else {
		delete(w.saving, hash)
		if err == nil {
			delete(w.suspects, hash)
		}
	}
	j.cancel(nil)
	w.report.Done = append(w.report.Done, connector.Done{Op: j.op, Request: hash, Peer: peer, Transfer: moved, Err: err})
	switch {
	case err != nil:
		w.stats.FailedTransfers++
	case moved.Bytes > 0:
		w.stats.Extend(&connector.Stats{Transfers: []connector.Transfer{moved}})
	}
	w.idle.Broadcast()
}

// suspect notes an item that others have and that did not come.
func (w *Worker) suspect(j *job, err error) {
	if err == nil || j.ctx.Err() != nil || !w.saver() {
		return
	}
	if len(w.suspects) >= maxSuspects {
		clear(w.suspects)
	}
	w.suspects[j.want.Hash] = struct{}{}
}

// Collect returns what has ended since the last call.
func (w *Worker) Collect([]string) *connector.Output {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.ends = slices.DeleteFunc(w.ends, func(e end) bool {
		for _, hash := range e.hashes {
			if w.loading[hash] != nil || w.saving[hash] != nil {
				return false
			}
		}
		w.out.FinishedSending = append(w.out.FinishedSending, e.request)
		return true
	})
	out := w.out
	w.out = connector.Output{}
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
	if out.Empty() {
		return nil
	}
	return &out
}
