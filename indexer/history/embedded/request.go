package embedded

import (
	"fmt"
	"io"
	"maps"
	"net/http"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
)

// maxSQL is the engine's max_query_size: it would cut what is longer, and lose rows of an INSERT … VALUES without a word.
const maxSQL = 262144

// request is what one HTTP request asks of the engine.
type request struct {
	pool     Pool
	sql      string
	format   string // of the answer, unless the statement names one
	database string
	params   []param
	settings map[string]string
	body     io.Reader // an INSERT's data; nil when the statement is all

	insertFormat string
}

// ignored are parameters of the HTTP interface that mean nothing here.
var ignored = map[string]bool{
	"query": true, "database": true, "default_format": true, "client_protocol_version": true, "query_id": true, "quota_key": true,
	"wait_end_of_query": true, "user": true, "session_timeout": true, "buffer_size": true, "enable_http_compression": true,
}

// settable are the settings that a request may bring. The read pools take only max_execution_time, and it only shortens.
var settable = map[string]bool{
	"max_execution_time":                                 true,
	"insert_deduplicate":                                 true,
	"insert_deduplication_token":                         true,
	"deduplicate_blocks_in_dependent_materialized_views": true,
	"max_partitions_per_insert_block":                    true,
	"max_insert_block_size":                              true,
	"min_insert_block_size_rows":                         true,
	"min_insert_block_size_bytes":                        true,
	"max_block_size":                                     true,
	"max_threads":                                        true,
	"max_insert_threads":                                 true,
	"mutations_sync":                                     true,
	"alter_sync":                                         true,
	"optimize_throw_if_noop":                             true,
	"fsync_metadata":                                     true,
}

var insertPattern = regexp.MustCompile(`(?is)^\s*INSERT\s+INTO\s.*?\sFORMAT\s+(\w+)\s*;?\s*$`)

var formatSuffix = regexp.MustCompile(`(?is)\s+FORMAT\s+\w+\s*;?\s*$`)

// readRequest reads all but an INSERT's data.
func readRequest(w http.ResponseWriter, r *http.Request) (*request, error) {
	if encoding := r.Header.Get("Content-Encoding"); encoding != "" && encoding != "identity" {
		return nil, refuse(codeBadArguments, "BAD_ARGUMENTS", "Content-Encoding %s is not understood over the Unix socket: send it plain", encoding)
	}
	if strings.HasPrefix(r.Header.Get("Content-Type"), "multipart/") {
		return nil, refuse(codeBadArguments, "BAD_ARGUMENTS", "external tables are not supported by the embedded engine")
	}
	q := &request{pool: Pool(r.Header.Get(PoolHeader)), settings: make(map[string]string)}
	if q.pool == "" {
		q.pool = Free
	}
	values := r.URL.Query()
	for _, key := range slices.Sorted(maps.Keys(values)) {
		value := values.Get(key)
		name, isParam := strings.CutPrefix(key, "param_")
		switch {
		case isParam:
			q.params = append(q.params, param{name, value})
		case ignored[key]:
		case (key == "compress" || key == "decompress") && (value == "" || value == "0" || value == "false"):
		case key == "compress" || key == "decompress":
			return nil, refuse(codeBadArguments, "BAD_ARGUMENTS", "compression is off over the Unix socket: dial without it")
		case settable[key]:
			q.settings[key] = value
		default:
			return nil, refuse(codeUnknownSetting, "UNKNOWN_SETTING", "the embedded engine takes no setting %s with a request", key)
		}
	}
	q.database = values.Get("database")
	q.format = values.Get("default_format")
	if q.format == "" {
		q.format = r.Header.Get("X-ClickHouse-Format")
	}
	if q.format == "" {
		q.format = "TabSeparated"
	}
	q.sql = values.Get("query")
	if m := insertPattern.FindStringSubmatch(q.sql); m != nil {
		q.insertFormat = m[1]
		q.sql = formatSuffix.ReplaceAllString(q.sql, "")
		q.body = r.Body
		return q, nil
	}
	control := http.NewResponseController(w)
	_ = control.SetReadDeadline(time.Now().Add(bodyPatience))
	body, err := io.ReadAll(io.LimitReader(r.Body, maxSQL+1))
	_ = control.SetReadDeadline(time.Time{}) // or it would end the request's context while the query runs
	if err != nil {
		return nil, fmt.Errorf("read request: %w", err)
	}
	if q.sql != "" && len(body) > 0 {
		q.sql += "\n"
	}
	q.sql += string(body)
	if len(q.sql) > maxSQL {
		return nil, refuse(codeSyntaxError, "SYNTAX_ERROR",
			"a statement of more than %d bytes: send the data of an INSERT as the body, with the statement, FORMAT included, in the URL's query parameter", maxSQL)
	}
	if strings.TrimSpace(q.sql) == "" {
		return nil, refuse(codeSyntaxError, "SYNTAX_ERROR", "empty query")
	}
	return q, nil
}

// limit returns how long a query of a read pool may take.
func (q *request) limit(most time.Duration) (time.Duration, error) {
	for key, value := range q.settings {
		if key != "max_execution_time" {
			return 0, refuse(codeReadOnly, "READONLY", "the %s connections take no setting %s", q.pool, key)
		}
		seconds, err := strconv.ParseFloat(value, 64)
		if err != nil || seconds < 0 {
			return 0, refuse(codeBadArguments, "BAD_ARGUMENTS", "max_execution_time %q: want seconds", value)
		}
		if asked := time.Duration(seconds * float64(time.Second)); seconds > 0 && seconds < most.Seconds() {
			most = asked
		}
	}
	return most, nil
}

// settingsClause returns the settings as a clause, and nothing when there are none.
func (q *request) settingsClause() string {
	if len(q.settings) == 0 {
		return ""
	}
	var list []string
	for _, key := range slices.Sorted(maps.Keys(q.settings)) {
		list = append(list, key+" = "+quoteText(q.settings[key]))
	}
	return " SETTINGS " + strings.Join(list, ", ")
}
