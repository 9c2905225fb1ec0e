package redis_test

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"errors"
	"log/slog"
	"maps"
	"math/big"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"kvstrata/connector"
	"kvstrata/connector/redis"
	"kvstrata/connector/redis/redistest"
	"kvstrata/connector/store"
	"kvstrata/event"
)

func TestPasswords(t *testing.T) {
	const secret = "s3cret-horse/@:%"
	s := redistest.Start(t, "--requirepass", secret)
	t.Setenv("KV_PASSWORD", secret)
	t.Setenv("KV_WRONG", "not-"+secret)
	dir := t.TempDir()
	file := filepath.Join(dir, "password")
	if err := os.WriteFile(file, []byte(secret+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name   string
		change func(*redis.Config)
		ok     bool
	}{
		{"variable", func(c *redis.Config) { c.PasswordEnv = "KV_PASSWORD" }, true},
		{"file and user", func(c *redis.Config) { c.PasswordFile, c.Username = file, "default" }, true},
		{"url", func(c *redis.Config) {
			c.URL, c.Address = "redis://:s3cret-horse%2F%40%3A%25@"+c.Address+"/1", ""
		}, true},
		{"none", func(*redis.Config) {}, false},
		{"wrong", func(c *redis.Config) { c.PasswordEnv = "KV_WRONG" }, false},
		{"wrong user", func(c *redis.Config) { c.PasswordEnv, c.Username = "KV_PASSWORD", "nobody" }, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			b := open(t, s.Addr, tt.change)
			if strings.Contains(b.Name(), "horse") {
				t.Errorf("name %s", b.Name())
			}
			err := errors.Join(b.Put(t.Context(), items(b, 1, chain(1, 2, 2), 1000))...)
			if (err == nil) != tt.ok || err != nil && strings.Contains(err.Error(), "horse") {
				t.Errorf("put: %v", err)
			}
			if !tt.ok {
				return
			}
			_, l := watch(t, s.Addr, func(c *redis.Config, _ *redis.WatchConfig) { tt.change(c) })
			await(t, "the watcher", func() bool { return l.size() == 4 })
		})
	}
}

// certificates writes a CA, and a certificate of 127.0.0.1 that it signed.
func certificates(t *testing.T) (ca, cert, key string) {
	t.Helper()
	dir := t.TempDir()
	write := func(name, kind string, der []byte) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	root, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	own, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	signer := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "test"}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	rootDER, err := x509.CreateCertificate(rand.Reader, signer, signer, &root.PublicKey, root)
	if err != nil {
		t.Fatal(err)
	}
	leaf := &x509.Certificate{
		SerialNumber: big.NewInt(2), NotBefore: signer.NotBefore, NotAfter: signer.NotAfter, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, leaf, signer, &own.PublicKey, root)
	if err != nil {
		t.Fatal(err)
	}
	ownDER, err := x509.MarshalPKCS8PrivateKey(own)
	if err != nil {
		t.Fatal(err)
	}
	return write("ca.pem", "CERTIFICATE", rootDER), write("cert.pem", "CERTIFICATE", der), write("key.pem", "PRIVATE KEY", ownDER)
}

func TestTLS(t *testing.T) {
	// A server that does not know the first of these stops at it.
	out, err := exec.Command(redistest.Binary(t), "--tls-port", "0", "--no-such-thing", "0").CombinedOutput()
	if err == nil || bytes.Contains(out, []byte(">>> 'tls-port")) {
		t.Skip("SKIPPED: this redis-server is built without TLS")
	}
	ca, cert, key := certificates(t)
	s := redistest.Start(t, "--tls-port", "0", "--tls-cert-file", cert, "--tls-key-file", key, "--tls-ca-cert-file", ca)
	mutual := func(c *redis.Config) { c.TLS, c.TLSCA, c.TLSCert, c.TLSKey = true, ca, cert, key }
	b := open(t, s.Addr, mutual)
	if !strings.HasPrefix(b.Name(), "rediss://") {
		t.Errorf("name %s", b.Name())
	}
	written := items(b, 1, chain(1, 5, 2), 700_000)
	put(t, b, written)
	read := sinks(written, 33)
	if errs := b.Get(t.Context(), read); errs != nil {
		t.Fatal(errors.Join(errs...))
	}
	for i := range read {
		if !bytes.Equal(content(&read[i]), content(&written[i])) {
			t.Errorf("item %d: other bytes", i)
		}
	}
	_, l := watch(t, s.Addr, func(c *redis.Config, _ *redis.WatchConfig) { mutual(c) })
	await(t, "the watcher", func() bool { return l.size() == 10 })
	for name, change := range map[string]func(*redis.Config){
		"signed by nobody known": func(c *redis.Config) { c.TLS, c.TLSCert, c.TLSKey = true, cert, key },
		"another name":           func(c *redis.Config) { mutual(c); c.TLSServerName = "elsewhere.example" },
		"no client certificate":  func(c *redis.Config) { c.TLS, c.TLSCA = true, ca },
		"no TLS":                 func(c *redis.Config) { c.Timeout = 1 },
	} {
		b := open(t, s.Addr, change)
		if errs := b.Put(t.Context(), written[:1]); errs == nil {
			t.Errorf("%s: let in", name)
		}
	}
}

