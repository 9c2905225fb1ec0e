package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"time"

	"github.com/ClickHouse/clickhouse-go/v2"
	"github.com/ClickHouse/clickhouse-go/v2/lib/driver"

	"kvstrata/event"
	"kvstrata/indexer/history"
	"kvstrata/indexer/history/embedded"
	"kvstrata/indexer/prefix"
)

// client asks processes, some of which stand still.
var client = &http.Client{Timeout: 10 * time.Second}

func get(ctx context.Context, url string, read func(io.Reader) error) error {
	return ask(ctx, http.MethodGet, url, nil, read)
}

func ask(ctx context.Context, method, url string, body []byte, read func(io.Reader) error) error {
	req, err := http.NewRequestWithContext(ctx, method, url, bytes.NewReader(body))
	if err != nil {
		return err
	}
	resp, err := client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(io.LimitReader(resp.Body, 1024))
		return fmt.Errorf("%s %s: %s: %s", method, url, resp.Status, bytes.TrimSpace(text))
	}
	return read(resp.Body)
}

// lines decodes a value from each line.
func lines[T any](in io.Reader, yield func(T)) error {
	scanner := bufio.NewScanner(in)
	for scanner.Scan() {
		var v T
		if err := json.Unmarshal(scanner.Bytes(), &v); err != nil {
			return fmt.Errorf("read line: %w", err)
		}
		yield(v)
	}
	return scanner.Err()
}

// wireBlock is a line of a resident set, of an engine as of the index.
type wireBlock struct {
	Hash   event.BlockHash
	Tier   event.Tier
	Group  event.Group
	Copies int
}

// residentAt reads a resident set.
func residentAt(ctx context.Context, url string) (map[blockKey]int, error) {
	set := make(map[blockKey]int)
	err := get(ctx, url, func(in io.Reader) error {
		return lines(in, func(b wireBlock) { set[blockKey{b.Hash, b.Tier, b.Group.Index()}] += b.Copies })
	})
	return set, err
}

// sourcesAt reads what the index knows of its sources.
func sourcesAt(ctx context.Context, api string) ([]prefix.SourceInfo, error) {
	var answer struct{ Sources []prefix.SourceInfo }
	err := get(ctx, api+"/v1/sources", func(in io.Reader) error { return json.NewDecoder(in).Decode(&answer) })
	return answer.Sources, err
}

func residentOfIndex(ctx context.Context, api string, source event.Source) (map[blockKey]int, error) {
	return residentAt(ctx, api+"/v1/resident?source="+url.QueryEscape(source.Tokens()))
}

// readJournal reads what an engine wrote down in one life. A last line that was cut short was never published.
func readJournal(path string) ([]batch, error) {
	text, err := os.ReadFile(path)
	if errors.Is(err, os.ErrNotExist) { // it was killed before
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read journal: %w", err)
	}
	var all []batch
	for text := range bytes.Lines(text) {
		if text[len(text)-1] != '\n' {
			break
		}
		var b batch
		if err := json.Unmarshal(text, &b); err != nil {
			return nil, fmt.Errorf("read journal %s: %w", path, err)
		}
		if b.Seq != uint64(len(all)) {
			return nil, fmt.Errorf("read journal %s: sequence %d after %d batches", path, b.Seq, len(all))
		}
		b.Time /= 1000 // of ns
		all = append(all, b)
	}
	return all, nil
}

// tables reads history's tables, through the socket of the embedded engine.
type tables struct {
	conn   clickhouse.Conn
	reader *history.Reader
}

func openTables(dir string) (*tables, error) {
	cfg := history.DefaultConfig()
	socket := embedded.SocketPath(dir)
	cfg.Address = "unix://" + socket
	reader, err := history.NewReader(cfg)
	if err != nil {
		return nil, err
	}
	options := embedded.Dial(socket, embedded.Dashboard)
	options.Auth.Database = "kvstrata"
	conn, err := clickhouse.Open(options)
	if err != nil {
		return nil, errors.Join(err, reader.Close())
	}
	return &tables{conn: conn, reader: reader}, nil
}

