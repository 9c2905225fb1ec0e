// Package carry holds both halves of an encoder connector, whatever moves the bytes: that is a [Carrier].
package carry

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"kvstrata/connector"
	"kvstrata/connector/encoder"
	"kvstrata/event"
)

// Want is an item that is looked for.
type Want struct {
	encoder.Item
	From  []encoder.Place // where it may be, as the request's hand-off says; of one that was found, where it is
	Found bool
}

// Carrier gets items to other engines and from them. It is safe for concurrent use. Every call ends when ctx does; then it
// touches no memory any more.
type Carrier interface {
	// Run owns what is open until ctx ends. No other call is under way when it does.
	Run(ctx context.Context) error
	// Name says where saved items go, for people and records, without secrets.
	Name() string
	// Address is where peers get items from this engine; empty where they do not.
	Address() string
	// Find sets Found of those that can be had, and says where, if that matters. After an error it may have left some out.
	Find(ctx context.Context, wants []Want) error
	// Get reads an item, and says who had it. After an error the content of into is undefined.
	Get(ctx context.Context, w *Want, into []byte) (from string, err error)
	// Put shares an item, and returns how many bytes it moved: none where the item is there already, unless it is to be
	// overwritten.
	Put(ctx context.Context, i encoder.Item, from []byte, overwrite bool) (moved int, err error)
	// Drop ends what Put began, where peers read the memory itself.
	Drop(hash string)
}

// Opening is what a carrier is opened with.
type Opening struct {
	Setup         encoder.Setup // its Extra is without the halves' own keys
	Compatibility [sha256.Size]byte
	Shares        bool // this half saves: peers come to it; the others only ask
}

// Transport is an encoder connector over one kind of carrier.
type Transport struct {
	// Keys are the carrier's names in ec_connector_extra_config.
	Keys []string
	// Check validates the carrier's configuration before anything is opened.
	Check func(encoder.Setup) error
	// Open returns the carrier. It binds a socket where it shares; it waits for nobody.
	Open func(Opening) (Carrier, error)
	// Keeps says that what was put is read until it is dropped, not only until Put has returned.
	Keeps bool
	// Away is the tier at the other end, in records; empty = as the engine's.
	Away event.Tier
}

// Connector returns both halves for a factory.
func (t Transport) Connector() encoder.Transport {
	return encoder.Transport{
		NewScheduler: func(s encoder.Setup) (encoder.Scheduler, error) { return NewScheduler(s, t) },
		NewWorker:    func(s encoder.Setup) (encoder.Worker, error) { return NewWorker(s, t) },
	}
}

// Config is what the halves take of ec_connector_extra_config, beside the carrier's own.
type Config struct {
	Parallel      int     `json:"parallel"`       // loads under way at a time, and saves, and lookups
	LookupTimeout float64 `json:"lookup_timeout"` // s; then what was not found counts as absent
	LoadTimeout   float64 `json:"load_timeout"`   // s of one item's load, or save
}

// Keys are the names of Config in ec_connector_extra_config.
func Keys() []string { return []string{"parallel", "lookup_timeout", "load_timeout"} }

// DefaultConfig returns the defaults.
func DefaultConfig() Config { return Config{Parallel: 4, LookupTimeout: 1, LoadTimeout: 120} }

// Validate returns every problem at once.
func (c *Config) Validate() error {
	var errs []error
	if c.Parallel < 1 || c.Parallel > 256 {
		errs = append(errs, fmt.Errorf("parallel %d: want 1 to 256", c.Parallel))
	}
	if !(c.LookupTimeout > 0 && c.LookupTimeout <= 60) {
		errs = append(errs, fmt.Errorf("lookup_timeout %v: want seconds, more than 0 and up to 60", c.LookupTimeout))
	}
	if !(c.LoadTimeout > 0 && c.LoadTimeout <= 86400) {
		errs = append(errs, fmt.Errorf("load_timeout %v: want seconds, more than 0 and up to 86400", c.LoadTimeout))
	}
	return errors.Join(errs...)
}

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }

// configure reads the halves' part of the extra configuration, and takes it out of the setup.
func configure(s *encoder.Setup, t *Transport) (Config, error) {
	cfg := DefaultConfig()
	all := map[string]json.RawMessage{}
	// Both parts at once, so that an unknown key finds its nearest in either.
	err := encoder.Strictly(s.Config.Extra, &all, slices.Concat(Keys(), t.Keys)...)
	own, rest := connector.Extra{}, connector.Extra{}
	for key, value := range s.Config.Extra {
		if slices.Contains(Keys(), key) {
			own[key] = value
		} else {
			rest[key] = value
		}
	}
	s.Config.Extra = rest
	if err == nil {
		err = encoder.Strictly(own, &cfg, Keys()...)
	}
	if err == nil {
		err = errors.Join(cfg.Validate(), t.Check(*s))
	}
	if err != nil {
		return cfg, fmt.Errorf("ec_connector_extra_config: %w", err)
	}
	return cfg, nil
}

// handshake is what a worker tells its scheduler's half.
type handshake struct {
	Compatibility []byte `json:"compatibility"`
	Address       string `json:"address,omitempty"`
}

// metadata is what the scheduler's half tells its workers in a step.
type metadata struct {
	loads   []Want
	cancels []string // hashes whose loads nobody wants any more
	freed   []string // hashes
	ends    []end
}

// end is a request that is to be told as sent once nothing of these hashes is under way.
type end struct {
	request string
	hashes  []string
}

// Empty reports whether there is nothing to do.
func (m *metadata) Empty() bool {
	return len(m.loads)+len(m.cancels)+len(m.freed)+len(m.ends) == 0
}

// serve runs a carrier around work, which is to return when its context has ended: also when the carrier ends by itself.
func serve(ctx context.Context, c Carrier, work func(context.Context)) error {
	inner, cancel := context.WithCancel(ctx)
	defer cancel()
	below, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	ended := make(chan error, 1)
	go func() {
		err := c.Run(below)
		cancel()
		ended <- err
	}()
	work(inner)
	stop()
	return <-ended
}