func TestUnixSocket(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "s")
	redistest.Start(t, "--unixsocket", socket)
	for _, change := range []func(*redis.Config){
		func(c *redis.Config) { c.Address = socket },
		func(c *redis.Config) { c.URL, c.Address = "unix://"+socket, "" },
	} {
		b := open(t, "", change)
		written := items(b, 1, chain(1, 5, 2), 70_000)
		put(t, b, written)
		if errs := b.Get(t.Context(), sinks(written, 3)); errs != nil {
			t.Fatal(errors.Join(errs...))
		}
	}
	_, l := watch(t, socket, nil)
	await(t, "the watcher", func() bool { return l.size() == 10 })
}

func TestConfigTellsAllThatIsWrong(t *testing.T) {
	cfg := redis.Config{
		URL: "redis://user:hunter2@ho st:1/x", Address: "x", PasswordFile: "a", PasswordEnv: "b", DB: -1, TLSCert: "c", TTL: -1, Connections: 99,
		PipelineBytes: 1, Timeout: 0, KeyPrefix: "a{b}",
	}
	err := cfg.Validate()
	for _, want := range []string{"url and address", "password_file and password_env", "db -1", "tls_cert and tls_key", "ttl", "connections 99", "pipeline_bytes 1", "timeout 0", "key_prefix"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q is missing in %v", want, err)
		}
	}
	for _, text := range []string{
		"redis://user:hunter2@ho st:1/x", "redis://user:hunter2@host:1/x", "http://user:hunter2@host:1", "redis://user:hunter2@", "redis://u:hunter2@h?db=hunter2",
		"unix://hunter2", "hunter2", "redis://%zz:hunter2@h",
	} {
		cfg := redis.DefaultConfig()
		cfg.URL = text
		if err := cfg.Validate(); err == nil || strings.Contains(err.Error(), "hunter2") {
			t.Errorf("%s: %v", text, err)
		}
	}
	good := redis.DefaultConfig()
	good.URL = "redis://:hunter2@host:77/5"
	b, err := redis.New(good, compatibility, 16, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	if got := b.Name(); got != "redis://host:77/5" {
		t.Errorf("name %s", got)
	}
	groups := chain(0, 1, 2)
	groups[0].Rank = 3
	if got := b.Key(&groups[0]); got != "kv:abcd010203040506:3:0000000000000002" {
		t.Errorf("key %s", got)
	}
	groups[0].Blocks[1].Hash = event.BytesHash("a hash of 20 bytes..")
	if got := b.Key(&groups[0]); got != "kv:abcd010203040506:3:612068617368206f662032302062797465732e2e" {
		t.Errorf("key %s", got)
	}
	if err := b.Close(); err != nil {
		t.Fatal(err)
	}
	if errs := b.Put(t.Context(), items(b, 1, groups, 10)); errs == nil {
		t.Error("a closed backend stores")
	}
}

func TestExtraConfiguration(t *testing.T) {
	extra := connector.Extra{}
	for key, value := range map[string]string{"url": `"redis://h:1"`, "ttl": "1.5", "connections": "3", "group_blocks": "4", "store_name": `"x"`} {
		extra[key] = json.RawMessage(value)
	}
	cfg, err := redis.FromExtra(extra)
	want := redis.DefaultConfig()
	want.URL, want.TTL, want.Connections = "redis://h:1", 1.5, 3
	if diff := cmp.Diff(want, cfg); diff != "" || err != nil {
		t.Error(diff, err)
	}
	extra["conections"] = json.RawMessage("1")
	if _, err := redis.FromExtra(extra); err == nil || !strings.Contains(err.Error(), `"connections"`) {
		t.Errorf("got %v, want the nearest key", err)
	}
	text, err := json.Marshal(redis.DefaultConfig())
	if err != nil {
		t.Fatal(err)
	}
	var keys map[string]any
	if err := json.Unmarshal(text, &keys); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(slices.Sorted(maps.Keys(keys)), slices.Sorted(slices.Values(redis.Keys()))); diff != "" {
		t.Error(diff)
	}
}

func TestOpen(t *testing.T) {
	s := redistest.Start(t)
	setup := connector.Setup{Config: connector.DefaultConfig(), Log: slog.New(slog.DiscardHandler), Ranks: 1, Model: connector.Model{BlockTokens: 16}}
	setup.Config.Extra["address"] = json.RawMessage(`"` + s.Addr + `"`)
	b, err := redis.Transport().Open(store.Opening{Setup: setup, Compatibility: compatibility})
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	group := chain(1, 1, 1)[0]
	if errs := b.Put(t.Context(), []store.Item{{Key: b.Key(&group), Group: &group, Pieces: [][]byte{{1, 2}}, Bytes: 2}}); errs != nil {
		t.Error(errs)
	}
	delete(setup.Config.Extra, "address")
	if b, err := redis.Open(store.Opening{Setup: setup}); err == nil || b != nil {
		t.Errorf("without a server: %v, %v", b, err)
	}
}
