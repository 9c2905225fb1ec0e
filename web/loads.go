package web

import (
	"cmp"
	"container/list"
	"math"
	"slices"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"kvstrata/event"
)

const (
	loadSeconds = 10 // whole ones that rates and latencies of loads are over
	loadRing    = loadSeconds + 1
	slowSeconds = 60 // that the slowest loads are of, the one under way included
	slowLoads   = 10
	shownPairs  = 200 // in the document
	maxLoadName = 200 // bytes of a peer's, tier's or request's name that are kept
	longestLoad = 24 * time.Hour
	cut         = "…" // where a name goes on
)

// DefaultPairs is how many pairs [Loads] keep: a few megabytes.
const DefaultPairs = 512

// Loads tell how blocks travel: what the connectors' LOADED events say of the loads of the last ten seconds and since it
// was made, of the fleet and of each pair of where blocks came from and where they went; the fleet's last 300 seconds one
// by one; and the slowest loads of the last minute. As with [Rates], a load counts in the second in which it is observed.
//
// A LOADED is a load; of one of which not all blocks came, each whole run of those that came is. Latencies are counted in
// histograms of fixed size, so that a quantile is up to an eighth too high; a maximum is exact. A duration of zero, or of
// more than a day, is taken as not told.
//
// What it keeps is bounded whatever names it hears: pairs by their number, where the one without a load for longest is
// forgotten for a new one; the slowest loads by ten a second; names by their length.
//
// Observe is called from one goroutine; the panel from any.
type Loads struct {
	clock func() time.Time
	most  int // pairs

	mu        sync.Mutex
	fleet     loadStats
	seconds   [pointSeconds + 1]loadSecond // and the one under way
	slow      [slowSeconds]slowSecond
	pairs     map[pairKey]*list.Element // of *pair
	recent    *list.List                // of *pair, the one with the newest load first
	forgotten uint64
}

// pairKey is where blocks come from and where they go.
type pairKey struct {
	peer string // an engine's instance, or a store's name; empty: not told
	from event.Tier
	to   event.Source
	tier event.Tier
}

type pair struct {
	key   pairKey
	stats loadStats
}

// loadStats are the loads of the fleet or of a pair.
type loadStats struct {
	total tally
	last  time.Time // of the newest load; zero: none
	ring  [loadRing]loadSlot
}

// loadSlot is one second.
type loadSlot struct {
	second int64
	tally
	latencies histogram
}

// tally is what loads moved, and of those that told their duration: how many, what they moved, how long that took, and how
// long at most.
type tally struct {
	loads, blocks, bytes uint64
	timed, timedBytes    uint64
	ran                  uint64 // nanoseconds
	longest              time.Duration
}

func (t *tally) add(d *tally) {
	t.loads += d.loads
	t.blocks += d.blocks
	t.bytes = addUpTo(t.bytes, d.bytes)
	t.timed += d.timed
	t.timedBytes = addUpTo(t.timedBytes, d.timedBytes)
	t.ran = addUpTo(t.ran, d.ran)
	t.longest = max(t.longest, d.longest)
}

// addUpTo adds what others may have made up: a sum stays at its greatest value rather than begin anew.
func addUpTo(a, b uint64) uint64 {
	if sum := a + b; sum >= a {
		return sum
	}
	return math.MaxUint64
}

type loadSecond struct {
	second int64
	bytes  uint64
}

// slowSecond holds the slowest loads of a second, the slowest first.
type slowSecond struct {
	second int64
	n      int
	loads  [slowLoads]slowLoad
}

type slowLoad struct {
	pairKey
	at       time.Time
	request  string
	blocks   int
	bytes    uint64
	duration time.Duration
}

// NewLoads returns loads without events. clock tells the time of an Observe, pairs how many pairs are kept.
func NewLoads(clock func() time.Time, pairs int) *Loads {
	return &Loads{clock: clock, most: max(pairs, 1), pairs: make(map[pairKey]*list.Element), recent: list.New()}
}

// Observe counts a message's loads. The message is not kept. Each batch is to be observed once.
func (l *Loads) Observe(m *event.Message) {
	if !tellsLoads(m) {
		return
	}
	now := l.clock()
	l.mu.Lock()
	defer l.mu.Unlock()
	for i := range m.Batches {
		for j := range m.Batches[i].Events {
			if ev := &m.Batches[i].Events[j]; ev.Kind == event.Loaded {
				l.observe(m.Source, ev, now)
			}
		}
	}
}

func tellsLoads(m *event.Message) bool {
	for i := range m.Batches {
		for j := range m.Batches[i].Events {
			if m.Batches[i].Events[j].Kind == event.Loaded {
				return true
			}
		}
	}
	return false
}

