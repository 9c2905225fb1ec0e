package web_test

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/gorilla/websocket"

	"kvstrata/event"
	"kvstrata/web"
)

// ask sends a client's message.
func (b *browser) ask(t testing.TB, text string) {
	t.Helper()
	if err := b.conn.WriteMessage(websocket.TextMessage, []byte(text)); err != nil {
		t.Fatal(err)
	}
}

// frame reads until a frame that is not the state's.
func (b *browser) aside(t testing.TB) *frame {
	t.Helper()
	for {
		f, err := b.next()
		if err != nil {
			t.Fatal(err)
		}
		if f.V == 0 {
			return f
		}
	}
}

// settle returns once the hub has read all that this client sent.
func (b *browser) settle(t testing.TB) {
	t.Helper()
	b.ask(t, `"settle"`)
	if f := b.aside(t); f.Error == "" {
		t.Fatalf("frame %+v; want an error", f)
	}
}

func linesOf(t testing.TB, messages ...*event.Message) []string {
	t.Helper()
	var lines []string
	for _, m := range messages {
		for _, l := range m.Lines() {
			data, err := json.Marshal(l)
			if err != nil {
				t.Fatal(err)
			}
			lines = append(lines, string(data))
		}
	}
	return lines
}

func TestTailFilters(t *testing.T) {
	long := event.BytesHash(strings.Repeat("\xab", 32))
	odd := run(event.Stored, 1)
	odd.Blocks[0].Hash = long
	unrooted := run(event.Stored, 1)
	unrooted.Blocks[0].Prefix, unrooted.Unrooted = 0x999, true
	stream := []*event.Message{
		message(prefill, run(event.Stored, 1, 1), run(event.Evicted, -1)),
		message(decode, run(event.Stored, 1), run(event.Loaded, 0)),
		message(prefill),
		message(decode, event.Event{Kind: event.Cleared, Cause: event.ByEngine, Group: event.NoGroup, LoRAID: event.NoLoRAID}),
		message(prefill, odd, unrooted),
	}
	all := linesOf(t, stream...)
	tests := []struct {
		filter string
		want   []int // of all
	}{
		{`{}`, []int{0, 1, 2, 3, 4, 5, 6, 7}},
		{`{"source": "", "kinds": [], "hash": ""}`, []int{0, 1, 2, 3, 4, 5, 6, 7}},
		{`{"source": "prefill-*"}`, []int{0, 1, 4, 6, 7}},
		{`{"source": "decode-?"}`, []int{2, 3, 5}},
		{`{"source": "demo/*"}`, []int{0, 1, 2, 3, 4, 5, 6, 7}},
		{`{"source": "*"}`, []int{0, 1, 2, 3, 4, 5, 6, 7}},
		{`{"source": "prefill"}`, nil},
		{`{"kinds": ["EVICTED"]}`, []int{1}},
		{`{"kinds": ["evicted", "CLEARED", "LOADED"]}`, []int{1, 3, 5}},
		{`{"kinds": ["STORED"], "source": "decode-*"}`, []int{2}},
		{`{"hash": "0000000000000002"}`, []int{0}},
		{`{"hash": "0000000000000102"}`, []int{0}},
		{`{"hash": "0000000000000101"}`, []int{0, 1, 2, 3, 6}},
		{`{"hash": "0000000000000999"}`, nil},
		{`{"hash": "` + strings.Repeat("AB", 32) + `"}`, []int{6}},
		{`{"hash": "ab"}`, nil},
	}
	tail := web.NewTail()
	s := serve(t, config(), nil, tail)
	for _, test := range tests {
		var want []string
		for _, i := range test.want {
			want = append(want, all[i])
		}
		end := message(event.Source{Instance: "end"}, run(event.Stored, 1))
		c, last := connect(t, s), connect(t, s)
		c.ask(t, `{"tail": `+test.filter+`}`)
		c.settle(t)
		last.ask(t, `{"tail": {"source": "end"}}`)
		last.settle(t)
		for _, m := range stream {
			tail.Observe(m)
		}
		var got []string
		matched := 0
		for len(got) < len(want) {
			f := c.aside(t)
			for _, l := range f.Tail.Lines {
				got = append(got, string(l))
			}
			matched += f.Tail.Matched
			if f.Tail.Shown != len(f.Tail.Lines) {
				t.Errorf("%s: shown %d of %d lines", test.filter, f.Tail.Shown, len(f.Tail.Lines))
			}
		}
		tail.Observe(end)
		last.aside(t)
		if diff := cmp.Diff(want, got); diff != "" || matched != len(want) {
			t.Errorf("%s: matched %d (-want +got):\n%s", test.filter, matched, diff)
		}
		c.close()
		last.close()
	}
}

