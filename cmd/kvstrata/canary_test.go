package main

import (
	"bytes"
	"context"
	encoding "encoding/binary"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/gorilla/websocket"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/pebbe/zmq4"
	"github.com/tinylib/msgp/msgp"

	"kvstrata/event"
	"kvstrata/indexer/history"
	"kvstrata/indexer/history/embedded"
)

// What must not be found: token ids that nothing else looks like, and salts.
var (
	canaryTokens = []uint32{3405691582, 3735928559, 3131961357, 2343432205, 3203386110, 2882400018}
	canarySalts  = []string{
		"canary-salt-of-extra-keys-7f3a", "canary-salt-of-its-own-field-91bc", "canary-text-that-nobody-knows-55de", "canary-salt-of-a-trailing-map-c08d",
	}
)

// canaryForms returns a canary in every form in which it could have been written.
func canaryForms() map[string][]byte {
	forms := make(map[string][]byte)
	for _, token := range canaryTokens {
		forms[fmt.Sprint("token ", token, " as text")] = strconv.AppendUint(nil, uint64(token), 10)
		forms[fmt.Sprintf("token %d as hexadecimal text", token)] = fmt.Appendf(nil, "%08x", token)
		forms[fmt.Sprint("token ", token, " little-endian")] = encoding.LittleEndian.AppendUint32(nil, token)
		forms[fmt.Sprint("token ", token, " big-endian")] = encoding.BigEndian.AppendUint32(nil, token)
		forms[fmt.Sprint("token ", token, " as a varint")] = encoding.AppendUvarint(nil, uint64(token))
		forms[fmt.Sprint("token ", token, " as a signed varint")] = encoding.AppendVarint(nil, int64(token))
	}
	for _, salt := range canarySalts {
		forms["salt "+salt] = []byte(salt)
		forms["salt "+salt+" as hexadecimal"] = fmt.Appendf(nil, "%x", salt)
	}
	return forms
}

// haul is what came out of the process, by where it was found.
type haul struct {
	mu    sync.Mutex
	parts map[string][]byte
}

func newHaul() *haul { return &haul{parts: make(map[string][]byte)} }

func (h *haul) add(where string, what ...[]byte) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, b := range what {
		h.parts[where] = append(append(h.parts[where], b...), '\n')
	}
}

// find returns where a canary is, and in which form.
func (h *haul) find() (found []string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	forms := canaryForms()
	for where, text := range h.parts {
		for form, needle := range forms {
			if bytes.Contains(text, needle) {
				found = append(found, where+": "+form)
			}
		}
	}
	return found
}

// canaryEngine is an engine's live socket that sends prompt text in every way in which it could come.
type canaryEngine struct {
	zctx *zmq4.Context
	pub  *zmq4.Socket
	seq  uint64
}

func startCanaryEngine(t *testing.T) *canaryEngine {
	t.Helper()
	e := new(canaryEngine)
	var err error
	if e.zctx, err = zmq4.NewContext(); err != nil {
		t.Fatal(err)
	}
	if e.pub, err = e.zctx.NewSocket(zmq4.PUB); err != nil {
		t.Fatal(err)
	}
	if err := e.pub.Bind("tcp://127.0.0.1:*"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = e.pub.SetLinger(0)
		_ = e.pub.Close()
		if err := e.zctx.Term(); err != nil {
			t.Error(err)
		}
	})
	return e
}

func (e *canaryEngine) send(t *testing.T, payload []byte) {
	t.Helper()
	if _, err := e.pub.SendMessage("kv", encoding.BigEndian.AppendUint64(nil, e.seq), payload); err != nil {
		t.Fatal(err)
	}
	e.seq++
}

// canaryEvent is one BlockStored in vLLM's map form; fields are added behind the usual ones.
func canaryEvent(hash uint64, blockSize int, tokens any, extra func(b []byte) ([]byte, int)) []byte {
	b := msgp.AppendArrayHeader(nil, 3)
	b = msgp.AppendFloat64(b, float64(time.Now().UnixNano())/1e9)
	b = msgp.AppendArrayHeader(b, 1)
	fields, n := []byte(nil), 0
	if extra != nil {
		fields, n = extra(nil)
	}
	b = msgp.AppendMapHeader(b, uint32(6+n))
	b = msgp.AppendString(msgp.AppendString(b, "type"), "BlockStored")
	b = msgp.AppendUint64(msgp.AppendArrayHeader(msgp.AppendString(b, "block_hashes"), 1), hash)
	b = msgp.AppendNil(msgp.AppendString(b, "parent_block_hash"))
	b, _ = msgp.AppendIntf(msgp.AppendString(b, "token_ids"), tokens)
	b = msgp.AppendInt(msgp.AppendString(b, "block_size"), blockSize)
	b = msgp.AppendString(msgp.AppendString(b, "medium"), "GPU")
	b = append(b, fields...)
	return msgp.AppendNil(b)
}

