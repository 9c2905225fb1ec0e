// Package peers carries encoder outputs from engine to engine: a consumer reads them from the memory of the producer's
// encoder cache, over the endpoint of the transport tcp.
//
// A producer exports every item that it saved until the item is freed, under a lease that it renews meanwhile. A consumer
// learns from the hand-off, or from a list of peers, whom to ask.
package peers

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"kvstrata/connector/encoder"
	"kvstrata/connector/encoder/carry"
	"kvstrata/connector/tcp"
)

const (
	pieceBytes = 4 << 20 // an item's parts, of which several connections fetch some each
	maxAsks    = 64      // peers asked at a time in one lookup

	// handoffWait is how long a producer lets a lookup wait for an item that it has handed over: it may be about to save it. Of
	// one that it has freed since, that delays the consumer's encoder.
	handoffWait = 100 * time.Millisecond

	maxTries = 3 // to get an item whose lease is renewed amidst
)

// Connector returns both halves for a factory.
func Connector() encoder.Transport {
	return carry.Transport{
		Keys: keys(), Check: check, Keeps: true, Open: func(o carry.Opening) (carry.Carrier, error) {
			c, err := open(o)
			if err != nil {
				return nil, err
			}
			return c, nil
		},
	}.Connector()
}

// carrier is one half's endpoint, and what it exports.
type carrier struct {
	endpoint *tcp.Endpoint
	address  string // that peers are told; empty = none come here
	peers    []encoder.Place
	renewal  time.Duration

	mu      sync.Mutex
	exports map[string]export // by hash
}

// export is an item in the engine's memory.
type export struct {
	name   string
	pieces [][]byte
}

var _ carry.Carrier = (*carrier)(nil)

func open(o carry.Opening) (*carrier, error) {
	peers, cfg, err := read(o.Setup.Config.Extra)
	if err != nil {
		return nil, err
	}
	cfg.Listen = listenAt(&o.Setup.Config, cfg.Listen)
	// Every rank has the same, so that there is no telling them apart.
	e, err := tcp.New(cfg, tcp.Identity{Engine: o.Setup.Config.EngineID, Ranks: 1, Kind: o.Compatibility, Log: o.Setup.Log, Now: o.Setup.Now})
	if err != nil {
		return nil, fmt.Errorf("make endpoint of encoder cache: %w", err)
	}
	c := &carrier{endpoint: e, peers: peers, renewal: cfg.Lease().Duration / 3, exports: make(map[string]export)}
	if !o.Shares {
		return c, nil
	}
	if err := e.Listen(); err != nil {
		return nil, err
	}
	host, port, err := net.SplitHostPort(e.Address())
	if err != nil {
		return nil, fmt.Errorf("address of encoder cache: %w", err)
	}
	if ip := net.ParseIP(host); ip != nil && ip.IsUnspecified() {
		host = o.Setup.Config.IP
	}
	c.address = net.JoinHostPort(host, port)
	return c, nil
}

// Name is where peers come to.
func (c *carrier) Name() string { return "tcp://" + c.address }

// Address is where peers come to.
func (c *carrier) Address() string { return c.address }

// Run serves peers, and renews leases.
func (c *carrier) Run(ctx context.Context) error {
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return c.endpoint.Run(ctx) })
	g.Go(func() error { c.renew(ctx); return nil })
	return g.Wait()
}

// renew exports again what is exported, before its lease ends. A read that is under way then does not count; whoever reads
// asks once more.
func (c *carrier) renew(ctx context.Context) {
	tick := time.NewTicker(c.renewal)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		c.mu.Lock()
		for _, x := range c.exports {
			if c.endpoint.Export(x.name, tcp.Bytes(x.pieces), 1) != nil {
				break // it is closed
			}
		}
		c.mu.Unlock()
		c.endpoint.Ended() // what consumers have ended is exported again: forgotten here lest it pile up
	}
}

// nameOf is what an item is called on the wire: one of another size is another one.
func nameOf(i encoder.Item) string { return strconv.Itoa(i.Bytes) + "/" + i.Hash }

func peerAt(p encoder.Place) tcp.Peer { return tcp.Peer{Address: p.Address(), Engine: p.EngineID} }

func split(b []byte) (pieces [][]byte) {
	for len(b) > 0 {
		n := min(len(b), pieceBytes)
		pieces, b = append(pieces, b[:n:n]), b[n:]
	}
	return pieces
}

// Put exports an item from where it lies, until it is dropped.
func (c *carrier) Put(_ context.Context, i encoder.Item, from []byte, _ bool) (int, error) {
	x := export{nameOf(i), split(from)}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.drop(i.Hash)
	if err := c.endpoint.Export(x.name, tcp.Bytes(x.pieces), 1); err != nil {
		return 0, err
	}
	c.exports[i.Hash] = x
	return 0, nil
}

// Drop takes an item back. A read that is under way does not count.
func (c *carrier) Drop(hash string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.drop(hash)
}

func (c *carrier) drop(hash string) {
	if x, ok := c.exports[hash]; ok {
		delete(c.exports, hash)
		c.endpoint.Release(x.name)
	}
}

// Find asks where the hand-off says, and every peer of the list for what is not there.
func (c *carrier) Find(ctx context.Context, wants []carry.Want) error {
	var asks errgroup.Group
	asks.SetLimit(maxAsks)
	var mu sync.Mutex
	var failure error
	wait := handoffWait
	if end, ok := ctx.Deadline(); ok {
		wait = min(wait, time.Until(end)/2) // so that the answer comes in time
	}
	for i := range wants {
		w := &wants[i]
		ctx, found := context.WithCancel(ctx)
		defer found()
		ask := func(place encoder.Place, wait time.Duration) {
			asks.Go(func() error {
				if ctx.Err() != nil { // it is found
					return nil
				}
				err := c.endpoint.Await(ctx, peerAt(place), nameOf(w.Item), wait)
				mu.Lock()
				defer mu.Unlock()
				switch {
				case w.Found:
				case err == nil:
					w.Found, w.From = true, []encoder.Place{place}
					found() // nobody else need answer
				case !errors.Is(err, tcp.ErrNotHeld) && failure == nil:
					failure = err
				}
				return nil
			})
		}
		for _, place := range w.From {
			ask(place, max(wait, 0))
		}
		for _, place := range c.peers {
			ask(place, 0)
		}
	}
	_ = asks.Wait() // none returns an error
	return failure
}

// Get fetches an item from where it was found. A lease that is renewed amidst costs another try.
func (c *carrier) Get(ctx context.Context, w *carry.Want, into []byte) (from string, err error) {
	if len(w.From) == 0 {
		return "", fmt.Errorf("fetch item %s: nobody is known to have it", w.Hash)
	}
	from = w.From[0].Address()
	pull := tcp.Pull{Peer: peerAt(w.From[0]), Name: nameOf(w.Item), Into: tcp.Bytes(split(into))}
	for i := range (len(into) + pieceBytes - 1) / pieceBytes {
		pull.Parts = append(pull.Parts, i)
	}
	for range maxTries {
		r := c.endpoint.Fetch(ctx, &pull)
		if err = r.Err; !errors.Is(err, tcp.ErrEnded) {
			break
		}
	}
	return from, err
}
