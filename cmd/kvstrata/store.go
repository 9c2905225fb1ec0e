package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"runtime"
	"syscall"
	"time"

	"kvstrata/connector/lmcache"
)

// startStore returns the address of the shared store of a connector and what ends it: the one given, or one that is
// started here with so many MiB. Connectors without a store have none.
func startStore(a *app, connector, given string, megabytes int) (url string, stop func() error, err error) {
	nothing := func() error { return nil }
	switch {
	case given != "":
		return given, nothing, nil
	case connector == "redis":
		return startRedis(megabytes)
	case connector == "lmcache":
		return startLMCache(a, megabytes)
	default:
		return "", nothing, nil
	}
}

// startLMCache serves LMCache's protocol in this process.
func startLMCache(a *app, megabytes int) (string, func() error, error) {
	cfg := lmcache.DefaultServerConfig()
	cfg.Bytes = megabytes << 20
	cfg.MaxValue = min(cfg.MaxValue, cfg.Bytes)
	server, err := lmcache.NewServer(cfg, a.log)
	if err != nil {
		return "", nil, err
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", nil, fmt.Errorf("listen for LMCache clients: %w", err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- server.Run(ctx, l) }()
	return "lm://" + l.Addr().String(), func() error {
		cancel()
		return <-done
	}, nil
}

// redisStart is how long redis-server may take until it listens.
const redisStart = 10 * time.Second

// startRedis starts a redis-server that keeps nothing on disk. It ends with this process, whatever becomes of it.
func startRedis(megabytes int) (string, func() error, error) {
	path, err := exec.LookPath("redis-server")
	if err != nil {
		return "", nil, errors.New("redis-server is not installed: apt-get install redis-server, or name a server with --store redis://host:port")
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", nil, fmt.Errorf("find a port for redis-server: %w", err)
	}
	_, port, _ := net.SplitHostPort(l.Addr().String())
	if err := l.Close(); err != nil {
		return "", nil, err
	}
	cmd := exec.Command(path, "--bind", "127.0.0.1", "--port", port, "--save", "", "--appendonly", "no", "--dir", os.TempDir(), "--daemonize", "no",
		"--maxmemory", fmt.Sprint(megabytes, "mb"), "--maxmemory-policy", "allkeys-lru", "--loglevel", "warning")
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGTERM, Setpgid: true} // Ctrl-C is this process's to handle
	started, ended := make(chan error, 1), make(chan struct{})
	go func() {
		// The server ends with the thread that started it, which stays as long as the server does.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		defer close(ended)
		err := cmd.Start()
		if started <- err; err == nil {
			_ = cmd.Wait() // it is ended below, or missed by whoever uses it
		}
	}()
	if err := <-started; err != nil {
		return "", nil, fmt.Errorf("start redis-server: %w", err)
	}
	stop := func() error {
		_ = cmd.Process.Signal(syscall.SIGTERM) // it may have ended
		select {
		case <-ended:
		case <-time.After(redisStart):
			_ = cmd.Process.Kill()
			<-ended
		}
		return nil
	}
	address := net.JoinHostPort("127.0.0.1", port)
	for deadline := time.Now().Add(redisStart); ; {
		if conn, err := net.Dial("tcp", address); err == nil {
			return "redis://" + address + "/0", stop, conn.Close()
		}
		select {
		case <-ended:
			return "", nil, fmt.Errorf("redis-server ended at once: %v", cmd.ProcessState)
		case <-time.After(10 * time.Millisecond):
		}
		if time.Now().After(deadline) {
			return "", nil, errors.Join(fmt.Errorf("redis-server does not listen at %s", address), stop())
		}
	}
}
