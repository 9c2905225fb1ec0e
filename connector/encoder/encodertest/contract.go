package encodertest

import (
	"fmt"
	"runtime"
	"testing"

	"kvstrata/connector/connectortest"
	"kvstrata/connector/encoder"
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
		{"memory that the CPU cannot address", always, opaqueMemory},
		{"two ranks", always, twoRanks},
		{"absent", always, absent},
		{"some of a request's items are there", always, partlyPresent},
		{"many requests at once", always, concurrent},
		{"two requests for one item", always, sameItem},
		{"a request is cancelled", !rig.Local, cancelled},
		{"the peer dies", !rig.Local, peerDies},
		{"the peer is slow", !rig.Local, peerIsSlow},
		{"another model", always, anotherModel},
		{"another size", always, anotherSize},
		{"an item is made anew", always, madeAnew},
		{"an item is overwritten before it is loaded", !rig.Sealed, overwritten},
		{"what is there is not saved again", !rig.Direct, savedOnce},
		{"an item is gone before it is loaded", always, goneBeforeLoad},
		{"an item is freed while it is loaded", !rig.Local, freedWhileLoaded},
		{"an item is freed while it is saved", always, freedWhileSaved},
		{"what is not saved holds up nothing", always, neverSaved},
		{"a span that cannot be", always, badSpan},
		{"a thousand requests", always, thousand},
		{"whom to ask is listed", rig.Direct, listed},
		{"a lease is renewed", rig.Direct, renewed},
		{"another engine is at the address", rig.Direct, anotherEngine},
		{"a mirror that is too small", rig.Direct, smallMirror},
	} {
		if test.holds {
			t.Run(test.name, func(t *testing.T) { test.run(t, rig) })
		}
	}
}

func sizes() (list []encoder.Item) {
	for _, n := range []int{1, 7, 4096, 1<<20 + 1, 4 << 20, 4<<20 + 3, 8 << 20} {
		list = append(list, item(fmt.Sprint("item of ", n), n))
	}
	return list
}

func roundTrip(t *testing.T, rig Rig) { trip(newPair(t, rig, false, options{})) }

func opaqueMemory(t *testing.T, rig Rig) { trip(newPair(t, rig, false, options{opaque: true})) }

func twoRanks(t *testing.T, rig Rig) { trip(newPair(t, rig, false, options{ranks: 2})) }

// trip moves items of many sizes, each in a request of its own.
func trip(p *pair) {
	p.Helper()
	var bytes uint64
	for _, i := range sizes() {
		c := p.consumer.consume(request("load "+i.Hash, p.hand("make "+i.Hash, i), i))
		c.want(p.T, []encoder.Item{i}, nil, nil)
		bytes += uint64(i.Bytes)
	}
	var told uint64
	for _, r := range p.consumer.records {
		if r.Kind != event.TransferLoaded || r.Blocks != 0 || r.To != event.GPU || r.Peer == "" || r.Ranks != uint32(len(p.consumer.memories)) {
			p.Errorf("record %.300v", r)
		}
		told += r.Bytes
	}
	if want := bytes * uint64(len(p.consumer.memories)); told != want {
		p.Errorf("%d bytes are told as loaded, want %d", told, want)
	}
	told = 0
	for _, r := range p.producer.records {
		if r.Kind != event.TransferSaved || r.Request == "" {
			p.Errorf("record %+v", r)
		}
		told += r.Bytes
	}
	if !p.rig.Direct && told != bytes {
		p.Errorf("%d bytes are told as saved, want %d", told, bytes)
	}
	if p.consumer.conn.Scheduler.Pending() || p.producer.conn.Scheduler.Pending() {
		p.Error("something is pending")
	}
}

func absent(t *testing.T, rig Rig) {
	p := newPair(t, rig, false, options{})
	list := items("absent", 3)
	params := p.hand("r", items("others", 1)...)
	for _, place := range params { // the producer is told to have what it has not
		for _, i := range list {
			params[i.Hash] = place
		}
	}
	c := p.consumer.consume(request("r", params, list...))
	c.want(t, nil, nil, list)
	c = p.consumer.consume(request("s", nil, append(list, encoder.Item{Hash: "", Bytes: 4}, encoder.Item{Hash: "x"})...))
	if len(c.absent) != len(list)+2 {
		t.Errorf("absent: %v", c.absent)
	}
	if p := p.producer.conn.Scheduler.HasItem(request("t", nil, list...), 0); p != encoder.Absent {
		t.Errorf("to a producer an item is %v", p)
	}
}

