package direct

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"strconv"
	"time"

	"kvstrata/connector"
	"kvstrata/event"
)

// Scheduler is the scheduler's half. A producer's answers with where its blocks are; a consumer's asks its workers to fetch
// them.
type Scheduler struct {
	setup   connector.Setup
	lease   time.Duration
	push    bool
	ranks   []string // addresses of this engine's workers
	journal *connector.Journal

	building *Metadata
	taken    map[string]struct{} // requests whose hand-off was acted upon
	held     map[string]struct{} // requests whose blocks the workers hold for a consumer
}

var _ connector.Scheduler = (*Scheduler)(nil)

// NewScheduler returns the half; lease is how long blocks are held at first, and push whether consumers ask before the
// producer has finished.
func NewScheduler(s connector.Setup, lease time.Duration, push bool) *Scheduler {
	return &Scheduler{
		setup: s, lease: lease, push: push, journal: connector.NewJournal(&s), building: new(Metadata),
		taken: make(map[string]struct{}), held: make(map[string]struct{}),
	}
}

// Run waits for ctx: the half has no goroutines.
func (s *Scheduler) Run(ctx context.Context) error {
	<-ctx.Done()
	return nil
}

// SetHandshake takes the addresses of the ranks' workers.
func (s *Scheduler) SetHandshake(ranks [][]byte) error {
	if len(ranks) != s.setup.Ranks {
		return fmt.Errorf("handshake of %d ranks: want %d", len(ranks), s.setup.Ranks)
	}
	s.ranks = s.ranks[:0]
	for i, text := range ranks {
		var h Handshake
		if err := json.Unmarshal(text, &h); err != nil {
			return fmt.Errorf("handshake of rank %d: %w", i, err)
		}
		s.ranks = append(s.ranks, h.Address)
	}
	return nil
}

// NewRequest does nothing: a request is looked at when it asks for blocks.
func (s *Scheduler) NewRequest(*connector.Request) {}

// MatchedTokens says that the whole prompt can be fetched when the client brought a producer's hand-off.
func (s *Scheduler) MatchedTokens(r *connector.Request, computed int) connector.Match {
	n := s.offered(r) - computed
	if n <= 0 {
		return connector.Match{}
	}
	return connector.Match{Tokens: n, Async: true}
}

// offered returns how many tokens of a request its producer has; 0 when there is no hand-off, or not any more.
func (s *Scheduler) offered(r *connector.Request) int {
	if !s.setup.Config.Role.Consumes() || r.Params == nil || !r.Params.DoRemotePrefill {
		return 0
	}
	if _, ok := s.taken[r.ID]; ok {
		return 0
	}
	tokens := min(r.Params.RemoteTokens, r.Prompt)
	if tokens <= 0 {
		tokens = r.Prompt
	}
	if blocks := len(r.Params.RemoteBlockIDs); !s.push && blocks < s.blocks(tokens) {
		return 0 // a hand-off that contradicts itself: the engine computes what it needs
	}
	return tokens
}

// blocks returns how many blocks so many tokens fill, the last one maybe not wholly.
func (s *Scheduler) blocks(tokens int) int {
	return (tokens + s.setup.Model.BlockTokens - 1) / s.setup.Model.BlockTokens
}

// UpdateAfterAlloc orders the load, or tells the producer that nothing is needed.
func (s *Scheduler) UpdateAfterAlloc(r *connector.Request, blocks []int, computed, external int) {
	if s.offered(r) == 0 {
		return
	}
	s.taken[r.ID] = struct{}{}
	remote := s.remote(r)
	if external == 0 {
		s.building.Notices = append(s.building.Notices, remote)
		return
	}
	first, end := computed/s.setup.Model.BlockTokens, s.blocks(computed+external)
	load := Load{Request: r.ID, First: first, Local: clone(blocks[first:end]), Remote: remote}
	if !s.push {
		load.Blocks = clone(r.Params.RemoteBlockIDs[first:end])
	}
	s.building.Loads = append(s.building.Loads, load)
	full := min(end, r.Prompt/s.setup.Model.BlockTokens, len(r.Names))
	s.journal.Loading(connector.Run{
		Request: r.ID, First: first, Blocks: end - first, Names: r.Names[first:max(first, full)], Local: load.Local, LoRA: r.LoRA,
		Away: s.setup.Tier,
	})
}

