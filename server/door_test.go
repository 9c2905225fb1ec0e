package server_test

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/cookiejar"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"kvstrata/certtest"
	"kvstrata/logtest"
	"kvstrata/server"
)

const (
	tokenA = "alpha-0123456789abcdef"
	tokenB = "bravo-0123456789abcdef"
)

func tokenFile(t *testing.T, tokens ...string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "tokens")
	writeTokens(t, path, tokens...)
	return path
}

func writeTokens(t *testing.T, path string, tokens ...string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(strings.Join(tokens, "\n")), 0o600); err != nil {
		t.Fatal(err)
	}
}

// do sends a request, and returns its answer with the body read.
func (r *running) do(t *testing.T, method, url, body string, head ...string) (*http.Response, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, url, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	for i := 0; i < len(head); i += 2 {
		req.Header.Set(head[i], head[i+1])
	}
	resp, err := r.client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp, string(text)
}

func TestTokens(t *testing.T) {
	cfg := free
	cfg.TokenFile, cfg.Token = tokenFile(t, "# ours", tokenA, "", tokenB), "charlie-0123456789abcdef"
	var said logtest.Buffer
	r := startWith(t, cfg, map[string]http.Handler{"/": echo("ours")}, []server.Ready{
		{Name: "nats", Check: func() error { return errors.New("not connected") }},
	}, prometheus.NewRegistry(), said.Logger())
	for _, test := range []struct {
		name, authorization string
		admitted            bool
	}{
		{"none", "", false},
		{"the first", "Bearer " + tokenA, true},
		{"the second", "Bearer " + tokenB, true},
		{"the variable's", "bearer charlie-0123456789abcdef", true},
		{"another", "Bearer alpha-0123456789abcdeg", false},
		{"a part", "Bearer alpha-0123456789abcde", false},
		{"more", "Bearer " + tokenA + "0", false},
		{"empty", "Bearer ", false},
		{"a comment", "Bearer # ours", false},
		{"no scheme", tokenA, false},
		{"another scheme", "Basic " + tokenA, false},
	} {
		for _, url := range []string{r.URL() + "/", r.URL() + "/v1/sources", r.AdminURL() + "/metrics", r.AdminURL() + "/debug/pprof/heap"} {
			var head []string
			if test.authorization != "" {
				head = []string{"Authorization", test.authorization}
			}
			resp, body := r.do(t, http.MethodGet, url, "", head...)
			switch {
			case test.admitted && resp.StatusCode != http.StatusOK:
				t.Errorf("%s: %s: %s", test.name, url, resp.Status)
			case !test.admitted && (resp.StatusCode != http.StatusUnauthorized || !strings.Contains(body, "--token-file") ||
				!strings.HasPrefix(resp.Header.Get("WWW-Authenticate"), "Bearer")):
				t.Errorf("%s: %s: %s\n%s", test.name, url, resp.Status, body)
			}
		}
		// Health is for everybody, the reason is not.
		resp, _ := r.do(t, http.MethodGet, r.AdminURL()+"/healthz", "")
		if resp.StatusCode != http.StatusOK {
			t.Errorf("/healthz: %s", resp.Status)
		}
		resp, body := r.do(t, http.MethodGet, r.AdminURL()+"/readyz", "", "Authorization", test.authorization)
		if resp.StatusCode != http.StatusServiceUnavailable || strings.Contains(body, "not connected") != test.admitted {
			t.Errorf("%s: /readyz: %s\n%s", test.name, resp.Status, body)
		}
	}
	if strings.Contains(said.String(), "0123456789") {
		t.Errorf("the log holds tokens:\n%s", said.String())
	}
}

