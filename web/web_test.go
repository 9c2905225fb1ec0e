package web_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/gorilla/websocket"
	"golang.org/x/sync/errgroup"
	"pgregory.net/rapid"

	"kvstrata/leaktest"
	"kvstrata/web"
)

func TestMain(m *testing.M) { os.Exit(leaktest.Run(m)) }

// TestClientsHaveWhatTheHubHas changes documents at random under clients that read at once, never in time, and late: after
// any frame, a client has exactly what the hub had at that version.
func TestClientsHaveWhatTheHubHas(t *testing.T) {
	key := rapid.SampledFrom([]string{"a", "b", "c/d", "e\"<é>", "f", "g"})
	change := rapid.Custom(func(t *rapid.T) func(map[string]string) {
		k, del, doc := key.Draw(t, "key"), rapid.IntRange(0, 2).Draw(t, "delete") == 0, rapid.IntRange(0, 3).Draw(t, "doc")
		return func(docs map[string]string) {
			if del {
				delete(docs, k)
			} else {
				docs[k] = fmt.Sprintf(`{"n":%d}`, doc)
			}
		}
	})
	step := rapid.Custom(func(t *rapid.T) func(map[string]string) {
		changes := rapid.SliceOfN(change, 1, 4).Draw(t, "changes")
		return func(docs map[string]string) {
			for _, c := range changes {
				c(docs)
			}
		}
	})
	var coalesced float64
	rapid.Check(t, func(rt *rapid.T) {
		steps := rapid.SliceOfN(step, 1, 25).Draw(rt, "steps")
		naps := rapid.SliceOfN(rapid.IntRange(0, 900), 8, 8).Draw(rt, "naps")
		var err error
		synctest.Test(t, func(t *testing.T) {
			b := newBoard(nil, steps...)
			s := serveBubble(t, web.DefaultConfig(), []web.Panel{b.panel()}, nil)
			var group errgroup.Group
			for i, nap := range naps {
				group.Go(func() error {
					if i%2 == 1 {
						<-time.After(time.Duration(nap) * time.Millisecond)
					}
					c, err := join(s)
					if err != nil {
						return err
					}
					defer c.close()
					if i%4 < 2 {
						nap = 0
					}
					return b.follow(c, time.Duration(nap)*time.Millisecond)
				})
			}
			err = group.Wait()
			coalesced += s.metric(t, "kvstrata_web_frames_coalesced_total")
		})
		if err != nil {
			rt.Fatal(err)
		}
	})
	if coalesced == 0 {
		t.Error("no client was slow enough to skip a version")
	}
}

// TestForgottenDeletions lets a client fall behind more deletions than the hub remembers.
func TestForgottenDeletions(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		many := make(map[string]string)
		for i := range 5000 {
			many[fmt.Sprintf("key/%d", i)] = "1"
		}
		b := newBoard(many, func(docs map[string]string) {
			clear(docs)
			docs["x"] = "1"
		}, func(docs map[string]string) { delete(docs, "x") }, func(docs map[string]string) { docs["y"] = "1" })
		cfg := web.DefaultConfig()
		cfg.Stall, cfg.Ping = time.Hour, time.Hour
		s := serveBubble(t, cfg, []web.Panel{b.panel()}, nil)
		c := connect(t, s)
		<-time.After(time.Minute) // all steps are told, and the client is where it was
		first, err := c.next()
		if err != nil {
			t.Fatal(err)
		}
		second, err := c.next()
		if err != nil {
			t.Fatal(err)
		}
		if !first.Full || len(first.Set) != 5001 || !second.Full || len(second.Set) != 2 {
			t.Errorf("frames: full %v with %d, full %v with %d; want two full ones with 5001 and 2", first.Full, len(first.Set), second.Full, len(second.Set))
		}
	})
}

