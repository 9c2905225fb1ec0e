package encodertest

import (
	"encoding/json"
	"fmt"
	"net"
	"strings"
	"testing"
	"time"

	"kvstrata/connector/encoder"
)

// set changes an engine's extra configuration.
func set(c *encoder.Config, key string, value any) {
	c.Extra[key], _ = json.Marshal(value) // numbers and lists of strings
}

// listed wants a consumer without a hand-off to find items at those peers of its list that answer.
func listed(t *testing.T, rig Rig) {
	env := rig.Setup(t)
	list := items("listed", 6)
	var addresses []string
	for n := range 2 {
		producer := newEngine(t, env, encoder.Producer, options{})
		params := producer.produce("r", list[2*n:2*n+2]...)
		addresses = append(addresses, params[list[2*n].Hash].Address())
	}
	for _, answers := range []bool{true, false} { // a port that nobody listens at, and one where nobody says anything
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		addresses = append(addresses, l.Addr().String())
		if answers {
			if err := l.Close(); err != nil {
				t.Fatal(err)
			}
			continue
		}
		defer l.Close()
	}
	consumer := newEngine(t, env, encoder.Consumer, options{config: func(c *encoder.Config) {
		set(c, "peers", addresses)
		set(c, "lookup_timeout", 0.5)
	}})
	r := request("r", nil, list...)
	if got := consumer.conn.Scheduler.HasItem(r, 0); got != encoder.Later {
		t.Errorf("the first answer is %v", got)
	}
	c := consumer.consume(r)
	c.want(t, list[:4], nil, list[4:])
}

// renewed wants an item to be there for many times as long as its lease.
func renewed(t *testing.T, rig Rig) {
	env := rig.Setup(t)
	const lease = 300 * time.Millisecond
	producer := newEngine(t, env, encoder.Producer, options{config: func(c *encoder.Config) { set(c, "kv_lease_duration", lease.Seconds()) }})
	consumer := newEngine(t, env, encoder.Consumer, options{})
	i := item("i", 64<<10)
	params := producer.produce("r", i)
	for n, begin := 0, time.Now(); time.Since(begin) < 4*lease; n++ {
		c := consumer.consume(request(fmt.Sprint(n), params, i))
		if c.want(t, []encoder.Item{i}, nil, nil); t.Failed() {
			return
		}
	}
	producer.free(i)
	producer.step()
	c := consumer.consume(request("r", params, i))
	c.want(t, nil, nil, []encoder.Item{i})
}

// smallMirror wants memory that the CPU cannot address to be refused when its copy may not be as large.
func smallMirror(t *testing.T, rig Rig) {
	small := func(c *encoder.Config) { c.BufferSize = cacheBytes - 1 }
	_, err := tryEngine(t, rig.Setup(t), encoder.Producer, options{opaque: true, config: small})
	if err == nil || !strings.Contains(err.Error(), "ec_buffer_size") {
		t.Errorf("%v; want one that names ec_buffer_size", err)
	}
	newEngine(t, rig.Setup(t), encoder.Producer, options{config: small})
	newEngine(t, rig.Setup(t), encoder.Consumer, options{opaque: true, config: small})
}

// anotherEngine wants a hand-off to mean the engine that made it, not one that has started in its place.
func anotherEngine(t *testing.T, rig Rig) {
	env := rig.Setup(t)
	i := item("i", 1000)
	producer := newEngine(t, env, encoder.Producer, options{})
	old := producer.produce("r", i)
	producer.stop()
	producer = newEngine(t, env, encoder.Producer, options{config: func(c *encoder.Config) { set(c, "listen", old[i.Hash].Address()) }})
	anew := producer.produce("r", i)
	if anew[i.Hash].Port != old[i.Hash].Port || anew[i.Hash].EngineID == old[i.Hash].EngineID {
		t.Fatalf("%+v is handed over, and was %+v", anew, old)
	}
	consumer := newEngine(t, env, encoder.Consumer, options{})
	c := consumer.consume(request("r", old, i))
	c.want(t, nil, nil, []encoder.Item{i})
	c = consumer.consume(request("s", anew, i))
	c.want(t, []encoder.Item{i}, nil, nil)
}