func TestTokenFileIsReadAgain(t *testing.T) {
	cfg := free
	cfg.TokenFile = tokenFile(t, tokenA)
	var said logtest.Buffer
	r := startWith(t, cfg, map[string]http.Handler{"/": echo("ours")}, nil, prometheus.NewRegistry(), said.Logger())
	status := func(token string) int {
		resp, _ := r.do(t, http.MethodGet, r.URL()+"/", "", "Authorization", "Bearer "+token)
		return resp.StatusCode
	}
	becomes := func(what, token string, want int) {
		t.Helper()
		for deadline := time.Now().Add(20 * time.Second); status(token) != want; <-time.After(10 * time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatalf("%s: still %d", what, status(token))
			}
		}
	}
	if status(tokenA) != 200 || status(tokenB) != 401 {
		t.Fatal("the tokens are not those of the file")
	}
	writeTokens(t, cfg.TokenFile, tokenA, tokenB)
	becomes("a token is added", tokenB, 200)
	if status(tokenA) != 200 {
		t.Error("the old one does not count any more")
	}
	writeTokens(t, cfg.TokenFile, tokenB)
	becomes("a token is taken out", tokenA, 401)
	writeTokens(t, cfg.TokenFile)
	becomes("the file is empty", tokenB, 401)
	writeTokens(t, cfg.TokenFile, tokenA)
	becomes("there is a token again", tokenA, 200)
	if err := os.Remove(cfg.TokenFile); err != nil {
		t.Fatal(err)
	}
	becomes("the file is gone", tokenA, 401)
	if got := said.String(); strings.Count(got, "ERROR") != 2 || !strings.Contains(got, "no token in it") || strings.Contains(got, "0123456789") {
		t.Errorf("the log:\n%s", got)
	}
}

func TestBadTokensAndCertificates(t *testing.T) {
	ca := certtest.New(t)
	cert, _ := ca.Pair(t, "127.0.0.1")
	_, otherKey := ca.Pair(t, "127.0.0.1")
	for _, test := range []struct {
		change func(*server.Config)
		want   string
	}{
		{func(c *server.Config) { c.TokenFile = "/no/such" }, "--token-file: "},
		{func(c *server.Config) { c.TokenFile = tokenFile(t, "# none") }, "no token in it"},
		{func(c *server.Config) { c.TokenFile = tokenFile(t, tokenA, "secret-and-short"[:15]) }, "line 2: 15 characters; want 16 or more"},
		{func(c *server.Config) { c.TokenFile = tokenFile(t, "secret with a blank in it") }, "line 1: want letters, digits and punctuation"},
		{func(c *server.Config) { c.Token = "secret" }, "KVSTRATA_TOKEN: line 1: 6 characters"},
		{func(c *server.Config) { c.TLSCert = cert }, "--tls-cert, --tls-key: want both or none"},
		{func(c *server.Config) { c.TLSCert, c.TLSKey = cert, otherKey }, "--tls-cert, --tls-key: "},
	} {
		cfg := free
		test.change(&cfg)
		_, err := server.New(cfg, nil, nil, prometheus.NewRegistry(), slog.New(slog.DiscardHandler))
		if err == nil || !strings.Contains(err.Error(), test.want) || strings.Contains(err.Error(), "secret") {
			t.Errorf("%v, want %q", err, test.want)
		}
	}
	for _, text := range []string{fmt.Sprintf("%v %+v %#v", server.Config{Token: tokenA}, server.Config{Token: tokenA}, server.Secret(tokenA))} {
		if strings.Contains(text, tokenA) {
			t.Error(text)
		}
	}
}

