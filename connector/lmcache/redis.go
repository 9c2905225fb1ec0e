package lmcache

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"strconv"
	"strings"

	"kvstrata/connector/store"
)

// redis is the client of LMCache's layout in Redis: two keys a chunk, of one server. It speaks RESP2 itself, so that values
// are read straight into their pieces.
type redis struct {
	*pool
	pipeline int
	login    []byte // commands on a new connection
	logins   int
}

var _ client = (*redis)(nil)

// newRedis takes the user, password and database of the address.
func newRedis(u *url.URL, cfg *Config) (*redis, error) {
	address := u.Host
	if u.Port() == "" {
		address = net.JoinHostPort(u.Hostname(), "6379")
	}
	r := &redis{pool: newPool(address, cfg), pipeline: cfg.Pipeline}
	if password, ok := u.User.Password(); ok {
		args := []string{"AUTH", password}
		if name := u.User.Username(); name != "" {
			args = []string{"AUTH", name, password}
		}
		r.login, r.logins = appendCommand(r.login, args...), r.logins+1
	}
	if db := strings.Trim(u.Path, "/"); db != "" {
		if n, err := strconv.ParseUint(db, 10, 16); err != nil || strconv.FormatUint(n, 10) != db {
			return nil, fmt.Errorf("remote_url: database %q: want a number", db)
		}
		r.login, r.logins = appendCommand(r.login, "SELECT", db), r.logins+1
	}
	if r.logins > 0 {
		r.greet = r.logIn
	}
	return r, nil
}

func (r *redis) logIn(c *conn) error {
	if _, err := c.net.Write(r.login); err != nil {
		return err
	}
	for range r.logins {
		if refused, err := r.ok(c); err != nil || refused != nil {
			return errors.Join(refused, err)
		}
	}
	return nil
}

func (r *redis) name() string { return "redis://" + r.address }

// maxKey is for the suffixes' sake a little less than Redis has.
func (r *redis) maxKey() int { return 1 << 16 }

// exist asks for both keys: Redis may evict one of them.
func (r *redis) exist(ctx context.Context, keys []string) ([]bool, error) {
	ask := func(dst []byte, key string) ([]byte, error) {
		return appendCommand(dst, "EXISTS", key+MetadataSuffix, key+BytesSuffix), nil
	}
	return r.pool.exist(ctx, keys, ask, func(c *conn) (bool, error) {
		kind, n, err := readHead(c)
		if err == nil && kind != ':' {
			err = errRESP
		}
		return n == 2, err
	})
}

// put stores chunks, the bytes before the metadata, which says that they are there.
func (r *redis) put(ctx context.Context, chunks []chunk, errs []error) {
	r.windows(chunks, r.pipeline, func(first, end int) {
		part := chunks[first:end]
		r.putWindow(ctx, part, errs[first:end], func(c *conn) error { return r.write(c, part) }, r.confirm)
	})
}

func (r *redis) write(c *conn, chunks []chunk) error {
	for i := range chunks {
		w := &chunks[i]
		meta, err := (&Metadata{Length: w.bytes, Format: w.content.Format, Groups: []MetadataGroup{{w.content.DType, w.content.Shape}}}).Append(nil)
		if err != nil {
			return fmt.Errorf("chunk %s: %w", w.key, err)
		}
		at := len(c.frames)
		c.frames = appendHead(appendHead(c.frames, '*', 3), '$', 3)
		c.frames = append(c.frames, "SET\r\n"...)
		c.frames = appendArg(c.frames, w.key+BytesSuffix)
		c.frames = appendHead(c.frames, '$', w.bytes)
		c.out = append(append(c.out, c.frames[at:]), w.pieces...)
		at = len(c.frames)
		c.frames = appendCommand(append(c.frames, '\r', '\n'), "SET", w.key+MetadataSuffix, string(meta))
		c.out = append(c.out, c.frames[at:])
	}
	return nil
}

func (r *redis) confirm(c *conn, sent *chunk) (refused, broken error) {
	for _, what := range []string{"bytes", "metadata"} {
		no, err := r.ok(c)
		if err != nil {
			return nil, err
		}
		if no != nil && refused == nil {
			refused = fmt.Errorf("put %s of %s, %d bytes: %w", what, sent.key, sent.bytes, no)
		}
	}
	return refused, nil
}

// ok reads an answer that is OK, or the server's objection.
func (r *redis) ok(c *conn) (refused, broken error) {
	kind, _, err := readHead(c)
	if no := (serverError{}); errors.As(err, &no) {
		return no, nil
	}
	if err == nil && kind != '+' {
		err = errRESP
	}
	return nil, err
}

// get reads chunks into their pieces: of each the metadata, and behind it the bytes.
func (r *redis) get(ctx context.Context, chunks []chunk, errs []error) {
	ask := func(dst []byte, key string) ([]byte, error) {
		return appendCommand(appendCommand(dst, "GET", key+MetadataSuffix), "GET", key+BytesSuffix), nil
	}
	r.windows(chunks, r.pipeline, func(first, end int) {
		r.getWindow(ctx, chunks[first:end], errs[first:end], ask, r.receive)
	})
	r.clean(ctx, chunks, errs)
}

