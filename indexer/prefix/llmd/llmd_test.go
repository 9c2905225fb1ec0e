package llmd_test

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/reflection/grpc_reflection_v1"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/testing/protocmp"

	"kvstrata/event"
	"kvstrata/event/resident"
	"kvstrata/indexer/prefix"
	"kvstrata/indexer/prefix/llmd"
	pb "kvstrata/indexer/prefix/llmdpb"
)

// canary stands in every prompt here, and in nothing that is told of one.
const canary = "PLATYPUS"

// tokenizing behaves as vLLM's POST /tokenize: one token a byte of the prompt.
func tokenizing(w http.ResponseWriter, r *http.Request) {
	var in struct {
		Model  *string `json:"model"`
		Prompt *string `json:"prompt"`
	}
	if r.Method != http.MethodPost || r.URL.Path != "/tokenize" {
		http.NotFound(w, r)
		return
	}
	body, err := io.ReadAll(r.Body)
	if err != nil || json.Unmarshal(body, &in) != nil || in.Prompt == nil || !strings.HasPrefix(r.Header.Get("Content-Type"), "application/json") {
		w.WriteHeader(http.StatusBadRequest)
		_, _ = w.Write(body) // validation errors of vLLM repeat what came
		return
	}
	if in.Model == nil || *in.Model == "unserved" {
		w.WriteHeader(http.StatusNotFound)
		_, _ = io.WriteString(w, `{"error":{"message":"The model does not exist. `+*in.Prompt+`","type":"NotFoundError","param":"model","code":404}}`)
		return
	}
	tokens := tokensOf(*in.Prompt)
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(map[string]any{"count": len(tokens), "max_model_len": 8192, "tokens": tokens, "token_strs": nil})
}

func tokensOf(prompt string) []uint32 {
	tokens := make([]uint32, len(prompt))
	for i := range prompt {
		tokens[i] = uint32(prompt[i])
	}
	return tokens
}

// rig is the service over loopback, its index fed as a subscriber's stream would.
type rig struct {
	t      *testing.T
	index  *prefix.Index
	client pb.IndexerServiceClient
	conn   *grpc.ClientConn
	sets   map[event.Source]*resident.Set
	seqs   map[event.Source]event.Seq

	answered chan error // what the service made of its last call, whoever heard it
}

