package prefix

import (
	"context"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"

	pb "kvstrata/indexer/prefix/prefixpb"
)

// health answers grpc.health.v1 for the whole server (no name) and for the index: SERVING once the index has caught up.
type health struct {
	healthpb.UnimplementedHealthServer

	caughtUp func() bool
}

var _ healthpb.HealthServer = (*health)(nil)

var servedNames = []string{"", pb.PrefixIndex_ServiceDesc.ServiceName}

func (h *health) status(name string) healthpb.HealthCheckResponse_ServingStatus {
	switch {
	case name != servedNames[0] && name != servedNames[1]:
		return healthpb.HealthCheckResponse_SERVICE_UNKNOWN
	case h.caughtUp():
		return healthpb.HealthCheckResponse_SERVING
	default:
		return healthpb.HealthCheckResponse_NOT_SERVING
	}
}

// Check tells the status now.
func (h *health) Check(_ context.Context, in *healthpb.HealthCheckRequest) (*healthpb.HealthCheckResponse, error) {
	now := h.status(in.GetService())
	if now == healthpb.HealthCheckResponse_SERVICE_UNKNOWN {
		return nil, status.Errorf(codes.NotFound, "service %q: not here", in.GetService())
	}
	return &healthpb.HealthCheckResponse{Status: now}, nil
}

// List tells the status of each service.
func (h *health) List(context.Context, *healthpb.HealthListRequest) (*healthpb.HealthListResponse, error) {
	out := &healthpb.HealthListResponse{Statuses: make(map[string]*healthpb.HealthCheckResponse)}
	for _, name := range servedNames {
		out.Statuses[name] = &healthpb.HealthCheckResponse{Status: h.status(name)}
	}
	return out, nil
}

// Watch tells the status, and each change of it within a second.
func (h *health) Watch(in *healthpb.HealthCheckRequest, out grpc.ServerStreamingServer[healthpb.HealthCheckResponse]) error {
	every := time.NewTicker(time.Second)
	defer every.Stop()
	told := healthpb.HealthCheckResponse_UNKNOWN
	for {
		if now := h.status(in.GetService()); now != told {
			if err := out.Send(&healthpb.HealthCheckResponse{Status: now}); err != nil {
				return err
			}
			told = now
		}
		select {
		case <-every.C:
		case <-out.Context().Done():
			return status.FromContextError(out.Context().Err()).Err()
		}
	}
}
