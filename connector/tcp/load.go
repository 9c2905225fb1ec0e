package tcp

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"kvstrata/connector"
	"kvstrata/connector/direct"
)

// load is one load from when Bind saw it until it has ended. Its fields but order and from are under the worker's mu.
type load struct {
	order     direct.Load
	from      Peer // this rank's
	cancelled bool
	abort     context.CancelFunc // while something is done for it
	ended     bool
}

// errCancelled is of a load whose request was aborted.
var errCancelled = errors.New("the request was aborted")

// note takes a load over. One that cannot be is told as failed.
func (w *Worker) note(order *direct.Load) {
	l := &load{order: *order}
	l.order.Local, l.order.Blocks = slices.Clone(order.Local), slices.Clone(order.Blocks)
	r := &order.Remote
	var err error
	if len(r.Ranks) != w.setup.Ranks {
		err = fmt.Errorf("the remote engine has %d tensor-parallel ranks, this one %d: they must be as many", len(r.Ranks), w.setup.Ranks)
	} else {
		l.from = Peer{Address: r.Ranks[w.setup.Rank], Engine: r.EngineID}
	}
	w.mu.Lock()
	if _, ok := w.loads[order.Request]; ok {
		w.mu.Unlock()
		w.end(l, Result{Failed: all(len(l.order.Local)), Err: errors.New("a load of the request is under way already")})
		return
	}
	w.loads[order.Request] = l
	if err == nil {
		w.begin = append(w.begin, l)
	}
	w.mu.Unlock()
	if err != nil {
		w.end(l, Result{Failed: all(len(l.order.Local)), Err: err})
	}
}

// all returns the first n positions.
func all(n int) []int {
	a := make([]int, n)
	for i := range a {
		a[i] = i
	}
	return a
}

// cancel ends a request's load. It is told as ended once nothing writes its blocks any more.
func (w *Worker) cancel(request string) {
	w.mu.Lock()
	l, ok := w.loads[request]
	idle := false
	if ok {
		l.cancelled = true
		idle = l.abort == nil
		if !idle {
			l.abort()
		}
	}
	w.mu.Unlock()
	if idle { // it waits in a queue: whoever takes it out finds that it has ended
		w.end(l, Result{Failed: all(len(l.order.Local)), Err: errCancelled})
		w.tell(l.order.Remote)
	}
}

// enter begins to do something for a load; false when it has ended.
func (w *Worker) enter(l *load, cancel context.CancelFunc) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if l.ended || l.cancelled {
		return false
	}
	l.abort = cancel
	return true
}

// leave ends that, and reports whether the load was cancelled meanwhile.
func (w *Worker) leave(l *load) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	l.abort = nil
	return l.cancelled
}

// end tells a load as ended, once.
func (w *Worker) end(l *load, r Result) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if l.ended {
		return
	}
	l.ended = true
	if w.loads[l.order.Request] == l {
		delete(w.loads, l.order.Request)
	}
	w.ended.FinishedReceiving = append(w.ended.FinishedReceiving, l.order.Request)
	t := connector.Transfer{Duration: r.Duration, Post: r.Post, Bytes: r.Bytes, Descriptors: r.Descriptors}
	if r.Err != nil {
		w.ended.FailedReceiving = append(w.ended.FailedReceiving, l.order.Request)
		w.stats.FailedTransfers++
		for _, i := range r.Failed {
			if b := l.order.Local[i]; b != connector.Discard {
				w.ended.InvalidBlocks = append(w.ended.InvalidBlocks, b)
			}
		}
	} else {
		w.stats.Transfers = append(w.stats.Transfers, t)
	}
	peer := l.order.Remote.Instance
	if peer == "" {
		peer = l.from.Address
	}
	w.report.Done = append(w.report.Done, connector.Done{
		Op: connector.Load, Request: l.order.Request, First: l.order.First, Blocks: len(l.order.Local), Peer: peer, Transfer: t, Err: r.Err,
	})
}

// load does loads, one after the other.
func (w *Worker) load(ctx context.Context) {
	for {
		select {
		case l := <-w.queue:
			w.fetch(ctx, l)
		case <-ctx.Done():
			return
		}
	}
}