func partlyPresent(t *testing.T, rig Rig) {
	p := newPair(t, rig, false, options{})
	list := items("partly", 9)
	there := []encoder.Item{list[1], list[2], list[4], list[7]}
	params := p.hand("r", there...)
	c := p.consumer.consume(request("r", params, list...))
	c.want(t, there, nil, []encoder.Item{list[0], list[3], list[5], list[6], list[8]})
}

func concurrent(t *testing.T, rig Rig) {
	p := newPair(t, rig, false, options{})
	type load struct {
		r *encoder.Request
		c came
	}
	var loads []*load
	for n := range 24 {
		list := items(fmt.Sprint("request ", n, " "), 3)
		loads = append(loads, &load{r: request(fmt.Sprint("r", n), p.hand(fmt.Sprint("r", n), list...), list...)})
	}
	for _, l := range loads {
		l.c = p.consumer.lookUp(l.r)
		p.consumer.order(l.r, &l.c)
	}
	p.consumer.step()
	for _, l := range loads {
		p.consumer.settle(l.r, &l.c)
		l.c.want(t, l.r.Items, nil, nil)
		p.consumer.finish(l.r)
	}
	p.consumer.settled()
}

func sameItem(t *testing.T, rig Rig) {
	p := newPair(t, rig, false, options{})
	i := item("shared", 1<<20)
	params := p.hand("r", i)
	r, s := request("r", params, i), request("s", params, i, i)
	a, b := p.consumer.lookUp(r), p.consumer.lookUp(s)
	p.consumer.order(r, &a)
	p.consumer.order(s, &b)
	p.consumer.finish(r) // the other one wants it still
	p.consumer.step()
	p.consumer.settle(s, &b)
	if len(b.failed)+len(b.wrong) > 0 {
		t.Errorf("failed %v, wrong %v", b.failed, b.wrong)
	}
	p.consumer.finish(s)
	p.consumer.settled()
	if n := len(p.consumer.records); n != 1 {
		t.Errorf("%d loads are told, want 1", n)
	}
	// Of an item whose load was ordered the request is told no more.
	if got := p.consumer.conn.Scheduler.HasItem(request("t", params, i), 0); got != encoder.Later {
		t.Errorf("to another request the item is %v", got)
	}
}

func cancelled(t *testing.T, rig Rig) {
	p := newPair(t, rig, true, options{})
	i := item("big", 8<<20)
	r := request("r", p.hand("r", i), i)
	hit := p.proxy.Break(connectortest.Stall, 100_000)
	c := p.consumer.begin(r)
	if len(c.absent) > 0 {
		t.Fatal("the item is absent")
	}
	<-hit
	p.consumer.finish(r)
	if !p.consumer.delayed["r"] {
		t.Error("the room of an item that is being loaded is not kept")
	}
	p.consumer.settled()
	if failed, ok := p.consumer.received[i.Hash]; !ok || !failed {
		t.Errorf("the cancelled load is told as ended: %v, as failed: %v", ok, failed)
	}
	span := c.spans[i.Hash]
	p.consumer.write(span, 1) // for others now
	p.proxy.CloseConnections(false)
	p.recovers()
	if !p.consumer.holds(span, 1) {
		t.Error("room was written to after its request was told as ended")
	}
}

// recovers wants the next request to go well.
func (p *pair) recovers() {
	p.Helper()
	i := item("the next one", 100_000)
	c := p.consumer.consume(request("next", p.hand("next", i), i))
	c.want(p.T, []encoder.Item{i}, nil, nil)
}

func peerDies(t *testing.T, rig Rig) {
	p := newPair(t, rig, true, options{})
	list := items("dead", 3)
	r := request("r", p.hand("r", list...), list...)
	c := p.consumer.lookUp(r)
	p.proxy.CloseConnections(true)
	p.consumer.order(r, &c)
	p.consumer.step()
	p.consumer.settle(r, &c)
	c.want(t, nil, list, nil)
	p.consumer.finish(r)
	p.consumer.settled()
	if n := len(p.consumer.records); n != len(list) || p.consumer.records[0].Kind != event.TransferFailed || p.consumer.records[0].Reason == "" {
		t.Errorf("records %+v", p.consumer.records)
	}
	c = p.consumer.consume(request("s", r.Params, list...))
	c.want(t, nil, nil, list)
}