// A browser's way: the form, a session, the pages and the live socket's path, and the end of the token.
func TestLogin(t *testing.T) {
	cfg := free
	cfg.TokenFile = tokenFile(t, tokenA)
	var said logtest.Buffer
	var asked []string
	r := startWith(t, cfg, map[string]http.Handler{"/": http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		asked = append(asked, req.URL.String())
		fmt.Fprint(w, "ours")
	})}, nil, prometheus.NewRegistry(), said.Logger())
	jar, err := cookiejar.New(nil)
	if err != nil {
		t.Fatal(err)
	}
	r.client.Jar = jar
	r.client.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	const page = "text/html,application/xhtml+xml"

	resp, body := r.do(t, http.MethodGet, r.URL()+`/explain/34dc?since="1h`, "", "Accept", page)
	if resp.StatusCode != 401 || !strings.Contains(body, `type="password"`) || !strings.Contains(body, `value="/explain/34dc?since=&#34;1h"`) ||
		!strings.Contains(resp.Header.Get("Content-Security-Policy"), "form-action 'self'") {
		t.Fatalf("the form: %s %v\n%s", resp.Status, resp.Header, body)
	}
	if resp, body := r.do(t, http.MethodGet, r.URL()+"/v1/sources", "", "Accept", page); resp.StatusCode != 401 || strings.Contains(body, "<form") {
		t.Errorf("the API gives a form: %s\n%s", resp.Status, body)
	}
	if resp, body := r.do(t, http.MethodGet, r.AdminURL()+"/metrics", "", "Accept", page); resp.StatusCode != 401 || strings.Contains(body, "<form") {
		t.Errorf("the admin listener gives a form: %s\n%s", resp.Status, body)
	}
	login := func(token, next string) (*http.Response, string) {
		return r.do(t, http.MethodPost, r.URL()+"/login", url.Values{"token": {token}, "next": {next}}.Encode(), "Content-Type", "application/x-www-form-urlencoded")
	}
	if resp, body := login(tokenB, "/tail"); resp.StatusCode != 401 || !strings.Contains(body, "not one of this server’s tokens") ||
		!strings.Contains(body, `value="/tail"`) || len(resp.Cookies()) > 0 {
		t.Errorf("a wrong token: %s %v\n%s", resp.Status, resp.Cookies(), body)
	}
	for next, want := range map[string]string{
		"/tail?x=1": "/tail?x=1", "": "/", "//evil.example": "/", `/\evil.example`: "/", "https://evil.example/": "/", "tail": "/", "/a\nb": "/",
		"/login": "/", "/login?next=/tail": "/", "/%6cogin#x": "/", "/logins": "/logins",
	} {
		resp, _ := login(" "+tokenA+" ", next)
		if resp.StatusCode != http.StatusSeeOther || resp.Header.Get("Location") != want {
			t.Errorf("next %q: %s to %q", next, resp.Status, resp.Header.Get("Location"))
		}
		c := resp.Cookies()
		if len(c) != 1 || !c[0].HttpOnly || c[0].SameSite != http.SameSiteStrictMode || c[0].Secure || c[0].Path != "/" || strings.Contains(c[0].Value, tokenA) {
			t.Fatalf("cookies: %v", c)
		}
	}
	for _, path := range []string{"/", "/v1/sources", "/v1/live"} {
		if resp, body := r.do(t, http.MethodGet, r.URL()+path, ""); resp.StatusCode != 200 || body != "ours" {
			t.Errorf("%s with a session: %s", path, resp.Status)
		}
	}
	// Sessions that nobody opened.
	base, _ := url.Parse(r.URL())
	session := jar.Cookies(base)[0].Value
	for name, value := range map[string]string{
		"forged": strings.Repeat("A", len(session)), "of another end": "AAAAAP" + session[6:], "cut": session[:40], "empty": "", "no base64": "%%%%",
	} {
		plain := running{Server: r.Server, client: &http.Client{Transport: r.client.Transport}}
		if resp, _ := plain.do(t, http.MethodGet, r.URL()+"/", "", "Cookie", jar.Cookies(base)[0].Name+"="+value); resp.StatusCode != 401 {
			t.Errorf("%s: %s", name, resp.Status)
		}
	}
	writeTokens(t, cfg.TokenFile, tokenB)
	for deadline := time.Now().Add(20 * time.Second); ; <-time.After(10 * time.Millisecond) {
		if resp, _ := r.do(t, http.MethodGet, r.URL()+"/", ""); resp.StatusCode == 401 {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("the session outlives its token")
		}
	}
	if text := said.String() + strings.Join(asked, " "); strings.Contains(text, tokenA) || strings.Contains(text, tokenB) {
		t.Errorf("a token is in the log, or in a URL:\n%s", text)
	}
}