// canaryArray is one BlockStored as SGLang wrote it until September 2026: an array that ends with a map, in which the salt is.
func canaryArray(hash uint64) []byte {
	b := msgp.AppendArrayHeader(nil, 3)
	b = msgp.AppendFloat64(b, float64(time.Now().UnixNano())/1e9)
	b = msgp.AppendArrayHeader(b, 1)
	b = msgp.AppendString(msgp.AppendArrayHeader(b, 8), "BlockStored")
	b = msgp.AppendUint64(msgp.AppendArrayHeader(b, 1), hash)
	b = msgp.AppendNil(b)
	b, _ = msgp.AppendIntf(b, canaryRun(16))
	b = msgp.AppendNil(msgp.AppendInt(b, 16))
	b = msgp.AppendString(b, "GPU")
	b = msgp.AppendString(msgp.AppendString(msgp.AppendMapHeader(b, 2), "cache_salt"), canarySalts[3])
	b = msgp.AppendString(msgp.AppendString(b, "prompt"), canarySalts[2]) // a field that nobody knows
	return msgp.AppendNil(b)
}

func canaryRun(size int) []any {
	tokens := make([]any, size)
	for i := range tokens {
		tokens[i] = canaryTokens[i%len(canaryTokens)]
	}
	return tokens
}

// sendAll sends one batch of each kind.
func (e *canaryEngine) sendAll(t *testing.T) {
	t.Helper()
	hash := 1000 + 10*e.seq
	extraKeys := func(value func([]byte) []byte) func([]byte) ([]byte, int) {
		return func(b []byte) ([]byte, int) {
			return value(msgp.AppendArrayHeader(msgp.AppendString(b, "extra_keys"), 1)), 1
		}
	}
	e.send(t, canaryEvent(hash+4, 4, canaryRun(4), nil))                                      // so short that its hash would give it away
	e.send(t, canaryEvent(hash+5, 16, canaryRun(15), nil))                                    // not as many as the block has
	e.send(t, canaryEvent(hash+6, 16, canarySalts[2], nil))                                   // text where ids should be
	e.send(t, canaryEvent(hash+7, 16, canaryRun(16), nil)[:60])                               // cut off
	e.send(t, append([]byte(canarySalts[2]), canaryEvent(hash+8, 16, canaryRun(16), nil)...)) // no batch at all
	// What follows is kept.
	e.send(t, canaryEvent(hash, 16, canaryRun(16), extraKeys(func(b []byte) []byte {
		return msgp.AppendString(msgp.AppendArrayHeader(b, 1), canarySalts[0])
	})))
	e.send(t, canaryEvent(hash+1, 16, canaryRun(16), func(b []byte) ([]byte, int) {
		return msgp.AppendString(msgp.AppendString(b, "cache_salt"), canarySalts[1]), 1
	}))
	e.send(t, canaryEvent(hash+2, 16, canaryRun(16), extraKeys(func(b []byte) []byte { return msgp.AppendString(b, canarySalts[0]) }))) // no array
	e.send(t, canaryEvent(hash+3, 16, canaryRun(16), func(b []byte) ([]byte, int) {
		return msgp.AppendString(msgp.AppendString(b, "prompt"), canarySalts[2]), 1 // a field that nobody knows
	}))
	e.send(t, canaryArray(hash+9))
}

// What an engine's flag could hold of secrets is refused, and not repeated; nor is a seed in a flag with another slip.
func TestCanariesInFlags(t *testing.T) {
	const secret = "canary-key-of-a-url-31e7"
	for _, flag := range []string{
		"trtllm+http://h:1/x?api_key=" + secret + ",model=m", "trtllm+http://u:" + secret + "@h:1/x,model=m", "zmq+tcp://127.0.0.1:1,hash-seed=" + secret,
	} {
		for _, name := range []string{"run", "doctor"} {
			args := []string{name, "--engine", flag}
			if name == "run" {
				args = append(append(args, "--data", t.TempDir()), anyPorts...)
			}
			r := command(t, args...)
			if r.code == exitOK || strings.Contains(r.stdout+r.stderr, secret) {
				t.Errorf("%v: exit %d\n%s%s", args, r.code, r.stdout, r.stderr)
			}
		}
	}
}

