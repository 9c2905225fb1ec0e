package embedded

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"regexp"
	"runtime"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/ClickHouse/ch-go/proto"
	clickproto "github.com/ClickHouse/clickhouse-go/v2/lib/proto"
)

const (
	bodyPatience  = 30 * time.Second // for the next piece of a request's body
	writePatience = 30 * time.Second // for a client to take the next chunk of an answer
	killPause     = 50 * time.Millisecond
	insertPiece   = 1 << 20
)

// hello is what clickhouse-go asks first. It decodes the answer at helloRevision and all that follows at the revision
// which the answer reports; the engine writes Native at revision 0, so that we answer this one by hand.
const (
	hello         = "SELECT displayName(), version(), revision(), timezone()"
	helloRevision = 54460
)

// service is the HTTP interface of the engine.
type service struct {
	pools  *pools
	limits Limits
	guard  *guard
	hello  []byte
	tags   atomic.Uint64
	log    *slog.Logger
}

func newService(p *pools, l Limits, log *slog.Logger) (*service, error) {
	c := <-p.control.free
	defer p.control.release(c)
	text, err := c.query("SELECT version(), timezone()", "TabSeparatedRaw", nil)
	if err != nil {
		return nil, fmt.Errorf("ask the history engine its version: %w", err)
	}
	version, zone, _ := strings.Cut(strings.TrimSpace(string(text)), "\t")
	answer, err := encodeHello(version, zone)
	if err != nil {
		return nil, err
	}
	guard, err := newGuard(c)
	if err != nil {
		return nil, err
	}
	return &service{pools: p, limits: l, guard: guard, hello: answer, log: log}, nil
}

func encodeHello(version, zone string) ([]byte, error) {
	block := clickproto.NewBlock()
	err := errors.Join(
		block.AddColumn("displayName()", "String"), block.AddColumn("version()", "String"),
		block.AddColumn("revision()", "UInt32"), block.AddColumn("timezone()", "String"))
	if err == nil {
		err = block.Append("kvstrata", version, uint32(0), zone)
	}
	var buffer proto.Buffer
	if err == nil {
		err = block.Encode(&buffer, helloRevision)
	}
	if err != nil {
		return nil, fmt.Errorf("encode the history engine's hello: %w", err)
	}
	return buffer.Buf, nil
}

func (s *service) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	var err error
	switch {
	case r.URL.Path == "/ping":
		err = s.ping(w, r)
	case r.URL.Path != "/":
		http.NotFound(w, r)
	case r.Method != http.MethodGet && r.Method != http.MethodPost:
		http.Error(w, "want GET or POST", http.StatusMethodNotAllowed)
	default:
		err = s.run(w, r)
	}
	control := http.NewResponseController(w)
	if err != nil {
		// A client reads no answer before it has sent its data.
		_ = control.SetReadDeadline(time.Now().Add(bodyPatience))
		_, _ = io.Copy(io.Discard, io.LimitReader(r.Body, s.limits.InsertBytes))
		fail(w, err)
	}
	_ = control.SetWriteDeadline(time.Time{}) // the client may come again on this connection
}

// ping answers once the engine has, whatever it said: what is refused memory is alive. It has a connection of its own,
// so that it never waits for anybody's query.
func (s *service) ping(w http.ResponseWriter, r *http.Request) error {
	c, err := s.pools.control.acquire(r.Context())
	if err != nil {
		return err
	}
	_, _ = c.query("SELECT 1", "Null", nil)
	s.pools.control.release(c)
	_, _ = io.WriteString(w, "Ok.\n")
	return nil
}

func (s *service) run(w http.ResponseWriter, r *http.Request) error {
	q, err := readRequest(w, r)
	if err != nil {
		return err
	}
	w.Header().Set("Content-Type", "application/octet-stream")
	if q.sql == hello {
		_, _ = w.Write(s.hello)
		return nil
	}
	p, ok := s.pools.named[q.pool]
	if !ok {
		return refuse(codeBadArguments, "BAD_ARGUMENTS", "%s %q: want writer, aside, dashboard or free", PoolHeader, q.pool)
	}
	if p.readOnly && q.body != nil {
		return refuse(codeReadOnly, "READONLY", "the %s connections only read: no INSERT", q.pool)
	}
	c, err := p.acquire(r.Context())
	if err != nil {
		return err
	}
	defer p.release(c)
	if err := c.clean(); err != nil {
		return err
	}
	if err := c.use(q.database); err != nil {
		return err
	}
	switch {
	case p.readOnly:
		return s.read(w, r, c, q)
	case q.body != nil:
		return s.insert(w, c, q)
	default:
		return s.write(w, r, c, q)
	}
}

