package embedded

import (
	"context"
	"net"
	"net/http"
	"time"

	"github.com/ClickHouse/clickhouse-go/v2"
)

// Dial returns the options by which clickhouse.Open and clickhouse.OpenDB reach one pool of the child that listens at socket. The
// caller may change them, but for compression, which the child refuses: there is no network between. Nothing connects
// before the first use; while the child is down, each use returns an error.
func Dial(socket string, pool Pool) *clickhouse.Options {
	return &clickhouse.Options{
		Protocol:    clickhouse.HTTP,
		Addr:        []string{"localhost:80"}, // only a name: DialContext knows where
		Auth:        clickhouse.Auth{Database: "default"},
		HttpHeaders: map[string]string{PoolHeader: string(pool)},
		DialContext: func(ctx context.Context, _ string) (net.Conn, error) { return DialSocket(ctx, socket) },
		TransportFunc: func(t *http.Transport) (http.RoundTripper, error) {
			t.Proxy = nil // $HTTP_PROXY is not for a Unix socket
			return t, nil
		},
		DialTimeout: 10 * time.Second,
	}
}
