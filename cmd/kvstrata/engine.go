package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"net"
	"net/http"
	"os"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"golang.org/x/sync/errgroup"

	"kvstrata/bus"
	"kvstrata/connector"
	"kvstrata/event"
	"kvstrata/publisher"
	"kvstrata/sim"
)

// engineCmd runs one simulated engine as a process of its own, as the demo does with --processes, and chaos. Its API is for
// these alone.
type engineCmd struct {
	simSpec
	natsLogin
	insecureFlag

	NATS    string     `name:"nats" help:"NATS servers, comma-separated; a connector needs them."`
	Listen  string     `help:"Address of the API." default:"127.0.0.1:0"`
	Speed   float64    `help:"Virtual time over real time." default:"1"`
	Start   event.Time `help:"What the clocks show at --began, in ns of Unix time." required:""`
	Began   int64      `help:"When that was, in ns of Unix time." required:""`
	Journal string     `help:"A file that gets a line of JSON for each batch, before it is published." type:"path" placeholder:"FILE"`
}

// Run runs the engine until a signal comes.
func (c *engineCmd) Run(a *app) error {
	entrances, err := c.entrances()
	if err != nil {
		return err
	}
	if err := c.check(append(entrances, entrance{"--listen", c.Listen, false, "an address on loopback"})...); err != nil {
		return err
	}
	b, err := c.dial(a)
	if err != nil {
		return err
	}
	if b != nil {
		defer b.Close()
	}
	wrap, closeJournal, err := c.journal()
	if err != nil {
		return err
	}
	defer closeJournal()
	registry := prometheus.NewRegistry()
	e, err := newSimEngine(a, b, registry, c.simSpec, wrap)
	if err != nil {
		return err
	}
	steps := sim.DefaultFleetConfig()
	steps.Speed = c.Speed
	host := sim.NewHost(steps, e.Engine)
	listener, err := net.Listen("tcp", c.Listen)
	if err != nil {
		return fmt.Errorf("listen: %w", err)
	}
	server := &http.Server{Handler: engineAPI{e, host, c.clock(), registry}.handler(), ReadHeaderTimeout: 5 * time.Second}
	// The engine stands still before its sockets close, and its connector ends after that: a signal ends the host alone, the
	// failure of anything ends all.
	aroundCtx, stopAround := context.WithCancel(context.WithoutCancel(a.ctx))
	defer stopAround()
	group, ctx := errgroup.WithContext(aroundCtx)
	group.Go(func() error { return e.run(ctx) })
	group.Go(func() error {
		<-ctx.Done()
		return server.Close()
	})
	group.Go(func() error {
		if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
			return err
		}
		return nil
	})
	hostCtx, stopHost := context.WithCancel(ctx)
	defer stopHost()
	defer context.AfterFunc(a.ctx, stopHost)()
	err = c.host(hostCtx, a, e, host, listener.Addr())
	stopAround()
	return errors.Join(err, group.Wait(), e.Close())
}

// dial connects to NATS where the engine has a connector; without one it returns nil.
func (c *engineCmd) dial(a *app) (*bus.Bus, error) {
	switch {
	case c.Transfer == "":
		return nil, nil
	case c.NATS == "":
		return nil, usagef("--nats: what a connector tells goes onto NATS; name the servers")
	}
	cfg := natsFlags{natsLogin: c.natsLogin, NATS: c.NATS, NATSReplicas: 1, NATSMaxAge: time.Hour, NATSMaxBytes: 2 << 30, LeaseTTL: 2 * time.Second}.config()
	return bus.Dial(a.ctx, cfg, "kvstrata", a.log)
}

// journal returns what stands between the engine and its socket, where a journal was asked for, and how to close it.
func (c *engineCmd) journal() (wrap func(*publisher.ZMQ, event.Source) sim.Publisher, closeFile func() error, err error) {
	if c.Journal == "" {
		return nil, func() error { return nil }, nil
	}
	f, err := os.Create(c.Journal)
	if err != nil {
		return nil, nil, fmt.Errorf("make journal: %w; choose another with --journal", err)
	}
	return func(socket *publisher.ZMQ, _ event.Source) sim.Publisher { return &journal{socket, f} }, f.Close, nil
}

