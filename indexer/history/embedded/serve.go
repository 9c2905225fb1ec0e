package embedded

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"
)

const (
	shutdownGrace = 3 * time.Second // for requests under way
	closeGrace    = 3 * time.Second // for the engine to close
	orphanGrace   = 10 * time.Second
)

// Serve is the child: it takes the folder's lock, opens the engine and answers on the folder's socket until ctx ends or the parent
// dies, and returns nil then. The caller exits at once: the engine's threads do not end before the process does. Should
// Serve not have returned some seconds after the parent's death, it kills its own process, for no child outlives its parent.
func Serve(ctx context.Context, cfg ChildConfig, log *slog.Logger) error {
	if err := cfg.Limits.validate(); err != nil {
		return err
	}
	if err := os.MkdirAll(cfg.Dir, 0o700); err != nil {
		return fmt.Errorf("make history folder: %w", err)
	}
	lock, err := lockDir(cfg.Dir)
	if err != nil {
		return err
	}
	defer lock.Close()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	if cfg.Parent != nil {
		go watchParent(cfg.Parent, cancel)
	}
	listener, err := listenSocket(cfg.Dir)
	if err != nil {
		return err
	}
	defer listener.Close()
	if err := standBack(); err != nil {
		log.Warn("the engine runs at full priority", "err", err)
	}
	lib, err := loadLibrary(cfg.Library)
	if err != nil {
		return err
	}
	if v := cString(lib.version()); v != Version {
		log.Warn("the ClickHouse engine is of another version than kvstrata was tried with", "library", cfg.Library, "version", v, "tried", Version)
	}
	pools, err := openPools(lib, filepath.Join(cfg.Dir, "clickhouse"), cfg.Boot, cfg.Limits)
	if err != nil {
		return err
	}
	svc, err := newService(pools, cfg.Limits, log)
	if err != nil {
		return err
	}
	err = serveHTTP(ctx, listener, svc, log)
	svc.shut()
	return err
}

// watchParent reads the pipe whose other end the parent holds.
func watchParent(parent io.Reader, cancel context.CancelFunc) {
	_, _ = io.Copy(io.Discard, parent)
	cancel()
	time.AfterFunc(orphanGrace, func() { _ = syscall.Kill(os.Getpid(), syscall.SIGKILL) })
}

func serveHTTP(ctx context.Context, listener net.Listener, svc *service, log *slog.Logger) error {
	srv := &http.Server{
		Handler: svc, ReadHeaderTimeout: 10 * time.Second, IdleTimeout: 2 * time.Minute,
		ErrorLog: slog.NewLogLogger(log.Handler(), slog.LevelWarn),
	}
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error {
		if err := srv.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
			return fmt.Errorf("serve %s: %w", listener.Addr(), err)
		}
		return nil
	})
	group.Go(func() error {
		<-ctx.Done()
		grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), shutdownGrace)
		defer cancel()
		if err := srv.Shutdown(grace); err != nil {
			svc.kill("1")
			return srv.Close()
		}
		return nil
	})
	return group.Wait()
}

// shut closes the engine, unless a statement holds it: what MergeTree has taken it has written, and needs no closing.
func (s *service) shut() {
	ctx, cancel := context.WithTimeout(context.Background(), closeGrace)
	defer cancel()
	if !s.pools.close(ctx) {
		s.log.Warn("history engine stopped while a statement ran")
	}
}