func TestPace(t *testing.T) {
	count := func(n int, every time.Duration) (collections, frames int) {
		synctest.Test(t, func(t *testing.T) {
			round := 0
			s := serveBubble(t, web.DefaultConfig(), []web.Panel{{Every: every, Collect: func(_ time.Time, put func(string, any)) {
				round++
				for i := range n {
					put(fmt.Sprint(i), round)
				}
			}}}, nil)
			c := connect(t, s)
			end := time.Now().Add(10 * time.Second)
			for time.Now().Before(end) {
				if _, err := c.next(); err != nil {
					t.Fatal(err)
				}
				frames++
			}
			collections = round
		})
		return collections, frames
	}
	tests := []struct {
		documents, want int
		every           time.Duration
	}{
		{documents: 10, want: 100},
		{documents: 50, want: 100},
		{documents: 500, want: 10},
		{documents: 1000, want: 5},
		{documents: 10, every: time.Second, want: 10},
	}
	for _, test := range tests {
		collections, frames := count(test.documents, test.every)
		if collections < test.want || collections > test.want+2 || frames > collections {
			t.Errorf("%d documents, every %v: %d collections and %d frames in 10 s; want %d",
				test.documents, test.every, collections, frames, test.want)
		}
	}
}

// TestNobodyWatches checks that panels are left alone then, and that who comes gets what is current.
func TestNobodyWatches(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBoard(map[string]string{"a": "1"})
		s := serveBubble(t, web.DefaultConfig(), []web.Panel{b.panel()}, nil)
		<-time.After(time.Minute)
		if n := b.asks(); n != 0 {
			t.Errorf("%d collections for nobody", n)
		}
		first := connect(t, s)
		first.until(t, "a", "1")
		first.close()
		<-time.After(time.Second)
		asked := b.asks()
		<-time.After(time.Minute)
		if n := b.asks(); n != asked {
			t.Errorf("%d collections after the last client left", n-asked)
		}
		b.mu.Lock()
		b.docs["a"] = "2"
		b.mu.Unlock()
		again := connect(t, s)
		if _, err := again.next(); err != nil || again.docs["a"] != "2" {
			t.Errorf("first frame has a = %s, error %v; want 2", again.docs["a"], err)
		}
	})
}

// TestSilentClient checks that one that answers no ping is disconnected, and one that answers is not.
func TestSilentClient(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := serveBubble(t, web.DefaultConfig(), []web.Panel{newBoard(nil).panel()}, nil)
		answering, silent := connect(t, s), connect(t, s)
		silent.conn.SetPingHandler(func(string) error { return nil })
		ended := make(chan int, 2)
		for i, c := range []*browser{answering, silent} {
			go func() {
				for {
					if _, _, err := c.conn.ReadMessage(); err != nil {
						ended <- i
						return
					}
				}
			}()
		}
		<-time.After(3 * time.Minute)
		if n := s.Clients(); n != 1 {
			t.Errorf("%d clients; want the one that answers", n)
		}
		answering.close()
		if first := <-ended; first != 1 {
			t.Error("the client that answers was disconnected")
		}
		<-ended
	})
}

// TestStalledClient has a client that stops reading: nobody waits for it, and it is disconnected.
func TestStalledClient(t *testing.T) {
	cfg := config()
	cfg.Stall = 100 * time.Millisecond
	round := 0
	big := strings.Repeat("x", 300<<10)
	s := serve(t, cfg, []web.Panel{{Collect: func(_ time.Time, put func(string, any)) {
		round++
		put("big", fmt.Sprint(round, big))
		put("round", round)
	}}}, nil)
	connect(t, s) // and never reads
	reader := connect(t, s)
	eventually(t, "the client that does not read is disconnected", func() bool {
		if _, err := reader.next(); err != nil {
			t.Fatal(err)
		}
		return s.metric(t, "kvstrata_web_slow_disconnects_total") == 1
	})
	eventually(t, "one client is left", func() bool { return s.Clients() == 1 })
	if _, err := reader.next(); err != nil {
		t.Error(err)
	}
	if reader.frames < 3 {
		t.Errorf("the other client got %d frames meanwhile", reader.frames)
	}
}

