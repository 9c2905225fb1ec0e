package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strings"
	"time"

	"github.com/pebbe/zmq4"

	"kvstrata/bus"
	"kvstrata/indexer/history"
	"kvstrata/indexer/history/embedded"
	"kvstrata/subscriber"
)

type doctorCmd struct {
	historyFlags
	natsLogin
	clientFlags

	NATS    string        `name:"nats" help:"NATS servers to check; empty: only the embedded one is used." env:"KVSTRATA_NATS"`
	Server  string        `help:"An index to check." placeholder:"URL" env:"KVSTRATA_SERVER"`
	Engine  []string      `help:"An engine to check, as run takes it; repeated." sep:"none" placeholder:"ENGINE" env:"KVSTRATA_ENGINE"`
	Hear    time.Duration `help:"How long each engine is heard." default:"5s"`
	HashKey string        `help:"Key of the prefix hashes." env:"KVSTRATA_HASH_KEY"`
	Listen  string        `help:"The API address that must be free." default:"127.0.0.1:8080" env:"KVSTRATA_LISTEN"`
}

// Help shows how it is used.
func (doctorCmd) Help() string {
	return `Each line says ok or what is wrong and what to do. Exits 1 when something is wrong. An engine is heard as a subscriber would
hear it, and what its stream was seen to be, its contract, is told below it. Nothing is published.

Example:

  kvstrata doctor --nats nats://10.0.0.9:4222 --engine zmq+tcp://10.0.0.5:5557,replay=tcp://10.0.0.5:5558,model=m`
}

// checkTime bounds each check.
const checkTime = 3 * time.Second

// Run checks one thing after another; each gets its line.
func (c *doctorCmd) Run(a *app) error {
	wrong := 0
	check := func(what string, f func(context.Context) (string, error)) {
		ctx, cancel := context.WithTimeout(a.ctx, checkTime)
		defer cancel()
		said, err := f(ctx)
		if err != nil {
			wrong++
			fmt.Fprintf(a.stdout, "WRONG  %-28s %s\n", what, oneLine(err))
			return
		}
		fmt.Fprintf(a.stdout, "ok     %-28s %s\n", what, said)
	}
	check("libzmq", func(context.Context) (string, error) { return checkLibzmq() })
	if c.ClickHouse == "" {
		check("clickhouse engine", func(context.Context) (string, error) { return embedded.Find(c.CHDB) })
	} else {
		cfg, err := c.historyFlags.config("")
		if err != nil {
			return err
		}
		check("clickhouse", func(ctx context.Context) (string, error) { return checkClickHouse(ctx, cfg) })
	}
	if c.Server == "" {
		check("listen "+c.Listen, func(context.Context) (string, error) { return checkListen(c.Listen) })
	} else {
		client, err := c.clientFlags.client(a.log, checkTime)
		if err != nil {
			return err
		}
		check("index "+c.Server, func(ctx context.Context) (string, error) { return checkIndex(ctx, client, c.Server) })
	}
	if c.NATS != "" {
		check("nats "+c.NATS, func(ctx context.Context) (string, error) { return c.checkNATS(ctx, a) })
	}
	var engines []subscriber.EngineConfig
	for _, text := range c.Engine {
		more, err := subscriber.ParseEngine(text)
		if err != nil {
			return usagef("%w", err)
		}
		engines = append(engines, more...)
	}
	wrong += c.checkEngines(a, engines)
	if wrong > 0 {
		return fmt.Errorf("%d checks found something wrong", wrong)
	}
	return nil
}

// checkEngines hears the engines, prints each one's contract, and returns how many checks found something wrong.
func (c *doctorCmd) checkEngines(a *app, engines []subscriber.EngineConfig) (wrong int) {
	all := hearEngines(a.ctx, engines, c.HashKey, c.Hear)
	for i := range all {
		h := &all[i]
		name := "engine " + h.cfg.Source.Instance
		if h.cfg.Source.Rank > 0 {
			name += fmt.Sprintf("#%d", h.cfg.Source.Rank)
		}
		findings := h.findings(c.Hear)
		for _, f := range findings {
			fmt.Fprintf(a.stdout, "WRONG  %-28s %s\n", name, f)
		}
		switch {
		case len(findings) > 0:
			wrong++
		case h.report != nil:
			fmt.Fprintf(a.stdout, "ok     %-28s %s, heard for %v\n", name, h.report.Status.State, c.Hear)
		}
		for _, r := range h.remarks() {
			fmt.Fprintf(a.stdout, "note   %-28s %s\n", name, r)
		}
		if h.report != nil && h.report.Status.Ledger.Receptions() > 0 {
			printContract(a.stdout, &h.report.Status)
		}
	}
	for _, said := range compareNames(all) {
		fmt.Fprintf(a.stdout, "note   %-28s %s\n", "engines", said)
	}
	return wrong
}

func oneLine(err error) string { return strings.ReplaceAll(err.Error(), "\n", "; ") }

func checkLibzmq() (string, error) {
	major, minor, patch := zmq4.Version()
	if major < 4 || major == 4 && minor < 3 {
		return "", fmt.Errorf("version %d.%d.%d: 4.3 or newer is needed; install libzmq3-dev and build again", major, minor, patch)
	}
	return fmt.Sprintf("version %d.%d.%d", major, minor, patch), nil
}

func checkClickHouse(ctx context.Context, cfg history.Config) (string, error) {
	version, err := history.ServerVersion(ctx, cfg)
	if err != nil {
		return "", err
	}
	steps, err := history.Status(ctx, cfg)
	if errors.Is(err, history.ErrNoTables) {
		return fmt.Sprintf("version %s; no tables yet: the history role makes them when it starts", version), nil
	}
	if err != nil {
		return "", err
	}
	waiting := 0
	for _, step := range steps {
		if !step.Applied {
			waiting++
		}
	}
	if waiting > 0 {
		return fmt.Sprintf("version %s; %d of %d migrations wait: the history role applies them when it starts", version, waiting, len(steps)), nil
	}
	return fmt.Sprintf("version %s; all %d migrations are applied", version, len(steps)), nil
}

func checkListen(addr string) (string, error) {
	l, err := net.Listen("tcp", addr)
	if err != nil {
		return "", fmt.Errorf("%w; give run or demo another --listen", err)
	}
	return "free", l.Close()
}

func checkIndex(ctx context.Context, client *http.Client, url string) (string, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url+"/v1/sources", nil)
	if err != nil {
		return "", err
	}
	resp, err := client.Do(req)
	if err != nil {
		return "", fmt.Errorf("%w; see that kvstrata run or demo is up and listens there", err)
	}
	defer resp.Body.Close()
	if resp.StatusCode == http.StatusUnauthorized {
		return "", errNoToken
	}
	if resp.StatusCode != http.StatusOK {
		return "", fmt.Errorf("answers %s to /v1/sources; is it kvstrata with the role prefix?", resp.Status)
	}
	return "answers", nil
}

func (c *doctorCmd) checkNATS(ctx context.Context, a *app) (string, error) {
	cfg := c.natsLogin.client(bus.DefaultConfig())
	cfg.URL = c.NATS
	b, err := bus.Attach(ctx, cfg, "kvstrata doctor", a.log)
	if err != nil {
		return "", err
	}
	defer b.Close()
	end, err := b.Position(ctx)
	if err != nil {
		return "connected; the streams are not there yet: a role makes them when it starts", nil
	}
	return fmt.Sprintf("connected; the event stream ends at message %d", end.Sequence), nil
}
