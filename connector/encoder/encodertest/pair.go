package encodertest

import (
	"testing"

	"kvstrata/connector/connectortest"
	"kvstrata/connector/encoder"
)

// pair is a producer and a consumer.
type pair struct {
	*testing.T
	rig      Rig
	env      Environment
	producer *engine
	consumer *engine
	proxy    *connectortest.Proxy // nil = none
}

// newPair starts both. With a proxy what travels to the consumer goes through it.
func newPair(t *testing.T, rig Rig, proxied bool, o options) *pair {
	t.Helper()
	p := &pair{T: t, rig: rig, env: rig.Setup(t)}
	p.producer = newEngine(t, p.env, encoder.Producer, options{opaque: o.opaque, ranks: o.ranks})
	if proxied {
		p.proxy = connectortest.NewProxy(t, p.env.Address)
		o.through = p.proxy.Address()
	}
	p.consumer = newEngine(t, p.env, encoder.Consumer, o)
	return p
}

// hand has items made at the producer, and returns the hand-off for the consumer.
func (p *pair) hand(id string, list ...encoder.Item) encoder.Params {
	p.Helper()
	params := p.producer.produce(id, list...)
	if !p.rig.Direct {
		if params != nil {
			p.Errorf("a producer with a store hands over %v", params)
		}
		return nil
	}
	if len(params) != len(list) {
		p.Fatalf("of %d items the producer hands over %d", len(list), len(params))
	}
	if p.proxy != nil {
		for hash, place := range params {
			p.proxy.SetTarget(place.Address())
			through, err := encoder.PlaceAt(p.proxy.Address(), place.EngineID)
			if err != nil {
				p.Fatal(err)
			}
			params[hash] = through
		}
	}
	return params
}

// remove takes an item away from where the consumer would get it.
func (p *pair) remove(i encoder.Item) {
	p.Helper()
	if p.env.Remove != nil {
		p.env.Remove(p.T, Model(), i)
		return
	}
	p.producer.free(i)
	p.producer.step()
}
