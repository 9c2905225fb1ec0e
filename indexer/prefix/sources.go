package prefix

import (
	"cmp"
	"slices"
	"time"

	"kvstrata/event"
)

// SourceInfo is everything known of one source, as GET /v1/sources shows it.
type SourceInfo struct {
	Source   event.Source      `json:"source"`
	State    event.State       `json:"state"`
	Reason   string            `json:"reason,omitempty"`
	Epoch    event.Epoch       `json:"epoch"`
	Fence    event.Fence       `json:"fence"`
	Started  bool              `json:"started"` // whether a batch of this life was applied: last_seq means something
	LastSeq  event.Seq         `json:"last_seq"`
	Behind   uint64            `json:"behind"`                // sequences told of by the subscriber and not applied yet
	Lag      *float64          `json:"lag_seconds,omitempty"` // from the subscriber's reception to the index, of the last batch
	Idle     *float64          `json:"idle_seconds,omitempty"`
	Told     float64           `json:"status_age_seconds"`
	Resident []TierInfo        `json:"resident"`
	Unnamed  uint64            `json:"unnamed,omitempty"`         // of these blocks those told without tokens: only their engine hash is known
	LeftOut  uint64            `json:"left_out_copies,omitempty"` // that had no room within the index's bound of memory
	Groups   []event.GroupInfo `json:"groups"`
	Totals   Totals            `json:"totals"`               // told since this index began to read
	Pool     uint64            `json:"pool,omitempty"`       // physical blocks, where the source tells
	Heard    int64             `json:"last_event,omitempty"` // Unix ms of the last batch's reception by the subscriber
	Ledger   event.Ledger      `json:"ledger"`
	Balanced bool              `json:"ledger_balanced"`
	Digest   DigestInfo        `json:"digest"`
	Dialect  string            `json:"dialect,omitempty"`
	Endpoint string            `json:"endpoint,omitempty"`
	Copies   string            `json:"copies,omitempty"`      // counted, or unknown
	Stores   []string          `json:"stores,omitempty"`      // instances of the shared stores that it reads from
	Hashes   string            `json:"hash_scheme,omitempty"` // by which prompts find blocks without a name
	Oddities []event.Counter   `json:"oddities,omitempty"`
	Contract event.Contract    `json:"contract,omitzero"`    // what the stream was seen to be; the oddities break it
	Past     []event.PastLife  `json:"past_lives,omitempty"` // that ended, newest last
}

// TierInfo is how much of a source lies in one tier.
type TierInfo struct {
	Tier   event.Tier `json:"tier"`
	Blocks uint64     `json:"blocks"`
	Copies uint64     `json:"copies"`
}

// DigestInfo is how often the publisher's digest and the index's own were compared.
type DigestInfo struct {
	Agreed   uint64 `json:"agreed"`
	Differed uint64 `json:"differed"`
	Last     string `json:"last"` // agreed, differed, or not compared yet
}

// Sources lists all sources, by name.
func (x *Index) Sources() []SourceInfo {
	x.mu.RLock()
	defer x.mu.RUnlock()
	now := x.cfg.Clock()
	infos := make([]SourceInfo, 0, len(x.byID))
	for _, s := range x.byID {
		infos = append(infos, x.info(s, now))
	}
	slices.SortFunc(infos, func(a, b SourceInfo) int { return cmp.Compare(a.Source.Tokens(), b.Source.Tokens()) })
	return infos
}

func (x *Index) info(s *source, now time.Time) SourceInfo {
	epoch, seq, started := s.life()
	info := SourceInfo{
		Source: s.name, Epoch: epoch, Fence: max(s.fence, s.status.Fence), Started: started, LastSeq: seq,
		Groups: []event.GroupInfo{}, Told: now.Sub(s.toldAt).Seconds(), Ledger: s.status.Ledger, Balanced: s.status.Ledger.Balanced(), Resident: []TierInfo{},
		Dialect: s.status.Dialect, Endpoint: s.status.Endpoint, Oddities: s.status.Counters, Contract: s.status.Contract,
		Totals: s.totals, Pool: s.status.PoolSize, Stores: s.status.Stores, Past: s.status.PastLives,
		Digest: DigestInfo{Agreed: s.agreed, Differed: s.differed, Last: "not compared yet"},
	}
	info.State, info.Reason = x.state(s, now)
	if s.recipe.Scheme != 0 {
		info.Hashes = s.recipe.Scheme.String()
	}
	if s.status.Copies != 0 {
		info.Copies = s.status.Copies.String()
	}
	if s.agreed+s.differed > 0 {
		info.Digest.Last = map[bool]string{true: "agreed", false: "differed"}[s.lastAgree]
	}
	if s.status.Epoch == epoch && s.status.Ledger.Started {
		switch told := s.status.Seq; {
		case !started:
			info.Behind = uint64(told-s.status.Ledger.First) + 1
		case told > seq:
			info.Behind = uint64(told - seq)
		}
	}
	if s.hasLag {
		lag, idle := s.lag.Seconds(), now.Sub(s.appliedAt).Seconds()
		info.Lag, info.Idle = &lag, &idle
		info.Heard = s.appliedAt.Add(-s.lag).UnixMilli()
	}
	if epoch != s.epoch {
		return info
	}
	info.Unnamed, info.LeftOut = s.unnamed(), s.leftOut
	info.Groups = append(info.Groups, s.told...)
	for _, t := range s.tiers {
		in := TierInfo{Tier: x.tiers[t]}
		for _, g := range s.groups {
			for _, h := range g.shelves {
				if h.tier == t {
					in.Blocks, in.Copies = in.Blocks+uint64(h.len()), in.Copies+h.copies
				}
			}
		}
		info.Resident = append(info.Resident, in)
	}
	return info
}
