package web

import (
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"fmt"
	"io/fs"
	"net/http"
	"path"
	"strconv"
	"strings"
)

//go:embed all:ui/dist
var built embed.FS

// embedded returns the dashboard that was built into the binary.
func embedded() fs.FS {
	files, err := fs.Sub(built, "ui/dist")
	if err != nil {
		panic("web: the embedded folder is not there: " + err.Error())
	}
	return files
}

// notBuilt is what a binary without the dashboard answers.
const notBuilt = "This binary was built without the dashboard: run make build. The API under /v1/ is served all the same.\n"

// dashboard is the files of the user interface, in memory: they are few and small.
type dashboard struct {
	index *asset
	files map[string]*asset // by path
}

// asset is one file, ready to be sent.
type asset struct {
	kind   string // content type
	etag   string // without quotes
	cache  string
	plain  []byte
	zipped []byte // nil where that would save little
}

var contentTypes = map[string]string{
	".html": "text/html; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8",
	".svg": "image/svg+xml", ".png": "image/png", ".ico": "image/x-icon", ".woff2": "font/woff2",
	".json": "application/json", ".map": "application/json", ".webmanifest": "application/manifest+json",
	".txt": "text/plain; charset=utf-8",
}

func newDashboard(files fs.FS) (*dashboard, error) {
	d := &dashboard{files: make(map[string]*asset)}
	err := fs.WalkDir(files, ".", func(name string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() || name == "placeholder.txt" {
			return err
		}
		data, err := fs.ReadFile(files, name)
		if err != nil {
			return err
		}
		a, err := newAsset(name, data)
		if err != nil {
			return fmt.Errorf("compress %s: %w", name, err)
		}
		if name == "index.html" {
			d.index = a
		} else {
			d.files["/"+name] = a
		}
		return nil
	})
	if d.index == nil && err == nil {
		d.index, err = newAsset("index.txt", []byte(notBuilt))
	}
	return d, err
}

func newAsset(name string, data []byte) (*asset, error) {
	sum := sha256.Sum256(data)
	a := &asset{kind: contentTypes[path.Ext(name)], etag: hex.EncodeToString(sum[:12]), cache: "no-cache", plain: data}
	if a.kind == "" {
		a.kind = "application/octet-stream"
	}
	if strings.HasPrefix(name, "assets/") {
		a.cache = "public, max-age=31536000, immutable" // the name holds a hash of the content
	}
	var b bytes.Buffer
	zip, err := gzip.NewWriterLevel(&b, gzip.BestCompression)
	if err != nil {
		return nil, err
	}
	if _, err := zip.Write(data); err != nil {
		return nil, err
	}
	if err := zip.Close(); err != nil {
		return nil, err
	}
	if b.Len() < len(data)*9/10 {
		a.zipped = b.Bytes()
	}
	return a, nil
}

// ServeHTTP answers GET and HEAD.
func (a *asset) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	head := w.Header()
	head.Set("Cache-Control", a.cache)
	head.Set("Content-Type", a.kind)
	body, etag := a.plain, `"`+a.etag+`"`
	if a.zipped != nil {
		head.Set("Vary", "Accept-Encoding")
		if acceptsGzip(r.Header.Values("Accept-Encoding")) {
			body, etag = a.zipped, `"`+a.etag+`-gz"`
			head.Set("Content-Encoding", "gzip")
		}
	}
	head.Set("ETag", etag)
	if matches(r.Header.Values("If-None-Match"), etag) {
		head.Del("Content-Type")
		head.Del("Content-Encoding")
		w.WriteHeader(http.StatusNotModified)
		return
	}
	head.Set("Content-Length", strconv.Itoa(len(body)))
	if r.Method != http.MethodHead {
		_, _ = w.Write(body) // a browser that went away is told nothing
	}
}

// acceptsGzip reads Accept-Encoding: gzip or *, with a weight that is not 0.
func acceptsGzip(values []string) bool {
	for coding := range strings.SplitSeq(strings.Join(values, ","), ",") {
		name, params, _ := strings.Cut(coding, ";")
		if name = strings.ToLower(strings.TrimSpace(name)); name != "gzip" && name != "*" {
			continue
		}
		weight, given := strings.CutPrefix(strings.ToLower(strings.TrimSpace(params)), "q=")
		if q, err := strconv.ParseFloat(weight, 64); given && (err != nil || q == 0) {
			return false
		}
		return true
	}
	return false
}

// matches reads If-None-Match, whose tags are compared weakly.
func matches(values []string, etag string) bool {
	for tag := range strings.SplitSeq(strings.Join(values, ","), ",") {
		tag = strings.TrimPrefix(strings.TrimSpace(tag), "W/")
		if tag == etag || tag == "*" {
			return true
		}
	}
	return false
}
