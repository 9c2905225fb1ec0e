package subscriber_test

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"kvstrata/event"
	"kvstrata/subscriber"
)

// eventBuffer is TensorRT-LLM's server, as far as its events go: it hands out what has gathered, and forgets it.
type eventBuffer struct {
	mu      sync.Mutex
	next    int
	waiting []string
	down    bool
}

func (b *eventBuffer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case r.Method != http.MethodPost || r.URL.Path != "/kv_cache_events":
		w.WriteHeader(http.StatusNotFound)
	case b.down:
		w.WriteHeader(http.StatusServiceUnavailable)
	default:
		fmt.Fprintf(w, "[%s]", strings.Join(b.waiting, ","))
		b.waiting = nil
	}
}

func (b *eventBuffer) tell(data string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.waiting = append(b.waiting, fmt.Sprintf(`{"event_id":%d,"data":%s}`, b.next, data))
	b.next++
}

// trtBlocks is a stored event of blocks first … last of the one prompt.
func trtBlocks(first, last int) string {
	var blocks []string
	for n := first; n <= last; n++ {
		var ids []string
		for _, id := range tokens(n) {
			ids = append(ids, fmt.Sprintf(`{"type":"unique_token","token_id":%d,"token_extra_id":0}`, id))
		}
		blocks = append(blocks, fmt.Sprintf(`{"type":"stored_block","block_hash":%d,"tokens":[%s],"cache_level":0,"priority":35}`, n, strings.Join(ids, ",")))
	}
	parent := "null"
	if first > 1 {
		parent = fmt.Sprint(first - 1)
	}
	return fmt.Sprintf(`{"type":"stored","parent_hash":%s,"blocks":[%s]}`, parent, strings.Join(blocks, ","))
}

// A buffer of TensorRT-LLM's that is pulled becomes a source like others; a block that moves stays known.
func TestTensorRTIsPulled(t *testing.T) {
	r, buffer := newRoad(t), new(eventBuffer)
	server := httptest.NewServer(buffer)
	defer server.Close()
	engines, err := subscriber.ParseEngine("trtllm+" + server.URL + "/kv_cache_events,model=m,cluster=c,instance=trt")
	if err != nil {
		t.Fatal(err)
	}
	buffer.tell(`{"type":"created","num_blocks_per_cache_level":[64,32]}`)
	buffer.tell(trtBlocks(1, 4))
	r.subscribe(engines...)
	if s := r.await("trt", 1, event.StateLive); s.Dialect != "tensorrt-llm" || s.Pool != 64 {
		t.Errorf("dialect %q, pool %d", s.Dialect, s.Pool)
	}
	if n := r.matched("trt"); n != 4 {
		t.Errorf("%d blocks match, want 4", n)
	}
	buffer.tell(`{"type":"updated","block_hash":3,"cache_level":{"type":"event_diff","new_value":1,"old_value":0},"priority":null}`)
	buffer.tell(`{"type":"removed","block_hashes":[4]}`)
	s := r.await("trt", 3, event.StateLive)
	if n := r.matched("trt"); n != 3 || len(s.Oddities) > 0 {
		t.Errorf("%d blocks match, want 3; oddities %+v", n, s.Oddities)
	}
	buffer.tell(`{"type":"removed","block_hashes":[3]}`) // which lies in host memory
	s = r.await("trt", 4, event.StateLive)
	if n := r.matched("trt"); n != 2 || len(s.Oddities) > 0 {
		t.Errorf("%d blocks match, want 2; oddities %+v", n, s.Oddities)
	}

	buffer.mu.Lock()
	buffer.next, buffer.waiting = buffer.next+2, nil // two events that nobody got
	buffer.mu.Unlock()
	buffer.tell(trtBlocks(1, 1))
	s = r.await("trt", 7, event.StatePartial)
	if s.Ledger.Lost != 2 {
		t.Errorf("ledger %+v, want 2 lost", s.Ledger)
	}

	server.CloseClientConnections()
	buffer.mu.Lock()
	buffer.next, buffer.down = 0, true // it restarts, and has not told the size of its pool yet
	buffer.mu.Unlock()
	eventually(t, "the engine is away", func() bool { return strings.Contains(r.info("trt").Reason, "answers 503") })
	buffer.mu.Lock()
	buffer.down = false
	buffer.mu.Unlock()
	buffer.tell(trtBlocks(1, 2))
	eventually(t, "another life, of which the pool is not known", func() bool {
		now := r.info("trt")
		return now.Epoch > s.Epoch && now.Started && now.LastSeq == 0 && now.Pool == 0
	})
}

// dynamoLine is a line of Dynamo's recorder that stores blocks first … last of the one prompt.
func dynamoLine(t *testing.T, worker, id, rank, first, last int) string {
	type block struct {
		Hash  int    `json:"block_hash"`
		Local uint64 `json:"tokens_hash"`
	}
	var blocks []block
	for n := first; n <= last; n++ {
		blocks = append(blocks, block{n, event.LocalHash(tokens(n), event.Hasher{}.Seed("", ""))})
	}
	var parent *int
	if first > 1 {
		parent = new(int)
		*parent = first - 1
	}
	text, err := json.Marshal(map[string]any{"parent_hash": parent, "blocks": blocks})
	if err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf(`{"timestamp":%d,"event":{"worker_id":%d,"event":{"event_id":%d,"data":{"stored":%s},"dp_rank":%d}}}`+"\n",
		10*id, worker, id, text, rank)
}

