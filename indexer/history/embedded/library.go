package embedded

import (
	"errors"
	"fmt"
	"runtime"
	"unsafe"

	"github.com/ebitengine/purego"
)

// library is the engine's C interface, as chdb.h of 26.7.3 declares it. Lengths are size_t, results and streams are
// opaque pointers of the library's own heap, and a call blocks its OS thread until the engine answers.
type library struct {
	connect           func(argc int32, argv unsafe.Pointer) unsafe.Pointer
	closeConn         func(conn unsafe.Pointer)
	setSignalHandlers func(enabled int32)
	version           func() unsafe.Pointer
	classify          func(conn, sql unsafe.Pointer, sqlLen uintptr, database unsafe.Pointer, databaseLen uintptr, out unsafe.Pointer) int32

	query       queryFunc
	streamQuery queryFunc
	streamFetch func(conn, stream unsafe.Pointer) unsafe.Pointer
	streamStop  func(conn, stream unsafe.Pointer)

	resultBuffer  func(result unsafe.Pointer) unsafe.Pointer
	resultLength  func(result unsafe.Pointer) uintptr
	resultError   func(result unsafe.Pointer) unsafe.Pointer
	resultDestroy func(result unsafe.Pointer)

	insert        func(conn, sql unsafe.Pointer, sqlLen uintptr, format unsafe.Pointer, formatLen uintptr) unsafe.Pointer
	insertAppend  func(stream, data unsafe.Pointer, n uintptr) int32
	insertDone    func(stream unsafe.Pointer) unsafe.Pointer
	insertCancel  func(stream unsafe.Pointer)
	insertError   func(stream unsafe.Pointer) unsafe.Pointer
	insertDestroy func(stream unsafe.Pointer)
}

// queryFunc takes a statement with parameters: two arrays of pointers, each with one of lengths.
type queryFunc func(
	conn, sql unsafe.Pointer, sqlLen uintptr, format unsafe.Pointer, formatLen uintptr,
	names, nameLens, values, valueLens unsafe.Pointer, count uintptr,
) unsafe.Pointer

// loadLibrary opens the shared library and binds what we call. Another version may lack a symbol: that is an error here
// rather than a panic of the loader's.
func loadLibrary(path string) (*library, error) {
	handle, err := purego.Dlopen(path, purego.RTLD_NOW|purego.RTLD_GLOBAL)
	if err != nil {
		return nil, fmt.Errorf("load the ClickHouse engine %s: %w", path, err)
	}
	l := &library{}
	var missing []error
	for _, f := range []struct {
		name string
		to   any
	}{
		{"chdb_connect", &l.connect},
		{"chdb_close_conn", &l.closeConn},
		{"chdb_set_signal_handlers_enabled", &l.setSignalHandlers},
		{"chdb_version", &l.version},
		{"chdb_classify_query_n", &l.classify},
		{"chdb_query_with_params_n", &l.query},
		{"chdb_stream_query_with_params_n", &l.streamQuery},
		{"chdb_stream_fetch_result", &l.streamFetch},
		{"chdb_stream_cancel_query", &l.streamStop},
		{"chdb_result_buffer", &l.resultBuffer},
		{"chdb_result_length", &l.resultLength},
		{"chdb_result_error", &l.resultError},
		{"chdb_destroy_query_result", &l.resultDestroy},
		{"chdb_stream_insert_n", &l.insert},
		{"chdb_stream_append", &l.insertAppend},
		{"chdb_stream_done", &l.insertDone},
		{"chdb_stream_cancel_insert", &l.insertCancel},
		{"chdb_stream_insert_error", &l.insertError},
		{"chdb_destroy_insert_stream", &l.insertDestroy},
	} {
		symbol, err := purego.Dlsym(handle, f.name)
		if err != nil {
			missing = append(missing, err)
			continue
		}
		purego.RegisterFunc(f.to, symbol)
	}
	if err := errors.Join(missing...); err != nil {
		return nil, fmt.Errorf("the ClickHouse engine %s is not version %s; run make setup: %w", path, Version, err)
	}
	l.setSignalHandlers(0) // signals are the Go runtime's
	return l, nil
}

