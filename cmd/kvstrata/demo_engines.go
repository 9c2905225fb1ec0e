package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"kvstrata/connector"
	"kvstrata/event"
	"kvstrata/publisher"
	"kvstrata/sim"
	"kvstrata/subscriber"
)

// demoEngines are the simulated engines with their sockets and connectors.
type demoEngines struct {
	prefill, decode []demoEngine
	configs         []subscriber.EngineConfig // prefill engines first
	connector       string                    // for people; empty without one
	store           string                    // address of the shared store; empty without one
	group           *errgroup.Group
	cancel          context.CancelFunc
	closers         []func() error
}

// stop ends the engines' sockets and connectors, and frees their memory: nobody steps them any more.
func (d *demoEngines) stop() error {
	d.cancel()
	errs := []error{d.group.Wait()}
	for _, closer := range d.closers {
		errs = append(errs, closer())
	}
	return errors.Join(errs...)
}

// all returns the engines in the order of their configurations.
func (d *demoEngines) all() []demoEngine {
	return append(append([]demoEngine(nil), d.prefill...), d.decode...)
}

// storySum is what all engines did.
type storySum struct {
	sim.EngineStats
	Published uint64
}

// tell returns what each engine did, and all together.
func (d *demoEngines) tell(ctx context.Context) (stories []engineStory, sum storySum, err error) {
	for _, e := range d.all() {
		story, err := e.Tell(ctx)
		if err != nil {
			return nil, sum, fmt.Errorf("ask engine %s: %w", e.Name(), err)
		}
		stories = append(stories, story)
		s := &story.Stats
		sum.BlocksStored += s.BlocksStored
		sum.BlocksEvicted += s.BlocksEvicted
		sum.BlocksLoaded += s.BlocksLoaded
		sum.BlocksVerified += s.BlocksVerified
		sum.BlocksWrong += s.BlocksWrong
		sum.BlocksFailed += s.BlocksFailed
		sum.Refused += s.Refused
		sum.Published += story.Published
	}
	return stories, sum, nil
}

