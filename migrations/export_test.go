package migrations

import (
	"io/fs"

	"github.com/pressly/goose/v3/database"
)

// For tests: the texts for a cluster, and its store of versions.
var (
	OnCluster          = onCluster
	ErrVersionNotFound = database.ErrVersionNotFound
)

func Clustered(cluster string) (fs.FS, error) {
	dir, err := fs.Sub(files, "sql")
	if err != nil {
		return nil, err
	}
	return clustered(dir, cluster)
}

func Versions(cluster string) database.Store { return versions{cluster} }
