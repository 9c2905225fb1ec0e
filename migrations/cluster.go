package migrations

import (
	"fmt"
	"io/fs"
	"regexp"
	"strings"
	"testing/fstest"
)

// On a cluster each table is two: NAME_local has a shard's rows, replicated, and NAME is all shards' (Distributed), through which everything is
// written and read. Rows of one source lie on one shard, so that what is inserted of it is one block, in or not in, as it is on a
// single server.

// localSuffix ends the names of the tables that have a shard's rows.
const localSuffix = "_local"

// local returns the name of the table that has rows.
func local(table, cluster string) string {
	if cluster == "" {
		return table
	}
	return table + localSuffix
}

// The statements that migrations are made of. Whatever else stands in one is refused, so that none lacks its variant.
var (
	createTable = regexp.MustCompile(`(?s)^CREATE TABLE IF NOT EXISTS (\w+)\n\((.*)\n\)\nENGINE = (\w*MergeTree)(?:\((\w+)\))?\n(.*);\n$`)
	dropTable   = regexp.MustCompile(`^DROP TABLE IF EXISTS (\w+);$`)
	annotation  = regexp.MustCompile(`^(--.*)?$`)
)

// onCluster returns the variant of a migration's text for a cluster.
func onCluster(text, cluster string) (string, error) {
	var out, statement strings.Builder
	inside := false
	for line := range strings.Lines(text) {
		bare := strings.TrimSuffix(line, "\n")
		switch {
		case bare == "-- +goose StatementBegin":
			inside = true
		case bare == "-- +goose StatementEnd":
			variants, err := createOnCluster(statement.String(), cluster)
			if err != nil {
				return "", err
			}
			for _, v := range variants {
				out.WriteString("-- +goose StatementBegin\n" + v + "-- +goose StatementEnd\n")
			}
			statement.Reset()
			inside = false
		case inside:
			statement.WriteString(line)
		case dropTable.MatchString(bare):
			name := dropTable.FindStringSubmatch(bare)[1]
			for _, table := range []string{name, name + localSuffix} {
				fmt.Fprintf(&out, "DROP TABLE IF EXISTS %s ON CLUSTER '%s' SYNC;\n", table, cluster)
			}
		case annotation.MatchString(bare):
			out.WriteString(line)
		default:
			return "", fmt.Errorf("%q: no variant of this for a cluster is known", bare)
		}
	}
	return out.String(), nil
}

// createOnCluster returns what makes a table's two.
func createOnCluster(statement, cluster string) ([]string, error) {
	m := createTable.FindStringSubmatch(statement)
	if m == nil {
		return nil, fmt.Errorf("%.60q…: no variant of this for a cluster is known", statement)
	}
	name, columns, engine, argument, rest := m[1], m[2], m[3], m[4], m[5]
	key, err := shardingKey(name, columns)
	if err != nil {
		return nil, err
	}
	local := name + localSuffix
	if argument != "" {
		argument = ", " + argument
	}
	rest = strings.ReplaceAll(rest, "non_replicated_deduplication_window", "replicated_deduplication_window")
	return []string{
		fmt.Sprintf("CREATE TABLE IF NOT EXISTS %s ON CLUSTER '%s'\n(%s\n)\nENGINE = Replicated%s('/clickhouse/tables/{shard}/{database}/%s', '{replica}'%s)\n%s;\n",
			local, cluster, columns, engine, local, argument, rest),
		fmt.Sprintf("CREATE TABLE IF NOT EXISTS %s ON CLUSTER '%s' AS %s\nENGINE = Distributed('%s', currentDatabase(), '%s', %s);\n", name, cluster, local, cluster, local, key),
	}, nil
}

// shardingKey says which shard a row lies on: that of its source, or of its prefix where it has no source. Where the writer stands is told on
// one, at once.
func shardingKey(table, columns string) (string, error) {
	has := func(column string) bool { return regexp.MustCompile(`(?m)^    ` + column + ` `).MatchString(columns) }
	switch {
	case table == "progress":
		return "0", nil
	case has("source"):
		return "cityHash64(source)", nil
	case has("hash"):
		return "hash", nil
	}
	return "", fmt.Errorf("table %s: by what to shard it is not known", table)
}

// clustered returns the variants of all migrations.
func clustered(all fs.FS, cluster string) (fs.FS, error) {
	variants := make(fstest.MapFS)
	names, err := fs.Glob(all, "*.sql")
	if err != nil {
		return nil, err
	}
	for _, name := range names {
		text, err := fs.ReadFile(all, name)
		if err != nil {
			return nil, err
		}
		variant, err := onCluster(string(text), cluster)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		variants[name] = &fstest.MapFile{Data: []byte(variant)}
	}
	return variants, nil
}
