package connectortest

import (
	"fmt"
	"runtime"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"kvstrata/connector"
	"kvstrata/event"
)

// Run runs the contract over a transport.
func Run(t *testing.T, rig Rig) {
	always := true
	for _, test := range []struct {
		name  string
		holds bool // for transports like this
		run   func(*testing.T, Rig)
	}{
		{"round trip", always, roundTrip},
		{"nothing is offered to whoever asks for nothing", always, nothingOffered},
		{"what is there already is not fetched", always, localPrefix},
		{"only the longest prefix is loaded", !rig.Direct, partialPresence},
		{"many requests at once", always, concurrent},
		{"a request is cancelled", !rig.Local, cancelled},
		{"a request is cancelled in the step that loads it", always, cancelledAtOnce},
		{"a request is preempted while it is saved", always, preempted},
		{"the peer dies", !rig.Local, peerDies},
		{"the peer is slow", !rig.Local, peerIsSlow},
		{"bytes are cut off", !rig.Local, truncated},
		{"bytes are corrupted", !rig.Local && !rig.Unchecked, corrupted},
		{"another model", always, anotherModel},
		{"another order of bytes", always, anotherOrder},
		{"the server starts again", !rig.Local, restarted},
		{"the store is full", !rig.Direct && !rig.Evicts, storeFull},
		{"ten thousand requests", always, tenThousand},
	} {
		if test.holds {
			t.Run(test.name, func(t *testing.T) { test.run(t, rig) })
		}
	}
}

// check wants a load to have brought so many tokens, every block of them right.
func (p *pair) check(l loaded, tokens int) {
	p.Helper()
	if l.matched != tokens || len(l.failed)+len(l.wrong) > 0 {
		p.Errorf("%d tokens were offered, want %d; failed blocks %v, wrong blocks %v", l.matched, tokens, l.failed, l.wrong)
	}
}

func roundTrip(t *testing.T, rig Rig) {
	p := newPair(t, rig, false, nil)
	const tokens = 40 * BlockTokens
	p.check(p.consumer.consume(p.hand("r", "a", tokens), "a", 0), tokens)
	p.check(p.consumer.consume(p.hand("s", "b", tokens+5), "b", 0), p.expect(tokens+5))
	settled(p.producer, p.consumer)

	// STORED is told by who saves, LOADED by who loads: every full block, under its names.
	var got, want [2][]connector.Name
	for _, ev := range append(p.producer.events, p.consumer.events...) {
		i := 0
		if ev.Kind == event.Loaded {
			i = 1
			if ev.Load.Bytes == 0 || ev.Load.Duration <= 0 || ev.Load.Peer == "" || ev.Load.Request == "" || ev.Tier != event.GPU {
				t.Errorf("LOADED says %+v, tier %q", ev.Load, ev.Tier)
			}
		} else if ev.Kind != event.Stored || ev.Locality != event.Remote || ev.Tier != event.Storage {
			t.Errorf("%v of tier %q, locality %v", ev.Kind, ev.Tier, ev.Locality)
		}
		for _, b := range ev.Blocks {
			got[i] = append(got[i], connector.Name{Hash: b.Hash, Prefix: b.Prefix})
		}
	}
	for _, prompt := range []string{"a", "b"} {
		for i := range tokens / BlockTokens {
			want[1] = append(want[1], nameOf(prompt, i))
		}
	}
	if !rig.Direct {
		want[0] = want[1]
	}
	if diff := cmp.Diff(want, got, cmp.AllowUnexported(event.BlockHash{})); diff != "" {
		t.Errorf("blocks stored, blocks loaded (-want +got):\n%s", diff)
	}
	bytes := uint64(0)
	for _, r := range p.consumer.records {
		if r.Kind != event.TransferLoaded || r.Duration <= 0 || r.Pieces == 0 || r.Ranks != 1 {
			t.Errorf("record %+v", r)
		}
		bytes += r.Bytes
	}
	moved := tokens + p.expect(tokens+5)
	if want := uint64((moved + BlockTokens - 1) / BlockTokens * p.consumer.cache.BlockBytes()); bytes != want {
		t.Errorf("%d bytes are recorded, want %d", bytes, want)
	}
}

func nothingOffered(t *testing.T, rig Rig) {
	p := newPair(t, rig, false, nil)
	p.check(p.consumer.consume(request("r", "never computed", 20*BlockTokens, nil), "", 0), 0)
	p.check(p.consumer.consume(request("short", "a", 3, nil), "", 0), 0)
	settled(p.producer, p.consumer)
}

