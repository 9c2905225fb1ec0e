package redis

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"strconv"
	"strings"
	"sync"
	"time"

	goredis "github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"
)

// connect returns a connection to a server, with TLS where it is asked for.
func (e *endpoint) connect(ctx context.Context, address string) (net.Conn, error) {
	d := net.Dialer{Timeout: e.timeout, KeepAlive: 15 * time.Second}
	conn, err := d.DialContext(ctx, e.network, address)
	if err != nil || !e.secure {
		return conn, err
	}
	cfg := e.tls
	if cfg.ServerName == "" {
		cfg = cfg.Clone()
		cfg.ServerName, _, _ = net.SplitHostPort(address)
	}
	secure := tls.Client(conn, cfg)
	if err := secure.HandshakeContext(ctx); err != nil {
		return nil, errors.Join(fmt.Errorf("agree on TLS: %w", err), conn.Close())
	}
	return secure, nil
}

// dial returns a connection that the server has let in, at the database. more are further commands that must succeed.
func (e *endpoint) dial(ctx context.Context, address string, more ...[]string) (net.Conn, error) {
	conn, err := e.connect(ctx, address)
	if err != nil {
		return nil, fmt.Errorf("connect to %s: %w", address, err)
	}
	if err := e.enter(ctx, conn, more); err != nil {
		return nil, errors.Join(fmt.Errorf("connect to %s: %w", address, err), conn.Close())
	}
	return conn, nil
}

func (e *endpoint) enter(ctx context.Context, conn net.Conn, more [][]string) error {
	var commands [][]string
	switch {
	case e.password == "":
	case e.username == "":
		commands = append(commands, []string{"AUTH", e.password})
	default:
		commands = append(commands, []string{"AUTH", e.username, e.password})
	}
	if e.db != 0 {
		commands = append(commands, []string{"SELECT", strconv.Itoa(e.db)})
	}
	// A server that wants a password says so here, and not to the first operation.
	commands = append(append(commands, []string{"PING"}), more...)
	deadline := time.Now().Add(e.timeout)
	if d, ok := ctx.Deadline(); ok && d.Before(deadline) {
		deadline = d
	}
	if err := conn.SetDeadline(deadline); err != nil {
		return err
	}
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) }) // the read below ends with an error
	defer stop()
	var out []byte
	for _, c := range commands {
		out = appendCommand(out, c...)
	}
	if _, err := conn.Write(out); err != nil {
		return err
	}
	in := bufio.NewReaderSize(oneByte{conn}, 16) // nothing beyond the replies may be taken
	for _, c := range commands {
		line, err := readStatus(in)
		if err != nil {
			return fmt.Errorf("wait for reply to %s: %w", c[0], unexpected(err))
		}
		if strings.HasPrefix(line, "-") {
			return fmt.Errorf("%s: %w", c[0], serverError([]byte(e.hide(line[1:]))))
		}
	}
	if !stop() {
		return ctx.Err()
	}
	return conn.SetDeadline(time.Time{})
}

// hide takes the password out of what a server says.
func (e *endpoint) hide(text string) string {
	if e.password == "" {
		return text
	}
	return strings.ReplaceAll(text, e.password, "***")
}

// oneByte reads byte by byte.
type oneByte struct{ net.Conn }

func (c oneByte) Read(b []byte) (int, error) { return c.Conn.Read(b[:min(len(b), 1)]) }

// readStatus reads a reply of one line.
func readStatus(in *bufio.Reader) (string, error) {
	var line []byte
	for {
		c, err := in.ReadByte()
		if err != nil {
			return "", err
		}
		if c == '\n' {
			break
		}
		if line = append(line, c); len(line) > maxLine {
			return "", fmt.Errorf("%w: a line of more than %d bytes", errProtocol, maxLine)
		}
	}
	text := strings.TrimSuffix(string(line), "\r")
	if text == "" || text[0] != '+' && text[0] != '-' {
		return "", fmt.Errorf("%w: no status", errProtocol)
	}
	return text, nil
}

// control returns a client for everything but blocks.
func (e *endpoint) control(address string) *goredis.Client {
	silence()
	return goredis.NewClient(&goredis.Options{
		Addr: address, Username: e.username, Password: e.password, DB: e.db, Protocol: 2, DisableIdentity: true,
		MaxRetries: -1, DialerRetries: 1, PoolSize: 2, DialTimeout: e.timeout, ReadTimeout: e.timeout, WriteTimeout: e.timeout,
		ContextTimeoutEnabled: true, MaintNotificationsConfig: &maintnotifications.Config{Mode: maintnotifications.ModeDisabled},
		Dialer: func(ctx context.Context, _, address string) (net.Conn, error) { return e.connect(ctx, address) },
	})
}

// silence keeps go-redis from writing to standard error by itself: what goes wrong is returned, and handled here. Its logger
// is one for the whole process; nothing else in this program uses it.
var silence = sync.OnceFunc(func() { goredis.SetLogger(quiet{}) })

type quiet struct{}

func (quiet) Printf(context.Context, string, ...any) {}
