package embedded

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"syscall"
)

const socketName = "clickhouse.sock"

// maxSocketPath is what fits sun_path with its closing zero.
const maxSocketPath = 107

// SocketPath returns where the child of a data folder listens. A path too long for the kernel is none to dial by hand: use DialSocket.
func SocketPath(dir string) string { return filepath.Join(dir, socketName) }

// DialSocket connects to a child's socket, however long its path.
func DialSocket(ctx context.Context, socket string) (net.Conn, error) {
	path, done, err := shorten(socket)
	if err != nil {
		return nil, fmt.Errorf("dial the history engine at %s: %w", socket, err)
	}
	defer done()
	var dialer net.Dialer
	conn, err := dialer.DialContext(ctx, "unix", path)
	if err != nil {
		return nil, fmt.Errorf("dial the history engine at %s: %w", socket, err)
	}
	return conn, nil
}

// listenSocket listens where only the user may connect. The caller holds the folder's lock, so that a socket which is
// there already is that of a child which died.
func listenSocket(dir string) (net.Listener, error) {
	socket := SocketPath(dir)
	path, done, err := shorten(socket)
	if err != nil {
		return nil, fmt.Errorf("listen at %s: %w", socket, err)
	}
	defer done()
	if err := os.Remove(socket); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("listen at %s: %w", socket, err)
	}
	before := syscall.Umask(0o177) // from the moment it exists: a later chmod would leave a gap
	listener, err := net.Listen("unix", path)
	syscall.Umask(before)
	if err != nil {
		return nil, fmt.Errorf("listen at %s: %w", socket, err)
	}
	listener.(*net.UnixListener).SetUnlinkOnClose(false) // by the short path, which may be gone by then
	return listener, nil
}

// shorten returns a path to the same socket that fits, by way of its opened folder; it holds until done is called.
func shorten(socket string) (path string, done func(), err error) {
	if len(socket) <= maxSocketPath {
		return socket, func() {}, nil
	}
	dir, err := os.Open(filepath.Dir(socket))
	if err != nil {
		return "", nil, err
	}
	return fmt.Sprintf("/proc/self/fd/%d/%s", dir.Fd(), filepath.Base(socket)), func() { _ = dir.Close() }, nil
}
