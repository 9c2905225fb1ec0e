package recovery_test

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"pgregory.net/rapid"

	"kvstrata/event"
	"kvstrata/event/resident"
	"kvstrata/subscriber/recovery"
)

// copies counts the copies of blocks by hash and tier.
type copies map[string]uint32

func (c copies) apply(events []event.Event) copies {
	c = maps.Clone(c)
	for _, ev := range events {
		for _, b := range ev.Blocks {
			at := fmt.Sprintf("%v/%s", b.Hash, ev.Tier)
			if ev.Kind == event.Stored {
				c[at]++
			} else if c[at]--; c[at] == 0 {
				delete(c, at)
			}
		}
		if ev.Kind == event.Cleared {
			clear(c)
		}
	}
	return c
}

func (c copies) total() (n uint32) {
	for _, copies := range c {
		n += copies
	}
	return n
}

// within reports whether nothing is counted that there is not.
func (c copies) within(there copies) bool {
	for at, n := range c {
		if n > there[at] {
			return false
		}
	}
	return true
}

func of(s *resident.Set) copies {
	c := make(copies)
	for e := range s.Resident() {
		c[fmt.Sprintf("%v/%s", e.Hash, e.Tier)] = e.Copies
	}
	return c
}

// life is one life of the engine: what it published, what was resident after each batch, and what a judge makes of it who
// has heard it all. Two never send the same bytes, since each batch has the engine's clock in it.
type life struct {
	frames []recovery.Frame
	events [][]event.Event
	bad    []bool // not to be decoded
	after  []copies
	judge  *resident.Set
	judged [][]event.Event
	oldest int // first batch that replays still have
}

func newLife() *life { return &life{judge: resident.New(resident.DefaultConfig())} }

func (l *life) now() copies {
	if len(l.after) == 0 {
		return copies{}
	}
	return l.after[len(l.after)-1]
}

func (l *life) publish(f recovery.Frame, events []event.Event, bad bool) {
	l.frames, l.events, l.bad = append(l.frames, f), append(l.events, events), append(l.bad, bad)
	l.after = append(l.after, l.now().apply(events))
	b := event.Batch{First: f.Seq, Last: f.Seq, Time: f.Time, Events: cloneEvents(events)}
	l.judge.Judge(&b)
	l.judged = append(l.judged, cloneEvents(b.Events))
}

func cloneEvents(events []event.Event) []event.Event {
	c := slices.Clone(events)
	for i := range c {
		c[i].Blocks = slices.Clone(c[i].Blocks)
	}
	return c
}

const (
	blockSize = 16
	chains    = 3
	depth     = 4
)

// draw draws what an engine does in one step, to what it holds: blocks of short chains stored, some twice, evicted, or all
// cleared.
func draw(t *rapid.T, now copies) []event.Event {
	if rapid.IntRange(0, 24).Draw(t, "clear") == 0 {
		return []event.Event{{Kind: event.Cleared, Cause: event.ByEngine, Group: event.NoGroup, LoRAID: event.NoLoRAID}}
	}
	if at := slices.Sorted(maps.Keys(now)); len(at) > 0 && rapid.IntRange(0, 2).Draw(t, "evict") == 0 {
		hash, tier, _ := strings.Cut(rapid.SampledFrom(at).Draw(t, "block"), "/")
		for c := range uint64(chains) {
			for d := range uint64(depth) {
				if h := event.IntHash(100*c + d + 1); fmt.Sprint(h) == hash {
					return []event.Event{{
						Kind: event.Evicted, Tier: event.Tier(tier), Group: event.NoGroup, LoRAID: event.NoLoRAID,
						Blocks: []event.Block{{Hash: h, Copies: -1, Age: -1}},
					}}
				}
			}
		}
	}
	c, d := rapid.Uint64Range(0, chains-1).Draw(t, "chain"), rapid.Uint64Range(0, depth-1).Draw(t, "depth")
	ev := event.Event{
		Kind: event.Stored, Tier: rapid.SampledFrom([]event.Tier{event.GPU, event.GPU, event.CPU}).Draw(t, "tier"), Group: event.NoGroup,
		LoRAID: event.NoLoRAID, BlockSize: blockSize, HasParent: d > 0, Parent: event.IntHash(100*c + d),
		Blocks: []event.Block{{Hash: event.IntHash(100*c + d + 1), Copies: -1, Age: -1}},
	}
	if d == 0 {
		ev.Parent = event.BlockHash{}
	}
	for i := range uint32(blockSize) {
		ev.Tokens = append(ev.Tokens, uint32(c*1000+d*blockSize)+i)
	}
	return []event.Event{ev}
}