func localPrefix(t *testing.T, rig Rig) {
	p := newPair(t, rig, false, nil)
	const tokens, computed = 40 * BlockTokens, 10 * BlockTokens // not at the edge of a group
	r := p.hand("r", "a", tokens)
	l, blocks := p.consumer.begin(r, computed)
	for i := range computed / BlockTokens { // others may be reading these: they must stay as they are
		p.consumer.fill(blocks[i], 42)
	}
	p.consumer.settle(r, "a", computed, &l)
	p.check(l, tokens-computed)
	for i := range computed / BlockTokens {
		if !p.consumer.holds(blocks[i], 42) {
			t.Errorf("block %d was there, and was written", i)
		}
	}
	p.consumer.finish(r, blocks, connector.EndStopped)

	// All of it there: nothing is fetched, and the producer lets go.
	all := p.hand("s", "b", tokens)
	if l := p.consumer.consume(all, "b", tokens); l.matched != 0 {
		t.Errorf("%d tokens are offered to who has all", l.matched)
	}
	settled(p.producer, p.consumer)
}

func partialPresence(t *testing.T, rig Rig) {
	p := newPair(t, rig, false, nil)
	const tokens = 40 * BlockTokens
	r := p.hand("r", "a", tokens)
	p.env.Remove(t, []connector.Name{nameOf("a", 4*GroupBlocks-1), nameOf("a", 6*GroupBlocks-1)})
	p.check(p.consumer.consume(r, "a", 0), 3*GroupBlocks*BlockTokens)

	// Gone between lookup and load: exactly those blocks fail.
	r = request("again", "a", tokens, nil)
	p.consumer.conn.Scheduler.NewRequest(r)
	var m connector.Match
	p.consumer.until("an answer", func() bool { m = p.consumer.conn.Scheduler.MatchedTokens(r, 0); return !m.Later })
	p.env.Remove(t, []connector.Name{nameOf("a", 2*GroupBlocks-1)})
	blocks := p.consumer.allocate(m.Tokens / BlockTokens)
	p.consumer.conn.Scheduler.UpdateAfterAlloc(r, blocks, 0, m.Tokens)
	l := loaded{matched: m.Tokens, blocks: blocks}
	p.consumer.settle(r, "a", 0, &l)
	if want := []int{4, 5, 6, 7}; !slices.Equal(l.failed, want) || len(l.wrong) > 0 {
		t.Errorf("failed blocks %v, want %v; wrong blocks %v", l.failed, want, l.wrong)
	}
	p.consumer.finish(r, blocks, connector.EndStopped)
	settled(p.producer, p.consumer)
	failed := 0
	for _, rec := range p.consumer.records {
		if rec.Kind == event.TransferFailed {
			failed += int(rec.Blocks)
		}
	}
	if failed != GroupBlocks {
		t.Errorf("%d blocks are recorded as failed, want %d", failed, GroupBlocks)
	}
}

func concurrent(t *testing.T, rig Rig) {
	p := newPair(t, rig, false, nil)
	p.together("r", 16, 12*BlockTokens+3)
	settled(p.producer, p.consumer)
}

// together has so many requests produced at once, and then consumed at once.
func (p *pair) together(prefix string, requests, tokens int) {
	p.Helper()
	type load struct {
		loaded
		request *connector.Request
	}
	loads := make([]load, requests)
	for i := range loads {
		id := fmt.Sprint(prefix, " ", i)
		loads[i].request = p.offer(id, id, tokens)
	}
	p.offered()
	for i := range loads {
		loads[i].loaded, _ = p.consumer.begin(loads[i].request, 0)
	}
	for i := range loads {
		l := &loads[i]
		p.consumer.settle(l.request, l.request.ID, 0, &l.loaded)
		p.check(l.loaded, p.expect(tokens))
		p.consumer.finish(l.request, l.blocks, connector.EndStopped)
	}
}

func cancelled(t *testing.T, rig Rig) {
	p := newPair(t, rig, true, nil)
	const tokens = 60 * BlockTokens
	r := p.hand("r", "a", tokens)
	hit := p.proxy.Break(Stall, 20_000)
	l, blocks := p.consumer.begin(r, 0)
	if l.matched != tokens {
		t.Fatalf("%d tokens are offered, want %d", l.matched, tokens)
	}
	<-hit
	p.consumer.finish(r, blocks, connector.EndAborted)
	if len(p.consumer.delayed) != 1 {
		t.Error("the blocks of a load that is under way were not kept")
	}
	p.consumer.until("the load ends", func() bool { return len(p.consumer.delayed) == 0 })
	for i, b := range blocks { // free now: nobody may write them any more
		p.consumer.fill(b, uint64(i))
	}
	p.proxy.CloseConnections(false) // whatever was under way comes or is lost now
	p.check(p.consumer.consume(p.hand("s", "b", tokens), "b", 0), tokens)
	for i, b := range blocks { // the second request had the blocks that were free before
		if !p.consumer.holds(b, uint64(i)) {
			t.Errorf("block %d was written after its load was cancelled", b)
		}
	}
	// A request that ends before it is given blocks.
	p.consumer.conn.Scheduler.NewRequest(p.hand("t", "c", tokens))
	p.consumer.finish(p.hand("u", "d", tokens), nil, connector.EndAborted)
}