// journal is an engine's publisher that writes down what it is about to publish: what anybody can have heard of the engine is
// in the file, however it ends.
type journal struct {
	out  *publisher.ZMQ
	file io.Writer
}

// journalLine is what a journal says of one batch.
type journalLine struct {
	Seq     uint64     `json:"seq"`
	Time    event.Time `json:"time"`
	Stored  int        `json:"stored"`  // blocks
	Evicted int        `json:"evicted"` // blocks
	Cleared int        `json:"cleared"` // resets
}

// Publish writes and publishes. The engine publishes one batch at a time, so that the sequence is known before.
func (j *journal) Publish(b *event.Batch) error {
	line := journalLine{Seq: j.out.Seq(), Time: b.Time}
	for i := range b.Events {
		switch b.Events[i].Kind {
		case event.Stored:
			line.Stored += len(b.Events[i].Blocks)
		case event.Evicted:
			line.Evicted += len(b.Events[i].Blocks)
		case event.Cleared:
			line.Cleared++
		}
	}
	if err := json.NewEncoder(j.file).Encode(line); err != nil {
		return fmt.Errorf("write journal seq=%d: %w", line.Seq, err)
	}
	return j.out.Publish(b)
}

// host says where the engine is, and steps it until ctx ends.
func (c *engineCmd) host(ctx context.Context, a *app, e *simEngine, host *sim.Host, api net.Addr) error {
	select {
	case <-e.socket.Ready():
	case <-ctx.Done():
		return nil
	}
	fmt.Fprintf(a.stdout, "events %s\nreplay %s\napi http://%s\n", e.socket.Endpoint(), e.socket.ReplayEndpoint(), api)
	return host.Run(ctx, c.clock())
}

func (c *engineCmd) clock() sim.Clock {
	return sim.Clock{Began: time.Unix(0, c.Began), Start: c.Start, Speed: c.Speed}
}

// engineAPI serves one simulated engine.
type engineAPI struct {
	engine  *simEngine
	host    *sim.Host
	clock   sim.Clock
	metrics *prometheus.Registry
}

func (s engineAPI) handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("POST /requests", s.request)
	mux.HandleFunc("GET /story", s.story)
	mux.HandleFunc("GET /resident", s.resident)
	mux.HandleFunc("POST /reset", s.reset)
	mux.Handle("GET /metrics", promhttp.HandlerFor(s.metrics, promhttp.HandlerOpts{}))
	return mux
}

// wireRequest is a request on its way to an engine, and its answer.
type wireRequest struct {
	ID       string            `json:"id"`
	Prompt   []uint32          `json:"prompt,omitempty"`
	Output   int               `json:"max_tokens,omitempty"`
	LoRA     string            `json:"lora,omitempty"`
	Salt     string            `json:"cache_salt,omitempty"`
	Session  string            `json:"session,omitempty"`
	Tenant   string            `json:"tenant,omitempty"`
	Transfer *connector.Params `json:"kv_transfer_params,omitempty"`
}

// maxRequest bounds the body of a request, in bytes.
const maxRequest = 64 << 20

func (s engineAPI) request(w http.ResponseWriter, r *http.Request) {
	var in wireRequest
	if err := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxRequest)).Decode(&in); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	answer, err := s.host.Do(r.Context(), sim.Request{
		ID: in.ID, Prompt: in.Prompt, Output: in.Output, LoRA: in.LoRA, Salt: in.Salt, Session: in.Session, Tenant: in.Tenant, Params: in.Transfer,
	})
	if err != nil {
		http.Error(w, err.Error(), http.StatusConflict)
		return
	}
	answerJSON(w, wireRequest{ID: answer.ID, Transfer: answer.Params})
}

func answerJSON(w http.ResponseWriter, v any) {
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(v) // the client is gone
}