// connection is one session of the engine. It runs one statement at a time: whoever holds it calls it from one goroutine.
type connection struct {
	lib    *library
	handle unsafe.Pointer // chdb_connection*, what chdb_close_conn takes
	conn   unsafe.Pointer // chdb_connection

	database string // the current one
	dirty    bool   // wipe failed
}

// newConnection opens a session; the first one boots the engine with its arguments, later ones take from theirs only the settings.
func (l *library) newConnection(args []string) (*connection, error) {
	var pin runtime.Pinner
	defer pin.Unpin()
	argv := make([]unsafe.Pointer, len(args))
	for i, arg := range args {
		argv[i] = pinned(&pin, append([]byte(arg), 0))
	}
	pin.Pin(&argv[0])
	handle := l.connect(int32(len(argv)), unsafe.Pointer(&argv[0]))
	if handle == nil {
		return nil, errors.New("the ClickHouse engine opens no connection; what it wrote to stderr says why")
	}
	return &connection{lib: l, handle: handle, conn: *(*unsafe.Pointer)(handle), database: "default"}, nil
}

func (c *connection) close() { c.lib.closeConn(c.handle) }

// param is the value of one {name:Type} placeholder, in the engine's escaped text.
type param struct{ name, value string }

// query runs a statement to its end and returns all that it answers.
func (c *connection) query(sql, format string, params []param) ([]byte, error) {
	data, err := c.lib.take(c.call(c.lib.query, sql, format, params))
	if err != nil {
		c.wipe()
	}
	return data, err
}

// wipe ends what a statement left behind. The engine keeps what a failed statement had put out, and would put it before
// the next one's answer; and it lets go of a stream's query, and of its memory, only when the next statement comes.
func (c *connection) wipe() {
	result := c.call(c.lib.query, "SELECT 1", "Null", nil)
	c.dirty = c.lib.errorOf(result) != ""
	c.lib.resultDestroy(result)
}

// clean makes sure that nothing is left of the statements before. It fails only while the engine is out of memory.
func (c *connection) clean() error {
	if c.dirty {
		c.wipe()
	}
	if c.dirty {
		return refuse(codeMemory, "MEMORY_LIMIT_EXCEEDED", "the history engine has no memory left to clean up after a query; try again later")
	}
	return nil
}

// rows is an answer that is read chunk by chunk.
type rows struct {
	conn   *connection
	stream unsafe.Pointer
}

// stream starts a statement. What its answer holds is computed as it is read. The caller closes the rows.
func (c *connection) stream(sql, format string, params []param) (*rows, error) {
	stream := c.call(c.lib.streamQuery, sql, format, params)
	if message := c.lib.errorOf(stream); message != "" {
		c.lib.resultDestroy(stream)
		c.wipe()
		return nil, newException(message)
	}
	return &rows{conn: c, stream: stream}, nil
}

// next returns the next chunk, and none at the end.
func (r *rows) next() ([]byte, error) {
	return r.conn.lib.take(r.conn.lib.streamFetch(r.conn.conn, r.stream))
}

// close ends the statement, whether or not all was read.
func (r *rows) close() {
	r.conn.lib.streamStop(r.conn.conn, r.stream)
	r.conn.lib.resultDestroy(r.stream)
	r.conn.wipe()
}

// insertion is an INSERT under way, to which data is added piece by piece.
type insertion struct {
	lib    *library
	stream unsafe.Pointer
}

// insert starts an INSERT whose statement bears no FORMAT clause. The caller closes it.
func (c *connection) insert(sql, format string) (*insertion, error) {
	var pin runtime.Pinner
	defer pin.Unpin()
	stream := c.lib.insert(c.conn, pinnedString(&pin, sql), uintptr(len(sql)), pinnedString(&pin, format), uintptr(len(format)))
	if message := cString(c.lib.insertError(stream)); message != "" {
		c.lib.insertDestroy(stream)
		return nil, newException(message)
	}
	return &insertion{lib: c.lib, stream: stream}, nil
}

