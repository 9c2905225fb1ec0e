package curve

import (
	"errors"
	"fmt"
	"slices"

	"github.com/pebbe/zmq4"
)

const (
	zapEndpoint = "inproc://zeromq.zap.01" // where libzmq asks
	zapDomain   = "kvstrata"
)

// Guard answers libzmq's question who is let in, for all sockets of one context (ZeroMQ's RFC 27).
type Guard struct {
	socket *zmq4.Socket
	allow  [][]byte // public keys, 32 bytes each
}

// NewGuard binds a guard of the context, before any socket that asks it. Run must follow.
func NewGuard(ctx *zmq4.Context, allow []string) (*Guard, error) {
	g := new(Guard)
	for _, key := range allow {
		g.allow = append(g.allow, []byte(zmq4.Z85decode(key)))
	}
	var err error
	if g.socket, err = ctx.NewSocket(zmq4.REP); err != nil {
		return nil, fmt.Errorf("open the guard's socket: %w", err)
	}
	if err := errors.Join(g.socket.SetLinger(0), g.socket.Bind(zapEndpoint)); err != nil {
		return nil, errors.Join(fmt.Errorf("bind the guard's socket: %w", err), g.socket.Close())
	}
	return g, nil
}

// Close closes the guard's socket where Run is not called.
func (g *Guard) Close() error { return g.socket.Close() }

// Run answers until the context is terminated, and closes the guard's socket.
func (g *Guard) Run() error {
	for {
		request, err := g.socket.RecvMessageBytes(0)
		if err == nil {
			_, err = g.socket.SendMessage(g.answer(request))
		}
		if err != nil {
			if zmq4.AsErrno(err) == zmq4.ETERM {
				err = nil
			} else {
				err = fmt.Errorf("judge CURVE clients: %w", err)
			}
			return errors.Join(err, g.socket.Close())
		}
	}
}

// answer judges [version, request, domain, address, identity, mechanism, key].
func (g *Guard) answer(request [][]byte) [][]byte {
	id := []byte(nil)
	if len(request) > 1 {
		id = request[1]
	}
	status, text := "400", "this key is not allowed"
	if len(request) == 7 && string(request[0]) == "1.0" && string(request[5]) == "CURVE" &&
		slices.ContainsFunc(g.allow, func(key []byte) bool { return string(key) == string(request[6]) }) {
		status, text = "200", "OK"
	}
	return [][]byte{[]byte("1.0"), id, []byte(status), []byte(text), nil, nil}
}