// message is what the subscriber sent into the stream.
type message struct {
	fence   event.Fence
	epoch   event.Epoch
	batches []event.Batch
	status  *event.Status
	life    int // whose the batches are
}

// nobody is the life of a range that was given up.
const nobody = -1

// kept is a checkpoint, and how much of the stream it has.
type kept struct {
	object []byte
	stream int
}

// trouble is what may befall.
type trouble struct {
	replay bool // the engine has a replay endpoint
	deaf   bool // and it may be silent for long
	moves  bool // its buffer may be short
	broken bool // batches may be malformed, or missing at the engine
	proxy  bool // it may restart without its connection breaking
	fills  bool // the size of its pool is known
	drops  bool // the stream may refuse what we send
	late   bool // a subscriber that lost its lease may get something in afterwards
}

// world is an engine, the network, the stream, and a subscriber that is killed now and then.
type world struct {
	t   *rapid.T
	cfg recovery.Config
	trouble
	now   time.Time
	skew  time.Duration // the engine's clock
	lives []*life
	lossy bool
	link  bool             // the live socket is connected
	pipe  []recovery.Frame // live frames under way
	heard []recovery.Frame // on this connection
	reply []recovery.Frame // frames of the running reply that are still to come
	end   bool             // its end marker will come
	asks  int
	log   []string

	// The subscriber.
	m      *recovery.Machine
	set    *resident.Set
	ledger event.Ledger
	epoch  event.Epoch
	epochs event.Epoch // given so far
	past   []event.PastLife
	fence  event.Fence
	kill   int // actions until it is killed; −1: not now

	// The bus.
	stream      []message
	stored      int // messages that no crash takes back
	checkpoints []kept
	follower    *resident.Set
	followed    int
	at          event.Epoch // the follower's
	next        event.Seq
	began       bool
	ruler       event.Fence // the highest it has seen
	holed       bool        // it misses something of this life
	dropped     bool        // something was dropped, in whatever life
	rewound     bool        // an older checkpoint was read than there was

	// What became of the truth in the present epoch.
	owner  int  // life of the last batch applied
	motley bool // batches of several lives are in it
	mixed  bool // lives are mixed under an epoch that is marked unproved
	empty  bool // the last batch left nothing resident
	lost   bool // something was lost, or never known
}

func newWorld(t *rapid.T, tr trouble, maxHeld int) *world {
	w := &world{
		t: t, trouble: tr, cfg: recovery.DefaultConfig(), now: time.Unix(1e6, 0), lossy: true, lives: []*life{newLife()}, kill: -1, owner: nobody,
		set: resident.New(resident.DefaultConfig()), follower: resident.New(resident.Config{}),
	}
	w.cfg.Replay, w.cfg.MaxHeld = tr.replay, maxHeld
	w.boot()
	return w
}

// fatalf fails with the last steps told.
func (w *world) fatalf(format string, args ...any) {
	w.t.Helper()
	w.t.Fatalf(format+"\n%+v\n%s", append(args, w.trouble, strings.Join(w.log[max(0, len(w.log)-100):], "\n"))...)
}

func (w *world) logf(format string, args ...any) { w.log = append(w.log, fmt.Sprintf(format, args...)) }

func (w *world) life() *life { return w.lives[len(w.lives)-1] }

// named returns a frame for the log.
func (w *world) named(f recovery.Frame) string {
	return fmt.Sprintf("%d of life %d", f.Seq, f.Payload>>32)
}

