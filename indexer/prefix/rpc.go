package prefix

import (
	"context"
	"errors"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/reflection"
	"google.golang.org/grpc/status"

	"kvstrata/event"
	pb "kvstrata/indexer/prefix/prefixpb"
)

// RegisterRPC adds to a gRPC server what the index answers, with health and reflection. caughtUp says whether the index has read what
// its stream holds: the service is not SERVING before.
func (x *Index) RegisterRPC(s *grpc.Server, caughtUp func() bool) {
	pb.RegisterPrefixIndexServer(s, &rpc{index: x})
	healthpb.RegisterHealthServer(s, &health{caughtUp: caughtUp})
	reflection.Register(s)
}

// rpc is the index as a gRPC service: prefixpb/index.proto and docs/index-service.md have its contract.
type rpc struct {
	pb.UnimplementedPrefixIndexServer

	index *Index
}

var _ pb.PrefixIndexServer = (*rpc)(nil)

// codeOf returns the gRPC code of an error of this package. The sentence is the same as over HTTP.
func codeOf(err error) codes.Code {
	switch {
	case errors.Is(err, ErrUnknownModel), errors.Is(err, ErrUnknownSource):
		return codes.NotFound
	case errors.Is(err, ErrListingEnded):
		return codes.Aborted
	case errors.Is(err, ErrFull), errors.Is(err, ErrFellBehind):
		return codes.ResourceExhausted
	case errors.Is(err, context.DeadlineExceeded):
		return codes.DeadlineExceeded
	case errors.Is(err, context.Canceled):
		return codes.Canceled
	default:
		return codes.InvalidArgument
	}
}

func rpcError(err error) error { return status.Error(codeOf(err), err.Error()) }

// Lookup answers one request.
func (r *rpc) Lookup(_ context.Context, in *pb.LookupRequest) (*pb.LookupAnswer, error) {
	req := requestOf(in)
	a, err := r.index.Lookup(&req)
	if err != nil {
		return nil, rpcError(err)
	}
	return answerPB(a), nil
}

// BatchLookup answers several.
func (r *rpc) BatchLookup(ctx context.Context, in *pb.BatchLookupRequest) (*pb.BatchLookupAnswer, error) {
	req := BatchRequest{Requests: make([]Request, len(in.GetRequests()))}
	if len(req.Requests) <= maxBatch { // more are refused by their number
		for i, one := range in.GetRequests() {
			req.Requests[i] = requestOf(one)
		}
	}
	results, err := r.index.LookupBatch(ctx, &req)
	if err != nil {
		return nil, rpcError(err)
	}
	out := &pb.BatchLookupAnswer{}
	for i := range results {
		one := &pb.LookupResult{}
		if err := results[i].err; err != nil {
			one.Result = &pb.LookupResult_Error{Error: &pb.Error{Code: int32(codeOf(err)), Message: err.Error()}}
		} else {
			one.Result = &pb.LookupResult_Answer{Answer: answerPB(results[i].Answer)}
		}
		out.Results = append(out.Results, one)
	}
	return out, nil
}

// Explain tells why matches end where they do.
func (r *rpc) Explain(_ context.Context, in *pb.ExplainRequest) (*pb.ExplainAnswer, error) {
	explanation, err := r.index.Explain(&ExplainRequest{Request: requestOf(in.GetPrompt()), Tier: event.Tier(in.GetTier()), Device: in.GetDevice()})
	if err != nil {
		return nil, rpcError(err)
	}
	return explanationPB(explanation), nil
}

// Sources lists all sources, or one.
func (r *rpc) Sources(_ context.Context, in *pb.SourcesRequest) (*pb.SourcesAnswer, error) {
	infos, err := r.index.SourcesNamed(in.GetSource())
	if err != nil {
		return nil, rpcError(err)
	}
	out := &pb.SourcesAnswer{}
	for i := range infos {
		out.Sources = append(out.Sources, sourceInfoPB(&infos[i]))
	}
	return out, nil
}

// Resident returns a page of a source's resident blocks.
func (r *rpc) Resident(_ context.Context, in *pb.ResidentRequest) (*pb.ResidentPage, error) {
	page, err := r.index.Page(&PageRequest{Source: in.GetSource(), Limit: int(in.GetLimit()), After: in.GetAfter()})
	if err != nil {
		return nil, rpcError(err)
	}
	return pagePB(page), nil
}

// Subscribe streams what is resident, and what changes.
func (r *rpc) Subscribe(in *pb.SubscribeRequest, out grpc.ServerStreamingServer[pb.Changes]) error {
	sub, err := r.index.Subscribe(&WatchRequest{Source: in.GetSource(), Request: requestOf(in.GetOf())})
	if err != nil {
		return rpcError(err)
	}
	defer sub.Close()
	known := make(ids)
	for {
		changes, err := sub.Next(out.Context())
		if err != nil {
			return rpcError(err)
		}
		for len(changes) > 0 { // a message stays far below what clients take
			n := min(len(changes), maxTaken)
			if err := out.Send(changesPB(changes[:n], known)); err != nil {
				return err
			}
			changes = changes[n:]
		}
	}
}
