// Package migrations brings a ClickHouse database to the schema that history writes: numbered SQL files, applied in order
// and recorded in the table goose_db_version.
package migrations

import (
	"context"
	"database/sql"
	"embed"
	"errors"
	"fmt"
	"io/fs"

	"github.com/pressly/goose/v3"
)

//go:embed sql/*.sql
var files embed.FS

// Step is one migration that was applied, or waits.
type Step struct {
	Version int64
	File    string
	Applied bool
}

// Config says what a database is to be like.
type Config struct {
	// Cluster is the name of a cluster in the server's configuration, on which everything is sharded and replicated; empty = on one server.
	Cluster string
	// Keep is how many days tables keep their rows, of those where it is not as the migrations say.
	Keep map[string]int
}

func provider(db *sql.DB, cluster string) (*goose.Provider, error) {
	dir, err := fs.Sub(files, "sql")
	if err != nil {
		return nil, err
	}
	if cluster == "" {
		return goose.NewProvider(goose.DialectClickHouse, db, dir, goose.WithDisableGlobalRegistry(true))
	}
	if dir, err = clustered(dir, cluster); err != nil {
		return nil, err
	}
	return goose.NewProvider(goose.DialectCustom, db, dir, goose.WithDisableGlobalRegistry(true), goose.WithStore(versions{cluster}))
}

// ErrNewer says that the database has migrations that this program does not know.
var ErrNewer = errors.New("the database has a newer schema")

// Up applies what is missing, and returns it; and makes the tables keep their rows as long as they are to. Each statement may be repeated: a migration that was interrupted is applied
// again. Only one process may call it at a time.
func Up(ctx context.Context, db *sql.DB, cfg Config) ([]Step, error) {
	p, err := provider(db, cfg.Cluster)
	if err != nil {
		return nil, fmt.Errorf("read migrations: %w", err)
	}
	if err := known(ctx, p); err != nil {
		return nil, err
	}
	results, err := p.Up(ctx)
	if err != nil {
		return nil, fmt.Errorf("migrate: %w", err)
	}
	var steps []Step
	for _, r := range results {
		steps = append(steps, Step{Version: r.Source.Version, File: r.Source.Path, Applied: true})
	}
	if err := keep(ctx, db, cfg.Cluster, cfg.Keep); err != nil {
		return steps, fmt.Errorf("migrate: %w", err)
	}
	return steps, nil
}

// known refuses a database that a later program has changed.
func known(ctx context.Context, p *goose.Provider) error {
	at, err := p.GetDBVersion(ctx)
	if err != nil {
		return fmt.Errorf("read what was migrated: %w", err)
	}
	if sources := p.ListSources(); at > sources[len(sources)-1].Version {
		return fmt.Errorf("%w: it is at version %d, and this program knows %d; use the newer program, or another database", ErrNewer, at, sources[len(sources)-1].Version)
	}
	return nil
}

// Status lists all migrations in order.
func Status(ctx context.Context, db *sql.DB, cluster string) ([]Step, error) {
	p, err := provider(db, cluster)
	if err != nil {
		return nil, fmt.Errorf("read migrations: %w", err)
	}
	states, err := p.Status(ctx)
	if err != nil {
		return nil, fmt.Errorf("read what was migrated: %w", err)
	}
	var steps []Step
	for _, s := range states {
		steps = append(steps, Step{Version: s.Source.Version, File: s.Source.Path, Applied: s.State == goose.StateApplied})
	}
	return steps, nil
}
