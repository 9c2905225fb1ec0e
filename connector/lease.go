package connector

import (
	"cmp"
	"container/heap"
	"errors"
	"fmt"
	"time"
)

// LeaseConfig says how long a producer holds a request's blocks for the consumer (vLLM's NixlConnector:
// kv_lease_duration 30 s, a heartbeat each sixth of it, each to now + two thirds of it).
type LeaseConfig struct {
	Duration  time.Duration // of a new lease
	Extension time.Duration // from a heartbeat on
	Heartbeat time.Duration // how often a consumer sends one
}

// DefaultLeaseConfig returns upstream's times: 30 s, 20 s and 5 s.
func DefaultLeaseConfig() LeaseConfig { return LeaseFor(30 * time.Second) }

// LeaseFor returns the times that go with a lease's duration, in upstream's proportions.
func LeaseFor(duration time.Duration) LeaseConfig {
	return LeaseConfig{Duration: duration, Extension: duration * 2 / 3, Heartbeat: duration / 6}
}

// Validate returns every problem at once.
func (c LeaseConfig) Validate() error {
	var errs []error
	if c.Duration <= 0 {
		errs = append(errs, fmt.Errorf("kv_lease_duration %v: want more than 0", c.Duration))
	}
	if c.Extension < c.Heartbeat || c.Heartbeat <= 0 {
		errs = append(errs, fmt.Errorf("lease extension %v: want no less than the heartbeat of %v", c.Extension, c.Heartbeat))
	}
	return errors.Join(errs...)
}

// Leases holds the producer's leases by request. It knows no clock and starts nothing: time comes as an argument. One
// goroutine uses it.
type Leases struct {
	cfg     LeaseConfig
	byID    map[string]*lease
	queue   leaseQueue
	expired uint64
}

type lease struct {
	id    string
	until time.Time
	place int // in the queue
}

// NewLeases returns no leases.
func NewLeases(cfg LeaseConfig) *Leases { return &Leases{cfg: cfg, byID: make(map[string]*lease)} }

// Hold begins a request's lease, and returns when it ends. One that is held is extended.
func (l *Leases) Hold(id string, now time.Time) time.Time {
	if _, ok := l.byID[id]; ok {
		l.extend(id, now.Add(l.cfg.Duration))
		return l.byID[id].until
	}
	e := &lease{id: id, until: now.Add(l.cfg.Duration)}
	l.byID[id] = e
	heap.Push(&l.queue, e)
	return e.until
}

// Beat extends leases by a heartbeat, never to an earlier end; requests without one are passed over: they were freed.
func (l *Leases) Beat(ids []string, now time.Time) {
	for _, id := range ids {
		if _, ok := l.byID[id]; ok {
			l.extend(id, now.Add(l.cfg.Extension))
		}
	}
}

func (l *Leases) extend(id string, until time.Time) {
	e := l.byID[id]
	if until.After(e.until) {
		e.until = until
		heap.Fix(&l.queue, e.place)
	}
}

// Release ends a lease because its blocks were fetched, and reports whether there was one.
func (l *Leases) Release(id string) bool {
	e, ok := l.byID[id]
	if ok {
		heap.Remove(&l.queue, e.place)
		delete(l.byID, id)
	}
	return ok
}

// Expire ends the leases whose time is over, and returns their requests, the longest overdue first.
func (l *Leases) Expire(now time.Time) (ids []string) {
	for len(l.queue) > 0 && !l.queue[0].until.After(now) {
		e := heap.Pop(&l.queue).(*lease)
		delete(l.byID, e.id)
		ids = append(ids, e.id)
	}
	l.expired += uint64(len(ids))
	return ids
}

// Next returns when the next lease ends; false when there is none.
func (l *Leases) Next() (time.Time, bool) {
	if len(l.queue) == 0 {
		return time.Time{}, false
	}
	return l.queue[0].until, true
}

// Len returns how many leases are held, Expired how many have ended by time.
func (l *Leases) Len() int { return len(l.queue) }

// Expired returns how many leases have ended by time.
func (l *Leases) Expired() uint64 { return l.expired }

// leaseQueue is a heap by end.
type leaseQueue []*lease

func (q leaseQueue) Len() int { return len(q) }
func (q leaseQueue) Less(i, j int) bool {
	return cmp.Or(q[i].until.Compare(q[j].until), cmp.Compare(q[i].id, q[j].id)) < 0
}

func (q leaseQueue) Swap(i, j int) {
	q[i], q[j] = q[j], q[i]
	q[i].place, q[j].place = i, j
}

func (q *leaseQueue) Push(v any) {
	e := v.(*lease)
	e.place = len(*q)
	*q = append(*q, e)
}

func (q *leaseQueue) Pop() any {
	old := *q
	e := old[len(old)-1]
	*q = old[:len(old)-1]
	return e
}
