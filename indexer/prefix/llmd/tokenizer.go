package llmd

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"time"
)

// What a Tokenizer waits for, and takes, at most.
const (
	tokenizeTime   = 5 * time.Second
	tokenizeAnswer = 16 << 20 // bytes
	tokenizeIdle   = 16       // connections that are kept for the next calls
)

// Tokenizer has an engine make tokens of prompts, over vLLM's POST /tokenize. Calls run side by side; the gRPC listener bounds their number.
type Tokenizer struct {
	address string
	client  *http.Client
}

// NewTokenizer takes the address of an engine's API, as http://10.0.0.5:8000. Nothing connects before the first call.
func NewTokenizer(address string) (*Tokenizer, error) {
	u, err := url.Parse(address)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" || u.User != nil || u.RawQuery != "" || u.Fragment != "" {
		// the address is not repeated: it may hold a password
		return nil, errors.New("want the address of an engine's API, without user and query, as http://10.0.0.5:8000")
	}
	return &Tokenizer{
		address: u.JoinPath("tokenize").String(),
		client: &http.Client{
			Timeout: tokenizeTime,
			// No proxy of the environment and no redirect: prompts go where they were sent.
			Transport:     &http.Transport{MaxIdleConnsPerHost: tokenizeIdle, IdleConnTimeout: time.Minute},
			CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		},
	}, nil
}

// Tokenize returns the token ids of a prompt, with the special tokens that a completion of it would have. An error holds nothing of
// what was sent or answered: engines repeat prompts in theirs.
func (t *Tokenizer) Tokenize(ctx context.Context, model, prompt string) ([]uint32, error) {
	body, err := json.Marshal(struct {
		Model  string `json:"model"`
		Prompt string `json:"prompt"`
	}{model, prompt})
	if err != nil {
		return nil, errors.New("ask the tokenizer: the prompt does not go into JSON")
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, t.address, bytes.NewReader(body))
	if err != nil {
		return nil, fmt.Errorf("ask the tokenizer: %w", err)
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := t.client.Do(req)
	if err != nil {
		return nil, fmt.Errorf("ask the tokenizer: %w; is an engine up at --tokenizer?", err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("ask the tokenizer: %s answers %d; --tokenizer wants an engine that serves model %q and vLLM's POST /tokenize",
			t.address, resp.StatusCode, model)
	}
	answer, err := io.ReadAll(io.LimitReader(resp.Body, tokenizeAnswer+1))
	if err != nil {
		return nil, fmt.Errorf("read the tokenizer's answer: %w; try again", err)
	}
	if len(answer) > tokenizeAnswer {
		return nil, fmt.Errorf("read the tokenizer's answer: %s sends more than %d MiB; ask with a shorter prompt", t.address, tokenizeAnswer>>20)
	}
	var got struct {
		Tokens []uint32 `json:"tokens"`
		Count  *int     `json:"count"`
	}
	if err := json.Unmarshal(answer, &got); err != nil || got.Tokens == nil || got.Count == nil || *got.Count != len(got.Tokens) {
		return nil, fmt.Errorf("read the tokenizer's answer: %s does not send vLLM's tokens and count; --tokenizer wants an engine with vLLM's POST /tokenize",
			t.address)
	}
	return got.Tokens, nil
}

// Close gives connections back that nobody uses.
func (t *Tokenizer) Close() { t.client.CloseIdleConnections() }
