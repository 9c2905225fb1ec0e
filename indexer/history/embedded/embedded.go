// Package embedded runs ClickHouse as a library, in a child process of the same binary, and speaks enough of ClickHouse's
// HTTP interface in front of it for clickhouse-go. So that the pipeline keeps going when the engine crashes or is refused
// memory, nothing of it lives in the parent: Engine starts the child, sees that it answers, and starts it again. The
// child (Serve) holds the data folder's lock, listens on a Unix socket in that folder, and dies with its parent.
package embedded

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"time"
)

// Version is the engine's that this package is written for: the C interface of another one may lack what we call.
const Version = "26.7.3"

// Limits bound what the child may use. Sizes are bytes.
type Limits struct {
	Memory      uint64 // what the child's process may hold
	QueryMemory uint64 // what one query of the read pools may hold
	MarkCache   uint64 // the cache of MergeTree's marks; the engine's own default is 5 GiB

	Writers int // connections that write; two more write aside
	Readers int // connections of the dashboard; free SQL has one

	QueryTime time.Duration // how long one query of the read pools may take
	Queue     int           // requests that may wait for a connection of one pool; one more is refused with 503
	QueueWait time.Duration // how long each may wait before it is refused with 503

	InsertBytes int64 // one INSERT's data
	AnswerBytes int64 // one query's answer, in the engine's columns and as it is sent; formats that come in one piece, as JSON, hold several times that while they are made
}

// DefaultLimits suit a small machine.
func DefaultLimits() Limits {
	return Limits{
		Memory: 2 << 30, QueryMemory: 512 << 20, MarkCache: 64 << 20,
		Writers: 1, Readers: 2,
		QueryTime: 30 * time.Second, Queue: 32, QueueWait: 10 * time.Second,
		InsertBytes: 256 << 20, AnswerBytes: 64 << 20,
	}
}

// minMemory is below what the engine holds before it has read a row.
const minMemory = 256 << 20

func (l Limits) validate() error {
	var errs []error
	for _, at := range []struct {
		name string
		ok   bool
		want string
	}{
		{"memory", l.Memory >= minMemory, "at least 256 MiB"},
		{"memory of a query", l.QueryMemory >= 1<<20 && l.QueryMemory <= l.Memory, "at least 1 MiB, and no more than the memory"},
		{"mark cache", l.MarkCache >= 1<<20 && l.MarkCache < l.Memory, "at least 1 MiB, and less than the memory"},
		{"writers", l.Writers >= 1 && l.Writers <= 8, "1 to 8"},
		{"readers", l.Readers >= 1 && l.Readers <= 64, "1 to 64"},
		{"query time", l.QueryTime >= time.Millisecond, "1ms or more"},
		{"queue", l.Queue >= 1, "1 or more"},
		{"queue wait", l.QueueWait > 0, "more than 0"},
		{"insert size", l.InsertBytes >= 1<<20, "at least 1 MiB"},
		{"answer size", l.AnswerBytes >= 1<<20, "at least 1 MiB"},
	} {
		if !at.ok {
			errs = append(errs, fmt.Errorf("history engine's %s: want %s", at.name, at.want))
		}
	}
	return errors.Join(errs...)
}

// Pool names a set of connections with rights of its own. A request names one in the header PoolHeader, and gets Free otherwise.
type Pool string

const (
	Writer    Pool = "writer"    // may do everything
	Aside     Pool = "aside"     // as Writer, beside it: for rows of which it does not matter when they come, nor how often
	Dashboard Pool = "dashboard" // reads, for queries of ours that people wait for
	Free      Pool = "free"      // reads, for SQL that anybody wrote
)

// PoolHeader is the HTTP header that bears a request's pool.
const PoolHeader = "X-Kvstrata-Pool"

// ChildConfig says what the child serves.
type ChildConfig struct {
	Dir     string   // holds the lock, the socket and the data
	Library string   // the engine's shared library, as Find returned it
	Boot    []string // further arguments of ClickHouse's own
	Limits  Limits

	// Parent yields nothing, and ends when the parent dies: then so does the child. Nil watches nobody.
	Parent io.Reader `json:"-"`
}

// ReadChildConfig reads what Engine writes to the standard input of the child, and keeps on watching it.
func ReadChildConfig(stdin io.Reader) (ChildConfig, error) {
	var cfg ChildConfig
	decoder := json.NewDecoder(stdin)
	if err := decoder.Decode(&cfg); err != nil {
		return ChildConfig{}, fmt.Errorf("read the history engine's configuration from the standard input, where its parent writes it: %w", err)
	}
	cfg.Parent = stdin
	return cfg, nil
}