func (w *world) step() {
	steps := []string{
		"publish", "publish", "publish", "lose", "deliver", "deliver", "deliver", "reply", "reply", "reply", "tick", "long",
		"link", "restart", "clock", "store", "checkpoint", "crash",
	}
	// A PUB socket sends each message once to a connection, and in order, so that these can only come from something between. Where
	// no replay answers, order is all there is to tell one life from the next.
	if w.replay && !w.deaf {
		steps = append(steps, "repeat", "reorder")
	}
	if w.moves {
		steps = append(steps, "forget")
	}
	if w.broken {
		steps = append(steps, "hole", "malformed")
	}
	switch rapid.SampledFrom(steps).Draw(w.t, "step") {
	case "publish":
		w.pipe = append(w.pipe, w.publish(false)...)
	case "lose":
		w.publish(false)
	case "malformed":
		w.pipe = append(w.pipe, w.publish(true)...)
	case "hole":
		w.hole()
	case "repeat":
		if n := len(w.heard); n > 0 {
			// A connection keeps the order of lives.
			f := w.heard[max(0, n-1-rapid.IntRange(0, 3).Draw(w.t, "back"))]
			if before := append(w.heard, w.pipe...); before[len(before)-1].Payload>>32 == f.Payload>>32 && before[len(before)-1].Seq <= f.Seq+3 {
				w.pipe = append(w.pipe, f)
			}
		}
	case "reorder":
		// Two of one connection; which of them is the later one is told by their times.
		if n := len(w.pipe); n > 1 && w.pipe[n-2].Seq+1 == w.pipe[n-1].Seq && w.pipe[n-2].Payload>>32 == w.pipe[n-1].Payload>>32 {
			w.pipe[n-1], w.pipe[n-2] = w.pipe[n-2], w.pipe[n-1]
		}
	case "deliver":
		w.deliver()
	case "reply":
		w.answer()
	case "tick":
		w.pass(300 * time.Millisecond)
	case "long":
		w.pass(6 * time.Second)
	case "link":
		w.connect(!w.link)
	case "restart":
		if rapid.IntRange(0, 2).Draw(w.t, "rarely") == 0 {
			w.restart()
		}
	case "forget":
		// The newest that it could encode it still has.
		l, newest := w.life(), 0
		for i, f := range l.frames {
			if f.Data != nil {
				newest = i
			}
		}
		if rapid.IntRange(0, 2).Draw(w.t, "rarely") == 0 {
			l.oldest = rapid.IntRange(l.oldest, max(l.oldest, newest)).Draw(w.t, "oldest")
		}
	case "clock":
		w.skew += time.Duration(rapid.SampledFrom([]int{10, 3600, -10, -3600}).Draw(w.t, "set")) * time.Second
		w.logf("clock set to %v off", w.skew)
	case "store":
		w.stored = len(w.stream)
	case "checkpoint":
		w.checkpoint()
	case "crash":
		if rapid.IntRange(0, 2).Draw(w.t, "rarely") == 0 {
			w.kill = rapid.IntRange(0, 6).Draw(w.t, "kill")
			if w.kill == 0 {
				w.crash()
			}
		}
	}
}

func (w *world) frame() recovery.Frame {
	l := w.life()
	w.now = w.now.Add(time.Millisecond)
	return recovery.Frame{
		Seq: event.Seq(len(l.frames)), Time: event.UnixTime(w.now.Add(w.skew)), Payload: uint64(len(w.lives)-1)<<32 | uint64(len(l.frames)),
		Data: []byte("batch"),
	}
}

// publish lets the engine publish; what it sends is returned, if there is a socket to send it to.
func (w *world) publish(bad bool) []recovery.Frame {
	l, f := w.life(), w.frame()
	l.publish(f, draw(w.t, l.now()), bad)
	if !w.link {
		return nil
	}
	return []recovery.Frame{f}
}

// hole lets the engine count a batch that it fails to encode: no replay will have it, though it changed something.
func (w *world) hole() {
	l, f := w.life(), w.frame()
	f.Data = nil
	l.publish(f, draw(w.t, l.now()), true)
}

func (w *world) deliver() {
	if len(w.pipe) == 0 {
		return
	}
	f := w.pipe[0]
	w.pipe = w.pipe[1:]
	w.live(f)
}

func (w *world) live(f recovery.Frame) {
	w.logf("live %s", w.named(f))
	w.heard = append(w.heard, f)
	w.act(w.m.Live(w.now, f))
}

// pass lets time pass. Only an engine that is deaf lets a replay run out.
func (w *world) pass(d time.Duration) {
	for !w.deaf && d >= w.cfg.ReplayTimeout && w.answering() {
		w.answer()
	}
	w.now = w.now.Add(d)
	w.logf("tick %v", d)
	w.act(w.m.Tick(w.now))
}

func (w *world) connect(up bool) {
	w.logf("connected: %v", up)
	w.heard = nil
	if w.link = up; up {
		w.act(w.m.Connected(w.now))
	} else {
		w.act(w.m.Disconnected(w.now))
	}
}

