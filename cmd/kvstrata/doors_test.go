package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/chromedp/chromedp"
	"github.com/gorilla/websocket"
	"github.com/nats-io/nats.go"
	"github.com/pebbe/zmq4"

	"kvstrata/certtest"
	"kvstrata/event"
	"kvstrata/porttest"
	"kvstrata/publisher"
)

const (
	goodToken  = "a-token-of-the-tests-0123456789"
	otherToken = "a-token-of-nobody-0123456789abc"
)

// outside returns an address of this machine that other machines could reach.
func outside(t *testing.T) string {
	t.Helper()
	addresses, err := net.InterfaceAddrs()
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range addresses {
		if n, ok := a.(*net.IPNet); ok && n.IP.To4() != nil && !n.IP.IsLoopback() && !n.IP.IsLinkLocalUnicast() {
			return n.IP.String()
		}
	}
	if os.Getenv("CI") != "" {
		t.Fatal("this machine has no address but loopback")
	}
	t.Skip("SKIPPED: this machine has no address but loopback")
	return ""
}

// secretFile writes a file that holds one line.
func secretFile(t *testing.T, line string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "secret")
	if err := os.WriteFile(path, []byte(line+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// curveKeys makes keys as people do.
func curveKeys(t *testing.T) (publisher, subscriber string) {
	t.Helper()
	dir := t.TempDir()
	o := command(t, "curve-keys", dir)
	if o.code != exitOK {
		t.Fatalf("%+v", o)
	}
	return filepath.Join(dir, "publisher.curve"), filepath.Join(dir, "subscriber.curve")
}

// No listener of any command comes up where other machines reach it and nobody is asked who he is.
func TestNoDoorStandsOpen(t *testing.T) {
	out, dead := outside(t), porttest.Address(t)
	pub, _ := curveKeys(t)
	run := "run --roles prefix --listen 127.0.0.1:0 --admin 127.0.0.1:0 --nats-listen 127.0.0.1:0 "
	demo := "demo --listen 127.0.0.1:0 --admin 127.0.0.1:0 --nats-listen 127.0.0.1:0 "
	engine := "engine --name e --start 1 --began 1 --nats nats://" + dead + " "
	for _, test := range []struct{ args, flag, helps string }{
		{run + "--listen " + out + ":0", "--listen", "--token-file"},
		{run + "--listen 0.0.0.0:0", "--listen", "--token-file"},
		{run + "--listen :0", "--listen", "--token-file"},
		{run + "--listen [::]:0", "--listen", "--token-file"},
		{run + "--listen no.such.host.invalid:0", "--listen", "--token-file"},
		{run + "--admin " + out + ":0", "--admin", "--token-file"},
		{run + "--grpc " + out + ":0", "--grpc", "--token-file"},
		{demo + "--grpc 0.0.0.0:0", "--grpc", "--token-file"},
		{run + "--nats-listen " + out + ":0", "--nats-listen", "--nats-user or --nats-nkey"},
		{run + "--kv-indexer " + out + ":0", "--kv-indexer", "--token-file"},
		{run + "--kv-indexer :0", "--kv-indexer", "--token-file"},
		{demo + "--listen " + out + ":0", "--listen", "--token-file"},
		{demo + "--admin 0.0.0.0:0", "--admin", "--token-file"},
		{demo + "--nats-listen 0.0.0.0:0", "--nats-listen", "--nats-user or --nats-nkey"},
		{demo + `--connector-config {"listen":"` + out + `:0"}`, "the connector's listen", "secret_file"},
		{engine + "--events tcp://" + out + ":*", "--events", "--curve"},
		{engine + "--events tcp://*:*", "--events", "--curve"},
		{engine + "--replay tcp://0.0.0.0:0", "--replay", "--curve"},
		{engine + "--listen " + out + ":0 --curve " + pub, "--listen", "loopback"},
		{engine + `--kv-transfer-config {"kv_connector":"tcp","kv_role":"kv_both","kv_connector_extra_config":{"listen":"0.0.0.0:0"}}`, "the connector's listen", "secret_file"},
		{engine + `--kv-transfer-config {"kv_connector":"tcp","kv_role":"kv_both","kv_ip":"` + out + `"}`, "the connector's listen", "secret_file"},
	} {
		o := command(t, strings.Fields(test.args)...)
		if o.code != exitUsage {
			t.Errorf("%s: exit %d\n%s", test.args, o.code, o.stderr)
		}
		for _, want := range []string{test.flag, test.helps, "--insecure", "other machines reach it"} {
			if !strings.Contains(o.stderr, want) {
				t.Errorf("%s: it does not say %q:\n%s", test.args, want, o.stderr)
			}
		}
	}
	all := command(t, strings.Fields("demo --listen 0.0.0.0:0 --admin 0.0.0.0:0 --nats-listen 0.0.0.0:0")...)
	for _, flag := range []string{"--listen", "--admin", "--nats-listen"} {
		if !strings.Contains(all.stderr, flag+" 0.0.0.0:0") {
			t.Errorf("not all are told at once:\n%s", all.stderr)
		}
	}
}

func TestReachable(t *testing.T) {
	for address, want := range map[string]bool{
		"127.0.0.1:1": false, "127.8.8.8:1": false, "[::1]:1": false, "localhost:1": false, "tcp://127.0.0.1:*": false, "ipc:///tmp/x": false,
		"tcp://lo:5557": false, "nonsense": false, "": false,
		"0.0.0.0:1": true, "[::]:1": true, ":1": true, "tcp://*:5557": true, "tcp://0.0.0.0:*": true, "10.0.0.1:1": true, "lo:1": true,
		"no.such.host.invalid:1": true,
	} {
		if got := reachable(address); got != want {
			t.Errorf("%s: %v", address, got)
		}
	}
}

// With --insecure everybody is let in, because it was said.
func TestInsecureIsSaid(t *testing.T) {
	out := outside(t)
	p := start(t, "demo", "--listen", out+":0", "--admin", out+":0", "--nats-listen", out+":0", "--insecure")
	url := p.says(`kvstrata demo at (http://\S+)`)
	sources(t, url)
	if o := command(t, "tail", "--nats", p.says(`embedded at (nats://\S+?),`), "--count", "1", "--from-start"); o.code != exitOK {
		t.Errorf("%+v", o)
	}
}

// Keys are for their owner alone, and none are overwritten.
func TestCurveKeysOverwriteNothing(t *testing.T) {
	dir := t.TempDir()
	if o := command(t, "curve-keys", dir); o.code != exitOK || strings.Count(o.stdout, dir) != 2 {
		t.Fatalf("%+v", o)
	}
	text := make(map[string]string)
	for _, name := range []string{"publisher.curve", "subscriber.curve"} {
		path := filepath.Join(dir, name)
		info, err := os.Stat(path)
		if err != nil || info.Mode().Perm() != 0o600 {
			t.Fatalf("%v, %v", info.Mode(), err)
		}
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		text[path] = string(b)
	}
	if o := command(t, "curve-keys", dir); o.code != exitFailure || !strings.Contains(o.stderr, "file exists") {
		t.Errorf("%+v", o)
	}
	for path, before := range text {
		if now, err := os.ReadFile(path); err != nil || string(now) != before {
			t.Errorf("%s has changed, %v", path, err)
		}
	}
	o := command(t, "run", "--engine", "zmq+tcp://127.0.0.1:1,model=m,curve="+filepath.Join(dir, "publisher.curve"), "--data", t.TempDir(),
		"--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--nats-listen", "127.0.0.1:0")
	if o.code != exitFailure || !strings.Contains(o.stderr, "server-key is missing") {
		t.Errorf("a publisher's keys for a subscriber: %+v", o)
	}
}

// fortress is a process with every door locked, seen from outside.
type fortress struct {
	t            *testing.T
	ca, stranger *certtest.Authority
	cert         string // files
	tokens       string
	password     string
	subscriber   string // keys
	engine       *publisher.ZMQ
	api, admin   string
	nats         string
}

func startFortress(t *testing.T) *fortress {
	out := outside(t)
	f := &fortress{t: t, ca: certtest.New(t), stranger: certtest.New(t), tokens: secretFile(t, goodToken), password: secretFile(t, "sesame of the tests")}
	cert, key := f.ca.Pair(t, out)
	f.cert = cert
	var pub string
	pub, f.subscriber = curveKeys(t)
	f.engine = startPublisher(t, "tcp://"+out+":*", pub)
	p := start(t, "run", "--roles", "subscriber,prefix,web", "--data", t.TempDir(), "--listen", out+":0", "--admin", out+":0", "--nats-listen", out+":0",
		"--token-file", f.tokens, "--tls-cert", cert, "--tls-key", key,
		"--nats-user", "kv", "--nats-password-file", f.password, "--nats-cert", cert, "--nats-key", key, "--log-level", "debug",
		"--engine", fmt.Sprintf("zmq+%s,replay=%s,model=m,instance=e,curve=%s", f.engine.Endpoint(), f.engine.ReplayEndpoint(), f.subscriber))
	f.api, f.admin, f.nats = p.says(`api +(https://\S+)`), p.says(`admin +(https://\S+)`), p.says(`embedded at (tls://\S+?),`)
	t.Cleanup(func() {
		for _, secret := range []string{goodToken, otherToken, "sesame"} {
			if strings.Contains(p.output(), secret) {
				t.Errorf("the log holds a secret:\n%s", p.output())
			}
		}
	})
	return f
}

// startPublisher runs a publisher of ours with keys, whose engine stores a block now and then.
func startPublisher(t *testing.T, endpoint, keys string) *publisher.ZMQ {
	t.Helper()
	spec := simSpec{Name: "e", Model: "m", PoolBlocks: 64, BlockSize: 16, Form: "map", Events: endpoint, Replay: endpoint, Curve: keys}
	e, err := newSimEngine(&app{log: slog.New(slog.DiscardHandler)}, nil, nil, spec, nil)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- e.socket.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	select {
	case <-e.socket.Ready():
	case err := <-done:
		t.Fatal(err)
	}
	return e.socket
}

func storeBlock(t *testing.T, z *publisher.ZMQ, n uint64) {
	t.Helper()
	tokens := make([]uint32, 16)
	for i := range tokens {
		tokens[i] = uint32(n)
	}
	if err := z.Publish(&event.Batch{Time: event.UnixTime(time.Now()), Events: []event.Event{{
		Kind: event.Stored, Tier: event.GPU, Group: event.NoGroup, LoRAID: event.NoLoRAID, BlockSize: 16, Tokens: tokens,
		Blocks: []event.Block{{Hash: event.IntHash(n)}},
	}}}); err != nil {
		t.Fatal(err)
	}
}

func trusting(t *testing.T, ca *certtest.Authority) *tls.Config {
	t.Helper()
	text, err := os.ReadFile(ca.File)
	if err != nil {
		t.Fatal(err)
	}
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(text)
	return &tls.Config{RootCAs: pool, MinVersion: tls.VersionTLS12}
}

// get asks from outside, with a token or none.
func (f *fortress) get(url, token string, ca *certtest.Authority) (int, error) {
	f.t.Helper()
	client := http.Client{Transport: &http.Transport{TLSClientConfig: trusting(f.t, ca), DisableKeepAlives: true}, Timeout: patience}
	req, err := http.NewRequestWithContext(f.t.Context(), http.MethodGet, url, nil)
	if err != nil {
		f.t.Fatal(err)
	}
	if token != "" {
		req.Header.Set("Authorization", "Bearer "+token)
	}
	resp, err := client.Do(req)
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	_, err = io.Copy(io.Discard, resp.Body)
	return resp.StatusCode, err
}

// TestEachDoorFromOutside tries each listener of the real binary as a stranger would, and as who may come.
func TestEachDoorFromOutside(t *testing.T) {
	f := startFortress(t)
	t.Run("the API and the admin listener", f.http)
	t.Run("the live socket", f.live)
	t.Run("NATS", f.bus)
	t.Run("an engine's sockets", f.curve)
	t.Run("our own commands", f.commands)
}

func (f *fortress) http(t *testing.T) {
	paths := []string{
		f.api + "/", f.api + "/tail", f.api + "/v1/sources", f.api + "/v1/prefixes", f.api + "/v1/resident", f.api + "/v1/queries", f.api + "/v1/query/events",
		f.api + "/v1/explain/00", f.api + "/no/such", f.admin + "/metrics", f.admin + "/debug/pprof/", f.admin + "/debug/pprof/heap",
	}
	for _, url := range paths {
		for name, token := range map[string]string{"none": "", "wrong": otherToken} {
			if status, err := f.get(url, token, f.ca); err != nil || status != http.StatusUnauthorized {
				t.Errorf("%s with token %s: %d, %v", url, name, status, err)
			}
		}
		if status, err := f.get(url, goodToken, f.ca); err != nil || status == http.StatusUnauthorized {
			t.Errorf("%s with a token: %d, %v", url, status, err)
		}
		var unknown x509.UnknownAuthorityError
		if _, err := f.get(url, goodToken, f.stranger); !errors.As(err, &unknown) {
			t.Errorf("%s shows a certificate of another authority: %v", url, err)
		}
	}
	for _, url := range []string{f.api + "/v1/sources", f.admin + "/metrics"} {
		if status, err := f.get(url, goodToken, f.ca); err != nil || status != http.StatusOK {
			t.Errorf("%s: %d, %v", url, status, err)
		}
		if status, err := f.get(strings.Replace(url, "https", "http", 1), goodToken, f.ca); err != nil || status != http.StatusBadRequest {
			t.Errorf("%s in the clear: %d, %v", url, status, err)
		}
	}
	if status, err := f.get(f.admin+"/healthz", "", f.ca); err != nil || status != http.StatusOK {
		t.Errorf("/healthz: %d, %v", status, err)
	}
}

func (f *fortress) live(t *testing.T) {
	dialer := websocket.Dialer{TLSClientConfig: trusting(t, f.ca), HandshakeTimeout: patience}
	url := strings.Replace(f.api, "https", "wss", 1) + "/v1/live"
	session := "kvstrata-" + f.api[strings.LastIndex(f.api, ":")+1:]
	for name, head := range map[string]http.Header{
		"nothing": nil, "a wrong token": {"Authorization": {"Bearer " + otherToken}}, "a forged session": {"Cookie": {session + "=AAAAAGsNhL0lzeG_lZhmXk"}},
	} {
		conn, resp, err := dialer.Dial(url, head)
		if err == nil {
			conn.Close()
		}
		if err == nil || resp == nil || resp.StatusCode != http.StatusUnauthorized {
			t.Errorf("with %s: %v", name, err)
		}
	}
	conn, _, err := dialer.Dial(url, http.Header{"Authorization": {"Bearer " + goodToken}})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, frame, err := conn.ReadMessage(); err != nil || !strings.Contains(string(frame), `"full":true`) {
		t.Errorf("%s, %v", frame, err)
	}
}

func (f *fortress) bus(t *testing.T) {
	secure := func(ca *certtest.Authority) nats.Option { return nats.RootCAs(ca.File) }
	for name, options := range map[string][]nats.Option{
		"nobody": {secure(f.ca)}, "a wrong password": {secure(f.ca), nats.UserInfo("kv", "open")}, "a wrong user": {secure(f.ca), nats.UserInfo("root", "sesame of the tests")},
		"a token": {secure(f.ca), nats.Token("sesame of the tests")},
	} {
		conn, err := nats.Connect(f.nats, options...)
		if err == nil {
			conn.Close()
		}
		if !errors.Is(err, nats.ErrAuthorization) {
			t.Errorf("%s: %v", name, err)
		}
	}
	var unknown x509.UnknownAuthorityError
	if _, err := nats.Connect(f.nats, secure(f.stranger), nats.UserInfo("kv", "sesame of the tests")); !errors.As(err, &unknown) {
		t.Errorf("a certificate of another authority: %v", err)
	}
	conn, err := nats.Connect(f.nats, secure(f.ca), nats.UserInfo("kv", "sesame of the tests"))
	if err != nil {
		t.Fatal(err)
	}
	conn.Close()
}

func (f *fortress) curve(t *testing.T) {
	zctx, err := zmq4.NewContext()
	if err != nil {
		t.Fatal(err)
	}
	stranger, err := zctx.NewSocket(zmq4.SUB)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(stranger.SetSubscribe(""), stranger.SetLinger(0), stranger.SetRcvtimeo(10*time.Millisecond), stranger.Connect(f.engine.Endpoint())); err != nil {
		t.Fatal(err)
	}
	before, n := f.engine.Refused(), uint64(0)
	f.eventually("the engine's own subscriber hears it, and a stranger is refused", func() bool {
		n++
		storeBlock(t, f.engine, n)
		if text, err := stranger.RecvBytes(0); err == nil {
			t.Fatalf("a stranger hears %q", text)
		}
		return f.engine.Refused() > before && strings.Contains(f.sources(), `"state": "live"`)
	})
	if err := errors.Join(stranger.Close(), zctx.Term()); err != nil {
		t.Error(err)
	}
	o := command(t, "doctor", "--listen", "127.0.0.1:0", "--engine", "zmq+"+f.engine.Endpoint()+",model=m")
	if o.code != exitFailure || !strings.Contains(o.stdout, "handshake refused") || !strings.Contains(o.stdout, "keys") {
		t.Errorf("doctor without keys: %+v", o)
	}
	o = command(t, "doctor", "--listen", "127.0.0.1:0", "--engine", "zmq+"+f.engine.Endpoint()+",model=m,replay="+f.engine.ReplayEndpoint()+",curve="+f.subscriber)
	if o.code != exitOK || !strings.Contains(o.stdout, "live, heard for") || !strings.Contains(o.stdout, " recovered, ") {
		t.Errorf("doctor with keys: %+v", o)
	}
	// A subscriber without keys says why it hears nothing.
	p := start(t, append([]string{"run", "--roles", "subscriber,prefix", "--data", t.TempDir(), "--engine", "zmq+" + f.engine.Endpoint() + ",model=m,instance=e"}, anyPorts...)...)
	url := p.says(`api +(http://\S+)`)
	eventually(t, "a state that says why", func() bool {
		all := sources(t, url)
		return len(all) == 1 && strings.Contains(all[0].Reason, "handshake refused")
	}, p.output)
	p.says("engine can't be heard.*handshake refused")
}

func (f *fortress) eventually(what string, cond func() bool) {
	f.t.Helper()
	eventually(f.t, what, cond, f.sources)
}

// sources returns what /v1/sources says.
func (f *fortress) sources() string {
	o := command(f.t, "healthcheck", "--alive", "--admin", strings.TrimPrefix(f.admin, "https://"), "--ca", f.ca.File)
	if o.code != exitOK {
		f.t.Fatalf("%+v", o)
	}
	client := http.Client{Transport: &http.Transport{TLSClientConfig: trusting(f.t, f.ca), DisableKeepAlives: true}, Timeout: patience}
	req, err := http.NewRequestWithContext(f.t.Context(), http.MethodGet, f.api+"/v1/sources", nil)
	if err != nil {
		f.t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+goodToken)
	resp, err := client.Do(req)
	if err != nil {
		f.t.Fatal(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		f.t.Fatal(err)
	}
	return string(text)
}

func (f *fortress) commands(t *testing.T) {
	storeBlock(t, f.engine, 1<<20)
	admin := strings.TrimPrefix(f.admin, "https://")
	login := "--nats-user kv --nats-password-file " + f.password + " --nats-ca " + f.ca.File
	show := "--token-file " + f.tokens + " --ca " + f.ca.File
	wrong := "--token-file " + secretFile(t, otherToken) + " --ca " + f.ca.File
	free := " --listen 127.0.0.1:0"
	for _, test := range []struct {
		args string
		code int
		says string
	}{
		{"lookup --model m 1 --server " + f.api + " " + show, exitOK, "SOURCE"},
		{"lookup --model m 1 --server " + f.api + " " + wrong, exitFailure, "wants one of its tokens"},
		{"lookup --model m 1 --server " + f.api + " --ca " + f.ca.File, exitFailure, "wants one of its tokens"},
		{"lookup --model m 1 --server " + f.api + " --ca " + f.stranger.File, exitFailure, "certificate"},
		{"query events --server " + f.api + " --ca " + f.ca.File, exitFailure, "wants one of its tokens"},
		{"explain 00 --server " + f.api + " " + wrong, exitFailure, "wants one of its tokens"},
		{"doctor --server " + f.api + " " + show, exitOK, "answers"},
		{"doctor --server " + f.api + " " + wrong, exitFailure, "wants one of its tokens"},
		{"healthcheck --alive --admin " + admin + " --ca " + f.ca.File, exitOK, "ok"},
		{"healthcheck --alive --admin " + admin + " --ca " + f.stranger.File, exitFailure, "certificate"},
		{"healthcheck --alive --admin " + admin + " --tls-cert " + f.cert, exitOK, "ok"},
		{"healthcheck --alive --admin " + admin + " --tls-cert " + f.stranger.File, exitFailure, "the server shows another certificate"},
		{"healthcheck --alive --admin " + admin, exitFailure, "400 Bad Request"},
		{"tail --from-start --count 1 --nats " + f.nats + " " + login, exitOK, "STORED"},
		{"tail --nats " + f.nats + " --nats-ca " + f.ca.File, exitFailure, "see --nats-user"},
		{"tail --nats " + f.nats + " --nats-ca " + f.stranger.File, exitFailure, "see --nats-user"},
		{"tail --nats nats://kv:sesame@127.0.0.1:4222", exitUsage, "--nats: holds a user"},
		{"tail --nats-user kv --nats " + f.nats, exitUsage, "--nats-user kv: has no password"},
		{"doctor --nats " + f.nats + " " + login + free, exitOK, "the event stream ends at message"},
		{"doctor --nats " + f.nats + " --nats-ca " + f.ca.File + free, exitFailure, "Authorization Violation"},
	} {
		o := command(t, strings.Fields(test.args)...)
		if o.code != test.code || !strings.Contains(strings.ToLower(o.stdout+o.stderr), strings.ToLower(test.says)) {
			t.Errorf("%s: want exit %d and %q: %+v", test.args, test.code, test.says, o)
		}
	}
}

// The roles and engines of a demo in processes find each other behind locked doors.
func TestProcessesBehindLockedDoors(t *testing.T) {
	ca := certtest.New(t)
	cert, key := ca.Pair(t, "kvstrata.test")
	p := start(t, "demo", "--processes", "--trace", writeTrace(t, 60), "--speed", "100", "--exit", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0",
		"--nats-listen", "127.0.0.1:0", "--token-file", secretFile(t, goodToken), "--tls-cert", cert, "--tls-key", key,
		"--nats-user", "kv", "--nats-password-file", secretFile(t, "sesame of the tests"), "--nats-cert", cert, "--nats-key", key, "--nats-ca", ca.File)
	<-p.exited
	if code := p.cmd.ProcessState.ExitCode(); code != exitOK {
		t.Fatalf("exit %d\n%s", code, p.output())
	}
	for _, secret := range []string{goodToken, "sesame"} {
		if strings.Contains(p.output(), secret) {
			t.Errorf("the log holds a secret:\n%s", p.output())
		}
	}
}

// A person logs in, works, and is asked again when the token has changed.
func TestDashboardAsksForAToken(t *testing.T) {
	listen, tokens := porttest.Address(t), secretFile(t, goodToken)
	args := []string{"demo", "--listen", listen, "--admin", "127.0.0.1:0", "--nats-listen", "127.0.0.1:0", "--token-file", tokens}
	demo := start(t, args...)
	base := demo.says(`kvstrata demo at (http://\S+)`)
	p := openBrowser(t)
	p.expect("401")
	enter := func(token string) {
		t.Helper()
		p.do("log in", chromedp.SendKeys(chromedp.CSS(at("login-token")), token), chromedp.Click(chromedp.CSS(at("login"))))
	}
	p.do("open", chromedp.Navigate(base+"/engines"))
	enter(otherToken)
	eventually(t, "the refusal", func() bool {
		return strings.Contains(eval[string](p, `document.body?.innerText ?? ""`), "not one of this server")
	},
		func() string { return eval[string](p, `document.body?.innerText ?? ""`) })
	enter(goodToken)
	p.live()
	eventually(t, "rows of engines", func() bool { return len(p.texts("engine-row")) >= 4 }, demo.output)
	if at := eval[string](p, `location.href`); at != base+"/engines" {
		t.Errorf("after the login it is at %s", at)
	}
	if got := eval[int](p, `fetch("/v1/queries").then(r => r.status)`); got != http.StatusOK {
		t.Errorf("a query with the session: %d", got)
	}
	if got := eval[string](p, `document.cookie`); got != "" {
		t.Errorf("scripts see the session: %q", got)
	}
	p.expect(" ") // the server goes away
	if code, _ := demo.interrupt(os.Interrupt); code != exitOK {
		t.Fatalf("exit %d\n%s", code, demo.output())
	}
	if err := os.WriteFile(tokens, []byte(otherToken), 0o600); err != nil {
		t.Fatal(err)
	}
	again := start(t, args...)
	again.says(`kvstrata demo at (http://\S+)`)
	eventually(t, "the page says that the session has ended", func() bool { return strings.Contains(strings.Join(p.texts("banner"), " "), "Your session has ended") },
		func() string { return eval[string](p, `document.body?.innerText ?? ""`) })
	p.do("log in again", chromedp.Click(chromedp.CSS(at("banner")+" button")), chromedp.WaitVisible(chromedp.CSS(at("login-token"))))
	enter(otherToken)
	p.live()
	for _, secret := range []string{goodToken, otherToken} {
		if strings.Contains(demo.output()+again.output(), secret) {
			t.Error("the log holds a token")
		}
	}
}