// TestTailIsBounded floods two clients: each gets 20 lines a frame, ten frames a second, and is told how many there were.
func TestTailIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tail := web.NewTail()
		s := serveBubble(t, web.DefaultConfig(), []web.Panel{newBoard(nil).panel()}, tail)
		c := connect(t, s)
		c.ask(t, `{"tail": {"kinds": ["STORED"]}}`)
		c.settle(t)
		stop, observed := make(chan struct{}), make(chan int)
		go func() {
			n := 0
			for tick := time.NewTicker(time.Millisecond); ; n++ {
				select {
				case <-tick.C:
					tail.Observe(message(prefill, run(event.Stored, 1), run(event.Evicted, -1)))
				case <-stop:
					tick.Stop()
					observed <- n
					return
				}
			}
		}()
		frames, matched := 0, 0
		for end := time.Now().Add(time.Second); time.Now().Before(end); frames++ {
			f := c.aside(t)
			matched += f.Tail.Matched
			if f.Tail.Shown != min(20, f.Tail.Matched) || len(f.Tail.Lines) != f.Tail.Shown {
				t.Fatalf("matched %d, shown %d, %d lines", f.Tail.Matched, f.Tail.Shown, len(f.Tail.Lines))
			}
		}
		close(stop)
		n := <-observed
		if frames > 11 || matched > n || matched < n-100 {
			t.Errorf("%d frames in a second, matched %d of %d", frames, matched, n)
		}
		if got := s.metric(t, "kvstrata_web_tail_lines_total"); got != float64(frames*20) {
			t.Errorf("%v lines counted in %d frames", got, frames)
		}
	})
}

// TestTailIsBoundedInBytes checks that lines of many blocks do not make a frame of any size.
func TestTailIsBoundedInBytes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tail := web.NewTail()
		s := serveBubble(t, web.DefaultConfig(), nil, tail)
		c := connect(t, s)
		c.ask(t, `{"tail": {}}`)
		c.settle(t)
		huge := run(event.Stored, make([]int8, 8000)...) // half a megabyte
		tail.Observe(message(prefill, huge, huge))
		if f := c.aside(t); f.Tail.Matched != 2 || f.Tail.Shown != 1 {
			t.Errorf("matched %d, shown %d of two huge events; want one", f.Tail.Matched, f.Tail.Shown)
		}
		middling := run(event.Stored, make([]int8, 2000)...)
		tail.Observe(message(prefill, middling, middling, middling, middling, middling))
		if f := c.aside(t); f.Tail.Matched != 5 || f.Tail.Shown == 0 || f.Tail.Shown == 5 {
			t.Errorf("matched %d, shown %d of five big events", f.Tail.Matched, f.Tail.Shown)
		}
	})
}

// TestTailChanges checks that a new filter starts anew and that a tail ends when it is asked to, and with its client.
func TestTailChanges(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tail := web.NewTail()
		s := serveBubble(t, web.DefaultConfig(), nil, tail)
		c := connect(t, s)
		c.ask(t, `{"tail": {}}`)
		c.settle(t)
		m := message(prefill, run(event.Stored, 1), run(event.Evicted, -1))
		tail.Observe(m)
		c.ask(t, `{"tail": {"kinds": ["EVICTED"]}}`) // before the tick: what the old one had is gone
		c.settle(t)
		tail.Observe(m)
		if f := c.aside(t); f.Tail.Matched != 1 || !strings.Contains(string(f.Tail.Lines[0]), "EVICTED") {
			t.Errorf("after the change: %+v", f.Tail)
		}
		c.ask(t, `{"tail": null}`)
		c.settle(t)
		tail.Observe(m)
		<-time.After(time.Second)
		c.settle(t) // whose answer would stand behind a frame of the tail
		c.ask(t, `{"tail": {}}`)
		c.settle(t)
		c.close()
		synctest.Wait()
		for range 100 {
			tail.Observe(m)
		}
		if allocs := testing.AllocsPerRun(100, func() { tail.Observe(m) }); allocs > 0 {
			t.Errorf("%v allocations for nobody", allocs)
		}
	})
}

// TestTailsAreFew refuses a tail too many, and gives room again with the client that leaves.
func TestTailsAreFew(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := serveBubble(t, web.DefaultConfig(), nil, web.NewTail())
		first := connect(t, s)
		first.ask(t, `{"tail": {}}`)
		first.settle(t)
		for range 31 {
			c := connect(t, s)
			c.ask(t, `{"tail": {}}`)
			c.settle(t)
		}
		late := connect(t, s)
		late.ask(t, `{"tail": {}}`)
		if f := late.aside(t); !strings.Contains(f.Error, "32 pages tail already") {
			t.Errorf("%+v", f)
		}
		first.close()
		synctest.Wait()
		late.ask(t, `{"tail": {}}`)
		late.settle(t)
	})
}

