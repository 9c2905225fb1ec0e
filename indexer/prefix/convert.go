package prefix

import (
	"kvstrata/event"
	pb "kvstrata/indexer/prefix/prefixpb"
)

// What travels over gRPC is made here of what the index answers. Enums have the same numbers on both sides.

func requestOf(in *pb.LookupRequest) Request {
	r := Request{
		Model: in.GetModel(), Cluster: in.GetCluster(), LoRA: in.GetLoraName(), Salt: in.GetCacheSalt(), Tokens: in.GetTokenIds(),
		BlockSize: in.GetBlockSize(), Anywhere: in.GetAnywhere(), ID: in.GetRequestId(), Session: in.GetSession(), Tenant: in.GetTenant(),
	}
	for _, h := range in.GetPrefixHashes() {
		r.Hashes = append(r.Hashes, event.PrefixHash(h))
	}
	return r
}

func sourcePB(s *event.Source) *pb.Source {
	return &pb.Source{
		Cluster: s.Cluster, Model: s.Model, Instance: s.Instance, DpRank: s.Rank, Origin: pb.Origin(s.Origin), Id: s.Tokens(),
	}
}

func tiersPB(tiers []Tier) (out []*pb.TierShare) {
	for _, t := range tiers {
		out = append(out, &pb.TierShare{Tier: string(t.Tier), Blocks: uint64(t.Blocks), Tokens: uint64(t.Tokens)})
	}
	return out
}

func answerPB(a *Answer) *pb.LookupAnswer {
	out := &pb.LookupAnswer{Model: a.Model, Blocks: uint64(a.Blocks), Tokens: uint64(a.Tokens)}
	for i := range a.Matches {
		m := &a.Matches[i]
		one := &pb.Match{
			Source: sourcePB(&m.Source), State: pb.State(m.State), Reason: m.Reason, Epoch: uint64(m.Epoch), Seq: uint64(m.Seq),
			BlockSize: m.BlockSize, MatchedBlocks: uint64(m.Blocks), MatchedTokens: uint64(m.Tokens), DeviceBlocks: uint64(m.DeviceBlocks),
			DeviceTokens: uint64(m.DeviceTokens), Tiers: tiersPB(m.Tiers), ByEngineHash: m.MatchedBy == byEngineHash,
		}
		if m.Reach != nil {
			one.Reach = reachPB(m.Reach)
		}
		out.Matches = append(out.Matches, one)
	}
	for i := range a.LeftOut {
		l := &a.LeftOut[i]
		out.LeftOut = append(out.LeftOut, &pb.LeftOut{Source: sourcePB(&l.Source), State: pb.State(l.State), Reason: l.Reason})
	}
	return out
}

func reachPB(r *Reach) *pb.Reach {
	out := &pb.Reach{Blocks: uint64(r.Blocks), Tokens: uint64(r.Tokens), Tiers: tiersPB(r.Tiers)}
	for i := range r.Stores {
		s := &r.Stores[i]
		out.Stores = append(out.Stores, &pb.StoreShare{
			Source: sourcePB(&s.Source), State: pb.State(s.State), Blocks: uint64(s.Blocks), Tokens: uint64(s.Tokens),
		})
	}
	return out
}

func explanationPB(x *Explanation) *pb.ExplainAnswer {
	out := &pb.ExplainAnswer{Model: x.Model, EvictionsSince: x.EvictionsSince}
	for _, k := range x.Unknown {
		out.Unknown = append(out.Unknown, pb.CauseKind(k))
	}
	for i := range x.Endings {
		e := &x.Endings[i]
		one := &pb.Ending{
			Source: sourcePB(&e.Source), State: pb.State(e.State), Reason: e.Reason, BlockSize: e.BlockSize, AskedBlocks: uint64(e.Asked),
			MatchedBlocks: uint64(e.Blocks), MatchedTokens: uint64(e.Tokens), Complete: e.Complete, Text: e.Text,
		}
		if e.Prefix != nil {
			one.Prefix = uint64(*e.Prefix)
		}
		for _, c := range e.Causes {
			cause := &pb.Cause{
				Kind: pb.CauseKind(c.Kind), Time: c.Time, Group: c.Group, InGroups: c.Groups, Blocks: uint64(c.Blocks), LoraName: c.LoRA,
			}
			for _, t := range c.Tiers {
				cause.Tiers = append(cause.Tiers, string(t))
			}
			one.Causes = append(one.Causes, cause)
		}
		out.Endings = append(out.Endings, one)
	}
	return out
}

func sourceInfoPB(s *SourceInfo) *pb.SourceInfo {
	out := &pb.SourceInfo{
		Source: sourcePB(&s.Source), State: pb.State(s.State), Reason: s.Reason, Epoch: uint64(s.Epoch), Fence: uint64(s.Fence),
		Started: s.Started, LastSeq: uint64(s.LastSeq), Behind: s.Behind, StatusAgeSeconds: s.Told, Unnamed: s.Unnamed, Pool: s.Pool,
		Stores: s.Stores, Balanced: s.Balanced, DigestsAgreed: s.Digest.Agreed, DigestsDiffered: s.Digest.Differed,
	}
	if s.Lag != nil {
		out.LagSeconds = *s.Lag
	}
	for _, t := range s.Resident {
		out.Resident = append(out.Resident, &pb.TierCount{Tier: string(t.Tier), Blocks: t.Blocks, Copies: t.Copies})
	}
	for _, g := range s.Groups {
		out.Groups = append(out.Groups, &pb.GroupInfo{
			Group: int32(g.Group), BlockSize: g.BlockSize, SpecKind: g.Spec.String(), SlidingWindow: g.Window, Eagle: g.Eagle,
		})
	}
	return out
}

func pagePB(p *Page) *pb.ResidentPage {
	out := &pb.ResidentPage{
		Source: sourcePB(&p.Source), Epoch: uint64(p.Epoch), Seq: uint64(p.Seq), Next: p.Next, Blocks: make([]*pb.Block, 0, len(p.Blocks)),
	}
	for i := range p.Blocks {
		b := &p.Blocks[i]
		one := &pb.Block{EngineHash: b.Hash.AppendTo(nil), Tier: string(b.Tier), Group: b.Group, Copies: b.Copies, BlockSize: b.BlockSize}
		if b.Prefix != nil {
			one.Prefix = uint64(*b.Prefix)
		}
		out.Blocks = append(out.Blocks, one)
	}
	return out
}

func changesPB(changes []Change, known ids) *pb.Changes {
	out := &pb.Changes{Changes: make([]*pb.Change, 0, len(changes))}
	for i := range changes {
		c := &changes[i]
		one := &pb.Change{Kind: pb.ChangeKind(c.Kind), Source: known.of(c.Source), Epoch: uint64(c.Epoch), Seq: uint64(c.Seq)}
		if c.HasBlock() {
			one.Block = &pb.Block{
				EngineHash: c.Block.Hash.AppendTo(nil), Prefix: uint64(c.Block.Prefix), Tier: string(c.Block.Tier), Group: c.Block.Group,
				BlockSize: c.Block.BlockSize,
			}
		}
		if c.HasState() {
			one.State, one.Reason = pb.State(c.State), c.Reason
		}
		out.Changes = append(out.Changes, one)
	}
	return out
}