// TestCanary lets prompt text in and looks for it in everything that comes out: NATS, logs, metrics, answers, ClickHouse.
func TestCanary(t *testing.T) {
	for _, keep := range []bool{false, true} {
		t.Run(map[bool]string{false: "drop", true: "keep"}[keep], func(t *testing.T) {
			h := releaseCanary(t, keep)
			found := h.find()
			if !keep {
				for _, f := range found {
					t.Errorf("found in %s", f)
				}
				return
			}
			// What was asked for is kept in NATS, and there alone: the search finds what there is.
			var tokens, salts int
			for _, f := range found {
				where, form, _ := strings.Cut(f, ": ")
				switch {
				case !strings.HasPrefix(where, "NATS"):
					t.Errorf("found in %s", f)
				case strings.HasPrefix(form, "token"):
					tokens++
				default:
					salts++
				}
			}
			if tokens < len(canaryTokens) || salts == 0 {
				t.Errorf("kept are %d forms of tokens and %d of salts", tokens, salts)
			}
		})
	}
}

// releaseCanary runs everything with an engine that sends canaries, until all of it is through, and returns what came out.
func releaseCanary(t *testing.T, keep bool) *haul {
	h, e, data := newHaul(), startCanaryEngine(t), t.TempDir()
	endpoint, err := e.pub.GetLastEndpoint()
	if err != nil {
		t.Fatal(err)
	}
	args := append([]string{
		"run", "--data", data, "--log-level", "debug", "--engine", "zmq+" + endpoint + ",model=m,instance=e",
	}, anyPorts...)
	if keep {
		args = append(args, "--tokens", "keep")
	}
	p := start(t, args...)
	api, admin, address := p.says(`api +(http://\S+)`), p.says(`admin +(http://\S+)`), p.says(`embedded at (nats://\S+?),`)
	conn, err := nats.Connect(address)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := conn.Subscribe(">", func(m *nats.Msg) { h.add("NATS core", []byte(m.Subject), fmt.Append(nil, m.Header), m.Data) }); err != nil {
		t.Fatal(err)
	}
	live := watchLive(t, h, api)
	p.says("engine connected")
	// The first messages of a publisher may find no subscriber yet: what is sent again counts as the next.
	eventually(t, "batches of the engine in the index", func() bool {
		e.sendAll(t)
		all := sources(t, api)
		return len(all) == 1 && all[0].Ledger.Receptions() >= 4*9
	}, p.output)
	lookUp(t, h, api)
	ask := clickHouse(t, data)
	eventually(t, "rows in history", func() bool {
		if string(fetch(t, admin+"/readyz")) != "ready\n" {
			return false
		}
		rows, err := strconv.Atoi(strings.TrimSpace(ask("SELECT count() FROM kvstrata.block_events FORMAT TSV")))
		return err == nil && rows >= 4*4
	}, p.output)
	source := event.Source{Cluster: event.DefaultCluster, Model: "m", Instance: "e", Origin: event.Engine}
	paths := []string{"/v1/sources", "/v1/prefixes?limit=1000", "/v1/resident?source=" + source.Tokens(), "/v1/queries", "/v1/explain/00000000000003e8", "/"}
	for _, q := range history.Queries() {
		path := "/v1/query/" + q.Name + "?sql=1"
		if slices.ContainsFunc(q.Params, func(p history.Param) bool { return p.Kind == "hash" }) {
			path += "&hash=00000000000003e8"
		}
		paths = append(paths, path)
	}
	for _, path := range paths {
		h.add("HTTP "+path, fetch(t, api+path))
	}
	for _, path := range []string{"/metrics", "/readyz", "/debug/pprof/goroutine?debug=2"} {
		h.add("HTTP admin "+path, fetch(t, admin+path))
	}
	emptyClickHouse(t, h, ask)
	live()
	if code, _ := p.interrupt(os.Interrupt); code != exitOK { // writes the last checkpoint
		t.Fatalf("exit %d\n%s", code, p.output())
	}
	conn.Close()
	h.add("log", []byte(p.output()))
	drainNATS(t, h, data)
	readFiles(t, h, filepath.Join(data, "nats"), "NATS files")
	readFiles(t, h, engineDir(data), "ClickHouse files")
	for _, where := range []string{"log", "ClickHouse tables", "ClickHouse files", "NATS files", "NATS stream KV_EVENTS", "NATS stream OBJ_kv-checkpoints", "live socket", "HTTP admin /metrics", "HTTP /v1/lookup"} {
		if len(h.parts[where]) < 500 {
			t.Errorf("nothing was looked at of %s", where)
		}
	}
	return h
}