func peerIsSlow(t *testing.T, rig Rig) {
	p := newPair(t, rig, true, options{})
	i := item("big", 8<<20)
	r := request("r", p.hand("r", i), i)
	c := p.consumer.lookUp(r)
	p.proxy.Break(connectortest.Stall, 3<<20)
	p.consumer.order(r, &c)
	p.consumer.step()
	p.consumer.settle(r, &c)
	p.consumer.finish(r)
	p.consumer.settled()
	c.want(t, nil, []encoder.Item{i}, nil)
	p.proxy.CloseConnections(false)
	p.recovers()
}

func anotherModel(t *testing.T, rig Rig) {
	for _, edit := range []func(*encoder.Model){
		func(m *encoder.Model) { m.Name = "another/model" },
		func(m *encoder.Model) { m.DType = "float16" },
		func(m *encoder.Model) { m.HiddenSize++ },
		func(m *encoder.Model) { m.EncoderRevision = "2" },
	} {
		p := newPair(t, rig, false, options{model: edit})
		i := item("i", 1000)
		c := p.consumer.consume(request("r", p.hand("r", i), i))
		c.want(t, nil, nil, []encoder.Item{i})
	}
}

func anotherSize(t *testing.T, rig Rig) {
	p := newPair(t, rig, false, options{})
	for _, bytes := range []int{999, 1001, 5 << 20} {
		params := p.hand(fmt.Sprint("r", bytes), item("i", 1000))
		c := p.consumer.consume(request(fmt.Sprint("r", bytes), params, item("i", bytes)))
		if len(c.loaded)+len(c.wrong) > 0 {
			t.Errorf("an item of 1000 bytes is loaded as one of %d", bytes)
		}
	}
	p.recovers()
}

// madeAnew wants an item that could not be loaded, though something is there, to be overwritten by whoever makes it.
func madeAnew(t *testing.T, rig Rig) {
	p := newPair(t, rig, false, options{})
	old, anew := item("i", 1000), item("i", 2000)
	p.hand("r", old)
	both := newEngine(t, p.env, encoder.Both, options{})
	r := request("r", nil, anew)
	c := both.begin(r)
	both.settle(r, &c)
	if len(c.loaded)+len(c.wrong) > 0 {
		t.Fatal("another size is loaded")
	}
	both.encodes(r, anew)
	both.step()
	params := both.finish(r)
	both.settled()
	c = p.consumer.consume(request("s", params, anew))
	c.want(t, []encoder.Item{anew}, nil, nil)
	// The same engine makes it a second time, as something else.
	both.free(anew)
	r = request("again", nil, old)
	both.encodes(r, old)
	both.step()
	params = both.finish(r)
	both.settled()
	if rig.Direct { // a store keeps what it has
		c = p.consumer.consume(request("t", params, old))
		c.want(t, []encoder.Item{old}, nil, nil)
		c = p.consumer.consume(request("u", params, anew))
		c.want(t, nil, nil, []encoder.Item{anew})
	}
}

func goneBeforeLoad(t *testing.T, rig Rig) {
	p := newPair(t, rig, false, options{})
	list := items("gone", 4)
	r := request("r", p.hand("r", list...), list...)
	c := p.consumer.lookUp(r)
	if len(c.absent) > 0 {
		t.Fatalf("absent: %v", c.absent)
	}
	p.remove(list[1])
	p.remove(list[2])
	p.consumer.order(r, &c)
	p.consumer.step()
	p.consumer.settle(r, &c)
	c.want(t, []encoder.Item{list[0], list[3]}, []encoder.Item{list[1], list[2]}, nil)
	for index := range list {
		if got := p.consumer.conn.Scheduler.HasItem(r, index); got != encoder.Absent {
			t.Errorf("after its load item %d is %v", index, got)
		}
	}
	p.consumer.finish(r)
	p.consumer.settled()
	c = p.consumer.consume(request("s", r.Params, list...))
	c.want(t, []encoder.Item{list[0], list[3]}, nil, []encoder.Item{list[1], list[2]})
}

