package prefix

import (
	"sync/atomic"

	"github.com/zeebo/xxh3"

	"kvstrata/event"
)

// Teller tells lookups, one in so many. Of those with a request's id it picks by the id, so that whoever picks likewise tells of the
// same requests. The zero value tells none.
type Teller struct {
	OneIn uint32
	Tell  func(event.Lookup) // it must not wait

	others atomic.Uint64 // lookups without an id
}

// picks reports whether a lookup is told.
func (t *Teller) picks(r *Request) bool {
	if t == nil || t.OneIn == 0 {
		return false
	}
	n := xxh3.HashString(r.ID)
	if r.ID == "" {
		n = t.others.Add(1)
	}
	return n%uint64(t.OneIn) == 0
}

// record returns what is told of a lookup: of the engine that has most of the prompt. size is how many tokens a block has where no match
// tells, cuts are the prompt's prefixes.
func (t *Teller) record(r *Request, a *Answer, size uint32, cuts map[variant][]event.PrefixHash, now event.Time) event.Lookup {
	l := event.Lookup{
		Source: event.Source{Cluster: r.Cluster, Model: r.Model, Origin: event.Engine}, Asker: event.AskerIndex, Time: now,
		Request: r.ID, Session: r.Session, Tenant: r.Tenant, OneIn: t.OneIn, BlockSize: size, Tokens: uint64(len(r.Tokens)),
	}
	for i := range a.Matches { // the longest reach comes first
		m := &a.Matches[i]
		_, tokens := m.reached()
		if m.Source.Origin != event.Engine || tokens == 0 {
			continue
		}
		if l.Holders++; l.Holders > 1 {
			continue
		}
		tiers := m.Tiers
		if m.Reach != nil {
			tiers = m.Reach.Tiers
		}
		for _, tier := range tiers {
			l.Shares = append(l.Shares, event.Share{Tier: tier.Tier, Tokens: uint64(tier.Tokens)})
		}
		l.Source, l.BlockSize, l.Longest = m.Source, m.BlockSize, uint64(tokens)
	}
	if len(r.Hashes) > 0 {
		l.Tokens = uint64(len(r.Hashes)) * uint64(l.BlockSize)
	}
	for v, prefixes := range cuts {
		if n := len(prefixes); v.blockSize == l.BlockSize && n > 0 {
			l.Prefix = prefixes[n-1]
		}
	}
	return l
}