// fetch does one load.
func (w *Worker) fetch(ctx context.Context, l *load) {
	ctx, cancel := context.WithTimeout(ctx, time.Duration(w.cfg.LoadTimeout*float64(time.Second)))
	defer cancel()
	if !w.enter(l, cancel) {
		return
	}
	pull := Pull{
		Peer: l.from, Name: l.order.Remote.Request, Parts: l.order.Blocks, Wait: pullWait, Into: Blocks(w.cache, l.order.Local),
	}
	if len(pull.Parts) == 0 { // the producer had not told them: it had not finished
		pull.Ordinal = true
		for i := range l.order.Local {
			pull.Parts = append(pull.Parts, l.order.First+i)
		}
	}
	r := w.endpoint.Fetch(ctx, &pull)
	if w.leave(l) && r.Err != nil {
		r.Err = errCancelled
	}
	if r.Err != nil && !errors.Is(r.Err, errCancelled) {
		w.log.Warn("load blocks", "request", l.order.Request, "blocks", len(l.order.Local), "failed", len(r.Failed), "err", r.Err)
	}
	w.end(l, r)
	if !errors.Is(r.Err, ErrNotHeld) {
		w.tell(l.order.Remote)
	}
}

// await waits with each load for its producer, and queues it then.
func (w *Worker) await(ctx context.Context) {
	slots := make(chan struct{}, maxAwaited)
	defer func() {
		for range cap(slots) { // until the last one has ended
			slots <- struct{}{}
		}
	}()
	for {
		select {
		case l := <-w.waiting:
			select {
			case slots <- struct{}{}:
			case <-ctx.Done():
				return
			}
			go func() {
				defer func() { <-slots }()
				w.awaitOne(ctx, l)
			}()
		case <-ctx.Done():
			return
		}
	}
}

func (w *Worker) awaitOne(ctx context.Context, l *load) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	if !w.enter(l, cancel) {
		return
	}
	err := w.endpoint.Await(ctx, l.from, l.order.Remote.Request, time.Duration(w.cfg.PushTimeout*float64(time.Second)))
	if w.leave(l) {
		err = errCancelled
		w.tell(l.order.Remote)
	}
	if err == nil {
		select {
		case w.queue <- l:
			return
		default:
			err = errors.New("too many loads are waiting")
		}
	}
	w.end(l, Result{Failed: all(len(l.order.Local)), Err: err})
}

// tell queues a notice that a request's blocks are not needed any more.
func (w *Worker) tell(r direct.Remote) {
	r.Ranks = slices.Clone(r.Ranks)
	select {
	case w.notices <- r:
	default:
		w.failedNotice()
	}
}

func (w *Worker) failedNotice() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.stats.FailedNotifications++
}

// notify tells producers, one after the other.
func (w *Worker) notify(ctx context.Context) {
	for {
		select {
		case r := <-w.notices:
			if len(r.Ranks) != w.setup.Ranks {
				w.failedNotice()
				continue
			}
			err := w.endpoint.Done(ctx, Peer{Address: r.Ranks[w.setup.Rank], Engine: r.EngineID}, r.Request)
			if err != nil && !errors.Is(err, ErrNotHeld) && ctx.Err() == nil {
				w.log.Debug("tell a producer that blocks are not needed", "request", r.Request, "err", err)
				w.failedNotice()
			}
		case <-ctx.Done():
			return
		}
	}
}

// maxBeating bounds the producers that are sent heartbeats at a time; above, some are left to the next time.
const maxBeating = 256

// keep sends heartbeats for the loads that have not ended. A producer that does not answer holds up no other's: it is passed
// over until it has, or its connection has broken.
func (w *Worker) keep(ctx context.Context) {
	every := w.cfg.Lease().Heartbeat
	ticker := time.NewTicker(every)
	defer ticker.Stop()
	var (
		beats sync.WaitGroup
		mu    sync.Mutex
		asked = make(map[Peer]struct{}) // peers that have not answered yet
	)
	defer beats.Wait()
	for {
		select {
		case <-ticker.C:
		case <-w.beatNow:
		case <-ctx.Done():
			return
		}
		for p, names := range w.underWay() {
			mu.Lock()
			_, open := asked[p]
			if open = open || len(asked) >= maxBeating; !open {
				asked[p] = struct{}{}
			}
			mu.Unlock()
			if open {
				continue
			}
			beats.Go(func() {
				if err := w.endpoint.Beat(ctx, p, names); err != nil && ctx.Err() == nil {
					w.log.Debug("send heartbeats", "peer", p.Address, "err", err)
				}
				mu.Lock()
				defer mu.Unlock()
				delete(asked, p)
			})
		}
	}
}

// underWay returns the requests whose blocks are needed, by peer.
func (w *Worker) underWay() map[Peer][]string {
	w.mu.Lock()
	defer w.mu.Unlock()
	peers := make(map[Peer][]string)
	for l := range maps.Values(w.loads) {
		if !l.ended && !l.cancelled && l.from.Address != "" {
			peers[l.from] = append(peers[l.from], l.order.Remote.Request)
		}
	}
	return peers
}
