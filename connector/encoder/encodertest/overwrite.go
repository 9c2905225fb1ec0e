package encodertest

import (
	"testing"

	"kvstrata/connector/encoder"
)

// overwritten wants what a consumer gets to be whole: what was there, what is there now, or nothing.
func overwritten(t *testing.T, rig Rig) {
	p := newPair(t, rig, false, options{})
	i := item("i", 5<<20)
	r := request("r", p.hand("r", i), i)
	c := p.consumer.lookUp(r)
	if rig.Direct { // the producer's encoder makes something else of it
		p.producer.free(i)
		s := request("s", nil, i)
		p.producer.encodes(s, i)
		p.producer.encode[0].seed = 7
		p.producer.step()
		p.producer.finish(s)
		p.producer.settled()
	} else {
		p.env.Spoil(t, Model(), i)
	}
	p.consumer.order(r, &c)
	p.consumer.step()
	p.consumer.settle(r, &c)
	if !rig.Direct {
		c.want(t, nil, []encoder.Item{i}, nil)
	} else if !p.consumer.holds(c.spans[i.Hash], 7) {
		t.Errorf("failed %v, and the item is not the new one", c.failed)
	}
	p.consumer.finish(r)
	p.consumer.settled()
}

// savedOnce wants a second producer of an item to leave alone what a store has.
func savedOnce(t *testing.T, rig Rig) {
	p := newPair(t, rig, false, options{})
	list := items("once", 3)
	p.hand("r", list...)
	other := newEngine(t, p.env, encoder.Producer, options{})
	other.produce("r", list...)
	if len(other.records) > 0 {
		t.Errorf("records %+v", other.records)
	}
	c := p.consumer.consume(request("r", nil, list...))
	c.want(t, list, nil, nil)
}