// A recording of Dynamo's is followed as it grows, one worker and rank of it, and has the names that lookups by tokens ask for.
func TestDynamoRecordingIsFollowed(t *testing.T) {
	r := newRoad(t)
	path := filepath.Join(t.TempDir(), "recording.jsonl")
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	write := func(text string) {
		if _, err := f.WriteString(text); err != nil {
			t.Fatal(err)
		}
	}
	write(dynamoLine(t, 8, 0, 0, 1, 9) + dynamoLine(t, 7, 0, 0, 1, 3) + dynamoLine(t, 7, 0, 1, 1, 9))
	engines, err := subscriber.ParseEngine("dynamo+file://" + path + ",model=m,cluster=c,instance=dyn,block=16,worker=7")
	if err != nil {
		t.Fatal(err)
	}
	r.subscribe(engines...)
	if s := r.await("dyn", 0, event.StateLive); s.Dialect != "dynamo" {
		t.Errorf("dialect %q", s.Dialect)
	}
	if n := r.matched("dyn"); n != 3 {
		t.Errorf("%d blocks match, want 3", n)
	}
	line := dynamoLine(t, 7, 1, 0, 4, 6)
	write(line[:20])
	write(line[20:])
	write(`{"timestamp":30,"event":{"worker_id":7,"event":{"event_id":2,"data":{"removed":{"block_hashes":[6]}},"dp_rank":0}}}` + "\n")
	r.await("dyn", 2, event.StateLive)
	if n := r.matched("dyn"); n != 5 {
		t.Errorf("%d blocks match, want 5", n)
	}
}

// With a key of our own, names made without it must not pass for ours.
func TestDynamoNamesAreWithheldUnderAKey(t *testing.T) {
	r := newRoad(t)
	r.cfg.HashKey = "secret"
	path := filepath.Join(t.TempDir(), "recording.jsonl")
	if err := os.WriteFile(path, []byte(dynamoLine(t, 7, 0, 0, 1, 3)), 0o600); err != nil {
		t.Fatal(err)
	}
	engines, err := subscriber.ParseEngine("dynamo+file://" + path + ",model=m,cluster=c,instance=dyn,block=16")
	if err != nil {
		t.Fatal(err)
	}
	r.subscribe(engines...)
	s := r.await("dyn", 0, event.StateLive)
	if n := r.matched("dyn"); n > 0 || len(s.Oddities) != 1 || s.Oddities[0].Name != "prefix_hash_withheld" {
		t.Errorf("%d blocks match; oddities %+v", n, s.Oddities)
	}
}

// Time that runs backwards, and more copies than there are blocks, are told with an example each.
func TestBreachesAreToldWithAnExample(t *testing.T) {
	r, e := newRoad(t), startEngine(t)
	cfg := e.config("a")
	cfg.PoolSize = 3
	r.subscribe(cfg)
	second := storing(1, 3)
	first := storing(1, 3)
	e.publish(first, second)
	s := r.await("a", 1, event.StateLive)
	seen := make(map[string]string)
	for _, o := range s.Oddities {
		seen[o.Name] = o.Example
	}
	if !strings.HasSuffix(seen["time_runs_backwards"], "older than the one before") {
		t.Errorf("time: %q", seen["time_runs_backwards"])
	}
	if want := "6 copies in a pool of 3 blocks after batch 1"; !strings.HasPrefix(seen["more_copies_than_pool"], want) {
		t.Errorf("pool: %q, want %q…", seen["more_copies_than_pool"], want)
	}
}

// A stop does not wait for a server that does not answer.
func TestPullStopsAtOnce(t *testing.T) {
	r := newRoad(t)
	asked, over := make(chan struct{}, 1), make(chan struct{})
	server := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, req *http.Request) {
		select {
		case asked <- struct{}{}:
		default:
		}
		select {
		case <-over:
		case <-req.Context().Done():
		}
	}))
	defer server.Close()
	defer close(over)
	engines, err := subscriber.ParseEngine("trtllm+" + server.URL + "/kv_cache_events,model=m,cluster=c,instance=trt")
	if err != nil {
		t.Fatal(err)
	}
	stop := r.subscribe(engines...)
	<-asked
	began := time.Now()
	stop()
	if took := time.Since(began); took > 3*time.Second {
		t.Errorf("stopped after %v", took)
	}
}

// Events are taken from the server that was named alone.
func TestPullFollowsNobody(t *testing.T) {
	r, elsewhere := newRoad(t), new(eventBuffer)
	other := httptest.NewServer(elsewhere)
	defer other.Close()
	elsewhere.tell(trtBlocks(1, 4))
	server := httptest.NewServer(http.RedirectHandler(other.URL+"/kv_cache_events", http.StatusTemporaryRedirect))
	defer server.Close()
	engines, err := subscriber.ParseEngine("trtllm+" + server.URL + "/kv_cache_events,model=m,cluster=c,instance=trt")
	if err != nil {
		t.Fatal(err)
	}
	r.subscribe(engines...)
	eventually(t, "the answer is told", func() bool { return strings.Contains(r.info("trt").Reason, "307 Temporary Redirect") })
	if elsewhere.mu.Lock(); len(elsewhere.waiting) != 1 {
		t.Error("the other server was asked")
	}
	elsewhere.mu.Unlock()
}
