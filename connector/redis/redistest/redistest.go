// Package redistest starts real Redis servers for tests.
package redistest

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"kvstrata/porttest"
)

// patience is how long a server may take to answer once it was started.
const patience = 20 * time.Second

// Server is a server of its own on a loopback port; it ends with the test.
type Server struct {
	// Addr is host:port. It stays the same over restarts.
	Addr string

	t    testing.TB
	dir  string
	args []string

	mu   sync.Mutex
	cmd  *exec.Cmd
	done chan struct{} // closed when the process has ended
	log  *bytes.Buffer
}

// Binary returns the path of redis-server. Without it the test fails in CI, where CI is set, and is skipped elsewhere.
func Binary(t testing.TB) string {
	t.Helper()
	path, err := exec.LookPath("redis-server")
	if err == nil {
		return path
	}
	if os.Getenv("CI") != "" {
		t.Fatalf("redis-server: %v", err)
	}
	t.Skipf("SKIPPED, NOTHING IS TESTED HERE: redis-server: %v; install Redis to run this test", err)
	return ""
}

// Start starts a server that keeps nothing on disk, with further arguments, as "--maxmemory", "10mb", and returns once it
// answers. With "--tls-port", "0" among them, Addr is its TLS port.
func Start(t testing.TB, args ...string) *Server {
	t.Helper()
	s := &Server{t: t, dir: t.TempDir(), args: args, Addr: "127.0.0.1:" + strconv.Itoa(porttest.Port(t))}
	s.start()
	t.Cleanup(s.Kill)
	return s
}

func (s *Server) start() {
	s.t.Helper()
	_, port, _ := net.SplitHostPort(s.Addr)
	args := []string{"--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", s.dir, "--daemonize", "no", "--port", port}
	for i := 0; i < len(s.args); i++ {
		if s.args[i] == "--tls-port" && i+1 < len(s.args) {
			args = append(args, "--tls-port", port, "--port", "0")
			i++
			continue
		}
		args = append(args, s.args[i])
	}
	cmd := exec.Command(Binary(s.t), args...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	log := &bytes.Buffer{}
	cmd.Stdout, cmd.Stderr = log, log
	started, done := make(chan error, 1), make(chan struct{})
	go func() {
		// The server dies with the thread that started it, which stays as long as the server does.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		defer close(done)
		err := cmd.Start()
		if started <- err; err == nil {
			_ = cmd.Wait() // it is killed in the end
		}
	}()
	if err := <-started; err != nil {
		s.t.Fatalf("start redis-server: %v", err)
	}
	s.mu.Lock()
	s.cmd, s.done, s.log = cmd, done, log
	s.mu.Unlock()
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	deadline := time.After(patience)
	for {
		if s.answers() {
			return
		}
		select {
		case <-done:
			s.t.Fatalf("redis-server ended: %s", log)
		case <-deadline:
			s.t.Fatalf("redis-server does not listen at %s", s.Addr)
		case <-tick.C:
		}
	}
}

// answers reports whether the server has begun to serve: then its other sockets are there too. One with TLS only connects.
func (s *Server) answers() bool {
	conn, err := net.Dial("tcp", s.Addr)
	if err != nil {
		return false
	}
	defer conn.Close()
	if slices.Contains(s.args, "--tls-port") {
		return true
	}
	if err := conn.SetDeadline(time.Now().Add(patience)); err != nil {
		return false
	}
	if _, err := conn.Write([]byte("PING\r\n")); err != nil {
		return false
	}
	_, err = read(bufio.NewReader(conn)) // that a password is wanted is an answer
	return err == nil
}

// Kill ends the process at once, and returns when it has ended. It may be called again.
func (s *Server) Kill() {
	s.mu.Lock()
	cmd, done := s.cmd, s.done
	s.mu.Unlock()
	_ = cmd.Process.Kill() // it may have ended
	<-done
}

// Restart kills the process and starts it anew, empty, at the same address.
func (s *Server) Restart() {
	s.t.Helper()
	s.Kill()
	s.start()
}

// Do sends one command on a connection of its own, without a password, and returns the reply: a line with its type in front,
// the content of a bulk string, or an array's parts with spaces between them. It serves tests that are not about the client.
func (s *Server) Do(args ...string) string {
	s.t.Helper()
	conn, err := net.Dial("tcp", s.Addr)
	if err != nil {
		s.t.Fatalf("%s: %v", args[0], err)
	}
	defer conn.Close()
	var out strings.Builder
	fmt.Fprintf(&out, "*%d\r\n", len(args))
	for _, a := range args {
		fmt.Fprintf(&out, "$%d\r\n%s\r\n", len(a), a)
	}
	if _, err := conn.Write([]byte(out.String())); err != nil {
		s.t.Fatalf("%s: %v", args[0], err)
	}
	reply, err := read(bufio.NewReader(conn))
	if err != nil {
		s.t.Fatalf("%s: %v", args[0], err)
	}
	return reply
}

// read reads a reply.
func read(in *bufio.Reader) (string, error) {
	line, err := in.ReadString('\n')
	if err != nil {
		return "", err
	}
	line = strings.TrimRight(line, "\r\n")
	size, err := strconv.Atoi(line[min(1, len(line)):])
	switch {
	case err != nil || size < 0:
		return line, nil
	case line[0] == '$':
		bulk := make([]byte, size+2)
		_, err := io.ReadFull(in, bulk)
		return string(bulk[:size]), err
	case line[0] == '*':
		parts := make([]string, size)
		for i := range parts {
			if parts[i], err = read(in); err != nil {
				return "", err
			}
		}
		return strings.Join(parts, " "), nil
	default:
		return line, nil
	}
}

// Cluster starts n masters that share the slots of one cluster, and returns once each knows all nodes and who has which slots. Without one of them, the
// others go on.
func Cluster(t testing.TB, n int) []*Server {
	t.Helper()
	var all []*Server
	for range n {
		all = append(all, Start(t, "--cluster-enabled", "yes", "--cluster-config-file", "nodes.conf", "--cluster-node-timeout", "2000", "--cluster-require-full-coverage", "no"))
	}
	const slots = 16384
	for i, s := range all {
		if got := s.Do("CLUSTER", "ADDSLOTSRANGE", strconv.Itoa(i*slots/n), strconv.Itoa((i+1)*slots/n-1)); got != "+OK" {
			t.Fatalf("CLUSTER ADDSLOTSRANGE: %s", got)
		}
		if got := s.Do("CLUSTER", "SET-CONFIG-EPOCH", strconv.Itoa(i+1)); got != "+OK" {
			t.Fatalf("CLUSTER SET-CONFIG-EPOCH: %s", got)
		}
		if i > 0 {
			host, port, _ := net.SplitHostPort(all[0].Addr)
			if got := s.Do("CLUSTER", "MEET", host, port); got != "+OK" {
				t.Fatalf("CLUSTER MEET: %s", got)
			}
		}
	}
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	deadline := time.After(patience)
	for _, s := range all {
		for {
			info := s.Do("CLUSTER", "INFO")
			// Without full coverage required a node says that all is well before it has heard who has the other slots.
			if strings.Contains(info, "cluster_state:ok") && strings.Contains(info, fmt.Sprintf("cluster_known_nodes:%d\r", n)) &&
				strings.Contains(info, fmt.Sprintf("cluster_slots_assigned:%d\r", slots)) {
				break
			}
			select {
			case <-deadline:
				t.Fatalf("the cluster does not come together: %s", info)
			case <-tick.C:
			}
		}
	}
	return all
}
