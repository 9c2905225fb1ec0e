package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"kvstrata/event"
	"kvstrata/indexer/prefix"
	"kvstrata/porttest"
	"kvstrata/publisher"
)

// scalePrompt is a prompt of 200 blocks of 16 tokens.
func scalePrompt() []uint32 {
	tokens := make([]uint32, 16*200)
	for i := range tokens {
		tokens[i] = uint32(i)
	}
	return tokens
}

// publishPrompt publishes two sources that hold the first 200 and 120 blocks of the prompt, until the test ends.
func publishPrompt(t *testing.T, w *storeWorld) {
	t.Helper()
	for i, blocks := range []int{200, 120} {
		source := event.Source{Cluster: "c", Model: "org/m", Instance: fmt.Sprint("e", i), Origin: event.Connector}
		pub, err := publisher.NewNATS(publisher.DefaultNATSConfig(), w.bus, source, silent())
		if err != nil {
			t.Fatal(err)
		}
		ev := event.Event{
			Kind: event.Stored, Tier: event.GPU, Group: event.NoGroup, BlockSize: 16, Spec: event.SpecFull, LoRAID: event.NoLoRAID,
			Tokens: scalePrompt()[:16*blocks],
		}
		for n := range blocks {
			ev.Blocks = append(ev.Blocks, event.Block{Hash: event.IntHash(uint64(n + 1)), Copies: -1, Age: -1})
		}
		background(t, pub.Run)
		if err := pub.Publish(&event.Batch{Time: event.UnixTime(time.Now()), Rank: -1, Events: []event.Event{ev}}); err != nil {
			t.Fatal(err)
		}
	}
}

// indexAt is an index of a process on addresses that stay.
type indexAt struct {
	listen, admin string
	args          []string
	*process
}

func startIndex(t *testing.T, nats string, args ...string) *indexAt {
	x := &indexAt{listen: porttest.Address(t), admin: porttest.Address(t)}
	x.args = append([]string{"run", "--roles", "prefix", "--nats", nats, "--data", t.TempDir(), "--listen", x.listen, "--admin", x.admin}, args...)
	x.process = start(t, x.args...)
	return x
}

// isReady reports whether a process says that it has caught up.
func isReady(admin string) bool {
	resp, err := http.Get("http://" + admin + "/readyz")
	if err != nil {
		return false
	}
	defer resp.Body.Close()
	return resp.StatusCode == http.StatusOK
}

func (x *indexAt) awaitReady(t *testing.T) {
	t.Helper()
	eventually(t, "an index that is ready", func() bool { return isReady(x.admin) }, x.output)
}

// ask looks the prompt up.
func ask(address string) (*prefix.Answer, error) {
	payload, err := json.Marshal(prefix.Request{Model: "org/m", Tokens: scalePrompt()})
	if err != nil {
		return nil, err
	}
	resp, err := http.Post("http://"+address+"/v1/lookup", "application/json", bytes.NewReader(payload))
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		return nil, err
	}
	if resp.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("%s: %s", resp.Status, body)
	}
	a := new(prefix.Answer)
	return a, json.Unmarshal(body, a)
}

// whole says what an answer lacks of what was published.
func whole(a *prefix.Answer, err error) error {
	if err != nil {
		return err
	}
	if len(a.Matches) != 2 || a.Matches[0].Blocks != 200 || a.Matches[1].Blocks != 120 {
		return fmt.Errorf("an answer that is not whole: %+v", a)
	}
	return nil
}

// wantAlike waits until all answer the same, and wholly: their states change with the next status.
func wantAlike(t *testing.T, output func() string, addresses ...string) {
	t.Helper()
	var diff string
	eventually(t, "equal answers", func() bool {
		first, err := ask(addresses[0])
		if err := whole(first, err); err != nil {
			diff = err.Error()
			return false
		}
		for _, address := range addresses[1:] {
			a, err := ask(address)
			if err != nil {
				t.Fatal(err)
			}
			if diff = cmp.Diff(first, a); diff != "" {
				return false
			}
		}
		return true
	}, func() string { return diff + output() })
}

// Two indexes answer the same. They are restarted one after the other while somebody asks a gather without a pause: it always gets
// the whole answer, and so does who asks an index as soon as that says that it is ready.
func TestReplicasAreRestartedOneByOne(t *testing.T) {
	w := newStoreWorld(t)
	publishPrompt(t, w)
	replicas := []*indexAt{startIndex(t, w.url), startIndex(t, w.url)}
	for _, x := range replicas {
		x.awaitReady(t)
		eventually(t, "what was published", func() bool { return whole(ask(x.listen)) == nil }, x.output)
	}
	wantAlike(t, replicas[0].output, replicas[0].listen, replicas[1].listen)
	at, admin := porttest.Address(t), porttest.Address(t)
	front := start(t, "gather", "--shards", "http://"+replicas[0].listen+",http://"+replicas[1].listen, "--listen", at, "--admin", admin)
	eventually(t, "a gather that is ready", func() bool { return isReady(admin) }, front.output)

	var asked atomic.Int64
	stop, stopped := make(chan struct{}), make(chan error)
	go func() {
		for {
			select {
			case <-stop:
				stopped <- nil
				return
			default:
			}
			if err := whole(ask(at)); err != nil {
				stopped <- err
				return
			}
			asked.Add(1)
		}
	}()
	for _, x := range replicas {
		if code, _ := x.interrupt(syscall.SIGTERM); code != exitOK {
			t.Fatalf("exit %d:\n%s", code, x.output())
		}
		since := asked.Load()
		x.process = start(t, x.args...)
		x.awaitReady(t)
		if err := whole(ask(x.listen)); err != nil {
			t.Errorf("an index that says that it is ready: %v", err)
		}
		eventually(t, "answers meanwhile", func() bool { return asked.Load() > since }, front.output)
	}
	close(stop)
	if err := <-stopped; err != nil {
		t.Errorf("while indexes were restarted: %v\n%s", err, front.output())
	}
	wantAlike(t, replicas[0].output, replicas[0].listen, replicas[1].listen, at)
}

// Two shards behind a gather answer as one index does.
func TestShardsBehindAGather(t *testing.T) {
	w := newStoreWorld(t)
	publishPrompt(t, w)
	all := startIndex(t, w.url)
	one, two := startIndex(t, w.url, "--shard", "1/2", "--models", "org/m"), startIndex(t, w.url, "--shard", "2/2", "--models", "org/m")
	at, admin := porttest.Address(t), porttest.Address(t)
	front := start(t, "gather", "--shards", "http://"+one.listen+",http://"+two.listen, "--listen", at, "--admin", admin)
	for _, ready := range []string{all.admin, one.admin, two.admin, admin} {
		eventually(t, "readiness", func() bool { return isReady(ready) }, front.output)
	}
	wantAlike(t, front.output, all.listen, at)
	if _, err := ask(one.listen); err == nil || !strings.Contains(err.Error(), "kvstrata gather") {
		t.Errorf("a shard was asked for the whole: %v", err)
	}
	if code, _ := two.interrupt(syscall.SIGKILL); code == exitOK {
		t.Error("it was killed")
	}
	if _, err := ask(at); err == nil || !strings.Contains(err.Error(), "503") || !strings.Contains(err.Error(), "shard 2/2") {
		t.Errorf("without a shard: %v", err)
	}
	eventually(t, "a gather that is not ready", func() bool { return !isReady(admin) }, front.output)
	if code, _ := front.interrupt(syscall.SIGTERM); code != exitOK {
		t.Errorf("exit %d:\n%s", code, front.output())
	}
}