// TestTailHoldsNoTokens keeps prompt text at home even when it is in the stream.
func TestTailHoldsNoTokens(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tail := web.NewTail()
		s := serveBubble(t, web.DefaultConfig(), nil, tail)
		c := connect(t, s)
		c.ask(t, `{"tail": {}}`)
		c.settle(t)
		ev := run(event.Stored, 1)
		ev.Tokens, ev.Salt, ev.ExtraKeys = []uint32{987654321}, "pepper", [][]byte{[]byte("image-of-a-cat")}
		tail.Observe(message(prefill, ev))
		line := string(c.aside(t).Tail.Lines[0])
		for _, secret := range []string{"987654321", "pepper", "cat"} {
			if strings.Contains(line, secret) {
				t.Errorf("line holds %s: %s", secret, line)
			}
		}
	})
}

func TestBadMessages(t *testing.T) {
	tail := web.NewTail()
	s := serve(t, config(), nil, tail)
	c := connect(t, s)
	for _, text := range []string{
		``, `{`, `[]`, `null`, `{}`, `{"tail": 1}`, `{"tail": "x"}`, `{"tails": null}`, `{"tail": {"sauce": "x"}}`, `{"tail": null} {}`,
		`{"tail": {"source": "["}}`, `{"tail": {"kinds": ["MOVED"]}}`, `{"tail": {"kinds": [""]}}`, `{"tail": {"kinds": "EVICTED"}}`,
		`{"tail": {"hash": "xyz"}}`, `{"tail": {"hash": "abc"}}`, `{"tail": {"source": 1}}`,
	} {
		c.ask(t, text)
		if f := c.aside(t); f.Error == "" {
			t.Errorf("%s is answered with %+v; want an error", text, f)
		}
	}
	if err := c.conn.WriteMessage(websocket.BinaryMessage, []byte(`{"tail": null}`)); err != nil {
		t.Fatal(err)
	}
	if f := c.aside(t); f.Error == "" {
		t.Errorf("binary is answered with %+v; want an error", f)
	}
	// The connection has outlived all of it.
	c.ask(t, `{"tail": {"kinds": ["STORED"]}}`)
	c.settle(t)
	m := message(prefill, run(event.Stored, 1))
	tail.Observe(m)
	if f := c.aside(t); f.Tail == nil || f.Tail.Matched != 1 {
		t.Errorf("after the bad messages: %+v", f)
	}
	// A message that is too long ends it, before it is read.
	long := fmt.Sprintf(`{"tail": {"source": %q}}`, strings.Repeat("x", 1<<20))
	_ = c.conn.WriteMessage(websocket.TextMessage, []byte(long)) // the hub may have hung up before it is out
	for {
		if _, err := c.next(); err != nil {
			break
		}
	}
	eventually(t, "the client is gone", func() bool { return s.Clients() == 0 })
}

// TestCompressedBomb sends few bytes that inflate to many.
func TestCompressedBomb(t *testing.T) {
	s := serve(t, config(), nil, web.NewTail())
	dialer := websocket.Dialer{EnableCompression: true}
	eventually(t, "the hub answers", func() bool {
		conn, _, err := dialer.Dial("ws"+strings.TrimPrefix(s.url, "http")+"/v1/live", nil)
		if err != nil {
			return false
		}
		c := &browser{conn: conn, docs: make(map[string]string)}
		defer c.close()
		c.ask(t, `{"tail": {"source": "`+strings.Repeat("x", 1<<20)+`"}}`)
		if f := c.aside(t); !strings.Contains(f.Error, "4096") {
			t.Errorf("answer %+v; want an error", f)
		}
		return true
	})
}

func TestNoTail(t *testing.T) {
	s := serve(t, config(), nil, nil)
	c := connect(t, s)
	c.ask(t, `{"tail": {}}`)
	if f := c.aside(t); f.Error == "" {
		t.Errorf("answer %+v; want an error", f)
	}
}

// FuzzMessages sends whatever a client might: the connection answers or does as told, and goes on.
func FuzzMessages(f *testing.F) {
	for _, text := range []string{
		`{"tail": {"source": "prefill-*", "kinds": ["EVICTED", "loaded"], "hash": "34dc6330fee229a2"}}`, `{"tail": null}`, `{"tail": {}}`,
		`{"tail": {"source": "[a-z]*\\*?"}}`, `{"tail": {"hash": "AB"}}`, `{"tail": {"kinds": null}} `, `{"tail":[]}`, `[`, "\xff", ``,
	} {
		f.Add([]byte(text))
	}
	tail := web.NewTail()
	s := serve(f, web.DefaultConfig(), nil, tail)
	c := connect(f, s)
	n := 0
	f.Fuzz(func(t *testing.T, data []byte) {
		if len(data) > 4096 {
			return // ends the connection, as another test shows
		}
		c.ask(t, string(data))
		tail.Observe(typical())
		n++
		mark := fmt.Sprint("mark", n)
		c.ask(t, fmt.Sprintf(`{"tail": {"kinds": [%q]}}`, mark))
		for f := c.aside(t); !strings.Contains(f.Error, mark); f = c.aside(t) {
			if f.Error == "" && f.Tail == nil {
				t.Fatalf("frame %+v is neither an error nor a tail", f)
			}
		}
	})
}
