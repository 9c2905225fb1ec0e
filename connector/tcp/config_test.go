package tcp_test

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"kvstrata/connector"
	"kvstrata/connector/tcp"
)

func TestConfigTellsEveryProblem(t *testing.T) {
	c := tcp.DefaultConfig()
	if err := c.Validate(); err != nil {
		t.Fatal(err)
	}
	c = tcp.Config{Listen: "nowhere", Mode: "throw", Secret: "short", SecretEnv: "X", TLSCert: "c"}
	err := c.Validate()
	if err == nil {
		t.Fatal("no error")
	}
	for _, name := range tcp.Keys() {
		switch name {
		case "checksum", "shared_memory":
			continue
		}
		if !strings.Contains(err.Error(), name) {
			t.Errorf("nothing is said of %s", name)
		}
	}
	if strings.Contains(err.Error(), "short") {
		t.Errorf("the secret is told: %v", err)
	}
}

func TestSecretIsNotPrinted(t *testing.T) {
	c := tcp.DefaultConfig()
	c.Secret = "0123456789abcdef"
	text, err := json.Marshal(c)
	if err != nil {
		t.Fatal(err)
	}
	if all := fmt.Sprintf("%v %+v %#v %s %s", c, c, c, c.Secret, text); strings.Contains(all, "0123456789") {
		t.Error(all)
	}
}

func TestReadConfig(t *testing.T) {
	c, err := tcp.ReadConfig(connector.Extra{"secret": json.RawMessage(`"0123456789abcdef"`), "mode": json.RawMessage(`"push"`)})
	if err != nil || string(c.Secret) != "0123456789abcdef" || !c.Push() || c.Lease().Duration != 30*time.Second {
		t.Errorf("%v", err)
	}
	if _, err := tcp.ReadConfig(connector.Extra{"chunkbytes": json.RawMessage(`1`)}); err == nil || !strings.Contains(err.Error(), "chunk_bytes") {
		t.Errorf("%v", err)
	}
}

func TestSecretFromElsewhere(t *testing.T) {
	path := filepath.Join(t.TempDir(), "secret")
	if err := os.WriteFile(path, []byte("0123456789abcdef\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("KV_SECRET", "0123456789abcdef")
	for _, shm := range []bool{false, true} {
		p := start(t, "p", cache(t, nhd, 4), func(c *tcp.Config, _ *tcp.Identity) { c.SecretFile, c.SharedMemory = path, shm })
		c := start(t, "c", cache(t, nhd, 4), func(c *tcp.Config, _ *tcp.Identity) { c.SecretEnv, c.SharedMemory = "KV_SECRET", shm })
		export(t, p, "r", 1)
		if r := c.Fetch(t.Context(), pull(p.peer(), "r", c.cache, []int{1}, []int{2})); r.Err != nil || r.Shared != shm {
			t.Fatalf("%+v", r)
		}
	}
}

// authority makes certificates: its own, and one for 127.0.0.1 that it signed.
func authority(t *testing.T) func(*tcp.Config, *tcp.Identity) {
	t.Helper()
	dir := t.TempDir()
	write := func(name, kind string, der []byte) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	key := func() *ecdsa.PrivateKey {
		k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
		if err != nil {
			t.Fatal(err)
		}
		return k
	}
	caKey, leafKey := key(), key()
	ca := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "ca"}, NotAfter: time.Now().Add(time.Hour), IsCA: true,
		BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	leaf := &x509.Certificate{
		SerialNumber: big.NewInt(2), Subject: pkix.Name{CommonName: "engine"}, NotAfter: time.Now().Add(time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	caDER, err := x509.CreateCertificate(rand.Reader, ca, ca, caKey.Public(), caKey)
	if err != nil {
		t.Fatal(err)
	}
	leafDER, err := x509.CreateCertificate(rand.Reader, leaf, ca, leafKey.Public(), caKey)
	if err != nil {
		t.Fatal(err)
	}
	keyDER, err := x509.MarshalPKCS8PrivateKey(leafKey)
	if err != nil {
		t.Fatal(err)
	}
	caPath, certPath, keyPath := write("ca", "CERTIFICATE", caDER), write("cert", "CERTIFICATE", leafDER), write("key", "PRIVATE KEY", keyDER)
	return func(c *tcp.Config, _ *tcp.Identity) { c.TLSCA, c.TLSCert, c.TLSKey = caPath, certPath, keyPath }
}

func TestTLS(t *testing.T) {
	certs := authority(t)
	p := start(t, "p", cache(t, nhd, 8), both(certs, shared))
	fill(t, p.cache)
	export(t, p, "r", 1, 2, 3)
	for _, tc := range []struct {
		name   string
		change func(*tcp.Config, *tcp.Identity)
		ok     bool
	}{
		{"same authority", certs, true},
		{"same authority, shared memory", both(certs, shared), true},
		{"another authority", authority(t), false},
		{"no TLS", nil, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			c := start(t, "c", cache(t, kvFirst, 8), tc.change)
			r := c.Fetch(t.Context(), pull(p.peer(), "r", c.cache, []int{1, 2, 3}, []int{4, 0, 5}))
			if (r.Err == nil) != tc.ok {
				t.Fatalf("%+v", r)
			}
			if tc.ok {
				same(t, p.cache, c.cache, []int{1, 2, 3}, []int{4, 0, 5}, nil)
			}
		})
	}
}
