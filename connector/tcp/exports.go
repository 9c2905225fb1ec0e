package tcp

import (
	"context"
	"fmt"
	"time"
)

// Export offers content to peers under a name until that many consumers (0 = 1) are done with it, or until the lease has run
// out. One that is offered under the name already is replaced.
func (e *Endpoint) Export(name string, c Content, consumers int) error {
	x, err := newExport(name, c, consumers)
	if err != nil {
		return err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		return fmt.Errorf("export %q: the endpoint is closed", name)
	}
	now := e.id.Now()
	e.expireLocked(now)
	e.generation++
	x.generation = e.generation
	e.exports[name] = x
	e.leases.Hold(name, now)
	if ch, ok := e.arrivals[name]; ok {
		close(ch)
		delete(e.arrivals, name)
	}
	select {
	case e.kick <- struct{}{}:
	default:
	}
	return nil
}

// Release takes an export back without telling of it, and reports whether there was one. A read of it that is under way does
// not count.
func (e *Endpoint) Release(name string) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	delete(e.exports, name)
	return e.leases.Release(name)
}

// Ended returns the exports whose consumers are done, and those whose lease ran out, since the last call.
func (e *Endpoint) Ended() (done, expired []string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.expireLocked(e.id.Now())
	done, expired = e.done, e.expired
	e.done, e.expired = nil, nil
	return done, expired
}

// Exports returns how many there are.
func (e *Endpoint) Exports() int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return len(e.exports)
}

func (e *Endpoint) expireLocked(now time.Time) {
	for _, name := range e.leases.Expire(now) {
		delete(e.exports, name)
		e.expired = append(e.expired, name)
	}
}

// holds reports whether an export that was looked up is still offered. It is asked after the last byte has been read.
func (e *Endpoint) holds(x *export) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.expireLocked(e.id.Now())
	return e.exports[x.name] == x
}

// confirm is holds by name and generation.
func (e *Endpoint) confirm(name string, generation uint64) status {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.expireLocked(e.id.Now())
	if x := e.exports[name]; x == nil || x.generation != generation {
		return statusEnded
	}
	return statusOK
}

// finish counts a consumer that is done.
func (e *Endpoint) finish(name, consumer string) status {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.expireLocked(e.id.Now())
	x := e.exports[name]
	if x == nil {
		return statusNotHeld
	}
	if x.consumers > 1 {
		if x.done == nil {
			x.done = make(map[string]struct{})
		}
		x.done[consumer] = struct{}{}
		if len(x.done) < x.consumers {
			return statusOK
		}
	}
	delete(e.exports, name)
	e.leases.Release(name)
	e.done = append(e.done, name)
	return statusOK
}

// beat extends leases.
func (e *Endpoint) beat(names []string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	now := e.id.Now()
	e.expireLocked(now)
	e.leases.Beat(names, now)
}

// lookup returns an export, and waits for it when it is not offered yet. Waiting ones are bounded: above, the answer is busy.
func (e *Endpoint) lookup(ctx context.Context, name []byte, wait time.Duration) (*export, status) {
	e.mu.Lock()
	e.expireLocked(e.id.Now())
	x := e.exports[string(name)]
	if x != nil || wait <= 0 {
		e.mu.Unlock()
		if x == nil {
			return nil, statusNotHeld
		}
		return x, statusOK
	}
	if e.waiting >= maxWaiting {
		e.mu.Unlock()
		return nil, statusBusy
	}
	e.waiting++
	e.mu.Unlock()
	e.counts.waited.Add(1)
	defer func() {
		e.mu.Lock()
		e.waiting--
		e.mu.Unlock()
	}()
	return e.waitFor(ctx, string(name), wait)
}

func (e *Endpoint) waitFor(ctx context.Context, name string, wait time.Duration) (*export, status) {
	timer := time.NewTimer(wait)
	defer timer.Stop()
	for {
		e.mu.Lock()
		e.expireLocked(e.id.Now())
		if x := e.exports[name]; x != nil {
			e.mu.Unlock()
			return x, statusOK
		}
		ch, ok := e.arrivals[name]
		if !ok {
			ch = make(chan struct{})
			e.arrivals[name] = ch
		}
		e.mu.Unlock()
		select {
		case <-ch:
			continue // to find it, unless it has ended again
		case <-timer.C:
		case <-ctx.Done():
		case <-e.closing:
		}
		e.mu.Lock()
		// Whoever else waits for the name makes the channel anew: it is forgotten here lest names pile up.
		if e.arrivals[name] == ch {
			delete(e.arrivals, name)
			close(ch)
		}
		e.mu.Unlock()
		return nil, statusNotHeld
	}
}