// observe counts a load. The lock is held.
func (l *Loads) observe(to event.Source, ev *event.Event, now time.Time) {
	t := tally{loads: 1, blocks: uint64(len(ev.Blocks)), bytes: ev.Load.Bytes}
	if d := ev.Load.Duration; d > 0 && d <= longestLoad {
		t.timed, t.timedBytes, t.ran, t.longest = 1, t.bytes, uint64(d), d
	}
	key := pairKey{
		peer: shortened(ev.Load.Peer), from: event.Tier(shortened(string(ev.Load.From))), to: to, tier: event.Tier(shortened(string(ev.Tier))),
	}
	l.fleet.count(&t, now)
	l.pair(key).count(&t, now)
	s := &l.seconds[uint64(now.Unix())%(pointSeconds+1)]
	if s.second != now.Unix() {
		*s = loadSecond{second: now.Unix()}
	}
	s.bytes = addUpTo(s.bytes, t.bytes)
	if t.timed > 0 {
		slow := &l.slow[uint64(now.Unix())%slowSeconds]
		if slow.second != now.Unix() {
			*slow = slowSecond{second: now.Unix()}
		}
		slow.offer(key, ev, now)
	}
}

// pair returns a pair's loads; for one that is new, and has no room, the one without a load for longest is forgotten.
func (l *Loads) pair(key pairKey) *loadStats {
	if e := l.pairs[key]; e != nil {
		l.recent.MoveToFront(e)
		return &e.Value.(*pair).stats
	}
	key = key.clone()
	if len(l.pairs) < l.most {
		p := &pair{key: key}
		l.pairs[key] = l.recent.PushFront(p)
		return &p.stats
	}
	e := l.recent.Back()
	p := e.Value.(*pair)
	delete(l.pairs, p.key)
	l.forgotten++
	*p = pair{key: key}
	l.recent.MoveToFront(e)
	l.pairs[key] = e
	return &p.stats
}

// clone returns a key that holds no memory of a message.
func (k pairKey) clone() pairKey {
	k.peer, k.from, k.tier = strings.Clone(k.peer), event.Tier(strings.Clone(string(k.from))), event.Tier(strings.Clone(string(k.tier)))
	return k
}

func (s *loadStats) count(t *tally, now time.Time) {
	s.total.add(t)
	s.last = now
	slot := &s.ring[uint64(now.Unix())%loadRing]
	if slot.second != now.Unix() {
		*slot = loadSlot{second: now.Unix()}
	}
	slot.add(t)
	if t.timed > 0 {
		slot.latencies.count(t.longest)
	}
}

// offer keeps a load if it is among the slowest of its second.
func (s *slowSecond) offer(key pairKey, ev *event.Event, now time.Time) {
	at := s.n
	for at > 0 && s.loads[at-1].duration < ev.Load.Duration {
		at--
	}
	if at == slowLoads {
		return
	}
	s.n = min(s.n+1, slowLoads)
	copy(s.loads[at+1:s.n], s.loads[at:s.n-1])
	s.loads[at] = slowLoad{
		pairKey: key.clone(), at: now, request: strings.Clone(shortened(ev.Load.Request)), blocks: len(ev.Blocks), bytes: ev.Load.Bytes,
		duration: ev.Load.Duration,
	}
}

// shortened returns a name of bounded length.
func shortened(name string) string {
	if len(name) <= maxLoadName {
		return name
	}
	end := maxLoadName - len(cut)
	for end > 0 && !utf8.RuneStart(name[end]) {
		end--
	}
	return name[:end] + cut
}

// loadsDoc is the document "loads".
type loadsDoc struct {
	Window int `json:"window_seconds"`
	loadsTold
	Pairs     []pairDoc     `json:"pairs"`
	More      int           `json:"more"`
	Forgotten uint64        `json:"forgotten"`
	Slowest   []slowDoc     `json:"slowest"`
	Seconds   loadedSeconds `json:"seconds"`
}

// loadsTold is what is told of the fleet and of each pair.
type loadsTold struct {
	Loads   uint64       `json:"loads"`
	Blocks  uint64       `json:"blocks"`
	Bytes   uint64       `json:"bytes"`
	Last    int64        `json:"last,omitempty"`
	Rate    loadRate     `json:"rate"`
	Latency *loadLatency `json:"latency_ms,omitempty"`
	Speed   uint64       `json:"speed,omitempty"`
}

// loadRate is a second's share of the window.
type loadRate struct {
	Loads  float64 `json:"loads"`
	Blocks float64 `json:"blocks"`
	Bytes  float64 `json:"bytes"`
}

type loadLatency struct {
	P50 float64 `json:"p50"`
	P99 float64 `json:"p99"`
	Max float64 `json:"max"`
}

// loadWay is where blocks came from and went.
type loadWay struct {
	From     string     `json:"from"`
	FromTier event.Tier `json:"from_tier"`
	To       string     `json:"to"`
	ToTier   event.Tier `json:"to_tier"`
	ID       string     `json:"id"` // of the source that told it
}

type pairDoc struct {
	loadWay
	loadsTold
}