func (t *tables) close() error { return errors.Join(t.conn.Close(), t.reader.Close()) }

func (t *tables) each(ctx context.Context, sql string, source event.Source, yield func(driver.Rows) error) error {
	ctx = clickhouse.Context(ctx, clickhouse.WithParameters(clickhouse.Parameters{"source": source.Tokens()}))
	rows, err := t.conn.Query(ctx, sql)
	if err != nil {
		return err
	}
	defer rows.Close()
	for rows.Next() {
		if err := yield(rows); err != nil {
			return err
		}
	}
	return rows.Err()
}

// inserting reports whether an INSERT runs.
func (t *tables) inserting(ctx context.Context) (bool, error) {
	var n uint64
	err := t.conn.QueryRow(ctx, "SELECT count() FROM system.processes WHERE query_kind = 'Insert'").Scan(&n)
	return n > 0, err
}

// received returns when the newest batch of each source was received by its subscriber, of those that came in the last minutes.
func (t *tables) received(ctx context.Context) (map[string]time.Time, error) {
	all := make(map[string]time.Time)
	err := t.each(ctx, `SELECT toString(source), max(received) FROM batches WHERE committed > now() - INTERVAL 5 MINUTE GROUP BY source`,
		event.Source{}, func(rows driver.Rows) error {
			var source string
			var at time.Time
			err := rows.Scan(&source, &at)
			all[source] = at
			return err
		})
	return all, err
}

// look reads everything that history has of a source.
func (t *tables) look(ctx context.Context, source event.Source) (*kept, error) {
	h := &kept{
		Batches: make(map[event.Epoch][]keptBatch), Spans: make(map[event.Epoch][]span), Resident: make(map[foldedKey]int),
	}
	var err error
	if h.Mark, err = t.reader.Mark(ctx, source); err != nil {
		return nil, fmt.Errorf("ask history where it stands: %w", err)
	}
	// A CLEARED of ours stands for batches that never came.
	err = t.each(ctx, `SELECT epoch, seq, toUnixTimestamp64Micro(any(source_time)), countIf(op = 'STORED' AND effect > 0), countIf(op = 'EVICTED'),
  countIf(op = 'CLEARED'), count() - uniqExact(ev, pos)
FROM block_events
ANY LEFT JOIN (SELECT epoch, seq, source_time FROM batches WHERE source = {source:String}) AS stamps USING (epoch, seq)
WHERE source = {source:String} AND cause != 'resync' GROUP BY epoch, seq`, source, func(rows driver.Rows) error {
		var b keptBatch
		var epoch, stored, evicted, cleared uint64
		var again int64
		err := rows.Scan(&epoch, &b.Seq, &b.Time, &stored, &evicted, &cleared, &again)
		b.Stored, b.Evicted, b.Cleared, b.Again = int(stored), int(evicted), int(cleared), int(again)
		h.Batches[event.Epoch(epoch)] = append(h.Batches[event.Epoch(epoch)], b)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("ask history for its rows: %w", err)
	}
	err = t.each(ctx, `SELECT epoch, seq, last, toString(kind) FROM ledger WHERE source = {source:String} AND kind IN ('lost', 'dropped', 'resync', 'mismatch')`,
		source, func(rows driver.Rows) error {
			var epoch uint64
			var s span
			err := rows.Scan(&epoch, &s.First, &s.Last, &s.Kind)
			if s.Kind == "mismatch" {
				h.Differed++
				return err
			}
			h.Spans[event.Epoch(epoch)] = append(h.Spans[event.Epoch(epoch)], s)
			return err
		})
	if err != nil {
		return nil, fmt.Errorf("ask history for its ledger: %w", err)
	}
	err = t.reader.Resident(ctx, source, func(b history.Resident) {
		h.Resident[foldedKey{b.Hash, b.Tier, b.Group.Index()}] += int(b.Copies)
	})
	if err != nil {
		return nil, fmt.Errorf("ask history for its resident set: %w", err)
	}
	return h, nil
}