func (s engineAPI) story(w http.ResponseWriter, r *http.Request) {
	var story engineStory
	s.host.View(func(*sim.Engine) { story, _ = s.engine.Tell(r.Context()) })
	answerJSON(w, story)
}

// reset makes the engine forget its cache, and refuses while a request runs.
func (s engineAPI) reset(w http.ResponseWriter, _ *http.Request) {
	var done bool
	var err error
	s.host.View(func(e *sim.Engine) { done, err = e.Reset(s.clock.Now()) })
	switch {
	case err != nil:
		http.Error(w, err.Error(), http.StatusInternalServerError)
	case !done:
		http.Error(w, "requests hold blocks", http.StatusConflict)
	}
}

// wireBlock is a line of an engine's resident set.
type wireBlock struct {
	Hash   event.BlockHash `json:"hash"`
	Tier   event.Tier      `json:"tier"`
	Group  event.Group     `json:"group"`
	Copies int             `json:"copies"`
}

func (s engineAPI) resident(w http.ResponseWriter, _ *http.Request) {
	var lines bytes.Buffer
	enc := json.NewEncoder(&lines)
	s.host.View(func(e *sim.Engine) {
		for k, copies := range e.Resident() {
			_ = enc.Encode(wireBlock{k.Hash, k.Tier, k.Group, copies}) // into memory
		}
	})
	_, _ = lines.WriteTo(w) // the client is gone
}

// remoteEngine is a simulated engine in another process.
type remoteEngine struct {
	name string
	url  func(ctx context.Context) string // empty when ctx ended first
}

var (
	_ sim.Server = remoteEngine{}
	_ demoEngine = remoteEngine{}
	_ demoEngine = (*simEngine)(nil)
)

// Name returns the engine's name.
func (e remoteEngine) Name() string { return e.name }

// Do sends the request to the engine's process.
func (e remoteEngine) Do(ctx context.Context, r sim.Request) (sim.Request, error) {
	body, err := json.Marshal(wireRequest{
		ID: r.ID, Prompt: r.Prompt, Output: r.Output, LoRA: r.LoRA, Salt: r.Salt, Session: r.Session, Tenant: r.Tenant, Transfer: r.Params,
	})
	if err != nil {
		return r, err
	}
	var answer wireRequest
	err = e.call(ctx, http.MethodPost, "/requests", bytes.NewReader(body), func(in io.Reader) error { return json.NewDecoder(in).Decode(&answer) })
	r.Params = answer.Transfer
	return r, err
}

// Tell asks the engine for its numbers.
func (e remoteEngine) Tell(ctx context.Context) (story engineStory, err error) {
	err = e.call(ctx, http.MethodGet, "/story", nil, func(in io.Reader) error { return json.NewDecoder(in).Decode(&story) })
	return story, err
}

// Blocks asks the engine for what is resident. What can't be asked is not there: the comparison shows it.
func (e remoteEngine) Blocks(ctx context.Context) iter.Seq2[sim.BlockKey, int] {
	return func(yield func(sim.BlockKey, int) bool) {
		_ = e.call(ctx, http.MethodGet, "/resident", nil, func(in io.Reader) error {
			lines := bufio.NewScanner(in)
			for lines.Scan() {
				var b wireBlock
				if err := json.Unmarshal(lines.Bytes(), &b); err != nil || !yield(sim.BlockKey{Hash: b.Hash, Tier: b.Tier, Group: b.Group}, b.Copies) {
					return err
				}
			}
			return lines.Err()
		})
	}
}

func (e remoteEngine) call(ctx context.Context, method, path string, body io.Reader, read func(io.Reader) error) error {
	req, err := http.NewRequestWithContext(ctx, method, e.url(ctx)+path, body)
	if err != nil {
		return err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(io.LimitReader(resp.Body, 1024))
		return fmt.Errorf("%s %s%s: %s: %s", method, e.name, path, resp.Status, bytes.TrimSpace(text))
	}
	return read(resp.Body)
}
