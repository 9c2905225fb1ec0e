// Package migrations brings a ClickHouse database to the schema that history writes: numbered SQL files, applied in order
// and recorded in the table goose_db_version.
package migrations

import (
	"context"
	"database/sql"
	"embed"
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

func provider(db *sql.DB) (*goose.Provider, error) {
	dir, err := fs.Sub(files, "sql")
	if err != nil {
		return nil, err
	}
	return goose.NewProvider(goose.DialectClickHouse, db, dir, goose.WithDisableGlobalRegistry(true))
}

// Up applies what is missing, and returns it. Each statement may be repeated: a migration that was interrupted is applied
// again. Only one process may call it at a time.
func Up(ctx context.Context, db *sql.DB) ([]Step, error) {
	p, err := provider(db)
	if err != nil {
		return nil, fmt.Errorf("read migrations: %w", err)
	}
	results, err := p.Up(ctx)
	if err != nil {
		return nil, fmt.Errorf("migrate: %w", err)
	}
	var steps []Step
	for _, r := range results {
		steps = append(steps, Step{Version: r.Source.Version, File: r.Source.Path, Applied: true})
	}
	return steps, nil
}

// Status lists all migrations in order.
func Status(ctx context.Context, db *sql.DB) ([]Step, error) {
	p, err := provider(db)
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