// cancelledAtOnce has load and cancel travel in the same metadata: the load ends all the same.
func cancelledAtOnce(t *testing.T, rig Rig) {
	p := newPair(t, rig, false, nil)
	const tokens = 20 * BlockTokens
	r := p.hand("r", "a", tokens)
	p.consumer.conn.Scheduler.NewRequest(r)
	var m connector.Match
	p.consumer.until("an answer", func() bool { m = p.consumer.conn.Scheduler.MatchedTokens(r, 0); return !m.Later })
	blocks := p.consumer.allocate(m.Tokens / BlockTokens)
	p.consumer.conn.Scheduler.UpdateAfterAlloc(r, blocks, 0, m.Tokens)
	p.consumer.finish(r, blocks, connector.EndAborted)
	settled(p.consumer, p.producer) // the consumer tells the producer, whose lease would be long
}

// preempted takes a request's blocks while they may be being saved: once the step begins to compute, they are another's.
func preempted(t *testing.T, rig Rig) {
	p := newPair(t, rig, false, nil)
	const tokens = 8 * GroupBlocks * BlockTokens
	e, s := p.producer, p.producer.conn.Scheduler
	r := request("r", "a", tokens, nil)
	s.NewRequest(r)
	blocks := e.allocate(tokens / BlockTokens)
	s.UpdateAfterAlloc(r, blocks, 0, 0)
	for i, b := range blocks {
		e.fill(b, content("a", i))
	}
	e.step(&connector.Step{Scheduled: []connector.Scheduled{{Request: r, Blocks: blocks, Computed: tokens}}})
	out, err := e.conn.Step(t.Context(), &connector.Step{Preempted: []string{"r"}}, nil, func() error {
		for _, b := range blocks {
			e.fill(b, 42)
		}
		return nil
	})
	if err != nil || len(out.InvalidBlocks) > 0 {
		t.Fatalf("%v, invalid blocks %v", err, out.InvalidBlocks)
	}
	e.finish(r, blocks, connector.EndAborted)
	e.until("all blocks are free", func() bool { return len(e.free) == poolBlocks })
	// What is there of it is right.
	l := p.consumer.consume(request("again", "a", tokens, nil), "a", 0)
	if len(l.failed)+len(l.wrong) > 0 {
		t.Errorf("failed blocks %v, wrong blocks %v", l.failed, l.wrong)
	}
}

// broken loads a prompt through a fault, and wants some blocks to fail, and no block to be wrong.
func broken(t *testing.T, rig Rig, f Fault, after int) (*pair, loaded) {
	t.Helper()
	p := newPair(t, rig, true, nil)
	const tokens = 60 * BlockTokens
	r := p.hand("r", "a", tokens)
	hit := p.proxy.Break(f, after)
	l := p.consumer.consume(r, "a", 0)
	select {
	case <-hit:
	default:
		t.Error("the fault did not happen")
	}
	if l.matched > 0 && len(l.wrong) > 0 {
		t.Errorf("blocks %v are told as loaded and are wrong", l.wrong)
	}
	return p, l
}

// recovers wants the next request to go well.
func (p *pair) recovers() {
	p.Helper()
	const tokens = 20 * BlockTokens
	r := p.hand("next", "next", tokens)
	l := p.consumer.consume(r, "next", 0)
	p.check(l, tokens)
}

func peerDies(t *testing.T, rig Rig) {
	p := newPair(t, rig, true, nil)
	const tokens = 60 * BlockTokens
	r := p.hand("r", "a", tokens)
	// Every connection is cut, again and again: whatever is tried, nothing comes of it.
	l, blocks := p.consumer.begin(r, 0)
	p.proxy.CloseConnections(true)
	if l.matched == 0 {
		return // a lookup found nobody
	}
	p.consumer.settle(r, "a", 0, &l)
	if len(l.wrong) > 0 {
		t.Errorf("wrong blocks %v", l.wrong)
	}
	p.consumer.finish(r, blocks, connector.EndStopped)
	dead := p.hand("s", "b", tokens)
	if l := p.consumer.consume(dead, "b", 0); l.matched > 0 && len(l.failed) != len(l.blocks) {
		t.Errorf("from a dead peer %d of %d blocks failed", len(l.failed), len(l.blocks))
	}
}

func peerIsSlow(t *testing.T, rig Rig) {
	p, l := broken(t, rig, Stall, 30_000)
	if l.matched > 0 && len(l.failed) == 0 {
		t.Error("a peer that stopped sending: no block failed")
	}
	p.proxy.CloseConnections(false)
	p.recovers()
}