// restart ends a life. The connection breaks, but through a proxy; what lay in the socket may still be read afterwards,
// and replays may be answered before the live socket is back.
func (w *world) restart() {
	state, _ := w.m.State(w.now)
	calm := w.link && state == event.StateLive && w.owner == len(w.lives)-1 && len(w.pipe) == 0
	proxy := w.proxy && calm && rapid.Bool().Draw(w.t, "proxy")
	if !proxy {
		w.connect(false)
	}
	w.now = w.now.Add(50 * time.Millisecond)
	l := newLife()
	w.lives = append(w.lives, l)
	w.logf("restart: life %d", len(w.lives)-1)
	w.reply, w.end = nil, false
	if proxy { // the first frame that comes must be one that tells
		w.heard = nil
		w.pipe = w.publish(false)
		w.deliver()
		return
	}
	w.pipe = w.pipe[:rapid.IntRange(0, len(w.pipe)).Draw(w.t, "left behind")]
	if !w.replay {
		// libzmq connects again after 100 ms; the loop has read the socket by then. Where a replay answers it need not have.
		w.pipe = nil
	}
	for range rapid.IntRange(0, 5).Draw(w.t, "head start") {
		w.publish(false)
	}
	for range rapid.IntRange(0, 3).Draw(w.t, "away") {
		w.pass(6 * time.Second)
		w.answer()
	}
	w.connect(true)
}

// answer delivers the next piece of the running reply.
func (w *world) answer() {
	switch {
	case len(w.reply) > 0:
		f := w.reply[0]
		w.logf("replay %s", w.named(f))
		w.reply = w.reply[1:]
		w.act(w.m.Replayed(w.now, f))
	case w.end:
		w.logf("end")
		w.end = false
		w.act(w.m.ReplayEnd(w.now))
	}
}

func (w *world) answering() bool { return len(w.reply) > 0 || w.end }

// ask makes the reply: everything from a sequence on that is still there; while the world is lossy, with holes, and where
// the engine is deaf, without an end or not at all.
func (w *world) ask(from event.Seq) {
	if w.asks++; w.asks > 20_000 {
		w.fatalf("the machine asks for ever")
	}
	w.reply, w.end = nil, true
	if w.lossy && w.deaf && rapid.IntRange(0, 3).Draw(w.t, "dead") == 0 {
		w.end = false
		return
	}
	l := w.life()
	last, known := w.m.Last()
	for i := max(int(min(from, 1<<30)), l.oldest); i < len(l.frames); i++ {
		// A router drops what exceeds its high-water mark of 1,000, so never the first; what proves a life is one of the last 64 batches.
		if w.lossy && len(w.reply) > 1 && (!known || i > int(last)+1) && rapid.IntRange(0, 4).Draw(w.t, "short") == 0 {
			continue
		}
		if l.frames[i].Data != nil {
			w.reply = append(w.reply, l.frames[i])
		}
	}
	if w.lossy && w.deaf {
		w.end = rapid.IntRange(0, 4).Draw(w.t, "end") > 0
	}
}

// settle ends the trouble, and gives the machine so many steps to come to rest.
func (w *world) settle() {
	w.logf("the trouble ends")
	w.lossy, w.kill = false, -1
	if !w.link {
		w.connect(true)
	}
	w.pipe = append(w.pipe, w.publish(false)...)
	rest := func() {
		for n := 0; len(w.pipe) > 0 || w.answering(); n++ {
			if n > 20_000 {
				w.fatalf("no rest")
			}
			w.answer()
			w.deliver()
		}
	}
	for range 30 {
		rest()
		w.pass(6 * time.Second)
	}
	for range 4 {
		w.pipe = append(w.pipe, w.publish(false)...)
	}
	rest()
	for range 8 { // a proof may come late
		w.pass(6 * time.Second)
		rest()
	}
	w.stored = len(w.stream)
	w.checkpoint()
	w.check()

	state, reason := w.m.State(w.now)
	last, known := w.m.Last()
	l := w.life()
	unproved := strings.HasPrefix(reason, "same life")
	switch {
	case !known || int(last) != len(l.frames)-1 || w.owner != len(w.lives)-1:
		w.fatalf("at rest: %v (%s) at %d of life %d; want %d of life %d", state, reason, last, w.owner, len(l.frames)-1, len(w.lives)-1)
	case state == event.StateLive:
	case state != event.StatePartial || !w.lost && !unproved:
		w.fatalf("at rest: %v (%s), and nothing was lost", state, reason)
	case w.replay && !w.deaf && !w.moves && !w.broken && w.cfg.MaxHeld > 100:
		w.fatalf("at rest: %v (%s), and replay covers everything", state, reason)
	case unproved && w.replay && !w.moves && !strings.Contains(reason, "no longer"):
		w.fatalf("at rest: %v (%s), and replay could prove it", state, reason)
	}
}