// TestThinLine has a client that takes a big frame slowly, but all the time: 64 kB/s, where 5 s without any end it.
func TestThinLine(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBoard(map[string]string{"big": `"` + strings.Repeat("x", 1<<20) + `"`})
		s := serveBubble(t, web.DefaultConfig(), []web.Panel{b.panel()}, nil)
		c := connect(t, s)
		began, raw, buf := time.Now(), c.conn.NetConn(), make([]byte, 16<<10)
		for total := 0; total < 1<<20; {
			<-time.After(250 * time.Millisecond)
			n, err := raw.Read(buf)
			if err != nil {
				t.Fatalf("after %d bytes and %v: %v", total, time.Since(began), err)
			}
			total += n
		}
		if took := time.Since(began); took < 2*web.DefaultConfig().Stall {
			t.Errorf("the frame was read within %v", took)
		}
		// Now it takes nothing: the next frame ends it.
		b.add(func(docs map[string]string) { docs["big"] = `"` + strings.Repeat("y", 1<<20) + `"` })
		<-time.After(6 * time.Second)
		synctest.Wait()
		if n := s.metric(t, "kvstrata_web_slow_disconnects_total"); n != 1 || s.Clients() != 0 {
			t.Errorf("%d clients, %v disconnected", s.Clients(), n)
		}
	})
}

// TestManyClients has 200 of them follow the same changes.
func TestManyClients(t *testing.T) {
	var steps []func(map[string]string)
	for i := range 10 {
		steps = append(steps, func(docs map[string]string) {
			for k := range 50 {
				docs[fmt.Sprint("source/", k)] = fmt.Sprintf(`{"stored":%d}`, i*50+k)
			}
		})
	}
	b := newBoard(nil, steps...)
	cfg := config()
	cfg.Interval = 50 * time.Millisecond
	s := serve(t, cfg, []web.Panel{b.panel()}, nil)
	var group errgroup.Group
	for range 200 {
		group.Go(func() error {
			c, err := join(s)
			if err != nil {
				return err
			}
			defer c.close()
			return b.follow(c, 0)
		})
	}
	if err := group.Wait(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "all have left", func() bool { return s.Clients() == 0 })
}

// TestRestart checks that the hub says goodbye, and that who comes back gets everything.
func TestRestart(t *testing.T) {
	b := newBoard(map[string]string{"a": "1"})
	s := serve(t, config(), []web.Panel{b.panel()}, nil)
	c := connect(t, s)
	c.until(t, "a", "1")
	s.stop()
	_, err := c.next()
	if !websocket.IsCloseError(err, websocket.CloseGoingAway) {
		t.Errorf("at the end: %v; want a close frame", err)
	}
	if err := s.Run(context.Background()); err == nil {
		t.Error("a hub ran twice")
	}
	s = serve(t, config(), []web.Panel{newBoard(map[string]string{"b": "1"}).panel()}, nil)
	for range 2 {
		again := connect(t, s)
		if f, err := again.next(); err != nil || !f.Full {
			t.Errorf("first frame of a new connection: %+v, %v", f, err)
		}
		if diff := cmp.Diff(map[string]string{"b": "1", "step": "0"}, again.docs); diff != "" {
			t.Errorf("state of a new connection (-want +got):\n%s", diff)
		}
	}
}

// TestRunEndsUnderStalledClients checks that a client that takes nothing does not hold up the end.
func TestRunEndsUnderStalledClients(t *testing.T) {
	round := 0
	s := serve(t, config(), []web.Panel{{Collect: func(_ time.Time, put func(string, any)) {
		round++
		put("big", fmt.Sprint(round, strings.Repeat("x", 1<<20)))
	}}}, nil)
	connect(t, s)
	eventually(t, "something is sent", func() bool { return s.metric(t, "kvstrata_web_sent_bytes_total") > 0 })
	began := time.Now()
	s.stop()
	if took := time.Since(began); took > 4*time.Second {
		t.Errorf("it took %v to stop", took)
	}
	if n := s.Clients(); n != 0 {
		t.Errorf("%d clients left", n)
	}
}