func truncated(t *testing.T, rig Rig) {
	p, _ := broken(t, rig, Cut, 50_000)
	p.recovers()
}

func corrupted(t *testing.T, rig Rig) {
	for _, after := range []int{40_000, 70_000, 100_000} {
		p, _ := broken(t, rig, Flip, after)
		p.recovers()
	}
}

func anotherModel(t *testing.T, rig Rig) {
	refused(t, rig, func(c *connector.Caches) { c.Model.Name = "another/model" })
}

func anotherOrder(t *testing.T, rig Rig) {
	refused(t, rig, func(c *connector.Caches) {
		for i := range c.Tensors { // head before token
			d := c.Tensors[i].Dims
			d[2], d[3] = connector.Dim{Axis: connector.AxisHead, Size: heads, Stride: BlockTokens * headSize * element},
				connector.Dim{Axis: connector.AxisToken, Size: BlockTokens, Stride: headSize * element}
		}
	})
}

// refused wants nothing to come to a consumer that is not like the producer.
func refused(t *testing.T, rig Rig, edit func(*connector.Caches)) {
	t.Helper()
	p := &pair{T: t, rig: rig, env: rig.Setup(t)}
	p.producer = newEngine(t, p.env, connector.Producer, "producer", "", nil)
	consumer, err := tryEngine(t, p.env, connector.Consumer, "consumer", "", edit)
	if err != nil {
		return // it refuses the caches themselves
	}
	p.consumer = consumer
	const tokens = 20 * BlockTokens
	l := p.consumer.consume(p.hand("r", "a", tokens), "a", 0)
	if l.matched > 0 && len(l.failed) != len(l.blocks) {
		t.Errorf("%d tokens are offered, and %d of %d blocks refused", l.matched, len(l.failed), len(l.blocks))
	}
	for _, ev := range p.consumer.events {
		t.Errorf("%v is told", ev.Kind)
	}
}

func restarted(t *testing.T, rig Rig) {
	p := newPair(t, rig, true, nil)
	const tokens = 60 * BlockTokens
	r := p.hand("r", "a", tokens)
	hit := p.proxy.Break(Stall, 60_000)
	l, blocks := p.consumer.begin(r, 0)
	if l.matched == 0 {
		t.Fatal("nothing is offered")
	}
	<-hit
	if p.env.Restart != nil {
		p.env.Restart(t)
	} else { // the producer's engine starts again
		p.producer.stop()
		p.producer = newEngine(t, p.env, connector.Producer, "producer", "", nil)
	}
	p.proxy.CloseConnections(false)
	p.consumer.settle(r, "a", 0, &l)
	if len(l.wrong) > 0 || len(l.failed) == 0 {
		t.Errorf("wrong blocks %v, failed blocks %v", l.wrong, l.failed)
	}
	p.consumer.finish(r, blocks, connector.EndStopped)
	p.recovers()
}

func storeFull(t *testing.T, rig Rig) {
	p := newPair(t, rig, false, nil)
	p.env.Fill(t)
	const tokens = 20 * BlockTokens
	l := p.consumer.consume(p.hand("r", "a", tokens), "a", 0)
	if len(l.failed)+len(l.wrong) > 0 || l.matched == tokens {
		t.Errorf("from a full store: %+v", l)
	}
	settled(p.producer, p.consumer)
	stored, failed := 0, 0
	for _, ev := range p.producer.events {
		stored += len(ev.Blocks)
	}
	for _, rec := range p.producer.records {
		if rec.Kind == event.TransferFailed {
			failed += int(rec.Blocks)
		}
	}
	if failed == 0 || stored+failed != tokens/BlockTokens || stored < l.matched/BlockTokens {
		t.Errorf("%d blocks are told as stored and %d as failed, of %d", stored, failed, tokens/BlockTokens)
	}
}

func tenThousand(t *testing.T, rig Rig) {
	p := newPair(t, rig, false, nil)
	const requests, atOnce, tokens = 10_000, 40, GroupBlocks * BlockTokens
	p.together("first", atOnce, tokens)
	goroutines := runtime.NumGoroutine()
	for i := range requests / atOnce {
		p.together(fmt.Sprint(i), atOnce, tokens)
		if t.Failed() {
			t.FailNow()
		}
		p.producer.events, p.consumer.events, p.producer.records, p.consumer.records = nil, nil, nil, nil
	}
	settled(p.producer, p.consumer)
	if n := runtime.NumGoroutine(); n > goroutines+8 {
		t.Errorf("%d goroutines after %d requests, %d before", n, requests, goroutines)
	}
	if p.producer.conn.Scheduler.Pending() || p.consumer.conn.Scheduler.Pending() {
		t.Error("something is pending")
	}
}
