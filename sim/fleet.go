package sim

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"sync"
	"time"

	"kvstrata/connector"
	"kvstrata/event"
)

// FleetConfig says how a fleet's time passes. A step takes StepTime and TokenTime for each token that it computes.
type FleetConfig struct {
	Speed     float64       // virtual time over real time; 0 = as fast as it goes, one request after another
	Start     event.Time    // what the engines' clocks show when the run begins; 0 = the real time then
	StepTime  time.Duration // of a step, however many requests share it
	TokenTime time.Duration // of one token
}

// DefaultFleetConfig is real time with steps in round numbers: 20 ms each, and 50,000 tokens of prompts a second.
func DefaultFleetConfig() FleetConfig {
	return FleetConfig{Speed: 1, StepTime: 20 * time.Millisecond, TokenTime: 20 * time.Microsecond}
}

// Validate returns every problem of the configuration, joined; nil when there is none.
func (c FleetConfig) Validate() error {
	var problems []error
	if !(c.Speed >= 0 && c.Speed <= 1e6) {
		problems = append(problems, fmt.Errorf("speed %v: want 0 (max) or a factor up to 1000000", c.Speed))
	}
	if c.StepTime <= 0 || c.StepTime > time.Hour {
		problems = append(problems, fmt.Errorf("step-time %v: want more than 0 and up to 1h", c.StepTime))
	}
	if c.TokenTime < 0 || c.TokenTime > time.Second {
		problems = append(problems, fmt.Errorf("token-time %v: want 0 to 1s", c.TokenTime))
	}
	return errors.Join(problems...)
}

// Fleet sends requests to engines: the k-th to prefill engine k mod P. Without decode engines that one also generates
// the output; with D of them it generates one token, and decode engine k mod D then gets the request with its prompt's
// KV and generates all of the output.
//
// Run is called once; Report may be called at any time, from any goroutine. The engines belong to the fleet while it
// runs; what is resident in them is read before or after.
type Fleet struct {
	cfg             FleetConfig
	prefill, decode []*member

	mu       sync.Mutex
	clock    Clock
	elapsed  time.Duration // once the run has ended
	requests uint64
	hashIDs  uint64
	idHits   uint64
}

// member is an engine of the fleet.
type member struct {
	server Server
	host   *Host      // of an engine here; nil of one in another process
	now    event.Time // its virtual clock when the fleet runs at full speed

	mu  sync.Mutex
	ids map[uint64]struct{}
}

// handover is what follows a prefill.
type handover struct {
	to      *member
	request Request
}

// NewFleet returns a fleet of engines, at least one for prefill. At full speed prompts are cached whole, so no engine
// may chunk its prefill.
func NewFleet(cfg FleetConfig, prefill, decode []*Engine) (*Fleet, error) {
	var problems []error
	add := func(engines []*Engine) (members []*member) {
		for _, e := range engines {
			if n := e.cfg.TokensPerStep; cfg.Speed == 0 && n != 0 {
				problems = append(problems, fmt.Errorf("tokens-per-step %d of %s: want 0 at speed max", n, e.Name()))
			}
			h := NewHost(cfg, e)
			members = append(members, &member{server: h, host: h, ids: make(map[uint64]struct{})})
		}
		return members
	}
	return newFleet(cfg, add(prefill), add(decode), problems)
}

// NewRemoteFleet returns a fleet of engines that run elsewhere, by themselves. It has no full speed.
func NewRemoteFleet(cfg FleetConfig, prefill, decode []Server) (*Fleet, error) {
	var problems []error
	if cfg.Speed == 0 {
		problems = append(problems, errors.New("speed max: engines in other processes keep their own time"))
	}
	add := func(servers []Server) (members []*member) {
		for _, s := range servers {
			members = append(members, &member{server: s, ids: make(map[uint64]struct{})})
		}
		return members
	}
	return newFleet(cfg, add(prefill), add(decode), problems)
}

func newFleet(cfg FleetConfig, prefill, decode []*member, problems []error) (*Fleet, error) {
	all := []error{cfg.Validate()}
	if len(prefill) == 0 {
		all = append(all, errors.New("prefill 0: want at least 1 engine"))
	}
	if err := errors.Join(append(all, problems...)...); err != nil {
		return nil, err
	}
	return &Fleet{cfg: cfg, prefill: prefill, decode: decode}, nil
}

// Run sends the arrivals, which must be in the order of time, and returns when the last request is done, or, with nil
// too, when ctx ends first. A request that an engine refuses is counted there and passed over. An error is one of the
// arrivals' or of a publisher's.
func (f *Fleet) Run(ctx context.Context, arrivals iter.Seq2[Arrival, error]) error {
	f.mu.Lock()
	f.clock = Clock{Began: time.Now(), Start: f.cfg.Start, Speed: f.cfg.Speed}
	if f.clock.Start == 0 {
		f.clock.Start = event.UnixTime(f.clock.Began)
	}
	f.mu.Unlock()
	defer func() {
		f.mu.Lock()
		f.elapsed = time.Since(f.clock.Began)
		f.mu.Unlock()
	}()
	if f.cfg.Speed == 0 {
		return f.replay(ctx, arrivals)
	}
	return f.drive(ctx, arrivals)
}

// route counts an arrival and splits it: to whom it goes, and what follows.
func (f *Fleet) route(a *Arrival) (to *member, first Request, next handover) {
	f.mu.Lock()
	k := f.requests
	f.requests++
	f.mu.Unlock()
	to, first = f.prefill[k%uint64(len(f.prefill))], a.Request
	if d := uint64(len(f.decode)); d > 0 {
		next = handover{to: f.decode[k%d], request: a.Request}
		next.request.External = true
		first.Output, first.Params = 1, &connector.Params{DoRemoteDecode: true}
	}
	hits := to.countIDs(a.HashIDs)
	f.mu.Lock()
	f.hashIDs += uint64(len(a.HashIDs))
	f.idHits += uint64(hits)
	f.mu.Unlock()
	return to, first, next
}

// countIDs returns how many of a request's leading hash ids occurred in the member's earlier requests, and remembers
// all of them. It knows nothing of the pool: it tells what an endless cache would find.
func (m *member) countIDs(ids []uint64) (hits int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	missed := false
	for _, id := range ids {
		if _, ok := m.ids[id]; !ok {
			missed = true
			m.ids[id] = struct{}{}
		} else if !missed {
			hits++
		}
	}
	return hits
}