// append reports whether the engine still takes data; when it does not, commit says why. It blocks while the engine is behind.
func (i *insertion) append(data []byte) bool {
	if len(data) == 0 {
		return true
	}
	var pin runtime.Pinner
	defer pin.Unpin()
	return i.lib.insertAppend(i.stream, pinned(&pin, data), uintptr(len(data))) == 0
}

// commit ends the data and returns what the engine made of it.
func (i *insertion) commit() error {
	_, err := i.lib.take(i.lib.insertDone(i.stream))
	return err
}

// cancel gives the INSERT up. Blocks that the engine has already written stay.
func (i *insertion) cancel() { i.lib.insertCancel(i.stream) }

func (i *insertion) close() { i.lib.insertDestroy(i.stream) }

// statementClass is what a statement does to what outlives it, as the engine's parser says.
type statementClass uint32

const (
	classReadOnly statementClass = iota
	classMutating
	classGlobal
	classControl
	classUnknown
)

// classify parses sql without running it, and returns how many statements it holds and the gravest class among them.
func (c *connection) classify(sql string) (count int, class statementClass) {
	var pin runtime.Pinner
	defer pin.Unpin()
	analysis := &struct{ size, count, flags, class uint32 }{size: 16}
	pin.Pin(analysis)
	if c.lib.classify(c.conn, pinnedString(&pin, sql), uintptr(len(sql)), nil, 0, unsafe.Pointer(analysis)) != 0 {
		return 0, classUnknown
	}
	return int(analysis.count), statementClass(analysis.class)
}

func (c *connection) call(call queryFunc, sql, format string, params []param) unsafe.Pointer {
	var pin runtime.Pinner
	defer pin.Unpin()
	n := len(params)
	pointers := make([]unsafe.Pointer, 2*n+1) // names, then values; one more so that there is a first
	lengths := make([]uintptr, 2*n+1)
	for i, p := range params {
		pointers[i], lengths[i] = pinnedString(&pin, p.name), uintptr(len(p.name))
		pointers[n+i], lengths[n+i] = pinnedString(&pin, p.value), uintptr(len(p.value))
	}
	pin.Pin(&pointers[0])
	pin.Pin(&lengths[0])
	return call(c.conn, pinnedString(&pin, sql), uintptr(len(sql)), pinnedString(&pin, format), uintptr(len(format)),
		unsafe.Pointer(&pointers[0]), unsafe.Pointer(&lengths[0]), unsafe.Pointer(&pointers[n]), unsafe.Pointer(&lengths[n]), uintptr(n))
}

// take copies a result out of the library's heap and frees it.
func (l *library) take(result unsafe.Pointer) ([]byte, error) {
	defer l.resultDestroy(result)
	if message := l.errorOf(result); message != "" {
		return nil, newException(message)
	}
	n := l.resultLength(result)
	if n == 0 {
		return nil, nil
	}
	data := make([]byte, n)
	copy(data, unsafe.Slice((*byte)(l.resultBuffer(result)), n))
	return data, nil
}

func (l *library) errorOf(result unsafe.Pointer) string {
	if result == nil {
		return "the ClickHouse engine returned nothing"
	}
	return cString(l.resultError(result))
}

// pinned holds data where it is while C reads it. The library takes no nil pointer, so nothing at all is one zero byte.
func pinned(pin *runtime.Pinner, data []byte) unsafe.Pointer {
	if len(data) == 0 {
		data = make([]byte, 1)
	}
	pin.Pin(&data[0])
	return unsafe.Pointer(&data[0])
}

func pinnedString(pin *runtime.Pinner, s string) unsafe.Pointer { return pinned(pin, []byte(s)) }

func cString(p unsafe.Pointer) string {
	if p == nil {
		return ""
	}
	n := 0
	for *(*byte)(unsafe.Add(p, n)) != 0 {
		n++
	}
	return string(unsafe.Slice((*byte)(p), n))
}