func TestLiveIsRefused(t *testing.T) {
	cfg := config()
	cfg.MaxClients = 1
	s := serve(t, cfg, nil, nil)
	c := connect(t, s)
	c.next() // the frame of an empty state
	tests := []struct {
		name   string
		header http.Header
		want   int
	}{
		{"foreign origin", http.Header{"Origin": {"http://evil.example"}}, http.StatusForbidden},
		{"opaque origin", http.Header{"Origin": {"null"}}, http.StatusForbidden},
		{"own origin", http.Header{"Origin": {s.url}}, http.StatusSwitchingProtocols},
		{"one too many", nil, http.StatusServiceUnavailable},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			if test.want != http.StatusServiceUnavailable {
				c.close()
				eventually(t, "there is room", func() bool { return s.Clients() == 0 })
			} else {
				c = connect(t, s)
			}
			conn, resp, err := s.dial(test.header)
			if err == nil {
				defer conn.Close()
			}
			if resp == nil || resp.StatusCode != test.want {
				t.Fatalf("answer %v, error %v; want status %d", resp, err, test.want)
			}
			if err != nil {
				wantError(t, resp)
			}
		})
	}
	resp, err := http.Get(s.url + "/v1/live")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusServiceUnavailable && resp.StatusCode != http.StatusBadRequest {
		t.Errorf("a plain GET is answered with %d", resp.StatusCode)
	}
}

// wantError checks that an answer is a JSON object with an error.
func wantError(t *testing.T, resp *http.Response) {
	t.Helper()
	data, err := io.ReadAll(resp.Body)
	var body struct{ Error string }
	if err := errors.Join(err, json.Unmarshal(data, &body)); err != nil || body.Error == "" {
		t.Errorf("body %q: %v; want an error in JSON", data, err)
	}
}

func TestBeforeRun(t *testing.T) {
	hub, err := web.New(config(), nil, nil, quiet, nil)
	if err != nil {
		t.Fatal(err)
	}
	srv := httptest.NewServer(hub.Handler())
	defer srv.Close()
	resp, err := http.Get(srv.URL + "/v1/live")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusServiceUnavailable || resp.Header.Get("Retry-After") == "" {
		t.Errorf("status %d before Run", resp.StatusCode)
	}
	wantError(t, resp)
}

// TestHostileNames checks that a name with markup arrives as text, in a key and in a document, and can't end a script.
func TestHostileNames(t *testing.T) {
	const name = "<img src=x onerror=alert(1)>\u2028</script>"
	s := serve(t, config(), []web.Panel{{Collect: func(_ time.Time, put func(string, any)) {
		put("source/"+name, map[string]string{"instance": name})
	}}}, nil)
	c := connect(t, s)
	_, data, err := c.conn.ReadMessage()
	if err != nil {
		t.Fatal(err)
	}
	if strings.ContainsAny(string(data), "<>\u2028") {
		t.Errorf("frame has markup: %s", data)
	}
	var f frame
	if err := json.Unmarshal(data, &f); err != nil {
		t.Fatal(err)
	}
	var doc map[string]string
	if err := json.Unmarshal(f.Set["source/"+name], &doc); err != nil || doc["instance"] != name {
		t.Errorf("document %v, error %v", doc, err)
	}
}

// TestWrongPanels checks what becomes of a document that can't be marshalled and of one that two panels put.
func TestWrongPanels(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		round := 0
		s := serveBubble(t, web.DefaultConfig(), []web.Panel{
			{Collect: func(_ time.Time, put func(string, any)) {
				round++
				put("shared", 1)
				put("twice", 1)
				put("twice", 2)
				put("round", round)
				if round > 1 {
					put("broken", func() {})
				} else {
					put("broken", "whole")
				}
			}},
			{Collect: func(_ time.Time, put func(string, any)) { put("shared", 2); put("own", 1) }},
		}, nil)
		c := connect(t, s)
		c.until(t, "round", "3")
		want := map[string]string{"shared": "1", "twice": "2", "round": "3", "broken": `"whole"`, "own": "1"}
		if diff := cmp.Diff(want, c.docs); diff != "" {
			t.Errorf("state (-want +got):\n%s", diff)
		}
	})
}

func TestConfig(t *testing.T) {
	if err := web.DefaultConfig().Validate(); err != nil {
		t.Error(err)
	}
	_, err := web.New(web.Config{}, nil, nil, quiet, nil)
	for _, name := range []string{"interval", "stall", "ping", "clients"} {
		if err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("%v does not tell of %s", err, name)
		}
	}
}
