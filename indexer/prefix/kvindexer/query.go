package kvindexer

import (
	"context"
	"errors"
	"iter"
	"maps"
	"net/http"
	"strconv"

	"kvstrata/event"
	"kvstrata/indexer/prefix"
)

// scores are a query's answer. All counts are tokens.
type scores struct {
	Scores      map[string]map[string]uint32 `json:"scores"`      // by instance and rank: the prefix on the device
	Frequencies []int                        `json:"frequencies"` // always empty, as those of Dynamo's threaded index are
	Instances   map[string]*summary          `json:"instances"`
}

// summary is the best of an instance's ranks, tier by tier; each tier's count contains those of the warmer ones.
type summary struct {
	Longest uint32            `json:"longest_matched"`
	GPU     uint32            `json:"gpu"`
	DP      map[string]uint32 `json:"dp"`
	CPU     uint32            `json:"cpu"`
	Disk    uint32            `json:"disk"`
}

func (s *Service) query(_ context.Context, f *fields) (int, any) {
	var (
		tokens                   []uint32
		model, group, lora, salt string
	)
	f.required("token_ids", &tokens)
	f.required("model_name", &model)
	f.group(&group)
	f.nullable("lora_name", &lora)
	f.nullable("cache_salt", &salt)
	if f.err != nil {
		return 0, nil
	}
	return s.answer(partition{model, group}, &prefix.Request{Tokens: tokens, LoRA: lora, Salt: salt})
}

// queryByHash takes local hashes, each of one block's tokens alone, with the seed of adapter and salt; the index knows chains.
func (s *Service) queryByHash(_ context.Context, f *fields) (int, any) {
	var (
		hashes             []int64
		model, salt, group string
	)
	f.required("block_hashes", &hashes)
	f.required("model_name", &model)
	f.group(&group)
	f.nullable("cache_salt", &salt)
	if f.err != nil {
		return 0, nil
	}
	if raw, ok := f.raw["cache_salt"]; ok && string(raw) != "null" {
		return http.StatusBadRequest, refusal("cache_salt is not accepted by /query_by_hash; block_hashes must already include the intended cache salt")
	}
	if s.cfg.Keyed {
		return http.StatusBadRequest, refusal("block_hashes are of the public scheme, and this index hashes with a key (--hash-key): send token_ids to /query")
	}
	req := &prefix.Request{BlockSize: s.blockSize(partition{model, group})}
	parent := event.PrefixHash(0)
	for _, h := range hashes {
		parent = event.Chain(parent, uint64(h))
		req.Hashes = append(req.Hashes, parent)
	}
	return s.answer(partition{model, group}, req)
}

// blockSize returns that of a partition's registered engines; 0 = none is.
func (s *Service) blockSize(p partition) uint32 {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, w := range s.workers {
		if w.partition == p {
			return w.blockSize
		}
	}
	return 0
}

// answer looks a prompt up among the engines of a partition.
func (s *Service) answer(p partition, req *prefix.Request) (int, any) {
	unknown := refusal("no indexer for %v", p)
	if p.model == "" || p.group == "" {
		return http.StatusNotFound, unknown
	}
	req.Model, req.Cluster = p.model, p.group
	a, err := s.index.Lookup(req)
	exists := s.blockSize(p) != 0
	switch {
	case errors.Is(err, prefix.ErrUnknownModel):
		a = new(prefix.Answer)
	case err != nil:
		return http.StatusBadRequest, answer{"error": err.Error()}
	}
	found := scores{Scores: make(map[string]map[string]uint32), Frequencies: []int{}, Instances: make(map[string]*summary)}
	for i := range a.Matches {
		if m := &a.Matches[i]; m.Source.Origin == event.Engine {
			exists = true
			found.add(m)
		}
	}
	for i := range a.LeftOut {
		exists = exists || a.LeftOut[i].Source.Origin == event.Engine && a.LeftOut[i].State != event.StateGone
	}
	if !exists {
		return http.StatusNotFound, unknown
	}
	return http.StatusOK, found
}

// add enters one rank's match. Blocks on the device end the device's count at the first that lies elsewhere; what is behind
// belongs to the tier in which it lies, and a tier that we do not know counts as the coldest.
func (f *scores) add(m *prefix.Match) {
	if m.Tokens == 0 {
		return
	}
	instance, rank := m.Source.Instance, strconv.FormatUint(uint64(m.Source.Rank), 10)
	if m.DeviceTokens > 0 {
		if f.Scores[instance] == nil {
			f.Scores[instance] = make(map[string]uint32)
		}
		f.Scores[instance][rank] = uint32(m.DeviceTokens)
	}
	in := f.Instances[instance]
	if in == nil {
		in = &summary{DP: make(map[string]uint32)}
		f.Instances[instance] = in
	}
	gpu, below, total := uint32(m.DeviceTokens), uint32(0), uint32(m.Tokens)
	for _, t := range m.Tiers {
		if t.Tier.Warmth() >= 2 {
			below += uint32(t.Tokens)
		}
	}
	in.DP[rank] = gpu
	in.GPU, in.CPU, in.Disk = max(in.GPU, gpu), max(in.CPU, total-below), max(in.Disk, total)
	in.Longest = max(in.GPU, in.CPU, in.Disk)
}

// partitions yields those with a registered engine, or one that the index knows and that is not gone.
func (s *Service) partitions() iter.Seq[partition] {
	all := make(map[partition]bool)
	for _, i := range s.index.Sources() {
		if i.Source.Origin == event.Engine && i.State != event.StateGone {
			all[partition{i.Source.Model, i.Source.Cluster}] = true
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, w := range s.workers {
		all[w.partition] = true
	}
	return maps.Keys(all)
}
