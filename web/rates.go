package web

import (
	"encoding/json"
	"strconv"
	"sync"
	"time"

	"kvstrata/event"
)

const (
	pointSeconds = 300 // of the fleet's past that is kept
	rateSeconds  = 5   // that a source's rate is over
	rateRing     = rateSeconds + 1
)

// Counts are blocks whose copies changed, as the index and the history count them too, so that the totals of all three
// are the same numbers: STORED those of effect +1, EVICTED those of effect -1. LOADED counts the blocks of transfers.
//
// What the engine told without effect is not counted, though `kvstrata tail` shows it. A STORED of effect 0 most often
// only tells the names of blocks that are there, and on the wire looks like the run of a full report that tells again what
// it told before. An EVICTED of effect 0 is of a block that was not known to be there, as after a hole. Either may also be
// of blocks that lie elsewhere, which their own source counts. A CLEARED counts nothing: it does not tell its blocks.
type Counts struct {
	Stored  uint64 `json:"stored"`
	Evicted uint64 `json:"evicted"`
	Loaded  uint64 `json:"loaded"`
}

func (c *Counts) add(d Counts) {
	c.Stored += d.Stored
	c.Evicted += d.Evicted
	c.Loaded += d.Loaded
}

// PerSecond is blocks a second, counted as [Counts] are.
type PerSecond struct {
	Stored  float64 `json:"stored"`
	Evicted float64 `json:"evicted"`
	Loaded  float64 `json:"loaded"`
}

// Rates counts the blocks of the event stream: exact totals since it was made, of the fleet and of each source, the
// fleet's last 300 seconds one by one, and each source's rate. A second is the clock's at which an event was observed,
// not the one at which it happened: what is read late, as after a start, counts in the second in which it is read.
//
// Observe is called from one goroutine; everything else from any.
type Rates struct {
	clock func() time.Time

	mu      sync.Mutex
	total   Counts
	points  [pointSeconds]point
	sources map[event.Source]*sourceRates

	last *sourceRates // the last message's: most often the next one's too
	name event.Source // of last
}

// point is one second of the fleet, and its document once it was asked for.
type point struct {
	second int64 // of Unix time; 0: none
	counts Counts
	key    string
	body   json.RawMessage // nil: counts moved since
}

type sourceRates struct {
	total Counts
	ring  [rateRing]struct {
		second int64
		counts Counts
	}
}

// NewRates returns rates without events. clock tells the time of an Observe.
func NewRates(clock func() time.Time) *Rates {
	return &Rates{clock: clock, sources: make(map[event.Source]*sourceRates)}
}

// Observe counts a message, which it does not keep. Each batch is to be observed once.
func (r *Rates) Observe(m *event.Message) {
	d := count(m)
	if d == (Counts{}) {
		return
	}
	second := r.clock().Unix()
	r.mu.Lock()
	defer r.mu.Unlock()
	r.total.add(d)
	p := &r.points[uint64(second)%pointSeconds]
	if p.second != second {
		*p = point{second: second, key: "point/" + strconv.FormatInt(second, 10)}
	}
	p.counts.add(d)
	p.body = nil
	if r.last == nil || r.name != m.Source {
		r.last, r.name = r.sources[m.Source], m.Source
		if r.last == nil {
			r.last = new(sourceRates)
			r.sources[m.Source] = r.last
		}
	}
	r.last.total.add(d)
	slot := &r.last.ring[uint64(second)%rateRing]
	if slot.second != second {
		slot.second, slot.counts = second, Counts{}
	}
	slot.counts.add(d)
}

func count(m *event.Message) (c Counts) {
	for i := range m.Batches {
		for j := range m.Batches[i].Events {
			ev := &m.Batches[i].Events[j]
			switch ev.Kind {
			case event.Stored:
				for k := range ev.Blocks {
					if ev.Blocks[k].Effect > 0 {
						c.Stored++
					}
				}
			case event.Evicted:
				for k := range ev.Blocks {
					if ev.Blocks[k].Effect < 0 {
						c.Evicted++
					}
				}
			case event.Loaded:
				c.Loaded += uint64(len(ev.Blocks))
			}
		}
	}
	return c
}

// Total returns what the fleet did.
func (r *Rates) Total() Counts {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.total
}

// Source returns what one source did, and how fast it did so over the last five whole seconds; the one under way is not
// among them, so that a rate does not fall at the start of each second.
func (r *Rates) Source(s event.Source) (Counts, PerSecond) {
	now := r.clock().Unix()
	r.mu.Lock()
	defer r.mu.Unlock()
	src := r.sources[s]
	if src == nil {
		return Counts{}, PerSecond{}
	}
	var sum Counts
	for i := range src.ring {
		if slot := &src.ring[i]; slot.second >= now-rateSeconds && slot.second < now {
			sum.add(slot.counts)
		}
	}
	return src.total, PerSecond{
		Stored: float64(sum.Stored) / rateSeconds, Evicted: float64(sum.Evicted) / rateSeconds, Loaded: float64(sum.Loaded) / rateSeconds,
	}
}

// Points is the panel of the fleet's seconds: a document point/SECOND, in Unix time, for each of the last 300 that had
// events, the one under way included.
func (r *Rates) Points() Panel {
	return Panel{Collect: func(now time.Time, put func(key string, doc any)) {
		for _, p := range r.recent(now.Unix()) {
			put(p.key, p.body)
		}
	}}
}

// recent returns the seconds with events of the 300 that end with now, in no order.
func (r *Rates) recent(now int64) []point {
	r.mu.Lock()
	defer r.mu.Unlock()
	recent := make([]point, 0, pointSeconds)
	for i := range r.points {
		p := &r.points[i]
		if p.second <= now-pointSeconds || p.second > now || p.key == "" {
			continue
		}
		if p.body == nil {
			p.body = p.counts.json()
		}
		recent = append(recent, *p)
	}
	return recent
}

// json is what json.Marshal gives, without its cost: the point under way is made anew ten times a second.
func (c Counts) json() json.RawMessage {
	b := append(make([]byte, 0, 64), `{"stored":`...)
	b = strconv.AppendUint(b, c.Stored, 10)
	b = append(b, `,"evicted":`...)
	b = strconv.AppendUint(b, c.Evicted, 10)
	b = append(b, `,"loaded":`...)
	b = strconv.AppendUint(b, c.Loaded, 10)
	return append(b, '}')
}