// Without tokens there is no way to log in, and no need.
func TestNoLoginWithoutTokens(t *testing.T) {
	r := start(t, map[string]http.Handler{"/": echo("ours")}, nil, prometheus.NewRegistry())
	if resp, _ := r.do(t, http.MethodPost, r.URL()+"/login", "token=x"); len(resp.Cookies()) > 0 {
		t.Errorf("%s %v", resp.Status, resp.Cookies())
	}
	if resp, _ := r.do(t, http.MethodGet, r.URL()+"/", "", "Accept", "text/html"); resp.StatusCode != 200 {
		t.Error(resp.Status)
	}
}

// Nothing can be changed: a lookup is a POST because prompts are long.
func TestOnlyReads(t *testing.T) {
	r := start(t, map[string]http.Handler{"/": echo("ours")}, nil, prometheus.NewRegistry())
	for _, method := range []string{"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "PROPFIND"} {
		for path, posts := range map[string]bool{
			"/v1/lookup": true, "/v1/lookup/batch": true, "/v1/lookup/explain": true, "/v1/changes": true, "/v1/shard/lookup": true, "/v1/shard": false, "/v1/sources": false, "/v1/query/evictions": false, "/v1/explain": true, "/v1/explain/00": false, "/v1/live": false, "/v1/resident": false, "/": false, "/v2/x": false, "//v1/lookup": false,
		} {
			resp, body := r.do(t, method, r.URL()+path, "")
			allowed := method == "GET" || method == "HEAD" || method == "POST" && posts
			if refused := resp.StatusCode == http.StatusMethodNotAllowed; refused == allowed || refused && method != "HEAD" && !strings.Contains(body, "nothing can be changed here") {
				t.Errorf("%s %s: %s", method, path, resp.Status)
			}
		}
		if resp, _ := r.do(t, method, r.AdminURL()+"/metrics", ""); (resp.StatusCode == 200) != (method == "GET" || method == "HEAD") {
			t.Errorf("%s /metrics: %s", method, resp.Status)
		}
	}
}

func TestLimitsOfRoutes(t *testing.T) {
	bounds := make(chan [2]int64, 1) // bytes that could be read, and seconds until the deadline
	r := start(t, map[string]http.Handler{"/": http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		n, err := io.Copy(io.Discard, req.Body)
		var large *http.MaxBytesError
		if errors.As(err, &large) {
			w.WriteHeader(http.StatusRequestEntityTooLarge)
		}
		left := int64(0)
		if deadline, ok := req.Context().Deadline(); ok {
			left = int64(time.Until(deadline).Round(time.Second) / time.Second)
		}
		bounds <- [2]int64{n, left}
	})}, nil, prometheus.NewRegistry())
	for _, test := range []struct {
		method, path string
		body         int64 // most bytes
		seconds      int64 // 0 = none
	}{
		{"POST", "/v1/lookup", 16 << 20, 30},
		{"POST", "/v1/shard/lookup", 16 << 20, 30},
		{"POST", "/v1/lookup/batch", 16 << 20, 30},
		{"POST", "/v1/lookup/explain", 16 << 20, 30},
		{"POST", "/v1/explain", 16 << 20, 30},
		{"POST", "/v1/changes", 16 << 20, 0},
		{"GET", "/v1/changes", 0, 0},
		{"POST", "/login", 4 << 10, 10},
		{"GET", "/v1/sources", 0, 30},
		{"GET", "/v1/query/x", 0, 30},
		{"GET", "/v1/resident", 0, 300},
		{"GET", "/v1/live", 0, 0},
		{"GET", "/", 0, 30},
	} {
		if resp, _ := r.do(t, test.method, r.URL()+test.path, strings.Repeat("x", int(test.body))); resp.StatusCode != 200 {
			t.Errorf("%s: %s", test.path, resp.Status)
		}
		if got := <-bounds; got != [2]int64{test.body, test.seconds} {
			t.Errorf("%s: %v bytes and seconds", test.path, got)
		}
		if resp, body := r.do(t, test.method, r.URL()+test.path, strings.Repeat("x", int(test.body)+1)); resp.StatusCode != 413 || !strings.Contains(body, fmt.Sprint(test.body)) {
			t.Errorf("%s: a body too large: %s\n%s", test.path, resp.Status, body)
		}
		// Of a length that is not told, what is too much can't be read.
		req, err := http.NewRequestWithContext(t.Context(), test.method, r.URL()+test.path, io.MultiReader(strings.NewReader(strings.Repeat("x", int(test.body)+1))))
		if err != nil {
			t.Fatal(err)
		}
		resp, err := r.client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if got := <-bounds; resp.StatusCode != 413 || got[0] != test.body {
			t.Errorf("%s: a body without end: %s, %d bytes read", test.path, resp.Status, got[0])
		}
	}
	if resp, _ := r.do(t, "GET", r.URL()+"/", "", "X-Large", strings.Repeat("x", 64<<10)); resp.StatusCode != http.StatusRequestHeaderFieldsTooLarge {
		t.Errorf("64 KiB of headers: %s", resp.Status)
	}
}

