package web_test

import (
	"compress/gzip"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/fstest"

	"kvstrata/web"
)

var (
	script = strings.Repeat("console.log('kvstrata');\n", 100)
	page   = `<!doctype html><script type="module" src="/assets/index-1a2b3c.js"></script>` + strings.Repeat(" ", 500)
	files  = fstest.MapFS{
		"index.html":             {Data: []byte(page)},
		"placeholder.txt":        {Data: []byte("not for users")},
		"favicon.svg":            {Data: []byte("<svg/>")},
		"assets/index-1a2b3c.js": {Data: []byte(script)},
		"assets/font-4d5e.woff2": {Data: []byte{0, 1, 2, 3}},
	}
)

// dashboard returns the handler of a hub with these files.
func dashboard(t *testing.T, set func(*web.Config)) http.Handler {
	t.Helper()
	cfg := web.DefaultConfig()
	set(&cfg)
	hub, err := web.New(cfg, nil, nil, quiet, nil)
	if err != nil {
		t.Fatal(err)
	}
	return hub.Handler()
}

func request(h http.Handler, method, path string, header http.Header) *http.Response {
	r := httptest.NewRequest(method, path, nil)
	r.Header = header
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	return w.Result()
}

func body(t *testing.T, r io.Reader) string {
	t.Helper()
	data, err := io.ReadAll(r)
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

func TestDashboard(t *testing.T) {
	h := dashboard(t, func(cfg *web.Config) { cfg.Dashboard = files })
	const html, forever = "text/html; charset=utf-8", "public, max-age=31536000, immutable"
	tests := []struct {
		path, kind, cache, want string
		status                  int
	}{
		{"/", html, "no-cache", page, 200},
		{"/engines", html, "no-cache", page, 200},
		{"/transfers?sort=-rate", html, "no-cache", page, 200},
		{"/prefixes?x=1", html, "no-cache", page, 200},
		{"/history", html, "no-cache", page, 200},
		{"/explain", html, "no-cache", page, 200},
		{"/explain/34dc6330fee229a2", html, "no-cache", page, 200},
		{"/explain/a/b", html, "no-cache", page, 200},
		{"/tail", html, "no-cache", page, 200},
		{"/favicon.svg", "image/svg+xml", "no-cache", "<svg/>", 200},
		{"/assets/index-1a2b3c.js", "text/javascript; charset=utf-8", forever, script, 200},
		{"/assets/font-4d5e.woff2", "font/woff2", forever, "\x00\x01\x02\x03", 200},
		{"/index.html", "application/json", "no-store", "", 404},
		{"/placeholder.txt", "application/json", "no-store", "", 404},
		{"/assets/", "application/json", "no-store", "", 404},
		{"/assets/other.js", "application/json", "no-store", "", 404},
		{"/engines/x", "application/json", "no-store", "", 404},
		{"/v1/other", "application/json", "no-store", "", 404},
		{"/tail.go", "application/json", "no-store", "", 404},
	}
	for _, test := range tests {
		resp := request(h, "GET", test.path, nil)
		kind, cache, got := resp.Header.Get("Content-Type"), resp.Header.Get("Cache-Control"), body(t, resp.Body)
		if resp.StatusCode != test.status || kind != test.kind || cache != test.cache || test.status == 200 && got != test.want {
			t.Errorf("%s: status %d, %s, %s, %d bytes; want %d, %s, %s", test.path, resp.StatusCode, kind, cache, len(got), test.status, test.kind, test.cache)
		}
		if test.status == 404 && !strings.Contains(got, `{"error":"`) {
			t.Errorf("%s: %s; want an error in JSON", test.path, got)
		}
		for name, want := range map[string]string{
			"Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; " +
				"connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
			"X-Content-Type-Options": "nosniff",
			"Referrer-Policy":        "no-referrer",
		} {
			if got := resp.Header.Get(name); got != want {
				t.Errorf("%s: %s is %q; want %q", test.path, name, got, want)
			}
		}
	}
	if resp := request(h, "POST", "/", nil); resp.StatusCode != 404 {
		t.Errorf("POST is answered with %d", resp.StatusCode)
	}
	head := request(h, "HEAD", "/assets/index-1a2b3c.js", nil)
	if n := body(t, head.Body); head.StatusCode != 200 || head.ContentLength != int64(len(script)) || n != "" {
		t.Errorf("HEAD: status %d, length %d, body %q", head.StatusCode, head.ContentLength, n)
	}
}

func TestAssetsAreCompressed(t *testing.T) {
	h := dashboard(t, func(cfg *web.Config) { cfg.Dashboard = files })
	tests := []struct {
		path, accept string
		zipped       bool
	}{
		{"/assets/index-1a2b3c.js", "gzip, deflate, br", true},
		{"/assets/index-1a2b3c.js", "br;q=1.0, GZIP;q=0.8", true},
		{"/assets/index-1a2b3c.js", "*", true},
		{"/assets/index-1a2b3c.js", "", false},
		{"/assets/index-1a2b3c.js", "gzip;q=0", false},
		{"/assets/index-1a2b3c.js", "br, identity", false},
		{"/", "gzip", true},
		{"/assets/font-4d5e.woff2", "gzip", false},
	}
	for _, test := range tests {
		resp := request(h, "GET", test.path, http.Header{"Accept-Encoding": {test.accept}})
		var r io.Reader = resp.Body
		if zipped := resp.Header.Get("Content-Encoding") == "gzip"; zipped != test.zipped {
			t.Errorf("%s accepting %q: compressed %v", test.path, test.accept, zipped)
		} else if zipped {
			zip, err := gzip.NewReader(r)
			if err != nil {
				t.Fatal(err)
			}
			r = zip
			if resp.Header.Get("Vary") != "Accept-Encoding" {
				t.Errorf("%s does not say that it varies", test.path)
			}
		}
		if got, want := body(t, r), string(files[strings.TrimPrefix(test.path, "/")+map[bool]string{true: "index.html"}[test.path == "/"]].Data); got != want {
			t.Errorf("%s accepting %q: other content", test.path, test.accept)
		}
	}
}

func TestETag(t *testing.T) {
	h := dashboard(t, func(cfg *web.Config) { cfg.Dashboard = files })
	plain := request(h, "GET", "/", nil).Header.Get("ETag")
	zipped := request(h, "GET", "/", http.Header{"Accept-Encoding": {"gzip"}}).Header.Get("ETag")
	if plain == "" || zipped == "" || plain == zipped {
		t.Fatalf("tags %q and %q", plain, zipped)
	}
	for header, want := range map[string]int{
		plain: 304, "W/" + plain: 304, `"other", ` + plain: 304, "*": 304, `"other"`: 200, zipped: 200,
	} {
		resp := request(h, "GET", "/engines", http.Header{"If-None-Match": {header}})
		if resp.StatusCode != want || want == 304 && body(t, resp.Body) != "" {
			t.Errorf("If-None-Match %s: status %d; want %d", header, resp.StatusCode, want)
		}
	}
}

// TestNotBuilt checks what a binary says whose build had no dashboard.
func TestNotBuilt(t *testing.T) {
	h := dashboard(t, func(cfg *web.Config) { cfg.Dashboard = fstest.MapFS{"placeholder.txt": {Data: []byte("x")}} })
	resp := request(h, "GET", "/", nil)
	if got := body(t, resp.Body); resp.StatusCode != 200 || !strings.Contains(got, "make build") {
		t.Errorf("status %d: %s", resp.StatusCode, got)
	}
}

// TestEmbedded checks that what is in the binary, built or not, is served.
func TestEmbedded(t *testing.T) {
	h := dashboard(t, func(*web.Config) {})
	if resp := request(h, "GET", "/", nil); resp.StatusCode != 200 || len(body(t, resp.Body)) == 0 {
		t.Errorf("status %d", resp.StatusCode)
	}
	if resp := request(h, "GET", "/placeholder.txt", nil); resp.StatusCode != 404 {
		t.Errorf("the placeholder is served with %d", resp.StatusCode)
	}
}
