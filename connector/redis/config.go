package redis

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"runtime"
	"strconv"
	"strings"
	"time"
)

// Config is what the transport takes of kv_connector_extra_config.
type Config struct {
	URL          string `json:"url"`           // redis://user:password@host:port/db, rediss:// with TLS, unix:///path
	Address      string `json:"address"`       // host:port, or the path of a socket; instead of url
	Username     string `json:"username"`      // empty = the default user
	PasswordFile string `json:"password_file"` // whose first line is the password
	PasswordEnv  string `json:"password_env"`  // variable that holds the password
	DB           int    `json:"db"`

	TLS           bool   `json:"tls"`
	TLSCA         string `json:"tls_ca"`   // PEM file of who signed the server's certificate; empty = the system's
	TLSCert       string `json:"tls_cert"` // PEM files of the client's certificate
	TLSKey        string `json:"tls_key"`
	TLSServerName string `json:"tls_server_name"`

	TTL           float64 `json:"ttl"`            // s after which a group is gone; 0 = never
	Connections   int     `json:"connections"`    // to each node
	PipelineBytes int     `json:"pipeline_bytes"` // under way on a connection: the server holds replies in memory
	Timeout       float64 `json:"timeout"`        // s of a call, and of connecting
	KeyPrefix     string  `json:"key_prefix"`     // of all keys
	Checksum      bool    `json:"checksum"`       // of payloads: written, and checked where there is one
}

// DefaultConfig returns the defaults: no server. More than 2 MiB under way on a connection falls out of the processors' caches
// on both sides, and is slower; a network of 25 Gbit/s and 200 µs is filled by a third of that.
func DefaultConfig() Config {
	return Config{
		Connections: min(runtime.GOMAXPROCS(0), 8), PipelineBytes: 2 << 20, Timeout: 10, KeyPrefix: "kv", Checksum: true,
	}
}

// Keys returns the names that [Config] has in JSON.
func Keys() []string {
	return []string{
		"url", "address", "username", "password_file", "password_env", "db", "tls", "tls_ca", "tls_cert", "tls_key", "tls_server_name",
		"ttl", "connections", "pipeline_bytes", "timeout", "key_prefix", "checksum",
	}
}

// Validate returns every problem at once. No error carries a password.
func (c *Config) Validate() error {
	var errs []error
	bad := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	switch {
	case c.URL == "" && c.Address == "":
		bad("url: missing; want redis://host:port/db, or address")
	case c.URL != "" && c.Address != "":
		bad("url and address: want one of them")
	case c.URL != "":
		if _, err := parseURL(c.URL); err != nil {
			errs = append(errs, err)
		}
	default:
		if _, _, err := net.SplitHostPort(c.Address); err != nil && !strings.HasPrefix(c.Address, "/") {
			bad("address: want host:port, or the path of a socket")
		}
	}
	if c.PasswordFile != "" && c.PasswordEnv != "" {
		bad("password_file and password_env: want one of them")
	}
	if c.DB < 0 {
		bad("db %d: want 0 or more", c.DB)
	}
	if (c.TLSCert == "") != (c.TLSKey == "") {
		bad("tls_cert and tls_key: want both or none")
	}
	if !(c.TTL == 0 || c.TTL >= 0.001 && c.TTL <= 1e9) {
		bad("ttl %v: want seconds, 0 or 0.001 to 1e9", c.TTL)
	}
	if c.Connections < 1 || c.Connections > 64 {
		bad("connections %d: want 1 to 64", c.Connections)
	}
	if c.PipelineBytes < 1<<16 || c.PipelineBytes > 1<<30 {
		bad("pipeline_bytes %d: want 65536 to 1073741824", c.PipelineBytes)
	}
	if !(c.Timeout >= 0.001 && c.Timeout <= 3600) {
		bad("timeout %v: want seconds, 0.001 to 3600", c.Timeout)
	}
	if c.KeyPrefix == "" || len(c.KeyPrefix) > 64 || strings.ContainsFunc(c.KeyPrefix, notInPrefix) {
		bad("key_prefix %q: want 1 to 64 letters, digits, '.', '_', '-', '/' or ':'", c.KeyPrefix)
	}
	return errors.Join(errs...)
}