// At most so many requests are under way; a live socket is none of them.
func TestRequestsAtATime(t *testing.T) {
	g := gate{make(chan struct{}), make(chan struct{})}
	r := start(t, map[string]http.Handler{"/slow": g, "/": echo("ours")}, nil, prometheus.NewRegistry())
	const most = 256
	var answers []<-chan string
	for range most {
		answers = append(answers, g.request(r))
	}
	resp, body := r.do(t, "GET", r.URL()+"/", "")
	if resp.StatusCode != http.StatusServiceUnavailable || resp.Header.Get("Retry-After") == "" || !strings.Contains(body, "256 requests are under way") {
		t.Errorf("one more: %s\n%s", resp.Status, body)
	}
	if resp, _ := r.do(t, "GET", r.URL()+"/v1/live", ""); resp.StatusCode != 200 {
		t.Errorf("a live socket: %s", resp.Status)
	}
	if status, _ := r.get(t, r.AdminURL()+"/healthz"); status != 200 {
		t.Errorf("health: %d", status)
	}
	close(g.open)
	for _, a := range answers {
		if got := <-a; got != "whole answer" {
			t.Fatalf("answered %q", got)
		}
	}
	if resp, _ := r.do(t, "GET", r.URL()+"/", ""); resp.StatusCode != 200 {
		t.Errorf("afterwards: %s", resp.Status)
	}
}

