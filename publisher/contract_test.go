package publisher_test

import (
	"encoding/binary"
	"testing"

	"kvstrata/bus"
	"kvstrata/event"
	"kvstrata/publisher"
	"kvstrata/publisher/publishertest"
	"kvstrata/subscriber"

	"github.com/pebbe/zmq4"
)

func TestNullKeepsTheContract(t *testing.T) {
	publishertest.Run(t, func(*testing.T) (publisher.EventPublisher, publishertest.Received) {
		return publisher.Null{}, nil
	})
}

func TestZMQKeepsTheContract(t *testing.T) {
	publishertest.Run(t, func(t *testing.T) (publisher.EventPublisher, publishertest.Received) {
		z := newZMQ(t, testConfig())
		return z, replayReader(z)
	})
}

func TestFanoutKeepsTheContract(t *testing.T) {
	publishertest.Run(t, func(t *testing.T) (publisher.EventPublisher, publishertest.Received) {
		first, second := newZMQ(t, testConfig()), newZMQ(t, testConfig())
		a, b := replayReader(first), replayReader(second)
		return publisher.Fanout{first, publisher.Null{}, second}, func(t *testing.T) event.Batch {
			got := a(t)
			if other := b(t); other.First != got.First || other.Payload != got.Payload {
				t.Errorf("one publisher sent %+v, the other %+v", got, other)
			}
			return got
		}
	})
}

func TestNATSKeepsTheContract(t *testing.T) {
	publishertest.Run(t, func(t *testing.T) (publisher.EventPublisher, publishertest.Received) {
		_, b := startBus(t)
		n, err := publisher.NewNATS(publisher.DefaultNATSConfig(), b, connectorSource, quiet())
		if err != nil {
			t.Fatal(err)
		}
		return n, streamReader(t, b)
	})
}

// replayReader reads what a ZeroMQ publisher has sent, by asking for it again.
func replayReader(z *publisher.ZMQ) publishertest.Received {
	var c *client
	next, asking := uint64(0), false
	decoder := subscriber.NewDecoder(subscriber.DecoderConfig{})
	return func(t *testing.T) event.Batch {
		if c == nil {
			<-z.Ready()
			c = connect(t, zmq4.DEALER, z.ReplayEndpoint(), nil)
		}
		for {
			if !asking {
				c.ask(next)
				asking = true
			}
			msg := c.message(4)
			seq := binary.BigEndian.Uint64(msg[2])
			if seq == ^uint64(0) {
				asking = false
				continue
			}
			next = seq + 1
			var b event.Batch
			if err := decoder.Decode(msg[3], &b); err != nil {
				t.Fatal(err)
			}
			b.First, b.Last, b.Payload = event.Seq(seq), event.Seq(seq), uint64(len(msg[3]))
			return b
		}
	}
}

// streamReader reads the batches of the event stream one by one.
func streamReader(t *testing.T, b *bus.Bus) publishertest.Received {
	reader, err := b.Read(t.Context(), 1)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(reader.Close)
	var decoder event.Decoder
	var batches []event.Batch
	return func(t *testing.T) event.Batch {
		for len(batches) == 0 {
			d, err := reader.Next(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if d.Kind != bus.Events {
				continue
			}
			if batches, err = decoder.Decode(d.Data); err != nil {
				t.Fatal(err)
			}
		}
		got := batches[0]
		batches = batches[1:]
		return got
	}
}
