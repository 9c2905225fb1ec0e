package history

import (
	"context"
	"fmt"

	"github.com/ClickHouse/clickhouse-go/v2"

	"kvstrata/indexer/history/embedded"
)

// ServerVersion asks which version of ClickHouse answers.
func ServerVersion(ctx context.Context, cfg Config) (string, error) {
	a, err := cfg.address()
	if err != nil {
		return "", err
	}
	conn, err := clickhouse.Open(a.options(embedded.Dashboard, "default"))
	if err != nil {
		return "", fmt.Errorf("connect to ClickHouse at %s: %w", redact(cfg.Address), err)
	}
	defer conn.Close()
	var version string
	if err := conn.QueryRow(ctx, "SELECT version()").Scan(&version); err != nil {
		return "", fmt.Errorf("ask ClickHouse at %s: %w", redact(cfg.Address), hinted(err))
	}
	return version, nil
}