// newRig serves an index whose prompts are tokenized by handler, or by nobody.
func newRig(t *testing.T, handler http.HandlerFunc) *rig {
	t.Helper()
	var tokenize llmd.Tokenize
	if handler != nil {
		engine := httptest.NewServer(handler)
		t.Cleanup(engine.Close)
		tokenizer, err := llmd.NewTokenizer(engine.URL)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(tokenizer.Close)
		tokenize = tokenizer.Tokenize
	}
	r := &rig{
		t: t, index: prefix.New(prefix.DefaultConfig()), sets: make(map[event.Source]*resident.Set), seqs: make(map[event.Source]event.Seq),
		answered: make(chan error, 1),
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := grpc.NewServer(grpc.UnaryInterceptor(func(ctx context.Context, req any, _ *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
		answer, err := next(ctx, req)
		select {
		case <-r.answered:
		default:
		}
		r.answered <- err
		return answer, err
	}))
	llmd.Register(s, r.index, tokenize)
	r.index.RegisterRPC(s, func() bool { return true })
	done := make(chan error, 1)
	go func() { done <- s.Serve(l) }()
	r.conn, err = grpc.NewClient(l.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		r.conn.Close()
		s.Stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	r.client = pb.NewIndexerServiceClient(r.conn)
	return r
}

// feed judges events of a source, and applies them.
func (r *rig) feed(source event.Source, events ...event.Event) {
	r.t.Helper()
	set := r.sets[source]
	if set == nil {
		cfg := resident.DefaultConfig()
		cfg.Hasher = event.NewHasher("")
		set = resident.New(cfg)
		r.sets[source] = set
		r.tell(source, event.StateLive)
	}
	seq := r.seqs[source]
	r.seqs[source]++
	b := event.Batch{First: seq, Last: seq, Rank: -1, Events: events}
	set.Judge(&b)
	if _, err := r.index.Apply(r.t.Context(), &event.Message{Source: source, Epoch: 1, Fence: 1, Batches: []event.Batch{b}}); err != nil {
		r.t.Fatal(err)
	}
}

func (r *rig) tell(source event.Source, state event.State) {
	r.index.Tell(&event.Status{Source: source, Epoch: 1, Fence: 1, State: state})
}

func (r *rig) scores(prompt string, pods ...string) []*pb.PodScore {
	r.t.Helper()
	got, err := r.client.GetPodScores(r.t.Context(), &pb.GetPodScoresRequest{Prompt: prompt, ModelName: "m", PodIdentifiers: pods})
	if err != nil {
		r.t.Fatal(err)
	}
	return got.Scores
}

// text is a prompt of four blocks.
const text = canary + "!!!!one.two."

const blockSize = 5

// stored tells blocks of the text in a tier.
func stored(tier event.Tier, first, last int) event.Event {
	e := event.Event{Kind: event.Stored, Tier: tier, Group: event.NoGroup, LoRAID: event.NoLoRAID, BlockSize: blockSize}
	if first > 0 {
		e.HasParent, e.Parent = true, event.IntHash(uint64(100+first-1))
	}
	for n := first; n <= last; n++ {
		e.Blocks = append(e.Blocks, event.Block{Hash: event.IntHash(uint64(100 + n))})
		e.Tokens = append(e.Tokens, tokensOf(text[blockSize*n:blockSize*(n+1)])...)
	}
	return e
}

func source(instance string, rank uint32) event.Source {
	return event.Source{Cluster: "default", Model: "m", Instance: instance, Rank: rank, Origin: event.Engine}
}

func scored(pod string, score float64) *pb.PodScore { return &pb.PodScore{Pod: pod, Score: score} }

func ranked(pod string, score float64, rank int32) *pb.PodScore {
	return &pb.PodScore{Pod: pod, Score: score, DataParallelRank: &rank}
}

// A fleet of every kind of source is scored as llm-d would.
func TestScores(t *testing.T) {
	r := newRig(t, tokenizing)
	if got := r.scores(text); len(got) != 0 {
		t.Errorf("%v before anything was told", got)
	}
	r.feed(source("10.0.0.1", 0), stored(event.GPU, 0, 3))
	r.feed(source("10.0.0.2", 0), stored(event.GPU, 0, 1), stored(event.CPU, 2, 3))
	r.feed(source("both", 0), stored(event.GPU, 0, 0), stored(event.CPU, 0, 0))
	r.feed(source("disk", 0), stored(event.Disk, 0, 1))
	r.feed(source("later", 0), stored(event.GPU, 0, 3), event.Event{
		Kind: event.Evicted, Tier: event.GPU, Group: event.NoGroup, LoRAID: event.NoLoRAID, Blocks: []event.Block{{Hash: event.IntHash(100)}},
	})
	r.feed(source("parallel", 0), stored(event.GPU, 0, 0))
	r.feed(source("parallel", 1), stored(event.GPU, 0, 2))
	r.feed(source("half away", 0), stored(event.CPU, 0, 0))
	r.feed(source("half away", 2), stored(event.GPU, 0, 3))
	r.tell(source("half away", 2), event.StateGone)
	r.feed(source("stale", 0), stored(event.GPU, 0, 3))
	r.tell(source("stale", 0), event.StateStale)
	for _, o := range []event.Origin{event.Connector, event.Store} { // serve no requests
		s := source("shared", 0)
		s.Origin = o
		r.feed(s, stored(event.CPU, 0, 3))
	}
	other := source("10.0.0.1", 0)
	other.Model = "n"
	r.feed(other, stored(event.GPU, 0, 3))
	west := source("twice", 0)
	west.Cluster = "west"
	r.feed(source("twice", 0), stored(event.GPU, 0, 3))
	r.feed(west, stored(event.CPU, 0, 0))

	want := []*pb.PodScore{
		scored("10.0.0.1", 4), scored("10.0.0.2", 3.6), ranked("parallel", 3, 1), scored("disk", 2), scored("both", 1), ranked("parallel", 1, 0),
		ranked("half away", 0.8, 0), scored("twice", 0.8),
	}
	if diff := cmp.Diff(want, r.scores(text), protocmp.Transform()); diff != "" {
		t.Error(diff)
	}
	for _, c := range []struct {
		name   string
		prompt string
		pods   []string
		want   []*pb.PodScore
	}{
		{"some pods", text, []string{"10.0.0.2", "nobody", "stale", "shared"}, []*pb.PodScore{scored("10.0.0.2", 3.6)}},
		{"all ranks of a pod", text, []string{"parallel"}, []*pb.PodScore{ranked("parallel", 3, 1), ranked("parallel", 1, 0)}},
		{"a shorter prompt", text[:blockSize+1], []string{"10.0.0.1", "10.0.0.2"}, []*pb.PodScore{scored("10.0.0.1", 1), scored("10.0.0.2", 1)}},
		{"less than a block", text[:blockSize-1], nil, nil},
		{"no prompt", "", nil, nil},
		{"another prompt", "x" + text, nil, nil},
	} {
		if diff := cmp.Diff(c.want, r.scores(c.prompt, c.pods...), protocmp.Transform()); diff != "" {
			t.Errorf("%s: %s", c.name, diff)
		}
	}
}

// The wire is llm-d's: method, field numbers and types, as bytes.
func TestWire(t *testing.T) {
	r := newRig(t, tokenizing)
	r.feed(source("p", 0), stored(event.GPU, 0, 0))
	r.feed(source("p", 1), stored(event.GPU, 0, 1))
	request := "\x0a\x14" + text + "\x12\x01m" + "\x1a\x01p"
	answer := new(raw)
	if err := r.conn.Invoke(t.Context(), "/indexer.v1.IndexerService/GetPodScores", &raw{request}, answer, grpc.ForceCodec(rawCodec{})); err != nil {
		t.Fatal(err)
	}
	want := "\x0a\x0e\x0a\x01p\x11\x00\x00\x00\x00\x00\x00\x00\x40\x18\x01" + "\x0a\x0e\x0a\x01p\x11\x00\x00\x00\x00\x00\x00\xf0\x3f\x18\x00"
	if diff := cmp.Diff([]byte(want), []byte(answer.text)); diff != "" {
		t.Error(diff)
	}
}

// raw is a message as it stands on the wire.
type raw struct{ text string }

type rawCodec struct{}

func (rawCodec) Marshal(v any) ([]byte, error) { return []byte(v.(*raw).text), nil }

func (rawCodec) Unmarshal(data []byte, v any) error {
	v.(*raw).text = string(data)
	return nil
}

func (rawCodec) Name() string { return "proto" }

func TestReflectionListsIt(t *testing.T) {
	r := newRig(t, nil)
	info, err := grpc_reflection_v1.NewServerReflectionClient(r.conn).ServerReflectionInfo(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for request, want := range map[*grpc_reflection_v1.ServerReflectionRequest]string{
		{MessageRequest: &grpc_reflection_v1.ServerReflectionRequest_ListServices{}}:                                                          "indexer.v1.IndexerService",
		{MessageRequest: &grpc_reflection_v1.ServerReflectionRequest_FileContainingSymbol{FileContainingSymbol: "indexer.v1.IndexerService"}}: "GetPodScores",
	} {
		if err := info.Send(request); err != nil {
			t.Fatal(err)
		}
		if got, err := info.Recv(); err != nil || !strings.Contains(got.String(), want) {
			t.Errorf("%v, %v: want %s", got, err, want)
		}
	}
}

// Whatever a tokenizer does, a caller gets a code and a sentence, and no word of a prompt.
func TestRefusals(t *testing.T) {
	says := func(code int, body string) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			w.WriteHeader(code)
			_, _ = io.WriteString(w, body)
		}
	}
	var elsewhere atomic.Bool
	for _, c := range []struct {
		name, model string
		handler     http.HandlerFunc
		code        codes.Code
		want        string
	}{
		{"no tokenizer", "m", nil, codes.FailedPrecondition, "--tokenizer URL"},
		{"no model", "", tokenizing, codes.InvalidArgument, "model_name: missing"},
		{"a model of nobody's", "unserved", tokenizing, codes.Unavailable, "answers 404"},
		{"no /tokenize", "m", http.NotFound, codes.Unavailable, "POST /tokenize"},
		{"broken", "m", says(500, canary), codes.Unavailable, "answers 500"},
		{"elsewhere", "m", func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Path != "/tokenize" {
				elsewhere.Store(true)
			}
			http.Redirect(w, r, "/elsewhere", http.StatusTemporaryRedirect)
		}, codes.Unavailable, "answers 307"},
		{"hangs up", "m", func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }, codes.Unavailable, "is an engine up"},
		{"breaks off", "m", func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Length", "100")
			_, _ = io.WriteString(w, `{"count":1,"tok`)
		}, codes.Unavailable, "try again"},
		{"no JSON", "m", says(200, canary), codes.Unavailable, "tokens and count"},
		{"no tokens", "m", says(200, `{"count":0,"max_model_len":8}`), codes.Unavailable, "tokens and count"},
		{"no count", "m", says(200, `{"tokens":[1]}`), codes.Unavailable, "tokens and count"},
		{"fewer than counted", "m", says(200, `{"count":2,"tokens":[1]}`), codes.Unavailable, "tokens and count"},
		{"text for tokens", "m", says(200, `{"count":1,"tokens":["`+canary+`"]}`), codes.Unavailable, "tokens and count"},
		{"a negative token", "m", says(200, `{"count":1,"tokens":[-1]}`), codes.Unavailable, "tokens and count"},
		{"a token of 33 bits", "m", says(200, `{"count":1,"tokens":[4294967296]}`), codes.Unavailable, "tokens and count"},
		{"too large", "m", says(200, `{"count":1,"tokens":[1],"token_strs":["`+strings.Repeat("x", 16<<20)+`"]}`), codes.Unavailable, "more than 16 MiB"},
		{"too many tokens", "m", says(200, `{"count":1048577,"tokens":[1`+strings.Repeat(",1", 1<<20)+`]}`), codes.InvalidArgument, "1048577 of them"},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := newRig(t, c.handler)
			r.feed(source("p", 0), stored(event.GPU, 0, 0))
			got, err := r.client.GetPodScores(t.Context(), &pb.GetPodScoresRequest{Prompt: text, ModelName: c.model})
			if status.Code(err) != c.code || !strings.Contains(status.Convert(err).Message(), c.want) {
				t.Errorf("%v, %v: want %v, %q", got, err, c.code, c.want)
			}
			if err != nil && strings.Contains(err.Error(), canary) {
				t.Errorf("tells of the prompt: %v", err)
			}
		})
	}
	if elsewhere.Load() {
		t.Error("a prompt went where it was not sent")
	}
}

