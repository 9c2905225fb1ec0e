package migrations

import (
	"context"
	"database/sql"
	"errors"
	"fmt"

	"github.com/pressly/goose/v3/database"
)

// versions keeps on a cluster which migrations were applied: in a table that every node of every shard replicates, written with a quorum and
// read in its wake, so that a node that was away when another applied one does not apply it again.
type versions struct{ cluster string }

const versionTable = "goose_db_version"

// Tablename is the table's name, as it is elsewhere.
func (versions) Tablename() string { return versionTable }

// CreateVersionTable makes the table on all nodes. One that is there is as good.
func (v versions) CreateVersionTable(ctx context.Context, db database.DBTxConn) error {
	_, err := db.ExecContext(ctx, fmt.Sprintf(`CREATE TABLE IF NOT EXISTS %s ON CLUSTER '%s'
(
    version_id Int64,
    is_applied UInt8,
    tstamp     DateTime64(9, 'UTC') DEFAULT now64(9, 'UTC')
)
ENGINE = ReplicatedMergeTree('/clickhouse/tables/all/{database}/%[1]s', '{shard}-{replica}')
ORDER BY tstamp`, versionTable, v.cluster))
	return err
}

// Insert notes that a version is applied.
func (versions) Insert(ctx context.Context, db database.DBTxConn, r database.InsertRequest) error {
	_, err := db.ExecContext(ctx, "INSERT INTO "+versionTable+" (version_id, is_applied) SETTINGS insert_quorum = 'auto', insert_quorum_parallel = 0 VALUES (?, 1)",
		r.Version)
	return err
}

// Delete forgets a version.
func (versions) Delete(ctx context.Context, db database.DBTxConn, version int64) error {
	_, err := db.ExecContext(ctx, "ALTER TABLE "+versionTable+" DELETE WHERE version_id = ? SETTINGS mutations_sync = 2", version)
	return err
}

// inStep makes a read see what a quorum has.
const inStep = " SETTINGS select_sequential_consistency = 1"

// GetMigration returns whether a version is applied.
func (versions) GetMigration(ctx context.Context, db database.DBTxConn, version int64) (*database.GetMigrationResult, error) {
	var r database.GetMigrationResult
	var applied uint8
	err := db.QueryRowContext(ctx, "SELECT tstamp, is_applied FROM "+versionTable+" WHERE version_id = ? ORDER BY tstamp DESC LIMIT 1"+inStep, version).
		Scan(&r.Timestamp, &applied)
	if errors.Is(err, sql.ErrNoRows) {
		return nil, fmt.Errorf("%w: %d", database.ErrVersionNotFound, version)
	}
	r.IsApplied = applied != 0
	return &r, err
}

// GetLatestVersion returns the highest version that is applied.
func (versions) GetLatestVersion(ctx context.Context, db database.DBTxConn) (int64, error) {
	var rows uint64
	var latest int64
	if err := db.QueryRowContext(ctx, "SELECT count(), max(version_id) FROM "+versionTable+inStep).Scan(&rows, &latest); err != nil {
		return 0, err
	}
	if rows == 0 {
		return 0, database.ErrVersionNotFound
	}
	return latest, nil
}

// ListMigrations lists what was applied, the newest first.
func (versions) ListMigrations(ctx context.Context, db database.DBTxConn) (list []*database.ListMigrationsResult, err error) {
	rows, err := db.QueryContext(ctx, "SELECT version_id, is_applied FROM "+versionTable+" ORDER BY tstamp DESC"+inStep)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	for rows.Next() {
		var version int64
		var applied uint8
		if err := rows.Scan(&version, &applied); err != nil {
			return nil, err
		}
		list = append(list, &database.ListMigrationsResult{Version: version, IsApplied: applied != 0})
	}
	return list, rows.Err()
}
