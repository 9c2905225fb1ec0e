package embedded

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
)

// Inserter sends whole blocks to a pool that writes, of the child that listens at a socket, as they are: a client library would
// copy each column several times. Any goroutine may use it.
type Inserter struct {
	pool   Pool
	client *http.Client
}

// NewInserter returns an inserter. Nothing connects before the first use. The caller closes it.
func NewInserter(socket string, pool Pool) *Inserter {
	return &Inserter{pool: pool, client: &http.Client{Transport: &http.Transport{
		DialContext:     func(ctx context.Context, _, _ string) (net.Conn, error) { return DialSocket(ctx, socket) },
		WriteBufferSize: 256 << 10, MaxIdleConns: 1, DisableCompression: true,
	}}}
}

// maxRefusal bounds what is read of an answer that refuses.
const maxRefusal = 64 << 10

// Insert sends one block in ClickHouse's Native format to a table of a database, under a deduplication token. columns are the
// names of the block's columns.
func (i *Inserter) Insert(ctx context.Context, database, table string, columns []string, token, queryID string, block []byte) error {
	values := url.Values{
		"query":    {"INSERT INTO " + table + " (" + strings.Join(columns, ", ") + ") FORMAT Native"},
		"database": {database}, "query_id": {queryID}, "insert_deduplication_token": {token},
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://localhost/?"+values.Encode(), bytes.NewReader(block))
	if err != nil {
		return err
	}
	req.Header.Set(PoolHeader, string(i.pool))
	resp, err := i.client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(io.LimitReader(resp.Body, maxRefusal))
	if err != nil {
		return fmt.Errorf("read the engine's answer: %w", err)
	}
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("the engine refuses (HTTP %d): %s", resp.StatusCode, strings.TrimSpace(string(text)))
	}
	return nil
}

// Close ends idle connections.
func (i *Inserter) Close() { i.client.CloseIdleConnections() }