// waits is a tokenizer that answers when its caller is gone.
func waits(asked, left chan<- struct{}) http.HandlerFunc {
	return func(_ http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		close(asked)
		<-r.Context().Done()
		close(left)
	}
}

// A caller that goes away takes its question to the tokenizer with it, and nobody takes that for the tokenizer's failure.
func TestACallerGoesAway(t *testing.T) {
	asked, left := make(chan struct{}), make(chan struct{})
	r := newRig(t, waits(asked, left))
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		_, err := r.client.GetPodScores(ctx, &pb.GetPodScoresRequest{Prompt: text, ModelName: "m"})
		done <- err
	}()
	<-asked
	cancel()
	if err := <-done; status.Code(err) != codes.Canceled {
		t.Errorf("%v", err)
	}
	<-left
	if err := <-r.answered; status.Code(err) != codes.Canceled {
		t.Errorf("the service answers %v", err)
	}
}

func TestTokenizeEndsWithItsContext(t *testing.T) {
	asked, left := make(chan struct{}), make(chan struct{})
	engine := httptest.NewServer(waits(asked, left))
	defer engine.Close()
	tokenizer, err := llmd.NewTokenizer(engine.URL)
	if err != nil {
		t.Fatal(err)
	}
	defer tokenizer.Close()
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		<-asked
		cancel()
	}()
	if _, err := tokenizer.Tokenize(ctx, "m", text); !errors.Is(err, context.Canceled) { // and not the client's own limit
		t.Errorf("%v", err)
	}
	<-left
}

func TestAddressOfTheTokenizer(t *testing.T) {
	for _, bad := range []string{
		"", "localhost:8000", "ftp://h", "http://", "http://user:" + canary + "@h", "http://h?key=" + canary, "http://h#x", "http://h:" + canary,
	} {
		if _, err := llmd.NewTokenizer(bad); err == nil || strings.Contains(err.Error(), canary) {
			t.Errorf("%q: %v", bad, err)
		}
	}
	var path atomic.Value
	engine := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		path.Store(r.URL.Path)
		_, _ = io.WriteString(w, `{"count":0,"tokens":[]}`)
	}))
	defer engine.Close()
	for _, base := range []string{engine.URL, engine.URL + "/", engine.URL + "/a/b", engine.URL + "/a/b/"} {
		tokenizer, err := llmd.NewTokenizer(base)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := tokenizer.Tokenize(t.Context(), "m", text); err != nil {
			t.Errorf("%s: %v", base, err)
		}
		want := "/tokenize"
		if strings.Contains(base, "/a/b") {
			want = "/a/b/tokenize"
		}
		if got := path.Load(); got != want {
			t.Errorf("%s: asked %v, want %s", base, got, want)
		}
		tokenizer.Close()
	}
}