// notInPrefix keeps out what a pattern or a cluster's hash tag gives a meaning to.
func notInPrefix(r rune) bool {
	return !(r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || strings.ContainsRune("._-/:", r))
}

// parseURL reads a server's URL. Its errors do not repeat it: it may hold a password.
func parseURL(text string) (endpoint, error) {
	var e endpoint
	u, err := url.Parse(text)
	if err != nil || u.RawQuery != "" || u.Fragment != "" || u.Opaque != "" {
		return e, errors.New("url: want redis://user:password@host:port/db, with what is special in them written %XX")
	}
	e.username = u.User.Username()
	e.password, _ = u.User.Password()
	path := strings.TrimPrefix(u.Path, "/")
	switch u.Scheme {
	case "unix":
		if e.network, e.address = "unix", u.Path; path == "" || u.Host != "" {
			return e, errors.New("url: want unix:///path/of/socket")
		}
		return e, nil
	case "redis", "valkey":
	case "rediss", "valkeys":
		e.secure = true
	default:
		return e, fmt.Errorf("url with scheme %q: want redis, rediss, valkey, valkeys or unix", u.Scheme)
	}
	host, port := u.Hostname(), u.Port()
	if host == "" {
		return e, errors.New("url: no host")
	}
	if port == "" {
		port = "6379"
	}
	e.network, e.address = "tcp", net.JoinHostPort(host, port)
	if path != "" {
		if e.db, err = strconv.Atoi(path); err != nil || e.db < 0 {
			return e, fmt.Errorf("url with path %q: want the number of a database", u.Path)
		}
	}
	return e, nil
}

// endpoint is a server, and what it takes to be let in.
type endpoint struct {
	network, address   string
	username, password string
	db                 int
	secure             bool
	tls                *tls.Config // when secure
	timeout            time.Duration
}

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }

// endpoint validates the configuration and reads the files that it names.
func (c *Config) endpoint() (endpoint, error) {
	if err := c.Validate(); err != nil {
		return endpoint{}, err
	}
	e := endpoint{network: "tcp", address: c.Address}
	switch {
	case c.URL != "":
		e, _ = parseURL(c.URL)
	case strings.HasPrefix(c.Address, "/"):
		e.network = "unix"
	}
	e.timeout = seconds(c.Timeout)
	e.secure = e.secure || c.TLS
	if c.DB > 0 {
		e.db = c.DB
	}
	if c.Username != "" {
		e.username = c.Username
	}
	if c.PasswordFile != "" {
		text, err := os.ReadFile(c.PasswordFile)
		if err != nil {
			return e, fmt.Errorf("password_file: %w", err)
		}
		line, _, _ := strings.Cut(string(text), "\n")
		e.password = strings.TrimSuffix(line, "\r")
	}
	if c.PasswordEnv != "" {
		password, ok := os.LookupEnv(c.PasswordEnv)
		if !ok {
			return e, fmt.Errorf("password_env %s: the variable is not set", c.PasswordEnv)
		}
		e.password = password
	}
	if e.secure {
		if err := e.readCertificates(c); err != nil {
			return e, err
		}
	}
	return e, nil
}

func (e *endpoint) readCertificates(c *Config) error {
	e.tls = &tls.Config{MinVersion: tls.VersionTLS12, ServerName: c.TLSServerName}
	if c.TLSCA != "" {
		pem, err := os.ReadFile(c.TLSCA)
		if err != nil {
			return fmt.Errorf("tls_ca: %w", err)
		}
		e.tls.RootCAs = x509.NewCertPool()
		if !e.tls.RootCAs.AppendCertsFromPEM(pem) {
			return fmt.Errorf("tls_ca %s: no certificate in it", c.TLSCA)
		}
	}
	if c.TLSCert != "" {
		cert, err := tls.LoadX509KeyPair(c.TLSCert, c.TLSKey)
		if err != nil {
			return fmt.Errorf("tls_cert, tls_key: %w", err)
		}
		e.tls.Certificates = []tls.Certificate{cert}
	}
	return nil
}

// name says where the server is, without secrets.
func (e *endpoint) name() string {
	if e.network == "unix" {
		return "unix://" + e.address
	}
	scheme := "redis"
	if e.secure {
		scheme = "rediss"
	}
	return fmt.Sprintf("%s://%s/%d", scheme, e.address, e.db)
}