func freedWhileLoaded(t *testing.T, rig Rig) {
	p := newPair(t, rig, true, options{})
	i := item("big", 8<<20)
	r := request("r", p.hand("r", i), i)
	hit := p.proxy.Break(connectortest.Stall, 100_000)
	c := p.consumer.begin(r)
	<-hit
	p.consumer.free(i)
	p.consumer.step() // returns once nothing touches its room
	p.consumer.write(c.spans[i.Hash], 1)
	p.proxy.CloseConnections(false)
	if failed, ok := p.consumer.received[i.Hash]; !ok || !failed {
		t.Errorf("ended %v, failed %v", ok, failed)
	}
	delete(p.consumer.received, i.Hash)
	p.consumer.finish(r)
	p.consumer.settled()
	p.recovers()
	if !p.consumer.holds(c.spans[i.Hash], 1) {
		t.Error("room was written to after it was freed")
	}
}

func freedWhileSaved(t *testing.T, rig Rig) {
	p := newPair(t, rig, false, options{})
	list := items("freed", 20)
	for n, i := range list {
		r := request(fmt.Sprint("r", n), nil, i)
		p.producer.encodes(r, i)
		p.producer.step()
		p.producer.free(i)
		p.producer.step() // saved or cut
		p.producer.finish(r)
	}
	p.producer.settled()
	// Whatever became of them: what is told as there is right.
	params := p.hand("again", list...)
	c := p.consumer.consume(request("r", params, list...))
	c.want(t, list, nil, nil)
}

func neverSaved(t *testing.T, rig Rig) {
	p := newPair(t, rig, false, options{})
	i := item("i", 1000)
	r := request("r", nil, i)
	p.producer.allocate(i)
	p.producer.conn.Scheduler.UpdateStateAfterAlloc(r, 0)
	p.producer.step()
	p.producer.finish(r) // aborted before its encoder ran
	p.producer.settled()
	if p.producer.conn.Scheduler.Pending() {
		t.Error("something is pending")
	}
	if params := p.producer.finish(request("s", nil, i)); params != nil {
		t.Errorf("%v is handed over", params)
	}
	p.recovers()
}

func badSpan(t *testing.T, rig Rig) {
	p := newPair(t, rig, false, options{})
	i := item("i", 1000)
	r := request("r", p.hand("r", i), i)
	w := p.producer.conn.Workers()[0]
	span := p.producer.allocate(item("other", 999))
	if err := w.Save(i, span); err == nil {
		t.Error("a span of another size is saved")
	}
	if span.Length, span.Offset = 1000, cacheBytes-999; w.Save(i, span) == nil {
		t.Error("a span beyond the cache is saved")
	}
	c := p.consumer.lookUp(r)
	p.consumer.order(r, &c)
	delete(p.consumer.place, i.Hash)
	p.consumer.step()
	p.consumer.settle(r, &c)
	c.want(t, nil, []encoder.Item{i}, nil)
	p.consumer.finish(r)
	p.consumer.settled()
}

func thousand(t *testing.T, rig Rig) {
	p := newPair(t, rig, false, options{})
	const requests, atOnce = 1000, 20
	var goroutines int
	for round := range requests / atOnce {
		var list []encoder.Item
		for n := range atOnce {
			list = append(list, items(fmt.Sprint(round, " ", n, " "), 2)...)
		}
		params := p.hand(fmt.Sprint("round ", round), list...)
		loads := make([]came, atOnce)
		requests := make([]*encoder.Request, atOnce)
		for n := range requests {
			requests[n] = request(fmt.Sprint("r", round, " ", n), params, list[2*n:2*n+2]...)
			loads[n] = p.consumer.lookUp(requests[n])
			p.consumer.order(requests[n], &loads[n])
		}
		p.consumer.step()
		for n, r := range requests {
			p.consumer.settle(r, &loads[n])
			loads[n].want(t, r.Items, nil, nil)
			p.consumer.finish(r)
		}
		p.consumer.settled()
		if t.Failed() {
			t.FailNow()
		}
		if round == 1 {
			goroutines = runtime.NumGoroutine()
		}
	}
	if n := runtime.NumGoroutine(); n > goroutines+8 {
		t.Errorf("%d goroutines after %d requests, %d before", n, requests, goroutines)
	}
	if p.producer.conn.Scheduler.Pending() || p.consumer.conn.Scheduler.Pending() {
		t.Error("something is pending")
	}
}