// read runs a statement of the read pools, for no longer than it may take and than its client waits.
func (s *service) read(w http.ResponseWriter, r *http.Request, c *connection, q *request) error {
	limit, err := q.limit(s.limits.QueryTime)
	if err != nil {
		return err
	}
	streamable, err := s.guard.check(c, q.sql, q.format)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(r.Context(), limit)
	defer cancel()
	err = s.answer(ctx, w, c, q, streamable)
	if e := (*exception)(nil); errors.As(err, &e) && e.code == codeCancelled && errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return refuse(codeTimeout, "TIMEOUT_EXCEEDED", "the query took longer than %v", limit)
	}
	return err
}

// setPattern finds the statements whose effect would outlive the request on its connection.
var setPattern = regexp.MustCompile(`(?is)^(\s|--[^\n]*\n|/\*.*?\*/)*(SET|USE)\s`)

// write runs a statement of the writer's that brings no data. A change is not cancelled when its client goes away.
func (s *service) write(w http.ResponseWriter, r *http.Request, c *connection, q *request) (err error) {
	if setPattern.MatchString(q.sql) {
		return refuse(codeBadArguments, "BAD_ARGUMENTS", "SET and USE would stay with the connection: give settings and database with each request")
	}
	// A SETTINGS clause means something else in CREATE TABLE, so that the settings are the connection's for this statement.
	for key, value := range q.settings {
		if _, err := c.query("SET "+key+" = "+quoteText(value), "Null", nil); err != nil {
			return err
		}
		defer func() {
			if _, e := c.query("SET "+key+" = DEFAULT", "Null", nil); e != nil {
				err = errors.Join(err, fmt.Errorf("reset setting %s: %w", key, e))
			}
		}()
	}
	if count, class := c.classify(q.sql); count == 1 && class == classReadOnly {
		text, err := c.canonical(q.sql)
		if err != nil {
			return err
		}
		return s.answer(r.Context(), w, c, q, streams(text, q.format))
	}
	data, err := c.query(q.sql, q.format, q.params)
	if err != nil {
		return err
	}
	_, _ = w.Write(data) // a client that is gone hears nothing
	return nil
}

// insert feeds the data to the engine as it comes.
func (s *service) insert(w http.ResponseWriter, c *connection, q *request) error {
	body := http.MaxBytesReader(w, io.NopCloser(q.body), s.limits.InsertBytes)
	control := http.NewResponseController(w)
	delete(q.settings, "max_execution_time") // clickhouse-go derives it from a deadline; an INSERT is whole or not at all
	in, err := c.insert(q.sql+q.settingsClause(), q.insertFormat)
	if err != nil {
		return err
	}
	defer in.close()
	piece := make([]byte, insertPiece)
	for {
		_ = control.SetReadDeadline(time.Now().Add(bodyPatience))
		n, err := fill(body, piece)
		if !in.append(piece[:n]) || errors.Is(err, io.EOF) {
			break // whatever went wrong, commit says it
		}
		if err != nil {
			in.cancel()
			if tooBig := (*http.MaxBytesError)(nil); errors.As(err, &tooBig) {
				return refuse(codeTooManyBytes, "TOO_MANY_BYTES", "an INSERT of more than %d bytes: send smaller batches", tooBig.Limit)
			}
			return fmt.Errorf("read the data of an INSERT: %w", err)
		}
	}
	_ = control.SetReadDeadline(time.Time{})
	return in.commit()
}

// fill is io.ReadFull, but that it tells the end of the data (io.EOF) from data which was cut off (any other error).
func fill(r io.Reader, piece []byte) (n int, err error) {
	for n < len(piece) && err == nil {
		var more int
		more, err = r.Read(piece[n:])
		n += more
	}
	return n, err
}