// errHalf says that a chunk's metadata is there and its bytes are not: Redis has evicted them.
var errHalf = fmt.Errorf("the bytes are gone: %w", store.ErrAbsent)

// receive reads both answers. The second is read whatever the first says.
func (r *redis) receive(c *conn, want *chunk) (begun bool, refused, broken error) {
	meta, refused, err := r.metadata(c, want)
	if err != nil {
		return false, nil, err
	}
	kind, n, err := readHead(c)
	if no := (serverError{}); errors.As(err, &no) {
		return true, errors.Join(refused, no), nil
	}
	switch {
	case err != nil:
		return true, nil, err
	case kind != '$':
		return true, nil, errRESP
	case n < 0 && refused == nil:
		return true, fmt.Errorf("get %s: %w", want.key, errHalf), nil
	case n < 0:
		return true, refused, nil
	}
	switch {
	case refused != nil:
		err = c.discard(n)
	case n != want.bytes || meta.Length != n:
		refused, err = want.other(n, &want.content), c.discard(n)
	default:
		err = c.fill(want.pieces)
	}
	if err == nil {
		err = readEnd(c)
	}
	return true, refused, err
}

// metadata reads the first answer.
func (r *redis) metadata(c *conn, want *chunk) (meta Metadata, refused, broken error) {
	kind, n, err := readHead(c)
	if no := (serverError{}); errors.As(err, &no) {
		return meta, fmt.Errorf("get metadata of %s: %w", want.key, no), nil
	}
	switch {
	case err != nil:
		return meta, nil, err
	case kind != '$':
		return meta, nil, errRESP
	case n < 0:
		return meta, fmt.Errorf("get %s: %w", want.key, store.ErrAbsent), nil
	case n > 8+20*maxGroups:
		refused, err = fmt.Errorf("get %s: metadata of %d bytes: %w", want.key, n, store.ErrAbsent), c.discard(n)
	default:
		text := make([]byte, n)
		if _, err = io.ReadFull(c.in, text); err != nil {
			return meta, nil, unexpected(err)
		}
		if meta, refused = ParseMetadata(text); refused != nil {
			refused = fmt.Errorf("get %s: %w: %w", want.key, refused, store.ErrAbsent)
		} else if is := (Content{meta.Format, meta.Groups[0].DType, meta.Groups[0].Shape}); len(meta.Groups) > 1 || !is.same(&want.content) {
			refused = want.other(meta.Length, &is)
		}
	}
	if err == nil {
		err = readEnd(c)
	}
	return meta, refused, err
}

// clean removes the metadata of chunks that have lost their bytes, as LMCache does: it says that they are there.
func (r *redis) clean(ctx context.Context, chunks []chunk, errs []error) {
	command, n := []string{"DEL"}, 0
	for i, err := range errs {
		if errors.Is(err, errHalf) {
			command, n = append(command, chunks[i].key+MetadataSuffix), n+1
		}
	}
	if n == 0 {
		return
	}
	// If it fails, whoever gets the chunk next tries again.
	_ = r.use(ctx, func(c *conn) (bool, error) {
		if _, err := c.net.Write(appendCommand(nil, command...)); err != nil {
			return false, err
		}
		_, _, err := readHead(c)
		return true, err
	})
}

var errRESP = errors.New("not what Redis answers")

// serverError is an answer that says what is wrong.
type serverError struct{ text string }

func (e serverError) Error() string { return "redis: " + e.text }

// readHead reads the first line of an answer: its kind and, where it has one, its number; −1 for nothing.
func readHead(c *conn) (kind byte, n int, err error) {
	line, err := c.in.ReadSlice('\n')
	if err != nil {
		if len(line) > 0 {
			err = unexpected(err)
		}
		return 0, 0, err
	}
	line, ok := bytes.CutSuffix(line, []byte("\r\n"))
	if !ok || len(line) == 0 {
		return 0, 0, errRESP
	}
	kind, text := line[0], string(line[1:])
	switch kind {
	case '+':
		return kind, 0, nil
	case '-':
		return kind, 0, serverError{text}
	case ':', '$':
		n, err := strconv.ParseInt(text, 10, 64)
		if err != nil || kind == '$' && (n < -1 || n > 512<<20) {
			return 0, 0, errRESP
		}
		return kind, int(n), nil
	default:
		return 0, 0, errRESP
	}
}

// readEnd reads what stands behind a value.
func readEnd(c *conn) error {
	var end [2]byte
	if _, err := io.ReadFull(c.in, end[:]); err != nil {
		return unexpected(err)
	}
	if end != [2]byte{'\r', '\n'} {
		return errRESP
	}
	return nil
}

func appendHead(dst []byte, kind byte, n int) []byte {
	return append(strconv.AppendInt(append(dst, kind), int64(n), 10), '\r', '\n')
}

func appendArg(dst []byte, arg string) []byte {
	return append(append(appendHead(dst, '$', len(arg)), arg...), '\r', '\n')
}

func appendCommand(dst []byte, args ...string) []byte {
	dst = appendHead(dst, '*', len(args))
	for _, arg := range args {
		dst = appendArg(dst, arg)
	}
	return dst
}