// lookUp asks for what the engine sent, with its salts, well and badly. Answers to good questions are part of the haul.
func lookUp(t *testing.T, h *haul, api string) {
	t.Helper()
	ids := make([]string, 16)
	for i := range ids {
		ids[i] = fmt.Sprint(canaryTokens[i%len(canaryTokens)])
	}
	list := strings.Join(ids, ",")
	for _, salt := range canarySalts {
		resp, err := http.Post(api+"/v1/lookup", "application/json", strings.NewReader(fmt.Sprintf(`{"model":"m","token_ids":[%s],"cache_salt":%q}`, list, salt)))
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(resp.Body)
		resp.Body.Close()
		if err != nil || resp.StatusCode != http.StatusOK {
			t.Fatalf("%s: %s, %v", resp.Status, body, err)
		}
		h.add("HTTP /v1/lookup", body)
	}
	for _, body := range []string{
		`{"model":"no","token_ids":[` + list + `],"cache_salt":"` + canarySalts[0] + `"}`, `{"model":"m","token_ids":["` + ids[0] + `"]}`,
		`{"model":"m","token_ids":[` + list, `{"` + canarySalts[2] + `":1}`,
	} {
		resp, err := http.Post(api+"/v1/lookup", "application/json", strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if resp.StatusCode == http.StatusOK {
			t.Errorf("%s is answered", body)
		}
	}
}

func fetch(t *testing.T, url string) []byte {
	t.Helper()
	resp, err := http.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return body
}

// watchLive takes every frame of the live socket, with the tail, until it is told to end.
func watchLive(t *testing.T, h *haul, api string) (end func()) {
	t.Helper()
	conn, _, err := websocket.DefaultDialer.Dial(strings.Replace(api, "http", "ws", 1)+"/v1/live", nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := conn.WriteMessage(websocket.TextMessage, []byte(`{"tail":{}}`)); err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			_, frame, err := conn.ReadMessage()
			if err != nil {
				return
			}
			h.add("live socket", frame)
		}
	}()
	return func() {
		_ = conn.Close()
		<-done
	}
}

// drainNATS reads every message of every stream, as the server keeps it, from a server of its own on the same folder.
func drainNATS(t *testing.T, h *haul, data string) {
	t.Helper()
	p := start(t, append([]string{"run", "--roles", "prefix", "--data", data}, anyPorts...)...)
	conn, err := nats.Connect(p.says(`embedded at (nats://\S+?),`))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	js, err := jetstream.New(conn)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	streams := js.ListStreams(ctx)
	for info := range streams.Info() {
		stream, err := js.Stream(ctx, info.Config.Name)
		if err != nil {
			t.Fatal(err)
		}
		for seq := info.State.FirstSeq; seq <= info.State.LastSeq; seq++ {
			m, err := stream.GetMsg(ctx, seq)
			if err != nil {
				continue // replaced since
			}
			h.add("NATS stream "+info.Config.Name, []byte(m.Subject), fmt.Append(nil, m.Header), m.Data)
		}
	}
	if err := streams.Err(); err != nil {
		t.Fatal(err)
	}
	if code, _ := p.interrupt(os.Interrupt); code != exitOK {
		t.Fatalf("exit %d\n%s", code, p.output())
	}
}

// clickHouse returns what asks the embedded engine.
func clickHouse(t *testing.T, data string) func(sql string) string {
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", embedded.SocketPath(engineDir(data)))
	}}}
	return func(sql string) string {
		t.Helper()
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://clickhouse/", strings.NewReader(sql))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set(embedded.PoolHeader, string(embedded.Writer))
		resp, err := client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		body, err := io.ReadAll(resp.Body)
		if err != nil || resp.StatusCode != http.StatusOK {
			t.Fatalf("%s: %s, %v\n%s", sql, resp.Status, err, body)
		}
		return string(body)
	}
}

// emptyClickHouse reads every column of every table.
func emptyClickHouse(t *testing.T, h *haul, ask func(sql string) string) {
	t.Helper()
	tables := strings.Fields(ask("SELECT name FROM system.tables WHERE database = 'kvstrata' AND NOT match(engine, 'View') FORMAT TSV"))
	if len(tables) < 5 {
		t.Fatalf("tables: %v", tables)
	}
	for _, table := range tables {
		h.add("ClickHouse tables", []byte(ask("SELECT * FROM kvstrata.`"+table+"` FORMAT TSVRaw")))
	}
}

func readFiles(t *testing.T, h *haul, dir, where string) {
	t.Helper()
	err := filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || !entry.Type().IsRegular() {
			return err
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		h.add(where, text)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}
