package main

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	llmdpb "kvstrata/indexer/prefix/llmdpb"
)

// A client of llm-d's asks an index that hears an engine, and has its prompts tokenized by an engine.
func TestPodScores(t *testing.T) {
	const prompt = "a prompt that nobody logs"
	tokens := strings.TrimSuffix(strings.Repeat("7,", 16), ",")
	var down atomic.Bool
	tokenizer := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if want := fmt.Sprintf(`{"model":"m","prompt":%q}`, prompt); err != nil || r.URL.Path != "/tokenize" || string(body) != want || down.Load() {
			w.WriteHeader(http.StatusInternalServerError)
			_, _ = w.Write(body)
			return
		}
		_, _ = io.WriteString(w, `{"count":16,"max_model_len":8192,"tokens":[`+tokens+`],"token_strs":null}`)
	}))
	defer tokenizer.Close()
	engine := startPublisher(t, "tcp://127.0.0.1:*", "")
	storeBlock(t, engine, 7)
	args := []string{
		"run", "--roles", "subscriber,prefix", "--data", t.TempDir(), "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--nats-listen", "127.0.0.1:0",
		"--grpc", "127.0.0.1:0", "--tokenizer", tokenizer.URL,
		"--engine", "zmq+" + engine.Endpoint() + ",replay=" + engine.ReplayEndpoint() + ",model=m,instance=10.0.0.5:8000",
	}
	p := start(t, args...)
	client := llmdpb.NewIndexerServiceClient(dial(t, p.says(`grpc +(\S+)`), insecure.NewCredentials()))
	req := &llmdpb.GetPodScoresRequest{ModelName: "m", Prompt: prompt}
	eventually(t, "a score", func() bool {
		got, err := client.GetPodScores(t.Context(), req)
		return err == nil && len(got.Scores) == 1 && got.Scores[0].Pod == "10.0.0.5:8000" && got.Scores[0].Score == 1 && got.Scores[0].DataParallelRank == nil
	}, p.output)
	down.Store(true)
	if got, err := client.GetPodScores(t.Context(), req); status.Code(err) != codes.Unavailable || strings.Contains(err.Error(), prompt) {
		t.Errorf("%v, %v", got, err)
	}
	if strings.Contains(p.output(), prompt) {
		t.Errorf("a prompt is in the log:\n%s", p.output())
	}
}

func TestPodScoresWithoutATokenizer(t *testing.T) {
	run := []string{"run", "--roles", "prefix", "--data", t.TempDir(), "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--nats-listen", "127.0.0.1:0"}
	p := start(t, append(run, "--grpc", "127.0.0.1:0")...)
	client := llmdpb.NewIndexerServiceClient(dial(t, p.says(`grpc +(\S+)`), insecure.NewCredentials()))
	got, err := client.GetPodScores(t.Context(), &llmdpb.GetPodScoresRequest{ModelName: "m", Prompt: "x"})
	if status.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), "--tokenizer URL") {
		t.Errorf("%v, %v", got, err)
	}
	for want, flags := range map[string][]string{
		"give --grpc":                    {"--tokenizer", "http://127.0.0.1:1"},
		"--tokenizer: want the address":  {"--tokenizer", "http://u:hidden@h", "--grpc", "127.0.0.1:0"},
		"--tokenizer: want the address ": {"--tokenizer", "127.0.0.1:8000", "--grpc", "127.0.0.1:0"},
	} {
		run[4] = t.TempDir()
		if o := command(t, append(run, flags...)...); o.code != exitUsage || !strings.Contains(o.stderr, want) || strings.Contains(o.stderr, "hidden") {
			t.Errorf("%v: %+v", flags, o)
		}
	}
}
