package main

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"os"
	"sync"
	"time"

	"kvstrata/server"
)

// clientFlags say how to ask a server of ours.
type clientFlags struct {
	TokenFile string `help:"File whose first token the server is shown; or $KVSTRATA_TOKEN holds it." type:"path" placeholder:"FILE" env:"KVSTRATA_TOKEN_FILE"`
	CA        string `name:"ca" help:"Certificates in PEM that the server's must come from; empty: the system's." type:"path" placeholder:"FILE" env:"KVSTRATA_CA"`
}

// errNoToken is what a server answers to who shows no token, or a wrong one.
var errNoToken = errors.New("the server wants one of its tokens; give --token-file or " + server.TokenVariable)

// token returns what the server is shown; empty for nothing.
func (f clientFlags) token() (server.Secret, error) {
	var tokens []server.Secret
	var err error
	switch given := os.Getenv(server.TokenVariable); {
	case f.TokenFile != "":
		tokens, err = server.ReadTokens(f.TokenFile)
	case given != "":
		if tokens, err = server.ParseTokens([]byte(given)); err != nil {
			err = fmt.Errorf("%s: %w", server.TokenVariable, err)
		}
	default:
		return "", nil
	}
	if err != nil {
		return "", usagef("%w", err)
	}
	return tokens[0], nil
}

// client returns a client that shows the token; a timeout of 0 is none.
func (f clientFlags) client(log *slog.Logger, timeout time.Duration) (*http.Client, error) {
	transport := http.DefaultTransport.(*http.Transport).Clone()
	if f.CA != "" {
		text, err := os.ReadFile(f.CA)
		if err != nil {
			return nil, usagef("--ca: %w", err)
		}
		pool := x509.NewCertPool()
		if !pool.AppendCertsFromPEM(text) {
			return nil, usagef("--ca %s: no certificate in it", f.CA)
		}
		transport.TLSClientConfig = &tls.Config{RootCAs: pool, MinVersion: tls.VersionTLS12}
	}
	return f.showing(log, transport, timeout)
}

// local returns a client for a process on this machine, which may show a certificate of another name: it must be the very one
// in cert, unless that is empty.
func (f clientFlags) local(log *slog.Logger, cert string, timeout time.Duration) (*http.Client, error) {
	client, err := f.client(log, timeout)
	if err != nil {
		return nil, err
	}
	transport := client.Transport.(*bearer).next
	transport.Proxy = nil // what it asks is on this machine
	if cert != "" && f.CA == "" {
		transport.TLSClientConfig = &tls.Config{
			MinVersion: tls.VersionTLS12, InsecureSkipVerify: true, // VerifyConnection compares the certificate itself
			VerifyConnection: func(state tls.ConnectionState) error { return sameCertificate(cert, state.PeerCertificates[0]) },
		}
	}
	return client, nil
}

// sameCertificate compares what a server shows with a file.
func sameCertificate(file string, shown *x509.Certificate) error {
	text, err := os.ReadFile(file)
	if err != nil {
		return fmt.Errorf("--tls-cert: %w", err)
	}
	if block, _ := pem.Decode(text); block == nil || !bytes.Equal(block.Bytes, shown.Raw) {
		return fmt.Errorf("the server shows another certificate than that of --tls-cert %s", file)
	}
	return nil
}

func (f clientFlags) showing(log *slog.Logger, transport *http.Transport, timeout time.Duration) (*http.Client, error) {
	token, err := f.token()
	if err != nil {
		return nil, err
	}
	return &http.Client{
		Transport: &bearer{token: token, next: transport, log: log}, Timeout: timeout,
		// Nothing of ours redirects, and the token is for nobody else.
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}, nil
}

// bearer shows the token with each request.
type bearer struct {
	token  server.Secret
	next   *http.Transport
	log    *slog.Logger
	warned sync.Once
}

// warnInTheClear is the one line that says that a token is shown to whoever listens on the way.
func (b *bearer) warnInTheClear(host string) {
	b.warned.Do(func() {
		b.log.Warn("the token goes over the network in the clear; ask by https, or on loopback", "host", host)
	})
}

// RoundTrip sends a request.
func (b *bearer) RoundTrip(r *http.Request) (*http.Response, error) {
	if b.token != "" {
		if r.URL.Scheme == "http" && reachable(hostPort(r.URL)) {
			b.warnInTheClear(r.URL.Host)
		}
		r = r.Clone(r.Context())
		r.Header.Set("Authorization", "Bearer "+string(b.token))
	}
	return b.next.RoundTrip(r)
}

// hostPort returns where a URL leads to.
func hostPort(u *url.URL) string {
	port := u.Port()
	if port == "" {
		port = u.Scheme
	}
	return net.JoinHostPort(u.Hostname(), port)
}

// self returns a client for processes that have these listeners' tokens and certificate.
func (f listenFlags) self(log *slog.Logger, timeout time.Duration) (*http.Client, error) {
	return clientFlags{TokenFile: f.TokenFile}.local(log, f.TLSCert, timeout)
}
