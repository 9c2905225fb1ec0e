// Package llmd answers llm-d's IndexerService from the prefix index. docs/kv-indexer-api.md says what is the same and what differs.
package llmd

import (
	"cmp"
	"context"
	"errors"
	"math"
	"slices"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"kvstrata/event"
	"kvstrata/indexer/prefix"
	pb "kvstrata/indexer/prefix/llmdpb"
)

// Tokenize returns the token ids of a prompt as a model's engines cut it. Its errors hold nothing of the prompt.
type Tokenize func(ctx context.Context, model, prompt string) ([]uint32, error)

// Register adds the service to a gRPC server. Without tokenize every call is refused, with a sentence that says what is missing.
func Register(s grpc.ServiceRegistrar, x *prefix.Index, tokenize Tokenize) {
	pb.RegisterIndexerServiceServer(s, &service{index: x, tokenize: tokenize})
}

type service struct {
	pb.UnimplementedIndexerServiceServer

	index    *prefix.Index
	tokenize Tokenize // nil: there is none
}

// GetPodScores scores the pods that hold something of a prompt, the best first. A model that nobody serves yet has no pods: that is no
// error, as with llm-d.
func (s *service) GetPodScores(ctx context.Context, in *pb.GetPodScoresRequest) (*pb.GetPodScoresResponse, error) {
	if s.tokenize == nil {
		// Not UNAVAILABLE, which clients try again, and not UNIMPLEMENTED, which says that the service is not known here.
		return nil, status.Error(codes.FailedPrecondition, "prompts come as text here, and this index has nobody who makes tokens of it: "+
			"start it with --tokenizer URL of an engine, or ask kvstrata.index.v1.PrefixIndex by token ids")
	}
	if in.GetModelName() == "" {
		return nil, status.Error(codes.InvalidArgument, "model_name: missing")
	}
	tokens, err := s.tokenize(ctx, in.GetModelName(), in.GetPrompt())
	switch {
	case err != nil && ctx.Err() != nil:
		return nil, status.FromContextError(ctx.Err()).Err()
	case err != nil:
		return nil, status.Error(codes.Unavailable, err.Error())
	case len(tokens) == 0:
		return &pb.GetPodScoresResponse{}, nil
	}
	a, err := s.index.Lookup(&prefix.Request{Model: in.GetModelName(), Tokens: tokens})
	switch {
	case errors.Is(err, prefix.ErrUnknownModel):
		return &pb.GetPodScoresResponse{}, nil
	case err != nil:
		return nil, status.Error(codes.InvalidArgument, err.Error())
	}
	return &pb.GetPodScoresResponse{Scores: scores(a, in.GetPodIdentifiers())}, nil
}

// pod is a rank of an instance, whatever its cluster: llm-d knows none.
type pod struct {
	name string
	rank uint32
}

// scores returns what the engines among an answer's sources have, of some pods or, when wanted is empty, of all. Of two engines that
// share name and rank, in two clusters, the lower score stands: nobody is credited with what another holds.
func scores(a *prefix.Answer, wanted []string) (out []*pb.PodScore) {
	only := make(map[string]bool, len(wanted))
	for _, name := range wanted {
		only[name] = true
	}
	parallel := dataParallel(a)
	byPod := make(map[pod]float64)
	for i := range a.Matches {
		m := &a.Matches[i]
		if m.Source.Origin != event.Engine || len(only) > 0 && !only[m.Source.Instance] {
			continue
		}
		p, score := pod{m.Source.Instance, m.Source.Rank}, scoreOf(m.Tiers)
		if before, ok := byPod[p]; ok {
			score = min(score, before)
		}
		byPod[p] = score
	}
	for p, score := range byPod {
		if score == 0 {
			continue // llm-d names those that hold the first block
		}
		one := &pb.PodScore{Pod: p.name, Score: score}
		if parallel[p.name] && p.rank <= math.MaxInt32 {
			rank := int32(p.rank)
			one.DataParallelRank = &rank
		}
		out = append(out, one)
	}
	slices.SortFunc(out, func(p, q *pb.PodScore) int {
		return cmp.Or(cmp.Compare(q.Score, p.Score), cmp.Compare(p.Pod, q.Pod), cmp.Compare(p.GetDataParallelRank(), q.GetDataParallelRank()))
	})
	return out
}

// dataParallel returns the instances that have more ranks than rank 0, those that do not answer counted too: an engine does not become
// another kind while a rank of it is away.
func dataParallel(a *prefix.Answer) map[string]bool {
	found := make(map[string]bool)
	see := func(s event.Source) {
		if s.Origin == event.Engine && s.Rank > 0 {
			found[s.Instance] = true
		}
	}
	for i := range a.Matches {
		see(a.Matches[i].Source)
	}
	for i := range a.LeftOut {
		see(a.LeftOut[i].Source)
	}
	return found
}

// scoreOf sums up the weights that llm-d gives tiers unless it is configured otherwise: 0.8 in host memory, and 1 everywhere else.
func scoreOf(tiers []prefix.Tier) (score float64) {
	const hostMemory, anywhereElse = 0.8, 1.0
	for _, t := range tiers {
		weight := anywhereElse
		if t.Tier.Warmth() == event.CPU.Warmth() {
			weight = hostMemory
		}
		score += weight * float64(t.Blocks)
	}
	return score
}