// checkTransfers prints what came by transfer. A block with a wrong byte wraps errMismatch.
func (d *demoEngines) checkTransfers(ctx context.Context, a *app) error {
	if d.connector == "" {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	_, sum, err := d.tell(ctx)
	if err != nil {
		return err
	}
	fmt.Fprintf(a.stdout, "  transfers     %d blocks came and were compared byte for byte: %d were wrong; %d did not come and were computed\n",
		sum.BlocksVerified, sum.BlocksWrong, sum.BlocksFailed)
	if sum.BlocksWrong > 0 {
		return fmt.Errorf("%w: %d blocks came with wrong bytes", errMismatch, sum.BlocksWrong)
	}
	return nil
}

// fleet returns the engines as traffic sees them.
func (d *demoEngines) fleet(speed float64) (*sim.Fleet, error) {
	cfg := sim.DefaultFleetConfig()
	cfg.Speed = speed
	local := func(engines []demoEngine) (out []*sim.Engine) {
		for _, e := range engines {
			if e, ok := e.(*simEngine); ok {
				out = append(out, e.Engine)
			}
		}
		return out
	}
	remote := func(engines []demoEngine) (out []sim.Server) {
		for _, e := range engines {
			if e, ok := e.(remoteEngine); ok {
				out = append(out, e)
			}
		}
		return out
	}
	if servers := remote(d.prefill); len(servers) > 0 {
		return sim.NewRemoteFleet(cfg, servers, remote(d.decode))
	}
	return sim.NewFleet(cfg, local(d.prefill), local(d.decode))
}

// startEngines makes the engines, with their sockets on free ports of loopback: here, or as processes where they have a
// connector.
func (c *demoCmd) startEngines(ctx context.Context, s *stack, view fleetView, sup *supervisor, speed float64) (*demoEngines, error) {
	if c.Prefill < 1 || c.Prefill > 64 || c.Decode < 0 || c.Decode > 64 {
		return nil, usagef("--prefill %d, --decode %d: want 1 to 64 prefill and 0 to 64 decode engines", c.Prefill, c.Decode)
	}
	if c.Connector == "auto" {
		c.Connector = map[bool]string{true: "none", false: "tcp"}[speed == 0]
	}
	// The sockets outlive the engines: what was published last must get out.
	outlive, cancel := context.WithCancel(context.WithoutCancel(ctx))
	d := &demoEngines{group: new(errgroup.Group), cancel: cancel}
	err := c.addEngines(ctx, outlive, s, view, sup, d, speed)
	if err != nil {
		return nil, errors.Join(err, d.stop())
	}
	return d, nil
}

func (c *demoCmd) addEngines(ctx, outlive context.Context, s *stack, view fleetView, sup *supervisor, d *demoEngines, speed float64) error {
	store, err := c.openStore(ctx, outlive, s, d)
	if err != nil {
		return err
	}
	for i := range c.Prefill + c.Decode {
		spec := simSpec{
			Name: fmt.Sprintf("prefill-%d", i), Model: demoModel, PoolBlocks: c.PoolBlocks, BlockSize: c.BlockSize, Seed: uint64(i),
			Form: c.Form, Events: "tcp://127.0.0.1:*", Replay: "tcp://127.0.0.1:*", HashKey: c.HashKey,
		}
		role := connector.Producer
		switch {
		case i >= c.Prefill:
			spec.Name, role = fmt.Sprintf("decode-%d", i-c.Prefill), connector.Consumer
		case c.Decode == 0:
			role = connector.Both
		}
		if spec.Transfer, err = c.transfer(role, store); err != nil {
			return err
		}
		if store != "" { // engines that share a store must call a prefix the same
			spec.Seed = 0
		}
		var endpoint, replay string
		var engine demoEngine
		if sup != nil && spec.Transfer != "" {
			engine, endpoint, replay, err = c.processEngine(ctx, outlive, s, sup, d, spec, speed)
		} else {
			engine, endpoint, replay, err = c.localEngine(ctx, outlive, s, view, d, spec, speed)
		}
		if err != nil {
			return err
		}
		if i < c.Prefill {
			d.prefill = append(d.prefill, engine)
		} else {
			d.decode = append(d.decode, engine)
		}
		source := event.Source{Cluster: event.DefaultCluster, Model: demoModel, Instance: spec.Name, Origin: event.Engine}
		d.configs = append(d.configs, subscriber.EngineConfig{
			Source: source, Endpoint: endpoint, Replay: replay, Dialect: subscriber.AnyDialect, PoolSize: uint64(c.PoolBlocks),
		})
	}
	return nil
}

// transfer returns the configuration of one engine's connector, as it is typed behind vLLM's --kv-transfer-config.
func (c *demoCmd) transfer(role connector.Role, store string) (string, error) {
	if c.Connector == "none" {
		return "", nil
	}
	extra, err := c.extraConfig(store)
	if err != nil {
		return "", err
	}
	text, err := json.Marshal(map[string]any{
		"kv_connector": c.Connector, "kv_role": role, "kv_load_failure_policy": connector.Recompute, "kv_connector_extra_config": extra,
	})
	return string(text), err
}

// extraConfig returns what every connector has in common: what was typed, and the demo's own where it was not.
func (c *demoCmd) extraConfig(store string) (connector.Extra, error) {
	extra := connector.Extra{}
	if err := json.Unmarshal([]byte(c.Extra), (*map[string]json.RawMessage)(&extra)); err != nil {
		return nil, usagef("--connector-config: want a JSON object: %w", err)
	}
	add := func(key string, value any) {
		if _, ok := extra[key]; !ok {
			setExtra(extra, key, value)
		}
	}
	switch c.Connector {
	case "tcp":
		add("listen", "127.0.0.1:0")
	case "redis":
		add("url", store)
		add("store_name", c.Connector)
	case "lmcache":
		add("remote_url", store)
		add("chunk_size", 16*c.BlockSize)
		add("chunk_hashes", "engine") // LMCache's own hashes leave adapters and salts out
		add("store_name", c.Connector)
	}
	return extra, nil
}

// storeSpec returns the shared store as its watcher sees it.
func (c *demoCmd) storeSpec(url string) (storeSpec, error) {
	extra, err := c.extraConfig(url)
	if err != nil {
		return storeSpec{}, err
	}
	s := storeSpec{
		format: c.Connector, extra: extra, ranks: 1, blockSize: c.BlockSize, dtype: "float16",
		source: event.Source{Cluster: event.DefaultCluster, Model: demoModel, Origin: event.Store},
	}
	if err := s.complete(); err != nil {
		return s, usagef("%w", err)
	}
	return s, nil
}

// localEngine makes an engine of this process.
func (c *demoCmd) localEngine(ctx, outlive context.Context, s *stack, view fleetView, d *demoEngines, spec simSpec, speed float64) (demoEngine, string, string, error) {
	wrap := func(socket *publisher.ZMQ, source event.Source) sim.Publisher {
		if speed > 0 {
			return socket
		}
		return &pacedPublisher{
			ctx: ctx, out: socket, window: publisher.DefaultZMQConfig().BufferSteps / 4,
			applied: func() uint64 { return view.applied(source) },
		}
	}
	e, err := newSimEngine(s.app, s.bus, s.registry, spec, wrap)
	if err != nil {
		return nil, "", "", err
	}
	ended := make(chan struct{})
	d.group.Go(func() error {
		defer close(ended)
		return e.run(outlive)
	})
	d.closers = append(d.closers, e.Close)
	select {
	case <-e.socket.Ready():
	case <-ended:
		return nil, "", "", fmt.Errorf("engine %s did not start", spec.Name)
	case <-ctx.Done():
		return nil, "", "", ctx.Err()
	}
	return e, e.socket.Endpoint(), e.socket.ReplayEndpoint(), nil
}

// processEngine makes an engine that runs as a process of its own. In each further life it has the addresses of the first.
func (c *demoCmd) processEngine(ctx, outlive context.Context, s *stack, sup *supervisor, d *demoEngines, spec simSpec, speed float64) (demoEngine, string, string, error) {
	if speed == 0 {
		return nil, "", "", usagef("--processes with --connector %s: engines in processes keep their own time; give a --speed", c.Connector)
	}
	login, err := c.natsLogin.child(s.nats.URL())
	if err != nil {
		return nil, "", "", err
	}
	began := time.Now()
	args := func() []string {
		args := append([]string{
			"engine", "--name", spec.Name, "--model", spec.Model, "--pool-blocks", fmt.Sprint(spec.PoolBlocks), "--block-size", fmt.Sprint(spec.BlockSize),
			"--seed", fmt.Sprint(spec.Seed), "--form", spec.Form, "--insecure=" + fmt.Sprint(c.Insecure), "--speed", fmt.Sprint(speed),
			"--start", fmt.Sprint(began.UnixNano()), "--began", fmt.Sprint(began.UnixNano()),
			"--log-json=" + fmt.Sprint(s.app.logJSON), "--log-level", s.app.level.String(),
		}, login...)
		for flag, said := range map[string]string{"--events": "events", "--replay": "replay", "--listen": "api"} {
			if at := sup.said(spec.Name, said); at != "" {
				args = append(args, flag, strings.TrimPrefix(at, "http://"))
			}
		}
		return args
	}
	startCtx, given := context.WithCancel(ctx)
	d.group.Go(func() error {
		defer given()
		return sup.run(outlive, spec.Name, args, "KVSTRATA_KV_TRANSFER_CONFIG="+spec.Transfer)
	})
	e := remoteEngine{name: spec.Name, url: func(ctx context.Context) string { return sup.url(ctx, spec.Name) }}
	if e.url(startCtx) == "" {
		return nil, "", "", fmt.Errorf("engine %s did not start", spec.Name)
	}
	return e, sup.said(spec.Name, "events"), sup.said(spec.Name, "replay"), nil
}

// storeMegabytes bounds the store of a demo: enough to see it fill up and evict.
const storeMegabytes = 256

// openStore starts the shared store where the connector has one and none is given. It returns its address.
func (c *demoCmd) openStore(ctx, outlive context.Context, s *stack, d *demoEngines) (string, error) {
	if c.Connector == "none" {
		return "", nil
	}
	d.connector = c.Connector + "; what blocks hold is derived from their prefix and compared on arrival"
	address, stop, err := startStore(s.app, c.Connector, c.Store, storeMegabytes)
	if err != nil || address == "" {
		return "", err
	}
	d.store = address
	d.connector = c.Connector + " at " + redacted(address) + strings.TrimPrefix(d.connector, c.Connector)
	d.group.Go(func() error {
		<-outlive.Done()
		return stop()
	})
	return address, nil
}

// redacted returns an address without the password in it.
func redacted(address string) string {
	u, err := url.Parse(address)
	if err != nil {
		return "the store given"
	}
	return u.Redacted()
}