func clone(blocks []int) []int { return append([]int(nil), blocks...) }

func (s *Scheduler) remote(r *connector.Request) Remote {
	p := r.Params
	ranks := p.RemoteRanks
	if len(ranks) == 0 {
		ranks = []string{net.JoinHostPort(p.RemoteHost, strconv.Itoa(p.RemotePort))}
	}
	return Remote{EngineID: p.RemoteEngineID, Instance: p.RemoteInstance, Request: p.RemoteRequestID, Ranks: ranks, Push: s.push}
}

// BuildMetadata returns what was ordered since the last call.
func (s *Scheduler) BuildMetadata(*connector.Step) connector.Metadata {
	if s.building.Empty() {
		return connector.Nothing{}
	}
	m := s.building
	s.building = new(Metadata)
	return m
}

// UpdateOutput notes which loads and holds have ended.
func (s *Scheduler) UpdateOutput(o *connector.Output) {
	s.journal.Update(o)
	for _, id := range o.FinishedSending {
		delete(s.held, id)
	}
}

// RequestFinished keeps a producer's blocks for the consumer that was announced, and ends a consumer's load.
func (s *Scheduler) RequestFinished(r *connector.Request, blocks []int, end connector.End) (delay bool, params *connector.Params) {
	if s.offered(r) > 0 { // it ended before it was given blocks: nobody will fetch them
		s.building.Notices = append(s.building.Notices, s.remote(r))
	}
	delete(s.taken, r.ID)
	if s.journal.IsLoading(r.ID) {
		s.building.Cancels = append(s.building.Cancels, r.ID)
		return true, nil
	}
	if !s.setup.Config.Role.Produces() || r.Params == nil || !r.Params.DoRemoteDecode || end != connector.EndLength {
		return false, nil
	}
	n := min(s.blocks(r.Prompt), len(blocks))
	if n == 0 || len(s.ranks) == 0 { // nothing to hand over, or nowhere to get it
		return false, nil
	}
	hold := Hold{Request: r.ID, Blocks: clone(blocks[:n])}
	s.building.Holds = append(s.building.Holds, hold)
	s.held[r.ID] = struct{}{}
	params = &connector.Params{
		DoRemotePrefill: true, RemoteBlockIDs: hold.Blocks, RemoteEngineID: s.setup.Config.EngineID, RemoteRequestID: r.ID,
		RemoteRanks: s.ranks, RemoteInstance: s.setup.Instance, TPSize: s.setup.Ranks, RemoteTokens: r.Prompt,
		RemoteExpiry: float64(s.setup.Now().Add(s.lease).UnixMilli()) / 1e3, Mode: s.mode(),
	}
	if host, port, err := net.SplitHostPort(s.ranks[0]); err == nil {
		params.RemoteHost = host
		params.RemotePort, _ = strconv.Atoi(port) // a listener's own address
	}
	return true, params
}

func (s *Scheduler) mode() string {
	if s.push {
		return "push"
	}
	return "pull"
}

// Pending reports whether the workers are to be told something, or have something under way.
func (s *Scheduler) Pending() bool { return !s.building.Empty() || s.journal.Pending()+len(s.held) > 0 }

// TakeEvents returns the LOADED events since the last call.
func (s *Scheduler) TakeEvents() []event.Event { return s.journal.TakeEvents() }

// TakeRecords returns the records since the last call.
func (s *Scheduler) TakeRecords() []event.Transfer { return s.journal.TakeRecords() }

// FinishedCount returns 0: every rank reports.
func (s *Scheduler) FinishedCount() int { return 0 }

// Reset returns true: the half remembers nothing of the cache.
func (s *Scheduler) Reset() bool { return true }
