package main

import (
	"context"
	"encoding/json"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/reflection/grpc_reflection_v1"
	"google.golang.org/grpc/status"

	"kvstrata/certtest"
	"kvstrata/indexer/prefix"
	pb "kvstrata/indexer/prefix/prefixpb"
)

func dial(t *testing.T, address string, creds credentials.TransportCredentials) *grpc.ClientConn {
	t.Helper()
	conn, err := grpc.NewClient(address, grpc.WithTransportCredentials(creds))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return conn
}

// The index of a demo is asked over gRPC, and by the commands that ask over HTTP.
func TestGRPC(t *testing.T) {
	p := start(t, "run", "--roles", "subscriber,prefix", "--data", t.TempDir(), "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0",
		"--nats-listen", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--engine", "zmq+"+startPublisher(t, "tcp://127.0.0.1:*", "").Endpoint()+",model=m,instance=e")
	url, conn := p.says(`api +(http://\S+)`), dial(t, p.says(`grpc +(\S+)`), insecure.NewCredentials())
	health := healthpb.NewHealthClient(conn)
	eventually(t, "SERVING", func() bool {
		got, err := health.Check(t.Context(), &healthpb.HealthCheckRequest{Service: "kvstrata.index.v1.PrefixIndex"})
		return err == nil && got.Status == healthpb.HealthCheckResponse_SERVING
	}, p.output)
	eventually(t, "a source", func() bool { return len(sources(t, url)) == 1 }, p.output)
	client := pb.NewPrefixIndexClient(conn)
	got, err := client.Lookup(t.Context(), &pb.LookupRequest{Model: "m", TokenIds: []uint32{1, 2, 3}})
	if err != nil || len(got.Matches)+len(got.LeftOut) != 1 {
		t.Errorf("%v %v", got, err)
	}
	info, err := grpc_reflection_v1.NewServerReflectionClient(conn).ServerReflectionInfo(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := info.Send(&grpc_reflection_v1.ServerReflectionRequest{
		MessageRequest: &grpc_reflection_v1.ServerReflectionRequest_ListServices{},
	}); err != nil {
		t.Fatal(err)
	}
	listed, err := info.Recv()
	if err != nil || !strings.Contains(listed.String(), "kvstrata.index.v1.PrefixIndex") {
		t.Errorf("reflection lists %v, %v", listed, err)
	}
	o := command(t, "lookup", "--server", url, "--model", "m", "--explain", "1", "2", "3")
	if o.code != exitOK || !strings.Contains(o.stdout, "default/m@e") && !strings.Contains(o.stdout, "m@e: ") {
		t.Errorf("lookup --explain: %+v", o)
	}
	o = command(t, "changes", "--server", url, "--model", "m", "--count", "2")
	var line prefix.ChangeLine
	first, _, _ := strings.Cut(o.stdout, "\n")
	if err := json.Unmarshal([]byte(first), &line); err != nil || o.code != exitOK || line.Kind != prefix.Begin || line.Source != "default.m.e.0.engine" {
		t.Errorf("changes: %+v, %v", o, err)
	}
	for _, args := range [][]string{{"changes"}, {"changes", "--model", "m", "--source", "s"}, {"lookup", "--model", "m", "--device", "1"}} {
		if o := command(t, args...); o.code != exitUsage {
			t.Errorf("%v: %+v", args, o)
		}
	}
	if o := command(t, "changes", "--server", url, "--model", "other"); o.code != exitFailure || !strings.Contains(o.stderr, "no source serves this model") {
		t.Errorf("changes of an unknown model: %+v", o)
	}
}

// The same tokens and the same certificate guard the gRPC service; health is for everybody.
func TestGRPCAsksWhoComes(t *testing.T) {
	out, ca := outside(t), certtest.New(t)
	cert, key := ca.Pair(t, out)
	p := start(t, "run", "--roles", "prefix", "--data", t.TempDir(), "--listen", out+":0", "--admin", "127.0.0.1:0", "--nats-listen", "127.0.0.1:0",
		"--grpc", out+":0", "--token-file", secretFile(t, goodToken), "--tls-cert", cert, "--tls-key", key)
	trusted, err := credentials.NewClientTLSFromFile(ca.File, "")
	if err != nil {
		t.Fatal(err)
	}
	conn := dial(t, p.says(`grpc +(\S+)`), trusted)
	if _, err := healthpb.NewHealthClient(conn).Check(t.Context(), &healthpb.HealthCheckRequest{}); err != nil {
		t.Errorf("health: %v", err)
	}
	client := pb.NewPrefixIndexClient(conn)
	for token, want := range map[string]codes.Code{"": codes.Unauthenticated, otherToken: codes.Unauthenticated, goodToken: codes.OK} {
		ctx := t.Context()
		if token != "" {
			ctx = metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+token)
		}
		_, err := client.Sources(ctx, &pb.SourcesRequest{})
		if status.Code(err) != want {
			t.Errorf("a call with %q: %v", token, err)
		}
		if err := subscribeOnce(ctx, client); want != codes.OK && status.Code(err) != want || want == codes.OK && status.Code(err) != codes.NotFound {
			t.Errorf("a stream with %q: %v", token, err)
		}
	}
	plain := pb.NewPrefixIndexClient(dial(t, p.says(`grpc +(\S+)`), insecure.NewCredentials()))
	if _, err := plain.Sources(t.Context(), &pb.SourcesRequest{}); status.Code(err) != codes.Unavailable {
		t.Errorf("in the clear: %v", err)
	}
	o := command(t, "run", "--roles", "history", "--data", t.TempDir(), "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--nats-listen", "127.0.0.1:0", "--grpc", "127.0.0.1:0")
	if o.code != exitUsage || !strings.Contains(o.stderr, "add prefix to --roles") {
		t.Errorf("without an index: %+v", o)
	}
}

func subscribeOnce(ctx context.Context, client pb.PrefixIndexClient) error {
	stream, err := client.Subscribe(ctx, &pb.SubscribeRequest{Of: &pb.LookupRequest{Model: "m"}})
	if err != nil {
		return err
	}
	_, err = stream.Recv()
	return err
}
