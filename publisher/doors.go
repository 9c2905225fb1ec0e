package publisher

import (
	"errors"
	"fmt"
	"time"

	"github.com/pebbe/zmq4"
	"golang.org/x/sync/errgroup"

	"kvstrata/curve"
)

// doors judge who may connect to the sockets of a publisher with keys, and tell of those who may not. Without keys there
// are none.
type doors struct {
	z        *ZMQ
	zctx     *zmq4.Context
	guard    *curve.Guard // nil where whoever knows the public key may come
	monitors []*zmq4.Socket
	told     time.Time // when the log last told of a refusal; listen's alone
}

// openDoors makes the guard, which has to be there before what it guards.
func (z *ZMQ) openDoors(zctx *zmq4.Context) (*doors, error) {
	d := &doors{z: z, zctx: zctx}
	if z.cfg.Keys == nil || len(z.cfg.Keys.Allow) == 0 {
		return d, nil
	}
	var err error
	d.guard, err = curve.NewGuard(zctx, z.cfg.Keys.Allow)
	return d, err
}

// watch opens the monitors of sockets, some of which may be nil.
func (d *doors) watch(sockets ...*zmq4.Socket) error {
	if d.z.cfg.Keys == nil {
		return nil
	}
	for i, s := range sockets {
		if s == nil {
			continue
		}
		endpoint := fmt.Sprintf("inproc://door-%d", i)
		if err := s.Monitor(endpoint, curve.FailedEvents); err != nil {
			return fmt.Errorf("monitor a socket: %w", err)
		}
		m, err := d.zctx.NewSocket(zmq4.PAIR)
		if err != nil {
			return fmt.Errorf("open a monitor: %w", err)
		}
		d.monitors = append(d.monitors, m)
		if err := errors.Join(m.SetLinger(0), m.Connect(endpoint)); err != nil {
			return fmt.Errorf("open a monitor: %w", err)
		}
	}
	return nil
}

// run starts what ends, and closes its sockets, when their context is terminated.
func (d *doors) run(group *errgroup.Group) {
	if d.guard != nil {
		group.Go(d.guard.Run)
	}
	if len(d.monitors) > 0 {
		group.Go(d.listen)
	}
}

// close ends what run was not called for.
func (d *doors) close() error {
	if d.guard != nil {
		return errors.Join(d.guard.Close(), closeAll(d.monitors...))
	}
	return closeAll(d.monitors...)
}

// refusedEvery is how often at most the log tells of handshakes that failed: who is refused tries again at once.
const refusedEvery = 10 * time.Second

func (d *doors) listen() error {
	poller := zmq4.NewPoller()
	for _, m := range d.monitors {
		poller.Add(m, zmq4.POLLIN)
	}
	for {
		ready, err := poller.Poll(-1)
		for i := 0; err == nil && i < len(ready); i++ {
			err = d.hear(ready[i].Socket)
		}
		if err != nil {
			return errors.Join(stopped(err), closeAll(d.monitors...))
		}
	}
}

// hear takes one event of a monitor. Its error is libzmq's own, since zmq4.AsErrno looks into nothing.
func (d *doors) hear(monitor *zmq4.Socket) error {
	kind, _, value, err := monitor.RecvEvent(zmq4.DONTWAIT)
	if err != nil {
		return err
	}
	reason := curve.Refused(kind, value)
	if reason == "" {
		return nil
	}
	if reason == curve.HungUp { // whoever sees first that the two don't fit
		reason = "CURVE handshake refused: the subscriber hangs up; does it have keys, and this end's public key?"
	}
	refused := d.z.refused.Add(1)
	if now := time.Now(); now.Sub(d.told) >= refusedEvery {
		d.told = now
		d.z.log.Warn("a subscriber was refused", "endpoint", d.z.Endpoint(), "reason", reason, "refused", refused)
	}
	return nil
}

// stopped returns why listening ended; nil where its context was terminated, wherever that was met.
func stopped(err error) error {
	if zmq4.AsErrno(err) == zmq4.ETERM {
		return nil
	}
	return fmt.Errorf("watch handshakes: %w", err)
}

// closeAll closes sockets, some of which may be nil.
func closeAll(sockets ...*zmq4.Socket) error {
	var errs []error
	for _, s := range sockets {
		if s != nil {
			errs = append(errs, s.Close())
		}
	}
	return errors.Join(errs...)
}
