package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"kvstrata/indexer/history"
	"kvstrata/indexer/history/embedded"
)

// reached is a ClickHouse that answers.
type reached struct {
	cfg    history.Config
	close  func() error // ends the engine, where it is this process's
	shared bool         // another process has the engine of the folder
}

// reach returns the ClickHouse named by the flags. Where a folder is named whose engine no process embeds, this one does.
func (f tableFlags) reach(a *app) (*reached, error) {
	cfg, err := f.config()
	if err != nil {
		return nil, err
	}
	r := &reached{cfg: cfg, close: func() error { return nil }}
	if f.ClickHouse != "" || answers(a.ctx, f.Data) {
		return r, nil
	}
	if _, err := os.Stat(engineDir(f.Data)); err != nil {
		return nil, usagef("--data %s: no history lies there", f.Data)
	}
	if r.close, err = f.embed(a); err != nil {
		return nil, err
	}
	return r, nil
}

// tableReader is a reader of a ClickHouse that was reached.
type tableReader struct {
	*history.Reader
	at *reached
}

// Close ends the connections, and the engine.
func (r *tableReader) Close() error { return errors.Join(r.Reader.Close(), r.at.close()) }

// open returns a reader of the ClickHouse named by the flags.
func (f tableFlags) open(a *app) (*tableReader, error) {
	at, err := f.reach(a)
	if err != nil {
		return nil, err
	}
	reader, err := history.NewReader(at.cfg)
	if err != nil {
		return nil, errors.Join(err, at.close())
	}
	return &tableReader{reader, at}, nil
}

// answers reports whether a process has the engine of a folder.
func answers(ctx context.Context, data string) bool {
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	conn, err := embedded.DialSocket(ctx, embedded.SocketPath(engineDir(data)))
	if err != nil {
		return false
	}
	_ = conn.Close()
	return true
}

// embedPatience is how long an engine of one's own may take to open its data.
const embedPatience = time.Minute

// embed runs the engine of the folder until what it returns is called.
func (f tableFlags) embed(a *app) (stop func() error, err error) {
	quiet := *a
	quiet.log = newLogger(a.stderr, max(a.level, slog.LevelWarn), a.logJSON)
	s := &stack{app: &quiet, registry: prometheus.NewRegistry()}
	if err := s.addEngine(historyFlags{CHDB: f.CHDB, Memory: embedded.DefaultLimits().Memory}, f.Data); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(a.ctx))
	done := make(chan error, 1)
	go func() { done <- s.engine.Run(ctx) }()
	stop = func() error {
		cancel()
		return <-done
	}
	ready, ended := context.WithTimeout(a.ctx, embedPatience)
	defer ended()
	if err := s.engine.WaitReady(ready); err != nil {
		return nil, errors.Join(fmt.Errorf("open the history in %s: %w", f.Data, err), stop())
	}
	return stop, nil
}