// answer runs a statement that reads and writes out what it answers.
func (s *service) answer(ctx context.Context, w http.ResponseWriter, c *connection, q *request, streamable bool) error {
	tag := fmt.Sprintf("/* kvstrata:%d */ ", s.tags.Add(1))
	stop := s.killAt(ctx, tag)
	defer stop()
	sql := tag + q.sql
	if streamable {
		err := s.stream(w, c, sql, q)
		if e := (*exception)(nil); !errors.As(err, &e) || !strings.Contains(e.text, "Streaming query is not supported") {
			return untag(err, tag)
		}
	}
	data, err := c.query(sql, q.format, q.params)
	if err == nil && int64(len(data)) > s.limits.AnswerBytes {
		err = s.tooBig()
	}
	if err != nil {
		return untag(err, tag)
	}
	_, _ = w.Write(data)
	return nil
}

// stream writes out an answer chunk by chunk. Its client waits for the first before it knows of success.
func (s *service) stream(w http.ResponseWriter, c *connection, sql string, q *request) error {
	runtime.LockOSThread() // the engine ties a statement to the thread that started it
	defer runtime.UnlockOSThread()
	stream, err := c.stream(sql, q.format, q.params)
	if err != nil {
		return err
	}
	defer stream.close()
	control := http.NewResponseController(w)
	for written := int64(0); ; {
		chunk, err := stream.next()
		if err == nil && written+int64(len(chunk)) > s.limits.AnswerBytes {
			err = s.tooBig()
		}
		switch {
		case err != nil && written == 0:
			return err
		case err != nil:
			failLate(w, err)
			return nil
		case len(chunk) == 0:
			return nil
		case written == 0:
			w.Header().Set("X-ClickHouse-Exception-Tag", exceptionTag)
		}
		_ = control.SetWriteDeadline(time.Now().Add(writePatience))
		if _, err := w.Write(chunk); err != nil {
			return nil // the client is gone
		}
		written += int64(len(chunk))
	}
}

func (s *service) tooBig() error {
	return refuse(codeTooBig, "TOO_MANY_ROWS_OR_BYTES", "the answer is larger than %d bytes: ask for less, as with LIMIT", s.limits.AnswerBytes)
}

// killAt ends the query that bears a tag once ctx ends, until stop is called. The engine may not know the query yet, or
// be between two chunks, so that it is told again and again.
func (s *service) killAt(ctx context.Context, tag string) (stop func()) {
	done := make(chan struct{})
	finished := make(chan struct{})
	go func() {
		defer close(finished)
		select {
		case <-ctx.Done():
		case <-done:
			return
		}
		for {
			s.kill("startsWith(query, " + quoteText(tag) + ")")
			select {
			case <-done:
				return
			case <-time.After(killPause):
			}
		}
	}()
	return func() { close(done); <-finished }
}

func (s *service) kill(where string) {
	c := <-s.pools.control.free
	defer s.pools.control.release(c)
	if _, err := c.query("KILL QUERY WHERE "+where+" ASYNC", "Null", nil); err != nil {
		s.log.Warn("history engine does not cancel a query", "err", err)
	}
}

// untag takes out of an error's text what we put before the statement.
func untag(err error, tag string) error {
	if e := (*exception)(nil); errors.As(err, &e) {
		return &exception{code: e.code, text: strings.ReplaceAll(e.text, tag, "")}
	}
	return err
}

// fail answers with an error as ClickHouse does. Nothing has been written yet.
func fail(w http.ResponseWriter, err error) {
	e := (*exception)(nil)
	if !errors.As(err, &e) {
		e = refuse(codeUnknown, "UNKNOWN_EXCEPTION", "%v", err)
	}
	status := http.StatusInternalServerError
	if e.code == codeTooMany {
		status = http.StatusServiceUnavailable
	}
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.Header().Set("X-ClickHouse-Exception-Code", strconv.Itoa(e.code))
	w.WriteHeader(status)
	_, _ = io.WriteString(w, e.text+"\n")
}

// exceptionTag tells a real exception in the middle of an answer from data that looks like one.
var exceptionTag = rand.Text()[:16]

// failLate ends an answer that has begun, in the frame that ClickHouse's clients look for.
func failLate(w http.ResponseWriter, err error) {
	const mark = "__exception__"
	text := err.Error()
	fmt.Fprintf(w, "\r\n%s\r\n%s\r\n%s\n%d %s\r\n%s\r\n", mark, exceptionTag, text, len(text)+1, exceptionTag, mark)
}