func TestTLS(t *testing.T) {
	ca, strangers := certtest.New(t), certtest.New(t)
	cfg := free
	cfg.TLSCert, cfg.TLSKey = ca.Pair(t, "127.0.0.1")
	cfg.TokenFile = tokenFile(t, tokenA)
	r := startWith(t, cfg, map[string]http.Handler{"/": echo("ours")}, nil, prometheus.NewRegistry(), slog.New(slog.DiscardHandler))
	if !strings.HasPrefix(r.URL(), "https://") || !strings.HasPrefix(r.AdminURL(), "https://") {
		t.Fatalf("%s, %s", r.URL(), r.AdminURL())
	}
	// ask makes a connection of its own, and returns the serial number of the certificate shown.
	ask := func(ca *certtest.Authority) (serial int64, err error) {
		pem, err := os.ReadFile(ca.File)
		if err != nil {
			t.Fatal(err)
		}
		pool := x509.NewCertPool()
		pool.AppendCertsFromPEM(pem)
		client := http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: pool}, DisableKeepAlives: true, ForceAttemptHTTP2: true}}
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, r.URL()+"/login", strings.NewReader("token="+tokenA))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Content-Type", "application/x-www-form-urlencoded")
		client.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
		resp, err := client.Do(req)
		if err != nil {
			return 0, err
		}
		resp.Body.Close()
		if c := resp.Cookies(); len(c) != 1 || !c[0].Secure {
			t.Errorf("cookies over TLS: %v", c)
		}
		return resp.TLS.PeerCertificates[0].SerialNumber.Int64(), nil
	}
	first, err := ask(ca)
	if err != nil {
		t.Fatal(err)
	}
	var unknown x509.UnknownAuthorityError
	if _, err := ask(strangers); !errors.As(err, &unknown) {
		t.Errorf("another authority: %v", err)
	}
	if resp, _ := r.do(t, "GET", strings.Replace(r.URL(), "https", "http", 1), ""); resp.StatusCode != 400 {
		t.Errorf("in the clear: %s", resp.Status)
	}
	if _, err := tls.Dial("tcp", strings.TrimPrefix(r.URL(), "https://"), &tls.Config{InsecureSkipVerify: true, MaxVersion: tls.VersionTLS11}); err == nil {
		t.Error("TLS 1.1 is spoken")
	}
	// A pair that does not fit leaves the old one in use; the next is taken.
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	key, err := os.ReadFile(cfg.TLSKey)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(cfg.TLSKey, key[:len(key)/2], 0o600); err != nil {
		t.Fatal(err)
	}
	for began := time.Now(); time.Since(began) < 1500*time.Millisecond; <-time.After(50 * time.Millisecond) {
		if serial, err := ask(ca); err != nil || serial != first {
			t.Fatalf("serial %d, %v", serial, err)
		}
	}
	ca.Replace(t, cfg.TLSCert, cfg.TLSKey, "127.0.0.1")
	for {
		if serial, err := ask(ca); err == nil && serial != first {
			return
		}
		select {
		case <-ctx.Done():
			t.Fatal("the new certificate is not shown")
		case <-time.After(10 * time.Millisecond):
		}
	}
}

func FuzzParseTokens(f *testing.F) {
	f.Add([]byte(tokenA + "\n# x\n\n" + tokenB))
	f.Add([]byte("short"))
	f.Fuzz(func(t *testing.T, text []byte) {
		tokens, err := server.ParseTokens(text)
		if (err == nil) != (len(tokens) > 0) {
			t.Fatalf("%d tokens, %v", len(tokens), err)
		}
		for _, token := range tokens {
			if len(token) < 16 || !bytes.Contains(text, []byte(string(token))) {
				t.Fatalf("token of %d bytes", len(token))
			}
		}
	})
}

// A browser knows no ports in cookies: the sessions of two servers on one host stand beside each other, and none opens an admin
// listener.
func TestSessionsOfTwoServersOnOneHost(t *testing.T) {
	jar, err := cookiejar.New(nil)
	if err != nil {
		t.Fatal(err)
	}
	var both []*running
	for _, token := range []string{tokenA, tokenB} {
		cfg := free
		cfg.TokenFile = tokenFile(t, token)
		r := startWith(t, cfg, map[string]http.Handler{"/": echo("ours")}, nil, prometheus.NewRegistry(), slog.New(slog.DiscardHandler))
		r.client.Jar = jar
		r.client.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
		if resp, _ := r.do(t, http.MethodPost, r.URL()+"/login", "token="+token, "Content-Type", "application/x-www-form-urlencoded"); resp.StatusCode != http.StatusSeeOther {
			t.Fatal(resp.Status)
		}
		both = append(both, r)
	}
	for i, r := range both {
		if resp, _ := r.do(t, http.MethodGet, r.URL()+"/v1/sources", ""); resp.StatusCode != 200 {
			t.Errorf("server %d with its session: %s", i, resp.Status)
		}
		// The session under the admin listener's own name, too: whoever holds the cookie can call it anything.
		base, _ := url.Parse(r.URL())
		admin, _ := url.Parse(r.AdminURL())
		for _, c := range jar.Cookies(base) {
			for _, name := range []string{c.Name, "kvstrata-" + admin.Port(), "kvstrata"} {
				if resp, _ := r.do(t, http.MethodGet, r.AdminURL()+"/metrics", "", "Cookie", name+"="+c.Value); resp.StatusCode != 401 {
					t.Errorf("the admin listener of server %d takes a session as %s: %s", i, name, resp.Status)
				}
			}
		}
	}
}