type slowDoc struct {
	loadWay
	Time     int64   `json:"time"`
	Request  string  `json:"request"`
	Blocks   int     `json:"blocks"`
	Bytes    uint64  `json:"bytes"`
	Duration float64 `json:"duration_ms"`
}

// loadedSeconds are the bytes of each second from the first to the last that had any.
type loadedSeconds struct {
	First int64    `json:"first"`
	Bytes []uint64 `json:"bytes"`
}

// Panel is the document "loads", once a second.
func (l *Loads) Panel() Panel {
	return Panel{Every: time.Second, Collect: func(now time.Time, put func(key string, doc any)) {
		put("loads", l.document(now.Unix()))
	}}
}

func (l *Loads) document(now int64) *loadsDoc {
	l.mu.Lock()
	defer l.mu.Unlock()
	doc := &loadsDoc{
		Window: loadSeconds, loadsTold: l.fleet.told(now), Pairs: make([]pairDoc, 0, len(l.pairs)), Forgotten: l.forgotten,
		Slowest: l.slowest(now), Seconds: l.bySecond(now),
	}
	for e := l.recent.Front(); e != nil; e = e.Next() {
		p := e.Value.(*pair)
		doc.Pairs = append(doc.Pairs, pairDoc{p.key.way(), p.stats.told(now)})
	}
	// Stable: what moved as much goes by its newest load.
	slices.SortStableFunc(doc.Pairs, func(a, b pairDoc) int { return cmp.Compare(b.Rate.Bytes, a.Rate.Bytes) })
	if more := len(doc.Pairs) - shownPairs; more > 0 {
		doc.Pairs, doc.More = doc.Pairs[:shownPairs], more
	}
	return doc
}

func (k *pairKey) way() loadWay {
	return loadWay{From: k.peer, FromTier: k.from, To: k.to.Instance, ToTier: k.tier, ID: k.to.Tokens()}
}

// told sums the last ten whole seconds; the one under way is not among them.
func (s *loadStats) told(now int64) loadsTold {
	var sum tally
	var latencies histogram
	for i := range s.ring {
		if slot := &s.ring[i]; slot.second >= now-loadSeconds && slot.second < now && slot.loads > 0 {
			sum.add(&slot.tally)
			latencies.add(&slot.latencies)
		}
	}
	told := loadsTold{
		Loads: s.total.loads, Blocks: s.total.blocks, Bytes: s.total.bytes,
		Rate: loadRate{
			Loads: float64(sum.loads) / loadSeconds, Blocks: float64(sum.blocks) / loadSeconds, Bytes: float64(sum.bytes) / loadSeconds,
		},
	}
	if !s.last.IsZero() {
		told.Last = s.last.UnixMilli()
	}
	if sum.timed > 0 {
		told.Latency = &loadLatency{
			P50: milliseconds(min(latencies.quantile(0.5), sum.longest)), P99: milliseconds(min(latencies.quantile(0.99), sum.longest)),
			Max: milliseconds(sum.longest),
		}
		told.Speed = uint64(min(float64(sum.timedBytes)/(float64(sum.ran)/1e9), math.MaxInt64))
	}
	return told
}

// milliseconds tells a duration to the microsecond.
func milliseconds(d time.Duration) float64 { return math.Round(float64(d)/1e3) / 1e3 }

// slowest returns the slowest loads of the last minute, the slowest first, and of equals the oldest.
func (l *Loads) slowest(now int64) []slowDoc {
	var all []*slowLoad
	for second := now - slowSeconds + 1; second <= now; second++ {
		if s := &l.slow[uint64(second)%slowSeconds]; s.second == second {
			for i := range s.n {
				all = append(all, &s.loads[i])
			}
		}
	}
	slices.SortStableFunc(all, func(a, b *slowLoad) int { return cmp.Compare(b.duration, a.duration) })
	docs := make([]slowDoc, 0, slowLoads)
	for _, s := range all[:min(len(all), slowLoads)] {
		docs = append(docs, slowDoc{
			loadWay: s.way(), Time: s.at.UnixMilli(), Request: s.request, Blocks: s.blocks, Bytes: s.bytes, Duration: milliseconds(s.duration),
		})
	}
	return docs
}

// bySecond returns the bytes of the last 300 whole seconds, without the empty ones at either end.
func (l *Loads) bySecond(now int64) loadedSeconds {
	s := loadedSeconds{Bytes: []uint64{}}
	for second := now - pointSeconds; second < now; second++ {
		var bytes uint64
		if at := &l.seconds[uint64(second)%(pointSeconds+1)]; at.second == second {
			bytes = at.bytes
		}
		switch {
		case bytes > 0 && len(s.Bytes) == 0:
			s.First = second
			fallthrough
		case len(s.Bytes) > 0:
			s.Bytes = append(s.Bytes, bytes)
		}
	}
	for len(s.Bytes) > 0 && s.Bytes[len(s.Bytes)-1] == 0 {
		s.Bytes = s.Bytes[:len(s.Bytes)-1]
	}
	return s
}
