package kvindexer

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"mime"
	"net/http"
	"strings"
)

// fields are those of a request's JSON object, read one by one; err is the first that is not what it should be. Names that nobody
// asks for are passed over, as Dynamo does.
type fields struct {
	raw map[string]json.RawMessage
	err error
}

// A body that can't be taken: what is not called JSON, what is none, and what is of another form. The words are Dynamo's, but for the capitals.
var (
	errMedia = errors.New("expected request with `Content-Type: application/json`")
	errParse = errors.New("failed to parse the request body as JSON")
	errForm  = errors.New("failed to deserialize the JSON body into the target type")
)

// readFields reads a body's first JSON value.
func readFields(w http.ResponseWriter, r *http.Request, most int64) (*fields, error) {
	kind, _, err := mime.ParseMediaType(r.Header.Get("Content-Type"))
	if err != nil || kind != "application/json" && !(strings.HasPrefix(kind, "application/") && strings.HasSuffix(kind, "+json")) {
		return nil, errMedia
	}
	var first json.RawMessage
	if err := json.NewDecoder(http.MaxBytesReader(w, r.Body, most)).Decode(&first); err != nil {
		var large *http.MaxBytesError
		if errors.As(err, &large) {
			return nil, err
		}
		return nil, fmt.Errorf("%w: %w", errParse, err)
	}
	f := new(fields)
	if err := json.Unmarshal(first, &f.raw); err != nil || f.raw == nil {
		return nil, fmt.Errorf("%w: want an object", errForm)
	}
	return f, nil
}

// required reads a field that must be there.
func (f *fields) required(name string, into any) {
	if _, ok := f.raw[name]; !ok && f.err == nil {
		f.err = fmt.Errorf("%w: missing field `%s`", errForm, name)
	}
	f.optional(name, into)
}

// nullable reads a field that may be missing, or null.
func (f *fields) nullable(name string, into any) {
	if raw, ok := f.raw[name]; ok && !bytes.Equal(raw, null) {
		f.optional(name, into)
	}
}

var null = []byte("null")

// optional reads a field that may be missing. The error does not repeat the value: it may be prompt text.
func (f *fields) optional(name string, into any) {
	raw, ok := f.raw[name]
	if !ok || f.err != nil {
		return
	}
	err := error(nil)
	if bytes.Equal(raw, null) {
		err = errors.New("invalid type: null")
	} else if json.Unmarshal(raw, into) != nil {
		err = fmt.Errorf("invalid value, expected %s", expected(into))
	}
	if err != nil {
		f.err = fmt.Errorf("%w: %s: %w", errForm, name, err)
	}
}

func expected(into any) string {
	switch into.(type) {
	case *uint64:
		return "u64"
	case *uint32:
		return "u32"
	case *[]uint32:
		return "a sequence of u32"
	case *[]int64:
		return "a sequence of i64"
	default:
		return "a string"
	}
}

// group reads a routing group; its former name is read, and passed over, as Dynamo does.
func (f *fields) group(name *string) {
	*name = defaultGroup
	f.optional("routing_group", name)
	var former string
	f.optional("tenant_id", &former)
}

// defaultGroup is the routing group of who names none. It is the name of our default cluster, too.
const defaultGroup = "default"

// writeRefusal answers a body that can't be taken, in plain text, as Dynamo does.
func writeRefusal(w http.ResponseWriter, err error) {
	status := http.StatusUnprocessableEntity
	var large *http.MaxBytesError
	switch {
	case errors.As(err, &large):
		status, err = http.StatusRequestEntityTooLarge, errors.New("failed to buffer the request body: length limit exceeded")
	case errors.Is(err, errMedia):
		status = http.StatusUnsupportedMediaType
	case errors.Is(err, errParse):
		status = http.StatusBadRequest
	}
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.WriteHeader(status)
	text := err.Error() // Dynamo begins its sentences with a capital
	fmt.Fprint(w, strings.ToUpper(text[:1]), text[1:])
}
